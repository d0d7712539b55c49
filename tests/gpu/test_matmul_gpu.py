"""ktlib.matmul on a Hopper GPU: right on every tile, tail, view, stream and graph."""

from __future__ import annotations

import itertools
import threading
import warnings

import pytest
from forced import FAMILY, use_only, variant_for

import ktlib

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_run")]
LAYOUTS = ("nn", "nt")
# Tails of every tile in m and n, K shorter than a stage, K not a multiple of one, one row, one column block.
TAILS = [
    (64, 64, 64),
    (1, 64, 64),
    (65, 72, 72),
    (129, 264, 72),
    (127, 248, 1032),
    (200, 520, 40),
    (300, 1000, 2056),
    (1000, 1000, 1000),
    (1752, 4720, 584),
    (504, 104, 104),
    (2048, 4096, 1024),
]


def operands(torch, m, n, k, layout, dtype, *, integers=False):
    def draw(rows, cols):
        if integers:
            return torch.randint(-3, 4, (rows, cols), device="cuda").to(dtype)
        return torch.randn(rows, cols, device="cuda", dtype=dtype)

    return draw(m, k), draw(k, n) if layout == "nn" else draw(n, k).t()


def rms_ratio(torch, c, a, b):
    """RMS error against fp64 over that of rounding alone."""
    reference = a.double() @ b.double()
    rounding = (reference.to(c.dtype).double() - reference).pow(2).mean().sqrt()
    return float((c.double() - reference).pow(2).mean().sqrt() / rounding)


def is_ours(a, b) -> bool:
    return ktlib.explain(a, b).tier in ("exact", "near")


@pytest.mark.parametrize("shape", TAILS, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tails_match_fp64_on_our_kernels(torch, shape, layout, dtype):
    a, b = operands(torch, *shape, layout, getattr(torch, dtype))
    assert is_ours(a, b), ktlib.explain(a, b)
    assert rms_ratio(torch, ktlib.matmul(a, b), a, b) <= 1.03
    out = torch.full((shape[0], shape[1]), float("nan"), device="cuda", dtype=a.dtype)
    assert ktlib.matmul(a, b, out=out) is out
    assert torch.equal(out, ktlib.matmul(a, b))


@pytest.mark.parametrize("n", [61, 253, 1021])
def test_an_odd_n_is_stored_plainly_and_right(torch, n):
    a, b = operands(torch, 130, n, 264, "nt", torch.float16)
    assert is_ours(a, b), ktlib.explain(a, b)
    assert rms_ratio(torch, ktlib.matmul(a, b), a, b) <= 1.03


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (8, 12288, 8192),
        (8, 8192, 8192),
        (1024, 1024, 1024),
        (1024, 2048, 1024),
        (2048, 4096, 1024),
        (576, 16, 7168),
    ],
    ids=["a17", "a17-control", "a18-square", "a18", "a18-large", "a15"],
)
def test_small_integers_are_exact(torch, m, n, k):
    a, b = operands(torch, m, n, k, "nn", torch.float16, integers=True)
    assert torch.equal(ktlib.matmul(a, b), (a.double() @ b.double()).half())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_slices_and_padded_rows(torch, layout):
    """b01 b10 b14: views of a wide NaN-filled buffer, aligned and not."""
    for start, k in ((0, 512), (64, 512), (65, 512), (8, 511)):
        wide = torch.full((300, 2048), float("nan"), device="cuda", dtype=torch.float16)
        a = wide[:260, start : start + k]
        a.copy_(torch.randn(260, k))
        _, b = operands(torch, 1, 256, k, layout, torch.float16)
        assert rms_ratio(torch, ktlib.matmul(a, b), a, b) <= 1.03


def test_b11_a_transposed_column_is_a_row(torch):
    a = torch.randn(64, 1, device="cuda", dtype=torch.float16).t()
    b = torch.randn(64, 64, device="cuda", dtype=torch.float16)
    assert rms_ratio(torch, ktlib.matmul(a, b), a, b) <= 1.03
    out = torch.empty(64, 64, device="cuda", dtype=torch.float16).t()
    c = torch.randn(64, 64, device="cuda", dtype=torch.float16)
    ktlib.matmul(c, b, out=out)
    assert rms_ratio(torch, out, c, b) <= 1.03


def test_b12_unaligned_row_strides_take_the_vendor_and_say_so(torch):
    a = torch.randn(256, 511, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(511, 256, device="cuda", dtype=torch.bfloat16)
    choice = ktlib.explain(a, b)
    assert choice.tier == "vendor"
    assert choice.reason
    assert rms_ratio(torch, ktlib.matmul(a, b), a, b) <= 1.03


def test_b03_operands_at_every_alignment(torch):
    buffer = torch.randn(3 * 70 * 72, device="cuda", dtype=torch.float16)
    for offset_a, offset_b, offset_c in itertools.product((0, 1, 2, 4, 8), repeat=3):
        a = buffer[offset_a : offset_a + 64 * 64].view(64, 64)
        b = buffer[5000 + offset_b : 5000 + offset_b + 64 * 64].view(64, 64)
        out = torch.empty(5000, device="cuda", dtype=torch.float16)[offset_c : offset_c + 4096].view(64, 64)
        ktlib.matmul(a, b, out=out)
        assert rms_ratio(torch, out, a, b) <= 1.03


@pytest.mark.parametrize("shape", [(10, 1, 0, 43200), (2, 3, 0, 4)])
def test_a01_a03_k_zero_gives_zeros_also_in_out(torch, shape):
    batch, m, k, n = shape
    a = torch.empty(batch, m, k, device="cuda", dtype=torch.float16)
    b = torch.empty(batch, k, n, device="cuda", dtype=torch.float16)
    out = torch.full((batch, m, n), float("nan"), device="cuda", dtype=torch.float16)
    ktlib.matmul(a, b, out=out)
    assert not out.any()
    assert not ktlib.matmul(a[0], b[0]).any()


def test_a08_more_than_two_to_the_31_output_elements(torch):
    a = torch.randn(131072, 128, 32, device="cuda", dtype=torch.float16)
    b = torch.randn(32, 128, device="cuda", dtype=torch.float16)
    c = ktlib.matmul(a, b)
    for part in (slice(0, 10), slice(-10, None)):
        assert rms_ratio(torch, c[part], a[part], b) <= 1.03


def test_a11_more_than_two_to_the_31_input_elements(torch):
    a = torch.randn(4194305, 512, device="cuda", dtype=torch.float16)
    b = torch.randn(512, 64, device="cuda", dtype=torch.float16)
    c = ktlib.matmul(a, b)
    for part in (slice(0, 100), slice(-100, None)):
        assert rms_ratio(torch, c[part], a[part], b) <= 1.03


def test_repeats_are_bitwise_equal_under_load_on_eight_streams(torch):
    """c16 d10: the answer may not depend on what else runs."""
    a, b = operands(torch, 1024, 1024, 1024, "nn", torch.float16)
    first = ktlib.matmul(a, b)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(8)]
    results = []
    for i in range(104):
        with torch.cuda.stream(streams[i % 8]):
            results.append(ktlib.matmul(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(first, c) for c in results)


def test_d08_the_current_stream_is_used(torch):
    a, b = operands(torch, 512, 512, 512, "nn", torch.float16)
    stream = torch.cuda.Stream()
    stale = a.clone()
    for _ in range(20):
        fresh = torch.randn_like(a)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            stale.copy_(fresh)
            c = ktlib.matmul(stale, b)
            d = c + 0
        stream.synchronize()
        assert torch.equal(d, ktlib.matmul(fresh, b))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_replay_on_new_contents(torch, layout):
    a, b = operands(torch, 768, 512, 640, layout, torch.bfloat16)
    out = torch.empty(768, 512, device="cuda", dtype=torch.bfloat16)
    ktlib.matmul(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ktlib.matmul(a, b, out=out)
    a.copy_(torch.randn_like(a))
    graph.replay()
    torch.cuda.synchronize()
    assert rms_ratio(torch, out, a, b) <= 1.03


def test_d20_the_first_use_of_a_kernel_inside_a_capture_is_safe(torch, kernels_run):
    """A pack loaded anew has no module loaded yet: capture must succeed, and replay must be right."""
    use_only(kernels_run)
    a, b = operands(torch, 256, 256, 256, "nn", torch.float16)
    out = torch.empty(256, 256, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ktlib.matmul(a, b, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert rms_ratio(torch, out, a, b) <= 1.03


def test_threads_do_not_cross(torch):
    """d23: own operands, output and constant per thread."""
    failures: list[int] = []

    def work(number: int) -> None:
        a = torch.full((128, 64), float(number), device="cuda", dtype=torch.float16)
        b = torch.full((64, 128), 1.0, device="cuda", dtype=torch.float16)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                out = torch.empty(128, 128, device="cuda", dtype=torch.float16)
                ktlib.matmul(a, b, out=out)
                if not bool((out == 64.0 * number).all()):
                    failures.append(number)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_d28_gradients_are_never_dropped(torch):
    a, b = operands(torch, 64, 64, 64, "nn", torch.float16)
    a.requires_grad_()
    c = ktlib.matmul(a, b)
    assert c.grad_fn is not None
    c.sum().backward()
    assert a.grad is not None
    with torch.no_grad():
        assert is_ours(a, b)
        assert not ktlib.matmul(a, b).requires_grad


def test_d03_mixed_devices_are_refused_and_the_context_lives(torch):
    a, b = operands(torch, 64, 64, 64, "nn", torch.float16)
    with pytest.raises((TypeError, ValueError), match="cpu"):
        ktlib.matmul(a, b.cpu())
    assert rms_ratio(torch, ktlib.matmul(a, b), a, b) <= 1.03


def test_the_users_reduction_flag_is_restored(torch):
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_reduced_precision_reduction
    a, b = operands(torch, 333, 335, 4097, "nn", torch.float16)
    assert ktlib.explain(a, b).tier == "vendor"
    assert rms_ratio(torch, ktlib.matmul(a, b), a, b) <= 1.03
    assert flags.allow_fp16_reduced_precision_reduction == before


def test_cupy_arrays_and_streams(torch):
    cupy = pytest.importorskip("cupy")
    a = cupy.random.standard_normal((300, 512)).astype(cupy.float16)
    b = cupy.random.standard_normal((512, 256)).astype(cupy.float16)
    reference = a.astype(cupy.float64) @ b.astype(cupy.float64)
    assert is_ours(a, b), ktlib.explain(a, b)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        c = ktlib.matmul(a, b)
    stream.synchronize()
    assert isinstance(c, cupy.ndarray)
    rounding = cupy.sqrt(((reference.astype(cupy.float16) - reference) ** 2).mean())
    assert float(cupy.sqrt(((c - reference) ** 2).mean()) / rounding) <= 1.03
    flipped = cupy.flip(a, axis=0)
    assert cupy.array_equal(
        ktlib.matmul(flipped, b), cupy.flip(ktlib.matmul(cupy.ascontiguousarray(a), b), axis=0)
    )
    with pytest.raises(TypeError):
        ktlib.matmul(a, torch.empty(512, 256, device="cuda", dtype=torch.float16))


def test_memory_given_back_early_is_not_overwritten(torch):
    """d36: operands freed right after the call, their memory reused on the same stream."""
    for _ in range(50):
        a, b = operands(torch, 512, 512, 512, "nn", torch.float16)
        reference = torch.matmul(a.float(), b.float())
        c = ktlib.matmul(a, b)
        del a, b
        torch.full((512, 512), float("nan"), device="cuda", dtype=torch.float16)
        assert not bool(c.isnan().any())
        assert torch.allclose(c.float(), reference, rtol=2e-3, atol=5e-2)


def test_d40_a_cubin_for_another_arch_falls_back_with_one_warning(torch, device, tmp_path, kernels_run):
    """An image the driver refuses costs one warning, and the vendor answers."""

    from ktlib.canonical import bytes_fingerprint
    from ktlib.problem import Problem
    from ktlib_generator.pack import write_pack
    from ktlib_generator.values import Binary, Environment, Measurement, Record, Status

    problem = Problem(96, 96, 96)
    variant = variant_for(problem, 0)
    image = b"\x7fELF not a cubin" * 64
    symbol = FAMILY.build_request(variant).symbol
    binary = Binary("cubin", symbol, bytes_fingerprint(image), "0" * 64, 72, 0, 0, image)
    record = Record(
        problem,
        variant,
        Environment(device.name, device.arch, device.sm_count, "test", False),
        Status.OK,
        0,
        Measurement("sm90_tma", "graph-hot", (1.0,)),
        Measurement("torch", "graph-hot", (2.0,)),
        binary=binary,
    )
    write_pack(tmp_path / "broken.ktpack", [record], {binary.sha256: image}, device)
    use_only(tmp_path / "broken.ktpack")
    try:
        a, b = operands(torch, 96, 96, 96, "nn", torch.float16)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                assert rms_ratio(torch, ktlib.matmul(a, b), a, b) <= 1.03
        assert len(caught) == 1
        assert ktlib.explain(a, b).tier == "vendor"
    finally:
        use_only(kernels_run)
