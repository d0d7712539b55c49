"""Made-up records and packs for the pack and dispatch tests; no device and no family is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktlib.canonical import bytes_fingerprint
from ktlib.problem import Problem
from ktlib_generator.families.base import Device, KernelFacts, LaunchParameters
from ktlib_generator.pack import write_pack
from ktlib_generator.values import Binary, Environment, Measurement, Record, Status, Variant

H200 = Device(kind="cuda", name="test", arch="sm90a", sm_count=132)
LAPTOP = Device(kind="cpu", name="test", arch="cpu-x86_64_v3", sm_count=8)
H200_FACTS = {"kind": "cuda", "cc_major": 9, "cc_minor": 0, "sm_count": 132}


def image(variant: Variant) -> bytes:
    """Bytes that stand for a compiled kernel; run-time parameters do not change them."""
    kept = [f"{name}={value}" for name, value in variant.config if name != "group_m"]
    return ("cubin of " + ",".join(kept)).encode() * 7


def record(
    problem: str,
    *,
    device: Device = H200,
    us: float | None = 10.0,
    vendor_us: float | None = 14.0,
    status: Status = Status.OK,
    spread: float = 0.0,
    unix: int = 1,
    smem_bytes: int = 0,
    family: str = "",
    **config: int | str,
) -> Record:
    """One trial. `spread` is how far the outer samples lie from the median, relative."""
    asked = Problem.parse(problem)
    family = family or ("sm90_tma" if device.kind == "cuda" else "cpu_gemm")
    vendor = family == "vendor"
    if not vendor:
        config = {"tile_m": 128, "tile_n": 128, "dtype": asked.dtype, **config}
        if device.kind == "cuda":
            config = {"layout": asked.layout, "accumulate": asked.accumulate, **config}
    variant = Variant.make(family, device.arch, **config)

    def measurement(method: str, median: float) -> Measurement:
        low, high = median * (1 - 2 * spread), median * (1 + 2 * spread)
        return Measurement(method, "graph", (low, median, high))

    ok = status is Status.OK and us is not None
    data = b"" if device.kind == "cpu" or vendor else image(variant)
    binary = Binary(
        format="cubin" if data else "builtin",
        symbol="gemm",
        sha256=bytes_fingerprint(data),
        source="0" * 64,
        registers=168,
        smem_bytes=smem_bytes,
        spill_bytes=0,
        data=data,
    )
    paired = ok and not vendor and vendor_us is not None
    return Record(
        problem=asked,
        variant=variant,
        environment=Environment("test", device.arch, device.sm_count, "c0ffee", False),
        status=status,
        measured_unix=unix,
        measurement=measurement("ktlib_own", us) if ok and us is not None else None,
        baseline=measurement("torch", vendor_us) if paired and vendor_us is not None else None,
        binary=None if vendor else binary,
        log="" if status is Status.OK else "it went wrong",
    )


def facts(variant: Variant, binary: Binary) -> tuple[KernelFacts, LaunchParameters]:
    """What a family would say of the made-up kernels; config may carry min_align, k_multiple, persistent."""
    config = dict(variant.config)
    kept = Variant(variant.family, tuple(p for p in variant.config if p[0] != "group_m"), variant.arch)

    def number(name: str, otherwise: int) -> int:
        return int(config.get(name, otherwise))

    common: dict[str, Any] = {
        "name": str(kept),
        "symbol": binary.symbol,
        "family": variant.family,
        "arch": variant.arch,
        "dtype": str(config["dtype"]),
        "accumulate": str(config.get("accumulate", "fp32")),
        "tile_m": number("tile_m", 128),
        "tile_n": number("tile_n", 128),
        "min_align_bytes": number("min_align", 1),
        "k_multiple": number("k_multiple", 1),
    }
    launch = LaunchParameters(group_m=number("group_m", 1))
    if variant.family == "cpu_gemm":
        return KernelFacts(**common, abi="cpu_gemm_v1", layout="any"), launch
    boxes = {f"{operand}_box_{axis}": 64 for operand in "abc" for axis in ("inner", "outer")}
    return (
        KernelFacts(
            **common,
            **boxes,
            abi="sm90_tma_v1",
            layout=str(config["layout"]),
            tile_k=64,
            threads=384,
            smem_bytes=binary.smem_bytes,
            swizzle_bytes=128,
            registers=binary.registers,
            num_stages=4,
            persistent=number("persistent", 0),
        ),
        launch,
    )


def make_pack(path: Path, records: Sequence[Record], device: Device = H200, **options: Any) -> str:
    """Write a pack of the records, images taken from the records themselves; returns its path."""
    write_pack(path, records, {}, device, facts=facts, **options)
    return str(path)


def call(problem: str, **changes: Any) -> Mapping[str, Any]:
    """A problem as `_core.find_choice` takes it; A and B aligned like the whole unless said."""
    data = Problem.parse(problem).to_dict()
    return {**data, "align_ab": data["align"], **changes}
