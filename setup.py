"""Builds what pyproject.toml cannot say: the extension `ktlib._core`, and the packs made from tuning_db/.

All metadata is in pyproject.toml. Needs a C++17 compiler and pybind11; no torch, no CUDA.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp"))
HEADERS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.h*"))
EXPORTS = "csrc/exports.map"

COMPILE_FLAGS = ["-O2", "-fvisibility=hidden", "-Wall", "-Wextra"]
# The C++ runtime is linked in, and nothing but the init function is visible: torch brings its own copy of
# that runtime into the process, and the two must not share symbols.
LINK_FLAGS = [
    "-static-libstdc++",
    "-static-libgcc",
    f"-Wl,--version-script={EXPORTS}",
    "-Wl,-z,relro,-z,now",
    "-s",
]

# Each instruction-set level is one file; the kernel table asks the processor before it calls into one.
LEVEL_FLAGS = {
    "csrc/kernels/cpu/isa_portable.cpp": ["-O3", "-ffp-contract=fast"],
    "csrc/kernels/cpu/isa_v3.cpp": ["-O3", "-ffp-contract=fast", "-march=x86-64-v3"],
    "csrc/kernels/cpu/isa_v4.cpp": ["-O3", "-ffp-contract=fast", "-march=x86-64-v4"],
}
IS_X86_64 = platform.machine() in ("x86_64", "AMD64")


class BuildExtAndPack(build_ext):
    """Compile `_core`, then turn every tuning_db/<profile>.h5 into ktlib/databases/<profile>.ktpack."""

    def build_extensions(self) -> None:
        """Compile in parallel, with the extra flags of each instruction-set level."""
        compile_one = self.compiler._compile

        def compile_with_level(obj: str, src: str, ext: str, cc_args: Any, extra: Any, pp_opts: Any) -> None:
            level = [f for f in LEVEL_FLAGS.get(src, []) if IS_X86_64 or not f.startswith("-march=")]
            compile_one(obj, src, ext, cc_args, [*extra, *level], pp_opts)

        self.compiler._compile = compile_with_level
        self.compiler.force = True  # always link; which objects are compiled again, is_stale says
        super().build_extensions()

    def run(self) -> None:
        """Build, then pack with the code just built."""
        super().run()
        databases = sorted(ROOT.glob("tuning_db/*.h5"))
        if databases:
            package_root = ROOT if self.inplace else Path(self.build_lib).resolve()
            self.pack(databases, package_root)

    def pack(self, databases: list[Path], package_root: Path) -> None:
        """Run the generator's packer in a child process; a failure fails the build with its message.

        The generator is not installed yet, so a link gives it the name it installs as.
        """
        target = package_root / "ktlib" / "databases"
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ktlib-pack-") as alias:
            (Path(alias) / "ktlib_generator").symlink_to(ROOT / "generator", target_is_directory=True)
            inherited = [path for path in sys.path if path and Path(path).resolve() != ROOT]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(package_root), alias, *inherited]),
            }
            for database in databases:
                pack = target / f"{database.stem}.ktpack"
                arguments = ["pack", str(database), "--output", str(pack)]
                packer = [sys.executable, "-m", "ktlib_generator.cli", *arguments]
                result = subprocess.run(packer, cwd=alias, env=environment, text=True, capture_output=True)
                if result.returncode != 0:
                    raise CompileError(
                        f"packing {database.name} failed (exit {result.returncode}):\n"
                        f"{result.stdout}{result.stderr}\nCheck the file with: ktlib-build verify {database}"
                    )
                print(f"packed {database.relative_to(ROOT)} -> {pack}")


def is_stale(obj: str, src: str) -> bool:
    """Whether an object file is older than its source, any header, or this file with its flags."""
    inputs = [src, "setup.py", *HEADERS]
    return Path(obj).stat().st_mtime < max((ROOT / path).stat().st_mtime for path in inputs)


ParallelCompile(default=0, needs_recompile=is_stale).install()
setup(
    ext_modules=[
        Pybind11Extension(
            "ktlib._core",
            SOURCES,
            depends=[*HEADERS, EXPORTS, "setup.py"],
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=COMPILE_FLAGS,
            extra_link_args=LINK_FLAGS,
            libraries=["dl", "pthread"],
        )
    ],
    cmdclass={"build_ext": BuildExtAndPack},
)
