"""What the top-k KL of given logits holds: simulated on meta tensors, which have every size and take no memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from compact_logits import linear_topk_kl, topk_kl
from tests.support.allocation import AllocationTracker

GIB = 2**30
VOCAB, K, HIDDEN, ROWS, BUDGET = 248_320, 128, 4096, 16_384, 2**28


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def teacher(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return meta(rows, k, dtype=torch.float32), meta(rows, k, dtype=torch.int64)


def from_logits(rows: int, vocab: int, **settings: object) -> int:
    """Peak bytes of forward and backward, the logits included."""
    with AllocationTracker() as tracker:
        logits = meta(rows, vocab, grad=True)
        topk_kl(logits, *teacher(rows, K), chunk_bytes=BUDGET, **settings).loss.sum().backward()
    return tracker.peak_bytes


def from_hidden(rows: int, vocab: int, chunk_bytes: int) -> int:
    """Peak bytes beyond hidden states, weight and its gradient."""
    hidden, weight = meta(rows, HIDDEN, grad=True), meta(vocab, HIDDEN, grad=True)
    with AllocationTracker() as tracker:
        linear_topk_kl(hidden, weight, *teacher(rows, K), chunk_bytes=chunk_bytes).loss.sum().backward()
    return tracker.peak_bytes - weight.nbytes


def plain(rows: int, vocab: int) -> int:
    with AllocationTracker() as tracker:
        logits = meta(rows, vocab, grad=True)
        log_probs, ids = teacher(rows, K)
        log_p = torch.log_softmax(logits.float(), -1).gather(-1, ids)
        (log_probs.exp() * (log_probs - log_p)).sum(-1).sum().backward()
    return tracker.peak_bytes


def at_full_size(measure: Callable[..., int], **settings: object) -> float:
    """GiB at 16,384 rows, carried on from three smaller sizes, which must lie on one line."""
    few, some, more = (measure(rows, VOCAB, **settings) for rows in (2048, 3072, 4096))
    assert some - few == pytest.approx(more - some, rel=0.02)
    return (few + (more - few) * (ROWS - 2048) / 2048) / GIB


@pytest.mark.parametrize("tail", [False, True])
def test_from_logits_one_gradient_and_a_little(tail: bool) -> None:
    assert at_full_size(from_logits, tail=tail) <= 16.5
    assert at_full_size(from_logits, tail=tail, inplace_backward=True) <= 8.5
    assert at_full_size(plain) > 30


def test_from_hidden_states_next_to_nothing_beside_the_weight_gradient() -> None:
    assert from_hidden(ROWS, VOCAB, BUDGET) <= 1 * GIB
    assert from_hidden(4096, VOCAB, 2**40) > 1.5 * GIB, "of all logits at once"


def test_what_is_held_besides_does_not_grow_with_the_vocabulary() -> None:
    besides = [from_logits(256, vocab) - 2 * 256 * vocab * 2 for vocab in (VOCAB // 4, VOCAB)]
    assert besides[1] == pytest.approx(besides[0], rel=0.15)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_copied_only_to_take_the_listed_out_of_them(dtype: torch.dtype, tail: bool) -> None:
    logits = torch.randn(2, 155, 4001)[:, 5:].to(dtype).requires_grad_()
    top = torch.log_softmax(torch.randn(2, 150, 4001), -1).topk(8)
    with AllocationTracker() as tracker:
        out = topk_kl(logits, *top, tail=tail, chunk_bytes=5 * 4001 * dtype.itemsize)
    assert tracker.largest_rows(4001) == 5 * tail
    with AllocationTracker() as tracker:
        out.loss.sum().backward()
    wide = {a.storage: a.nbytes for a in tracker.records if a.shape[-1:] == (4001,)}
    assert sorted(wide.values()) == [logits.nbytes], "the gradient itself"


def test_saved_for_backward_are_the_logits_and_a_few_numbers_a_row() -> None:
    logits = torch.randn(300, 4001, requires_grad=True)
    top = torch.log_softmax(torch.randn(300, 4001), -1).topk(8)
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        topk_kl(logits, *top, tail=True)
    given = {tensor.data_ptr() for tensor in (logits, *top)}
    others = [tensor for tensor in saved if tensor.data_ptr() not in given]
    assert len(others) < len(saved)
    assert sum(tensor.numel() for tensor in others) <= (5 + 8) * 300


@pytest.mark.parametrize("changed", [0, 1], ids=["log-probs", "ids"])
def test_a_teacher_that_changed_before_backward_is_an_error(changed: int) -> None:
    logits = torch.randn(3, 20, requires_grad=True)
    top = torch.log_softmax(torch.randn(3, 20), -1).topk(4)
    loss = topk_kl(logits, *top, tail=True).loss.sum()
    top[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
