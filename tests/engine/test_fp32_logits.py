"""fp32 logits of a 16-bit head: refused where the device has no such product; around it, the engine is the same.

Only CUDA has the product, so that a CPU's stands in for it here: everything else is what runs there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact_logits.errors import InputError
from tests.support.allocation import AllocationTracker
from tests.support.linear_head import SCORERS, Head, assert_as_good_as_plain
from tests.support.parity import assert_close_to_truth

OF_LOG_PROBS = [each for each in SCORERS if each in ("none", "metric", "loss", "sum_p2")]

each_budget = pytest.mark.parametrize("chunk_bytes", [1, 64 * 256 * 4, None])


@pytest.fixture
def fp32_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def project(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch.nn.functional.linear(*(None if each is None else each.to(dtype) for each in (rows, weight, bias)))

    monkeypatch.setattr("compact_logits.engine.linear.unrounded_dtype", lambda rows: torch.float32)
    monkeypatch.setattr("compact_logits.engine.linear.project", project)


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


@each_budget
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("what", OF_LOG_PROBS)
@pytest.mark.usefixtures("fp32_product")
def test_as_good_as_plain_and_values_far_better(what: str, bias: bool, chunk_bytes: int | None) -> None:
    head = Head.random(64, 16, 300, torch.bfloat16, bias=bias, temperature="rows")
    ours, plain, truth = (
        head.compact(what, fp32_logits=True, chunk_bytes=chunk_bytes),
        head.plain(what),
        head.truth(what),
    )
    assert_as_good_as_plain(ours, plain, truth)
    assert_close_to_truth(ours["log_probs"], plain["log_probs"], truth["log_probs"], factor=0.01)


def test_rounded_logits_are_not_far_better() -> None:
    head = Head.random(64, 16, 300, torch.bfloat16)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close_to_truth(*(of["log_probs"] for of in (head.compact(), head.plain(), head.truth())), factor=0.01)


@each_budget
@pytest.mark.usefixtures("fp32_product")
def test_the_budget_is_that_of_fp32_logits(chunk_bytes: int | None) -> None:
    head = Head.random(64, 16, 301, torch.bfloat16)
    hidden, weight = (each.clone().requires_grad_() for each in (head.hidden, head.weight))
    with AllocationTracker() as seen:
        outputs = head.scored("none", hidden, weight, None, chunk_bytes=chunk_bytes, fp32_logits=True)
        first = torch.autograd.grad(outputs["log_probs"].sum(), (hidden, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(outputs["log_probs"].sum(), (hidden, weight))))
    widest = max(each.nbytes for each in seen.records if each.shape[:1] == (64,) and 16 not in each.shape)
    assert widest <= (64 * 301 * 4 if chunk_bytes is None else max(chunk_bytes, 64 * 64 * 4))
