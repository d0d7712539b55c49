"""`make demo`: the whole line on this machine. Without a GPU: tune the CPU family, verify, pack, call.

With a GPU, the shipped database against torch.matmul. Writes only under demo_out/; figures printed here are a
demonstration on whatever machine this is, not results.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ktlib
from ktlib import _core
from ktlib.problem import Problem

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "demo_out"
SUITE = ROOT / "benchmarks" / "suites" / "cpu_demo.toml"
SEARCH_BUDGET = "80s"
SAMPLES = 41
SAMPLE_NS = (
    300_000  # calls of one sample together take about this long, so that the clock's step does not count
)
GPU_ROWS = 16
DEFAULT_COLUMNS = 120  # where no terminal says how wide it is


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    problem: str
    arrays: str
    kernel: str  # its parameters, or why there is none
    tier: str
    ktlib_us: float
    baseline_us: float
    error: float


def main() -> int:
    """Run the demo that fits this machine; return 0 when every product was right."""
    os.chdir(ROOT)
    reason = _core.cuda_status()
    torch = _torch()
    if not reason and torch is not None and torch.cuda.is_available():
        return _report(gpu_rows(torch), "torch.matmul")
    print(f"No GPU ({reason or 'no torch with CUDA'}): the CPU family shows the same line.")
    pack = tune_and_pack()
    ktlib.load_database(str(pack))
    problems = _suite().problems
    rows = [numpy_row(problem) for problem in problems if problem.dtype != "bf16"]
    if torch is not None:
        torch.set_num_threads(1)
        rows += [torch_row(problem, torch) for problem in problems]
    else:
        print(
            "\ntorch is not installed: NumPy arrays only (NumPy has no bf16, so its problem is not called)."
        )
    return _report(rows, "numpy.matmul, torch.matmul for torch arrays")


def tune_and_pack() -> Path:
    """Search, verify, merge into HDF5 and pack, with the commands that a user would type."""
    shutil.rmtree(OUT, ignore_errors=True)
    profile = _core.cpu_archs()[0]
    database, pack = OUT / f"{profile}.h5", OUT / f"{profile}.ktpack"
    run = ["--run-dir", OUT / "run", "--database", database]
    _step("Search", "tune", "--problems", SUITE, "--profile", profile, "--budget", SEARCH_BUDGET, *run)
    _step("Check what was written", "verify", database)
    _step("Pick winners and pack", "pack", database, "--output", pack)
    return pack


def _step(title: str, *words: str | Path) -> None:
    from ktlib_generator.cli import main as ktlib_build

    shown = [str(word.relative_to(ROOT)) if isinstance(word, Path) else word for word in words]
    print(f"\n{title}\n$ ktlib-build {' '.join(shown)}", flush=True)
    status = ktlib_build(shown)
    if status != 0:
        raise SystemExit(status)


def numpy_row(problem: Problem) -> Row:
    """Call with NumPy arrays beside numpy.matmul."""
    rng = np.random.default_rng(0)
    dtype = np.float32 if problem.dtype == "fp32" else np.float16

    def operand(rows: int, columns: int, kind: str) -> Any:
        if kind == "n":
            return rng.standard_normal((rows, columns)).astype(dtype)
        return rng.standard_normal((columns, rows)).astype(dtype).T

    a = operand(problem.m, problem.k, problem.layout[0])
    b = operand(problem.k, problem.n, problem.layout[1])
    ours_us, baseline_us = interleaved(lambda: ktlib.matmul(a, b), lambda: np.matmul(a, b))
    return _row(
        problem, "numpy", ktlib.explain(a, b), ours_us, baseline_us, relative_error(ktlib.matmul(a, b), a, b)
    )


def torch_row(problem: Problem, torch: Any) -> Row:
    """Call with torch CPU tensors beside torch.matmul."""
    a, b = _torch_operands(problem, torch, "cpu")
    ours_us, baseline_us = interleaved(lambda: ktlib.matmul(a, b), lambda: torch.matmul(a, b))
    result = ktlib.matmul(a, b).double().numpy()
    error = relative_error(result, a.double().numpy(), b.double().numpy())
    return _row(problem, "torch", ktlib.explain(a, b), ours_us, baseline_us, error)


def gpu_rows(torch: Any) -> list[Row]:
    """Call tuned problems of the shipped database beside torch.matmul, in graph-free back-to-back calls."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    problems = {
        Problem.parse(entry["problem"])
        for pack in ktlib.databases()
        for entry in _core.pack_info(pack["path"])["entries"]
        if not pack["arch"].startswith("cpu-")
    }
    if not problems:
        print("No database for this GPU is shipped; ktlib-build tune makes one. These calls go to torch:")
        problems = {Problem(64, 64, 64), Problem(1024, 1024, 1024), Problem(4096, 4096, 4096, "nt", "bf16")}
    ordered = sorted(problems, key=lambda p: (p.flops, str(p)))
    step = max(1, len(ordered) // GPU_ROWS)
    return [_gpu_row(problem, torch) for problem in ordered[::step][:GPU_ROWS]]


def _gpu_row(problem: Problem, torch: Any) -> Row:
    a, b = _torch_operands(problem, torch, "cuda")
    ours_us, baseline_us = interleaved(
        lambda: ktlib.matmul(a, b), lambda: torch.matmul(a, b), wait=torch.cuda.synchronize
    )
    rows = slice(0, problem.m, max(1, problem.m // 64))  # a sample: an fp64 product of all rows takes long
    result, left, right = ktlib.matmul(a, b)[rows].double(), a[rows].double(), b.double()
    scale = left.abs() @ right.abs()
    error = float(((result - left @ right).abs() / scale.clamp_min(1e-300)).max())
    return _row(problem, "torch", ktlib.explain(a, b), ours_us, baseline_us, error)


def interleaved(
    ours: Callable[[], object], baseline: Callable[[], object], wait: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Return medians in microseconds a call, both sides sampled in turn and in alternating order."""
    calls = max(1, SAMPLE_NS // max(1, _sample_ns(baseline, 3, wait) // 3))
    samples: dict[Callable[[], object], list[float]] = {ours: [], baseline: []}
    for _ in range(3):
        _sample_ns(ours, calls, wait), _sample_ns(baseline, calls, wait)
    for index in range(SAMPLES):
        for side in (ours, baseline) if index % 2 else (baseline, ours):
            samples[side].append(_sample_ns(side, calls, wait) / calls / 1000)
    return statistics.median(samples[ours]), statistics.median(samples[baseline])


def _sample_ns(call: Callable[[], object], calls: int, wait: Callable[[], object]) -> int:
    wait()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    wait()
    return time.perf_counter_ns() - begin


def relative_error(result: Any, a: Any, b: Any) -> float:
    """Largest error against fp64, relative to |A||B|, so that cancellation does not inflate it."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    return float(np.max(np.abs(result - left @ right) / (np.abs(left) @ np.abs(right))))


def _row(problem: Problem, arrays: str, choice: Any, ours_us: float, baseline_us: float, error: float) -> Row:
    return Row(str(problem), arrays, short_reason(choice), choice.tier, ours_us, baseline_us, error)


def short_reason(choice: Any) -> str:
    """Say in a few words which kernel was chosen, or why none was; `ktlib explain` has the rest."""
    if choice.kernel:
        config = choice.kernel.split("/")[1].split(",")
        return ",".join(part for part in config if not part.startswith(("dtype=", "layout=")))
    if not choice.latency_us or not choice.vendor_us:
        return str(choice.reason.removeprefix("vendor: "))
    return "within the noise" if choice.latency_us < choice.vendor_us else "vendor faster"


def _report(rows: Sequence[Row], baseline: str) -> int:
    print(f"\nCall: microseconds a call from Python (medians, interleaved)\nbaseline: {baseline}\n")
    print("\n".join(table(rows, shutil.get_terminal_size((DEFAULT_COLUMNS, 0)).columns)))
    print("\nerror: largest |C - C64| / (|A||B|). Why a choice was made: ktlib explain PROBLEM")
    wrong = [row.problem for row in rows if not row.error < _tolerance(Problem.parse(row.problem))]
    if wrong:
        print(f"wrong results: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def table(rows: Sequence[Row], columns: int) -> list[str]:
    """Lay the rows out in lines no wider than `columns`, as far as the figures allow."""
    width = max(len(row.problem) for row in rows)
    head = f"{'problem':{width}} {'array':5} {'ktlib':>8} {'baseline':>8} {'ratio':>6} {'error':>7}"
    lines = [f"{head} {'tier':6} kernel, or why none"]
    for row in rows:
        figures = f"{row.ktlib_us:8.2f} {row.baseline_us:8.2f} {row.baseline_us / row.ktlib_us:5.2f}x"
        begin = f"{row.problem:{width}} {row.arrays:5} {figures} {row.error:7.1e} {row.tier:6} "
        room = max(16, columns - len(begin))
        lines.append(begin + (row.kernel if len(row.kernel) <= room else f"{row.kernel[: room - 3]}..."))
    return lines


def _tolerance(problem: Problem) -> float:
    # One rounding of the output, plus fp32 accumulation over k.
    output = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}[problem.dtype]
    return output * 1.01 + (problem.k / 16 + 8) * 2.0**-22


def _torch_operands(problem: Problem, torch: Any, device: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[problem.dtype]

    def operand(rows: int, columns: int, kind: str) -> Any:
        shape = (rows, columns) if kind == "n" else (columns, rows)
        stored = torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
        return stored if kind == "n" else stored.t()

    return operand(problem.m, problem.k, problem.layout[0]), operand(problem.k, problem.n, problem.layout[1])


def _suite() -> Any:
    from ktlib_generator.problems import read_suite

    return read_suite(SUITE)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


if __name__ == "__main__":
    sys.exit(main())
