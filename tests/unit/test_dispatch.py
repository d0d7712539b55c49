"""Which kernel a call gets, through `_core.find_choice`: the dispatcher as a pure function over packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pack_cases import H200, H200_FACTS, LAPTOP, call, make_pack, record

from ktlib import _core
from ktlib.problem import Choice
from ktlib_generator.families.base import Device
from ktlib_generator.values import Record, Status


def choose(paths: Sequence[str], asked: Mapping[str, Any], **device: Any) -> Choice:
    choice = Choice.from_dict(_core.find_choice(paths, {**H200_FACTS, **device}, asked))
    assert Choice.from_dict(choice.to_dict()) == choice
    return choice


@pytest.fixture
def packed(tmp_path: Path) -> Any:
    """Writes records as a pack and returns its path; each call another file."""
    count = iter(range(100))

    def write(*records: Record, device: Device = H200) -> str:
        return make_pack(tmp_path / f"{next(count)}.ktpack", records, device)

    return write


def test_exact_problem_gets_its_kernel_with_the_numbers(packed: Any) -> None:
    trial = record("4096x4096x1024", us=12.1, vendor_us=14.0, smem_bytes=131072, group_m=8)
    path = packed(trial, record("2048x4096x1024", us=5.0))
    choice = choose([path], call("4096x4096x1024"))
    assert choice.tier == "exact"
    assert choice.kernel == str(trial.variant).replace("group_m=8,", "")
    assert choice.reason == (
        "tuned problem 4096x4096x1024:nn:fp16: its kernel took 12.1 us against 14.0 us for the vendor, "
        "noise 0.0%"
    )
    assert choice.database == path
    assert dict(choice.launch) == {
        "grid": 1024,
        "block": 384,
        "smem_bytes": 131072,
        "cluster_m": 1,
        "cluster_n": 1,
        "group_m": 8,
        "split_k": 1,
    }
    assert choice.latency_us == pytest.approx(12.1)


def test_a_persistent_kernel_launches_no_more_blocks_than_fit(packed: Any) -> None:
    path = packed(record("4096x4096x1024", persistent=1))
    assert dict(choose([path], call("4096x4096x1024")).launch)["grid"] == 132
    assert dict(choose([path], call("2048x2049x1024", align=16, align_ab=16)).launch)["grid"] == 132
    small = packed(record("100x200x64", persistent=1))
    assert dict(choose([small], call("100x200x64")).launch)["grid"] == 2


def test_near_takes_the_smallest_sum_of_log_ratios(packed: Any) -> None:
    # Each neighbour wins with another tile, so that the kernel's name says which entry was taken.
    path = packed(
        record("1024x1024x1024", tile_m=16),
        record("2048x1024x1024", tile_m=32),
        record("1024x2048x2048", tile_m=64),
    )
    choice = choose([path], call("1536x1024x1024"))  # log2: 0.585 from 1024, 0.415 from 2048
    assert (choice.tier, "tile_m=32" in choice.kernel) == ("near", True)
    assert choice.reason == (
        "nearest tuned problem 2048x1024x1024:nn:fp16 (m 1536 -> 2048): its kernel took 10.0 us against "
        "14.0 us for the vendor, noise 0.0%"
    )
    assert "tile_m=16" in choose([path], call("1400x1024x1024")).kernel
    # 0.5 + 0.5 + 0 from the third, 0.0 + 0.5 + 0.5 ... the sum decides, not the largest single ratio.
    assert "tile_m=64" in choose([path], call("1024x1456x1456")).kernel


@pytest.mark.parametrize("axis", ["m", "n", "k"])
@pytest.mark.parametrize(
    ("extent", "tier"), [(1024, "near"), (1016, "vendor"), (4096, "near"), (4104, "vendor")]
)
def test_each_ratio_is_at_most_two_inclusive(packed: Any, axis: str, extent: int, tier: str) -> None:
    path = packed(record("2048x2048x2048"))
    assert choose([path], call("2048x2048x2048", **{axis: extent})).tier == tier


def test_two_neighbours_at_equal_distance_give_the_first_entry(packed: Any) -> None:
    # 512 and 2048 are exactly a factor of two from 1024 along different axes; the file's order is m first.
    a, b = record("512x1024x1024", tile_m=16), record("1024x2048x1024", tile_m=32)
    for order in ((a, b), (b, a)):
        assert "tile_m=16" in choose([packed(*order)], call("1024x1024x1024")).kernel
    first, second = packed(b), packed(a)
    assert "tile_m=32" in choose([first, second], call("1024x1024x1024")).kernel
    assert "tile_m=16" in choose([second, first], call("1024x1024x1024")).kernel


def test_near_agrees_with_a_brute_force_search_over_many_entries(packed: Any) -> None:
    import math
    import random

    draw = random.Random(7)
    shapes = sorted({tuple(8 * draw.randint(1, 600) for _ in range(3)) for _ in range(400)})
    path = packed(*(record(f"{m}x{n}x{k}", group_m=i + 1) for i, (m, n, k) in enumerate(shapes)))
    asked = [tuple(8 * draw.randint(1, 700) for _ in range(3)) for _ in range(300)]
    tiers = set()
    for m, n, k in asked:
        gaps = [[abs(math.log2(x / y)) for x, y in zip((m, n, k), s, strict=True)] for s in shapes]
        near = [(sum(g), s) for g, s in zip(gaps, shapes, strict=True) if max(g) <= 1.0]
        choice = choose([path], call(f"{m}x{n}x{k}"))
        tiers.add(choice.tier)
        if not near:
            assert choice.tier == "vendor"
            continue
        got = shapes[dict(choice.launch)["group_m"] - 1]
        distance = sum(abs(math.log2(x / y)) for x, y in zip((m, n, k), got, strict=True))
        assert distance == pytest.approx(min(near)[0], abs=1e-5)
    assert tiers == {"near", "vendor"}


@pytest.mark.parametrize(
    "other",
    ["1024x1024x1024:nt:fp16", "1024x1024x1024:nn:bf16", "1024x1024x1024:nn:fp16:accumulate=fp16"],
)
def test_another_layout_dtype_or_accumulator_is_never_taken(packed: Any, other: str) -> None:
    choice = choose([packed(record(other))], call("1024x1024x1024"))
    assert choice.tier == "vendor"
    assert "nothing of nn fp16 accumulate fp32 epilogue none is tuned" in choice.reason


def test_another_alignment_class_is_never_taken(packed: Any) -> None:
    choice = choose([packed(record("1024x1024x1024"))], call("1024x1024x1024:nn:fp16:align=2"))
    assert choice.tier == "vendor"
    assert "aligned to 2 bytes" in choice.reason
    assert "none at this alignment" in choice.reason


def test_a_kernel_never_gets_operands_less_aligned_than_it_needs(packed: Any) -> None:
    # n odd: C is aligned to 2 bytes, A and B (nt) to 16, so the same class holds calls of both kinds.
    path = packed(record("1024x1023x1024:nt", min_align=16))
    aligned = choose([path], call("1024x1023x1024:nt", align_ab=16))
    assert aligned.tier == "exact"
    shifted = choose([path], call("1024x1023x1024:nt", align_ab=2))
    assert shifted.tier == "vendor"
    assert "needs A and B aligned to 16 bytes and k a multiple of 1, got 2 bytes and k=1024" in shifted.reason
    nearby = packed(record("1024x1021x1024:nt", min_align=2))
    assert choose([path, nearby], call("1024x1023x1024:nt", align_ab=2)).tier == "near"


def test_a_kernel_never_gets_a_k_that_it_cannot_divide(packed: Any) -> None:
    path = packed(record("1024x1024x1024", k_multiple=64), record("1024x1024x640", tile_m=16))
    assert "tile_m=128" in choose([path], call("1024x1024x1088")).kernel
    assert "tile_m=16" in choose([path], call("1024x1024x1080")).kernel  # the nearer one cannot


def test_the_vendor_is_chosen_where_it_was_faster(packed: Any) -> None:
    path = packed(record("1024x1024x1024", us=15.0), record("64x64x64", us=None, status=Status.WRONG_RESULT))
    exact = choose([path], call("1024x1024x1024"))
    assert (exact.tier, exact.kernel, exact.database) == ("vendor", "", path)
    assert exact.reason == (
        "tuned problem 1024x1024x1024:nn:fp16: its best kernel took 15.0 us against 14.0 us for the vendor, "
        "noise 0.0%; the vendor was faster"
    )
    near = choose([path], call("1000x1024x1024"))
    assert near.reason.startswith(
        "nearest tuned problem 1024x1024x1024:nn:fp16 (m 1000 -> 1024): its best kernel"
    )


@pytest.mark.parametrize(
    ("us", "spread", "why"),
    [
        (10.0, 0.3, "the gain is not more than twice the noise"),
        (13.9, 0.0, "the gain is too small or its measurement too noisy"),
    ],
)
def test_a_faster_kernel_that_was_not_taken_says_why(packed: Any, us: float, spread: float, why: str) -> None:
    choice = choose([packed(record("64x64x64", us=us, spread=spread))], call("64x64x64"))
    assert choice.tier == "vendor"
    assert choice.latency_us < choice.vendor_us
    assert choice.reason.endswith(f"; the vendor was chosen because {why}")


@pytest.mark.parametrize(
    "asked", ["8x8x8", "0x8x8", "64x64x64:nt", "64x64x64", "64x64x64:nn:fp16:batch=2", "60x64x64"]
)
def test_no_reason_repeats_that_it_is_the_vendor(packed: Any, asked: str) -> None:
    for paths in ([], [packed(record("64x64x64", us=20.0))]):
        choice = choose(paths, call(asked))
        assert choice.tier == "vendor"
        assert not choice.reason.startswith("vendor")


def test_a_problem_without_a_right_kernel_says_so(packed: Any) -> None:
    wrong = record("64x64x64", us=None, status=Status.WRONG_RESULT)
    path = packed(wrong, record("64x64x64", us=2.5, family="vendor"))
    choice = choose([path], call("64x64x64"))
    assert "none of 1 candidates gave a right result, 2.50 us for the vendor" in choice.reason
    assert (choice.latency_us, choice.vendor_us) == (None, 2.5)


def test_far_problems_go_to_the_vendor_and_name_the_nearest(packed: Any) -> None:
    choice = choose([packed(record("4096x4096x4096"))], call("8x8x8"))
    assert (choice.tier, choice.database) == ("vendor", "")
    assert "within a factor 2 of 8x8x8 (nearest: 4096x4096x4096:nn:fp16)" in choice.reason


@pytest.mark.parametrize("asked", ["0x8x8", "8x0x8", "8x8x0", "64x64x64:nn:fp16:batch=2"])
def test_empty_and_batched_products_go_to_the_vendor(packed: Any, asked: str) -> None:
    choice = choose([packed(record("64x64x64"))], call(asked))
    assert choice.tier == "vendor"
    assert "no kernel takes" in choice.reason


def test_the_largest_extents_do_not_overflow(packed: Any) -> None:
    top = 2**31 - 1
    path = packed(record(f"{top}x{top}x{top}", us=1e9, vendor_us=2e9), record("8x8x8"))
    assert choose([path], call(f"{top}x{top}x{top}")).tier == "exact"
    assert choose([path], call(f"{top - 1}x{top}x{top}:nn:fp16:align=2")).tier == "near"
    assert choose([path], call("1x1x1:nn:fp16:align=16")).tier == "vendor"


def test_the_first_pack_wins_an_exact_problem_and_exact_beats_near(packed: Any) -> None:
    user, shipped = packed(record("64x64x64", tile_m=16)), packed(record("64x64x64", tile_m=32))
    assert "tile_m=16" in choose([user, shipped], call("64x64x64")).kernel
    assert "tile_m=32" in choose([shipped, user], call("64x64x64")).kernel
    near = packed(record("72x64x64", tile_m=16))
    assert "tile_m=32" in choose([near, shipped], call("64x64x64")).kernel


def test_another_compute_capability_is_refused_by_name(packed: Any) -> None:
    path = packed(record("64x64x64"))
    for change in ({"cc_major": 10}, {"cc_minor": 1}):
        choice = choose([path], call("64x64x64"), **change)
        assert choice.tier == "vendor"
        assert f"{path}: made for compute capability 9.0 (sm90a-132)" in choice.reason


def test_another_sm_count_is_near_and_says_so(packed: Any) -> None:
    path = packed(record("64x64x64"))
    choice = choose([path], call("64x64x64"), sm_count=114)
    assert choice.tier == "near"
    assert choice.reason.endswith("; tuned on 132 SMs, this device has 114")
    other = Device(kind="cuda", name="test", arch="sm90a", sm_count=114)
    own = packed(record("96x64x64", device=other, tile_m=16), device=other)
    choice = choose([path, own], call("64x64x64"), sm_count=114)
    assert "tile_m=16" in choice.kernel  # the same SM count comes before the nearer shape


def test_a_cpu_takes_packs_of_every_level_it_runs_and_no_other(packed: Any) -> None:
    path = packed(record("64x64x64:nt:fp32", device=LAPTOP), device=LAPTOP)
    newer = {"kind": "cpu", "cpu_archs": ["cpu-x86_64_v4", "cpu-x86_64_v3", "cpu-portable"]}
    choice = Choice.from_dict(_core.find_choice([path], newer, call("64x64x64:nt:fp32")))
    assert (choice.tier, choice.launch) == ("exact", ())
    assert choice.reason.endswith("; tuned for cpu-x86_64_v3, this CPU is cpu-x86_64_v4")
    for device in ({"kind": "cpu", "cpu_archs": ["cpu-portable"]}, H200_FACTS):
        refused = Choice.from_dict(_core.find_choice([path], device, call("64x64x64:nt:fp32")))
        assert refused.tier == "vendor"
        assert f"{path}: made for cpu-x86_64_v3" in refused.reason


def test_no_database_is_said() -> None:
    choice = choose([], call("64x64x64"))
    assert choice.reason == "no database fits compute capability 9.0 with 132 SMs; none is loaded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": -1}, r"m must be in 0\.\.2147483647, got -1"),
        ({"m": 2**40}, r"m must be in 0\.\.2147483647"),
        ({"k": "8"}, "k must be an integer, got '8'"),
        ({"layout": "xx"}, r"layout 'xx' is unknown \(have: nn, nt, tn, tt\)"),
        ({"align": 3}, "align must be one of 1, 2, 4, 8, 16, got 3"),
        ({"align": 16, "align_ab": 2}, "align_ab 2 is less than align 16"),
        ({"depth": 1}, "unknown field 'depth'"),
    ],
)
def test_a_bad_call_is_refused_by_field(change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.find_choice([], H200_FACTS, call("64x64x64", **change))
