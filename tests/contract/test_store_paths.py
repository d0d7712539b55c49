"""Where journals and databases may lie: any name, links; read-only and missing folders are reported."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from store_values import (
    ok_record,
    sample_records,
    write_sample,
)

from ktlib_generator.store import (
    DatabaseError,
    Journal,
    StoreError,
    inspect,
    merge,
    read_database,
    verify,
    write_database,
)

PATHS = (
    "plain.h5",
    "with spaces.h5",
    "tést_日本.h5",
    os.fsdecode(b"not-utf8-\xff\xfe.h5"),
    "n" * 250 + ".h5",
    "deep/" * 200 + "d.h5",
)


@pytest.mark.parametrize("name", PATHS, ids=("plain", "spaces", "unicode", "bytes", "long-name", "deep"))
def test_e12_any_path_the_file_system_takes_works_for_journal_and_database(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sample(path)
    assert verify(path) == []
    assert merge([path], path).records == len(sample_records())
    assert inspect(path).path.encode()
    journal = Journal(path.with_suffix("").with_name("j " + name[:40].replace("/", "") + ".jsonl"))
    with journal:
        journal.append(ok_record())
    assert merge([journal.path], path).findings == ()


def test_e12_works_under_the_c_locale(tmp_path: Path) -> None:
    path = tmp_path / "tést_日本.h5"
    code = "import sys; from store_values import *; from ktlib_generator.store import inspect\n"
    code += "write_sample(sys.argv[1]); print(inspect(sys.argv[1]).records)"
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environ["PYTHONPATH"] = os.pathsep.join([*sys.path, str(Path(__file__).resolve().parents[1])])
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(len(sample_records())), done.stderr
    assert verify(path) == []


def test_a_path_too_long_or_missing_or_not_a_file_says_so(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / ("x" * 300), "shorter"),
        (tmp_path / "none.h5", "check the spelling"),
        (tmp_path, "not of a folder"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(DatabaseError, match=reason):
            read_database(path)
        assert len(verify(path)) == 1
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(DatabaseError, match="not a regular file"):
        read_database(tmp_path / "pipe.h5")
    with pytest.raises(StoreError, match="folder exists"):
        write_database(tmp_path / "none" / "a.h5", [ok_record()], {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; the next test runs for all")
def test_a_read_only_folder_is_reported_and_nothing_is_written(request: pytest.FixtureRequest) -> None:
    # Another user must be able to look into the folder, which a test's own folder does not allow.
    folder = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(folder))
    folder.chmod(0o755)
    write_sample(folder / "a.h5")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing raised"
        try:
            os.setuid(65534)
            write_database(folder / "a.h5", [ok_record()], {})
        except StoreError as error:
            text = str(error)
        finally:
            os.write(write_end, text.encode())
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end) as pipe:
        assert "choose a folder you may write to" in pipe.read()
    assert verify(folder / "a.h5") == []
    assert os.listdir(folder) == ["a.h5"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_read_only_file_system_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match="choose a folder you may write to"):
        write_database(tmp_path / "a.h5", [ok_record()], {})


def test_a_link_is_followed_and_the_file_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = write_sample(tmp_path / "real" / "a.h5")
    target.chmod(0o640)
    link = tmp_path / "a.h5"
    link.symlink_to(target)
    write_database(link, [ok_record()], {})
    assert link.is_symlink()
    assert len(read_database(target).records) == 1
    assert target.stat().st_mode & 0o777 == 0o640
