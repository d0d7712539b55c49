"""Reads what to tune: problem texts, the grid, and suite files; every error names the text at fault.

Must not know a device; which of the problems a family can serve is not decided here.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktlib.problem import DTYPES, LAYOUTS, Problem

GRID_EXTENTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
FORMS = "MxNxK[:layout[:dtype]], a suite file (.toml), or grid"

_SUITE_FIELDS = ("name", "origin", "problems", "layout", "dtype")


@dataclass(frozen=True)
class Suite:
    """A named list of problems, without repeats, and where the list comes from."""

    name: str
    origin: str
    problems: tuple[Problem, ...]


def parse_problems(texts: Sequence[str], layouts: Sequence[str] = (), dtypes: Sequence[str] = ()) -> Suite:
    """Read the words of `--problems`: each a suite file, `grid`, or problem texts joined by commas.

    `layouts` and `dtypes` complete texts that leave theirs out; several of them multiply the problems.

    Raises:
        ValueError: a word is none of these, or a problem is empty; the message names it.
        OSError: a suite file cannot be read.
    """
    for kind, given, known in (("layout", layouts, LAYOUTS), ("dtype", dtypes, DTYPES)):
        for word in given:
            if word not in known:
                raise ValueError(f"{kind} {word!r} is unknown (have: {', '.join(known)})")
    problems: list[Problem] = []
    names: list[str] = []
    for word in itertools.chain.from_iterable(_words(text) for text in texts):
        if word == "grid":
            problems += _grid(layouts, dtypes)
            names.append("grid")
        elif word.endswith(".toml"):
            suite = read_suite(Path(word), layouts, dtypes)
            problems += suite.problems
            names.append(suite.name)
        else:
            problems += _complete(word, layouts, dtypes)
            names.append(word)
    if not problems:
        raise ValueError(f"no problems given; expected {FORMS}")
    name = names[0] if len(set(names)) == 1 else f"{len(names)} words"
    return Suite(name, "command line", tuple(dict.fromkeys(problems)))


def read_suite(path: Path, layouts: Sequence[str] = (), dtypes: Sequence[str] = ()) -> Suite:
    """Read a suite file: `name`, `origin`, `problems`, and a default `layout` and `dtype` if it has them.

    Raises:
        ValueError: `path:line` and what is wrong there.
        OSError: the file cannot be read.
    """
    text = _read(path)
    data = _load_toml(path, text)
    for name in data:
        if name not in _SUITE_FIELDS:
            raise ValueError(
                f"{path}:{_line_of(text, name)}: unknown field {name!r} (have: {', '.join(_SUITE_FIELDS)})"
            )
    for name in ("name", "origin", "problems"):
        if name not in data:
            raise ValueError(f"{path}:1: field {name!r} is missing (a suite needs name, origin and problems)")
    for name in ("name", "origin", "layout", "dtype"):
        if name in data and not isinstance(data[name], str):
            raise ValueError(f"{path}:{_line_of(text, name)}: {name} must be a text, got {data[name]!r}")
    if not isinstance(data["problems"], list) or not data["problems"]:
        raise ValueError(
            f"{path}:{_line_of(text, 'problems')}: problems must be a list that is not empty, "
            f"got {data['problems']!r}"
        )
    own_layouts = layouts or ([data["layout"]] if "layout" in data else [])
    own_dtypes = dtypes or ([data["dtype"]] if "dtype" in data else [])
    problems: list[Problem] = []
    for item in data["problems"]:
        try:
            problems += _complete(_item_text(item), own_layouts, own_dtypes)
        except ValueError as error:
            raise ValueError(f"{path}:{_line_of_item(text, item)}: {error}") from None
    return Suite(data["name"], data["origin"], tuple(dict.fromkeys(problems)))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _grid(layouts: Sequence[str], dtypes: Sequence[str]) -> Iterator[Problem]:
    for (m, n, k), layout, dtype in itertools.product(
        itertools.product(GRID_EXTENTS, repeat=3), layouts or ("nn",), dtypes or ("fp16",)
    ):
        yield Problem(m, n, k, layout=layout, dtype=dtype)


def _complete(text: str, layouts: Sequence[str], dtypes: Sequence[str]) -> Iterable[Problem]:
    try:
        Problem.parse(text)
    except ValueError as error:
        if not re.match(r"^\s*\d", text):
            raise ValueError(f"problem {text!r} is not understood; expected {FORMS}{_hint(text)}") from None
        message = str(error)
        if repr(text) not in message:
            message = f"problem {text!r}: {message.removeprefix('problem: ')}"
        raise ValueError(message) from None
    shape, *rest = text.strip().split(":")
    given = [part for part in rest if "=" not in part]
    named = [part for part in rest if "=" in part]
    has_layout = bool(given) or any(part.startswith("layout=") for part in named)
    has_dtype = len(given) > 1 or any(part.startswith("dtype=") for part in named)
    made = []
    for layout, dtype in itertools.product(
        [""] if has_layout or not layouts else layouts, [""] if has_dtype or not dtypes else dtypes
    ):
        extra = [f"layout={layout}"] * bool(layout) + [f"dtype={dtype}"] * bool(dtype)
        made.append(Problem.parse(":".join([shape, *given, *named, *extra])))
    for problem in made:
        if 0 in (problem.m, problem.n, problem.k, problem.batch):
            raise ValueError(f"problem {text!r} is empty (an extent is 0): there is nothing to tune")
    return made


def _hint(text: str) -> str:
    suites = sorted(path.stem for path in Path("benchmarks/suites").glob("*.toml"))
    if text in suites:
        return f". Did you mean benchmarks/suites/{text}.toml?"
    return f". Suites here: {', '.join(suites)}" if suites else ""


def _item_text(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and len(item) == 3 and all(type(extent) is int for extent in item):
        return "x".join(str(extent) for extent in item)
    raise ValueError(f"problem {item!r} must be a text like '64x64x64:nt' or three extents like [64, 64, 64]")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:1: not a text file in UTF-8 ({error.reason})") from None


def _load_toml(path: Path, text: str) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        match = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
        line = (match.group(1) if match else None) or str(len(text.splitlines()))
        what = message[: match.start()] if match else message
        raise ValueError(f"{path}:{line}: not valid TOML: {what}") from None


def _line_of(text: str, field: str) -> int:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(rf"\s*[\"']?{re.escape(field)}[\"']?\s*=", line):
            return number
    return 1


def _line_of_item(text: str, item: Any) -> int:
    if isinstance(item, str):
        pattern = rf"[\"']{re.escape(item)}[\"']"
    elif isinstance(item, list):
        pattern = r"\[\s*" + r"\s*,\s*".join(re.escape(str(part)) for part in item) + r"\s*,?\s*\]"
    else:
        pattern = rf"(?<![\w.]){re.escape(str(item))}(?![\w.])"
    for number, line in enumerate(text.splitlines(), start=1):
        if re.search(pattern, line.split("#")[0]):
            return number
    return _line_of(text, "problems")
