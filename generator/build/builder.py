"""Turns variants into binaries: from the cache, from the extension, or by the compiler, many at a time.

Must not judge speed, and must not let a compiler that fails, hangs or dies stop a run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ktlib.canonical import bytes_fingerprint, fingerprint
from ktlib_generator.build import nvcc, process
from ktlib_generator.build.cache import BinaryCache
from ktlib_generator.families.base import BuildRequest, Family
from ktlib_generator.values import Binary, BuildFailure, Variant

BUILD_TIMEOUT_S = 60.0
# A raw PTX kernel takes 0.1 GB in nvcc and a CUTLASS one 3.5 GB; this leaves room for the templates between.
MEMORY_PER_JOB_BYTES = 1 << 30

BuildResult = Binary | BuildFailure


def build(
    variant: Variant, family: Family, cache: BinaryCache, timeout_s: float = BUILD_TIMEOUT_S
) -> BuildResult:
    """Return the variant's binary, or why there is none; a failing compiler is an answer, not an error.

    Raises:
        ToolchainError: there is no compiler at all, so no variant can be built.
        BuildsStopped: the run is ending.
    """
    request = family.build_request(variant)
    if request is None:
        return builtin_binary(variant)
    return _compile(request, nvcc.source_key(request), cache, timeout_s)


def _compile(request: BuildRequest, key: str, cache: BinaryCache, timeout_s: float) -> BuildResult:
    # Threads that want the same binary wait for one compiler; other processes race for the cache entry.
    with cache.key_lock(key):
        cached = cache.load(key)
        if cached is not None:
            return cached
        try:
            built = nvcc.compile_cubin(request, timeout_s=timeout_s)
        except OSError as error:
            return BuildFailure(f"compiler could not be run: {error.strerror or error}", str(error))
        return built if isinstance(built, BuildFailure) else cache.store(key, built)


def builtin_binary(variant: Variant) -> Binary:
    """Return the binary of a kernel that is compiled into the extension: it has a name and no bytes."""
    return Binary(
        format="builtin",
        symbol=str(variant),
        sha256=bytes_fingerprint(b""),
        source=fingerprint(kind="builtin", variant=str(variant)),
        registers=0,
        smem_bytes=0,
        spill_bytes=0,
    )


class BuildPool:
    """Builds in the background, so that compiling overlaps with measuring.

    A variant that failed is not compiled again by this pool: one that takes its compiler down costs
    one job, not one for each problem. Leaving the context kills whatever still compiles.
    """

    def __init__(self, cache: BinaryCache, *, jobs: int, timeout_s: float = BUILD_TIMEOUT_S) -> None:
        self._cache = cache
        self._timeout_s = timeout_s
        self._keys: dict[BuildRequest, str] = {}
        self._failures: dict[str, BuildFailure] = {}
        self._executor = ThreadPoolExecutor(jobs, thread_name_prefix="build")
        self._lock = threading.Lock()
        self.compile_s = 0.0

    def __enter__(self) -> BuildPool:
        process.allow()
        return self

    def __exit__(self, *exc: object) -> None:
        process.stop_all()
        self._executor.shutdown(wait=True, cancel_futures=True)
        process.allow()

    def submit(self, variant: Variant, family: Family) -> Future[BuildResult]:
        """Queue one variant; the future holds its binary or failure, or raises what `build` raises."""
        return self._executor.submit(self._build, variant, family)

    def _build(self, variant: Variant, family: Family) -> BuildResult:
        request = family.build_request(variant)
        if request is None:
            return builtin_binary(variant)
        with self._lock:
            key = self._keys.get(request)
        if key is None:
            key = nvcc.source_key(request)
        with self._lock:
            self._keys[request] = key
        with self._cache.key_lock(key):
            if key in self._failures:
                return self._failures[key]
            begin = time.monotonic()
            result = _compile(request, key, self._cache, self._timeout_s)
            with self._lock:
                self.compile_s += time.monotonic() - begin
                if isinstance(result, BuildFailure):
                    self._failures[key] = result
            return result


def build_many(
    variants: Sequence[Variant],
    family_of: Callable[[Variant], Family],
    cache: BinaryCache,
    *,
    timeout_s: float = BUILD_TIMEOUT_S,
    jobs: int | None = None,
    on_done: Callable[[Variant, BuildResult], None] | None = None,
) -> dict[Variant, BuildResult]:
    """Build every variant, `jobs` at a time, calling `on_done` here as each is finished.

    Ctrl-C kills every compiler before it goes on up.
    """
    from concurrent.futures import as_completed

    results: dict[Variant, BuildResult] = {}
    with BuildPool(cache, jobs=jobs or default_jobs(), timeout_s=timeout_s) as pool:
        waiting = {pool.submit(variant, family_of(variant)): variant for variant in dict.fromkeys(variants)}
        for future in as_completed(waiting):
            variant = waiting[future]
            results[variant] = future.result()
            if on_done is not None:
                on_done(variant, results[variant])
    return results


def default_jobs(*, cores: int | None = None, available_bytes: int | None = None) -> int:
    """Return how many compilers may run at once: by cores and by memory, at least one."""
    if cores is None:
        cores = len(os.sched_getaffinity(0))
    if available_bytes is None:
        available_bytes = available_memory_bytes()
    return max(1, min(cores, available_bytes // MEMORY_PER_JOB_BYTES))


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the memory left to this process: the machine's, or its control group's if that is less."""
    limits = [_meminfo_available(meminfo)]
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = (_whole_number(cgroup / name) for name in (limit_name, used_name))
        if limit is not None and used is not None:
            limits.append(max(0, limit - used))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else MEMORY_PER_JOB_BYTES


def _meminfo_available(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _whole_number(path: Path) -> int | None:
    lines = list(_lines(path))
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ()
