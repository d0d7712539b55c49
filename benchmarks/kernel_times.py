"""Times a database's problems against the vendor: `python -m benchmarks.kernel_times DB --out FILE`.

`ktlib` is the call as dispatched, `ktlib_own` the best own kernel of the records, whether or not dispatch
takes it; baselines are `torch` and `cublaslt_heuristic`, and `control` is `torch` a second time. All are
captured in CUDA graphs and replayed interleaved (protocol `graph-hot`).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import ktlib
from benchmarks.results import write_rows
from ktlib.problem import Problem
from ktlib_generator.families.base import Device
from ktlib_generator.families.registry import family
from ktlib_generator.measure.arrays import arrays_for
from ktlib_generator.measure.baselines import TorchMatmul, vendor_routine
from ktlib_generator.measure.candidate import load
from ktlib_generator.measure.cuda_timer import CudaSource
from ktlib_generator.measure.device import detect, environment
from ktlib_generator.measure.operands import Operand
from ktlib_generator.measure.timer import interleave
from ktlib_generator.report.rows import COLUMNS
from ktlib_generator.report.speedups import CLASSES, class_of, geomean
from ktlib_generator.store import read_database
from ktlib_generator.values import Measurement, Record, Status

BUDGET_S = 0.25


def main() -> int:
    """Measure every problem of the database and print geometric means by class, and every loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", default="cudal2_40")
    arguments = parser.parse_args()
    device, database = detect(), read_database(arguments.database)
    best: dict[Problem, Record] = {}
    for record in database.records:
        if record.status is not Status.OK or record.variant.is_vendor or record.measurement is None:
            continue
        held = best.get(record.problem)
        if held is None or (record.speedup or 0.0) > (held.speedup or 0.0):
            best[record.problem] = record
    rows, ratios = [], []
    for problem in sorted(best, key=lambda p: p.flops):
        times = measure(problem, best[problem], database.binaries, device)
        rows += [row(arguments.suite, problem, method, *found) for method, found in times.items()]
        ratios.append((problem, {method: found[0] for method, found in times.items()}, times["ktlib"][4]))
    write_rows(arguments.out, environment(device), COLUMNS, rows)
    report(ratios)
    return 0


class Dispatched(TorchMatmul):
    """ktlib.matmul(out=), as a user calls it."""

    method = "ktlib"

    def run(self, a: Operand, b: Operand, c: Operand, stream: int) -> None:
        torch = self._torch
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            ktlib.matmul(a.logical, b.logical, out=c.logical)


def measure(problem: Problem, record: Record, binaries: Any, device: Device) -> dict[str, Any]:
    """Return method -> (median us, spread, samples, kernel, tier), measured interleaved."""
    assert record.binary is not None
    owner = family(record.variant.family)
    facts, launch = owner.kernel_facts(record.variant, record.binary), owner.launch_parameters(record.variant)
    binary = dataclasses.replace(record.binary, data=binaries[record.binary.sha256])
    source = CudaSource(problem, device, arrays_for(device), "graph-hot", seed=1)
    a, b, _ = source.sets.own[0]
    choice = ktlib.explain(a.logical, b.logical)
    methods: dict[str, tuple[Any, str, str]] = {
        "ktlib": (Dispatched(problem, "cuda"), choice.kernel, choice.tier),
        "ktlib_own": (load(record.variant, problem, binary, facts, launch, "cuda"), facts.name, "own"),
    }
    for method in ("torch", "cublaslt_heuristic"):
        methods[method] = (vendor_routine(method, problem, "cuda"), "", "vendor")
    methods["control"] = (vendor_routine("torch", problem, "cuda"), "", "vendor")
    samplers = [source.sampler(method, True) for method, _, _ in methods.values()]
    columns = interleave(samplers, budget_s=BUDGET_S, min_rounds=11, max_rounds=41)
    result = {}
    for (name, (_, kernel, tier)), samples in zip(methods.items(), columns, strict=True):
        found = Measurement(name, "graph-hot", samples)
        result[name] = (found.latency_us, found.noise, len(samples), kernel, tier)
    return result


def row(
    suite: str, p: Problem, method: str, us: float, spread: float, samples: int, kernel: str, tier: str
) -> Any:
    """One line of the result file."""
    return (suite, p.batch, p.m, p.n, p.k, p.layout, p.dtype, p.accumulate, method, "graph-hot",
            f"{us:.4f}", f"{spread:.4f}", samples, kernel, tier, "ok")  # fmt: skip


def report(ratios: list[tuple[Problem, dict[str, float], str]]) -> None:
    """Print the table by FLOP class, then every problem with its times, losses marked."""
    print("class (GFLOP)   n  lt/own  torch/own  lt/dispatched  torch/dispatched  control")
    for label in (*(label for _, label in CLASSES), "all"):
        chosen = [t for p, t, _ in ratios if label in ("all", class_of(p))]
        columns = [("cublaslt_heuristic", "ktlib_own"), ("torch", "ktlib_own"),
                   ("cublaslt_heuristic", "ktlib"), ("torch", "ktlib"), ("torch", "control")]  # fmt: skip
        means = [
            geomean(t[top] / t[bottom] for t in chosen) if chosen else float("nan") for top, bottom in columns
        ]
        print(f"{label:14s} {len(chosen):3d}  " + "  ".join(f"{mean:9.3f}" for mean in means))
    for problem, times, tier in ratios:
        mark = "loss" if times["torch"] / times["ktlib"] < 0.98 else ""
        line = "  ".join(f"{method} {us:.2f}" for method, us in times.items())
        ratio = times["cublaslt_heuristic"] / times["ktlib_own"]
        print(f"{problem!s:32s} {tier:7s} {line}  own/lt {ratio:.3f} {mark}")


if __name__ == "__main__":
    raise SystemExit(main())
