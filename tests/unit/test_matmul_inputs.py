"""Bad input, odd databases, explain, threads: never a crash, never a wrong number, never at import."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmul_cases import ARCH, CPU, draw, only_packs, write_cpu_pack
from pack_cases import H200, make_pack, record

import ktlib
from ktlib import _core, packs
from ktlib.errors import KtlibWarning
from ktlib_generator.families.base import Device


@pytest.fixture(scope="module")
def cpu_pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_cpu_pack(tmp_path_factory.mktemp("packs") / "cpu.ktpack")


@pytest.fixture
def kernels(cpu_pack: str) -> Iterator[str]:
    with only_packs(cpu_pack):
        yield cpu_pack


ONES = np.ones((2, 2), "float32")


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([[1.0]], ONES, ["list", "numpy.ndarray"]),
        (ONES, 3, ["int"]),
        (None, None, ["NoneType"]),
        (np.float32(2), ONES, ["numpy.float32"]),
        (ONES, memoryview(ONES), ["memoryview"]),
    ],
)
def test_what_is_no_array_is_refused_by_type(a: Any, b: Any, words: list[str]) -> None:
    with pytest.raises(TypeError, match="accepted are") as caught:
        ktlib.matmul(a, b)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("int32", "int32"),
        ("bool", "bool"),
        ("complex64", "complex64"),
        ("float16", "float32"),
        ("float32", "float64"),
        ("object", "object"),
        ("uint8", "float32"),
        (">f4", ">f4"),
    ],
)
def test_dtypes_that_are_not_accepted_are_refused_by_name(a: str, b: str) -> None:
    with pytest.raises(TypeError, match="accepted are"):
        ktlib.matmul(np.ones((2, 2), a), np.ones((2, 2), b))


def test_different_dtypes_are_refused_with_the_rule_they_break() -> None:
    with pytest.raises(TypeError, match="both alike"):
        ktlib.matmul(ONES, ONES.astype("float16"))


@pytest.mark.parametrize("out", [None, np.zeros((3, 2), "float32")])
def test_errors_of_explain_are_not_named_after_matmul(out: Any) -> None:
    bad = [(ONES, [1.0]), (ONES, ONES.astype("float16")), (ONES, np.ones((3, 2), "float32"))]
    for a, b in bad if out is None else [(ONES, ONES)]:
        with pytest.raises((TypeError, ValueError), match=r"^explain: "):
            ktlib.explain(a, b, out)


def test_help_shows_the_arguments_that_matmul_takes() -> None:
    assert ktlib.matmul.__text_signature__ == "(a, b, /, *, out=None)"


def test_double_precision_goes_to_the_vendor(kernels: str) -> None:
    a = draw((5, 4), "float64")
    np.testing.assert_array_equal(ktlib.matmul(a, a.T), a @ a.T)
    assert ktlib.explain(a, a.T).tier == "vendor"


def test_libraries_are_not_mixed() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"torch\.Tensor and numpy\.ndarray"):
        ktlib.matmul(torch.ones(2, 2), ONES)
    with pytest.raises(TypeError, match="out of"):
        ktlib.matmul(ONES, ONES, out=torch.ones(2, 2))


def test_devices_are_not_mixed() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="cpu and meta"):
        ktlib.matmul(torch.ones(2, 2), torch.ones(2, 2, device="meta"))


def test_a_scalar_array_has_no_product() -> None:
    with pytest.raises(ValueError, match="scalar"):
        ktlib.matmul(np.array(1.0, "float32"), ONES)


def test_a_read_only_out_is_refused() -> None:
    out = np.zeros((2, 2), "float32")
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ktlib.matmul(ONES, ONES, out=out)


@pytest.mark.parametrize(
    ("arguments", "names"), [((ONES,), {}), ((ONES, ONES, ONES), {}), ((ONES, ONES), {"output": ONES})]
)
def test_wrong_arguments_say_how_to_call(arguments: Any, names: Any) -> None:
    with pytest.raises(TypeError, match="matmul"):
        ktlib.matmul(*arguments, **names)


def test_numpy_arrays_are_read_without_a_buffer_and_odd_ones_still_right(kernels: str) -> None:
    a = draw((16, 16), "float32")
    own = np.dtype("float32", metadata={"unit": "m"})  # the dtype, but not NumPy's own object
    unaligned = np.frombuffer(bytearray(2) + a.tobytes(), "u1")[2:].view("float32").reshape(16, 16)
    packed = np.zeros(16, [("x", "float32", 16), ("y", "u1", 2)])
    packed["x"] = a
    written = np.broadcast_arrays(np.zeros((16, 16), "float32"))[0]
    assert np.array_equal(ktlib.matmul(a, a, out=written), a @ a)
    for odd in (a.astype(own), unaligned, packed["x"]):
        np.testing.assert_array_equal(ktlib.matmul(odd, a), a @ a)
    assert _core.numpy_reads_directly()


def test_a_kernel_really_runs_and_out_none_means_no_out(kernels: str) -> None:
    a, b = draw((16, 16), "float32"), draw((16, 16), "float32", 1)
    choice = ktlib.explain(a, b)
    assert (choice.tier, choice.database) == ("exact", kernels)
    assert choice.kernel.startswith("cpu_gemm/")
    np.testing.assert_array_equal(ktlib.matmul(a, b, out=None), a @ b)


def test_explain_says_why_not(kernels: str) -> None:
    a = draw((16, 16), "float32")
    assert "unit stride" in ktlib.explain(np.flip(a, 0), a).reason
    assert "two-dimensional" in ktlib.explain(draw((3, 4, 5), "float32"), draw((3, 5, 4), "float32")).reason
    assert "zero" in ktlib.explain(a[:0], a).reason
    with pytest.raises(ValueError, match="do not match"):
        ktlib.explain(a, a[:3])
    with pytest.raises(TypeError):
        ktlib.explain([1], a)


def test_half_precision_vendor_path_accumulates_in_single(kernels: str) -> None:
    _core.set_packs([])
    a = np.full((1, 4096), 1.0, "float16")
    a[0, 0] = 2048
    b = np.full((4096, 1), 0.5, "float16")
    b[0, 0] = 1  # 2048 + 2047.5; an fp16 sum sticks at 2048
    assert float(ktlib.matmul(a, b)[0, 0]) == np.float16(2048 + 2047.5)


def test_a_half_precision_result_out_of_range_is_infinite_without_a_warning() -> None:
    a = np.full((1, 4), 60000, "float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert np.isposinf(ktlib.matmul(a, a.T)[0, 0])


def test_a_new_database_replaces_what_threads_remember(tmp_path: Path, kernels: str) -> None:
    a = draw((16, 16), "float32")
    ktlib.matmul(a, a)
    vendor = record("16x16x16:nn:fp32", device=CPU, us=9.0, vendor_us=1.0)
    ktlib.load_database(make_pack(tmp_path / "vendor.ktpack", [vendor], CPU))
    assert ktlib.explain(a, a).tier == "vendor"
    assert [Path(pack["path"]).name for pack in ktlib.databases()] == ["vendor.ktpack", "cpu.ktpack"]
    np.testing.assert_array_equal(ktlib.matmul(a, a), a @ a)


@pytest.mark.parametrize("content", [b"", b"not a pack", b"KTLPACK\n" + bytes(600)])
def test_load_database_refuses_a_bad_file_and_keeps_the_others(
    tmp_path: Path, kernels: str, content: bytes
) -> None:
    bad = tmp_path / "bad.ktpack"
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.ktpack"):
        ktlib.load_database(bad)
    assert [pack["path"] for pack in ktlib.databases()] == [kernels]


@pytest.mark.parametrize("start", [0, 512])
def test_a_tuning_database_given_as_a_pack_says_how_to_make_one(
    tmp_path: Path, kernels: str, start: int
) -> None:
    database = tmp_path / "mine.h5"
    database.write_bytes(bytes(start) + b"\x89HDF\r\n\x1a\n" + bytes(2000))
    with pytest.raises(ValueError, match=f"make a pack of it: ktlib-build pack {database}"):
        ktlib.load_database(database)
    program = "import numpy as np, ktlib\nktlib.matmul(np.ones((2, 2), 'f'), np.ones((2, 2), 'f'))"
    assert "ktlib-build pack" in run_python(program, KTLIB_DB_PATH=str(database))


OTHER_CPU = Device(kind="cpu", name="other", arch="cpu-armv9", sm_count=1)


@pytest.mark.parametrize(
    ("device", "words"), [(OTHER_CPU, ["cpu-armv9", ARCH]), (H200, ["sm90a-132", "no CUDA driver"])]
)
def test_load_database_warns_once_of_a_pack_that_nothing_here_can_use(
    tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch, device: Device, words: list[str]
) -> None:
    monkeypatch.setenv("KTLIB_LIBCUDA", "/nowhere/libcuda.so.1")
    config = next(k for k in _core.cpu_kernels() if k["dtype"] == "fp32") if device.kind == "cpu" else {}
    path = make_pack(tmp_path / "other.ktpack", [record("16x16x16:nn:fp32", device=device, **config)], device)
    with pytest.warns(KtlibWarning) as caught:
        ktlib.load_database(path)
    (text,) = [str(one.message) for one in caught]
    assert all(word in text for word in [path, *words]), text
    assert [pack["path"] for pack in ktlib.databases()] == [path, kernels]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ktlib.load_database(kernels)


def test_a_wrong_switch_is_refused_by_every_product_not_only_the_first() -> None:
    program = (
        "import numpy as np, ktlib\na = np.ones((2, 2), 'f')\n"
        "for _ in range(2):\n"
        "    try:\n        ktlib.matmul(a, a)\n    except ValueError as error:\n        print(error)"
    )
    assert run_python(program, KTLIB_DISABLE="yes").count("KTLIB_DISABLE must be 0 or 1") == 2


def test_a_pack_for_another_device_is_skipped_and_explained(tmp_path: Path, kernels: str) -> None:
    _core.set_packs([make_pack(tmp_path / "gpu.ktpack", [record("16x16x16:nn:fp16")], H200)])
    reason = ktlib.explain(draw((16, 16), "float16"), draw((16, 16), "float16")).reason
    assert "gpu.ktpack" in reason or "sm90a" in reason


def run_python(program: str, **environment: str) -> str:
    command = [sys.executable, "-W", "always", "-c", program]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout + done.stderr


PRODUCTS = """
import warnings, numpy as np, ktlib
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for _ in range(3):
        assert ktlib.matmul(np.ones((2, 3), 'f'), np.ones((3, 2), 'f'))[0, 0] == 3
print(len([w for w in caught if PATH in str(w.message)]), *[w.message for w in caught])
"""


@pytest.mark.parametrize("kind", ["broken", "missing", "empty folder", "folder instead of a file"])
def test_f15_a_broken_or_missing_database_costs_one_warning(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.ktpack"
    if kind == "broken":
        path.write_bytes(b"KTLPACK\n")
    elif kind == "empty folder":
        path.mkdir()
    elif kind == "folder instead of a file":
        (path / "y.ktpack").mkdir(parents=True)
    text = run_python(f"PATH = {str(path)!r}" + PRODUCTS, KTLIB_DB_PATH=str(path))
    assert text.startswith("1 "), text


def test_kernels_can_be_switched_off(cpu_pack: str) -> None:
    program = "import numpy as np, ktlib\na = np.ones((16, 16), 'f')\nktlib.matmul(a, a)\n"
    program += "print(ktlib.explain(a, a).reason)"
    assert "KTLIB_DISABLE" in run_python(program, KTLIB_DB_PATH=cpu_pack, KTLIB_DISABLE="1")
    assert "KTLIB_DISABLE" not in run_python(program, KTLIB_DB_PATH=cpu_pack)


def test_f01_everything_but_cuda_works_without_a_driver() -> None:
    program = (
        "import numpy as np, ktlib\nfrom ktlib import _core\n"
        "assert ktlib.matmul(np.ones((2, 2), 'f'), np.ones((2, 2), 'f'))[0, 0] == 2\n"
        "print(_core.cuda_status(), _core.cuda_device_count())"
    )
    text = run_python(program, KTLIB_LIBCUDA="/nowhere/libcuda.so.1")
    assert "/nowhere/libcuda.so.1" in text
    assert "cannot open shared object file" in text


def test_f03_f04_import_starts_no_process_and_opens_no_driver() -> None:
    # strace is not everywhere: audit hooks see processes and files, and the driver's path would fail loudly.
    program = (
        "import sys\nseen = []\n"
        "sys.addaudithook(lambda name, args: seen.append((name, str(args))) "
        "if name in ('subprocess.Popen', 'os.system', 'os.fork', 'os.posix_spawn', 'os.exec') "
        "or (name == 'open' and 'ktpack' in str(args)) else None)\n"
        "import ktlib\nprint('seen', seen)\n"
        "print([line for line in open('/proc/self/maps') if 'libcuda' in line])"
    )
    assert run_python(program).split("\n")[:2] == ["seen []", "[]"]


def test_threads_compute_their_own_products(kernels: str) -> None:
    shapes = [
        (16, 16, 16),
        (4, 64, 16),
        (64, 4, 4),
        (1, 16, 64),
        (30, 20, 10),
        (7, 9, 3),
        (40, 40, 40),
        (16, 1, 16),
    ]
    faults: list[str] = []
    start = threading.Barrier(len(shapes))

    def work(index: int) -> None:
        m, n, k = shapes[index]
        start.wait()
        for turn in range(200):
            constant = float((index * 200 + turn) % 61 + 1)
            out = np.full((m, n), np.nan, "float32")
            a, b = np.full((m, k), constant, "float32"), np.ones((k, n), "float32")
            result = ktlib.matmul(a, b, out=out) if turn % 2 else ktlib.matmul(a, b)
            if not (result == constant * k).all():
                faults.append(f"{shapes[index]} turn {turn}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_the_best_cpu_level_that_is_shipped_is_asked_first(tmp_path):
    """A machine with AVX-512 also runs the packs of lower levels, which sort before its own by name."""
    archs = _core.cpu_archs()
    for name in [*reversed(archs), "sm90a-132"]:
        (tmp_path / f"{name}.ktpack").write_bytes(b"")
    found = [os.path.basename(path) for path in packs._packs_in(str(tmp_path))]
    assert found == [f"{name}.ktpack" for name in [*archs, "sm90a-132"]]
