"""The family `cpu_gemm` as the search sees it: the extension's list, and rules that each refuse something."""

from __future__ import annotations

import pytest

from ktlib import _core
from ktlib.problem import DTYPES, Problem
from ktlib_generator.families import cpu_gemm, registry
from ktlib_generator.families.base import Device, refusals
from ktlib_generator.families.cpu_gemm import CpuGemm
from ktlib_generator.values import Binary, Variant

FAMILY = CpuGemm()


def device(arch: str = "cpu-x86_64_v3") -> Device:
    return Device(kind="cpu", name="test", arch=arch, sm_count=2)


def variant(arch: str = "cpu-x86_64_v3", **changes: int | str) -> Variant:
    config: dict[str, int | str] = {"dtype": "fp32", "tile_m": 6, "tile_n": 16, "unroll": 2, "loop": "mn"}
    return Variant.make("cpu_gemm", arch, **{**config, **changes})


def test_extension_and_family_list_the_same_instances() -> None:
    compiled = {(c["dtype"], c["tile_m"], c["tile_n"], c["unroll"], c["loop"]) for c in _core.cpu_kernels()}
    listed = {(dtype, *instance) for dtype in cpu_gemm.DTYPES for instance in cpu_gemm.INSTANCES}
    assert compiled == listed
    assert len(_core.cpu_kernels()) == len(listed)
    assert sorted(cpu_gemm.DTYPES) == sorted(DTYPES)
    assert set(_core.cpu_archs()) <= set(cpu_gemm.ARCHS)


def test_every_compiled_instance_can_be_searched_on_some_arch() -> None:
    large = [Problem(512, 512, 512, dtype=dtype) for dtype in cpu_gemm.DTYPES]
    found = {v for arch in cpu_gemm.ARCHS for p in large for v in FAMILY.variants(p, device(arch))}
    assert len({v.config for v in found}) == len(cpu_gemm.INSTANCES) * len(cpu_gemm.DTYPES)


@pytest.mark.parametrize("arch", cpu_gemm.ARCHS)
@pytest.mark.parametrize("dtype", cpu_gemm.DTYPES)
def test_every_product_has_a_variant_and_every_variant_a_kernel(arch: str, dtype: str) -> None:
    for m in (1, 2, 3, 7, 64):
        for n in (1, 4, 9, 33, 100):
            names = [str(v) for v in FAMILY.variants(Problem(m, n, 5, dtype=dtype), device(arch))]
            assert names, f"{m}x{n}"
            assert len(set(names)) == len(names)
            if arch in _core.cpu_archs():
                assert [_core.CpuKernel(name).name for name in names] == names


@pytest.mark.parametrize(
    ("refused", "problem", "reason"),
    [
        (variant(unroll=4), Problem(64, 64, 64, dtype="fp32"), "compiled with this combination"),
        (
            variant(arch="cpu-portable", tile_m=4),
            Problem(64, 64, 64, dtype="fp32"),
            "compiled for the device's arch",
        ),
        (variant(), Problem(64, 64, 64, dtype="fp16"), "reads the problem's dtype"),
        (variant(dtype="fp16"), Problem(64, 64, 64, dtype="fp16", accumulate="fp16"), "accumulates in fp32"),
        (variant(), Problem(64, 64, 64, dtype="fp32", batch=2), "batch 1"),
        (variant(), Problem(64, 64, 0, dtype="fp32"), "empty product"),
        (variant(), Problem(3, 64, 64, dtype="fp32"), "taller than twice"),
        (variant(), Problem(64, 8, 64, dtype="fp32"), "wider than twice"),
        (
            variant(tile_m=8, tile_n=32, unroll=1),
            Problem(64, 64, 64, dtype="fp32"),
            "fit the arch's vector registers",
        ),
        (variant(loop="nm"), Problem(6, 64, 64, dtype="fp32"), "one row or column of tiles"),
    ],
)
def test_each_rule_refuses_with_its_reason(refused: Variant, problem: Problem, reason: str) -> None:
    assert not refusals(FAMILY, variant(), Problem(64, 64, 64, dtype="fp32"), device())
    reasons = refusals(FAMILY, refused, problem, device())
    assert any(reason in text for text in reasons), reasons
    assert refused not in list(FAMILY.variants(problem, device()))


def test_a_gpu_gets_no_cpu_variant() -> None:
    gpu = Device(kind="cuda", name="test", arch="sm90a", sm_count=132)
    assert list(FAMILY.variants(Problem(64, 64, 64), gpu)) == []


def test_facts_name_the_kernel_as_the_extension_finds_it() -> None:
    chosen = variant(arch="cpu-portable", tile_m=4, unroll=1)
    binary = Binary("builtin", "", "0" * 64, "0" * 64, 0, 0, 0)
    facts = FAMILY.kernel_facts(chosen, binary)
    assert _core.CpuKernel(facts.name).dtype == facts.dtype == "fp32"
    assert (facts.abi, facts.layout, facts.tile_m, facts.tile_n) == ("cpu_gemm_v1", "any", 4, 16)
    assert FAMILY.build_request(chosen) is None


def test_registry_finds_families_by_name_and_by_device() -> None:
    assert [family.name for family in registry.FAMILIES] == ["sm90_tma", "cpu_gemm"]
    assert registry.family("cpu_gemm").device_kind == "cpu"
    assert [family.name for family in registry.families_for(device())] == ["cpu_gemm"]
    with pytest.raises(ValueError, match="family 'gemm' is unknown \\(have: sm90_tma, cpu_gemm\\)"):
        registry.family("gemm")
