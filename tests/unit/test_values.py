"""Values: text forms round-trip, every field is in the fingerprint, status and payload cannot disagree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from store_values import STATUSES, binary, environment, failed_record, ok_record

from ktlib.canonical import canonical_json, fingerprint, finite_positive
from ktlib.problem import ACCUMULATES, DTYPES, LAYOUTS, Choice, Problem
from ktlib_generator.values import (
    Binary,
    Environment,
    Measurement,
    Record,
    Status,
    Variant,
    Verification,
    trial_key,
)

# One changed value for every field of every value; a new field without an entry fails the completeness test.
CHANGES: list[tuple[Any, dict[str, Any]]] = [
    (
        Problem(4096, 512, 64, dtype="fp16"),
        {
            "m": 4097,
            "n": 513,
            "k": 65,
            "layout": "nt",
            "dtype": "bf16",
            "accumulate": "fp16",
            "batch": 2,
            "align": 8,
        },
    ),
    (
        Choice("k", "exact", "tuned", "db", (("group_m", 1),), 1.5, 2.5),
        {
            "kernel": "k2",
            "tier": "near",
            "reason": "other",
            "database": "",
            "launch": (("group_m", 2),),
            "latency_us": None,
            "vendor_us": 3.0,
        },
    ),
    (
        Variant.make("sm90_tma", "sm90a", tile_m=128),
        {"family": "cpu_gemm", "config": (("tile_m", 64),), "arch": "sm80"},
    ),
    (
        binary(),
        {
            "format": "builtin",
            "symbol": "other",
            "sha256": "0" * 64,
            "source": "1" * 64,
            "registers": 1,
            "smem_bytes": 1,
            "spill_bytes": 1,
        },
    ),
    (Measurement("a", "graph", (1.0, 2.0)), {"method": "b", "protocol": "stream", "samples_us": (1.0,)}),
    (
        environment(),
        {"device": "x", "arch": "sm80", "sm_count": 1, "commit": "y", "dirty": True, "facts": ()},
    ),
    (Verification(1.0, ("zero_one",)), {"rms_ratio": 1.01, "checks": ()}),
    (
        ok_record(),
        {
            "problem": Problem(1, 1, 1),
            "variant": Variant.make("sm90_tma", "sm90a", tile_m=1),
            "environment": environment(sm_count=1),
            "measured_unix": 5,
            "measurement": Measurement("a", "graph", (9.0,)),
            "baseline": None,
            "verification": None,
            "binary": None,
            "log": "note",
        },
    ),
    (failed_record(Status.TIMEOUT), {"status": Status.REFUSED}),
]

# Not in the fingerprint, with the reason.
LEFT_OUT = {
    (Problem, "epilogue"): "there is one epilogue only; the field's part is shown by its dictionary",
    (Binary, "data"): "it takes part through sha256",
    (Record, "status"): "changed on the failed record: an ok record cannot change status alone",
}


def test_every_field_of_every_value_is_changed_here_or_left_out_for_a_reason() -> None:
    for value, changes in CHANGES[:-1]:
        names = {f.name for f in dataclasses.fields(value)}
        left_out = {name for kind, name in LEFT_OUT if kind is type(value)}
        assert set(changes) | left_out == names, type(value).__name__


@pytest.mark.parametrize(
    ("value", "name", "other"),
    [
        pytest.param(value, name, other, id=f"{type(value).__name__}-{name}")
        for value, changes in CHANGES
        for name, other in changes.items()
    ],
)
def test_changing_one_field_changes_equality_text_and_fingerprint(value: Any, name: str, other: Any) -> None:
    changed = dataclasses.replace(value, **{name: other})
    assert changed != value
    assert str(changed) != str(value)
    assert changed.fingerprint() != value.fingerprint()


@pytest.mark.parametrize("value", [v for v, _ in CHANGES], ids=lambda v: type(v).__name__)
def test_text_and_dictionary_round_trip_to_an_equal_value_with_the_same_fingerprint(value: Any) -> None:
    again = type(value).parse(str(value))
    assert again == value
    assert again.fingerprint() == value.fingerprint()
    if not isinstance(value, Variant):
        assert type(value).from_dict(value.to_dict()) == value


@pytest.mark.parametrize(
    "value", [v for v, _ in CHANGES if not isinstance(v, Variant)], ids=lambda v: type(v).__name__
)
def test_an_unknown_or_a_missing_field_is_refused_by_name(value: Any) -> None:
    data = value.to_dict()
    with pytest.raises(ValueError, match="surprise"):
        type(value).from_dict({**data, "surprise": 1})
    name = next(iter(data))
    with pytest.raises(ValueError, match=name):
        type(value).from_dict({key: item for key, item in data.items() if key != name})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", ACCUMULATES)
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("align", [0, 1, 16])
def test_problem_text_round_trips_over_the_grid(
    layout: str, dtype: str, accumulate: str, batch: int, align: int
) -> None:
    if accumulate == "fp16" and dtype != "fp16":
        with pytest.raises(ValueError, match="fp16 needs dtype fp16"):
            Problem(3, 5, 7, layout, dtype, accumulate)
        return
    problem = Problem(3, 5, 7, layout, dtype, accumulate, batch, align)
    assert Problem.parse(str(problem)) == problem


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("64x64", "is not MxNxK"),
        ("64x64x64x64", "is not MxNxK"),
        ("-1x2x3", "is not MxNxK"),
        ("1x2x3:xx", "layout 'xx' is unknown"),
        ("1x2x3:nn:fp8", "dtype 'fp8' is unknown"),
        ("1x2x3:nn:fp16:nn", "out of place"),
        ("1x2x3:batch=two", "whole number"),
        ("1x2x3:batch=1:batch=2", "given twice"),
        ("1x2x3:colour=red", "unknown field"),
        ("1x2x3:align=3", "align must be one of"),
        ("99999999999x1x1", "m must be an integer"),
    ],
)
def test_a_bad_problem_text_names_the_part_that_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Problem.parse(text)


def test_a_boolean_or_a_float_is_not_an_extent() -> None:
    for wrong in (True, 1.0, "1", -1):
        with pytest.raises(ValueError, match="m must be an integer"):
            Problem(wrong, 1, 1)  # type: ignore[arg-type]


def test_a_variant_reads_the_same_in_any_order_and_parts_cannot_run_together() -> None:
    one = Variant("f", (("b", 2), ("a", 1)), "sm90a")
    assert one == Variant("f", (("a", 1), ("b", 2)), "sm90a")
    assert str(one) == "f/a=1,b=2/sm90a"
    assert str(Variant.make("f", "sm90a", a=12, b=3)) != str(Variant.make("f", "sm90a", a=1, b=23))


@pytest.mark.parametrize("word", ["12", "-3", "+4", "a,b", "a/b", "a=b", "", "ä"])
def test_a_word_that_would_read_back_as_something_else_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="must be an integer or a word"):
        Variant.make("f", "sm90a", a=word)


@pytest.mark.parametrize("sample", [0.0, -1.0, -0.0, 5e-324, math.nan, math.inf, -math.inf])
def test_e28_e29_a_time_that_is_zero_negative_subnormal_or_not_finite_is_no_sample(sample: float) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        Measurement("a", "graph", (1.0, sample))
    with pytest.raises(ValueError, match="finite and positive"):
        finite_positive("a time", sample)


def test_a_measurement_needs_samples_and_names() -> None:
    for method, protocol, samples in (("", "graph", (1.0,)), ("a", "", (1.0,)), ("a", "graph", ())):
        with pytest.raises(ValueError, match="measurement"):
            Measurement(method, protocol, samples)


def test_latency_is_the_median_and_noise_half_the_quartile_spread_over_it() -> None:
    measurement = Measurement("a", "graph", (10.0, 1000.0, 9.0, 11.0, 10.0))
    assert measurement.latency_us == 10.0
    assert measurement.noise == pytest.approx(0.05)
    assert Measurement("a", "graph", (3.0,)).noise == 0.0


def test_ok_needs_a_measurement() -> None:
    with pytest.raises(ValueError, match="status ok and measurement None disagree"):
        dataclasses.replace(ok_record(), measurement=None)


@pytest.mark.parametrize("status", STATUSES, ids=lambda s: s.value)
def test_a_failure_allows_no_time_and_needs_a_log(status: Status) -> None:
    record = failed_record(status)
    measurement = Measurement("a", "graph", (1.0,))
    with pytest.raises(ValueError, match="disagree"):
        dataclasses.replace(record, measurement=measurement)
    with pytest.raises(ValueError, match="no baseline"):
        dataclasses.replace(record, baseline=measurement)
    with pytest.raises(ValueError, match="needs a log"):
        dataclasses.replace(record, log="")
    assert record.speedup is None


def test_a_time_stamp_with_a_fraction_is_refused_because_it_would_be_cut_in_storage() -> None:
    with pytest.raises(ValueError, match="whole seconds"):
        dataclasses.replace(ok_record(), measured_unix=1.5)


@pytest.mark.parametrize("ratio", [math.nan, math.inf, -1.0])
def test_a_verification_without_a_finite_error_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="rms_ratio"):
        Verification(ratio, ())


def test_a_whole_number_as_error_ratio_has_the_fingerprint_it_reads_back_with() -> None:
    assert Verification(1, ()).fingerprint() == Verification(1.0, ()).fingerprint()


def test_the_trial_key_is_known_before_the_trial_and_ignores_the_outcome() -> None:
    record = ok_record()
    assert record.key == trial_key(record.problem, record.variant, "sm90a", 132)
    assert record.key == dataclasses.replace(record, measured_unix=1, binary=None).key
    others = {
        trial_key(Problem(1, 1, 1), record.variant, "sm90a", 132),
        trial_key(record.problem, Variant.make("f", "sm90a", a=1), "sm90a", 132),
        trial_key(record.problem, record.variant, "sm90", 132),
        trial_key(record.problem, record.variant, "sm90a", 131),
    }
    assert len(others | {record.key}) == 5


def test_profile_names_arch_and_sm_count_and_a_cpu_by_arch_alone() -> None:
    assert environment().profile == "sm90a-132"
    assert Environment("x", "cpu-x86_64_v4", 2, "c", False).profile == "cpu-x86_64_v4"


def test_fingerprints_delimit_their_fields_and_kinds() -> None:
    assert fingerprint(kind="x", a="a", b="bc") != fingerprint(kind="x", a="ab", b="c")
    assert fingerprint(kind="x", a=1) != fingerprint(kind="y", a=1)
    assert canonical_json({"b": 1, "a": [1.5]}) == '{"a":[1.5],"b":1}'
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json(math.nan)


@pytest.mark.parametrize(("tier", "kernel"), [("vendor", "k"), ("exact", ""), ("model", ""), ("best", "k")])
def test_a_choice_whose_tier_and_kernel_disagree_is_refused(tier: str, kernel: str) -> None:
    with pytest.raises(ValueError, match="tier"):
        Choice(kernel, tier, "why")
