"""What the fast path must leave alone: gradients, wrappers, subclasses, negated views."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matmul_cases import only_packs, write_cpu_pack

import ktlib
from ktlib import _core, libraries

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def cpu_pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_cpu_pack(tmp_path_factory.mktemp("packs") / "cpu.ktpack")


@pytest.fixture(autouse=True)
def kernels(cpu_pack: Path) -> Iterator[None]:
    with only_packs(cpu_pack):
        yield


def on_a_kernel(a: Any, b: Any) -> bool:
    return ktlib.explain(a, b).tier in ("exact", "near")


@pytest.fixture
def a() -> Any:
    return torch.arange(256.0).reshape(16, 16) % 7


def test_plain_tensors_run_on_a_kernel_with_flags_read_directly(a: Any) -> None:
    assert on_a_kernel(a, a)
    assert torch.equal(ktlib.matmul(a, a), a @ a)
    assert _core.torch_flags_calibrated()


def test_a_gradient_is_kept(a: Any) -> None:
    w = a.clone().requires_grad_()
    assert "gradient" in ktlib.explain(w, a).reason
    ktlib.matmul(w, a).sum().backward()
    assert torch.equal(w.grad, torch.ones(16, 16) @ a.T)


def test_b07_an_expanded_gradient_reaches_the_product() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    ktlib.matmul(x, torch.ones(2, 2)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 2.0))


def test_a_batched_gradient_is_kept(a: Any) -> None:
    x = torch.ones(2, 16, 16, requires_grad=True)
    ktlib.matmul(x, a).sum().backward()
    assert x.grad.shape == x.shape


def test_a_parameter_runs_on_a_kernel_only_without_gradients(a: Any) -> None:
    w = torch.nn.Parameter(a.clone())
    assert not on_a_kernel(w, a)
    assert ktlib.matmul(w, a).grad_fn is not None
    with torch.no_grad():
        assert on_a_kernel(w, a)
        result = ktlib.matmul(w, a)
    assert torch.equal(result, a @ a)
    assert not result.requires_grad
    with torch.inference_mode():
        assert torch.equal(ktlib.matmul(w, a), a @ a)


def test_requires_grad_set_later_on_the_same_tensor_is_seen(a: Any) -> None:
    assert on_a_kernel(a, a)
    a.requires_grad_()
    assert not on_a_kernel(a, a)
    a.requires_grad_(False)
    assert on_a_kernel(a, a)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_negated_views_give_the_right_sign(a: Any, dtype: str) -> None:
    plain = a.to(getattr(torch, dtype))
    negated = torch._neg_view(plain)
    for left, right in ((negated, plain), (plain, negated), (negated.t(), plain), (negated.detach(), plain)):
        assert torch.equal(ktlib.matmul(left, right).float(), (left.clone() @ right.clone()).float())
    imaginary = torch.complex(a, a).conj().imag
    assert torch.equal(ktlib.matmul(imaginary, a), (-a) @ a)


def test_a_negated_out_is_written_with_the_right_sign(a: Any) -> None:
    out = torch._neg_view(torch.zeros(16, 16))
    assert torch.equal(ktlib.matmul(a, a, out=out), a @ a)


def test_a_negative_bit_set_later_on_the_same_tensor_is_seen(a: Any) -> None:
    assert on_a_kernel(a, a)
    expected = (-a) @ a
    x = a.clone()
    x.data = torch._neg_view(a)
    assert torch.equal(ktlib.matmul(x, a), expected)


def test_subclasses_keep_their_type(a: Any) -> None:
    class Tagged(torch.Tensor):
        pass

    tagged = a.as_subclass(Tagged)
    assert type(ktlib.matmul(tagged, a)) is Tagged
    assert not on_a_kernel(tagged, a)


def test_fake_tensors_never_reach_a_kernel(a: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(a)
        result = ktlib.matmul(fake, fake)
    assert type(result).__name__ == "FakeTensor"
    assert result.shape == (16, 16)


def test_fake_and_meta_operands_with_out_or_strides_go_to_torch(a: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings(), FakeTensorMode() as mode:
        warnings.simplefilter("error")  # torch warns when the address of a fake tensor is asked for
        fake = mode.from_tensor(a)
        stack = torch.empty(4, 16, 16)
        assert ktlib.explain(fake, fake, torch.empty(16, 16)).tier == "vendor"
        out = torch.empty(16, 16)
        assert ktlib.matmul(fake, fake, out=out) is out
        assert ktlib.matmul(stack.transpose(0, 1), fake).shape == (16, 4, 16)
        assert ktlib.matmul(stack, fake, out=torch.empty(4, 16, 16)).shape == (4, 16, 16)
        assert ktlib.matmul(fake[:, 0], fake).shape == (16,)
        assert ktlib.matmul(fake[:, :0], fake[:0], out=out) is out
    meta = a.to("meta")
    assert ktlib.matmul(meta, meta, out=torch.empty(16, 16, device="meta")).device.type == "meta"


def test_a_dispatch_mode_sees_products_of_plain_tensors(a: Any) -> None:
    # Under FakeTensorMode torch's allocator hands out memory that is not there.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    assert on_a_kernel(a, a)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert "dispatch mode" in ktlib.explain(a, a).reason
        assert type(ktlib.matmul(a, a)).__name__ == "FakeTensor"
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(ktlib.matmul(a, a), a @ a)
    assert counter.get_total_flops() == 2 * 2 * 16**3
    assert on_a_kernel(a, a)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_autocast_decides_the_dtype_as_for_torch(a: Any, half: str) -> None:
    dtype = getattr(torch, half)
    w = torch.nn.Parameter(a.clone())
    assert on_a_kernel(a, a)
    with torch.autocast("cpu", dtype=dtype):
        assert "autocast" in ktlib.explain(a, a).reason
        for left, right in ((a, a), (a.to(dtype), a), (a, w), (a.to(dtype), w), (a.expand(2, 16, 16), a)):
            result, expected = ktlib.matmul(left, right), torch.matmul(left, right)
            assert result.dtype == expected.dtype == dtype
            assert torch.equal(result, expected)
        with torch.autocast("cpu", enabled=False):
            assert on_a_kernel(a, a)
    assert ktlib.matmul(a, a).dtype == torch.float32
    torch.set_autocast_enabled("cuda", True)  # is about CUDA operands
    try:
        assert on_a_kernel(a, a)
    finally:
        torch.set_autocast_enabled("cuda", False)
    with pytest.raises(TypeError, match="both alike"):
        ktlib.matmul(a.to(dtype), a)


def test_autocast_of_one_thread_does_not_reach_another(a: Any) -> None:
    seen: list[Any] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        thread = threading.Thread(target=lambda: seen.append(ktlib.matmul(a, a).dtype))
        thread.start()
        thread.join()
    assert seen == [torch.float32]


def test_modes_are_asked_directly_and_calibration_leaves_them_as_they_were() -> None:
    program = (
        "import torch, ktlib\nfrom ktlib import _core\na = torch.ones(4, 4)\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    assert ktlib.matmul(a, a).dtype == torch.bfloat16\n"  # the first use of torch calibrates
        "    assert torch.is_autocast_enabled('cpu') and not torch.is_autocast_enabled('cuda')\n"
        "assert not torch.is_autocast_enabled('cpu')\n"
        "assert torch._C._len_torch_dispatch_stack() == 0\n"
        "print(_core.torch_modes_direct())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_vmap_and_grad_transforms_see_the_product(a: Any) -> None:
    stack = torch.stack([a, a + 1])
    assert torch.equal(torch.vmap(lambda x: ktlib.matmul(x, a))(stack), stack @ a)
    gradient = torch.func.grad(lambda x: ktlib.matmul(x, a).sum())(a)
    assert torch.equal(gradient, torch.ones(16, 16) @ a.T)


def test_meta_and_sparse_tensors_go_to_torch(a: Any) -> None:
    assert ktlib.matmul(a.to("meta"), a.to("meta")).device.type == "meta"
    assert torch.equal(ktlib.matmul(a.to_sparse(), a), a @ a)


def test_a_saved_tensor_overwritten_through_out_is_noticed(a: Any) -> None:
    # autograd must refuse the stale value, whichever alias was written.
    w = torch.ones(16, 16, requires_grad=True)
    for alias in (lambda t: t, lambda t: t.detach(), lambda t: t.view(16, 16), lambda t: t[:]):
        saved = torch.zeros(16, 16)
        graph = (w * saved).sum()
        ktlib.matmul(a, a, out=alias(saved))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


def test_an_inference_tensor_can_be_out(a: Any) -> None:
    with torch.inference_mode():
        out = torch.zeros(16, 16)
        assert torch.equal(ktlib.matmul(a, a, out=out), a @ a)


def test_results_and_operands_are_released(a: Any) -> None:
    out = torch.empty(16, 16)
    for _ in range(50):
        ktlib.matmul(a, a, out=out)
        ktlib.matmul(a, a)
    counts = [sys.getrefcount(x) for x in (a, out, None)]
    for _ in range(1000):
        ktlib.matmul(a, a, out=out)
        ktlib.matmul(a, a)
    assert [sys.getrefcount(x) for x in (a, out)] == counts[:2]
    assert abs(sys.getrefcount(None) - counts[2]) < 100
    gc.collect()


def test_reduced_precision_switches_come_back_once_whatever_the_order() -> None:
    switches = torch.backends.cuda.matmul
    before = switches.allow_fp16_reduced_precision_reduction
    try:
        switches.allow_fp16_reduced_precision_reduction = True
        inside, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with libraries.TORCH.fp32_reduction("fp16"):
                inside.set()
                leave.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        with libraries.TORCH.fp32_reduction("fp16"):
            assert switches.allow_fp16_reduced_precision_reduction is False
        assert switches.allow_fp16_reduced_precision_reduction is False  # the other thread is still inside
        leave.set()
        thread.join()
        assert switches.allow_fp16_reduced_precision_reduction is True
        switches.allow_fp16_reduced_precision_reduction = (False, False)
        with libraries.TORCH.fp32_reduction("fp16"):
            assert switches.allow_fp16_reduced_precision_reduction_split_k is False
        assert switches.allow_fp16_reduced_precision_reduction_split_k is False
    finally:
        switches.allow_fp16_reduced_precision_reduction = before
