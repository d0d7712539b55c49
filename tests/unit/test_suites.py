"""Every suite file reads, says where it is from, and the ones made by a rule are what the rule makes."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest

from ktlib_generator.problems import GRID_EXTENTS, read_suite

SUITES = Path(__file__).parents[2] / "benchmarks" / "suites"


@pytest.fixture
def maker(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(checkout)
    return importlib.import_module("benchmarks.make_suites")


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.toml")), ids=lambda path: path.stem)
def test_suite_is_named_as_its_file_and_every_line_of_it_is_a_problem_of_its_own(path: Path) -> None:
    suite = read_suite(path)
    assert suite.name == path.stem
    assert len(suite.origin) > 20
    listed = sum(
        line.split("#")[0].count('"') // 2
        for line in path.read_text().splitlines()
        if line.startswith("    ")
    )
    # `read_suite` drops repeats silently; a repeat would be timed once but counted twice by a reader.
    assert len(suite.problems) == listed


@pytest.mark.parametrize("name", ["llm.toml", "odd.toml", "unseen.toml"])
def test_file_is_what_its_rule_makes(maker: ModuleType, name: str) -> None:
    assert (SUITES / name).read_text() == maker.suites()[name], "run python -m benchmarks.make_suites"


def test_llm_has_every_layer_of_every_model_at_every_count_of_tokens(maker: ModuleType) -> None:
    problems = read_suite(SUITES / "llm.toml").problems
    shapes = {(p.m, p.n, p.k) for p in problems}
    assert {(p.layout, p.dtype) for p in problems} == {("nt", "bf16")}
    assert len(maker.MODELS) >= 8
    for model in maker.MODELS:
        for n, k in model.layers.values():
            assert all((m, n, k) in shapes for m in maker.TOKENS), model.name
    assert tuple(2**power for power in range(14)) == maker.TOKENS


# Written out, so that a slip in the rule does not move rule and file together.
@pytest.mark.parametrize(
    ("model", "layer", "n", "k"),
    [
        ("Llama 3 8B", "qkv", 6144, 4096),
        ("Llama 3 70B", "down", 8192, 28672),
        ("Llama 3.1 405B", "gate and up", 106496, 16384),
        ("DeepSeek V3", "query down and latent", 2112, 7168),
        ("DeepSeek V3", "query up", 24576, 1536),
        ("DeepSeek V3", "key and value up", 32768, 512),
        ("DeepSeek V3", "expert gate and up", 4096, 7168),
        ("GPT-OSS 120B", "expert gate and up", 5760, 2880),
    ],
)
def test_llm_layers_have_their_models_sizes(
    maker: ModuleType, model: str, layer: str, n: int, k: int
) -> None:
    (found,) = [known for known in maker.MODELS if known.name == model]
    assert found.layers[layer] == (n, k)


def test_llm_names_a_source_beside_each_model(maker: ModuleType) -> None:
    text = (SUITES / "llm.toml").read_text().replace("\n    # ", " ")
    for model in maker.MODELS:
        assert f"{model.name}: {model.source}." in text


def test_odd_has_no_problem_that_every_kernel_serves_without_a_tail() -> None:
    for problem in read_suite(SUITES / "odd.toml").problems:
        assert any(extent % 64 for extent in (problem.m, problem.n, problem.k)), problem
    aligned = [p for p in read_suite(SUITES / "odd.toml").problems if p.align == 16]
    assert len(aligned) < len(read_suite(SUITES / "odd.toml").problems) / 4


def test_unseen_is_spread_over_sizes_and_half_of_it_has_unaligned_rows() -> None:
    problems = read_suite(SUITES / "unseen.toml").problems
    assert len(problems) == 300
    assert sum(p.n % 8 == 0 and p.k % 8 == 0 for p in problems) >= 150
    assert sum(p.align < 16 for p in problems) >= 100
    for axis in ("m", "n", "k"):
        # Logarithmically uniform: the median is near the middle of 16..16384 on a logarithmic axis, 512.
        middle = sorted(getattr(p, axis) for p in problems)[150]
        assert abs(math.log2(middle / 512)) < 1
    grid = {(m, n, k) for m in GRID_EXTENTS for n in GRID_EXTENTS for k in GRID_EXTENTS}
    assert not grid & {(p.m, p.n, p.k) for p in problems}


def test_tiny_is_tiny_and_batched_is_batched() -> None:
    assert max(p.flops for p in read_suite(SUITES / "tiny.toml").problems) < 1e7
    assert min(p.batch for p in read_suite(SUITES / "batched.toml").problems) > 1
