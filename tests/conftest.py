"""Shared by all tests: the checkout, and skipping `gpu` tests with the reason where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Settings of the shell that starts the tests must not change what they see; only where CUDA and binaries are.
for _name in [name for name in os.environ if name.startswith("KTLIB_")]:
    if _name not in ("KTLIB_LIBCUDA", "KTLIB_CACHE_DIR"):
        del os.environ[_name]

ROOT = Path(__file__).resolve().parents[1]


def gpu_missing_reason() -> str:
    """Why GPU tests cannot run here; empty when they can."""
    from ktlib import _core

    reason: str = _core.cuda_status()
    if reason:
        return reason
    return "" if _core.cuda_device_count() > 0 else "the driver lists no device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_missing_reason() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Root of the checkout; skips where the tests run without one."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("the tests run outside a checkout")
    return ROOT
