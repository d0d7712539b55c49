"""Runs `ktlib-build` in this process, with a stand-in for the device and the worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tune_fakes import TableWorker

from ktlib_generator import cli
from ktlib_generator.build.cache import BinaryCache
from ktlib_generator.families.base import Device
from ktlib_generator.families.cpu_gemm import CpuGemm
from ktlib_generator.measure import device as devices
from ktlib_generator.tune import MeasuringWorker, Tools
from ktlib_generator.values import Environment

COMMANDS = ("tune", "build", "merge", "inspect", "verify", "export", "import", "pack")
CPU = Device("cpu", "a CPU", "cpu-x86_64_v3", 2)
GPU = Device("cuda", "NVIDIA H200", "sm90a", 132, smem_optin_bytes=232448)
VARIANT = (
    "sm90_tma/dtype=fp16,group_m=1,layout=nt,num_stages=4,schedule=single,"
    "tile_k=64,tile_m=128,tile_n=128/sm90a"
)


def set_up(tmp_path: Path, monkeypatch) -> None:
    """Give the command an empty folder to run in, a CPU to find, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KTLIB_CACHE_DIR", str(tmp_path / "cache"))
    core = SimpleNamespace(
        cpu_archs=lambda: [CPU.arch, "cpu-portable"], cuda_status=lambda: "libcuda.so.1 not found"
    )
    monkeypatch.setattr(devices, "core", lambda: core)
    use(monkeypatch, CpuGemm(), CPU, TableWorker())


def use(monkeypatch, family, device: Device, worker: MeasuringWorker) -> None:
    environment = Environment(device.name, device.arch, device.sm_count, "0" * 40, False)
    made = Tools((family,), environment, lambda: worker, BinaryCache(Path("cache").resolve()))
    monkeypatch.setattr(Tools, "real", classmethod(lambda cls, device, options: made))


def call(capsys, *words) -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, standard output, standard error."""
    try:
        code = cli.main([str(word) for word in words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, code: int, *words) -> str:
    """Expect an error; returns its one line."""
    got, _, err = call(capsys, *words)
    lines = err.strip().splitlines()
    assert got == code, err
    assert len(lines) == 1, err
    assert lines[0].startswith("ktlib-build: error: ")
    return lines[0]


def tuned(capsys, *more) -> Path:
    code, _, err = call(capsys, "tune", "--problems", "32x32x32:nn:fp32", "--quiet", *more)
    assert code == 0, err
    return Path("tuning_db/cpu-x86_64_v3.h5")
