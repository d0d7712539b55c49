"""Loads what is to be measured: a built-in CPU kernel, a shared object, a cubin, or a vendor routine.

Must not verify or time. Runs only in the child process: a candidate may do anything to the process it is in.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Protocol

from ktlib.problem import Problem
from ktlib_generator.families.base import KernelFacts, LaunchParameters
from ktlib_generator.measure.baselines import vendor_routine
from ktlib_generator.measure.operands import Operand
from ktlib_generator.values import Binary, Variant


class Candidate(Protocol):
    """Something that computes C = A B on operands. `native` says that `time_ns` loops outside Python."""

    native: bool

    def run(self, a: Operand, b: Operand, c: Operand, stream: int) -> None:
        """Compute, or enqueue the computation on a CUDA stream."""

    def time_ns(self, sets: Sequence[tuple[Operand, Operand, Operand]], calls: int) -> int:
        """Return the total time of `calls` back-to-back calls rotating over the sets."""


class CpuCandidate:
    """A kernel of abi `cpu_gemm_v1` behind `_core.CpuKernel`."""

    native = True

    def __init__(self, kernel: Any, problem: Problem) -> None:
        self._kernel, self._problem = kernel, problem

    def run(self, a: Operand, b: Operand, c: Operand, stream: int) -> None:
        p = self._problem
        self._kernel.run(a.address, b.address, c.address, p.m, p.n, p.k, a.ld, b.ld, c.ld, p.layout)

    def time_ns(self, sets: Sequence[tuple[Operand, Operand, Operand]], calls: int) -> int:
        p = self._problem
        lists = [[operand.address for operand in column] for column in zip(*sets, strict=True)]
        a, b, c = sets[0]
        return int(self._kernel.time_ns(*lists, p.m, p.n, p.k, a.ld, b.ld, c.ld, p.layout, calls))


class CudaCandidate:
    """A cubin behind `_core.CudaKernel`, launched by the runtime's own launcher."""

    native = False

    def __init__(self, kernel: Any, problem: Problem, launch: LaunchParameters, device: int = 0) -> None:
        self._kernel, self._problem, self._launch, self._device = kernel, problem, launch, device

    def run(self, a: Operand, b: Operand, c: Operand, stream: int) -> None:
        p = self._problem
        self._kernel.launch(
            a.address, b.address, c.address, p.m, p.n, p.k, a.ld, b.ld, c.ld,
            self._launch.group_m, self._launch.split_k, self._device, stream,
        )  # fmt: skip

    def time_ns(self, sets: Sequence[tuple[Operand, Operand, Operand]], calls: int) -> int:
        raise TypeError("a CUDA candidate is timed by graph or stream, not by a loop")


def load(
    variant: Variant,
    problem: Problem,
    binary: Binary | None,
    facts: KernelFacts | None,
    launch: LaunchParameters,
    device_kind: str,
) -> Candidate:
    """Make a variant's kernel callable.

    Raises:
        ValueError: variant, binary and facts do not fit together.
        OSError: a shared object does not load.
        RuntimeError: the driver refuses the image.
    """
    if variant.is_vendor:
        return vendor_routine(str(variant["method"]), problem, device_kind)
    if binary is None:
        raise ValueError(f"measure: {variant} has no binary; build it first")
    core = importlib.import_module("ktlib._core")
    if binary.format == "builtin":
        return CpuCandidate(core.CpuKernel(facts.name if facts else str(variant)), problem)
    if binary.format == "shared_object":
        address = _load_shared_object(binary)
        return CpuCandidate(core.CpuKernel.from_address(address, problem.dtype), problem)
    if facts is None:
        raise ValueError(f"measure: {variant} is a cubin and needs its kernel facts")
    return CudaCandidate(core.CudaKernel(binary.data, facts.to_dict()), problem, launch)


def _load_shared_object(binary: Binary) -> int:
    """Load a private copy, so that no state is shared between loads; return the symbol's address."""
    descriptor, path = tempfile.mkstemp(suffix=".so", prefix="ktlib-candidate-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(binary.data)
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    finally:
        os.unlink(path)
    try:
        function = getattr(library, binary.symbol)
    except AttributeError:
        raise ValueError(f"measure: the shared object has no symbol {binary.symbol!r}") from None
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
