"""The dispatcher end to end against a stand-in for libcuda: what is launched, and every failure.

Each case runs in its own process, because a driver is opened once for a process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pack_cases import H200, make_pack, record

FAKES = Path(__file__).resolve().parents[1] / "fake_cuda"

# What every case starts with: the fake driver behind `lib`, the fake CuPy, one pack.
PRELUDE = """
import ctypes, json, os, struct, sys, threading, warnings
sys.path.insert(0, {fakes!r})
import cupy
import ktlib
from ktlib import _core, packs
_core.set_libcuda({library!r})
packs.SHIPPED = packs.Path("/nonexistent")  # what is tuned and shipped must not decide here
lib = ctypes.CDLL({library!r})
lib.fake_calls.restype = ctypes.c_char_p
lib.fake_current.restype = ctypes.c_uint64
u8, u32, u64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64
lib.fake_set_current.argtypes = [ctypes.c_uint64]

class Launch(ctypes.Structure):
    _fields_ = [("grid", u32 * 3), ("block", u32 * 3), ("smem_bytes", u32), ("attribute_count", u32),
                ("stream", u64), ("context", u64), ("function", u64),
                ("maps", u8 * 128 * 3), ("params", u8 * 40)]

class Map(ctypes.Structure):
    _fields_ = [("address", u64), ("extents", u64 * 2), ("stride_bytes", u64), ("rank", u32), ("type", u32),
                ("box", u32 * 2), ("element_strides", u32 * 2), ("interleave", u32), ("swizzle", u32),
                ("promotion", u32), ("fill", u32)]

lib.fake_launch.restype = ctypes.POINTER(Launch)
lib.fake_map.restype = ctypes.POINTER(Map)

def launches():
    return [lib.fake_launch(i).contents for i in range(lib.fake_launch_count())]

def encoded():
    return [lib.fake_map(i).contents for i in range(lib.fake_map_count())]

def calls():
    return lib.fake_calls().decode().split()

def half(*shape, **options):
    return cupy.ndarray(shape, "float16", **options)

def product(a, b, out=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ktlib.matmul(a, b, out=out)
    return result, [str(w.message) for w in caught]
"""


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    library = tmp_path_factory.mktemp("fake_cuda") / "libcuda_fake.so"
    source = FAKES / "fake_cuda.cpp"
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def packs(tmp_path: Path) -> str:
    """Won problems: 512x768x256 in both layouts, a persistent one with row groups, and a bf16 one."""
    return make_pack(
        tmp_path / "fake.ktpack",
        [
            record("512x768x256", us=5.0, smem_bytes=100_000, group_m=8),
            record("512x768x256:nt", us=5.0, smem_bytes=100_000, tile_n=256),
            record("4096x4096x128", us=5.0, smem_bytes=50_000, persistent=1),
            record("64x61x64", us=5.0),
            record("256x256x256", us=50.0),
        ],
        H200,
    )


@pytest.fixture
def run(fake_library: Path, packs: str) -> Callable[..., Any]:
    def run_case(body: str, **environment: str) -> Any:
        """Run the prelude and `body` in a new process; return what it assigned to `result`."""
        import os

        program = PRELUDE.format(fakes=str(FAKES), library=str(fake_library)) + textwrap.dedent(body)
        program += "\nprint('RESULT' + json.dumps(result))\n"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "KTLIB_DB_PATH": packs, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.rsplit("RESULT", 1)[1])

    return run_case


def test_a_product_launches_the_chosen_kernel_with_its_grid_and_parameters(run: Callable[..., Any]) -> None:
    result = run("""
        a, b = half(512, 256), half(256, 768)
        choice = ktlib.explain(a, b)
        c, warned = product(a, b)
        (launch,) = launches()
        result = dict(choice=choice.to_dict(), warned=warned, grid=list(launch.grid),
                      block=list(launch.block), smem=launch.smem_bytes,
                      optin=lib.fake_max_dynamic_smem(), stream=launch.stream,
                      attributes=launch.attribute_count, c=c.data.ptr, shape=c.shape,
                      params=struct.unpack("<Qqiiiiii", bytes(launch.params)), vendor=cupy.VENDOR_CALLS)
    """)
    assert result["choice"]["tier"] == "exact"
    assert result["warned"] == []
    assert (result["grid"], result["block"]) == ([4 * 6, 1, 1], [384, 1, 1])
    assert (result["smem"], result["optin"]) == (100_000, 100_000)
    assert (result["stream"], result["attributes"]) == (0x5000, 0)
    assert result["shape"] == [512, 768]
    assert result["params"] == [result["c"], 768, 512, 768, 256, 1, 8, 0]
    assert result["choice"]["launch"]["grid"] == result["grid"][0]
    assert result["vendor"] == []


def test_tensor_maps_describe_the_operands_as_stored(run: Callable[..., Any]) -> None:
    result = run("""
        a, weight = half(512, 256), half(768, 256)
        b = half(256, 768, address=weight.data.ptr, strides=(2, 512))
        c, _ = product(a, b)
        (launch,) = launches()
        result = dict(
            maps=[[m.address, list(m.extents), m.stride_bytes, list(m.box), list(m.element_strides)]
                  for m in encoded()],
            modes=[[m.rank, m.type, m.interleave, m.swizzle, m.promotion, m.fill] for m in encoded()],
            order=[launch.maps[i][0] for i in range(3)], pointers=[a.data.ptr, b.data.ptr, c.data.ptr])
    """)
    a, b, c = result["pointers"]
    box, unit = [64, 64], [1, 1]
    assert result["maps"] == [
        [a, [256, 512], 512, box, unit],
        [b, [256, 768], 512, box, unit],
        [c, [768, 512], 1536, box, unit],
    ]
    assert result["modes"] == [[2, 6, 0, 3, 3, 0]] * 3
    assert result["order"] == [1, 2, 3]


def test_an_unaligned_result_is_stored_plainly_with_a_copy_of_map_a(run: Callable[..., Any]) -> None:
    result = run("""
        a, b = half(64, 64), half(64, 61, strides=(128, 2))
        product(a, b)
        (launch,) = launches()
        result = dict(flags=struct.unpack("<Qqiiiiii", bytes(launch.params))[-1],
                      order=[launch.maps[i][0] for i in range(3)], maps=lib.fake_map_count(),
                      choice=ktlib.explain(a, b).to_dict())
    """)
    assert result["choice"]["tier"] in ("exact", "near")
    assert (result["flags"], result["order"], result["maps"]) == (1, [1, 2, 1], 2)


def test_a_persistent_kernel_launches_one_block_for_each_that_fits(run: Callable[..., Any]) -> None:
    grid = run("product(half(4096, 128), half(128, 4096)); result = list(launches()[0].grid)")
    assert grid == [132, 1, 1]


def test_a_second_call_encodes_and_loads_nothing_again(run: Callable[..., Any]) -> None:
    result = run("""
        a, b = half(512, 256, address=1 << 30), half(256, 768, address=2 << 30)
        c = half(512, 768, address=3 << 30)
        product(a, b, c)
        lib.fake_reset()
        same = product(a, b, c)[0] is c
        result = [calls(), same]
    """)
    again, same = result
    assert same
    assert again.count("cuLaunchKernelEx") == 1
    assert not {"cuTensorMapEncodeTiled", "cuLibraryLoadData", "cuFuncSetAttribute"} & set(again)


def test_the_devices_context_is_current_for_the_launch_and_the_old_one_after(run: Callable[..., Any]) -> None:
    result = run("""
        facts = _core.pack_info(os.environ["KTLIB_DB_PATH"])["kernels"][0]
        kernel = _core.CudaKernel(b"image of a kernel", facts)
        lib.fake_set_current(100)
        kernel.launch(256, 512, 1024, 128, 128, 64, 64, 128, 128, 1, 1, 1, 7)
        after = lib.fake_current()
        lib.fake_reset()
        kernel.launch(256, 512, 1024, 128, 128, 64, 64, 128, 128, 1, 1, 0, 7)
        result = [after, launches()[0].context, launches()[0].stream, "cuCtxSetCurrent" in calls()]
    """)
    assert result == [100, 100, 7, False]


def test_arrays_off_cupys_current_device_go_to_cupy(run: Callable[..., Any]) -> None:
    result = run("""
        lib.fake_set_current(100)
        product(half(512, 256, device=1), half(256, 768, device=1))
        result = [lib.fake_launch_count(), len(cupy.VENDOR_CALLS)]
    """)
    assert result == [0, 1]


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuFuncSetAttribute"])
def test_a_kernel_that_cannot_load_warns_once_and_the_vendor_works(
    run: Callable[..., Any], call: str
) -> None:
    result = run(f"""
        lib.fake_fail(b"{call}", 209)
        a, b = half(512, 256), half(256, 768)
        first, second = product(a, b)[1], product(a, b)[1]
        lib.fake_fail(b"", 0)
        third = product(a, b)[1]
        result = [first, second + third, lib.fake_launch_count(), len(cupy.VENDOR_CALLS),
                  ktlib.explain(a, b).to_dict()]
    """)
    first, later, launched, vendor, choice = result
    (warning,) = first
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU (209)" in warning
    assert call in warning
    assert (later, launched, vendor) == ([], 0, 3)
    assert choice["tier"] == "vendor"
    assert call in choice["reason"]


def test_a_launch_that_fails_leaves_the_product_to_the_vendor(run: Callable[..., Any]) -> None:
    result = run("""
        lib.fake_fail(b"cuLaunchKernelEx", 1)
        c, warned = product(half(512, 256), half(256, 768))
        result = [c.shape, warned, len(cupy.VENDOR_CALLS)]
    """)
    shape, (warning,), vendor = result
    assert (shape, vendor) == ([512, 768], 1)
    assert "cuLaunchKernelEx" in warning


def test_a_damaged_image_is_never_given_to_the_driver(run: Callable[..., Any], packs: str) -> None:
    data = bytearray(Path(packs).read_bytes())
    position = data.index(b"cubin of ")
    while position != -1:
        data[position] ^= 1
        position = data.find(b"cubin of ", position)
    Path(packs).write_bytes(data)
    warned, images = run("result = [product(half(512, 256), half(256, 768))[1], lib.fake_image_count()]")
    assert "checksum" in warned[0]
    assert images == 0


def test_loading_happens_in_relaxed_capture_mode_and_the_mode_is_put_back(run: Callable[..., Any]) -> None:
    # The fake driver refuses to load in any other mode.
    result = run("""
        product(half(512, 256), half(256, 768))
        exchanges = calls().count("cuThreadExchangeStreamCaptureMode")
        result = [lib.fake_launch_count(), lib.fake_capture_mode(), exchanges]
    """)
    assert result == [1, 0, 2]


def test_a_load_refused_during_capture_is_tried_again_after_it(run: Callable[..., Any]) -> None:
    result = run("""
        a, b = half(512, 256), half(256, 768)
        lib.fake_set_capturing(1)
        lib.fake_fail(b"cuLibraryLoadData", 900)
        first, second = product(a, b)[1], product(a, b)[1]
        lib.fake_set_capturing(0)
        lib.fake_fail(b"", 0)
        product(a, b)
        result = [first, second, lib.fake_launch_count(), len(cupy.VENDOR_CALLS)]
    """)
    (warning,), again, launched, vendor = result
    assert "preload" in warning
    assert (again, launched, vendor) == ([], 1, 2)


def test_preload_loads_every_kernel_once(run: Callable[..., Any]) -> None:
    result = run("""
        loaded = ktlib.preload(0)
        lib.fake_reset()
        product(half(512, 256), half(256, 768))
        result = [loaded, "cuLibraryLoadData" in calls(), lib.fake_launch_count()]
    """)
    assert result == [4, False, 1]


def test_f01_a_driver_that_fails_is_a_reason_not_an_error(run: Callable[..., Any]) -> None:
    result = run("""
        lib.fake_fail(b"cuInit", 100)
        c, warned = product(half(512, 256), half(256, 768))
        choice = ktlib.explain(half(512, 256), half(256, 768))
        result = [c.shape, warned, choice.to_dict(), _core.cuda_status()]
    """)
    shape, warned, choice, status = result
    assert (shape, warned, choice["tier"]) == ([512, 768], [], "vendor")
    assert "CUDA_ERROR_NO_DEVICE (100) from cuInit" in choice["reason"]
    assert choice["reason"] == status


def test_f02_import_never_calls_the_driver(run: Callable[..., Any]) -> None:
    assert run("result = calls()") == []


def test_a_forked_child_is_told_to_spawn(run: Callable[..., Any]) -> None:
    result = run("""
        a, b = half(512, 256), half(256, 768)
        product(a, b)
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                ktlib.matmul(a, b)
                text = "ran"
            except RuntimeError as error:
                text = str(error)
            os.write(write, text.encode())
            os._exit(0)
        os.wait()
        result = os.read(read, 4096).decode()
    """)
    assert "spawn" in result


def test_threads_load_a_kernel_once_and_all_launch_it(run: Callable[..., Any]) -> None:
    result = run("""
        a, b = half(512, 256), half(256, 768)
        cupy.ndarray((1, 1), "float16")
        def work():
            for _ in range(50):
                ktlib.matmul(a, b, out=half(512, 768))
        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        result = [calls().count("cuLibraryLoadData"), lib.fake_launch_count()]
    """)
    assert result == [1, 400]


def test_a_pack_for_another_gpu_is_skipped_and_named(run: Callable[..., Any], tmp_path: Path) -> None:
    from ktlib_generator.families.base import Device

    other = Device(kind="cuda", name="other", arch="sm80", sm_count=108)
    path = make_pack(tmp_path / "other.ktpack", [record("512x768x256", device=other, us=1.0)], other)
    reason = run("result = ktlib.explain(half(512, 256), half(256, 768)).reason", KTLIB_DB_PATH=path)
    assert "sm80" in reason or "8.0" in reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"abi": "cpu_gemm_v1"}, "abi"),
        ({"dtype": "fp64"}, "fp64"),
        ({"tile_m": 0}, "tile"),
        ({"threads": 2048}, "2048"),
    ],
)
def test_facts_that_cannot_be_launched_are_refused(
    run: Callable[..., Any], change: dict[str, Any], word: str
) -> None:
    text = run(f"""
        facts = dict(_core.pack_info(os.environ["KTLIB_DB_PATH"])["kernels"][0]) | {change!r}
        try:
            _core.CudaKernel(b"image", facts)
            result = ""
        except ValueError as error:
            result = str(error)
    """)
    assert word in text
