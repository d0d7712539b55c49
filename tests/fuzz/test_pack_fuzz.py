"""Broken packs: always a ValueError or OSError with the path and the reason, never a crash or a wild read.

This file is also the child that reads the corpus (`python test_pack_fuzz.py good.ktpack folder`): it prints
one JSON line before and after each case, so that a crash names its case.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pack_cases import H200, H200_FACTS, LAPTOP, call, make_pack, record

from ktlib import _core
from ktlib_generator import pack_file
from ktlib_generator.families.base import Device

Case = tuple[str, bytes, str]  # label, content, must be refused ("refused") or may be fine ("any")
SEED = 20240611
BLOBS = pack_file.SECTIONS.index("blobs")


def header_of(data: bytearray) -> Any:
    return np.frombuffer(data, pack_file.HEADER, count=1)[0]


def signed(data: bytearray) -> bytes:
    """Make the checksum right again, so that the checks behind it are reached."""
    header = header_of(data)
    end = min(int(header["sections"][BLOBS]["offset"]), len(data))
    header["checksum"] = 0
    header["checksum"] = np.frombuffer(hashlib.sha256(data[:end]).digest(), np.uint8)
    return bytes(data)


def truncations(good: bytes) -> Iterator[Case]:
    lengths = {*range(0, 520, 7), 1, 2, 511, 512, 513, *range(512, len(good), 61), len(good) - 1}
    for length in sorted(lengths):
        yield f"first {length} bytes", good[:length], "refused"
        longer = bytearray(good[:length])
        if length >= 512:  # truncated by someone who also fixed the size and the checksum
            header_of(longer)["file_bytes"] = length
            yield f"first {length} bytes, signed", signed(longer), "refused"
    yield "one byte more", good + b"\0", "refused"


def flips(good: bytes) -> Iterator[Case]:
    for at in range(512):
        for mask in (0x01, 0xFF):
            data = bytearray(good)
            data[at] ^= mask
            yield f"header byte {at} ^ {mask:#x}", bytes(data), "refused"
    draw = random.Random(SEED)
    blobs = int(header_of(bytearray(good))["sections"][BLOBS]["offset"])
    for _ in range(400):
        data = bytearray(good)
        at = draw.randrange(512, blobs)
        data[at] ^= 1 << draw.randrange(8)
        yield f"byte {at} flipped", bytes(data), "refused"


def signed_noise(good: bytes) -> Iterator[Case]:
    """Random damage with a right checksum: may be a legal pack, must never be a wild read."""
    draw = random.Random(SEED + 1)
    blobs = int(header_of(bytearray(good))["sections"][BLOBS]["offset"])
    extremes = (0, 1, 0x7F, 0x80, 0xFF)
    for number in range(3000):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(72, blobs) if number % 3 else draw.randrange(72, 512)
            width = draw.choice((1, 4, 8))
            data[at : at + width] = bytes(draw.choice((*extremes, draw.randrange(256))) for _ in range(width))
        yield f"signed noise {number}", signed(data[: len(good)]), "any"


def field_edits(good: bytes) -> Iterator[Case]:
    """One field out of range at a time, checksum right: each must be refused by its own check."""
    big64, big32 = 2**64 - 1, 2**32 - 1

    def edit(label: str, change: Callable[[bytearray], None]) -> Case:
        data = bytearray(good)
        change(data)
        return label, signed(data), "refused"

    for index, name in enumerate(pack_file.SECTIONS):
        for field, values in {
            "offset": (0, 511, len(good) + 1, 2**63, big64, big64 - 63),
            "bytes": (len(good), 2**63, big64),
            "count": (big32, big32 // 64 + 1),
            "stride": (0, 3, big32),
        }.items():
            for value in values:

                def section(data: bytearray, i: int = index, f: str = field, v: int = value) -> None:
                    header_of(data)["sections"][i][f] = v

                yield edit(f"section {name}: {field}={value}", section)

    def table(dtype: Any, name: str, field: str, value: Any) -> Case:
        def change(data: bytearray) -> None:
            section = header_of(data)["sections"][pack_file.SECTIONS.index(name)]
            rows = np.frombuffer(data, dtype, count=int(section["count"]), offset=int(section["offset"]))
            rows[0][field] = value

        return edit(f"{name}[0].{field}={value}", change)

    nan = float("nan")
    for field, values in {
        **dict.fromkeys(("name_offset", "name_bytes", "symbol_offset", "symbol_bytes"), (big32,)),
        "blob_offset": (64 * 2**40, big64 - 63, big64, 1),
        "blob_bytes": (0, 2**40, big64),
        **dict.fromkeys(("family", "abi"), (0, 9, big32)),
        **dict.fromkeys(
            ("dtype", "layout", "accumulate", "epilogue", "persistent", "swizzle_bytes"), (9, big32)
        ),
        **dict.fromkeys(("tile_m", "tile_n", "tile_k", "k_multiple"), (0, 1025, big32)),
        "threads": (0, 33, 1056, big32),
        **dict.fromkeys(("cluster_m", "cluster_n"), (0, 17, big32)),
        "smem_bytes": (256 * 1024 + 1, big32),
        "ctas_per_sm": (0, 33),
        "min_align_bytes": (0, 3, 32),
        **{f"{o}_box_{a}": (0, 257, big32) for o in "abc" for a in ("inner", "outer")},
        "registers": (256,),
        "num_stages": (65,),
        "reserved": (1,),
    }.items():
        for value in values:
            yield table(pack_file.KERNEL, "kernels", field, value)
    for field, values in {
        **dict.fromkeys(("m", "n", "k", "batch"), (0, 2**31)),
        **dict.fromkeys(("layout", "dtype", "accumulate", "epilogue"), (9, 255)),
        "align": (0, 3, 32),
        "tier": (1, 2, 3, 4, 5, 255),
        "flags": (1,),
        "kernel": (1000, big32, big32 - 1),
        "group_m": (0, 65536),
        "split_k": (0, 65536),
        "latency_us": (nan, float("inf"), -1.0, 0.0),
        "vendor_us": (nan, float("inf"), -1.0, 0.0),
        "noise": (nan, float("inf"), -0.5),
        "reserved": (1,),
    }.items():
        for value in values:
            yield table(pack_file.ENTRY, "entries", field, value)

    for field, values in {
        "magic": (b"KTLPACK\0", b"\x89HDF\r\n\x1a\n"),
        "version_major": (0, 2, big32),
        "file_bytes": (0, big64),
        "device_kind": (0, 2, 3),
        "cc_major": (0, 100),
        "cc_minor": (10,),
        "sm_count": (0, big32),
        "arch": (b"", b"x" * 32, b"sm 90a", b"sm90a\0x"),
        "profile": (b"", b"x" * 64, b"\xff"),
        "reserved": (1,),
    }.items():
        for value in values:

            def in_header(data: bytearray, f: str = field, v: Any = value) -> None:
                header_of(data)[f] = v

            yield edit(f"header.{field}={value!r}", in_header)


# A CPU kernel has no boxes or threads, and its tile may be anything.
LEGAL_FOR_A_CPU = {
    *(f"kernels[0].{name}=0" for name in ("blob_bytes", "tile_m", "tile_n", "tile_k", "threads")),
    *(f"kernels[0].{operand}_box_{axis}=0" for operand in "abc" for axis in ("inner", "outer")),
    *("kernels[0].threads=33", "header.device_kind=2", "header.cc_major=0", "header.sm_count=0"),
}
CORPUS = (truncations, flips, signed_noise, field_edits)


def read_all(path: str) -> None:
    """Everything that a pack's user may touch."""
    info = _core.pack_info(path)
    device = H200_FACTS if info["device_kind"] == "cuda" else {"kind": "cpu", "cpu_archs": [info["arch"]]}
    for text in ("64x64x64", "130x120x64", "1x1x1", "64x64x64:nn:fp32", "4096x4096x4096:nt:bf16"):
        _core.find_choice([path], {**device}, call(text))
    _core.pack_info(path, verify_blobs=True)


def child(good_path: str, folder: str) -> None:
    """Read the corpus; one JSON line when a case starts and one with its outcome."""
    good = Path(good_path).read_bytes()
    path = os.path.join(folder, "case.ktpack")
    for cases in CORPUS:
        for label, content, expected in cases(good):
            Path(path).write_bytes(content)
            print(json.dumps({"case": label}), flush=True)
            try:
                read_all(path)
                outcome = "accepted"
            except (ValueError, OSError) as error:
                outcome = str(error)
            print(json.dumps({"case": label, "expected": expected, "outcome": outcome}), flush=True)


@pytest.mark.parametrize("device", [H200, LAPTOP], ids=["cuda", "cpu"])
def test_no_broken_pack_crashes_or_is_taken(tmp_path: Path, device: Device) -> None:
    dtype = "fp16" if device is H200 else "fp32"
    records = [
        record("64x64x64:nn:" + dtype, device=device),
        record("128x128x64:nn:" + dtype, device=device, tile_m=64),
        record("256x128x64:nn:" + dtype, device=device, us=20.0),
    ]
    good = make_pack(tmp_path / "good.ktpack", records, device)
    _core.pack_info(good, verify_blobs=True)
    result = subprocess.run(
        [sys.executable, __file__, good, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, f"died at {lines[-1:]}: {result.stderr[-2000:]}"
    done = [line for line in lines if "outcome" in line]
    assert len(done) > 4000
    prefix = f"{tmp_path}/case.ktpack"
    outcomes = {line["outcome"] for line in done}
    assert [o for o in outcomes if o != "accepted" and prefix not in o] == []
    assert any(line["outcome"] == "accepted" for line in done)  # the right checksums are right
    taken = {line["case"] for line in done if line["expected"] == "refused" and line["outcome"] == "accepted"}
    assert taken == (set() if device is H200 else LEGAL_FOR_A_CPU)


def test_a_damaged_image_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    path = Path(make_pack(tmp_path / "a.ktpack", [record("64x64x64")]))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(_core.pack_info(path)["kernels"]) == 1  # opening does not read images
    with pytest.raises(
        ValueError, match=r"a\.ktpack: the image of kernel sm90_tma/.* does not match its sha256"
    ):
        _core.pack_info(path, verify_blobs=True)


def test_things_that_are_not_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot open the pack"):
        _core.pack_info(tmp_path / "nowhere.ktpack")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        _core.pack_info(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # must not wait for a writer
    with pytest.raises(OSError, match="is not a regular file"):
        _core.pack_info(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        _core.pack_info("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="cannot open the pack"):
        _core.pack_info(tmp_path / "loop")
    with pytest.raises(ValueError, match="null byte"):
        _core.pack_info(f"{tmp_path}/a\0b")
    with pytest.raises(TypeError):
        _core.pack_info(7)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has 0 bytes, too few for the 512-byte header"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 1000, "this is a tuning database"),
        (b"\0" * 4096, "is not a .ktpack file"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "other.ktpack"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        _core.pack_info(path)
    assert str(caught.value).startswith(str(path))


def test_a_path_that_is_not_utf8_is_named_in_the_error(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xff.ktpack")
    Path(os.fsdecode(path)).write_bytes(b"")
    with pytest.raises(ValueError, match="too few") as caught:
        _core.pack_info(path)
    assert os.fsdecode(path) in str(caught.value)


@pytest.mark.parametrize("filling", [b"[", b"9", b"}"], ids=["deep", "long number", "no value"])
def test_meta_that_is_not_json_is_refused_with_the_path(tmp_path: Path, filling: bytes) -> None:
    path = Path(make_pack(tmp_path / "a.ktpack", [record("64x64x64")], meta={"note": "x" * 200_000}))
    data = bytearray(path.read_bytes())
    section = header_of(data)["sections"][pack_file.SECTIONS.index("meta")]
    at, size = int(section["offset"]), int(section["bytes"])
    data[at : at + size] = filling * size
    path.write_bytes(signed(data))
    with pytest.raises(ValueError, match=r"a\.ktpack: meta is not JSON"):
        _core.pack_info(path)


def test_another_major_version_says_what_to_do(tmp_path: Path) -> None:
    path = Path(make_pack(tmp_path / "a.ktpack", [record("64x64x64")]))
    data = bytearray(path.read_bytes())
    header_of(data)["version_major"] = 2
    path.write_bytes(signed(data))
    with pytest.raises(ValueError, match=r"version 2\.0, this ktlib reads 1\.x; update ktlib or pack"):
        _core.pack_info(path)


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2])
