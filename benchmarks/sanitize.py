"""Runs every kernel of a pack under compute-sanitizer: `python -m benchmarks.sanitize PACK`.

The child process has neither torch nor CuPy in it, so what the sanitizer watches is our kernels alone.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck")
# One row; tails of every tile in m, n and k; an odd N, which `nt` kernels store plainly and `nn` ones cannot
# read; whole tiles. Six for every kernel.
PROBLEMS = (
    (1, 8, 8),
    (65, 72, 72),
    (129, 264, 136),
    (200, 520, 328),
    (257, 331, 520),
    (257, 328, 520),
    (128, 256, 192),
)


def main() -> int:
    """Run every tool over every kernel and write one row each; the exit code says whether all are clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, help="CSV to write (tool,kernel,m,n,k,status)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return run_kernels(arguments.pack)
    rows: list[tuple[str, ...]] = []
    clean = True
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--launch-timeout", "120"]
        command += [sys.executable, "-m", "benchmarks.sanitize", str(arguments.pack), "--child"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", run.stdout)
        ran = re.findall(r"^ran (\S+) (\d+) (\d+) (\d+) (\w+)$", run.stdout, re.MULTILINE)
        ok = run.returncode == 0 and bool(ran) and all(row[-1] == "right" for row in ran)
        clean = clean and ok
        if not ok:
            sys.stdout.write(run.stdout[-6000:] + run.stderr[-2000:])
        print(
            f"{tool}: {len(ran)} launches, {summary[-1] if summary else 'no summary'}, exit {run.returncode}"
        )
        rows += [(tool, *row[:-1], "clean" if ok else row[-1]) for row in ran]
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            csv.writer(file).writerows([("tool", "kernel", "m", "n", "k", "status"), *rows])
    return 0 if clean else 1


class Memory:
    """Device memory through the driver, in the primary context that the launcher uses."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.check(self.cuda.cuInit(0))
        self.check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.check(self.cuda.cuCtxSetCurrent(context))

    def check(self, code: int) -> None:
        """Raise RuntimeError for a driver error."""
        if code:
            raise RuntimeError(f"CUDA driver error {code}")

    def upload(self, array: Any) -> ctypes.c_uint64:
        """Copy a NumPy array to a new allocation of exactly its size."""
        pointer = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(array.nbytes)))
        data = array.ctypes.data_as(ctypes.c_void_p)
        self.check(self.cuda.cuMemcpyHtoD_v2(pointer, data, ctypes.c_size_t(array.nbytes)))
        return pointer

    def download(self, pointer: ctypes.c_uint64, array: Any) -> None:
        """Copy back into a NumPy array, after everything enqueued before."""
        data = array.ctypes.data_as(ctypes.c_void_p)
        self.check(self.cuda.cuMemcpyDtoH_v2(data, pointer, ctypes.c_size_t(array.nbytes)))

    def free(self, pointer: ctypes.c_uint64) -> None:
        """Give an allocation back."""
        self.check(self.cuda.cuMemFree_v2(pointer))


def run_kernels(pack: Path) -> int:
    """Launch every kernel at every problem it can serve and compare with exact integers."""
    import numpy as np

    from ktlib import _core

    memory, wrong = Memory(), 0
    data = pack.read_bytes()
    info = _core.pack_info(str(pack), verify_blobs=True)
    for kernel in info["kernels"]:
        start = info["blobs_offset"] + kernel["blob_offset"]
        compiled = _core.CudaKernel(
            data[start : start + kernel["blob_bytes"]], kernel | {"arch": info["arch"]}
        )
        for m, n, k in PROBLEMS:
            if kernel["layout"] == "nn" and n % 8:
                continue
            draw = np.random.default_rng(m * n + k)
            a, b = draw.integers(-2, 3, (m, k)), draw.integers(-2, 3, (k, n))
            stored_b = b if kernel["layout"] == "nn" else b.T
            c = np.full((m, n), 0xFFFF, np.uint16)
            pointers = [memory.upload(encode(x, kernel["dtype"])) for x in (a, stored_b)] + [memory.upload(c)]
            addresses = [pointer.value for pointer in pointers]
            ldb = n if kernel["layout"] == "nn" else k
            compiled.launch(*addresses, m, n, k, k, ldb, n, 4, 1, 0, 0)
            memory.download(pointers[2], c)
            right = np.array_equal(c, encode(a @ b, kernel["dtype"]))
            wrong += not right
            print(f"ran {kernel['name']} {m} {n} {k} {'right' if right else 'wrong'}", flush=True)
            for pointer in pointers:
                memory.free(pointer)
    return 1 if wrong else 0


def encode(integers: Any, dtype: str) -> Any:
    """Small integers as fp16 or bf16 bit patterns; every sum here is exact in both."""
    import numpy as np

    if dtype == "fp16":
        return np.ascontiguousarray(integers.astype(np.float16)).view(np.uint16)
    bits = np.ascontiguousarray(integers.astype(np.float32)).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


if __name__ == "__main__":
    raise SystemExit(main())
