"""The bytes of a pack: the twin of csrc/pack/format.hpp, the kernel table, and writing a file whole.

Must not know what a winner is. A test compares the dtypes with the C++ structs field by field.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktlib.canonical import bytes_fingerprint, canonical_json
from ktlib.problem import ACCUMULATES, DTYPES, EPILOGUES, LAYOUTS
from ktlib_generator.families.base import Device, KernelFacts
from ktlib_generator.values import Binary

MAGIC = b"KTLPACK\n"
VERSION = (1, 0)
VENDOR_KERNEL = 0xFFFFFFFF
ANY_LAYOUT = 0xFF
BLOB_ALIGN = 64
DEVICE_KINDS = ("", "cuda", "cpu")
FAMILIES = ("", "sm90_tma", "cpu_gemm")
ABIS = ("", "sm90_tma_v1", "cpu_gemm_v1")
SECTIONS = ("meta", "strings", "kernels", "entries", "model", "blobs")

SECTION = np.dtype([("offset", "<u8"), ("bytes", "<u8"), ("count", "<u4"), ("stride", "<u4")])
HEADER = np.dtype(
    [("magic", "S8"), ("version_major", "<u4"), ("version_minor", "<u4"), ("file_bytes", "<u8")]
    + [("checksum", "u1", 32)]
    + [(name, "<u4") for name in ("device_kind", "cc_major", "cc_minor", "sm_count")]
    + [("arch", "S32"), ("profile", "S64"), ("sections", SECTION, len(SECTIONS)), ("reserved", "u1", 200)]
)
# Fields of KernelRecord that are KernelFacts fields of the same name and type.
_COPIED = (
    *("tile_m", "tile_n", "tile_k", "threads", "cluster_m", "cluster_n", "smem_bytes", "ctas_per_sm"),
    *("persistent", "min_align_bytes", "a_box_inner", "a_box_outer", "b_box_inner", "b_box_outer"),
    *("c_box_inner", "c_box_outer", "swizzle_bytes", "registers", "num_stages", "spill_bytes", "k_multiple"),
)
KERNEL = np.dtype(
    [(name, "<u4") for name in ("name_offset", "name_bytes", "symbol_offset", "symbol_bytes")]
    + [("blob_offset", "<u8"), ("blob_bytes", "<u8"), ("blob_sha256", "u1", 32)]
    + [(name, "<u4") for name in ("family", "abi", "dtype", "layout", "accumulate", "epilogue", *_COPIED)]
    + [("reserved", "u1", 84)]
)
ENTRY = np.dtype(
    [(name, "<u4") for name in ("m", "n", "k", "batch")]
    + [(name, "u1") for name in ("layout", "dtype", "accumulate", "epilogue", "align", "tier")]
    + [("flags", "<u2")]
    + [(name, "<u4") for name in ("kernel", "group_m", "split_k", "candidates")]
    + [(name, "<f4") for name in ("latency_us", "vendor_us", "noise")]
    + [("reserved", "u1", 12)]
)


def compute_capability(device: Device) -> tuple[int, int]:
    """Read 9, 0 from `sm90a`; zeros for a CPU.

    Raises:
        ValueError: the arch of a GPU is not `sm`, digits and an optional letter.
    """
    if device.kind == "cpu":
        return 0, 0
    match = re.fullmatch(r"sm(\d+)(\d)[a-z]?", device.arch)
    if match is None:
        raise ValueError(f"pack: arch {device.arch!r} of a GPU must look like sm90a")
    return int(match[1]), int(match[2])


class _Strings:
    """Collects text once each; `add` returns offset and length."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._seen: dict[str, tuple[int, int]] = {}

    def add(self, text: str) -> tuple[int, int]:
        if text not in self._seen:
            encoded = text.encode("ascii")
            self._seen[text] = (len(self.data), len(encoded))
            self.data += encoded
        return self._seen[text]


class KernelTable:
    """The kernel table and its blobs; a kernel and an image are kept once however often they win."""

    def __init__(self, device: Device, binaries: Mapping[str, bytes]) -> None:
        self.rows: list[NDArray[Any]] = []
        self.strings = _Strings()
        self.blobs = bytearray()
        self._device = device
        self._binaries = binaries
        self._blob_at: dict[str, int] = {}
        self._kernel_at: dict[tuple[KernelFacts, str], int] = {}

    def add(self, facts: KernelFacts, binary: Binary) -> int:
        """Return the index of this kernel, adding it the first time."""
        key = (facts, binary.sha256)
        if key not in self._kernel_at:
            self.rows.append(self._row(facts, binary))
            self._kernel_at[key] = len(self.rows) - 1
        return self._kernel_at[key]

    def _row(self, facts: KernelFacts, binary: Binary) -> NDArray[Any]:
        if facts.family not in FAMILIES[1:] or facts.abi not in ABIS[1:]:
            raise ValueError(
                f"pack: {facts.name}: family {facts.family!r} or ABI {facts.abi!r} has no number in packs "
                f"(have: {', '.join(FAMILIES[1:])}; {', '.join(ABIS[1:])})"
            )
        if self._device.kind == "cuda" and facts.arch != self._device.arch:
            raise ValueError(
                f"pack: {facts.name} is built for {facts.arch}, the pack for {self._device.arch}"
            )
        row = np.zeros((), KERNEL)
        row["name_offset"], row["name_bytes"] = self.strings.add(facts.name)
        row["symbol_offset"], row["symbol_bytes"] = self.strings.add(facts.symbol)
        row["family"], row["abi"] = FAMILIES.index(facts.family), ABIS.index(facts.abi)
        row["layout"] = ANY_LAYOUT if facts.layout == "any" else LAYOUTS.index(facts.layout)
        row["dtype"] = DTYPES.index(facts.dtype)
        row["accumulate"] = ACCUMULATES.index(facts.accumulate)
        row["epilogue"] = EPILOGUES.index(facts.epilogue)
        for name in _COPIED:
            row[name] = getattr(facts, name)
        if binary.format != "builtin":
            row["blob_offset"], row["blob_bytes"] = self._blob(facts.name, binary)
            row["blob_sha256"] = np.frombuffer(bytes.fromhex(binary.sha256), np.uint8)
        return row

    def _blob(self, name: str, binary: Binary) -> tuple[int, int]:
        data = self._binaries.get(binary.sha256) or binary.data
        if not data or bytes_fingerprint(data) != binary.sha256:
            state = "damaged" if data else "missing"
            raise ValueError(
                f"pack: the image of {name} ({binary.sha256[:12]}...) is {state} in the database; "
                "build it again (ktlib-build tune on its problem) or restore the database"
            )
        if binary.sha256 not in self._blob_at:
            self.blobs += b"\0" * (-len(self.blobs) % BLOB_ALIGN)
            self._blob_at[binary.sha256] = len(self.blobs)
            self.blobs += data
        return self._blob_at[binary.sha256], len(data)


def file_bytes(
    device: Device, meta: Mapping[str, Any], kernels: KernelTable, rows: Sequence[NDArray[Any]]
) -> bytes:
    """Lay the sections out one after another and sign everything before the blobs."""
    parts = {
        "meta": canonical_json(meta).encode("ascii"),
        "strings": bytes(kernels.strings.data),
        "kernels": b"".join(row.tobytes() for row in kernels.rows),
        "entries": b"".join(row.tobytes() for row in rows),
        "model": b"",
        "blobs": bytes(kernels.blobs),
    }
    header, body = np.zeros((), HEADER), bytearray()
    for index, name in enumerate(SECTIONS):
        body += b"\0" * (-(HEADER.itemsize + len(body)) % BLOB_ALIGN)
        stride = {"kernels": KERNEL.itemsize, "entries": ENTRY.itemsize}.get(name, 1)
        size = len(parts[name])
        header["sections"][index] = (HEADER.itemsize + len(body), size, size // stride, stride)
        body += parts[name]
    header["magic"] = MAGIC
    header["version_major"], header["version_minor"] = VERSION
    header["file_bytes"] = HEADER.itemsize + len(body)
    header["device_kind"] = DEVICE_KINDS.index(device.kind)
    header["cc_major"], header["cc_minor"] = compute_capability(device)
    header["sm_count"] = 0 if device.kind == "cpu" else device.sm_count
    for name, text in (("arch", device.arch), ("profile", device.profile)):
        if len(text) >= HEADER[name].itemsize:
            raise ValueError(f"pack: {name} {text!r} is longer than {HEADER[name].itemsize - 1} characters")
        header[name] = text.encode("ascii")
    signed = int(header["sections"][SECTIONS.index("blobs")]["offset"]) - HEADER.itemsize
    digest = hashlib.sha256(header.tobytes() + body[:signed]).digest()
    header["checksum"] = np.frombuffer(digest, np.uint8)
    return header.tobytes() + bytes(body)


def write_whole(path: Path, data: bytes) -> None:
    """Write through a temporary file in the same folder, synced, then renamed over `path`."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        hint = {
            errno.ENOSPC: "free some space or choose another folder",
            errno.EDQUOT: "the quota is used up; free some space or choose another folder",
            errno.ENOENT: "create the folder first",
        }.get(error.errno or 0, "choose a folder you can write to")
        raise OSError(
            error.errno, f"{os.strerror(error.errno or 0)}; no pack was changed; {hint}", str(path)
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(folder)
