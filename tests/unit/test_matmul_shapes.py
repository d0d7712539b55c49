"""Shapes and layouts that broke other libraries, on NumPy arrays and CPU tensors, with and without kernels.

Test names carry the row of the collected reports: a = shapes, b = layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matmul_cases import draw, exact, only_packs, write_cpu_pack

import ktlib

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def cpu_pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_cpu_pack(tmp_path_factory.mktemp("packs") / "cpu.ktpack")


@pytest.fixture(params=["kernel", "vendor"], autouse=True)
def path(request: pytest.FixtureRequest, cpu_pack: str) -> Iterator[str]:
    """Every case runs with kernels for almost everything, and with none."""
    with np.errstate(all="raise"), only_packs(*([cpu_pack] if request.param == "kernel" else [])):
        yield request.param


def to_numpy(array: Any) -> Any:
    return array.numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


def check(a: Any, b: Any, out: Any = None) -> Any:
    """Compute the product and compare it with fp64; integers in, so the match is exact."""
    expected = exact(to_numpy(a), to_numpy(b))
    result = ktlib.matmul(a, b, out=out)
    assert out is None or result is out
    assert tuple(result.shape) == expected.shape
    assert result.dtype == a.dtype
    np.testing.assert_array_equal(to_numpy(result).astype(np.float64), expected)
    return result


@pytest.fixture(params=["numpy", "torch"])
def wrap(request: pytest.FixtureRequest) -> Any:
    """Turn a NumPy array into the library's, sharing its memory."""
    return (lambda x: x) if request.param == "numpy" else torch.from_numpy


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(16, 0, 16), (0, 30, 40), (5, 3, 0), (0, 0, 0), (1, 0, 1)], ids=str)
def test_a02_a06_an_empty_extent_gives_zeros_of_the_right_shape(wrap: Any, shape: Any, dtype: str) -> None:
    m, k, n = shape
    check(wrap(draw((m, k), dtype)), wrap(draw((k, n), dtype)))


@pytest.mark.parametrize("fill", [7.0, np.nan])
def test_a01_k_zero_writes_zeros_into_out(wrap: Any, fill: float) -> None:
    out = wrap(np.full((10, 1, 4320), fill, "float32"))
    check(wrap(np.zeros((10, 1, 0), "float32")), wrap(np.zeros((10, 0, 4320), "float32")), out)


def test_a05_m_zero_in_a_batch(wrap: Any) -> None:
    check(wrap(draw((5, 0, 7), "float16")), wrap(draw((5, 7, 9), "float16")))


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_a15_a_very_narrow_result(wrap: Any, n: int) -> None:
    check(wrap(draw((57, 71), "float32")), wrap(draw((71, n), "float32")))


@pytest.mark.parametrize("extent", [3, 5, 33])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a20_odd_cubes(wrap: Any, extent: int, dtype: str) -> None:
    check(wrap(draw((extent, extent), dtype)), wrap(draw((extent, extent), dtype, 1)))


def test_a21_even_m_odd_k(wrap: Any) -> None:
    check(wrap(draw((2, 3), "float16")), wrap(draw((3, 4), "float16")))


@pytest.mark.parametrize("shape", [(100, 99, 101), (50, 10, 100)], ids=str)
def test_a22_a23_tails_in_every_extent(wrap: Any, shape: Any) -> None:
    m, n, k = shape
    check(wrap(draw((m, k), "float32")), wrap(draw((k, n), "float32")))


def test_a24_tall_a_with_column_major_b(wrap: Any) -> None:
    check(wrap(draw((819, 64), "float32")), wrap(draw((30, 64), "float32")).T)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3,), (2, 3, 4)),
        ((2, 3, 4), (4,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((5, 2, 3, 4), (4,)),
        ((4,), (4,)),
    ],
    ids=str,
)
def test_a25_one_dimensional_operands_are_vectors(wrap: Any, a: Any, b: Any) -> None:
    check(wrap(draw(a, "float32")), wrap(draw(b, "float32")))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 1), (3,)),
        ((3,), (1, 4)),
        ((3,), (1,)),
        ((5, 3, 1), (3, 1, 4)),
        ((2, 3), (2, 3)),
        ((2, 2, 3), (3, 3, 1)),
    ],
    ids=str,
)
def test_a26_a27_shapes_that_do_not_match_are_refused_by_name(wrap: Any, a: Any, b: Any) -> None:
    with pytest.raises(ValueError, match="do not match") as caught:
        ktlib.matmul(wrap(draw(a, "float32")), wrap(draw(b, "float32")))
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)


def test_a29_batches_keep_their_dtype() -> None:
    a, b = torch.ones(4, 8, 16, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
    assert ktlib.matmul(a, b).dtype == torch.bfloat16
    assert torch.equal(ktlib.matmul(a, b), torch.full((4, 8, 8), 16.0, dtype=torch.bfloat16))
    assert ktlib.matmul(a, a.mT).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 5, 3, 4), (5, 4, 6)),
        ((2, 1, 3, 4), (5, 4, 6)),
        ((7, 3, 4), (4, 6)),
        ((3, 4), (2, 4, 6)),
        ((1, 3, 4), (1, 4, 6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_batches_broadcast(wrap: Any, a: Any, b: Any, dtype: str) -> None:
    check(wrap(draw(a, dtype)), wrap(draw(b, dtype)))


def test_a_batch_of_rows_runs_as_one_product_on_a_kernel(wrap: Any, path: str) -> None:
    a, b = wrap(draw((2, 8, 16), "float32")), wrap(draw((16, 16), "float32"))
    choice = ktlib.explain(a, b)
    assert (choice.tier in ("exact", "near")) == (path == "kernel")
    check(a, b)


def test_b01_b10_rows_further_apart_than_they_are_long(wrap: Any) -> None:
    check(wrap(draw((64, 100), "float32"))[:, :41], wrap(draw((41, 90), "float32"))[:, :33])
    check(wrap(np.zeros((1, 8, 48), "float32"))[:, 7, :], wrap(draw((48, 32), "float32")))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("which", ["a", "b", "out"])
def test_b03_memory_aligned_to_one_element(wrap: Any, offset: int, which: str) -> None:
    shapes = {"a": (16, 24), "b": (24, 16), "out": (16, 16)}
    arrays = {}
    for name, shape in shapes.items():
        start = offset if name == which else 0
        flat = wrap(draw((start + shape[0] * shape[1],), "float16"))
        arrays[name] = flat[start:].reshape(shape)
    check(arrays["a"], arrays["b"], arrays["out"])


def test_b06_an_expanded_operand() -> None:
    check(torch.ones(1, 2), torch.tensor([[1.0], [2.0]]).expand(2, 2))
    check(np.ones((1, 2), "float32"), np.broadcast_to(np.array([[1], [2]], "float32"), (2, 2)))


def test_b08_no_unit_stride_at_all(wrap: Any) -> None:
    x = wrap(draw((64, 96), "float32"))[::2, ::3]
    check(x, x.T)


@pytest.mark.parametrize("rows", [1, 5])
def test_b09_strides_of_axes_with_one_element_mean_nothing(rows: int) -> None:
    flat = torch.arange(60, dtype=torch.float32) % 5
    check(flat.as_strided((1, 3, 4), (999, 4, 1)), torch.ones(4, 2))
    check(flat.as_strided((rows, 1, 4), (4, 999, 1)), torch.ones(4, 2))
    check(flat.as_strided((1, 4), (999, 1)), torch.ones(4, 2))
    check(flat.as_strided((4, 1), (1, 999)), torch.ones(1, 2))


def test_b11_a_transposed_column_is_a_row(wrap: Any) -> None:
    check(wrap(draw((64, 1), "float16")).T, wrap(draw((64, 8), "float16")))
    check(wrap(draw((8, 64), "float16")), wrap(draw((64, 8), "float16")), wrap(np.empty((8, 8), "float16")).T)


def test_b12_b14_odd_rows_and_column_slices(wrap: Any) -> None:
    check(wrap(draw((9, 51), "float16")), wrap(draw((51, 9), "float16")))
    check(wrap(draw((16, 140), "float16"))[:, 65 : 65 + 32], wrap(draw((32, 8), "float16")))


@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_b15_negative_strides(axis: Any) -> None:
    x, y = draw((16, 16), "float32"), draw((16, 16), "float32", 1)
    check(np.flip(x, axis), y)
    check(y, np.flip(x, axis))


def refused_out(a: Any, b: Any, out: Any, error: type[Exception] = ValueError) -> None:
    before = np.array(to_numpy(out))
    with pytest.raises(error, match="nothing was written"):
        ktlib.matmul(a, b, out=out)
    np.testing.assert_array_equal(to_numpy(out), before)


def test_b18_b19_b20_an_out_that_overlaps_an_operand_is_refused(wrap: Any) -> None:
    c = wrap(draw((2, 9, 9), "float32"))
    refused_out(c, c, c)
    square = wrap(draw((16, 16), "float32"))
    refused_out(square, square.T, square)
    flat = wrap(draw((1 + 16 * 16,), "float32"))
    refused_out(flat[:-1].reshape(16, 16), square, flat[1:].reshape(16, 16))


def test_column_slices_of_one_buffer_do_not_overlap(wrap: Any) -> None:
    buffer = wrap(draw((16, 48), "float32"))
    check(buffer[:, :16], wrap(draw((16, 16), "float32")), buffer[:, 16:32])
    check(buffer[:, 32:], wrap(draw((16, 16), "float32")), buffer[:, :16])


def test_b21_b22_an_expanded_out_is_refused() -> None:
    refused_out(torch.ones(4, 3), torch.ones(3, 5), torch.zeros(1, 5).expand(4, 5))
    refused_out(torch.ones(2, 4, 3), torch.ones(3, 5), torch.zeros(1, 4, 5).expand(2, 4, 5))


@pytest.mark.parametrize("shape", [(3, 1), (1, 2, 2), (4,), (2, 3)], ids=str)
def test_b23_an_out_of_another_shape_is_refused_not_resized(wrap: Any, shape: Any) -> None:
    refused_out(wrap(draw((2, 2), "float32")), wrap(draw((2, 2), "float32")), wrap(np.ones(shape, "float32")))


def test_b24_a_batched_out_is_filled_in_place(wrap: Any) -> None:
    check(
        wrap(draw((2, 4, 3), "float32")),
        wrap(draw((3, 5), "float32")),
        wrap(np.full((2, 4, 5), np.nan, "float32")),
    )


def test_b25_out_dtype_must_be_the_results_and_a_permuted_out_is_written(wrap: Any) -> None:
    a, b = wrap(draw((2, 3), "float16")), wrap(draw((3, 4), "float16"))
    refused_out(a, b, wrap(np.zeros((2, 4), "float32")), TypeError)
    check(
        wrap(draw((2, 3), "float32")),
        wrap(draw((3, 4), "float32")),
        wrap(np.full((4, 2), np.nan, "float32")).T,
    )
    permuted = wrap(np.full((2, 5, 4), np.nan, "float32")).swapaxes(1, 2)
    check(wrap(draw((2, 4, 3), "float32")), wrap(draw((2, 3, 5), "float32")), permuted)
