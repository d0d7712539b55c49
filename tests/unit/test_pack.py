"""The pack writer, the winner policy and the C++ reader on good files; broken files are in tests/fuzz."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pack_cases import H200, LAPTOP, facts, image, make_pack, record

from ktlib import _core, problem
from ktlib_generator import pack, pack_file
from ktlib_generator.pack import Policy, pick_winner, write_pack
from ktlib_generator.values import Binary, Status


def test_numpy_dtypes_are_the_cpp_structs() -> None:
    twins = {
        "Section": pack_file.SECTION,
        "Header": pack_file.HEADER,
        "KernelRecord": pack_file.KERNEL,
        "EntryRecord": pack_file.ENTRY,
    }
    for name, fields in _core.pack_fields().items():
        dtype = twins.pop(name)
        assert dtype.fields is not None
        ours = [(f, dtype.fields[f][1], dtype.fields[f][0].itemsize) for f in dtype.names or ()]
        assert ours == [tuple(field) for field in fields], name
        assert dtype.itemsize == fields[-1][1] + fields[-1][2], name
    assert not twins


def test_enum_numbers_are_the_same_in_python_and_cpp() -> None:
    assert _core.enums() == {
        "dtype": list(problem.DTYPES),
        "layout": list(problem.LAYOUTS),
        "accumulate": list(problem.ACCUMULATES),
        "epilogue": list(problem.EPILOGUES),
        "tier": list(problem.TIERS),
        "device_kind": list(pack_file.DEVICE_KINDS),
        "family": list(pack_file.FAMILIES),
        "abi": list(pack_file.ABIS),
        "section": list(pack_file.SECTIONS),
    }


def test_what_python_writes_cpp_reads(tmp_path: Path) -> None:
    won = record("4096x4096x1024:nt:bf16", us=12.5, vendor_us=15.0, smem_bytes=200_000, group_m=8)
    lost = record("64x64x64", us=3.0, vendor_us=2.5)
    path = make_pack(tmp_path / "a.ktpack", [won, lost], meta={"suite": "made up"})
    info = _core.pack_info(path, verify_blobs=True)
    assert (info["arch"], info["profile"], info["device_kind"]) == ("sm90a", "sm90a-132", "cuda")
    assert (info["cc_major"], info["cc_minor"], info["sm_count"]) == (9, 0, 132)
    assert info["meta"] == {"suite": "made up", "policy": asdict(Policy()), "records": 2}
    (kernel,) = info["kernels"]
    assert won.binary is not None
    expected = facts(won.variant, won.binary)[0].to_dict()
    assert kernel["blob_sha256"] == hashlib.sha256(image(won.variant)).hexdigest()
    assert {name: kernel[name] for name in expected if name != "arch"} == {
        name: value for name, value in expected.items() if name != "arch"
    }
    by_problem = {entry["problem"]: entry for entry in info["entries"]}
    ours, vendors = by_problem[str(won.problem)], by_problem[str(lost.problem)]
    assert (ours["kernel"], ours["tier"], ours["group_m"]) == (kernel["name"], "exact", 8)
    assert (ours["latency_us"], ours["vendor_us"], ours["candidates"]) == (12.5, 15.0, 1)
    assert (vendors["kernel"], vendors["tier"]) == ("", "vendor")
    assert (vendors["latency_us"], vendors["vendor_us"]) == (3.0, 2.5)


def test_problem_text_is_the_same_in_python_and_cpp(tmp_path: Path) -> None:
    texts = [
        "64x64x64:nn:fp16",
        "65x63x61:tt:bf16",
        "64x64x64:nt:fp16:accumulate=fp16",
        "64x64x64:tn:fp32:align=4",
        "7x9x13:nn:fp16:align=1",
        "64x64x64:nn:fp16:batch=3",
    ]
    path = make_pack(tmp_path / "a.ktpack", [record(t, us=20.0) for t in texts])
    assert sorted(e["problem"] for e in _core.pack_info(path)["entries"]) == sorted(texts)


def test_a_cpu_pack_holds_no_image(tmp_path: Path) -> None:
    path = make_pack(tmp_path / "a.ktpack", [record("8x8x8:nn:fp32", device=LAPTOP)], LAPTOP)
    info = _core.pack_info(path, verify_blobs=True)
    assert (info["profile"], info["device_kind"], info["sm_count"]) == ("cpu-x86_64_v3", "cpu", 0)
    assert [k["blob_bytes"] for k in info["kernels"]] == [0]
    assert info["kernels"][0]["layout"] == "any"


def test_one_image_serves_many_problems_and_losers_are_not_packed(tmp_path: Path) -> None:
    records = [record(f"{m}x64x64", group_m=g) for m, g in ((64, 1), (128, 4), (256, 8))]
    records.append(record("64x64x64", us=13.0, tile_m=64))
    summary = write_pack(tmp_path / "a.ktpack", records, {}, H200, facts=facts)
    assert (summary.entries, summary.wins, summary.kernels) == (3, 3, 1)
    info = _core.pack_info(summary.path)
    assert [e["group_m"] for e in info["entries"]] == [1, 4, 8]
    assert info["file_bytes"] == summary.file_bytes == os.path.getsize(summary.path)


def test_equal_records_in_another_order_give_equal_bytes(tmp_path: Path) -> None:
    records = [record(f"{m}x64x64", tile_m=t) for m in (64, 128) for t in (64, 128)]
    first, second = (
        Path(make_pack(tmp_path / f"{i}.ktpack", r)) for i, r in enumerate((records, records[::-1]))
    )
    assert first.read_bytes() == second.read_bytes()


def test_path_outside_ascii_and_utf8(tmp_path: Path) -> None:
    for name in (b"b\xc3\xa4nke.ktpack", b"not-utf8-\xff.ktpack"):
        path = os.path.join(os.fsencode(tmp_path), name)
        make_pack(Path(os.fsdecode(path)), [record("64x64x64")])
        assert _core.pack_info(path)["path"] == os.fsdecode(path)
        assert _core.pack_info(os.fsdecode(path))["path"] == os.fsdecode(path)


def test_a_newer_minor_version_is_read_and_its_reserved_bytes_let_pass(tmp_path: Path) -> None:
    data = bytearray(Path(make_pack(tmp_path / "a.ktpack", [record("64x64x64")])).read_bytes())
    header = np.frombuffer(data, pack_file.HEADER, count=1)[0]
    header["version_minor"], header["reserved"][0] = 7, 1
    header["checksum"] = 0
    blobs = int(header["sections"][pack_file.SECTIONS.index("blobs")]["offset"])
    header["checksum"] = np.frombuffer(hashlib.sha256(data[:blobs]).digest(), np.uint8)
    (tmp_path / "b.ktpack").write_bytes(data)
    assert _core.pack_info(tmp_path / "b.ktpack")["version"] == (1, 7)


# pick_winner: each rule of the policy alone.


def test_the_highest_paired_speedup_wins_not_the_lowest_time() -> None:
    slow_clock = record("64x64x64", us=10.2, vendor_us=12.24, tile_m=64)
    fast_clock = record("64x64x64", us=10.1, vendor_us=12.0, tile_m=128)
    winner = pick_winner([fast_clock, slow_clock], Policy())
    assert winner is not None
    assert winner.record is slow_clock
    assert (winner.latency_us, winner.vendor_us, winner.candidates) == (10.2, 12.24, 2)


def test_a_vendor_that_stalled_beside_one_candidate_does_not_crown_it() -> None:
    """On busy cores a threaded library went from 0.18 to 23 ms for half of the trials."""
    stalled = [record("64x64x64", us=843.0, vendor_us=22998.0, tile_m=64)]
    quiet = [record("64x64x64", us=170.0, vendor_us=106.0, tile_m=t) for t in (96, 128)]
    winner = pick_winner([*stalled, *quiet], Policy())
    assert winner is not None
    assert winner.record is None
    faster = record("64x64x64", us=90.0, vendor_us=107.0, tile_m=256)
    winner = pick_winner([*stalled, *quiet, faster], Policy())
    assert winner is not None
    assert winner.record is faster


def test_a_record_too_noisy_to_mean_anything_does_not_win() -> None:
    wild = record("64x64x64", us=1.0, vendor_us=10.0, spread=0.4, tile_m=64)
    assert pack.record_noise(wild) > Policy().max_noise
    winner = pick_winner([wild], Policy())
    assert winner is not None
    assert winner.record is None


@pytest.mark.parametrize(("us", "wins"), [(9.7, True), (9.85, False), (10.5, False)])
def test_a_win_must_exceed_twice_the_noise(us: float, wins: bool) -> None:
    trial = record("64x64x64", us=us, vendor_us=10.0, spread=0.01)
    assert pack.record_noise(trial) == pytest.approx(0.01)  # so the bar is 1.02: 9.80 us
    winner = pick_winner([trial], Policy())
    assert winner is not None
    assert (winner.record is trial) == wins
    assert winner.latency_us == us


@pytest.mark.parametrize(("us", "wins"), [(9.9, False), (9.8, True)])
def test_a_quiet_run_does_not_make_a_tiny_gain_a_win(us: float, wins: bool) -> None:
    trial = record("64x64x64", us=us, vendor_us=10.0, spread=0.0001)
    winner = pick_winner([trial], Policy())
    assert winner is not None
    assert (winner.record is trial) == wins
    eager = pick_winner([trial], Policy(min_gain=0.001))
    assert eager is not None
    assert eager.record is trial


def test_inside_noise_the_smaller_shared_memory_wins_then_the_name() -> None:
    best = record("64x64x64", us=10.0, spread=0.02, smem_bytes=200_000, tile_m=256)
    small = record("64x64x64", us=10.1, spread=0.02, smem_bytes=100_000, tile_m=64)
    small_too = record("64x64x64", us=10.05, spread=0.02, smem_bytes=100_000, tile_m=96)
    behind = record("64x64x64", us=11.0, spread=0.0, smem_bytes=0, tile_m=32)
    winner = pick_winner([best, behind, small, small_too], Policy())
    assert winner is not None
    assert winner.record is small  # "tile_m=64" sorts before "tile_m=96"


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_only_right_results_win(status: Status) -> None:
    vendor = record("64x64x64", us=9.0, family="vendor", method="cublaslt_heuristic")
    winner = pick_winner([record("64x64x64", us=None, status=status), vendor], Policy())
    assert winner is not None
    assert winner.record is None
    assert (winner.latency_us, winner.vendor_us, winner.candidates) == (0.0, 9.0, 1)


def test_a_later_failure_of_the_same_variant_withdraws_its_win() -> None:
    right = record("64x64x64", unix=1)
    wrong = record("64x64x64", us=None, status=Status.WRONG_RESULT, unix=2)
    vendor = record("64x64x64", us=9.0, family="vendor")
    for order in ([right, wrong, vendor], [wrong, vendor, right]):
        winner = pick_winner(order, Policy())
        assert winner is not None
        assert winner.record is None


def test_a_vendor_routine_never_wins_and_a_kernel_without_baseline_neither() -> None:
    vendor = record("64x64x64", us=1.0, family="vendor")
    unpaired = record("64x64x64", us=0.5, vendor_us=None)
    winner = pick_winner([vendor, unpaired], Policy())
    assert winner is not None
    assert winner.record is None
    assert winner.vendor_us == 1.0
    assert pick_winner([unpaired], Policy()) is None


def test_a_shared_object_is_a_candidate_but_never_a_winner() -> None:
    trial = record("64x64x64:nn:fp32", device=LAPTOP)
    assert trial.binary is not None
    data = {**trial.binary.to_dict(), "format": "shared_object"}
    loaded = type(trial).from_dict({**trial.to_dict(), "binary": Binary(**data).to_dict()})
    winner = pick_winner([loaded], Policy())
    assert winner is not None
    assert winner.record is None
    assert winner.candidates == 1


def test_records_of_two_problems_or_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one problem on one device"):
        pick_winner([record("64x64x64"), record("64x64x128")], Policy())
    with pytest.raises(ValueError, match="one problem on one device"):
        pick_winner([record("64x64x64:nn:fp32"), record("64x64x64:nn:fp32", device=LAPTOP)], Policy())


# write_pack: what it refuses, and what a failure leaves behind.


def test_records_of_another_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"measured on cpu-x86_64_v3, this pack is for sm90a-132"):
        make_pack(tmp_path / "a.ktpack", [record("64x64x64:nn:fp32", device=LAPTOP)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("data", "word"), [(b"", "missing"), (b"other bytes", "damaged")])
def test_a_winner_without_its_image_is_refused(tmp_path: Path, data: bytes, word: str) -> None:
    trial = record("64x64x64")
    assert trial.binary is not None
    bare = type(trial).parse(str(trial))  # the text form leaves the image out
    with pytest.raises(ValueError, match=f"is {word} in the database"):
        write_pack(tmp_path / "a.ktpack", [bare], {trial.binary.sha256: data}, H200, facts=facts)
    good = {trial.binary.sha256: image(trial.variant)}
    assert write_pack(tmp_path / "a.ktpack", [bare], good, H200, facts=facts).wins == 1


def test_problems_without_a_time_are_named_and_get_no_entry(tmp_path: Path) -> None:
    failed = record("64x64x64", us=None, status=Status.TIMEOUT)
    summary = write_pack(tmp_path / "a.ktpack", [failed], {}, H200, facts=facts)
    assert (summary.entries, summary.unmeasured) == (0, (failed.problem,))
    assert _core.pack_info(summary.path)["entries"] == []


def test_a_full_disk_keeps_the_old_pack_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    path = Path(make_pack(tmp_path / "a.ktpack", [record("64x64x64")]))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*no pack was changed.*free some space") as caught:
        make_pack(path, [record("128x64x64")])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.ktpack"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="create the folder first"):
        make_pack(tmp_path / "nowhere" / "a.ktpack", [record("64x64x64")])
