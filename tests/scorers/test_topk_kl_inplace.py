"""The gradient written over logits that are given up: the same numbers, one large tensor, and no silent misuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact_logits import topk_kl
from tests.support.allocation import AllocationTracker
from tests.support.topk_case import TopKCase, topk_case

ROWS, VOCAB = 60, 3001


def projected(case: TopKCase) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, and logits that are a result, as a model's are."""
    hidden = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    return hidden, weight, (hidden @ weight.t()).to(case.logits.dtype)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_gradients_bit_for_bit(dtype: torch.dtype, tail: bool) -> None:
    case = topk_case(ROWS, vocab=VOCAB, k=8, dtype=dtype)
    gradients = []
    for inplace in (False, True):
        hidden, weight, logits = projected(case)
        topk_kl(logits, *case[1:], tail=tail, inplace_backward=inplace).loss.sum().backward()
        gradients.append((hidden.grad, weight.grad))
    for kept, given_up in zip(*gradients, strict=True):
        assert torch.equal(kept, given_up)


@pytest.mark.parametrize("inplace", [False, True])
def test_one_large_tensor_in_all(inplace: bool) -> None:
    case = topk_case(ROWS, vocab=VOCAB, k=8)
    _, _, logits = projected(case)
    logits = logits.detach().requires_grad_()
    with AllocationTracker() as tracker:
        out = topk_kl(logits, *case[1:], inplace_backward=inplace, chunk_bytes=2**20)
        out.loss.sum().backward()
    large = {a.storage for a in tracker.records if a.nbytes >= logits.numel() * 4}
    assert len(large) == (0 if inplace else 1)
    assert (logits.grad.data_ptr() == logits.data_ptr()) is inplace


def test_off_by_default_nothing_is_written() -> None:
    case = topk_case(ROWS, vocab=VOCAB, k=8)
    before = case.logits.detach().clone()
    topk_kl(*case).loss.sum().backward()
    assert torch.equal(case.logits, before)


def test_without_a_backward_nothing_is_written() -> None:
    case = topk_case(ROWS, vocab=VOCAB, k=8)
    before = case.logits.detach().clone()
    with torch.no_grad():
        topk_kl(*case, inplace_backward=True)
    topk_kl(*case, inplace_backward=True)
    assert torch.equal(case.logits, before)


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    case = topk_case(ROWS, vocab=VOCAB, k=8)
    loss = topk_kl(*case, inplace_backward=True).loss.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_somebody_else_who_saved_the_logits_is_told() -> None:
    case = topk_case(ROWS, vocab=VOCAB, k=8)
    logits = case.logits * 1.0
    squares = (logits**2).sum()
    topk_kl(logits, *case[1:], inplace_backward=True).loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
