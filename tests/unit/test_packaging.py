"""What is written in two places agrees, and the built extension depends on nothing but the C library."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ktlib
from ktlib import _core, env
from ktlib.problem import Choice

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

C_LIBRARY = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}


@pytest.fixture
def project(checkout: Path) -> dict[str, Any]:
    return tomllib.loads((checkout / "pyproject.toml").read_text())


@pytest.fixture
def readme(checkout: Path) -> str:
    return (checkout / "README.md").read_text()


def test_the_version_is_written_once_and_the_changelog_knows_it(
    checkout: Path, project: dict[str, Any]
) -> None:
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ktlib.__version__"}
    assert metadata.version("ktlib") == ktlib.__version__
    newest = re.search(r"^(\d+\.\d+\.\d+)", (checkout / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == ktlib.__version__


def test_every_package_folder_is_shipped(checkout: Path, project: dict[str, Any]) -> None:
    folders = {path.parent for top in ("ktlib", "generator") for path in (checkout / top).glob("**/*.py")}
    names = {".".join(folder.relative_to(checkout).parts) for folder in folders}
    expected = {re.sub(r"^generator", "ktlib_generator", name) for name in names}
    shipped = set(project["tool"]["setuptools"]["packages"])
    assert shipped - {"ktlib_generator.kernel_sources"} == expected


def test_an_installed_generator_has_every_kernel_source(checkout: Path, project: dict[str, Any]) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]["ktlib_generator.kernel_sources"]
    kernels = checkout / "csrc" / "kernels"
    shipped = {path for pattern in patterns for path in kernels.glob(pattern)}
    needed = {path for path in kernels.glob("sm*/**/*") if path.suffix in (".cu", ".cuh", ".hpp", ".h")}
    assert needed
    assert needed <= shipped


def test_kernel_sources_include_nothing_from_outside_their_folder(checkout: Path) -> None:
    # Only csrc/kernels is shipped, so an include that leaves it compiles in a clone and nowhere else.
    for path in (checkout / "csrc" / "kernels").glob("sm*/**/*.cu*"):
        for name in re.findall(r'^\s*#include "([^"]+)"', path.read_text(), re.MULTILINE):
            beside, below = path.parent / name, checkout / "csrc" / "kernels" / name
            assert beside.is_file() or below.is_file(), f"{path}: {name}"


def test_the_generator_finds_its_kernel_sources(checkout: Path) -> None:
    from ktlib_generator.build.sources import kernel_sources

    assert kernel_sources().samefile(checkout / "csrc" / "kernels")


def test_readme_lists_the_environment_variables_that_the_code_reads(readme: str) -> None:
    documented = re.findall(r"^\| `(KTLIB_\w+)` \| (.+?) \| (.+?) \|$", readme, re.MULTILINE)
    assert documented == [(v.name, v.default, v.meaning) for v in env.VARIABLES]


def test_readme_explains_every_extra_and_no_other(project: dict[str, Any], readme: str) -> None:
    section = readme.split("\n## Install\n", 1)[1].split("\n## ", 1)[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(documented) == sorted(project["project"]["optional-dependencies"])


def test_the_tests_get_the_compiler_that_built_the_shipped_kernels(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    pins = dict(pin.split("==") for pin in extras["nvcc"])
    assert {"nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime"} <= set(pins)
    assert "ktlib[nvcc]" in extras["test"]


def test_readme_shows_the_example_as_it_is_shipped(checkout: Path, readme: str) -> None:
    example = (checkout / "benchmarks" / "example.py").read_text()
    assert re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL) == [example]


def test_readme_shows_what_the_example_prints(checkout: Path, readme: str) -> None:
    (shown,) = re.findall(r"it prints:\n\n```\n(.*?)```", readme, re.DOTALL)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KTLIB_")}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(checkout / "benchmarks" / "example.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    lines = done.stdout.splitlines()
    assert lines[0] == "True"
    assert len(lines) == 4
    if _core.cpu_archs()[0] != "cpu-x86_64_v4":
        pytest.skip("README's output is that of the database of another CPU")
    assert done.stdout == shown


def test_packs_made_beside_the_databases_neither_rebuild_nor_enter_git(checkout: Path) -> None:
    (sources,) = re.findall(r"^SOURCES := (.+)$", (checkout / "Makefile").read_text(), re.MULTILINE)
    assert "find tuning_db -name '*.h5'" in sources
    assert "/tuning_db/*.ktpack" in (checkout / ".gitignore").read_text().splitlines()


def demo(checkout: Path) -> ModuleType:
    path = checkout / "benchmarks" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_demo_says_why_a_vendor_call_whose_kernel_measured_faster_is_the_vendors(checkout: Path) -> None:
    short = demo(checkout).short_reason
    reason = "vendor: tuned entry 8x8x8:nn:fp32: best kernel 1.00 us against 1.01 us for the vendor"
    assert short(Choice("", "vendor", reason, latency_us=1.0, vendor_us=1.01)) == "within the noise"
    assert short(Choice("", "vendor", reason, latency_us=1.2, vendor_us=1.01)) == "vendor faster"
    assert short(Choice("", "vendor", "vendor: no database fits")) == "no database fits"
    assert short(Choice("f/dtype=fp32,layout=nt,tile_m=8/a", "exact", "tuned")) == "tile_m=8"


def test_demo_lines_are_no_wider_than_the_terminal(checkout: Path) -> None:
    module = demo(checkout)
    rows = [
        module.Row("128x128x128:nt:fp16", "numpy", "long " * 40, "vendor", 12345.67, 9999.99, 1e-7),
        module.Row("8x8x8:nn:fp32", "torch", "vendor faster", "vendor", 1.0, 2.0, 1e-7),
    ]
    for columns in (90, 120):
        lines = module.table(rows, columns)
        assert len(lines) == 3
        assert max(map(len, lines)) <= columns
    assert lines[2].endswith("vendor faster")


def test_names_in_code_avoid_the_words_that_the_vocabulary_forbids(checkout: Path, readme: str) -> None:
    (listed,) = re.findall(r"^Checked in names: (.+)$", readme, re.MULTILINE)
    forbidden = set(re.findall(r"`(\w+)`", listed))
    assert len(forbidden) >= 5
    faults = []
    for top in ("ktlib", "generator", "benchmarks"):
        for path in (checkout / top).glob("**/*.py"):
            for line, name in identifiers(path.read_text()):
                if name in forbidden:
                    faults.append(f"{path.relative_to(checkout)}:{line} {name}")
    assert faults == []


def identifiers(source: str) -> list[tuple[int, str]]:
    """Names that a file defines: functions, classes, arguments, variables, attributes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            found.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.attr))
    return found


def test_readme_names_only_files_that_exist(checkout: Path, readme: str) -> None:
    named = set(re.findall(r"`((?:csrc|ktlib|generator|tuning_db|benchmarks|tests|tools)/[\w./-]*)`", readme))
    assert named
    assert [name for name in sorted(named) if not (checkout / name).exists()] == []


def test_pre_commit_runs_the_versions_that_the_tests_pin(checkout: Path, project: dict[str, Any]) -> None:
    pins = dict(
        re.findall(
            r"^([\w-]+)==([\w.]+)", "\n".join(project["project"]["optional-dependencies"]["test"]), re.M
        )
    )
    text = (checkout / ".pre-commit-config.yaml").read_text()
    revisions = dict(re.findall(r"repo: \S+/(\S+)\n\s+rev: v(\S+)", text))
    assert revisions == {
        "ruff-pre-commit": pins["ruff"],
        "mirrors-mypy": pins["mypy"],
        "mirrors-clang-format": pins["clang-format"],
    }


def tool_output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed; it comes with g++")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_extension_links_nothing_but_the_c_library() -> None:
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", tool_output("readelf", "-d", _core.__file__)))
    needed = {name for name in needed if not name.startswith("ld-linux")}
    assert needed
    assert needed <= C_LIBRARY


def test_the_extension_exports_only_its_init_function() -> None:
    # It carries its own C++ runtime; a visible symbol of that would be shared with torch's copy.
    exported = tool_output("nm", "-D", "--defined-only", _core.__file__).split()[2::3]
    assert exported == ["PyInit__core"]
