"""`ktlib-build`: help, `tune`, and each mistake: one line that says what to do, with its exit code.

The device and the worker are stand-ins; the files, the parser and the messages are real.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import COMMANDS, CPU, GPU, VARIANT, call, refused, set_up, tuned, use
from tune_fakes import TableWorker

from ktlib_generator import cli, commands
from ktlib_generator.families.cpu_gemm import CpuGemm
from ktlib_generator.families.sm90_tma import Sm90Tma
from ktlib_generator.measure import device as devices
from ktlib_generator.values import Status


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    set_up(tmp_path, monkeypatch)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"ktlib-build {command} " in out.split("example")[1]


def test_help_names_every_command_and_needs_no_extra(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(f"\n    {command} " in out for command in COMMANDS)
    blocked = (
        "import sys\n"
        "for name in ('h5py', 'rich', 'torch'): sys.modules[name] = None\n"
        "from ktlib_generator.cli import main\n"
        "main(['tune', '--help'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "--problems" in done.stdout


def test_no_command_or_an_unknown_one_is_wrong_use(capsys):
    assert "COMMAND" in refused(capsys, 2)
    assert "tune" in refused(capsys, 2, "optimise")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--problems", "64x64"], "'64x64' is not MxNxK"),
        (["--problems", "0x8x8"], "nothing to tune"),
        (["--problems", "no-such-suite"], "a suite file (.toml), or grid"),
        (["--problems", "gone.toml"], "gone.toml: No such file"),
        (["--problems", "8x8x8", "--budget", "5 minutes"], "expected a time (300s, 20m, 2h)"),
        (["--problems", "8x8x8", "--layout", "row"], "'row' is unknown (have: nn, nt, tn, tt)"),
        (["--problems", "8x8x8", "--dtype", "fp8"], "'fp8' is unknown (have: fp16, bf16, fp32)"),
        (["--problems", "8x8x8", "--strategy", "magic"], "exhaustive"),
        (["--problems", "8x8x8", "--protocol", "graph"], "(have: cpu-stream"),
        (["--problems", "8x8x8", "--jobs", "0"], "above zero"),
        (["--problems", "8x8x8", "--build-timeout", "soon"], "above zero"),
        (["--budget", "300s"], "--problems"),
    ],
)
def test_wrong_words_of_tune_are_named(capsys, words, says):
    assert says in refused(capsys, 2, "tune", *words)
    assert not Path("tuning_runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["8x8x8:nn:fp32", "--protocol", "graph-hot"], "'graph-hot' is unknown for cpu-x86_64_v3"),
        (["8x8x8:nn:fp32:batch=4"], "one call computes one product (batch 1)"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(capsys, words, says):
    line = refused(capsys, 2, "tune", "--problems", *words, "--dry-run")
    assert says in line
    assert refused(capsys, 2, "tune", "--problems", *words) == line
    assert not any(Path(name).exists() for name in ("tuning_runs", "tuning_db"))


def test_a_resumed_run_of_another_protocol_is_refused_dry_too(capsys):
    tuned(capsys)
    words = ["tune", "--problems", "32x32x32:nn:fp32", "--resume", "--protocol", "cpu-loop"]
    line = refused(capsys, 2, *words)
    assert "Give --protocol cpu-stream to go on" in line
    assert refused(capsys, 2, *words, "--dry-run") == line


@pytest.mark.parametrize("more", [["--quiet"], ["--dry-run"]])
def test_resume_without_a_run_directory_says_so_and_starts(capsys, more):
    code, _, err = call(capsys, "tune", "--problems", "8x8x8:nn:fp32", "--resume", "--run-dir", "typo", *more)
    assert code == 0
    assert err == "ktlib-build: warning: typo does not exist; the run starts anew\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["1024x1024x1024:nt:fp16"], " (no GPU: libcuda.so.1 not found)"),
        (["1024x1024x1024:nt:fp16", "--profile", "cpu-x86_64_v3"], ""),
        (["1024x1024x1024:nt:fp32"], ""),
        (["33x65x17:nt:bf16"], ""),
    ],
)
def test_first_line_names_the_device_and_why_no_gpu(capsys, monkeypatch, words, why):
    monkeypatch.setattr(devices, "cpu_name", lambda: "a CPU")
    code, _, err = call(capsys, "tune", "--problems", *words, "--budget", "1/problem")
    assert code == 0, err
    device, tuning, *_ = err.splitlines()
    assert device == f"device       a CPU (cpu-x86_64_v3, profile cpu-x86_64_v3){why}"
    assert tuning.startswith("tuning 1 problem, ")


def test_a_bad_suite_line_is_named(capsys):
    Path("s.toml").write_text('name = "s"\norigin = "o"\nproblems = [\n"8x8x8",\n"8x8x",\n]\n')
    assert "s.toml:5: problem '8x8x'" in refused(capsys, 2, "tune", "--problems", "s.toml")


def test_no_gpu_says_what_is_here_and_why(capsys):
    line = refused(capsys, 2, "tune", "--problems", "8x8x8", "--profile", "sm90a-132")
    assert "have: cpu-x86_64_v3" in line
    assert "libcuda.so.1 not found" in line


def test_wrong_profile_lists_those_here(capsys):
    line = refused(capsys, 2, "tune", "--problems", "8x8x8", "--profile", "cpu-x86_64_v9")
    assert "'cpu-x86_64_v9' does not fit this machine (have: cpu-x86_64_v3, cpu-portable)" in line


def without_nvcc(monkeypatch):
    from ktlib_generator.build import toolkit

    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(toolkit, "USUAL_FOLDER", Path("/nonexistent"))
    monkeypatch.setattr(toolkit, "_pip_tools", lambda name: [])


def test_no_nvcc_is_found_out_before_the_worker_starts(capsys, monkeypatch):
    without_nvcc(monkeypatch)
    monkeypatch.setattr(devices, "detect", lambda profile: GPU)

    class NoWorker(TableWorker):
        def run(self, job):
            raise AssertionError("measured without a compiler")

    use(monkeypatch, Sm90Tma(), GPU, NoWorker())
    line = refused(capsys, 1, "tune", "--problems", "64x64x64")
    assert "nvcc" in line
    assert "CUDA toolkit" in line
    assert "nvcc" in refused(capsys, 1, "build", VARIANT)


def test_dry_run_without_nvcc_still_plans_and_says_so(capsys, monkeypatch):
    without_nvcc(monkeypatch)
    monkeypatch.setattr(devices, "detect", lambda profile: GPU)
    code, out, _ = call(capsys, "tune", "--problems", "4096x4096x4096:nt", "--dry-run")
    assert code == 0
    assert "NVIDIA H200 (sm90a, profile sm90a-132)" in out
    assert "nvcc" in out
    assert not Path("tuning_runs").exists()


@pytest.mark.parametrize("option", ["--run-dir", "--database"])
def test_unwritable_paths_are_named(capsys, option):
    Path("file").write_text("in the way")
    line = refused(capsys, 2, "tune", "--problems", "8x8x8:nn:fp32", option, "file/below.h5")
    assert "file/below" in line
    assert "cannot" in line


def test_full_disk_is_a_failure_that_says_resume(capsys, monkeypatch):
    from ktlib_generator.store import journal

    def write_all(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal, "write_all", write_all)
    line = refused(capsys, 1, "tune", "--problems", "8x8x8:nn:fp32", "--quiet")
    assert "No space left" in line
    assert "journal.jsonl" in line
    assert "--resume" in line


@pytest.mark.parametrize(
    "words",
    [
        ["tune", "--problems", "8x8x8"],
        ["merge", "run"],
        ["inspect", "a.h5"],
        ["verify", "a.h5"],
        ["export", "a.h5", "--json"],
        ["import", "a.jsonl", "-o", "b.h5"],
        ["pack", "a.h5"],
    ],
)
def test_missing_h5py_is_named_with_its_extra(capsys, monkeypatch, words):
    found = commands.importlib.util.find_spec
    monkeypatch.setattr(
        commands.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "h5py" else found(name, *more),
    )
    assert refused(capsys, 1, *words).endswith("h5py is not installed; run pip install 'ktlib[build]'")


def test_missing_extension_says_how_to_build_it(capsys, monkeypatch):
    def core():
        raise ModuleNotFoundError("No module named 'ktlib._core'", name="ktlib._core")

    monkeypatch.setattr(devices, "core", core)
    assert "pip install" in refused(capsys, 1, "tune", "--problems", "8x8x8")


def test_missing_rich_costs_the_bar_only(capsys, monkeypatch):
    from ktlib_generator import progress

    class Terminal:
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    terminal = Terminal()
    made = progress.make_progress(quiet=False, stream=terminal)
    assert isinstance(made, progress.Lines)
    assert "pip install 'ktlib[build]'" in terminal.text


def test_all_candidates_failing_exits_with_failure(capsys, monkeypatch):
    use(monkeypatch, CpuGemm(), CPU, TableWorker(fails=lambda job: Status.WRONG_RESULT))
    code, out, _ = call(capsys, "tune", "--problems", "8x8x8:nn:fp32", "--quiet")
    assert code == 1
    assert "none right" in out


def test_ctrl_c_exits_130(capsys, monkeypatch):
    def interrupted(profile):
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "detect", interrupted)
    code, _, err = call(capsys, "tune", "--problems", "8x8x8")
    assert code == 130
    assert err == "ktlib-build: interrupted\n"


def test_a_bug_is_one_line_and_its_place_with_debug(capsys, monkeypatch):
    def broken(profile):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(devices, "detect", broken)
    line = refused(capsys, 1, "tune", "--problems", "8x8x8")
    assert "ZeroDivisionError: division by zero (--debug" in line
    with pytest.raises(ZeroDivisionError):
        cli.main(["--debug", "tune", "--problems", "8x8x8"])


def test_tune_prints_a_summary_and_writes_the_database(capsys):
    code, out, err = call(capsys, "tune", "--problems", "8x8x8:nn:fp32,64x64x64:nn:fp32")
    assert code == 0
    assert "kernels win  2 problems" in out
    assert "next         ktlib-build pack tuning_db/cpu-x86_64_v3.h5" in out
    assert "[2/2] 64x64x64:nn:fp32: best" in err
    assert Path("tuning_runs/cpu-x86_64_v3/journal.jsonl").exists()


def test_second_run_needs_resume_and_then_adds_only_what_is_new(capsys):
    tuned(capsys, "--budget", "2/problem")
    assert "--resume" in refused(capsys, 2, "tune", "--problems", "8x8x8:nn:fp32", "--quiet")
    code, out, _ = call(
        capsys, "tune", "--problems", "32x32x32:nn:fp32", "--quiet", "--resume", "--budget", "3/problem"
    )
    assert code == 0
    assert "trials       3 (3 ok); 1 new" in out
