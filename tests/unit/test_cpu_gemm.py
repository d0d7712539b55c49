"""Every instance of the CPU family on every ISA level this machine runs, against fp64 and its own promises.

The shapes are chosen for risk: one element; less than a tile; tails of m, n and k; k below and off the
unroll; more than one block of m (128), n (256) and k (256); rows longer than their width, NaN around A and B,
guards around C.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ktlib import _core

ARCHS = _core.cpu_archs()
DTYPES = ("fp32", "fp16", "bf16")
LAYOUTS = ("nn", "nt", "tn", "tt")
SHAPES = (
    (1, 1, 1),
    (3, 5, 7),
    (8, 64, 8),
    (13, 70, 33),
    (1, 300, 20),
    (130, 67, 257),
    (5, 70, 530),
)
STORED = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}
# Bits of the significand, exponent of the smallest normal number, largest finite number.
FORMAT = {"fp16": (11, -14, 65504.0), "bf16": (8, -126, float.fromhex("0x1.fep127"))}
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
SMALLEST = {"fp32": 2.0**-149, "fp16": 2.0**-24, "bf16": 2.0**-133}


def round_to(values: Any, dtype: str) -> Any:
    """Round fp64 to the dtype, ties to even, by arithmetic alone; the result is fp64."""
    values = np.asarray(values, np.float64)
    if dtype == "fp32":
        with np.errstate(over="ignore"):
            return values.astype(np.float32).astype(np.float64)
    digits, lowest, largest = FORMAT[dtype]
    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    quantum = np.ldexp(1.0, np.maximum(exponent - digits, lowest - digits + 1))
    with np.errstate(invalid="ignore"):
        rounded = np.rint(values / quantum) * quantum
        return np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)


def encode(values: Any, dtype: str) -> Any:
    """Store numbers that the dtype holds exactly."""
    if dtype != "bf16":
        return np.asarray(values, STORED[dtype])
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def decode(stored: Any, dtype: str) -> Any:
    if dtype != "bf16":
        return stored.astype(np.float64)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Stored:
    """A matrix whose rows are `pad` elements longer than their width, at an odd element, amid `filler`."""

    def __init__(
        self, values: Any, dtype: str, transposed: bool = False, pad: int = 0, filler: float = np.nan
    ):
        rows = np.asarray(values, np.float64).T if transposed else np.asarray(values, np.float64)
        self.dtype, self.ld = dtype, rows.shape[1] + pad
        self.lead = 3 if pad else 0
        self.flat = encode(np.full(self.lead + rows.shape[0] * self.ld + self.lead, filler), dtype)
        self.view = np.lib.stride_tricks.as_strided(
            self.flat[self.lead :], rows.shape, (self.ld * self.flat.itemsize, self.flat.itemsize)
        )
        self.view[...] = encode(rows, dtype)

    @property
    def address(self) -> int:
        return int(self.flat.ctypes.data) + self.lead * self.flat.itemsize

    def outside(self) -> bytes:
        """Every byte that is not an element of the matrix."""
        copy = Stored.__new__(Stored)
        copy.flat = self.flat.copy()
        np.lib.stride_tricks.as_strided(copy.flat[self.lead :], self.view.shape, self.view.strides)[...] = 0
        return copy.flat.tobytes()


@dataclass
class Product:
    """One product with fp64 values and stored operands; `run` gives C in fp64 and checks its surroundings."""

    a64: Any
    b64: Any
    layout: str
    dtype: str
    pad: int = 0

    def __post_init__(self) -> None:
        self.a = Stored(self.a64, self.dtype, self.layout[0] == "t", 5 * self.pad)
        self.b = Stored(self.b64, self.dtype, self.layout[1] == "t", 3 * self.pad)
        self.m, self.k = self.a64.shape
        self.n = self.b64.shape[1]

    def stored(self, kernel: Any) -> Any:
        c = Stored(np.full((self.m, self.n), 77.0), self.dtype, pad=7 * self.pad, filler=-55.0)
        before = c.outside(), self.a.flat.tobytes(), self.b.flat.tobytes()
        addresses = self.a.address, self.b.address, c.address
        kernel.run(*addresses, self.m, self.n, self.k, self.a.ld, self.b.ld, c.ld, self.layout)
        assert before == (c.outside(), self.a.flat.tobytes(), self.b.flat.tobytes()), "wrote outside C"
        return c.view

    def run(self, kernel: Any) -> Any:
        return decode(self.stored(kernel), self.dtype)

    def bound(self) -> Any:
        """Largest allowed |C - C64|: the output's rounding, and fp32 accumulation of k products."""
        c64 = self.a64 @ self.b64
        accumulated = (self.k / 16 + 9) * 2.0**-22 * (np.abs(self.a64) @ np.abs(self.b64))
        return UNIT_ROUNDOFF[self.dtype] * np.abs(c64) + accumulated + SMALLEST[self.dtype]


def random_product(
    shape: tuple[int, int, int], layout: str, dtype: str, pad: int = 0, seed: int = 1
) -> Product:
    m, n, k = shape
    rng = np.random.default_rng((seed, m, n, k))
    a64, b64 = (round_to(rng.standard_normal(extents), dtype) for extents in ((m, k), (k, n)))
    return Product(a64, b64, layout, dtype, pad)


def kernels(arch: str, dtype: str) -> Iterator[tuple[str, Any]]:
    """Every instance of a level and dtype, by name."""
    for config in _core.cpu_kernels():
        if config["dtype"] == dtype:
            text = ",".join(f"{name}={config[name]}" for name in sorted(config))
            yield text, _core.CpuKernel(f"cpu_gemm/{text}/{arch}")


def one_kernel(arch: str, dtype: str) -> Any:
    return _core.CpuKernel(f"cpu_gemm/dtype={dtype},loop=mn,tile_m=4,tile_n=16,unroll=1/{arch}")


each_level = pytest.mark.parametrize("arch", ARCHS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def test_levels_are_listed_best_first_and_end_with_the_portable_one() -> None:
    order = ["cpu-x86_64_v4", "cpu-x86_64_v3", "cpu-portable"]
    assert [arch for arch in order if arch in ARCHS] == ARCHS
    assert ARCHS[-1] == "cpu-portable"


@each_level
@each_dtype
@each_layout
def test_tails_strides_and_blocks_against_fp64(arch: str, dtype: str, layout: str) -> None:
    for shape in SHAPES:
        product = random_product(shape, layout, dtype, pad=1)
        c64, bound = product.a64 @ product.b64, product.bound()
        for name, kernel in kernels(arch, dtype):
            error = np.abs(product.run(kernel) - c64)
            assert np.all(error <= bound), f"{shape} {name}: {np.max(error / bound)} times the bound"


@each_level
@each_dtype
@each_layout
def test_small_integers_are_exact_with_contiguous_rows(arch: str, dtype: str, layout: str) -> None:
    # 0/1 inputs and k <= 256: every partial sum is an integer that even bf16 holds.
    for m, n, k in ((8, 8, 8), (64, 64, 64), (24, 192, 256), (7, 9, 11)):
        rng = np.random.default_rng(m)
        a64, b64 = (rng.integers(0, 2, extents).astype(np.float64) for extents in ((m, k), (k, n)))
        product = Product(a64, b64, layout, dtype)
        for name, kernel in kernels(arch, dtype):
            assert np.array_equal(product.run(kernel), a64 @ b64), f"{m}x{n}x{k} {name}"


@each_level
@each_dtype
def test_no_element_depends_on_tile_unroll_loop_or_alignment(arch: str, dtype: str) -> None:
    # Stronger than repeatable: the sum over k has one order, so every instance gives the same bits.
    for shape in ((13, 70, 33), (130, 67, 257), (40, 260, 600)):
        bits = {
            product.stored(kernel).tobytes()
            for pad in (0, 1)
            for product in (random_product(shape, "nn", dtype, pad), random_product(shape, "tt", dtype, pad))
            for _, kernel in kernels(arch, dtype)
        }
        assert len(bits) == 1, f"{shape}: {len(bits)} different results"


@each_level
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_halves_accumulate_in_fp32_and_round_once(arch: str, dtype: str) -> None:
    product = random_product((96, 96, 700), "nn", dtype)
    c64 = product.a64 @ product.b64
    rounding_only = np.sqrt(np.mean((round_to(c64, dtype) - c64) ** 2))
    for name, kernel in kernels(arch, dtype):
        ratio = np.sqrt(np.mean((product.run(kernel) - c64) ** 2)) / rounding_only
        assert ratio <= 1.03, f"{name}: {ratio}"


@each_level
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_half_widens_and_every_product_rounds_to_nearest_even(arch: str, dtype: str) -> None:
    # k = 1 makes C the rounded product: all 65,536 bit patterns (subnormals, infinities, NaN) times factors
    # that give ties, results below the smallest subnormal, and overflow. The widths reach both the code for
    # eight elements and that for single ones.
    patterns = np.arange(65536, dtype=np.uint16)
    b64 = decode(patterns.view(STORED[dtype]), dtype)
    a64 = round_to(np.array([1.0, 0.5, 1.5, -1.25, 2.0**-9, 2.0**-13 * 1.25, 1024.0, 1.9921875]), dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        products = a64.astype(np.float32)[:, None] * b64.astype(np.float32)[None, :]
        expected = round_to(products.astype(np.float64), dtype)
    kernel = one_kernel(arch, dtype)
    for width in (65536, 16381, 5):
        c = Product(a64[:, None], b64[None, :width], "nn", dtype).run(kernel)
        assert np.array_equal(c, expected[:, :width], equal_nan=True)
    tail = Product(b64[-1027:, None], a64[None, :5], "nn", dtype).run(kernel)
    assert np.array_equal(tail, expected[:5, -1027:].T, equal_nan=True)


@each_level
def test_fp16_sum_overflows_exactly_where_rounding_says(arch: str) -> None:
    for last, result in (
        (15.0, 65504.0),
        (16.0, np.inf),
    ):  # 65519 rounds down, 65520 is the tie that becomes infinity
        product = Product(np.ones((3, 2)), np.repeat([[65504.0], [last]], 9, axis=1), "nn", "fp16")
        for name, kernel in kernels(arch, "fp16"):
            assert np.all(product.run(kernel) == result), name


@each_level
def test_fp32_subnormals_are_kept(arch: str) -> None:
    product = Product(np.full((5, 1), 2.0**-100), np.full((1, 20), 3 * 2.0**-48), "nn", "fp32")
    for name, kernel in kernels(arch, "fp32"):
        assert np.all(product.run(kernel) == 3 * 2.0**-148), name


@each_level
@each_dtype
@each_layout
def test_nan_and_infinity_reach_their_row_and_column_only(arch: str, dtype: str, layout: str) -> None:
    product = random_product((13, 37, 9), layout, dtype, pad=1)
    a64, b64 = product.a64.copy(), product.b64.copy()
    a64[2, 3], a64[12, 8], b64[4, 5], b64[0, 36], b64[8, 0] = np.nan, np.inf, -np.inf, np.nan, 0.0
    with np.errstate(invalid="ignore"):
        expected = (a64[:, :, None] * b64[None, :, :]).sum(axis=1)
    special = ~np.isfinite(expected)
    product = Product(a64, b64, layout, dtype, pad=1)
    for name, kernel in kernels(arch, dtype):
        c = product.run(kernel)
        assert np.array_equal(c[special], expected[special], equal_nan=True), name
        assert np.allclose(c[~special], expected[~special], rtol=0.01, atol=0.05), name


@each_level
@each_dtype
def test_k_zero_writes_zeros_and_empty_c_is_not_touched(arch: str, dtype: str) -> None:
    for name, kernel in kernels(arch, dtype):
        for layout in LAYOUTS:
            product = Product(np.zeros((5, 0)), np.zeros((0, 11)), layout, dtype, pad=1)
            assert np.all(product.run(kernel) == 0.0), name
        kernel.run(0, 0, 0, 0, 11, 3, 3, 11, 11, "nn")
        kernel.run(0, 0, 0, 5, 0, 3, 3, 0, 0, "nn")


class GuardedPage:
    """Memory that ends where the next page may not be touched: a read past the operand is a crash."""

    def __init__(self, content: Any):
        page = mmap.PAGESIZE
        size = -(-max(content.nbytes, 1) // page) * page
        self.map = mmap.mmap(-1, size + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) != 0:
            pytest.skip(f"mprotect is refused here (errno {ctypes.get_errno()})")
        self.address = start + size - content.nbytes
        ctypes.memmove(self.address, content.ctypes.data, content.nbytes)


@each_level
@each_dtype
@each_layout
def test_last_element_of_an_operand_may_end_at_an_unmapped_page(arch: str, dtype: str, layout: str) -> None:
    for shape in ((3, 5, 7), (9, 33, 5), (1, 8, 3), (70, 70, 70)):
        product = random_product(shape, layout, dtype)
        c64, bound = product.a64 @ product.b64, product.bound()
        a, b = GuardedPage(product.a.flat), GuardedPage(product.b.flat)
        c = GuardedPage(encode(np.zeros(c64.shape), dtype))
        m, n, k = shape
        for name, kernel in kernels(arch, dtype):
            kernel.run(a.address, b.address, c.address, m, n, k, product.a.ld, product.b.ld, n, layout)
            raw = ctypes.string_at(c.address, m * n * STORED[dtype].itemsize)
            result = decode(np.frombuffer(raw, STORED[dtype]).reshape(m, n), dtype)
            assert np.all(np.abs(result - c64) <= bound), name


@each_dtype
def test_threads_do_not_share_packed_blocks(dtype: str) -> None:
    # More than one block in k and transposed B, so both threads pack into their workspaces all the time.
    kernel = one_kernel(ARCHS[0], dtype)
    products = [random_product((140, 300, 300), "nt", dtype, seed=seed) for seed in (1, 2)]
    alone = [product.stored(kernel).tobytes() for product in products]
    together: list[set[bytes]] = [set(), set()]

    def work(index: int) -> None:
        for _ in range(10):
            together[index].add(products[index].stored(kernel).tobytes())

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [{alone[0]}, {alone[1]}]


def test_timing_visits_every_set_of_operands() -> None:
    kernel = one_kernel(ARCHS[0], "fp32")
    a = [np.full((4, 4), float(i), np.float32) for i in range(3)]
    b = np.eye(4, dtype=np.float32)
    c = [np.full((4, 4), np.nan, np.float32) for _ in range(3)]
    addresses = [x.ctypes.data for x in a], [b.ctypes.data] * 3, [x.ctypes.data for x in c]
    assert kernel.time_ns(*addresses, 4, 4, 4, 4, 4, 4, "nn", 2) > 0
    assert np.isnan(c[2]).all(), "two calls must not reach the third set"
    assert kernel.time_ns(*addresses, 4, 4, 4, 4, 4, 4, "nn", 1000) > 0
    assert all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


def test_kernel_from_an_address_computes_the_same() -> None:
    inside = one_kernel(ARCHS[0], "bf16")
    outside = _core.CpuKernel.from_address(inside.address, "bf16")
    product = random_product((13, 70, 33), "nt", "bf16", pad=1)
    assert (outside.dtype, outside.name) == ("bf16", "")
    assert np.array_equal(product.stored(inside), product.stored(outside))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": -1}, "m must be in 0..2147483647, got -1"),
        ({"k": 2**31}, "k must be in 0..2147483647, got 2147483648"),
        ({"lda": 3}, "lda must be at least the row's 4 elements"),
        ({"ldb": 4, "layout": "nn"}, "ldb must be at least the row's 5 elements"),
        ({"ldc": 4}, "ldc must be at least the row's 5 elements"),
        ({"ldc": 2**40}, "below 2\\^40"),
        ({"layout": "xy"}, "layout 'xy' is unknown \\(have: nn, nt, tn, tt\\)"),
        ({"a": 0}, "address of a is null"),
        ({"c": 0}, "address of c is null"),
        ({"b": 4098}, "address of b must be a multiple of 4 bytes for fp32, got 4098"),
    ],
)
def test_wrong_argument_is_refused_before_memory_is_touched(change: dict[str, Any], message: str) -> None:
    arguments = {"a": 4096, "b": 4096, "c": 4096, "m": 3, "n": 5, "k": 4, "lda": 4, "ldb": 5, "ldc": 5}
    with pytest.raises(ValueError, match=message):
        one_kernel(ARCHS[0], "fp32").run(**{**arguments, "layout": "nn", **change})


def test_unequal_operand_lists_and_zero_calls_are_refused() -> None:
    kernel = one_kernel(ARCHS[0], "fp32")
    with pytest.raises(ValueError, match="same number of addresses, at least one; got 2, 1, 2"):
        kernel.time_ns([4096, 4096], [4096], [4096, 4096], 1, 1, 1, 1, 1, 1, "nn", 1)
    with pytest.raises(ValueError, match="calls must be at least 1, got 0"):
        kernel.time_ns([4096], [4096], [4096], 1, 1, 1, 1, 1, 1, "nn", 0)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu_gemm/dtype=fp32,loop=mn,tile_m=4,tile_n=16,unroll=1/cpu-x86_64_v9",
        "cpu_gemm/dtype=fp32,loop=mn,tile_m=5,tile_n=16,unroll=1/cpu-portable",
        "cpu_gemm/loop=mn,dtype=fp32,tile_m=4,tile_n=16,unroll=1/cpu-portable",
    ],
)
def test_unknown_variant_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not in this extension .*cpu-portable"):
        _core.CpuKernel(name)


def test_null_address_and_unknown_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="address is null"):
        _core.CpuKernel.from_address(0, "fp32")
    with pytest.raises(ValueError, match="dtype 'fp8' is unknown \\(have: fp16, bf16, fp32\\)"):
        _core.CpuKernel.from_address(4096, "fp8")
