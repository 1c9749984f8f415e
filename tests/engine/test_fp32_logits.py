"""fp32 logits of a 16-bit head: refused where the device has no such product; around it, the engine is the same.

Only CUDA has the product, so that a CPU's stands in for it here: everything else is what runs there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs
from compact_logits.engine.matmul import add_product_, narrowed
from compact_logits.errors import InputError
from tests.support.allocation import AllocationTracker
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.parity import assert_close_to_truth

each_budget = pytest.mark.parametrize("chunk_bytes", [1, 40_000, None])


@pytest.fixture
def wide_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(left: Tensor, right: Tensor, out: Tensor) -> None:
        out.copy_(left.to(out.dtype) @ right.to(out.dtype))

    monkeypatch.setattr("compact_logits.engine.matmul._offers_wide_product", lambda rows: True)
    monkeypatch.setattr("compact_logits.engine.matmul._wide_product", product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_device_without_the_product_is_refused(dtype: torch.dtype) -> None:
    head = Head.random(5, 4, 7, dtype)
    with pytest.raises(
        InputError, match=f"^fp32 logits of {dtype} need a product with an fp32 result, .* on CUDA; got"
    ):
        head.compact(fp32_logits=True)


def test_a_head_that_is_wide_already_needs_no_such_product() -> None:
    head = Head.random(5, 4, 7)
    ours, same = head.compact(fp32_logits=True), head.compact()
    assert all(torch.equal(ours[name], same[name]) for name in same)


@pytest.mark.usefixtures("wide_product")
def test_a_torch_that_forms_wide_products_but_adds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, then, whose products are added one by one; without the fallback torch's error would come."""
    left, right = torch.randn(50, 7).bfloat16(), torch.randn(7, 30).bfloat16()
    before = torch.randn(50, 30)
    for addend_bytes in (1, 4 * 30 * 8, 2**20):
        monkeypatch.setattr("compact_logits.engine.matmul._ADDEND_BYTES", addend_bytes)
        total = before.clone()
        add_product_(total, left, right)
        torch.testing.assert_close(
            total.double(), before.double() + left.double() @ right.double(), rtol=1e-5, atol=1e-5
        )
    monkeypatch.setattr("compact_logits.engine.matmul._adds_to_wide", lambda dtype, device: True)
    with pytest.raises((AttributeError, RuntimeError)):
        add_product_(before.clone(), left, right)


@pytest.mark.parametrize(("m", "k"), [(64, 48), (48, 64), (64, 64), (300, 1), (1, 300)])
def test_factors_are_widened_a_part_at_a_time(m: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compact_logits.engine.matmul._UPCAST_BYTES", 2**14)
    random = torch.Generator().manual_seed(m)
    left, right = (torch.randn(*size, generator=random).bfloat16() for size in ((m, k), (k, 1024)))
    total = torch.randn(m, 1024, generator=random)
    expected = total.double() + left.double() @ right.double()
    with AllocationTracker() as seen:
        add_product_(total, left, right)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    assert seen.peak_bytes <= 2 * 2**14 < 4 * max(right.numel(), 2**14)


@each_budget
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
@pytest.mark.usefixtures("wide_product")
def test_as_good_as_plain_and_values_far_better(entropy: str, bias: bool, chunk_bytes: int | None) -> None:
    head = Head.random(64, 16, 300, torch.bfloat16, bias=bias, temperature="rows")
    ours, plain, truth = (
        head.compact(entropy, fp32_logits=True, chunk_bytes=chunk_bytes),
        head.plain(entropy),
        head.truth(entropy),
    )
    assert_as_good_as_plain(ours, plain, truth)
    assert_close_to_truth(ours["log_probs"], plain["log_probs"], truth["log_probs"], factor=0.01, floor=1e-6)
    with pytest.raises(AssertionError, match="largest error"):
        rounded = head.compact(entropy, chunk_bytes=chunk_bytes)["log_probs"]
        assert_close_to_truth(rounded, plain["log_probs"], truth["log_probs"], factor=0.01, floor=1e-6)


@each_budget
@pytest.mark.usefixtures("wide_product")
def test_the_gradient_is_written_over_the_logits(chunk_bytes: int | None) -> None:
    head = Head.random(64, 16, 301, torch.bfloat16)
    hidden = head.hidden.requires_grad_()
    result = linear_log_probs(hidden, head.weight, head.targets, chunk_bytes=chunk_bytes, fp32_logits=True)
    with AllocationTracker() as tracker:
        (first,) = torch.autograd.grad(result.log_probs.sum(), hidden, retain_graph=True)
    rows = 64 if chunk_bytes is None else 40_000 // (301 * 4)
    assert tracker.largest_rows(301) < rows or chunk_bytes is None
    (second,) = torch.autograd.grad(result.log_probs.sum(), hidden)
    assert torch.equal(first, second)


def test_narrowed_takes_the_first_half_of_the_memory() -> None:
    logits = torch.zeros(3, 5)
    narrow = narrowed(logits, torch.bfloat16)
    assert narrow.shape == (3, 5) and narrow.data_ptr() == logits.data_ptr()
    narrow.fill_(1.0)
    assert int((logits.view(-1).view(torch.bfloat16) == 1).sum()) == 15
    assert narrowed(logits, torch.float32) is logits
