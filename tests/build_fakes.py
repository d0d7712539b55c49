"""A compiler that is a shell script, and a kernel family that it compiles: error, hang, death, success."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ktlib_generator.families.base import BuildRequest, KernelFacts, LaunchParameters
from ktlib_generator.values import Variant

FAKE_NVCC = r"""#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac
out=""; symbol=""; mode=""; prev=""
for word in "$@"; do
  case "$prev" in -o) out="$word";; esac
  case "$word" in -DKT_SYMBOL=*) symbol="${word#-DKT_SYMBOL=}";; -DMODE=*) mode="${word#-DMODE=}";; esac
  prev="$word"
done
echo "$$" >> "$FAKE_NVCC_LOG"
case "$mode" in
  error) echo "kernel.cu(7): error: identifier \"wgmmb\" is undefined" >&2; exit 2;;
  hang) sleep 3600 & echo "$!" >> "$FAKE_NVCC_LOG.children"; wait;;
  killed) kill -KILL $$;;
  slow) sleep 0.4;;
esac
echo "ptxas info    : Compiling entry function '$symbol' for 'sm_90a'"
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
echo "ptxas info    : Used 40 registers, used 1 barriers"
printf 'cubin of %s' "$symbol" > "$out"
"""


class FakeFamily:
    """Compiles `source`; `mode` tells the script how to behave, `tile_m` makes variants differ."""

    name = "fake"
    device_kind = "cuda"

    def __init__(self, source: Path, offered: Sequence[Variant] = ()) -> None:
        self.source = source
        self.offered = offered

    def parameters(self):
        return ()

    def constraints(self):
        return ()

    def variants(self, problem, device):
        return iter(self.offered)

    def build_request(self, variant: Variant) -> BuildRequest | None:
        if variant["mode"] == "builtin":
            return None
        symbol = f"fake_{variant['tile_m']}"
        defines = (("KT_SYMBOL", symbol), ("MODE", str(variant["mode"])))
        return BuildRequest(self.source, symbol, variant.arch, defines)

    def kernel_facts(self, variant, binary) -> KernelFacts:
        return KernelFacts(
            name=str(variant),
            symbol=binary.symbol,
            family=self.name,
            abi="fake",
            arch=variant.arch,
            dtype="fp16",
            layout="nn",
        )

    def launch_parameters(self, variant) -> LaunchParameters:
        return LaunchParameters()


def variant(mode: str = "ok", tile_m: int = 64) -> Variant:
    return Variant.make("fake", "sm90a", mode=mode, tile_m=tile_m, tile_n=16)


def install_nvcc(folder: Path, log: Path) -> dict[str, str]:
    """Write the script as a toolkit below `folder`; returns the environment that makes it the compiler.

    `log` collects the pid of each compile, `<log>.children` those of the children of the ones that hang.
    """
    script = folder / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(FAKE_NVCC)
    script.chmod(0o755)
    return {"CUDA_HOME": str(folder), "FAKE_NVCC_LOG": str(log)}


def compiles(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
