"""Host cost of one small call, ours against torch's: `python -m benchmarks.hot_path [--out FILE]`.

Protocol `host`: n calls back to back from Python, no synchronise inside, divided by n; the two alternate, so
both meet the same machine. On CPU tensors this counts everything, kernel included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ktlib
from benchmarks.results import write_rows
from ktlib_generator.measure.device import detect, environment

CALLS, PAIRS = 2000, 200
COLUMNS = ("case", "ktlib_ns", "vendor_ns", "ratio", "kernel", "tier")


def main() -> int:
    """Measure every case and print one line each; the first is the one with a target (0.3)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="CSV to write")
    arguments = parser.parse_args()
    import numpy as np
    import torch

    rows = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        size, dtype = (8, torch.float32) if device == "cpu" else (64, torch.float16)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty(size, size, device=device, dtype=dtype)
        name = f"torch {device} {size}x{size} {dtype}".replace("torch.", "")
        sync = torch.cuda.synchronize if device == "cuda" else None
        rows.append(case(f"{name} out=", a, b, out, torch.mm, sync))
        rows.append(case(f"{name} new output", a, b, None, torch.mm, sync))
    left, right = (np.random.default_rng(i).standard_normal((8, 8)).astype(np.float32) for i in range(2))
    out_array = np.empty((8, 8), np.float32)
    rows.append(case("numpy 8x8 out=", left, right, out_array, np.matmul))
    rows.append(case("numpy 8x8 new output", left, right, None, np.matmul))
    for row in rows:
        name, ours, theirs, ratio, kernel, tier = row
        print(f"{name:36s} ktlib {ours:7.0f} ns  vendor {theirs:7.0f} ns  ratio {ratio:.3f}  {tier} {kernel}")
    if arguments.out:
        write_rows(arguments.out, environment(detect()), COLUMNS, rows, protocol="host", pairs=str(PAIRS))
    return 0


def case(
    name: str, a: Any, b: Any, out: Any, vendor: Callable[..., Any], sync: Any = None
) -> tuple[Any, ...]:
    """Alternate blocks of calls; return medians and the median of the paired ratios."""
    pairs = []
    for _ in range(PAIRS):
        pairs.append((call_ns(ktlib.matmul, a, b, out), call_ns(vendor, a, b, out)))
        if sync is not None:
            sync()
    choice = ktlib.explain(a, b, out)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(mine / other for mine, other in pairs)
    return (name, round(ours, 1), round(theirs, 1), round(ratio, 4), choice.kernel, choice.tier)


def call_ns(function: Callable[..., Any], a: Any, b: Any, out: Any) -> float:
    """Nanoseconds a call, of one block of calls."""
    begin = time.perf_counter_ns()
    if out is None:
        for _ in range(CALLS):
            function(a, b)
    else:
        for _ in range(CALLS):
            function(a, b, out=out)
    return (time.perf_counter_ns() - begin) / CALLS


if __name__ == "__main__":
    raise SystemExit(main())
