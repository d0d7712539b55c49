"""The import rules: who may import whom and when, who reads the environment, what `import ktlib` costs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = sorted((ROOT / "ktlib").glob("**/*.py"))
GENERATOR = sorted((ROOT / "generator").glob("**/*.py"))
SOURCES = sorted(path for path in (ROOT / "csrc").glob("**/*.?pp") if "third_party" not in path.parts)

# Imported only inside functions, once the user has brought such an array.
ARRAY_LIBRARIES = {"torch", "cupy", "cupy_backends"}
ABOVE_THE_GENERATOR = {"benchmarks", "tests", "generator"}  # `generator` installs as ktlib_generator
ABOVE_THE_RUNTIME = ABOVE_THE_GENERATOR | {"ktlib_generator"}


def imports(tree: ast.AST, deferred: bool = False) -> Iterator[tuple[str, bool, int]]:
    """Yield (top-level package, whether inside a function or TYPE_CHECKING block, line) of each import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], deferred, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0], deferred, node.lineno
        checking_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from imports(node, deferred or checking_only or in_function)


def runtime_import_faults(source: str) -> list[str]:
    faults = []
    for package, deferred, line in imports(ast.parse(source)):
        if package in ABOVE_THE_RUNTIME:
            faults.append(f"line {line}: ktlib must not import {package}")
        elif package not in sys.stdlib_module_names | {"ktlib", "numpy"} | ARRAY_LIBRARIES:
            faults.append(f"line {line}: third-party {package}; ktlib may use numpy only")
        elif package in ARRAY_LIBRARIES and not deferred:
            faults.append(
                f"line {line}: {package} at module level; import it inside the function that needs it"
            )
    return faults


def environment_reads(source: str) -> Iterator[tuple[str, int]]:
    """Yield (variable or '' when not a literal, line) for each use of os.environ or os.getenv."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
        is_imported = isinstance(node, ast.alias) and node.name in ("environ", "getenv")
        if not (is_attribute or is_imported):
            continue
        use: ast.AST = node
        while isinstance(parents.get(use), (ast.Attribute, ast.Call, ast.Subscript)):
            use = parents[use]
        names = [n.value for n in ast.walk(use) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        yield (names[0] if names else ""), node.lineno


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: str(path.relative_to(ROOT)))
def test_runtime_imports_neither_the_generator_nor_a_framework_at_import(path: Path) -> None:
    assert runtime_import_faults(path.read_text()) == []


@pytest.mark.parametrize("path", GENERATOR, ids=lambda path: str(path.relative_to(ROOT)))
def test_generator_imports_nothing_that_stands_above_it(path: Path) -> None:
    found = {package for package, _, _ in imports(ast.parse(path.read_text()))}
    assert not found & ABOVE_THE_GENERATOR


def test_only_env_reads_ktlib_variables() -> None:
    faults = []
    for path in RUNTIME + GENERATOR:
        if path == ROOT / "ktlib" / "env.py":
            continue
        for variable, line in environment_reads(path.read_text()):
            # The generator hands the environment on to compilers and children; ktlib has no such need.
            if variable.startswith("KTLIB_") or path in RUNTIME:
                faults.append(f"{path.relative_to(ROOT)}:{line} reads {variable or 'the environment'}")
    assert faults == []


def test_the_extension_never_reads_the_environment() -> None:
    readers = [str(path.relative_to(ROOT)) for path in SOURCES if re.search(r"getenv\s*\(", path.read_text())]
    assert readers == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import torch", "torch at module level"),
        ("try:\n    import cupy\nexcept ImportError:\n    cupy = None", "cupy at module level"),
        ("def f():\n    from ktlib_generator.values import Record", "must not import ktlib_generator"),
        ("def f():\n    import h5py", "third-party h5py"),
        ("from sklearn.tree import DecisionTreeClassifier", "third-party sklearn"),
    ],
)
def test_the_import_check_finds_each_kind_of_fault(source: str, fault: str) -> None:
    (found,) = runtime_import_faults(source)
    assert fault in found


def test_the_environment_check_finds_each_way_of_reading() -> None:
    source = (
        "import os\nfrom os import getenv\n"
        "a = os.environ['KTLIB_A']\nb = os.environ.get('KTLIB_B', '')\n"
        "c = os.getenv('KTLIB_C')\nd = dict(os.environ)\n"
    )
    assert sorted(environment_reads(source)) == [
        ("", 2),
        ("", 6),
        ("KTLIB_A", 3),
        ("KTLIB_B", 4),
        ("KTLIB_C", 5),
    ]


def test_import_brings_no_heavy_library_into_the_process() -> None:
    heavy = ["torch", "cupy", "h5py", "sklearn", "scipy", "rich", "ktlib_generator"]
    program = f"import sys, json, ktlib; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []


def import_milliseconds() -> float:
    command = [sys.executable, "-X", "importtime", "-c", "import ktlib"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(
        line for line in reversed(result.stderr.splitlines()) if line.split("|")[-1].strip() == "ktlib"
    )
    return int(line.split("|")[1]) / 1000


def test_import_takes_less_than_50_ms() -> None:
    # The least of several runs: a busy machine makes some slow, a heavy import makes all slow.
    times_ms = []
    for _ in range(8):
        times_ms.append(import_milliseconds())
        if times_ms[-1] < 50:
            break
    assert min(times_ms) < 50, f"import ktlib took {times_ms} ms; see python -X importtime -c 'import ktlib'"
