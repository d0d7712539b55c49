"""A launch that fails: what condemns a kernel for good, and what is only this call's bad luck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_launch import fake_library, packs, run  # noqa: F401 (fixtures)

TWO_FAILURES_THEN_NONE = """
    a, b = half(512, 256), half(256, 768)
    lib.fake_fail(b"{call}", {code})
    first, second = product(a, b)[1], product(a, b)[1]
    lib.fake_fail(b"", 0)
    third = product(a, b)[1]
    result = [first, second + third, lib.fake_launch_count(), len(cupy.VENDOR_CALLS),
              ktlib.explain(a, b).tier]
"""


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuTensorMapEncodeTiled", 1),
        ("cuLaunchKernelEx", 2),
        ("cuLaunchKernelEx", 719),
        ("cuLibraryLoadData", 2),
        ("cuCtxSetCurrent", 201),
    ],
)
def test_a_passing_failure_warns_once_and_the_next_call_tries_again(
    run: Callable[..., Any],  # noqa: F811
    call: str,
    code: int,
) -> None:
    first, later, launched, vendor, tier = run(TWO_FAILURES_THEN_NONE.format(call=call, code=code))
    (warning,) = first
    assert f"({code}) from {call}" in warning
    assert "tries again" in warning
    assert (later, launched, vendor, tier) == ([], 1, 2, "exact")


@pytest.mark.parametrize("code", [1, 200, 209, 701])
def test_a_kernel_that_the_driver_refuses_to_launch_is_not_tried_again(
    run: Callable[..., Any],  # noqa: F811
    code: int,
) -> None:
    result = run(TWO_FAILURES_THEN_NONE.format(call="cuLaunchKernelEx", code=code))
    (warning,), later, launched, vendor, tier = result
    assert "such products" in warning
    assert (later, launched, vendor, tier) == ([], 0, 3, "vendor")


@pytest.mark.parametrize("call", ["cuLaunchKernelEx", "cuLibraryLoadData"])
def test_an_error_of_earlier_work_does_not_blame_the_kernel(
    run: Callable[..., Any],  # noqa: F811
    call: str,
) -> None:
    result = run(TWO_FAILURES_THEN_NONE.format(call=call, code=700))
    (warning,), _, _, _, tier = result
    assert warning.startswith("cuda:0 has been in an error state since some earlier work")
    assert "cannot run" not in warning
    assert tier == "exact"


def test_an_array_without_memory_is_never_launched(run: Callable[..., Any]) -> None:  # noqa: F811
    result = run("""
        a, b, nothing = half(512, 256), half(256, 768), half(512, 256, address=0)
        product(nothing, b)
        product(a, half(256, 768, address=0))
        product(a, b, half(512, 768, address=0))
        result = [lib.fake_launch_count(), len(cupy.VENDOR_CALLS)]
    """)
    assert result == [0, 3]


def test_loading_another_database_loads_no_kernel_again(run: Callable[..., Any], packs: str) -> None:  # noqa: F811
    result = run(f"""
        import shutil
        a, b = half(512, 256), half(256, 768)
        product(a, b)
        ktlib.load_database({packs!r})
        ktlib.load_database(shutil.copy({packs!r}, {packs!r} + ".other.ktpack"))
        ktlib.load_database({packs!r})
        product(a, b)
        product(half(512, 256, device=1), half(256, 768, device=1))
        result = [calls().count("cuLibraryLoadData"), lib.fake_launch_count()]
    """)
    assert result == [1, 2]
