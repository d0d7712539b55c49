"""States of torch in which a product is more than its numbers, and memory that is not there."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from matmul_cases import only_packs, write_cpu_pack

import ktlib

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def cpu_pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_cpu_pack(tmp_path_factory.mktemp("packs") / "cpu.ktpack")


@pytest.fixture(autouse=True)
def kernels(cpu_pack: str) -> Iterator[None]:
    with only_packs(cpu_pack):
        yield


@pytest.fixture
def a() -> Any:
    return torch.arange(256.0).reshape(16, 16) % 7


def on_a_kernel(a: Any, b: Any, out: Any = None) -> bool:
    return ktlib.explain(a, b, out).tier in ("exact", "near")


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@pytest.mark.parametrize("rows", ["", "[8:24]"], ids=["whole", "view with an offset"])
def test_a_freed_storage_is_never_read_or_written(a: Any, rows: str) -> None:
    # In its own process, because it used to end it.
    program = (
        "import torch, ktlib\na = torch.ones(16, 16)\n"
        f"x = torch.ones(32, 16){rows or '[:16]'}\nx.untyped_storage().resize_(0)\n"
        "for call in (lambda: ktlib.matmul(x, a), lambda: ktlib.matmul(a, x),\n"
        "             lambda: ktlib.matmul(a, a, out=x), lambda: ktlib.matmul(x.view(2, 8, 16), a)):\n"
        "    try:\n        call()\n        print('ran')\n"
        "    except RuntimeError as error:\n        print('not allocated' in str(error))"
    )
    assert run_python(program).split() == ["True"] * 4


def test_a_zero_tensor_without_memory_multiplies_as_zeros(a: Any) -> None:
    zero = torch._efficientzerotensor((16, 16))
    assert not on_a_kernel(zero, a)
    assert torch.equal(ktlib.matmul(zero, a), torch.zeros(16, 16))
    assert torch.equal(ktlib.matmul(a, zero), torch.zeros(16, 16))


@pytest.mark.parametrize("state", ["plain", "no_grad"])
def test_forward_mode_tangents_reach_the_result(a: Any, state: str) -> None:
    from torch.autograd import forward_ad

    tangent = a + 1
    with forward_ad.dual_level(), torch.set_grad_enabled(state == "plain"):
        dual = forward_ad.make_dual(a.clone(), tangent)
        assert "tangent" in ktlib.explain(dual, a).reason
        assert torch.equal(forward_ad.unpack_dual(ktlib.matmul(dual, a)).tangent, tangent @ a)
        assert torch.equal(forward_ad.unpack_dual(ktlib.matmul(a, dual)).tangent, a @ tangent)
        stack = forward_ad.make_dual(torch.stack([a, a]), torch.stack([tangent, tangent]))
        assert torch.equal(forward_ad.unpack_dual(ktlib.matmul(stack, a)).tangent[1], tangent @ a)
        with pytest.raises(RuntimeError):  # as torch.matmul(out=dual)
            ktlib.matmul(a, a, out=dual)
        assert on_a_kernel(a, a)


def test_a_function_mode_sees_one_torch_matmul_and_nothing_of_a_check(a: Any) -> None:
    from torch.overrides import TorchFunctionMode

    seen: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for left in (a, torch.stack([a, a])):
        seen.clear()
        with Watch():
            result = ktlib.matmul(left, a)
        assert seen.count(torch.matmul) == 1
        assert torch.equal(result, left @ a)
    assert on_a_kernel(a, a)


def test_a_default_device_does_not_send_products_away(a: Any) -> None:
    with torch.device("meta"):
        assert on_a_kernel(a, a)
        assert torch.equal(ktlib.matmul(a, a).cpu(), a @ a)


def test_tracers_record_the_product_instead_of_its_result(a: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x, y: ktlib.matmul(x, y))(a + 1, a)
    assert torch.equal(graph(2 * a, a), 2 * a @ a)
    for left in (a, torch.stack([a, a])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("error", torch.jit.TracerWarning)
            traced = torch.jit.trace(lambda x, y: ktlib.matmul(x, y), (left + 1, a))
        assert torch.equal(traced(2 * left, a), 2 * left @ a)
    assert on_a_kernel(a, a)


FIRST_PRODUCTS = {
    "inference mode": "with torch.inference_mode(): ktlib.matmul(a, a)",
    "function mode": "with torch.overrides.BaseTorchFunctionMode(): ktlib.matmul(a, a)",
    "saved-tensor hooks": (
        "with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone): ktlib.matmul(a, a)"
    ),
    "vmap": "torch.vmap(lambda x: ktlib.matmul(x, a))(torch.ones(2, 4, 4))",
    "default device": "with torch.device('meta'): ktlib.matmul(a, a)",
}


@pytest.mark.parametrize("state", FIRST_PRODUCTS)
def test_a_first_product_in_an_odd_state_does_not_slow_all_later_ones(state: str) -> None:
    program = "import torch, ktlib\nfrom ktlib import _core\na = torch.ones(4, 4)\n"
    program += FIRST_PRODUCTS[state] + "\n"
    program += (
        "for _ in range(20):\n    ktlib.matmul(a, a)\n"
        "print(_core.torch_flags_calibrated(), _core.torch_modes_direct())\n"
        "assert torch._C._len_torch_function_stack() == 0 and torch._C._len_torch_dispatch_stack() == 0\n"
        "assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()\n"
    )
    assert run_python(program).split() == ["True", "True"]


REPLACED = """
import sys
import numpy as np
import ktlib
if sys.argv[1] == "torch":
    import torch
    make, right = (lambda *shape: torch.ones(*shape)), torch.matmul
    torch.matmul = ktlib.matmul
else:
    make, right = (lambda *shape: np.ones(shape, "float32")), np.matmul
    np.matmul = ktlib.matmul
for left, other in ((make(300, 300), make(300, 300)), (make(2, 3, 4), make(2, 4, 3)), (make(3), make(3))):
    assert (ktlib.matmul(left, other) == right(left, other)).all()
"""


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("disabled", ["0", "1"])
def test_a_library_whose_matmul_is_ours_does_not_call_itself(
    library: str, disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KTLIB_DISABLE", disabled)
    command = [sys.executable, "-c", REPLACED, library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 16, 2).permute(2, 0, 1),
        lambda: torch.zeros(2, 3, 32)[:, :, ::2],
        lambda: torch.zeros(4, 3, 16)[::2],
    ],
    ids=["permuted", "gaps in rows", "gaps between entries"],
)
def test_a_batched_out_may_be_permuted_or_have_gaps(make: Callable[[], Any]) -> None:
    left, right = torch.arange(24.0).reshape(2, 3, 4), torch.arange(128.0).reshape(2, 4, 16)
    out = make()
    assert ktlib.matmul(left, right, out=out) is out
    np.testing.assert_array_equal(out.numpy(), left.numpy() @ right.numpy())
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        ktlib.matmul(left.requires_grad_(), right, out=make())
