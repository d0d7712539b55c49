"""Result files as runs leave them, small, with whatever change a test plants."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ktlib.problem import Problem
from ktlib_generator.report.rows import COLUMNS

ENVIRONMENT = {
    "device": "NVIDIA H200",
    "sm_count": "132",
    "commit": "3673d99",
    "clock_sm_max_mhz": "1980",
    "clock_sm_mhz": "1890",
    "cublas": "13.1.0.3",
    "driver": "580.159.04",
    "power_limit_w": "700.0",
    "torch": "2.11.0",
}
# All four classes of FLOPs, ten problems each.
PROBLEMS = tuple(
    Problem(m, n, k, layout)
    for m, n, k in (
        *((64, 64 * step, 128) for step in range(1, 6)),
        *((1024, 1024, 512 * step) for step in range(1, 6)),
        *((4096, 4096, 512 * step) for step in range(1, 6)),
        *((8192, 8192, 2048 * step) for step in range(1, 6)),
    )
    for layout in ("nn", "nt")
)
METHODS = ("ktlib", "ktlib_own", "torch", "cublaslt_heuristic", "control")
KERNEL = "sm90_tma/dtype=fp16,layout={layout},num_stages=4,tile_k=64,tile_m=128,tile_n=256/sm90a"


def floor_us(problem: Problem) -> float:
    """The least time that bytes, FLOPs and a launch take."""
    return max(problem.bytes_moved / 4.3e6, problem.flops / 8e8, 1.0)


def us_of(problem: Problem, method: str) -> float:
    """A plausible time without noise: ours 1.2 times as fast as the vendor's."""
    return floor_us(problem) * (1.25 if method in ("ktlib", "ktlib_own") else 1.5)


def line(
    problem: Problem,
    method: str,
    us: float | str,
    *,
    tier: str = "",
    suite: str = "small",
    protocol: str = "graph-hot",
    spread: float = 0.004,
    status: str = "ok",
) -> str:
    """One row of a result file."""
    if not tier:
        tier = {"ktlib": "exact", "ktlib_own": "own"}.get(method, "vendor")
    kernel = "" if tier == "vendor" else f'"{KERNEL.format(layout=problem.layout)}"'
    time = us if isinstance(us, str) else f"{us:.5f}"
    p = problem
    return (
        f"{suite},{p.batch},{p.m},{p.n},{p.k},{p.layout},{p.dtype},{p.accumulate},{method},{protocol},"
        f"{time},{spread},41,{kernel},{tier},{status}"
    )


def write(
    path: Path, rows: Sequence[str], environment: Mapping[str, str] = ENVIRONMENT, extra: str = ""
) -> Path:
    """Write a result file; the first row is on the line after the environment and the column names."""
    head = [f"# {name}: {value}" for name, value in environment.items()]
    path.write_text("\n".join([*head, ",".join(COLUMNS) + extra, *rows, ""]))
    return path


def run(
    path: Path,
    seed: int = 0,
    *,
    slower: Callable[[Problem, str], float] = lambda problem, method: 1.0,
    methods: Sequence[str] = METHODS,
    problems: Sequence[Problem] = PROBLEMS,
    environment: Mapping[str, str] = ENVIRONMENT,
    noise: float = 0.004,
    protocol: str = "graph-hot",
) -> Path:
    """Write a whole run: every problem by every method, with noise, and a factor where one is planted."""
    generator = random.Random(seed)
    rows = [
        line(
            problem,
            method,
            us_of(problem, method) * slower(problem, method) * (1 + generator.gauss(0, noise)),
            protocol=protocol,
        )
        for problem in problems
        for method in methods
    ]
    return write(path, rows, environment)
