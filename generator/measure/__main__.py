"""Measures one candidate by hand: `python -m ktlib_generator.measure PROBLEM VARIANT [--cubin FILE]`.

For looking at a single kernel; `ktlib-build tune` is what fills a database. Stores nothing.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path

from ktlib.canonical import bytes_fingerprint
from ktlib.problem import Problem
from ktlib_generator.families import registry
from ktlib_generator.measure.device import detect, environment
from ktlib_generator.measure.jobs import Job, Limits, Outcome
from ktlib_generator.measure.timer import PROTOCOLS
from ktlib_generator.measure.worker import Worker
from ktlib_generator.values import Binary, Status, Variant


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 0 when the candidate is right."""
    parser = argparse.ArgumentParser(prog="python -m ktlib_generator.measure", description=__doc__)
    parser.add_argument("problem", help="MxNxK[:layout[:dtype]]")
    parser.add_argument("variant", help="family/name=value,.../arch; or vendor/method=torch/ARCH")
    parser.add_argument("--cubin", type=Path, help="the variant's cubin; a CPU variant needs none")
    parser.add_argument("--profile", help="device to measure on")
    parser.add_argument("--protocol", help="default: the device's first")
    parser.add_argument("--repeat", type=int, default=1, help="times to run the job, in one child")
    parser.add_argument("--wall-s", type=float, default=Limits().wall_s, help="limit for one job")
    options = parser.parse_args(arguments)
    try:
        device = detect(options.profile)
        protocol = options.protocol or PROTOCOLS[device.kind][0]
        job = job_for(Problem.parse(options.problem), Variant.parse(options.variant), options.cubin, protocol)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"environment: {environment(device)}")
    outcome = Outcome(Status.REFUSED)
    with Worker(device, Limits(wall_s=options.wall_s)) as worker:
        for _ in range(options.repeat):
            start = time.perf_counter()
            outcome = worker.run(job)
            print(f"{describe(outcome)}  [{time.perf_counter() - start:.2f} s for the job]")
    return 0 if outcome.status is Status.OK else 1


def job_for(problem: Problem, variant: Variant, cubin: Path | None, protocol: str) -> Job:
    """Make the job of one variant; its family says the symbol and the facts.

    Raises:
        ValueError: the variant needs a cubin, or its family is unknown.
        OSError: the cubin cannot be read.
    """
    seed = secrets.randbits(31)
    if variant.is_vendor:
        return Job(problem, variant, None, None, protocol, seed=seed)
    family = registry.family(variant.family)
    request = family.build_request(variant)
    if request is None:
        binary = Binary("builtin", "", bytes_fingerprint(b""), str(variant), 0, 0, 0)
    elif cubin is None:
        raise ValueError(f"{variant} must be compiled first; pass its cubin with --cubin")
    else:
        data = cubin.read_bytes()
        binary = Binary("cubin", request.symbol, bytes_fingerprint(data), str(variant), 0, 0, 0, data)
    facts = family.kernel_facts(variant, binary)
    return Job(problem, variant, facts, binary, protocol, family.launch_parameters(variant), seed)


def describe(outcome: Outcome) -> str:
    """Say an outcome in a line."""
    if outcome.measurement is None:
        return f"{outcome.status.value}: {outcome.log}"
    taken, baseline = outcome.measurement, outcome.baseline
    text = f"ok: {taken.method} {taken.latency_us:.3f} us (noise {taken.noise:.1%}, {taken.protocol})"
    if baseline is not None:
        ratio = baseline.latency_us / taken.latency_us
        text += f", {baseline.method} {baseline.latency_us:.3f} us (noise {baseline.noise:.1%}), {ratio:.2f}x"
    if outcome.verification is not None:
        checks = ", ".join(outcome.verification.checks)
        text += f"; RMS ratio {outcome.verification.rms_ratio:.4f}, passed {checks}"
    return text


if __name__ == "__main__":
    sys.exit(main())
