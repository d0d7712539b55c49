"""The fast competitors a candidate is timed against, as their users call them, always with fp32 accumulation.

Must not be used as a reference for numbers; that is our own fp64.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ktlib.problem import ELEMENT_BYTES, Problem
from ktlib_generator.measure.arrays import NumpyArrays, torch_module
from ktlib_generator.measure.operands import Operand

# Up to here NumPy's smaller overhead can beat torch on halves; above, it is ten times slower.
NUMPY_HALF_FLOPS = 2**20
METHODS = {"cuda": ("torch", "cublaslt_heuristic"), "cpu": ("numpy", "torch")}


class VendorRoutine:
    """One vendor method on operands; the same interface as a candidate's."""

    native = False
    method = ""

    def run(self, a: Operand, b: Operand, c: Operand, stream: int) -> None:
        raise TypeError(f"{type(self).__name__} must define run")

    def time_ns(self, sets: Sequence[tuple[Operand, Operand, Operand]], calls: int) -> int:
        start = time.perf_counter_ns()
        for i in range(calls):
            self.run(*sets[i % len(sets)], 0)
        return time.perf_counter_ns() - start


class NumpyMatmul(VendorRoutine):
    """numpy.matmul, writing to C. bf16 has no NumPy type, so its users widen, multiply and round."""

    method = "numpy"

    def __init__(self, problem: Problem) -> None:
        self._bf16 = problem.dtype == "bf16"
        self._arrays = NumpyArrays()

    def run(self, a: Operand, b: Operand, c: Operand, stream: int) -> None:
        if not self._bf16:
            np.matmul(a.logical, b.logical, out=c.logical)
            return
        left, right = ((x.logical.astype(np.uint32) << 16).view(np.float32) for x in (a, b))
        c.logical[...] = self._arrays.encode(left @ right, "bf16")


class TorchMatmul(VendorRoutine):
    """torch.matmul(out=) on the stream given; on a CPU over memory that NumPy owns."""

    method = "torch"

    def __init__(self, problem: Problem, device_kind: str) -> None:
        self._torch = torch_module()
        self._dtype = problem.dtype
        self._cuda = device_kind == "cuda"
        self._views: dict[int, Any] = {}
        if self._cuda:
            require_fp32_reduction(self._torch)

    def run(self, a: Operand, b: Operand, c: Operand, stream: int) -> None:
        torch = self._torch
        if not self._cuda:
            torch.matmul(self._view(a), self._view(b), out=self._view(c))
        elif stream == int(torch.cuda.current_stream().cuda_stream):
            torch.matmul(a.logical, b.logical, out=c.logical)
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                torch.matmul(a.logical, b.logical, out=c.logical)

    def _view(self, operand: Operand) -> Any:
        """A torch view of a NumPy operand, made once: users hold tensors, they do not convert them."""
        if operand.address not in self._views:
            view = self._torch.from_numpy(
                operand.logical.view(np.int16) if self._dtype == "bf16" else operand.logical
            )
            self._views[operand.address] = view.view(self._torch.bfloat16) if self._dtype == "bf16" else view
        return self._views[operand.address]


class CublasLtHeuristic(TorchMatmul):
    """cuBLASLt's first heuristic, reached through torch's choice of BLAS library."""

    method = "cublaslt_heuristic"

    def run(self, a: Operand, b: Operand, c: Operand, stream: int) -> None:
        before = self._torch.backends.cuda.preferred_blas_library()
        self._torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            super().run(a, b, c, stream)
        finally:
            self._torch.backends.cuda.preferred_blas_library(before)


def require_fp32_reduction(torch: Any) -> None:
    """Forbid half-precision reductions in torch's matmul: its default allows them on unaligned shapes."""
    settings = torch.backends.cuda.matmul
    settings.allow_fp16_reduced_precision_reduction = False
    settings.allow_bf16_reduced_precision_reduction = False
    settings.allow_tf32 = False
    if hasattr(settings, "allow_fp16_accumulation"):
        settings.allow_fp16_accumulation = False


def vendor_routine(method: str, problem: Problem, device_kind: str) -> VendorRoutine:
    """Return one vendor method.

    Raises:
        ValueError: the method is unknown for this kind of device.
        ImportError: it needs torch, which is not installed.
    """
    if method not in METHODS[device_kind]:
        raise ValueError(f"baseline {method!r} is unknown for {device_kind} (have: {METHODS[device_kind]})")
    if method == "numpy":
        return NumpyMatmul(problem)
    if method == "torch":
        return TorchMatmul(problem, device_kind)
    return CublasLtHeuristic(problem, device_kind)


def baselines(problem: Problem, device_kind: str) -> tuple[VendorRoutine, ...]:
    """Return the methods worth trying for a problem on this machine.

    On a CPU torch joins for halves only, and only when installed. NumPy multiplies halves without BLAS,
    seconds a call at 1024^3, so beyond small problems it stands only where torch does not.
    """
    methods: tuple[str, ...] = METHODS[device_kind]
    if device_kind == "cpu" and ELEMENT_BYTES[problem.dtype] == 4:
        methods = ("numpy",)
    found: list[VendorRoutine] = []
    for method in methods:
        try:
            found.append(vendor_routine(method, problem, device_kind))
        except ImportError:
            if device_kind == "cuda":
                raise
    if device_kind == "cpu" and len(found) > 1 and problem.flops > NUMPY_HALF_FLOPS:
        return tuple(found[1:])
    return tuple(found)
