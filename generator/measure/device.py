"""Finds the device of this machine and describes the environment of a measurement.

Must not measure. Everything optional (torch, pynvml, git) may be absent; what is missing is left out.
"""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ktlib
from ktlib import env
from ktlib_generator.families.base import Device
from ktlib_generator.values import Environment

# Architectures with a kernel family; other GPUs are named by their compute capability alone.
ARCH_SUFFIX = {(9, 0): "a", (10, 0): "a", (12, 0): "a"}

CUBLAS_PACKAGES = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")


def detect(profile: str | None = None) -> Device:
    """Return this machine's device: the first CUDA device when usable, else the CPU.

    Raises:
        ValueError: `profile` names a device that is not here; says what is, and what to do.
    """
    here = available()
    if profile is None:
        return here[0]
    for device in here:
        if device.profile == profile:
            return device
    have = ", ".join(device.profile for device in here)
    hint = "Measuring needs the device itself: run on a machine that has it, or leave --profile out"
    if profile.startswith("sm"):
        reason = cuda_problem()
        hint = f"{hint}. CUDA: {reason}" if reason else hint
    raise ValueError(f"profile {profile!r} does not fit this machine (have: {have}). {hint}")


def available() -> tuple[Device, ...]:
    """Return every device measuring can use here, the preferred one first; the CPU's archs best first."""
    cpus = tuple(cpu_device(arch) for arch in core().cpu_archs())
    return cpus if cuda_problem() else (cuda_device(), *cpus)


def core() -> Any:
    """Import the extension; typed loosely because it is compiled."""
    return importlib.import_module("ktlib._core")


def cuda_problem() -> str:
    """Say why CUDA is not usable for measuring; empty when it is."""
    status = str(core().cuda_status())
    if status:
        return status
    if int(core().cuda_device_count()) < 1:
        return "the driver reports no device"
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "torch is not installed; measuring on a GPU needs it (pip install torch)"
    if not torch.cuda.is_available():
        return "torch sees no GPU (is it a CPU build?)"
    return ""


def cuda_device(index: int = 0) -> Device:
    """Describe a CUDA device from the driver's facts."""
    facts = core().cuda_device(index)
    capability = (int(facts["cc_major"]), int(facts["cc_minor"]))
    return Device(
        kind="cuda",
        name=str(facts["name"]),
        arch=f"sm{capability[0]}{capability[1]}{ARCH_SUFFIX.get(capability, '')}",
        sm_count=int(facts["sm_count"]),
        smem_optin_bytes=int(facts["smem_optin_bytes"]),
        l2_bytes=int(facts["l2_bytes"]),
    )


def cpu_device(arch: str) -> Device:
    """Describe this machine's CPU, as one of the instruction sets it runs."""
    return Device(
        kind="cpu", name=cpu_name(), arch=arch, sm_count=len(os.sched_getaffinity(0)), l2_bytes=cpu_l2_bytes()
    )


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_l2_bytes() -> int:
    """Return one core's L2 size; 0 when the kernel does not say."""
    for folder in sorted(glob.glob("/sys/devices/system/cpu/cpu0/cache/index*")):
        try:
            if Path(folder, "level").read_text().strip() == "2":
                text = Path(folder, "size").read_text().strip()
                return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1)
        except (OSError, ValueError):
            continue
    return 0


def environment(device: Device) -> Environment:
    """Describe where a measurement is made: device, commit, versions, and clocks and power where readable."""
    commit, dirty = source_version()
    facts = {"python": platform.python_version(), "cpu": cpu_name()}
    for name in ("numpy", "torch"):
        version = installed_version(name)
        if version:
            facts[name] = version
    if device.kind == "cuda":
        facts |= cuda_facts()
    return Environment(device.name, device.arch, device.sm_count, commit, dirty, tuple(facts.items()))


def source_version() -> tuple[str, bool]:
    """Return the commit and whether the tree is dirty; outside a checkout KTLIB_COMMIT or the version."""
    folder = Path(__file__).resolve().parents[2]
    if (folder / ".git").exists():
        commit = _git(folder, "rev-parse", "HEAD")
        if commit:
            # Only tracked files: a run writes journals and databases beside them.
            return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    return env.commit() or f"v{ktlib.__version__}", False


def installed_version(package: str) -> str:
    """Return a package's version without importing it; empty when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cuda_facts() -> dict[str, str]:
    """Return driver, library versions, and what NVML reads; a reading that fails is left out."""
    facts: dict[str, str] = {"driver_cuda": str(core().cuda_device(0)["driver_version"])}
    try:
        torch = importlib.import_module("torch")
        facts["cuda_runtime"] = str(torch.version.cuda)
        facts["cublas"] = next(
            filter(None, map(installed_version, CUBLAS_PACKAGES)),
            f"torch-cuda-{torch.version.cuda}",
        )
    except ImportError:
        pass
    return facts | nvml_facts()


def nvml_facts(index: int = 0) -> dict[str, str]:
    """Return clocks, power and temperature now; empty without pynvml."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no library, no permission: all the same to a record
        return {}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        readings: dict[str, Callable[[], Any]] = {
            "driver": lambda: nvml.nvmlSystemGetDriverVersion(),
            "clock_sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "clock_sm_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "clock_memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000.0,
        }
        facts: dict[str, str] = {}
        for name, read in readings.items():
            try:
                value = read()
            except Exception:  # one reading a GPU does not offer must not cost the others
                continue
            facts[name] = value.decode() if isinstance(value, bytes) else f"{value}"
        return facts
    finally:
        nvml.nvmlShutdown()


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints; empty when it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
