"""Each verification rule catches its own planted fault, and right results pass, on NumPy and torch arrays."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ktlib.problem import Problem, alignment_bytes
from ktlib_generator.measure import inputs, rules
from ktlib_generator.measure.arrays import NumpyArrays, TorchArrays
from ktlib_generator.measure.operands import Guarded, place
from ktlib_generator.measure.verify import Failure, Verifier, spot_check, verify
from ktlib_generator.values import Verification

ARRAYS = NumpyArrays()
PROBLEM = Problem(20, 36, 50, dtype="fp32")


def wide(arrays, operand, dtype):
    return np.asarray(arrays.decode(operand.logical, dtype))


def write(arrays, operand, values, dtype):
    if arrays.xp is not np:
        values = arrays.xp.from_numpy(np.ascontiguousarray(values))
    arrays.assign(operand.logical, arrays.encode(values, dtype))


def fp32_product(arrays, dtype):
    """What a tensor core or cuBLAS does: products of halves, an fp32 sum in chunks of K, one rounding."""

    def run(a, b, c, stream):
        left, right = wide(arrays, a, dtype), wide(arrays, b, dtype)
        total = np.zeros((left.shape[0], right.shape[1]), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            for k in range(0, left.shape[1], 16):
                chunk = left[:, k : k + 16].astype(np.float32) @ right[k : k + 16].astype(np.float32)
                total = total + chunk
        write(arrays, c, total, dtype)

    return run


def summed_in(sum_dtype, splits=1):
    """fp16 in and out; the sum kept in `sum_dtype`, or (with splits) fp32 inside a split and fp16 between."""

    def run(a, b, c, stream):
        left, right = a.logical.astype(np.float32), b.logical.astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            if splits > 1:
                parts = np.array_split(np.arange(left.shape[1]), splits)
                total = sum(((left[:, p] @ right[p]).astype(np.float16) for p in parts), np.float16(0))
            else:
                total = np.zeros((left.shape[0], right.shape[1]), sum_dtype)
                for k in range(left.shape[1]):
                    total = (total + left[:, k : k + 1] * right[k : k + 1]).astype(sum_dtype)
        c.logical[...] = total

    return run


def reason(run, problem=PROBLEM, seed=3):
    result = verify(run, problem, ARRAYS, seed=seed)
    assert isinstance(result, Failure), f"accepted: {result}"
    return result.reason


# K beyond one chunk of 16, not a multiple of 8; M, N odd; a single row; a single column; K = 1.
SHAPES = [(17, 33, 70), (1, 40, 129), (64, 1, 33), (5, 7, 1), (48, 64, 512)]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_right_product_with_fp32_accumulation_is_accepted(shape, layout, dtype):
    problem = Problem(*shape, layout=layout, dtype=dtype)
    result = verify(fp32_product(ARRAYS, dtype), problem, ARRAYS, seed=11)
    assert isinstance(result, Verification), result
    assert result.rms_ratio <= rules.rms_limit(problem)
    assert {"zero_one", "normal", "special", "repeat", "guards", "poison"} <= set(result.checks)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_torch_arrays_judge_like_numpy_arrays(dtype):
    pytest.importorskip("torch")
    arrays = TorchArrays("cpu")
    problem = Problem(17, 33, 70, layout="nt", dtype=dtype)
    assert isinstance(verify(fp32_product(arrays, dtype), problem, arrays, seed=5), Verification)

    def off_by_one(a, b, c, stream):
        fp32_product(arrays, dtype)(a, b, c, stream)
        c.logical[3, 5] += 1

    result = verify(off_by_one, problem, arrays, seed=5)
    assert isinstance(result, Failure)
    assert "first C[3, 5]" in result.reason


def test_small_outputs_are_not_refused_by_luck():
    """One output's rounding error can be near zero by chance, so the RMS rule must not judge it."""
    for seed in range(40):
        assert isinstance(
            verify(fp32_product(ARRAYS, "fp16"), Problem(1, 1, 1024, dtype="fp16"), ARRAYS, seed=seed),
            Verification,
        )


@pytest.mark.parametrize("k", [2, 3, 64, 1001, 4096])
def test_cancelling_integers_are_exact_in_fp32_and_wrong_in_fp16(k):
    problem = Problem(12, 16, k, dtype="fp16")
    case = inputs.cancelling(problem, ARRAYS, 5)
    sample = case.samples[0]
    a, b = case.a.astype(np.float32), case.b.astype(np.float32)
    assert (np.abs(case.a) <= 2048).all()
    assert (np.abs(sample.reference) < 2048).all()
    for order in (np.arange(k), np.random.default_rng(0).permutation(k)):  # any order of adding
        total = np.zeros((12, 16), np.float32)
        for i in order:
            total += a[:, i : i + 1] * b[i : i + 1]
        assert (total == sample.reference).all()
    narrow = np.zeros((12, 16), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(k):
            narrow = (narrow + a[:, i : i + 1] * b[i : i + 1]).astype(np.float16)
    assert (narrow != sample.reference).mean() > 0.5


def test_fp16_accumulation_is_refused_by_each_rule_alone():
    problem = Problem(16, 24, 1041, dtype="fp16")
    verifier = Verifier(problem, ARRAYS, 7)
    by_name = {case.name: case for case in verifier.cases}
    run, arena = summed_in(np.float16), verifier.arenas[0]
    judged, outputs = {}, {}
    for name in ("zero_one", "normal", "cancelling", "width_probe"):
        c = verifier._launch(run, by_name[name], arena, 0xFF, 0xFF)
        judged[name], outputs[name] = verifier._judge(by_name[name], c, 1), c
    assert judged["zero_one"] is None  # why 0/1 inputs alone are not enough
    assert judged["normal"]
    assert judged["cancelling"]
    assert judged["width_probe"]
    ratio = rules.rms_ratio(by_name["normal"].samples[0], outputs["normal"], problem, ARRAYS)
    assert ratio > 4
    assert "rounding-only" in rules.rms(ratio, problem)


def test_fp16_partials_of_a_split_reduction_are_refused():
    assert "wrong" in reason(summed_in(np.float32, splits=4), Problem(16, 24, 512, dtype="fp16"))


def test_rms_of_half_partials_is_over_the_limit():
    problem = Problem(64, 64, 1024, dtype="fp16")
    case = inputs.normal(problem, ARRAYS, 1)
    a, b = case.a.astype(np.float64), case.b.astype(np.float64)
    halves = [(a[:, p] @ b[p]).astype(np.float16) for p in (slice(0, 512), slice(512, 1024))]
    ratio = rules.rms_ratio(case.samples[0], halves[0] + halves[1], problem, ARRAYS)
    assert 1.1 < ratio < 2.0
    assert rules.rms(ratio, problem)
    once = rules.rms_ratio(case.samples[0], (a @ b).astype(np.float16), problem, ARRAYS)
    assert once == 1.0
    assert rules.rms(once, problem) is None


def test_bound_catches_one_entry_that_rms_averages_away():
    problem = Problem(64, 64, 256, dtype="fp16")
    case = inputs.normal(problem, ARRAYS, 1)
    sample = case.samples[0]
    good = sample.reference.astype(np.float16)
    assert rules.bound(case, sample, good, problem, ARRAYS) is None
    bad = good.copy()
    i, j = np.unravel_index(np.abs(sample.reference).argmin(), good.shape)
    bad[i, j] += np.float16(0.01)
    assert rules.rms(rules.rms_ratio(sample, bad, problem, ARRAYS), problem) is None
    assert f"C[{i}, {j}]" in rules.bound(case, sample, bad, problem, ARRAYS)


def test_fp32_kernel_that_rounds_its_inputs_is_refused():
    def like_tf32(a, b, c, stream):
        cut = [(x.logical.copy().view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b)]
        with np.errstate(invalid="ignore", over="ignore"):
            c.logical[...] = cut[0] @ cut[1]

    assert "normal" in reason(like_tf32, Problem(32, 32, 64, dtype="fp32"))


def planted(fault):
    """The right fp32 product, with a fault added before or after."""
    product = fp32_product(ARRAYS, "fp32")

    def run(a, b, c, stream):
        fault(a, b, c, lambda: product(a, b, c, stream))

    return run


def test_output_never_written_is_refused():
    assert "NaN or Inf" in reason(planted(lambda a, b, c, right: None))


def test_one_tile_not_written_is_refused():
    def fault(a, b, c, right):
        before = c.logical[16:, 32:].copy()
        right()
        c.logical[16:, 32:] = before

    assert "zero_one" in reason(planted(fault))


def test_reading_the_old_output_is_refused():
    def fault(a, b, c, right):
        before = c.logical.copy()
        right()
        with np.errstate(invalid="ignore"):
            c.logical[...] += 0 * before

    assert "NaN" in reason(planted(fault))


def test_changed_input_is_refused():
    def fault(a, b, c, right):
        right()
        b.logical[7, 9] += 1

    assert "input B was changed" in reason(planted(fault))


@pytest.mark.parametrize("where", ["before_first_row", "behind_last_row", "between_rows"])
def test_write_beside_the_output_is_refused(where):
    def fault(a, b, c, right):
        right()
        ld = c.logical.strides[0] // 4
        at = {"before_first_row": -1, "behind_last_row": 20 * ld, "between_rows": 36}[where]
        if where == "between_rows" and ld == 36:
            return
        ctypes.c_float.from_address(c.address + 4 * at).value = 0.25

    assert "out of bounds, beside C" in reason(planted(fault))


def test_stale_result_is_refused():
    kept = []

    def fault(a, b, c, right):
        if not kept:
            right()
            kept.append(c.logical.copy())
        c.logical[...] = kept[0]

    assert "wrong" in reason(planted(fault))


def test_result_kept_by_address_is_refused():
    kept = {}

    def fault(a, b, c, right):
        if a.address not in kept:
            right()
            kept[a.address] = c.logical.copy()
        c.logical[...] = kept[a.address]

    assert "wrong" in reason(planted(fault))


def test_unrepeatable_bits_are_refused():
    draws = np.random.default_rng(0)

    def fault(a, b, c, right):
        right()
        with np.errstate(invalid="ignore"):
            fractions = bool((a.logical * 2 % 1 > 0).any())
        if fractions and np.isfinite(a.logical).all():  # only on normal values: elsewhere C must be exact
            c.logical[...] *= np.float32(1) + np.float32(2.0**-23) * draws.integers(0, 2, c.logical.shape)

    assert "repeat" in reason(planted(fault))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_special_value_swallowed_is_refused(value):
    """0 x NaN taken as 0, or Inf clamped: kernels that skip zeros or saturate."""

    def fault(a, b, c, right):
        right()
        bad = np.isnan(c.logical) if np.isnan(value) else np.isinf(c.logical)
        c.logical[bad] = 0

    assert "special" in reason(planted(fault))


def test_correct_until_timed_is_caught_after_timing():
    calls = []

    def fault(a, b, c, right):
        calls.append(1)
        if len(calls) <= 30:
            right()

    run = planted(fault)
    verifier = Verifier(PROBLEM, ARRAYS, 1)
    assert isinstance(verifier.verify(run), Verification)
    assert verifier.verify_again(run, 99) is None
    calls.extend([1] * 30)
    assert "after timing" in verifier.verify_again(run, 98)


def test_wrong_entry_of_a_sampled_problem_is_found_by_projection(monkeypatch):
    """A tile wrong outside the sampled rows and columns: only C v = A (B v) sees it."""
    monkeypatch.setitem(inputs.FULL_REFERENCE_FLOPS, "cpu", 0)
    monkeypatch.setattr(inputs, "SAMPLED_LINES", 4)
    problem = Problem(300, 300, 20, dtype="fp16")
    verifier = Verifier(problem, ARRAYS, 2)
    case = verifier.cases[0]
    assert case.name == "zero_one"
    assert len(case.samples) == 2
    assert case.projection is not None
    row = next(r for r in range(300) if r not in set(case.samples[0].rows.tolist()))
    col = next(j for j in range(300) if j not in set(case.samples[1].cols.tolist()))
    right = (case.a.astype(np.float64) @ case.b.astype(np.float64)).astype(np.float16)
    assert verifier._judge(case, right, 1) is None
    right[row, col] += 1
    assert f"row {row} of C" in verifier._judge(case, right, 1)
    assert isinstance(verifier.verify(fp32_product(ARRAYS, "fp16")), Verification)


@pytest.mark.parametrize("align", [2, 4, 8, 16])
@pytest.mark.parametrize("shape", [(9, 24, 40), (9, 21, 35)])
def test_operands_have_exactly_the_alignment_the_problem_names(shape, align):
    problem = Problem(*shape, layout="nt", dtype="fp16", align=align)
    for padded in (False, True):
        found = []
        for name in "abc":
            guarded = Guarded(problem, name, ARRAYS, padded=padded)
            found.append(alignment_bytes(guarded.operand.address, guarded.operand.ld * 2))
        assert min(found) == align


def test_odd_output_rows_leave_the_inputs_aligned():
    """nt with N odd and K a multiple of 8: A and B keep 16 bytes, as the call has it; only C is odd."""
    problem = Problem(16, 33, 64, layout="nt", dtype="fp16")
    assert problem.align == 2
    assert [place(problem, name).ld * 2 % 16 for name in "ab"] == [0, 0]
    assert [place(problem, name).offset_bytes for name in "abc"] == [0, 0, 0]


def test_spot_check_sees_an_output_that_was_not_written():
    problem = Problem(40, 24, 32, dtype="fp16")
    a, b, c = (Guarded(problem, name, ARRAYS, padded=False) for name in "abc")
    a.load(ARRAYS.encode(ARRAYS.normal(40, 32, 1), "fp16"), 0)
    b.load(ARRAYS.encode(ARRAYS.normal(32, 24, 2), "fp16"), 0)
    c.fill(0xFF)
    assert spot_check(a.operand, b.operand, c.operand, problem, ARRAYS, 1)
    fp32_product(ARRAYS, "fp16")(a.operand, b.operand, c.operand, 0)
    assert spot_check(a.operand, b.operand, c.operand, problem, ARRAYS, 1) is None


def test_bf16_conversion_rounds_to_nearest_even_and_keeps_nan():
    torch = pytest.importorskip("torch")
    values = np.concatenate(
        [
            np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.linspace(-36, 36, 1000),
            np.array([np.inf, -np.inf, np.nan, 3.39e38, 1.00390625, 1.01171875, 0.0, -0.0], np.float32),
        ]
    ).astype(np.float32)
    ours = ARRAYS.decode(ARRAYS.encode(values, "bf16"), "bf16")
    theirs = torch.from_numpy(values).to(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("shape", [(8, 8, 8), (9, 9, 9), (1, 64, 64)])
def test_a_right_small_product_is_not_refused_by_luck(shape):
    """fp32 outputs, few of them: their rounding-only RMS is a matter of luck, the rule must allow for it."""
    m, n, k = shape
    problem = Problem(m, n, k, dtype="fp32")
    refused = 0
    for seed in range(300):
        case = inputs.normal(problem, ARRAYS, seed)
        c = np.zeros((m, n), np.float32)
        for i in range(k):  # one chain, as a plain kernel sums
            c = (c + case.a[:, i : i + 1].astype(np.float32) * case.b[i : i + 1].astype(np.float32)).astype(
                np.float32
            )
        refused += rules.rms(rules.rms_ratio(case.samples[0], c, problem, ARRAYS), problem) is not None
    assert refused == 0
