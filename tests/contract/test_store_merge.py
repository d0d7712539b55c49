"""Merge, export, import and inspect keep every record; the format page says what the schema says."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from store_values import (
    BLOB,
    BLOB_SHA256,
    META,
    ok_record,
    sample_records,
    write_sample,
)

from ktlib_generator.store import (
    DatabaseError,
    Journal,
    StoreError,
    export_json,
    import_json,
    inspect,
    merge,
    read_database,
    schema,
    write_database,
)
from ktlib_generator.values import Status


def run_directory(path: Path) -> Path:
    """Two journals, as two processes leave them, the second with a damaged line and a torn tail."""
    with Journal(path / "a.jsonl") as journal:
        for record in sample_records()[:6]:
            journal.append(record)
    with Journal(path / "b.jsonl") as journal:
        for record in sample_records()[4:]:
            journal.append(record)
    data = (path / "b.jsonl").read_bytes()
    (path / "b.jsonl").write_bytes(data + b"damaged\n" + data[-50:-1].replace(b"}", b""))
    return path


def test_merge_keeps_every_record_failures_too_and_names_bad_lines(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    path = tmp_path / "a.h5"
    summary = merge([run], path, binary_loader={BLOB_SHA256: BLOB}.get)
    assert set(read_database(path).records) == set(sample_records())
    assert summary.records == summary.new_records == len(sample_records())
    assert summary.missing_binaries == ()
    assert len(summary.findings) == 1
    assert "b.jsonl:" in summary.findings[0]
    assert read_database(path).binaries == {BLOB_SHA256: BLOB}


def test_a_merge_without_news_leaves_the_bytes_as_they_are(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    path = tmp_path / "a.h5"
    merge([run], path, binary_loader={BLOB_SHA256: BLOB}.get, meta=META)
    before = path.read_bytes()
    again = merge([run, path, run / "a.jsonl"], path)
    assert (again.new_records, again.records) == (0, len(sample_records()))
    assert path.read_bytes() == before


def test_a_later_valid_record_of_the_same_trial_does_not_delete_the_earlier(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    first, second = ok_record(4), ok_record(4, measured_unix=1800000000)
    assert first.key == second.key
    write_database(path, [first], {})
    with Journal(tmp_path / "j.jsonl") as journal:
        journal.append(second)
    merge([tmp_path / "j.jsonl"], path)
    assert set(read_database(path).records) == {first, second}


def test_a_binary_that_is_missing_or_not_its_sha256_is_left_out_and_said(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    assert merge([run], tmp_path / "a.h5").missing_binaries == (BLOB_SHA256,)
    summary = merge([run], tmp_path / "b.h5", binary_loader=lambda _: b"other bytes")
    assert summary.missing_binaries == (BLOB_SHA256,)
    assert any("left out" in finding for finding in summary.findings)
    assert read_database(tmp_path / "b.h5").binaries == {}


def test_merge_refuses_to_overwrite_a_damaged_database_or_take_an_unknown_source(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    path = tmp_path / "a.h5"
    path.write_bytes(b"not a database")
    with pytest.raises(DatabaseError, match="no seal"):
        merge([run], path)
    assert path.read_bytes() == b"not a database"
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("")
    for source, reason in (
        ("empty", "no journal"),
        ("a.txt", "expected a database"),
        ("none.jsonl", "check the spelling"),
    ):
        with pytest.raises(StoreError, match=reason):
            merge([tmp_path / source], tmp_path / "b.h5")


def test_export_and_import_give_the_same_file_byte_for_byte(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a.h5")
    stream = io.StringIO()
    export_json(path, stream)
    import_json(io.BytesIO(stream.getvalue().encode("ascii")), tmp_path / "b.h5")
    assert (tmp_path / "b.h5").read_bytes() == path.read_bytes()


def test_an_import_that_is_cut_off_or_changed_writes_nothing(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a.h5")
    stream = io.StringIO()
    export_json(path, stream)
    lines = stream.getvalue().splitlines(keepends=True)
    cases = [("".join(lines[:count]), "end line is missing|:1:") for count in range(len(lines))]
    cases += [
        ("".join([lines[0], *lines[2:]]), "changed or incomplete"),
        (stream.getvalue().replace("25.0", "24.0"), "changed or incomplete"),
        (stream.getvalue().replace('"version":1', '"version":9'), "import:1: .*expected"),
        ("[]\n", "import:1: expected a JSON object"),
        (lines[0] + '{"what":1}\n', "import:2: unknown line"),
        (lines[0] + '{"record":{"problem":1}}\n', "import:2: "),
        (stream.getvalue() + lines[1], "a line after the end"),
    ]
    for text, reason in cases:
        with pytest.raises(DatabaseError, match=reason):
            import_json(io.BytesIO(text.encode("ascii")), tmp_path / "b.h5")
    assert not (tmp_path / "b.h5").exists()


def test_inspect_counts_everything_and_shows_the_fastest_ok_record_of_each_problem(tmp_path: Path) -> None:
    summary = inspect(write_sample(tmp_path / "a.h5"))
    assert summary.records == len(sample_records())
    assert summary.by_status == {"ok": 7, **{s.value: 1 for s in Status if s is not Status.OK}}
    assert summary.problems == 3
    assert len(summary.environments) == 2
    assert (summary.binaries, summary.binary_bytes) == (1, len(BLOB))
    fastest = {entry.problem: entry for entry in summary.fastest}
    assert set(fastest) == {"64x64x64:nn:fp16:accumulate=fp16:batch=3", "4096x4096x1024:nt:bf16"}
    assert fastest["4096x4096x1024:nt:bf16"].variant == str(ok_record(2).variant)
    assert fastest["4096x4096x1024:nt:bf16"].speedup == ok_record(2).speedup
    assert "7 ok" in str(summary)
    assert summary.to_dict()["profile"] == "sm90a-132"


def documented(text: str, heading: str) -> dict[str, tuple[str, str]]:
    """Rows of the table under a heading of the format page: name -> (type, since)."""
    section = text.split(f"\n### {heading}", 1)[1].split("\n#", 1)[0]
    rows = [re.split(r"(?<!\\)\|", line) for line in section.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): (row[2].strip(" `").replace("\\|", "|"), row[3].strip()) for row in rows}


def test_the_format_page_names_every_column_with_its_type_and_version(checkout: Path) -> None:
    text = (checkout / "tuning_db" / "README.md").read_text(encoding="utf-8")
    for table in schema.TABLES:
        page: dict[str, tuple[str, str]] = {}
        for name, (kind, since) in documented(text, f"`{table.name}`").items():
            if kind == "text":
                page |= {f"{name}_offset": ("<u8", since), f"{name}_bytes": ("<u4", since)}
            else:
                page[name] = (kind, since)
        assert list(page.items()) == [
            (column.name, (column.type, f"{schema.SCHEMA_MAJOR}.{column.since}")) for column in table.columns
        ]
    arrays = documented(text, "Arrays")
    assert {name: kind for name, (kind, _) in arrays.items()} == {a.name: a.type for a in schema.ARRAYS}
    for status in Status:
        assert f"| `{status.value}` |" in text
