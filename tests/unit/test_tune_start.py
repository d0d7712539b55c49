"""What a run refuses before it writes anything, and what a dry run says of it."""

from __future__ import annotations

import pytest
from tune_fakes import DEVICE, GPU, PROBLEMS, SUITE, TableWorker, run

from ktlib.problem import Problem
from ktlib_generator.budget import Budget
from ktlib_generator.build.cache import BinaryCache
from ktlib_generator.families.cpu_gemm import CpuGemm
from ktlib_generator.families.sm90_tma import Sm90Tma
from ktlib_generator.plan import make_plan
from ktlib_generator.problems import Suite
from ktlib_generator.run_dir import records_of
from ktlib_generator.start import TuneError, why_unserved

BATCHED = Problem(32, 32, 32, dtype="fp32", batch=3)
BATCH_REASON = "cpu_gemm: one call computes one product (batch 1)"


@pytest.fixture
def paths(tmp_path):
    return {"run_dir": tmp_path / "run", "database": tmp_path / "db" / "cpu.h5"}


def test_a_problem_no_family_serves_is_named_and_the_others_are_tuned(paths):
    summary = run(paths, suite=Suite("two", "test", (BATCHED, PROBLEMS[0])))
    assert set(summary.unserved) == {BATCHED}
    assert set(summary.winners) == {PROBLEMS[0]}
    assert f"no kernel    1 problem: {BATCHED} ({BATCH_REASON})" in str(summary)


def test_nothing_served_at_all_is_refused_with_the_reason_and_writes_nothing(paths):
    before = set(paths["run_dir"].parent.rglob("*"))
    with pytest.raises(TuneError) as refusal:
        run(paths, suite=Suite("one", "test", (BATCHED,)))
    assert str(refusal.value).startswith("nothing to tune on cpu-x86_64_v3: ")
    assert f"1 problem: {BATCHED} ({BATCH_REASON})" in str(refusal.value)
    assert set(paths["run_dir"].parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("problem", "reasons"),
    [
        (Problem(64, 64, 64, dtype="fp32"), "tensor cores take fp16 and bf16 here, accumulating in fp32"),
        (Problem(64, 64, 64, "tt"), "the kernel reads A row-major, B row-major or transposed (nn, nt)"),
        (Problem(64, 64, 63), "TMA needs 16-byte aligned addresses and row strides"),
    ],
)
def test_the_reason_named_is_the_one_that_no_variant_escapes(problem, reasons):
    assert list(Sm90Tma().variants(problem, GPU)) == []
    assert why_unserved((Sm90Tma(),), problem, GPU) == f"sm90_tma: {reasons}"


def test_trials_of_another_protocol_do_not_count_as_done(paths):
    run(paths, protocol="cpu-stream", budget=Budget(trials_per_problem=1))
    before = {path: path.read_bytes() for path in (paths["database"], paths["run_dir"] / "journal.jsonl")}
    says = "holds 3 trials of these problems timed by cpu-stream, this run is for cpu-loop"
    with pytest.raises(TuneError, match=says):
        run(paths, protocol="cpu-loop", resume=True)
    assert before == {path: path.read_bytes() for path in before}
    assert run(paths, resume=True, budget=Budget(trials_per_problem=2)).new_trials == 3
    other = Suite("other", "test", (Problem(16, 16, 16, dtype="fp32"),))
    worker = TableWorker()
    run(paths, worker, suite=other, protocol="cpu-loop", resume=True)
    assert {job.protocol for job in worker.jobs} == {"cpu-loop"}, "a problem without trials may take any"


def test_dry_run_counts_without_doing(paths, tmp_path):
    run(paths, budget=Budget(trials_per_problem=2))
    plan = make_plan(
        SUITE,
        DEVICE,
        (CpuGemm(),),
        records_of(paths["run_dir"]),
        budget=Budget(trials_per_problem=5),
        strategy="exhaustive",
        protocol="",
        jobs=2,
        cache=BinaryCache(tmp_path / "cache"),
        **paths,
    )
    assert plan.made == 6
    assert plan.trials == 9
    assert plan.compiles == 0
    text = str(plan)
    for word in ("a CPU", str(PROBLEMS[0]), "9 to make, 6 made before", str(paths["database"])):
        assert word in text
