"""Journals: what a reader does with torn, damaged and foreign files, and what a writer repairs."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_values import environment, failed_record, ok_record, sample_records

from ktlib.canonical import bytes_fingerprint, canonical_json
from ktlib_generator.store.journal import Journal, JournalError, JournalWarning, journals_of, read_journal
from ktlib_generator.values import Record, Status


def write(path: Path, records: list[Record]) -> bytes:
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    return path.read_bytes()


def checked_line(record: Any) -> bytes:
    checksum = bytes_fingerprint(canonical_json(record).encode())[:16]
    return canonical_json({"record": record, "sha256": checksum}).encode() + b"\n"


def test_every_record_comes_back_equal_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    data = write(path, sample_records())
    assert Journal(path).records() == sample_records()
    assert Journal(path).keys() == {record.key for record in sample_records()}
    assert data.count(b"\n") == len(sample_records()) + 1
    assert json.loads(data.splitlines()[0]) == {
        "format": "ktlib-journal",
        "profile": "sm90a-132",
        "version": 1,
    }


def test_a_journal_not_yet_written_is_empty(tmp_path: Path) -> None:
    assert Journal(tmp_path / "none.jsonl").records() == []
    assert Journal(tmp_path / "none.jsonl").keys() == set()
    assert not (tmp_path / "none.jsonl").exists()


def test_each_append_is_one_write_and_one_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return real(*arguments)

        return call

    with Journal(tmp_path / "j.jsonl") as journal:
        journal.append(ok_record())
        monkeypatch.setattr(os, "write", spy("write"))
        monkeypatch.setattr(os, "fsync", spy("fsync"))
        journal.append(ok_record(5))
    assert calls == ["write", "fsync"]


def test_a_file_cut_anywhere_gives_the_records_that_are_whole_and_can_be_appended_to(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j.jsonl"
    data = write(path, [ok_record(), failed_record()])
    ends = [position for position, byte in enumerate(data) if byte == ord("\n")]
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        # A record is whole once its last byte but the line end is there.
        whole = sum(1 for end in ends[1:] if length >= end)
        content = read_journal(path)
        assert len(content.records) == whole, length
        assert content.findings == ()
        with Journal(path) as journal:
            journal.append(ok_record(9))
        assert read_journal(path).records == (*(ok_record(), failed_record())[:whole], ok_record(9)), length
        assert path.read_bytes().endswith(b"\n")


def test_a_last_record_that_lost_only_its_line_end_is_kept_by_reader_and_writer(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(write(path, [ok_record()])[:-1])
    assert read_journal(path).records == (ok_record(),)
    with Journal(path) as journal:
        journal.append(ok_record(5))
    assert read_journal(path).records == (ok_record(), ok_record(5))


def test_a_flipped_byte_in_a_line_costs_that_line_and_is_named_by_path_and_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j.jsonl"
    records = [ok_record(2), ok_record(3), ok_record(4)]
    data = write(path, records)
    lines = data.splitlines(keepends=True)
    start = len(lines[0]) + len(lines[1])
    for position in range(start, start + len(lines[2]) - 1, 11):
        damaged = bytearray(data)
        damaged[position] ^= 0x01
        path.write_bytes(bytes(damaged))
        content = read_journal(path)
        assert content.records == (records[0], records[2]), position
        assert content.findings[0].startswith(f"{path}:3: "), position


def test_bad_lines_are_warned_of_with_their_reason_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    data = write(path, [ok_record()])
    wrong_status = {**ok_record(5).to_dict(), "status": "timeout"}
    foreign = ok_record(5, env=environment(sm_count=114)).to_dict()
    path.write_bytes(
        data
        + b"garbage\n"
        + b"[1]\n"
        + b"\xff\xfe\n"
        + b"[" * 100_000
        + b"\n"
        + checked_line(wrong_status)
        + checked_line(foreign)
        + data.splitlines(keepends=True)[1]
    )
    with pytest.warns(JournalWarning) as warned:
        records = Journal(path).records()
    assert records == [ok_record(), ok_record()]
    text = "\n".join(str(warning.message) for warning in warned)
    for number in range(3, 9):
        assert f"{path}:{number}: " in text
    assert "disagree" in text
    assert "profile sm90a-114 in a journal of sm90a-132" in text


@pytest.mark.parametrize("sample", ["Infinity", "-Infinity", "NaN", "0.0", "-1.0", "5e-324"])
def test_e29_a_time_that_is_no_time_is_refused_when_read_though_its_checksum_fits(
    tmp_path: Path, sample: str
) -> None:
    path = tmp_path / "j.jsonl"
    data = write(path, [ok_record()])
    record = {**ok_record(5).to_dict(), "measurement": {"method": "a", "protocol": "g", "samples_us": [1.5]}}
    text = json.dumps(record, sort_keys=True, separators=(",", ":")).replace("[1.5]", f"[{sample}]")
    checksum = bytes_fingerprint(text.encode())[:16]
    path.write_bytes(data + f'{{"record":{text},"sha256":"{checksum}"}}\n'.encode())
    content = read_journal(path)
    assert content.records == (ok_record(),)
    assert f"{path}:3: " in content.findings[0]


def test_a_journal_of_another_version_is_refused_by_reader_and_writer_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    data = write(path, [ok_record()]).replace(b'"version":1', b'"version":2')
    path.write_bytes(data)
    for use in (Journal(path).records, Journal(path).keys, Journal(path).open):
        with pytest.raises(JournalError, match=r"journal version 2, this ktlib reads version 1"):
            use()
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "content", [b"my notes", b"my notes\nline\n", b'{"format":"other"}\n', b"\0" * 64, b"\n"]
)
def test_a_file_that_is_no_journal_is_refused_and_never_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="not a ktlib journal"):
        Journal(path).append(ok_record())
    assert path.read_bytes() == content


def test_a_record_of_another_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.append(ok_record())
        with pytest.raises(JournalError, match="profile sm90a-114 in a journal of sm90a-132"):
            journal.append(ok_record(env=environment(sm_count=114)))
    with pytest.raises(JournalError, match="wanted cpu-x86_64_v4"):
        Journal(path, "cpu-x86_64_v4").open()
    assert Journal(path).records() == [ok_record()]


def test_an_unusable_path_is_found_before_any_work_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases = (
        (tmp_path / "file" / "j.jsonl", "check"),
        (tmp_path, "not of a folder"),
        (tmp_path / ("x" * 300), "shorter"),
        (Path("/proc/none/j.jsonl"), "check"),
        (tmp_path / "a\0b", "null"),
    )
    for path, advice in cases:
        with pytest.raises(JournalError, match=advice):
            Journal(path, "sm90a-132").open()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_read_only_place_says_to_choose_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(JournalError, match="choose a folder you may write to"):
        Journal(tmp_path / "j.jsonl", "sm90a-132").open()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_in_the_middle_of_a_line_loses_nothing_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "j.jsonl"
    real = os.write
    room = [40]

    def filling(descriptor: int, data: Any) -> int:
        if room[0] == 0:
            raise OSError(number, os.strerror(number))
        count = real(descriptor, bytes(data)[: room[0]])
        room[0] -= count
        return count

    with Journal(path) as journal:
        journal.append(ok_record(2))
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", filling)
            with pytest.raises(JournalError, match=r"free space .* every record before this one is kept"):
                journal.append(ok_record(3))
        assert path.read_bytes() == before
        journal.append(ok_record(4))
    assert Journal(path).records() == [ok_record(2), ok_record(4)]


def test_a_failing_fsync_does_not_leave_the_record_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j.jsonl"

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Journal(path) as journal:
        journal.append(ok_record(2))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(JournalError, match="cannot append"):
                journal.append(ok_record(3))
    assert Journal(path).records() == [ok_record(2)]


def test_a_value_that_would_not_read_back_is_refused_before_it_is_written(tmp_path: Path) -> None:
    record = ok_record()
    object.__setattr__(record, "log", float("nan"))
    with Journal(tmp_path / "j.jsonl") as journal:
        journal.append(failed_record(Status.REFUSED))
        before = journal.path.read_bytes()
        with pytest.raises(JournalError, match="cannot be stored"):
            journal.append(record)
        assert journal.path.read_bytes() == before


def test_a_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    write(tmp_path / "j.jsonl", [ok_record()])
    assert Journal(tmp_path / "j.jsonl").records() == [ok_record()]


def test_a_run_directory_lists_its_journals_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    assert [path.name for path in journals_of(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert journals_of(tmp_path / "none") == []
