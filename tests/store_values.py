"""Records, binaries and a small database for the store's tests; everything here is fixed, nothing random."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ktlib.problem import Problem
from ktlib_generator.store import write_database
from ktlib_generator.store.schema import SEAL_BYTES, seal
from ktlib_generator.values import (
    Binary,
    Environment,
    Measurement,
    Record,
    Status,
    Variant,
    Verification,
)

BLOB = b"\x7fELF" + bytes(range(256)) * 2
BLOB_SHA256 = hashlib.sha256(BLOB).hexdigest()
META = {"command": "ktlib-build tune 64x64x64", "created": "2026-01-02T03:04:05Z"}
STATUSES = tuple(status for status in Status if status is not Status.OK)


def environment(sm_count: int = 132, **facts: str) -> Environment:
    return Environment(
        device="NVIDIA H200",
        arch="sm90a",
        sm_count=sm_count,
        commit="0123abcd",
        dirty=False,
        facts=tuple({"driver": "580.1", **facts}.items()),
    )


def binary(symbol: str = "gemm") -> Binary:
    return Binary(
        format="cubin",
        symbol=symbol,
        sha256=BLOB_SHA256,
        source="5" * 64,
        registers=168,
        smem_bytes=1024,
        spill_bytes=0,
    )


def variant(stages: int = 4, **config: int) -> Variant:
    return Variant.make("sm90_tma", "sm90a", num_stages=stages, dtype="bf16", **config)


def ok_record(stages: int = 4, *, env: Environment | None = None, measured_unix: int = 1700000000) -> Record:
    return Record(
        problem=Problem(4096, 4096, 1024, "nt", "bf16"),
        variant=variant(stages),
        environment=env or environment(),
        status=Status.OK,
        measured_unix=measured_unix,
        measurement=Measurement("ktlib_own", "graph", (20.25 + stages, 20.5 + stages, 0.1 + stages)),
        baseline=Measurement("cublaslt_heuristic", "graph", (25.0, 1 / 3)),
        verification=Verification(1.0009765625, ("zero_one", "width")),
        binary=binary(),
    )


def failed_record(status: Status = Status.TIMEOUT, log: str = "no answer in 10 s") -> Record:
    return Record(
        problem=Problem(64, 65, 66, dtype="bf16", align=2),
        variant=variant(3, tile_m=128),
        environment=environment(),
        status=status,
        measured_unix=1700000001,
        log=log,
    )


def sample_records() -> list[Record]:
    """Every status, a vendor record without baseline, two environments, texts outside ASCII and torn ones."""
    vendor = Record(
        problem=Problem(64, 64, 64, dtype="fp16", accumulate="fp16", batch=3),
        variant=Variant.make("vendor", "sm90a", method="cublaslt_heuristic"),
        environment=environment(dnn="9"),
        status=Status.OK,
        measured_unix=0,
        measurement=Measurement("cublaslt_heuristic", "graph", (5.0,)),
    )
    logs = ("ptxas: plain", "größer als 227 KiB 日本", "cut \udc9f here", "a\nb\0c", "x" * 5000)
    failed = [failed_record(status, log) for status, log in zip(STATUSES, logs, strict=True)]
    return [*(ok_record(stages) for stages in range(2, 8)), vendor, *failed]


def write_sample(path: Path) -> Path:
    write_database(path, sample_records(), {BLOB_SHA256: BLOB}, META)
    return path


def reseal(path: Path) -> Path:
    """Give a changed file a seal that fits, so that only the checks behind the seal can refuse it."""
    body = path.read_bytes()[SEAL_BYTES:]
    path.write_bytes(seal(body) + body)
    return path
