"""Checks all 1,000 grid problems on a GPU: `python -m benchmarks.check_grid --out FILE`.

Each problem in both layouts and dtypes, as `ktlib.matmul` dispatches it and on one of our kernels chosen
by rotation (`own`), against fp64 by the verification rules; large ones on sampled rows and columns, and as
a whole through an exact projection.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ktlib
from benchmarks.results import write_rows
from ktlib import _core
from ktlib.problem import Problem
from ktlib_generator.families.base import KernelFacts
from ktlib_generator.families.sm90_tma import Sm90Tma
from ktlib_generator.measure import inputs, rules
from ktlib_generator.measure.arrays import TorchArrays
from ktlib_generator.measure.device import detect, environment
from ktlib_generator.values import Binary

EXTENTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
LAYOUTS, DTYPES = ("nn", "nt"), ("fp16", "bf16")
COLUMNS = ("m", "n", "k", "layout", "dtype", "mode", "kernel", "tier", "rms_ratio", "status")


def main() -> int:
    """Check everything within the budget; the exit code says whether all was right and complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--budget", type=float, default=480.0, help="seconds after which it stops, and says so"
    )
    parser.add_argument("--stride", type=int, default=1, help="check every n-th problem")
    arguments = parser.parse_args()
    torch, arrays, device = __import__("torch"), TorchArrays(), detect()
    rotation = {key: itertools.cycle(built) for key, built in build_own(device).items()}
    rows: list[tuple[Any, ...]] = []
    problems = list(itertools.product(EXTENTS, repeat=3))[:: arguments.stride]
    begin, done = time.monotonic(), 0
    for number, (m, n, k) in enumerate(problems):
        if time.monotonic() - begin > arguments.budget:
            break
        for dtype in DTYPES:
            rows += check_shape(torch, arrays, m, n, k, dtype, number, rotation)
        done += 1
        if done % 100 == 0:
            print(f"{done}/{len(problems)} problems, {time.monotonic() - begin:.0f} s", flush=True)
    write_rows(arguments.out, environment(device), COLUMNS, rows, seconds=f"{time.monotonic() - begin:.0f}")
    dispatched = [row for row in rows if row[5] == "dispatch"]
    wrong = [row for row in rows if row[-1] != "ok"]
    for row in wrong[:20]:
        print("wrong:", *row)
    share = sum(row[7] != "vendor" for row in dispatched) / max(1, len(dispatched))
    print(f"{done} of {len(problems)} problems x {len(LAYOUTS)} layouts x {len(DTYPES)} dtypes")
    tiers = dict(Counter(row[7] for row in dispatched))
    print(f"as dispatched: {len(dispatched)} calls, {share:.1%} on our kernels, tiers {tiers}")
    print(f"own kernels: {sum(row[5] == 'own' for row in rows)} launches; wrong: {len(wrong)}")
    print(f"worst RMS ratio: ours {worst(rows, True):.4f}, vendor {worst(rows, False):.4f}")
    return 0 if not wrong and done == len(problems) else 1


def worst(rows: list[tuple[Any, ...]], ours: bool) -> float:
    """Return the largest RMS ratio among our kernels' rows, or the vendor's."""
    return max((row[8] for row in rows if (row[7] != "vendor") == ours), default=0.0)


def build_own(device: Any) -> dict[tuple[str, str], list[tuple[KernelFacts, Any]]]:
    """Compile every kernel of the family, by layout and dtype."""
    import concurrent.futures

    from ktlib_generator.build.nvcc import compile_cubin

    family = Sm90Tma()
    variants = {}
    for layout, dtype in itertools.product(LAYOUTS, DTYPES):
        for variant in family.variants(Problem(4096, 4096, 4096, layout, dtype), device):
            variants.setdefault(family.build_request(variant).symbol, (layout, dtype, variant))

    def build(item: tuple[str, str, Any]) -> tuple[str, str, KernelFacts, Any]:
        layout, dtype, variant = item
        binary = compile_cubin(family.build_request(variant), timeout_s=120)
        if not isinstance(binary, Binary):
            raise SystemExit(f"{variant}: {binary.reason}")
        facts = family.kernel_facts(variant, binary)
        return layout, dtype, facts, _core.CudaKernel(binary.data, facts.to_dict())

    built: dict[tuple[str, str], list[tuple[KernelFacts, Any]]] = {}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for layout, dtype, facts, kernel in pool.map(build, variants.values()):
            built.setdefault((layout, dtype), []).append((facts, kernel))
    return built


def check_shape(
    torch: Any, arrays: TorchArrays, m: int, n: int, k: int, dtype: str, number: int, rotation: Any
) -> list[tuple[Any, ...]]:
    """Check one shape and dtype in both layouts, dispatched and on an own kernel; one row each."""
    base = Problem(m, n, k, "nn", dtype)
    cases = [inputs.normal(base, arrays, 7 * number + 1), inputs.zero_one(base, arrays, 7 * number + 2)]
    cases.append(inputs.cancelling(base, arrays, 7 * number + 3))
    rows = []
    for layout in LAYOUTS:
        facts, kernel = next(rotation[layout, dtype])
        b_views = [case.b if layout == "nn" else case.b.t().contiguous().t() for case in cases]
        choice = ktlib.explain(cases[0].a, b_views[0])
        for mode in ("dispatch", "own"):
            status, ratio = "ok", 0.0
            for case, b in zip(cases, b_views, strict=True):
                c = torch.empty(m, n, dtype=case.a.dtype, device="cuda")
                c.view(torch.int16).fill_(-1)
                if mode == "dispatch":
                    ktlib.matmul(case.a, b, out=c)
                else:
                    ldb = n if layout == "nn" else k
                    stream = torch.cuda.current_stream().cuda_stream
                    kernel.launch(
                        case.a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k, k, ldb, n, 8, 1, 0, stream
                    )
                found, case_ratio = judge(case, c, base, arrays)
                status, ratio = (found if status == "ok" and found else status), max(ratio, case_ratio)
            name, tier = (choice.kernel, choice.tier) if mode == "dispatch" else (facts.name, "own")
            rows.append((m, n, k, layout, dtype, mode, name, tier, round(ratio, 5), status))
    return rows


def judge(case: Any, c: Any, problem: Problem, arrays: TorchArrays) -> tuple[str | None, float]:
    """Apply the numeric rules; return what is wrong, and the RMS ratio where the case is judged by it."""
    found = rules.finite_elsewhere(case, c, problem, arrays) or rules.projected(case, c, problem, arrays)
    worst_ratio = 0.0
    for sample in case.samples:
        got = sample.of(c)
        if case.exact:
            found = found or rules.exact(case, sample, got, problem, arrays)
            continue
        found = found or rules.bound(case, sample, got, problem, arrays, 1)
        ratio = rules.rms_ratio(sample, got, problem, arrays)
        found = found or rules.rms(ratio, problem)
        worst_ratio = max(worst_ratio, ratio or 0.0)
    return found, worst_ratio


if __name__ == "__main__":
    raise SystemExit(main())
