"""The report as a whole: its numbers, its pictures on disk, and what the command says when it cannot."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from report_cases import ENVIRONMENT, PROBLEMS, line, run, us_of, write

from ktlib_generator.report import Options, read_result, write_report

Main = Callable[[list[str]], int]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# The folder holds searches and checks too, which have other columns; times have their protocol in the name.
COMMITTED = sorted(
    path for path in RESULTS.glob("*.csv") if re.search(r"_(graph|stream|offline|server)[-_]", path.name)
)


@pytest.fixture
def main(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    monkeypatch.syspath_prepend(checkout)
    called: Main = importlib.import_module("benchmarks.__main__").main
    return called


def test_every_picture_is_linked_once_and_every_link_leads_to_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    files = [read_result(run(tmp_path / "a.csv")), read_result(run(tmp_path / "b.csv", protocol="server"))]
    report, *pictures = write_report(files, tmp_path / "out")
    linked = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", report.read_text())
    assert sorted(linked) == sorted(path.name for path in pictures)
    assert [name.rpartition("_")[2] for name in linked] == [
        *("speedup.png", "sorted.png", "roofline.png"),
        *("speedup.png", "sorted.png", "roofline.png", "latency.png"),
    ]
    for path in pictures:
        pixels = image.imread(path)
        assert pixels.shape[1] >= 1000
        assert len({tuple(pixel) for pixel in pixels[::7, ::7, :3].reshape(-1, 3).tolist()}) > 5


def test_the_table_has_the_numbers_and_vendor_served_calls_are_counted_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = []
    for at, p in enumerate(PROBLEMS):
        us = us_of(p, "torch")
        ours, tier = (us / 1.25, "exact") if at % 4 else (us / 0.95, "vendor")
        rows += [line(p, "ktlib", ours, tier=tier), line(p, "torch", us)]
    rows.append(line(PROBLEMS[0], "triton", "", status="build_error"))
    report, *_ = write_report(
        [read_result(write(tmp_path / "r.csv", rows))], tmp_path, Options(listed_losses=3)
    )
    text = report.read_text()
    geomean = (1.25**30 * 0.95**10) ** (1 / 40)
    mean = (30 * 1.25 + 10 * 0.95) / 40
    (total,) = re.findall(r"^\| torch \| \*\*all\*\* \|.*$", text, re.MULTILINE)
    cells = [cell.strip() for cell in total.strip("|").split("|")]
    assert cells[2:7] == ["40", f"**{geomean:.3f}**", f"{mean:.3f}", "75.0%", "10"]
    assert cells[7].startswith("0.950 at ")
    assert cells[8:] == ["30", "1.250", "10"]
    assert "| small, graph-hot | ktlib | torch | 40 |" in text
    assert "triton: build_error (line " in text
    assert "7 more are not listed (--losses 10 lists all)" in text
    assert "no `control`" in text


def test_noise_floor_and_a_held_clock_are_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    environment = {**ENVIRONMENT, "clock_sm_mhz": "1425"}
    report, *_ = write_report([read_result(run(tmp_path / "a.csv", environment=environment))], tmp_path)
    text = report.read_text()
    assert re.search(r"Noise floor \(`control` against `torch`.*over 5 us median 0\.\d\d%", text)
    assert "The SM clock stood at 1425 of 1980 MHz" in text


def test_sections_of_one_name_keep_their_pictures_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "x").mkdir()
    files = [read_result(run(tmp_path / "r.csv")), read_result(run(tmp_path / "x" / "r.csv", 5))]
    _, *pictures = write_report(files, tmp_path / "out")
    assert len({path.name for path in pictures}) == len(pictures) == 6


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = read_result(run(tmp_path / "r.csv"))
    first, second = write_report([file], tmp_path / "a"), write_report([file], tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_file_without_ours_or_without_a_baseline_is_refused(tmp_path: Path) -> None:
    file = read_result(run(tmp_path / "r.csv", methods=("torch", "control")))
    with pytest.raises(ValueError, match=r"r\.csv: no timed row of ours \(ktlib, ktlib_own\)"):
        write_report([file], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_report_and_says_where(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = str(run(tmp_path / "r.csv"))
    # Twice the same file, as a careless glob gives it, is one.
    assert main(["report", path, path, "--out", str(tmp_path / "out"), "--peak", "660"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'report.md'} (3 pictures beside it)\n"


def test_the_command_says_what_is_wrong_where(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = run(tmp_path / "good.csv")
    bad = write(tmp_path / "bad.csv", [line(PROBLEMS[0], "torch", "nan")])
    out = ["--out", str(tmp_path / "out")]
    for words, says in (
        ([str(bad), *out], f"bad.csv:{len(ENVIRONMENT) + 2}: median_us"),
        ([str(tmp_path / "none.csv"), *out], "none.csv"),
        ([str(good), *out, "--losses", "-1"], "--losses must be at least 0"),
    ):
        assert main(["report", *words]) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(good), *out, "--peak", "0"])
    assert "must be above 0" in capsys.readouterr().err
    monkeypatch.setattr(importlib.import_module("importlib.util"), "find_spec", lambda name: None)
    assert main(["report", str(good), *out]) == 2
    assert "pip install 'ktlib[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "python -m benchmarks report"),
        (["--help"], "exit code 1: after is slower"),
        (["report", "--help"], "never counted as a win"),
        (["compare", "--help"], "3 standard errors"),
    ],
)
def test_help_teaches(main: Main, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if words:
        with pytest.raises(SystemExit, match="0"):
            main(words)
    else:
        assert main(words) == 0
    text = capsys.readouterr().out
    assert says in text
    assert max(map(len, text.splitlines())) <= 110


def test_reading_and_comparing_need_no_matplotlib(checkout: Path, tmp_path: Path) -> None:
    path = run(tmp_path / "r.csv")
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from benchmarks.__main__ import main\n"
        f"raise SystemExit(main(['compare', {str(path)!r}, {str(path)!r}]))"
    )
    places = ":".join([str(checkout), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": places}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results_can_be_reported_and_compared(path: Path, main: Main, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["compare", str(path), str(path)]) == 0
    assert main(["report", str(path), "--out", str(tmp_path)]) == 0
