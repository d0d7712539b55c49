"""Finding the device and describing the environment: no crash for what is missing, and advice in errors."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from ktlib_generator.families.base import Device
from ktlib_generator.measure import device as module
from ktlib_generator.values import Environment


class Core:
    """A `_core` of a machine with or without a GPU."""

    def __init__(self, status="", cc=(9, 0)):
        self.status, self.cc = status, cc

    def cpu_archs(self):
        return ["cpu-x86_64_v3", "cpu-portable"]

    def cuda_status(self):
        return self.status

    def cuda_device_count(self):
        return 1

    def cuda_device(self, index):
        major, minor = self.cc
        return {
            "name": "NVIDIA H200",
            "cc_major": major,
            "cc_minor": minor,
            "sm_count": 132,
            "l2_bytes": 60 << 20,
            "smem_optin_bytes": 232448,
            "driver_version": 13000,
        }


def machine(monkeypatch, core, *, torch_sees_gpu=True):
    monkeypatch.setattr(module, "core", lambda: core)
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: torch_sees_gpu),
        version=types.SimpleNamespace(cuda="13.0"),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_gpu_is_preferred_and_named_with_its_suffix(monkeypatch):
    machine(monkeypatch, Core())
    found = module.detect()
    assert (found.kind, found.arch, found.profile) == ("cuda", "sm90a", "sm90a-132")
    assert module.detect("cpu-portable").kind == "cpu"


def test_gpu_without_a_family_is_named_by_its_capability(monkeypatch):
    machine(monkeypatch, Core(cc=(8, 0)))
    assert module.detect().arch == "sm80"


def test_machine_without_a_driver_measures_its_best_cpu_arch(monkeypatch):
    machine(monkeypatch, Core(status="libcuda.so.1 was not found"))
    assert module.detect().profile == "cpu-x86_64_v3"


@pytest.mark.parametrize(
    ("core", "sees", "why"),
    [
        (Core(status="libcuda.so.1 was not found"), True, "libcuda.so.1 was not found"),
        (Core(), False, "torch sees no GPU"),
    ],
)
def test_gpu_profile_on_a_machine_without_one_says_why_and_what_there_is(monkeypatch, core, sees, why):
    machine(monkeypatch, core, torch_sees_gpu=sees)
    with pytest.raises(ValueError, match="cpu-x86_64_v3, cpu-portable") as caught:
        module.detect("sm90a-132")
    assert why in str(caught.value)
    assert "--profile" in str(caught.value)


def test_environment_round_trips_and_names_the_commit(monkeypatch):
    machine(monkeypatch, Core(status="no driver"))
    found = module.environment(module.detect())
    assert Environment.parse(str(found)) == found
    assert found.commit
    assert {"python", "numpy"} <= set(dict(found.facts))


def test_dirty_counts_tracked_files_only(tmp_path, monkeypatch):
    package = tmp_path / "generator" / "measure"
    package.mkdir(parents=True)
    (tmp_path / "tracked").write_text("1")
    for command in (
        ["init", "-q"],
        ["add", "tracked"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr(module, "__file__", str(package / "device.py"))
    (tmp_path / "journal.jsonl").write_text("a run writes here")
    commit, dirty = module.source_version()
    assert len(commit) == 40
    assert not dirty
    (tmp_path / "tracked").write_text("2")
    assert module.source_version() == (commit, True)


def test_package_outside_a_checkout_gives_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "ktlib_generator" / "measure" / "device.py"))
    commit, dirty = module.source_version()
    assert commit.startswith("v")
    assert not dirty


def test_one_reading_nvml_refuses_does_not_cost_the_others(monkeypatch):
    def refused(handle):
        raise RuntimeError("not supported")

    nvml = types.SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlSystemGetDriverVersion=lambda: b"580.95",
        nvmlDeviceGetClockInfo=lambda handle, which: 1980,
        nvmlDeviceGetMaxClockInfo=lambda handle, which: 1980,
        nvmlDeviceGetTemperature=lambda handle, which: 41,
        nvmlDeviceGetPowerUsage=refused,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = module.nvml_facts()
    assert facts["driver"] == "580.95"
    assert facts["power_limit_w"] == "700.0"
    assert "power_w" not in facts


def test_machine_without_nvml_has_no_readings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert module.nvml_facts() == {}


def test_profile_of_a_cpu_is_its_arch_alone():
    assert Device("cpu", "x", "cpu-portable", 8).profile == "cpu-portable"
