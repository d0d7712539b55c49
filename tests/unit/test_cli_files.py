"""`ktlib-build` on files: merge, inspect, verify, export, import, pack and build, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import VARIANT, call, refused, set_up, tuned, use
from tune_fakes import TableWorker

from ktlib_generator.families.base import Device
from ktlib_generator.families.cpu_gemm import CpuGemm


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    set_up(tmp_path, monkeypatch)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full to write to")
def test_full_disk_while_exporting_is_a_failure(capsys):
    database = tuned(capsys)
    assert "No space left" in refused(capsys, 1, "export", database, "--json", "-o", "/dev/full")


def test_merge_inspect_verify_export_import_pack_follow_each_other(capsys):
    database = tuned(capsys)
    code, out, _ = call(capsys, "merge", "tuning_runs/cpu-x86_64_v3", "-o", "again.h5")
    assert (code, "0 binaries" in out) == (0, True)
    assert Path("again.h5").read_bytes() == database.read_bytes()
    code, out, _ = call(capsys, "merge", "tuning_runs/cpu-x86_64_v3")
    assert "(0 new)" in out
    code, out, _ = call(capsys, "inspect", database)
    assert code == 0
    assert "profile cpu-x86_64_v3" in out
    code, out, _ = call(capsys, "inspect", database, "--json")
    assert json.loads(out)["problems"] == 1
    assert call(capsys, "verify", database, "again.h5")[:2] == (0, f"{database}: sound\nagain.h5: sound\n")
    assert call(capsys, "export", database, "--json", "-o", "all.jsonl")[0] == 0
    code, out, _ = call(capsys, "export", database, "--json")
    assert out == Path("all.jsonl").read_text()
    assert call(capsys, "import", "all.jsonl", "-o", "back.h5")[0] == 0
    assert Path("back.h5").read_bytes() == database.read_bytes()
    code, out, _ = call(capsys, "pack", database)
    assert code == 0
    assert "1 problem, 1 won by 1 kernel," in out
    assert Path("tuning_db/cpu-x86_64_v3.ktpack").stat().st_size > 0


def test_import_does_not_replace_a_database_unasked(capsys):
    database = tuned(capsys)
    call(capsys, "export", database, "--json", "-o", "all.jsonl")
    before = database.read_bytes()
    assert "--force" in refused(capsys, 2, "import", "all.jsonl", "-o", database)
    assert database.read_bytes() == before
    assert call(capsys, "import", "all.jsonl", "-o", database, "--force")[0] == 0


def test_a_cut_off_export_is_refused_and_writes_nothing(capsys):
    database = tuned(capsys)
    call(capsys, "export", database, "--json", "-o", "all.jsonl")
    text = Path("all.jsonl").read_text().splitlines(keepends=True)
    Path("cut.jsonl").write_text("".join(text[:-1]))
    assert "cut off" in refused(capsys, 2, "import", "cut.jsonl", "-o", "new.h5")
    assert not Path("new.h5").exists()


def test_damaged_database_is_found_by_verify_and_refused_by_the_others(capsys):
    database = tuned(capsys)
    data = bytearray(database.read_bytes())
    data[-100] ^= 1
    database.write_bytes(bytes(data))
    code, out, _ = call(capsys, "verify", database)
    assert code == 1
    assert str(database) in out
    for words in (["inspect", database], ["pack", database], ["export", database, "--json"]):
        assert str(database) in refused(capsys, 2, *words)


@pytest.mark.parametrize("words", [["inspect"], ["pack"], ["merge"], ["export", "--json"]])
def test_missing_files_are_named(capsys, words):
    assert "nowhere.h5" in refused(capsys, 2, *words, "nowhere.h5")


def test_merge_of_two_profiles_is_refused(capsys, monkeypatch):
    tuned(capsys)
    other = Device("cpu", "another", "cpu-portable", 2)
    use(monkeypatch, CpuGemm(), other, TableWorker())
    call(
        capsys,
        "tune",
        "--problems",
        "8x8x8:nn:fp32",
        "--profile",
        "cpu-portable",
        "--quiet",
        "--run-dir",
        "other",
    )
    line = refused(capsys, 2, "merge", "tuning_runs/cpu-x86_64_v3", "other", "-o", "mixed.h5")
    assert "cpu-portable" in line
    assert "cpu-x86_64_v3" in line


def test_merge_of_nothing_is_refused(capsys):
    Path("empty").mkdir()
    assert "empty" in refused(capsys, 2, "merge", "empty")


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        ("sm90_tma", "expected family/name=value"),
        ("sm80_mma/tile_m=64/sm80", "family 'sm80_mma' is unknown (have: sm90_tma, cpu_gemm)"),
        ("sm90_tma/tile_m=64/sm90a", "is missing"),
        (VARIANT.replace("tile_m=128", "tile_m=100"), "tile_m=100 is not offered (have: 64, 128)"),
        (VARIANT.replace("tile_k=64", "tile_k=64,color=3"), "has no color"),
        (VARIANT.replace("/sm90a", "/sm80"), "sm90a code runs on sm90a devices alone"),
        (
            "cpu_gemm/dtype=fp32,loop=nm,tile_m=4,tile_n=8,unroll=4/cpu-x86_64_v3",
            "the extension is compiled with this combination",
        ),
    ],
)
def test_bad_variants_of_build_are_named(capsys, variant, says):
    assert says in refused(capsys, 2, "build", variant)


def test_build_of_a_kernel_in_the_extension_says_so(capsys):
    variant = "cpu_gemm/dtype=fp32,loop=mn,tile_m=4,tile_n=8,unroll=4/cpu-x86_64_v3"
    code, out, _ = call(capsys, "build", variant)
    assert code == 0
    assert "builtin" in out
    assert "leave --output out" in refused(capsys, 2, "build", variant, "-o", "a.cubin")


FAKE_NVCC = r"""#!/bin/sh
case "$1" in --version) echo "release 13.0, V13.0.88"; exit 0;; esac
while [ $# -gt 0 ]; do
  case "$1" in -o) out="$2";; -DKT_SYMBOL=*) symbol="${1#-DKT_SYMBOL=}";; esac
  shift
done
if [ -n "$FAKE_NVCC_FAILS" ]; then echo "gemm_tma.cu(9): error: no such thing"; exit 2; fi
echo "ptxas info    : Compiling entry function '$symbol' for 'sm_90a'"
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
echo "ptxas info    : Used 90 registers"
printf 'image' > "$out"
"""


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    script = tmp_path / "cuda" / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(FAKE_NVCC)
    script.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))


def test_build_prints_what_ptxas_said_and_writes_the_cubin(capsys, fake_nvcc):
    code, out, err = call(capsys, "build", VARIANT, "-o", "out/kernel.cubin")
    assert code == 0, err
    assert "registers  90 a thread, 0 bytes spilled" in out
    assert Path("out/kernel.cubin").read_bytes() == b"image"


def test_build_failure_shows_the_log_and_fails(capsys, fake_nvcc, monkeypatch):
    monkeypatch.setenv("FAKE_NVCC_FAILS", "1")
    code, _, err = call(capsys, "build", VARIANT)
    assert code == 1
    assert "gemm_tma.cu(9): error: no such thing" in err
    assert err.strip().splitlines()[-1].startswith("ktlib-build: error: sm90_tma/")


def test_a_closed_pipe_is_no_traceback(capsys):
    database = tuned(capsys).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = f"{sys.executable} -m ktlib_generator.cli export {database} --json | head -c 10 > /dev/null"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
