"""The nvcc builder: what it accepts, what it refuses, and that its output is reproducible."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ktlib.problem import Problem
from ktlib_generator.build import nvcc, toolkit
from ktlib_generator.build.sass import disassemble, loops
from ktlib_generator.build.sources import kernel_sources
from ktlib_generator.families.base import BuildRequest, Device
from ktlib_generator.families.sm90_tma import TILES, Sm90Tma
from ktlib_generator.values import Binary, BuildFailure, Variant

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "golden_cubins.json").read_text())
H200 = Device("cuda", "NVIDIA H200", "sm90a", 132, 232448)
FAMILY = Sm90Tma()
REPORT = (
    "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
    "    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 72 registers, used 16 barriers{smem}\n"
)


def _has_nvcc() -> bool:
    try:
        nvcc.find_nvcc()
    except toolkit.ToolchainError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not _has_nvcc(), reason="no nvcc here (pip install 'ktlib[nvcc]')")


def no_toolkit(monkeypatch) -> None:
    monkeypatch.setattr(toolkit.os, "access", lambda path, mode: False)


def request(symbol: str = "k", **defines: str) -> BuildRequest:
    return BuildRequest(kernel_sources() / "sm90" / "gemm_tma.cu", symbol, "sm90a", tuple(defines.items()))


def judge(report: str) -> Binary | BuildFailure:
    return nvcc._judge(request(), b"image", report, "/bin/false")


def test_serialised_wgmma_in_the_log_is_a_failure():
    report = REPORT.format(spills=0, smem="") + "ptxas info : (C7510) Potential Performance Loss"
    result = judge(report)
    assert isinstance(result, BuildFailure)
    assert "C7510" in result.reason


def test_too_much_static_shared_memory_is_a_failure_with_both_numbers():
    result = judge(REPORT.format(spills=0, smem=", 240000 bytes smem"))
    assert isinstance(result, BuildFailure)
    assert "240000" in result.reason
    assert "232448" in result.reason


def test_spills_without_a_disassembler_are_a_failure(monkeypatch):
    no_toolkit(monkeypatch)
    result = judge(REPORT.format(spills=16, smem=""))
    assert isinstance(result, BuildFailure)
    assert "16 bytes of spills" in result.reason


@pytest.mark.parametrize(
    "report", ["", "ptxas info : Used 7 registers", REPORT.format(spills=0, smem="") * 2]
)
def test_a_report_that_is_not_understood_is_a_failure_not_a_guess(report):
    assert isinstance(judge(report), BuildFailure)


def test_missing_nvcc_says_what_to_install(monkeypatch):
    no_toolkit(monkeypatch)
    with pytest.raises(toolkit.ToolchainError, match=r"pip install 'ktlib\[nvcc\]'"):
        nvcc.find_nvcc()


def golden_variants() -> list[Variant]:
    return [Variant.parse(text) for text in GOLDEN["cubins"]]


@needs_nvcc
@pytest.mark.parametrize("variant", golden_variants(), ids=str)
def test_cubins_are_byte_identical_to_the_golden_ones(variant):
    if nvcc.nvcc_version() != GOLDEN["nvcc"]:
        pytest.skip(f"golden hashes are nvcc {GOLDEN['nvcc']}'s, here is {nvcc.nvcc_version()}")
    binary = nvcc.compile_cubin(FAMILY.build_request(variant), timeout_s=120)
    assert isinstance(binary, Binary), binary
    assert binary.sha256 == GOLDEN["cubins"][str(variant)]
    assert binary.spill_bytes == 0


@needs_nvcc
def test_wgmma_that_ptxas_serialises_does_not_build(tmp_path):
    source = tmp_path / "serialised_wgmma.cu"
    source.write_text((DATA / "serialised_wgmma.cu").read_text())
    sm90 = kernel_sources() / "sm90"
    failing = BuildRequest(source, "k", "sm90a", (("KT_SYMBOL", "k"),), (f"-I{sm90}",))
    result = nvcc.compile_cubin(failing, timeout_s=120)
    assert isinstance(result, BuildFailure)
    assert "C7510" in result.reason


@needs_nvcc
def test_spills_inside_the_main_loop_do_not_build():
    variant = golden_variants()[-1]
    good = FAMILY.build_request(variant)
    # Five CTAs a SM leave 45 registers a thread for 64 accumulators.
    crowded = {**dict(good.defines), "KT_CTAS_PER_SM": "5"}
    result = nvcc.compile_cubin(dataclasses.replace(good, defines=tuple(crowded.items())), timeout_s=120)
    assert isinstance(result, BuildFailure)
    assert "spills" in result.reason or "registers" in result.reason


@needs_nvcc
def test_a_ring_that_exceeds_shared_memory_does_not_build():
    variant = next(v for v in golden_variants() if v["schedule"] == "coop")
    good = FAMILY.build_request(variant)
    deeper = {**dict(good.defines), "KT_STAGES": "5"}
    result = nvcc.compile_cubin(dataclasses.replace(good, defines=tuple(deeper.items())), timeout_s=120)
    assert isinstance(result, BuildFailure)
    assert "227 KiB" in result.reason


@needs_nvcc
def test_main_loop_issues_wgmma_and_tma():
    variant = golden_variants()[0]
    binary = nvcc.compile_cubin(FAMILY.build_request(variant), timeout_s=120)
    assert isinstance(binary, Binary)
    try:
        sass = disassemble(binary.data)
    except toolkit.ToolchainError as error:
        pytest.skip(str(error))
    main_loop = next(body for body in loops(sass) if any("HGMMA" in text for text in body))
    steps = sum("HGMMA" in text for text in main_loop)
    assert steps % 4 == 0, f"four k16 steps a stage (ptxas may unroll), got {steps}"
    assert "UTMALDG" in sass
    assert "UTMASTG" in sass


def test_source_key_changes_with_source_flags_defines_and_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(nvcc, "nvcc_version", lambda nvcc=None: "13.0.88")
    source = tmp_path / "k.cu"
    source.write_text("a")
    base = BuildRequest(source, "k", "sm90a", (("A", "1"),))
    key = nvcc.source_key(base)
    others = [
        nvcc.source_key(dataclasses.replace(base, symbol="l")),
        nvcc.source_key(dataclasses.replace(base, arch="sm80")),
        nvcc.source_key(dataclasses.replace(base, defines=(("A", "2"),))),
        nvcc.source_key(dataclasses.replace(base, flags=("-lineinfo",))),
    ]
    (tmp_path / "helper.cuh").write_text("b")
    others.append(nvcc.source_key(base))
    (tmp_path / "helper.cuh").unlink()
    source.write_text("c")
    others.append(nvcc.source_key(base))
    source.write_text("a")
    assert nvcc.source_key(base) == key
    monkeypatch.setattr(nvcc, "nvcc_version", lambda nvcc=None: "13.1.80")
    others.append(nvcc.source_key(base))
    assert len({key, *others}) == len(others) + 1


def test_family_serves_what_tma_can_address_and_nothing_else():
    def count(text: str) -> int:
        return sum(1 for _ in FAMILY.variants(Problem.parse(text), H200))

    assert count("4096x4096x4096") == count("4096x4096x4096:nt:bf16") > 40
    assert count("333x1000x72") > 0
    assert count("333x1001x72:nt") > 0, "an odd N only makes C unaligned, which is stored plainly"
    assert count("333x1001x72") == 0, "a row of B is not 16-byte aligned"
    assert count("64x64x68") == 0
    assert count("64x64x64:nn:fp16:align=2") == 0
    assert count("64x64x64:tn") == 0
    assert count("64x64x64:nn:fp32") == 0
    assert count("64x64x64:batch=2") == 0
    assert count("64x0x64") == 0


def test_facts_leave_out_the_run_time_raster_and_fit_shared_memory():
    names = set()
    for variant in FAMILY.variants(Problem(4096, 4096, 4096), H200):
        binary = Binary("cubin", FAMILY.build_request(variant).symbol, "0" * 64, "0" * 64, 100, 0, 0)
        facts = FAMILY.kernel_facts(variant, binary)
        names.add(facts.name)
        assert "group_m" not in facts.name
        assert facts.smem_bytes <= 227 * 1024
        assert facts.ctas_per_sm * (facts.smem_bytes + 1024) <= 228 * 1024
    assert len(names) == sum(1 for t in TILES for s in (3, 4, 6, 8) if t.smem_bytes(s) <= 227 * 1024)


@needs_nvcc
def test_shipped_cubins_rebuild_byte_for_byte():
    """Of the kernels whose source is still what the database was tuned with; a quarter of them, for time."""
    from ktlib_generator.store import read_database

    shipped = Path(__file__).parents[2] / "tuning_db" / "sm90a-132.h5"
    if not shipped.is_file():
        pytest.skip("the tests run outside a checkout")
    variants = {r.binary.sha256: r for r in read_database(shipped).records if r.binary is not None}
    current = [
        record
        for record in variants.values()
        if record.binary.source == nvcc.source_key(FAMILY.build_request(record.variant))
    ]
    if not current:
        pytest.skip("the source or the compiler has changed since the database was tuned")
    for record in sorted(current, key=lambda r: str(r.variant))[::4]:
        binary = nvcc.compile_cubin(FAMILY.build_request(record.variant), timeout_s=120)
        assert isinstance(binary, Binary)
        assert binary.sha256 == record.binary.sha256
