"""Makes the virtual environment that the Makefile works in, on a machine with Python, pip, make and g++ only.

Copes with what a fresh machine lacks or forbids: no ensurepip (Debian without python3-venv), a
system Python that refuses installs (PEP 668), no Python headers, no network beside a GPU image that
already has everything. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a build in the environment itself needs, with the least major version that understands pyproject.toml.
BUILD_REQUIREMENTS = (("setuptools", 77), ("pybind11", 3), ("numpy", 1), ("h5py", 3))


def main() -> int:
    """Run the sub-command; return 0, or 1 after saying what is missing and what to do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="make the environment if it is not there")
    create.add_argument("folder", type=Path)
    install = commands.add_parser("install", help="install this project, editable, into the running Python")
    install.add_argument("extras", help="comma-separated, for example build,test")
    arguments = parser.parse_args()
    try:
        if arguments.command == "create":
            create_environment(arguments.folder.absolute())
        else:
            install_project(arguments.extras)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def create_environment(folder: Path) -> None:
    """Create a virtual environment with pip, and with the system's packages where they drive a GPU."""
    require_python()
    require_compiler()
    require_headers()
    python = folder / "bin" / "python"
    if python.exists() and run_quietly([python, "-m", "pip", "--version"]):
        return
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--system-site-packages"] if system_torch_has_gpu() else []
    if importlib.util.find_spec("ensurepip") is not None:
        run([sys.executable, "-m", "venv", *options, folder])
    else:
        # pip of the system installs another pip into the environment; allowed under PEP 668.
        run([sys.executable, "-m", "venv", "--without-pip", *options, folder])
        pip = [sys.executable, "-m", "pip", "--python", python]
        run([*pip, "install", "--quiet", "--ignore-installed", "pip"])


def install_project(extras: str) -> None:
    """Install this checkout with its extras.

    Builds with the environment's own packages where they suffice (an image without a network), else
    in pip's isolated build environment.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    target = f"{ROOT}[{extras}]"
    suffices = all(at_least(name, major) for name, major in BUILD_REQUIREMENTS)
    if suffices and run_quietly([*pip, "--no-build-isolation", "--editable", target]):
        return
    run([*pip, "--editable", target])


def require_python() -> None:
    """Refuse a Python that is too old, naming both versions."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what tells users of an old Python
        raise RuntimeError(
            f"Python {sys.version.split()[0]} is too old, ktlib needs 3.10 or newer. "
            "Name another one: make PYTHON=python3.11 ..."
        )


def require_compiler() -> None:
    """Refuse a machine without a C++ compiler."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        raise RuntimeError(f"no C++ compiler: {compiler} is not on PATH. Install g++ (apt-get install g++).")


def require_headers() -> None:
    """Make sure Python.h is there: install Debian's package where that is possible, else say which it is."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    if os.geteuid() == 0 and shutil.which("apt-get") and sys.prefix == "/usr":
        print(f"{header} is missing: installing {package}")
        run_quietly(["apt-get", "update", "-qq"])
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", package])
    if not header.exists():
        raise RuntimeError(f"{header} is missing and the extension needs it: apt-get install {package}.")


def system_torch_has_gpu() -> bool:
    """Whether this Python already has a torch that reaches a GPU; that one is the user's, so it is used."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return run_quietly([sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"])


def at_least(name: str, major: int) -> bool:
    """Whether a distribution is installed with at least this major version."""
    try:
        found = re.match(r"\d+", metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
    return found is not None and int(found.group()) >= major


def run(command: list[str | Path]) -> None:
    """Run a command, its output shown."""
    subprocess.run([str(part) for part in command], check=True)


def run_quietly(command: list[str | Path]) -> bool:
    """Run a command, its output hidden; whether it succeeded."""
    return subprocess.run([str(part) for part in command], capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
