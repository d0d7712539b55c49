"""What `ktlib-build` says of files that it cannot use: which line, what is wrong, advice that helps."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import call, refused
from store_values import write_sample

from ktlib_generator import cli
from ktlib_generator.store import DatabaseError, exchange, export_json, import_json, verify
from ktlib_generator.store.schema import SEAL_BYTES

COMES_FROM = "must come from `ktlib-build export`"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_sample(Path("a.h5"))


def flip(path: Path, offset: int) -> Path:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))
    return path


def unused_byte(path: Path) -> int:
    """Find a byte that no entry needs: only the seal notices when it changes."""
    data = path.read_bytes()
    for offset in range(SEAL_BYTES + 128, len(data)):
        if data[offset] == 0:
            path.write_bytes(data[:offset] + b"\x01" + data[offset + 1 :])
            found = verify(path)
            path.write_bytes(data)
            if len(found) == 2 and "every entry" in found[1]:
                return offset
    raise AssertionError("every zero byte of the file is in an entry")


def test_verify_says_so_when_only_unused_bytes_changed(capsys, database):
    flip(database, unused_byte(database))
    code, out, _ = call(capsys, "verify", database)
    assert code == 1
    assert "every entry was read and is sound" in out
    assert "restore the file" in out


@pytest.mark.parametrize("offset", [10, SEAL_BYTES + 8, -100])
def test_verify_never_tells_its_user_to_run_verify(capsys, database, offset):
    flip(database, offset)
    code, out, _ = call(capsys, "verify", database)
    assert code == 1
    assert "ktlib-build verify" not in out


def test_other_commands_send_the_user_of_a_damaged_file_to_verify(capsys, database):
    flip(database, -100)
    assert "`ktlib-build verify` names what is damaged" in refused(capsys, 2, "inspect", database)


@pytest.mark.parametrize("words", [("inspect",), ("verify",), ("export",), ("import", "-o", "b.h5")])
def test_advice_for_a_file_that_may_not_be_read_is_about_reading(capsys, database, monkeypatch, words):
    def refuse(path, flags=os.O_RDONLY, *more, **named):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        # Root may read everything, so a refusal is played.
        patch.setattr("ktlib_generator.store.files.os.open", refuse) if words[
            0
        ] != "import" else patch.setattr("builtins.open", refuse)
        patch.setattr("ktlib_generator.run_dir.check_writable", lambda path: None)
        code, out, err = call(capsys, words[0], database, *words[1:])
    assert code != 0
    assert "you may not read it" in out + err
    assert "may write to" not in out + err


def test_pack_into_a_missing_folder_gives_its_advice_once(capsys, database):
    line = refused(capsys, 2, "pack", database, "-o", "none/a.ktpack")
    assert "create the folder first" in line
    assert line.count(";") == 2, line
    assert "check the path" not in line


def test_export_needs_no_flag_and_says_where_it_wrote(capsys, database):
    code, out, _ = call(capsys, "export", database)
    assert code == 0
    assert call(capsys, "export", database, "--json")[1] == out
    code, printed, err = call(capsys, "export", database, "-o", "all.jsonl")
    assert (code, printed, err) == (0, "", "all.jsonl: written\n")
    assert Path("all.jsonl").read_text() == out


def test_export_onto_the_database_itself_does_not_destroy_it(capsys, database):
    Path("link.h5").symlink_to(database)
    for target in (database, "link.h5"):
        assert "another --output" in refused(capsys, 2, "export", database, "-o", target)
    assert verify(database) == []


@pytest.mark.parametrize(
    ("junk", "where"),
    [
        (b"junk\n", "junk:1: "),
        (b"\xff\xfe\x00\n", "junk:1: "),
        (b"[" * 10**5, "junk:1: "),
        (b"{}\n", "junk:1: "),
    ],
    ids=("text", "binary", "nested", "object"),
)
def test_importing_junk_names_the_line_and_what_to_give(capsys, database, junk, where):
    Path("junk").write_bytes(junk)
    line = refused(capsys, 2, "import", "junk", "-o", "new.h5")
    assert where in line
    assert COMES_FROM in line
    assert not Path("new.h5").exists()


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero to read")
def test_importing_an_endless_line_ends_in_bounded_memory(tmp_path):
    code = "import sys; from ktlib_generator.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "import", "/dev/zero", "-o", str(tmp_path / "new.h5")]
    limit = 2 << 30
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OPENBLAS_NUM_THREADS": "1",
        },
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        timeout=60,
    )
    assert done.returncode == cli.EXIT_USAGE, done.stderr
    assert f"/dev/zero:1: longer than {exchange.MAX_LINE_BYTES} bytes" in done.stderr
    assert COMES_FROM in done.stderr


def test_a_later_line_beyond_the_limit_is_named_and_export_writes_none(database, monkeypatch):
    text = io.StringIO()
    export_json(database, text)
    lines = text.getvalue().encode().splitlines(keepends=True)
    longest = max(map(len, lines))
    first = next(number for number, line in enumerate(lines, start=1) if len(line) == longest)
    monkeypatch.setattr(exchange, "MAX_LINE_BYTES", longest)
    import_json(io.BytesIO(text.getvalue().encode()), "same.h5")
    assert Path("same.h5").read_bytes() == database.read_bytes()
    monkeypatch.setattr(exchange, "MAX_LINE_BYTES", longest - 1)
    with pytest.raises(DatabaseError, match=f"import:{first}: longer than {longest - 1} bytes"):
        import_json(io.BytesIO(text.getvalue().encode()), "new.h5")
    with pytest.raises(DatabaseError, match="import takes at most"):
        export_json(database, io.StringIO())
