"""What `--problems` accepts, and that every refusal names the text or the line at fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktlib.problem import Problem
from ktlib_generator.problems import GRID_EXTENTS, parse_problems, read_suite

SUITES = Path(__file__).parents[2] / "benchmarks" / "suites"


def problems(*texts, layouts=(), dtypes=()):
    return parse_problems(texts, layouts, dtypes).problems


def test_texts_repeated_or_joined_by_commas_keep_order_and_lose_doubles():
    expected = (Problem(64, 32, 16), Problem(8, 8, 8, "nt", "bf16"))
    assert problems("64x32x16,8x8x8:nt:bf16") == expected
    assert problems("64x32x16", "8x8x8:nt:bf16", "64x32x16:nn") == expected


def test_layout_and_dtype_fill_only_what_a_text_leaves_out():
    found = problems("8x8x8", "9x9x9:nt", "7x7x7:tn:fp32", layouts=("nn", "nt"), dtypes=("fp16", "bf16"))
    assert [str(p) for p in found] == [
        "8x8x8:nn:fp16",
        "8x8x8:nn:bf16",
        "8x8x8:nt:fp16",
        "8x8x8:nt:bf16",
        "9x9x9:nt:fp16",
        "9x9x9:nt:bf16",
        "7x7x7:tn:fp32",
    ]


def test_named_fields_stay_with_filled_ones():
    assert problems("8x8x8:align=2", layouts=("nt",)) == (Problem(8, 8, 8, "nt", align=2),)


def test_grid_is_the_thousand_problems():
    found = problems("grid")
    assert len(found) == 1000
    assert {p.k for p in found} == set(GRID_EXTENTS)
    assert {(p.layout, p.dtype) for p in found} == {("nn", "fp16")}
    assert len(problems("grid", layouts=("nn", "nt"), dtypes=("fp16", "bf16"))) == 4000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("512", "'512' is not MxNxK"),
        ("64x64", "'64x64' is not MxNxK"),
        ("64x64x64:zz", "layout 'zz' is unknown"),
        ("64x64x64:nn:fp8", "dtype 'fp8' is unknown"),
        ("64x64x64:nn:fp16:color=3", "unknown field 'color'"),
        ("0x64x64", "nothing to tune"),
        ("64x64x0", "nothing to tune"),
        ("99999999999x1x1", "m must be an integer in 0"),
        ("everything", "a suite file"),
        ("", "no problems given"),
        (" , ", "no problems given"),
    ],
)
def test_a_bad_text_is_named(text, says):
    with pytest.raises(ValueError, match=says) as caught:
        problems(text)
    assert text.strip(" ,") in str(caught.value)


def test_unknown_layout_option_lists_the_known():
    with pytest.raises(ValueError, match=r"layout 'rowmajor' is unknown \(have: nn, nt, tn, tt\)"):
        problems("8x8x8", layouts=("rowmajor",))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "suite.toml"
    path.write_text(text, encoding="utf-8")
    return path


HEAD = 'name = "mine"\norigin = "a test"\n'


def test_suite_of_texts_and_shapes_with_defaults(tmp_path):
    path = write(tmp_path, HEAD + 'dtype = "bf16"\nproblems = [\n  "8x8x8:nt",\n  [16, 8, 4],\n]\n')
    suite = read_suite(path)
    assert suite.name == "mine"
    assert suite.origin == "a test"
    assert suite.problems == (Problem(8, 8, 8, "nt", "bf16"), Problem(16, 8, 4, "nn", "bf16"))
    assert parse_problems([str(path)]).name == "mine"


def test_command_line_defaults_beat_the_suites(tmp_path):
    path = write(tmp_path, HEAD + 'dtype = "bf16"\nproblems = ["8x8x8"]\n')
    assert read_suite(path, ("nt",), ("fp32",)).problems == (Problem(8, 8, 8, "nt", "fp32"),)


@pytest.mark.parametrize(
    ("body", "line", "says"),
    [
        (HEAD + 'problems = [\n  "8x8x8",\n  "8x8"\n]\n', 5, "'8x8' is not MxNxK"),
        (HEAD + 'problems = [\n  "8x8x8",\n  [8, 8],\n]\n', 5, "three extents"),
        (HEAD + "problems = [\n  [8, 8, 8],\n  [0, 8, 8],\n]\n", 5, "nothing to tune"),
        (HEAD + 'problems = [\n  "8x8x8",\n  8.5,\n]\n', 5, "8.5"),
        (HEAD + "problems = [\n  '8x8x8',\n", 4, "not valid TOML"),
        (HEAD + 'problems = ["8x8x8"]\nshapes = []\n', 4, "unknown field 'shapes'"),
        ('name = "a"\nproblems = ["8x8x8"]\n', 1, "'origin' is missing"),
        ('name = 3\norigin = "b"\nproblems = ["8x8x8"]\n', 1, "name must be a text"),
        (HEAD + "problems = []\n", 3, "not empty"),
        (HEAD + 'problems = "8x8x8"\n', 3, "must be a list"),
        (HEAD + 'layout = "xx"\nproblems = ["8x8x8"]\n', 4, "layout 'xx' is unknown"),
    ],
)
def test_suite_errors_name_path_and_line(tmp_path, body, line, says):
    path = write(tmp_path, body)
    with pytest.raises(ValueError, match=says) as caught:
        read_suite(path)
    assert str(caught.value).startswith(f"{path}:{line}:")


def test_suite_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\x89HDF\xff\xfe")
    with pytest.raises(ValueError, match=r"binary.toml:1: not a text file"):
        read_suite(path)


def test_missing_suite_is_an_os_error_with_its_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml"):
        problems(str(tmp_path / "nowhere.toml"))


def test_shipped_suites_are_what_their_names_say():
    found = {path.stem: read_suite(path) for path in sorted(SUITES.glob("*.toml"))}
    assert all(suite.name == stem for stem, suite in found.items())
    spread = found["cudal2_40"].problems
    assert len(spread) == 40
    for axis in "mnk":
        assert {getattr(p, axis) for p in spread} == set(GRID_EXTENTS)
    limits = [5e8, 8e9, 1.4e11]
    assert {sum(p.flops >= limit for limit in limits) for p in spread} == {0, 1, 2, 3}
    assert all(2 * max(p.m * p.k, p.k * p.n, p.m * p.n) <= 2**31 for p in spread)
    small = found["cpu_small"].problems
    assert 35 <= len(small) <= 45
    assert {p.dtype for p in small} == {"fp32", "fp16", "bf16"}
    assert {p.layout for p in small} == {"nn", "nt"}
    assert max(max(p.m, p.n, p.k) for p in small) == 256
    assert Problem(8, 8, 8, dtype="fp32") in found["cpu_demo"].problems
