"""Journal and database under fire: killed writers, full disks, two writers, concurrent readers, odd paths."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from store_values import (
    BLOB,
    BLOB_SHA256,
    META,
    environment,
    failed_record,
    ok_record,
    sample_records,
    write_sample,
)

from ktlib_generator.store import (
    DatabaseError,
    Journal,
    JournalError,
    StoreError,
    files,
    merge,
    read_database,
    read_journal,
    verify,
    write_database,
)
from ktlib_generator.values import Record, Variant


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a child that sees the modules this process sees; it prints `ready` when it is under way."""
    paths = os.pathsep.join(dict.fromkeys([*sys.path, str(Path(__file__).resolve().parents[1])]))
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


APPEND_FOR_EVER = """
import sys
from ktlib_generator.store.journal import Journal
from store_values import ok_record
with Journal(sys.argv[1]) as journal:
    for number in range(10**6):
        journal.append(ok_record(number))
        print(number, flush=True)
"""

REPLACE_FOR_EVER = """
import sys
from ktlib_generator.store import write_database
from store_values import BLOB, BLOB_SHA256, ok_record
for number in range(10**6):
    write_database(sys.argv[1], [ok_record(s) for s in range(number % 2 + 1)], {BLOB_SHA256: BLOB})
    print(number, flush=True)
"""


def test_e07_e42_a_sigkilled_journal_writer_loses_at_most_the_record_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "run" / "j.jsonl"
    child = python(APPEND_FOR_EVER, path)
    assert child.stdout is not None
    told = -1
    for line in child.stdout:
        told = int(line)
        if told == 20:
            break
    child.send_signal(signal.SIGKILL)
    rest, _ = child.communicate()
    told = max([told, *(int(line) for line in rest.split())])
    with Journal(path) as journal:
        records = journal.records()
        assert records[: told + 1] == [ok_record(number) for number in range(told + 1)]
        assert len(records) <= told + 2
        keys = journal.keys()
        assert ok_record(told).key in keys
        journal.append(failed_record())
    content = read_journal(path)
    assert content.records == (*records, failed_record())
    assert content.findings == ()


def test_two_runs_cannot_write_one_journal_but_one_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    child = python(APPEND_FOR_EVER, path)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        with pytest.raises(JournalError, match="another run is writing this journal"):
            Journal(path).append(ok_record(999))
        assert ok_record(0) in read_journal(path).records
    finally:
        child.kill()
        child.communicate()
    with Journal(path) as journal:
        journal.append(ok_record(999))


def test_several_threads_share_one_journal_without_mixing_lines(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl") as journal:
        threads = [
            threading.Thread(target=lambda t=t: [journal.append(ok_record(100 * t + i)) for i in range(10)])
            for t in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    content = read_journal(journal.path)
    assert content.findings == ()
    assert {str(r.variant) for r in content.records} == {
        str(ok_record(100 * t + i).variant) for t in range(4) for i in range(10)
    }


def test_a_database_reads_back_equal_whatever_order_it_was_given_in(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a.h5")
    database = read_database(path)
    assert set(database.records) == set(sample_records())
    assert len(database.records) == len(sample_records())
    assert {r.fingerprint() for r in database.records} == {r.fingerprint() for r in sample_records()}
    assert database.binaries == {BLOB_SHA256: BLOB}
    assert database.meta == META
    assert database.profile == "sm90a-132"
    assert verify(path) == []
    other = tmp_path / "b.h5"
    write_database(other, [*reversed(sample_records()), ok_record()], {BLOB_SHA256: BLOB}, META)
    assert other.read_bytes() == path.read_bytes()


def test_only_binaries_of_ok_records_are_kept_and_each_must_be_its_sha256(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_database(path, [failed_record()], {BLOB_SHA256: BLOB})
    assert read_database(path).binaries == {}
    write_database(path, [ok_record()], {BLOB_SHA256: BLOB, "0" * 64: b"unused"})
    assert read_database(path).binaries == {BLOB_SHA256: BLOB}
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="given as"):
        write_database(path, [ok_record()], {BLOB_SHA256: BLOB + b"x"})
    assert path.read_bytes() == before


def test_e24_nothing_to_store_is_an_error_not_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with pytest.raises(DatabaseError, match="no records"):
        write_database(path, [], {})
    with Journal(tmp_path / "j.jsonl", "sm90a-132") as journal:
        journal.open()
    with pytest.raises(DatabaseError, match="nothing to merge"):
        merge([tmp_path / "j.jsonl"], path)
    assert not path.exists()


def test_records_of_two_profiles_do_not_share_a_file(tmp_path: Path) -> None:
    foreign = ok_record(env=environment(sm_count=114))
    with pytest.raises(DatabaseError, match="sm90a-114, sm90a-132"):
        write_database(tmp_path / "a.h5", [ok_record(), foreign], {})
    write_database(tmp_path / "b.h5", [foreign], {})
    path = write_sample(tmp_path / "a.h5")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"b\.h5: profile sm90a-114, but .*a\.h5 is of sm90a-132"):
        merge([tmp_path / "b.h5"], path)
    assert path.read_bytes() == before


def test_e21_records_with_and_without_a_newer_parameter_live_together(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    old = ok_record(4)
    new = Record.from_dict({**old.to_dict(), "variant": str(old.variant.replace(cluster_m=2))})
    write_database(path, [old, new], {})
    variants = {record.variant for record in read_database(path).records}
    assert variants == {old.variant, new.variant}
    with pytest.raises(KeyError, match="no parameter 'cluster_m'"):
        Variant.parse(str(old.variant))["cluster_m"]


def test_e11_a_disk_full_half_way_leaves_the_old_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sample(tmp_path / "a.h5")
    before = path.read_bytes()
    real = os.write

    def filling(descriptor: int, data: Any) -> int:
        if os.fstat(descriptor).st_size >= 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, bytes(data)[:4096])

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(StoreError, match=r"free space .*an older file there is unchanged"):
        write_database(path, [ok_record()], {BLOB_SHA256: BLOB})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.h5"]


def test_e11_a_real_file_size_limit_stops_journal_and_database_cleanly(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a.h5")
    before = path.read_bytes()
    journal = Journal(tmp_path / "j.jsonl")
    journal.append(ok_record())
    kept = journal.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) + 100, hard))
    try:
        with pytest.raises(StoreError, match="file size limit"):
            write_database(path, [ok_record()], {BLOB_SHA256: BLOB})
        with pytest.raises(JournalError, match="file size limit"):
            journal.append(ok_record(5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert journal.path.read_bytes() == kept
    journal.close()


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failure_at_any_step_of_the_replace_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = write_sample(tmp_path / "a.h5")
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(StoreError, match="cannot write"):
        write_database(path, [ok_record()], {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.h5"]


def test_e07_e09_a_sigkilled_database_writer_leaves_a_whole_database(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    for delay_s in (0.0, 0.004, 0.009):
        child = python(REPLACE_FOR_EVER, path)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert verify(path) == []
        assert len(read_database(path).records) in (1, 2)


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_e07_a_writer_killed_at_any_step_leaves_the_old_database_and_the_next_one_tidies(
    tmp_path: Path, step: str
) -> None:
    path = write_sample(tmp_path / "a.h5")
    before = path.read_bytes()
    code = f"""
import os, signal, sys
from ktlib_generator.store import write_database
from store_values import ok_record
os.{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_database(sys.argv[1], [ok_record()], {{}})
"""
    assert python(code, path).wait() == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(os.listdir(tmp_path)) == 2
    write_database(path, [ok_record()], {})
    assert os.listdir(tmp_path) == ["a.h5"]


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise RuntimeError", "os._exit(3)"])
def test_e09_a_process_that_ends_abruptly_after_the_write_leaves_a_valid_database(
    tmp_path: Path, end: str
) -> None:
    path = tmp_path / "a.h5"
    code = f"import os, sys; from store_values import *; write_sample(sys.argv[1]); {end}"
    assert python(code, path).wait() != 0
    assert verify(path) == []


def test_e08_readers_during_replaces_see_old_or_new_and_are_never_locked_out(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    child = python(REPLACE_FOR_EVER, path)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        seen = {len(read_database(path).records) for _ in range(40)}
    finally:
        child.kill()
        child.communicate()
    assert seen <= {1, 2}


def test_two_merges_into_one_database_at_once_lose_no_record(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    code = """
import sys
from ktlib_generator.store import Journal, merge
from store_values import ok_record
for i in range(5):
    source = f"{sys.argv[2]}-{i}.jsonl"
    with Journal(source) as journal:
        journal.append(ok_record(int(sys.argv[3]) + i))
    merge([source], sys.argv[1])
"""
    children = [python(code, path, tmp_path / f"j{n}", 10 * n) for n in (1, 2)]
    assert [child.wait() for child in children] == [0, 0]
    assert {r.variant for r in read_database(path).records} == {
        ok_record(10 * n + i).variant for n in (1, 2) for i in range(5)
    }


def test_a_folder_held_by_another_writer_is_an_error_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.1)
    with files.folder_lock(tmp_path), pytest.raises(StoreError, match="wait for it to end"):
        write_database(tmp_path / "a.h5", [ok_record()], {})


def test_importing_the_store_does_not_import_h5py() -> None:
    code = "import sys, ktlib_generator.store; sys.exit('h5py' in sys.modules)"
    assert python(code).wait() == 0
