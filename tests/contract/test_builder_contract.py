"""Building with a compiler that fails, hangs, dies or races; the compiler is a shell script.

What is at stake: a run must outlive every compiler, leave nothing running, and never hand out a binary
that is not the one its key names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from build_fakes import FAKE_NVCC, FakeFamily, compiles, install_nvcc, is_running, variant, wait_until

from ktlib.canonical import bytes_fingerprint
from ktlib_generator.build import builder, nvcc, process, toolkit
from ktlib_generator.build.builder import BuildPool, available_memory_bytes, build, build_many, default_jobs
from ktlib_generator.build.cache import BinaryCache
from ktlib_generator.build.toolkit import ToolchainError
from ktlib_generator.values import Binary, BuildFailure, Variant


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """Put the script where nvcc is looked for; the returned path collects the pid of each compile."""
    log = tmp_path / "compiles"
    for name, value in install_nvcc(tmp_path / "cuda", log).items():
        monkeypatch.setenv(name, value)
    return log


@pytest.fixture
def family(tmp_path):
    source = tmp_path / "src" / "kernel.cu"
    source.parent.mkdir()
    source.write_text("// kernel\n")
    return FakeFamily(source)


@pytest.fixture
def cache(tmp_path):
    return BinaryCache(tmp_path / "cache")


def entry(cache: BinaryCache, family: FakeFamily, which: Variant) -> Path:
    return cache.path(nvcc.source_key(family.build_request(which)))


def test_success_has_bytes_facts_and_is_cached(toolchain, family, cache):
    first = build(variant(), family, cache)
    assert isinstance(first, Binary)
    assert first.data == b"cubin of fake_64"
    assert first.registers == 40
    assert first.sha256 == bytes_fingerprint(first.data)
    again = build(variant(), family, cache)
    assert again == first
    assert again.data == first.data
    assert len(compiles(toolchain)) == 1


def test_a_changed_source_include_define_or_compiler_is_another_binary(toolchain, family, cache):
    keys = {nvcc.source_key(family.build_request(variant()))}
    keys.add(nvcc.source_key(family.build_request(variant(tile_m=128))))
    family.source.write_text("// kernel, changed\n")
    keys.add(nvcc.source_key(family.build_request(variant())))
    (family.source.parent / "helpers.cuh").write_text("// included\n")
    keys.add(nvcc.source_key(family.build_request(variant())))
    script = Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"
    script.write_text(FAKE_NVCC.replace("V13.0.88", "V13.1.10"))
    os.utime(script, ns=(1, 1))
    keys.add(nvcc.source_key(family.build_request(variant())))
    assert len(keys) == 5


def test_compiler_error_is_a_failure_with_its_first_error_and_log(toolchain, family, cache):
    result = build(variant("error"), family, cache)
    assert isinstance(result, BuildFailure)
    assert 'error: identifier "wgmmb" is undefined' in result.reason
    assert "kernel.cu(7)" in result.log
    assert not list(cache.root.glob("*/*/binary.json"))


def test_hang_with_a_sleeping_child_ends_at_the_limit_and_the_group_is_gone(toolchain, family, cache):
    begin = time.monotonic()
    result = build(variant("hang"), family, cache, 0.5)
    assert time.monotonic() - begin < 3.0
    assert isinstance(result, BuildFailure)
    assert "still running after 0.5 s" in result.reason
    children = [int(pid) for pid in Path(f"{toolchain}.children").read_text().split()]
    assert len(children) == 1
    assert wait_until(lambda: not any(map(is_running, [*children, *compiles(toolchain)])))


def test_killed_compiler_is_a_failed_config_and_is_not_tried_again(toolchain, family, cache):
    with BuildPool(cache, jobs=2) as pool:
        results = [pool.submit(variant("killed"), family).result() for _ in range(4)]
        good = pool.submit(variant(tile_m=256), family).result()
    assert all(isinstance(r, BuildFailure) and "killed by SIGKILL" in r.reason for r in results)
    assert isinstance(good, Binary)
    assert len(compiles(toolchain)) == 2


def test_no_compiler_says_what_to_install(family, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolkit, "USUAL_FOLDER", tmp_path)
    monkeypatch.setattr(toolkit, "_pip_tools", lambda name: [])
    with pytest.raises(ToolchainError, match="install the CUDA toolkit"):
        build(variant(), family, cache)


def test_builtin_needs_no_compiler_and_has_no_bytes(family, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    one, two = (build(variant("builtin", tile), family, cache) for tile in (64, 128))
    assert isinstance(one, Binary)
    assert one.format == "builtin"
    assert one.data == b""
    assert isinstance(two, Binary)
    assert one.source != two.source


def test_threads_that_want_one_key_share_one_compile(toolchain, family, cache):
    with BuildPool(cache, jobs=6) as pool:
        futures = [pool.submit(variant("slow"), family) for _ in range(6)]
        results = [future.result() for future in futures]
    assert {result.data for result in results} == {b"cubin of fake_64"}
    assert len(compiles(toolchain)) == 1


RACE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from build_fakes import FakeFamily, variant
from ktlib_generator.build.builder import build
from ktlib_generator.build.cache import BinaryCache
binary = build(variant("slow"), FakeFamily(Path({source!r})), BinaryCache(Path({root!r})))
sys.stdout.write(binary.data.decode())
"""


def test_processes_that_race_for_a_cold_key_all_get_the_binary(toolchain, family, cache):
    code = RACE.format(tests=str(Path(__file__).parents[1]), source=str(family.source), root=str(cache.root))
    racers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=python_env())
        for _ in range(4)
    ]
    assert [racer.communicate(timeout=60)[0] for racer in racers] == [b"cubin of fake_64"] * 4
    assert [racer.returncode for racer in racers] == [0] * 4
    assert cache.load(nvcc.source_key(family.build_request(variant("slow")))) is not None
    assert not list(cache.root.glob(".*")), "scratch folders were left behind"


def python_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "metadata", "no image", "empty metadata"])
def test_a_corrupted_entry_is_rebuilt_and_replaced(toolchain, family, cache, damage):
    build(variant(), family, cache)
    build(variant(tile_m=128), family, cache)
    folder = entry(cache, family, variant())
    image, metadata = folder / "image", folder / "binary.json"
    if damage == "flip":
        image.write_bytes(bytes([image.read_bytes()[0] ^ 1]) + image.read_bytes()[1:])
    elif damage == "truncate":
        image.write_bytes(image.read_bytes()[:-1])
    elif damage == "swap":
        other = entry(cache, family, variant(tile_m=128))
        image.write_bytes((other / "image").read_bytes())
        metadata.write_bytes((other / "binary.json").read_bytes())
    elif damage == "metadata":
        value = json.loads(metadata.read_text())
        value["binary"]["registers"] = 8
        metadata.write_text(json.dumps(value))
    elif damage == "no image":
        image.unlink()
    else:
        metadata.write_text("")
    rebuilt = build(variant(), family, cache)
    assert isinstance(rebuilt, Binary)
    assert rebuilt.data == b"cubin of fake_64"
    assert rebuilt.registers == 40
    assert len(compiles(toolchain)) == 3
    assert build(variant(), family, cache).data == b"cubin of fake_64"
    assert len(compiles(toolchain)) == 3, "the rebuilt entry did not replace the damaged one"


def test_a_winner_that_is_not_visible_yet_is_no_error(toolchain, family, cache, monkeypatch):
    """A network file system may report the loser's EEXIST before the winner can be read."""
    build(variant(), family, cache)
    monkeypatch.setattr(BinaryCache, "load", lambda self, key: None)
    result = build(variant(), family, cache)
    assert isinstance(result, Binary)
    assert result.data == b"cubin of fake_64"


def test_a_cache_that_cannot_be_written_warns_once_and_still_builds(toolchain, family, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    cache = BinaryCache(blocker / "cache")
    with pytest.warns(UserWarning, match="KTLIB_CACHE_DIR") as caught:
        results = [build(variant(tile_m=tile), family, cache) for tile in (64, 128)]
    assert all(isinstance(result, Binary) for result in results)
    assert len(caught) == 1


def test_build_many_reports_each_as_it_is_done_and_goes_on_after_failures(toolchain, family, cache):
    wanted = [variant("slow"), variant("error", 1), variant("killed", 2), variant(tile_m=3), variant("ok", 4)]
    seen = []
    results = build_many(wanted, lambda v: family, cache, jobs=2, on_done=lambda v, result: seen.append(v))
    assert set(results) == set(seen) == set(wanted)
    assert [isinstance(results[v], Binary) for v in wanted] == [True, False, False, True, True]
    assert seen[-1] != wanted[-1] or seen[0] != wanted[0], (
        "reported in order of submission, not of completion"
    )


def test_leaving_the_pool_kills_what_still_compiles(toolchain, family, cache):
    begin = time.monotonic()

    def interrupted_run() -> None:
        with BuildPool(cache, jobs=2) as pool:
            pool.submit(variant("hang", 1), family)
            pool.submit(variant("hang", 2), family)
            assert wait_until(lambda: len(compiles(toolchain)) == 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert time.monotonic() - begin < 6.0
    children = [int(pid) for pid in Path(f"{toolchain}.children").read_text().split()]
    assert wait_until(lambda: not any(map(is_running, [*children, *compiles(toolchain)])))
    assert isinstance(build(variant("ok", 3), family, cache), Binary), "the next build is refused"


PARENT = """
import signal, sys
# A shell starts background jobs, such as a test run, with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
sys.path.insert(0, {tests!r})
from build_fakes import FakeFamily, variant
from ktlib_generator.build.builder import build
from ktlib_generator.build.cache import BinaryCache
build(variant("hang"), FakeFamily(Path({source!r})), BinaryCache(Path({root!r})), 600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_compilers_die_with_their_parent_however_it_dies(toolchain, family, cache, number):
    code = PARENT.format(
        tests=str(Path(__file__).parents[1]), source=str(family.source), root=str(cache.root)
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=python_env(), stderr=subprocess.DEVNULL)
    children_file = Path(f"{toolchain}.children")
    try:
        assert wait_until(lambda: children_file.exists() and children_file.read_text().strip() != "", 20)
        parent.send_signal(number)
        parent.wait(timeout=10)
    finally:
        parent.kill()
        parent.wait()
    pids = [*map(int, children_file.read_text().split()), *compiles(toolchain)]
    assert wait_until(lambda: not any(map(is_running, pids)))


def test_stop_refuses_builds_until_allowed(toolchain, family, cache):
    process.stop_all()
    try:
        with pytest.raises(process.BuildsStopped):
            build(variant(), family, cache)
    finally:
        process.allow()
    assert isinstance(build(variant(), family, cache), Binary)


def test_stop_while_compiling_reports_no_failure(toolchain, family, cache):
    """A compiler that we killed ourselves says nothing about the config: no record may come of it."""
    outcome: list[object] = []

    def target() -> None:
        try:
            outcome.append(build(variant("hang"), family, cache))
        except process.BuildsStopped:
            outcome.append("stopped")

    thread = threading.Thread(target=target)
    thread.start()
    assert wait_until(lambda: compiles(toolchain))
    process.stop_all()
    thread.join(timeout=5)
    process.allow()
    assert outcome == ["stopped"]


@pytest.mark.parametrize(
    ("cores", "gigabytes", "jobs"), [(2, 64, 2), (64, 16, 16), (64, 0.2, 1), (1, 64, 1), (8, 3.5, 3)]
)
def test_job_count_comes_from_cores_and_memory(cores, gigabytes, jobs):
    assert default_jobs(cores=cores, available_bytes=int(gigabytes * builder.MEMORY_PER_JOB_BYTES)) == jobs


def test_available_memory_is_the_control_groups_when_that_is_less(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    group = tmp_path / "cgroup"
    group.mkdir()
    assert available_memory_bytes(meminfo, group) == 32000000 * 1024
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert available_memory_bytes(meminfo, group) == 32000000 * 1024
    (group / "memory.max").write_text(f"{16 << 30}\n")
    (group / "memory.current").write_text(f"{4 << 30}\n")
    assert available_memory_bytes(meminfo, group) == 12 << 30
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") == builder.MEMORY_PER_JOB_BYTES
