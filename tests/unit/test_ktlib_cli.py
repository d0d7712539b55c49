"""The command `ktlib`, as a user runs it: a process of its own, databases given by the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pack_cases import H200, make_pack, record

import ktlib
from ktlib import _core
from ktlib.cli import _operand_align
from ktlib.problem import Choice, Problem
from ktlib_generator.families.base import Device

PORTABLE = Device(kind="cpu", name="any machine", arch="cpu-portable", sm_count=1)


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KTLIB_")}
    command = [sys.executable, "-m", "ktlib.cli", *words]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True)


def info(**variables: str) -> dict[str, object]:
    result = run("info", "--json", **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def portable_pack(tmp_path: Path) -> str:
    kernel = next(k for k in _core.cpu_kernels() if k["dtype"] == "fp32")
    return make_pack(
        tmp_path / "portable.ktpack", [record("64x64x64:nn:fp32", device=PORTABLE, **kernel)], PORTABLE
    )


def test_explain_finds_the_database_that_the_environment_names(portable_pack: str) -> None:
    result = run("explain", "64x64x64:nn:fp32", "--device", "cpu", "--json", KTLIB_DB_PATH=portable_pack)
    choice = Choice.parse(result.stdout)
    assert (choice.tier, choice.database) == ("exact", portable_pack)
    assert choice.kernel.endswith("/cpu-portable")


def test_explain_says_vendor_when_ktlib_is_switched_off(portable_pack: str) -> None:
    result = run("explain", "64x64x64:nn:fp32", KTLIB_DB_PATH=portable_pack, KTLIB_DISABLE="1")
    assert "KTLIB_DISABLE=1" in result.stdout
    assert "tier      vendor" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("64x64",), "ktlib explain: problem '64x64' is not MxNxK"),
        (("64X64x64:nn",), "'64X64x64' is not MxNxK; did you mean 64x64x64?"),
        (("-1x4x4",), "'-1x4x4' is negative"),
        (("64x64x64:nn:float16",), "did you mean fp16?"),
        (("64x64x64:nn:torch.bfloat16",), "did you mean bf16?"),
        (("64x64x64:NT",), "did you mean nt?"),
        (("64x64x64:fp32",), "a layout comes before it: nn:fp32"),
        (("64x64x64:nx",), "layout 'nx' is unknown (have: nn, nt, tn, tt)"),
        (("64x64x64", "--device", "tpu"), "device 'tpu' is unknown (have: cpu, cuda:0"),
    ],
)
def test_explain_refuses_in_one_line_what_makes_no_sense(words: tuple[str, ...], said: str) -> None:
    result = run("explain", *words)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_explain_refuses_a_gpu_that_is_not_here_with_the_reason() -> None:
    for device in ("cuda", "cuda:0", "cuda:63"):
        result = run("explain", "64x64x64", "--device", device, KTLIB_LIBCUDA="/nowhere/libcuda.so")
        assert result.returncode == 2
        assert "cannot be used here" in result.stderr
        assert "/nowhere/libcuda.so" in result.stderr


def test_explain_says_whose_times_it_shows(portable_pack: str) -> None:
    elsewhere = "on the tuned problem that the reason names\n"
    for problem, owner in (("64x64x64", "us\n"), ("60x64x64", elsewhere)):
        result = run("explain", f"{problem}:nn:fp32", "--device", "cpu", KTLIB_DB_PATH=portable_pack)
        (line,) = [line for line in result.stdout.splitlines(True) if line.startswith("measured")]
        assert line.endswith(owner)


def test_info_marks_a_wrong_switch() -> None:
    assert "KTLIB_DISABLE must be 0 or 1, got 'yes'" in run("info", KTLIB_DISABLE="yes").stdout
    assert "must be 0 or 1" not in run("info", KTLIB_DISABLE="1").stdout


def test_the_package_runs_as_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "ktlib", "--version"], capture_output=True, text=True)
    assert result.stdout == f"ktlib {ktlib.__version__}\n"


def test_a_wrong_switch_is_an_error_not_a_guess() -> None:
    result = run("explain", "64x64x64", KTLIB_DISABLE="yes")
    assert result.returncode == 2
    assert "KTLIB_DISABLE must be 0 or 1, got 'yes'" in result.stderr


def test_info_says_why_a_damaged_database_is_refused_and_still_lists_the_others(
    portable_pack: str, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.ktpack"
    damaged.write_bytes(Path(portable_pack).read_bytes()[:-1])
    databases = {d["path"]: d for d in info(KTLIB_DB_PATH=f"{damaged}:{portable_pack}")["databases"]}
    assert "damaged.ktpack" in databases[str(damaged)]["refused"]
    assert databases[portable_pack]["refused"] == ""
    assert databases[portable_pack]["devices"] == {"cpu": ""}
    assert databases[portable_pack]["entries"] == 1


def test_info_says_why_another_devices_database_is_not_used(tmp_path: Path) -> None:
    other = Device(kind="cpu", name="other", arch="cpu-armv9", sm_count=1)
    kernel = next(k for k in _core.cpu_kernels() if k["dtype"] == "fp32")
    path = make_pack(tmp_path / "other.ktpack", [record("64x64x64:nn:fp32", device=other, **kernel)], other)
    (database,) = (d for d in info(KTLIB_DB_PATH=path)["databases"] if d["path"] == path)
    assert "cpu-armv9" in database["devices"]["cpu"]


@pytest.mark.skipif(not _core.cuda_status(), reason="this machine has a GPU")
def test_info_without_a_driver_says_so_once_for_all_gpu_databases(tmp_path: Path) -> None:
    path = make_pack(tmp_path / "h200.ktpack", [record("64x64x64:nn:fp16")], H200)
    (database,) = (d for d in info(KTLIB_DB_PATH=path)["databases"] if d["path"] == path)
    assert "there is none here" in database["refused"]
    assert run("info", KTLIB_DB_PATH=path).stdout.count("libcuda.so.1: cannot") == 1


def test_info_lists_every_variable_with_its_value() -> None:
    values = {v["name"]: v["value"] for v in info(KTLIB_CACHE_DIR="/somewhere")["variables"]}
    assert values["KTLIB_CACHE_DIR"] == "/somewhere"
    assert values["KTLIB_DISABLE"] == ""


def test_version_is_the_packages() -> None:
    assert run("--version").stdout == f"ktlib {ktlib.__version__}\n"


@pytest.mark.parametrize(
    ("problem", "align"),
    [
        ("64x63x64:nt:fp16", 16),  # C's rows are 126 bytes, A's and B's are 128
        ("64x63x64:nn:fp16", 2),  # B's rows are C's
        ("64x64x63:nn:fp16", 2),
        ("64x64x64:nn:fp16:align=4", 4),
    ],
)
def test_alignment_of_the_operands_leaves_c_out(problem: str, align: int) -> None:
    assert _operand_align(Problem.parse(problem)) == align
