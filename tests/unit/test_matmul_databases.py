"""Databases that change under a running process: threads, forks, files cut off or deleted, many loads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmul_cases import CPU, draw, only_packs, write_cpu_pack
from pack_cases import make_pack, record

import ktlib
from ktlib import _core, packs


@pytest.fixture
def cpu_pack(tmp_path: Path) -> str:
    return write_cpu_pack(tmp_path / "cpu.ktpack")


@pytest.fixture
def kernels(cpu_pack: str) -> Iterator[str]:
    with only_packs(cpu_pack):
        yield cpu_pack


def lost(path: Path) -> str:
    """Make a pack that names the vendor for 16x16x16."""
    return make_pack(path, [record("16x16x16:nn:fp32", device=CPU, us=9.0, vendor_us=1.0)], CPU)


def in_use() -> list[str]:
    return [Path(pack["path"]).name for pack in ktlib.databases()]


def run_python(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_the_switch_is_decided_before_a_database_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(packs, "_loaded", False)
    monkeypatch.setattr(_core, "set_enabled", lambda value: order.append(f"enabled {value}"))
    monkeypatch.setattr(_core, "set_packs", lambda paths: order.append("packs") or [])
    monkeypatch.setenv("KTLIB_DISABLE", "1")
    packs.ensure_loaded()
    assert order == ["enabled False", "packs"]


@pytest.mark.parametrize("change", ["os.truncate(path, 0)", "open(path, 'r+b').write(bytes(100000))"])
def test_a_pack_cut_off_or_overwritten_while_in_use_keeps_working(cpu_pack: str, change: str) -> None:
    program = (
        "import os, sys, numpy as np, ktlib\npath = sys.argv[1]\nktlib.load_database(path)\n"
        f"a = np.ones((16, 16), 'float32')\n{change}\n"
        "choice = ktlib.explain(a, a)\nassert (ktlib.matmul(a, a) == 16).all()\nprint(choice.tier)"
    )
    done = run_python(program, cpu_pack)
    assert (done.returncode, done.stdout) == (0, "exact\n"), done.stderr


def test_a_child_forked_while_another_thread_loads_a_database_can_load_one(kernels: str) -> None:
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with packs._lock:
            held.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        child = os.fork()
        if child == 0:
            ktlib.load_database(kernels)
            os._exit(7)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(ended[1]) == 7
        assert ended != (0, 0)
    finally:
        leave.set()
        thread.join()


def test_loading_another_pack_keeps_one_that_was_deleted_or_broken_meanwhile(
    tmp_path: Path, kernels: str
) -> None:
    other, last = lost(tmp_path / "other.ktpack"), lost(tmp_path / "last.ktpack")
    ktlib.load_database(other)
    os.unlink(kernels)
    Path(other).write_bytes(b"not a pack")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ktlib.load_database(last)
    assert in_use() == ["last.ktpack", "other.ktpack", "cpu.ktpack"]
    a = draw((4, 64), "float32")
    assert ktlib.explain(a, a.T).tier in ("exact", "near")
    np.testing.assert_array_equal(ktlib.matmul(a, a.T), a @ a.T)


def test_a_relative_path_stays_the_same_pack_in_another_folder(
    tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lost(tmp_path / "other.ktpack")
    monkeypatch.chdir(tmp_path)
    ktlib.load_database("other.ktpack")
    ktlib.load_database(os.fsencode(path))  # type: ignore[arg-type]
    assert in_use() == ["other.ktpack", "cpu.ktpack"]
    assert ktlib.databases()[0]["path"] == path


def test_a_pack_that_was_rewritten_is_read_again_when_it_is_loaded(tmp_path: Path, kernels: str) -> None:
    a = draw((16, 16), "float32")
    path = lost(tmp_path / "other.ktpack")
    ktlib.load_database(path)
    assert ktlib.explain(a, a).tier == "vendor"
    Path(path).write_bytes(Path(kernels).read_bytes())
    ktlib.load_database(path)
    assert ktlib.explain(a, a).database == path
    assert ktlib.explain(a, a).tier == "exact"


def test_loading_two_packs_again_and_again_does_not_fill_the_memory(tmp_path: Path, kernels: str) -> None:
    problems = [f"{m}x16x{k}:nn:fp32" for m in range(1, 101) for k in (8, 16)]
    records = [record(p, device=CPU, us=9.0, vendor_us=1.0) for p in problems]
    big = make_pack(tmp_path / "big.ktpack", records, CPU)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def load(times: int) -> None:
        for _ in range(times):
            ktlib.load_database(big)
            ktlib.load_database(kernels)

    load(50)
    before = resident()
    load(500)
    assert resident() - before < 4 << 20
    assert in_use() == ["cpu.ktpack", "big.ktpack"]


def test_a_driver_path_that_is_not_text_does_not_break_the_import() -> None:
    program = "import ktlib\nfrom ktlib import _core\nprint(ascii(_core.cuda_status()))"
    done = run_python(program, KTLIB_LIBCUDA=os.fsdecode(b"/nowhere/\xff.so"))
    assert done.returncode == 0, done.stderr
    assert r"/nowhere/\udcff.so" in done.stdout
    command = [sys.executable, "-m", "ktlib", "info"]
    environment = {**os.environ, "KTLIB_LIBCUDA": os.fsdecode(b"/nowhere/\xff.so")}
    shown: Any = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert rb"/nowhere/\udcff.so" in shown.stdout


@pytest.mark.parametrize("words", ["info", "info --json", "explain 64x64x64", "--help"])
def test_output_that_nobody_reads_or_no_disk_takes_is_no_traceback(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # argparse hides errors of its own writes
    command = f"exec {sys.executable} -m ktlib {words}"
    unread = f"({command}) | (exec <&-; sleep 0.3)"
    closed = subprocess.run(["bash", "-c", unread], capture_output=True, text=True)
    assert closed.stderr == ""
    full = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True)
    assert full.stderr == "ktlib: cannot write the output: No space left on device\n"
    assert full.returncode == 1
