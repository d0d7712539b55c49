"""nvcc: a CUDA source with its defines becomes a cubin, with ptxas's facts, or a failure with its log.

Must not judge speed or launch anything. Output is byte-identical for equal source, defines and compiler,
which is what makes the content-addressed cache and the golden hashes hold.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path

from ktlib.canonical import bytes_fingerprint, fingerprint
from ktlib_generator.build.process import CompilerRun, run_compiler
from ktlib_generator.build.sass import spills_in_main_loop
from ktlib_generator.build.toolkit import ToolchainError, find_tool
from ktlib_generator.families.base import BuildRequest
from ktlib_generator.values import Binary, BuildFailure

FLAGS = ("-std=c++17", "-DNDEBUG", "-Xptxas", "-v")
SMEM_LIMIT_BYTES = {"sm90a": 227 * 1024}


def find_nvcc() -> str:
    """Return the nvcc to use.

    Raises:
        ToolchainError: there is none; the message says what to install.
    """
    return find_tool("nvcc")


@functools.lru_cache(maxsize=8)
def _version(nvcc: str, modified_ns: int) -> str:
    run = run_compiler([nvcc, "--version"], timeout_s=60)
    match = re.search(r"release [\d.]+, V([\d.]+)", run.log)
    if not run.ok or match is None:
        raise ToolchainError(
            f"{nvcc} --version: {run.reason(60) if not run.ok else 'no version in its output'}"
        )
    return match.group(1)


def nvcc_version(nvcc: str | None = None) -> str:
    """Return the compiler's version, such as `13.0.88`.

    Raises:
        ToolchainError: no nvcc, or it does not say.
    """
    path = nvcc or find_nvcc()
    return _version(path, os.stat(path).st_mtime_ns)


def source_key(request: BuildRequest, *, nvcc: str | None = None) -> str:
    """Fingerprint what a compile depends on: sources by content, defines, flags, arch, compiler."""
    folder = request.source.parent
    sources = [request.source, *sorted(folder.glob("*.cuh"))]
    return fingerprint(
        kind="cubin",
        sources={path.name: bytes_fingerprint(path.read_bytes()) for path in sources},
        symbol=request.symbol,
        arch=request.arch,
        defines=dict(request.defines),
        flags=[*FLAGS, *request.flags],
        nvcc=nvcc_version(nvcc),
    )


def compile_cubin(
    request: BuildRequest, *, timeout_s: float, nvcc: str | None = None
) -> Binary | BuildFailure:
    """Compile one kernel; what would run slowly or not at all is a failure, not a warning.

    Refused besides compiler errors: wgmma that ptxas serialised (C7510), more shared memory than a CTA has,
    spills inside the main loop.

    Raises:
        ToolchainError: there is no nvcc.
    """
    path = nvcc or find_nvcc()
    architecture = request.arch.removeprefix("sm")
    with tempfile.TemporaryDirectory(prefix="ktlib-nvcc-") as folder:
        output = Path(folder) / "kernel.cubin"
        command = [path, "-cubin", "-gencode", f"arch=compute_{architecture},code=sm_{architecture}", *FLAGS]
        command += [*request.flags, *(f"-D{name}={value}" for name, value in request.defines)]
        command += [str(request.source), "-o", str(output)]
        run = run_compiler(command, timeout_s=timeout_s, cwd=Path(folder))
        if not run.ok or not output.is_file():
            return BuildFailure(_failure_reason(run, timeout_s), run.log)
        return _judge(request, output.read_bytes(), run.log, path)


def _failure_reason(run: CompilerRun, timeout_s: float) -> str:
    if run.timed_out or run.returncode < 0:
        return run.reason(timeout_s)
    errors = [line.strip() for line in run.log.splitlines() if re.search(r"\b(error|fatal)\b", line)]
    return errors[0] if errors else run.reason(timeout_s)


def _judge(request: BuildRequest, image: bytes, log: str, nvcc: str) -> Binary | BuildFailure:
    """Turn ptxas's report into a binary, or a failure for what must not ship."""
    if "C7510" in log or "wgmma.mma_async instructions are serialized" in log:
        return BuildFailure("ptxas serialised wgmma (C7510): the pipeline would not overlap", log)
    entries = re.findall(r"Compiling entry function '([^']+)'", log)
    if entries != [request.symbol]:
        return BuildFailure(f"expected the one kernel {request.symbol}, ptxas compiled {entries}", log)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        return BuildFailure(
            "ptxas reported no registers or spills; its output format is not the expected one", log
        )
    static = re.search(r"(\d+) bytes smem", log)
    smem_bytes = int(static.group(1)) if static else 0
    limit = SMEM_LIMIT_BYTES.get(request.arch)
    if limit is not None and smem_bytes > limit:
        return BuildFailure(f"static shared memory {smem_bytes} bytes, a CTA has {limit}", log)
    spill_bytes = int(spills.group(1)) + int(spills.group(2))
    if spill_bytes:
        try:
            inside = spills_in_main_loop(image)
        except ToolchainError as error:
            return BuildFailure(f"{spill_bytes} bytes of spills, and {error}", log)
        if inside:
            return BuildFailure(f"spills in the main loop: {inside[0]} and {len(inside) - 1} more", log)
    return Binary(
        format="cubin",
        symbol=request.symbol,
        sha256=bytes_fingerprint(image),
        source=source_key(request, nvcc=nvcc),
        registers=int(registers.group(1)),
        smem_bytes=smem_bytes,
        spill_bytes=spill_bytes,
        data=image,
    )
