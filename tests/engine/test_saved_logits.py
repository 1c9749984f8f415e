"""Logits that wait for backward: how many there are, where they go, and that none is read once it is overwritten."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.support.allocation import AllocationTracker
from tests.support.linear_head import SCORERS, Head

ROWS, HIDDEN, VOCAB = 60, 7, 301
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Some of the slices wait for backward, all of them do, none does.
COLUMNS = [256, 5000, 1]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_scorer = pytest.mark.parametrize("what", SCORERS)
each_budget = pytest.mark.parametrize("columns", COLUMNS)


def leaves(head: Head) -> list[Tensor]:
    assert head.bias is not None
    return [each.clone().requires_grad_() for each in (head.hidden, head.weight, head.bias)]


def loss_of(head: Head, what: str, tensors: list[Tensor], columns: int = 256) -> Tensor:
    """A scalar that gives back the head's gradients."""
    outputs = head.scored(what, *tensors, chunk_bytes=max(columns * ROWS * head.hidden.element_size(), 1))
    given = [(each, head.d_entropy if name == "entropy" else head.d_log_probs) for name, each in outputs.items()]
    terms = [each @ gradient for each, gradient in given if each.requires_grad or not torch.is_grad_enabled()]
    return sum(terms[1:], terms[0])


def head_of(dtype: torch.dtype = torch.float32) -> Head:
    return Head.random(ROWS, HIDDEN, VOCAB, dtype, bias=True, temperature="rows")


def live_bytes(reentrant: bool | None) -> int:
    """What stands between forward and backward; without `reentrant`, of a forward that is not checkpointed."""
    head = head_of()
    tensors = leaves(head)
    with AllocationTracker() as seen:
        if reentrant is None:
            loss = loss_of(head, "loss", tensors, 5000)
        else:
            loss = checkpoint(lambda *each: loss_of(head, "loss", [*each], 5000), *tensors, use_reentrant=reentrant)
        live = seen.live_bytes
    plain = torch.autograd.grad(loss_of(head, "loss", tensors, 5000), tensors)
    loss.backward()
    assert all(torch.equal(each.grad, other) for each, other in zip(tensors, plain, strict=True))
    return live


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_leaves_no_logits_alive(reentrant: bool) -> None:
    whole = ROWS * VOCAB * 4
    assert live_bytes(reentrant) < whole / 10
    assert live_bytes(None) > whole, "what this test sees where nothing is checkpointed"


@each_scorer
def test_no_grad_keeps_none_and_has_the_same_bits(what: str) -> None:
    head = head_of()
    trained = head.compact(what)
    for mode in (torch.no_grad(), torch.inference_mode(), nullcontext()):
        with mode, AllocationTracker() as seen:
            tensors = leaves(head) if not torch.is_grad_enabled() else [head.hidden, head.weight, head.bias]
            before = seen.live_bytes
            outputs = head.scored(what, *tensors)
            assert seen.live_bytes - before <= sum(each.nbytes for each in outputs.values()) + ROWS * 64
        assert not any(each.requires_grad for each in outputs.values())
        assert all(torch.equal(each, trained[name]) for name, each in outputs.items())


@each_scorer
@each_dtype
@each_budget
def test_every_backward_gives_the_same_bits(what: str, dtype: torch.dtype, columns: int) -> None:
    """The first one overwrites what was kept, the others form it again; none touches what another has given back."""
    head = head_of(dtype)
    tensors = leaves(head)
    loss = loss_of(head, what, tensors, columns)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    as_they_were = [each.clone() for each in first]
    for retained in (True, False):
        again = torch.autograd.grad(loss, tensors, retain_graph=retained)
        for one, before, other in zip(first, as_they_were, again, strict=True):
            assert torch.equal(one, before) and torch.equal(one, other) and one.data_ptr() != other.data_ptr()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, tensors)


def offloaded(saved: Tensor) -> Tensor:
    return saved.detach().clone()


def strided(saved: Tensor) -> Tensor:
    """What an offloader may give back: other memory, of another layout."""
    return saved.t().contiguous().t() if saved.dim() == 2 else saved.clone()


@each_scorer
@each_dtype
@each_budget
def test_saved_tensors_that_were_moved_away_and_back(what: str, dtype: torch.dtype, columns: int) -> None:
    head = head_of(dtype)
    tensors = leaves(head)
    expected = torch.autograd.grad(loss_of(head, what, tensors, columns), tensors)
    for unpack in (offloaded, strided):
        with saved_tensors_hooks(offloaded, unpack):
            loss = loss_of(head, what, tensors, columns)
        for retained in (True, False):
            for one, other in zip(torch.autograd.grad(loss, tensors, retain_graph=retained), expected, strict=True):
                torch.testing.assert_close(one, other)


@each_budget
def test_micro_batches_that_wait_for_each_other(columns: int) -> None:
    heads = [Head.random(ROWS, HIDDEN, VOCAB, bias=True, seed=seed) for seed in range(3)]
    tensors = leaves(heads[0])
    losses = [loss_of(each, "loss", tensors, columns) for each in heads for _ in range(2)]
    alone = [torch.autograd.grad(loss_of(each, "loss", tensors, columns), tensors) for each in heads for _ in range(2)]
    for place in (1, 0, 5, 2, 3, 4):
        found = torch.autograd.grad(losses[place], tensors)
        assert all(map(torch.equal, found, alone[place]))


@pytest.mark.parametrize("columns", [256, 5000])
def test_threads_that_share_a_graph(columns: int) -> None:
    head = Head.random(ROWS, HIDDEN, 3001, bias=True)
    tensors = leaves(head)
    expected = torch.autograd.grad(loss_of(head, "loss", tensors, columns), tensors)
    together = threading.Barrier(2)

    def backward(loss: Tensor) -> tuple[Tensor, ...]:
        together.wait(timeout=60)
        return torch.autograd.grad(loss, tensors, retain_graph=True)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            loss = loss_of(head, "loss", tensors, columns)
            for found in pool.map(backward, [loss, loss]):
                assert all(map(torch.equal, found, expected))


@each_scorer
def test_nothing_is_saved_without_a_gradient_to_form(what: str) -> None:
    head, saved = head_of(), []
    with saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        head.scored(what, head.hidden, head.weight, head.bias)
        with torch.no_grad():
            head.scored(what, *leaves(head))
        assert saved == []
        head.scored(what, *leaves(head))
    assert saved


@each_scorer
@pytest.mark.parametrize("columns", [256, 1])
def test_backward_and_a_dropped_graph_free_what_forward_saved(what: str, columns: int) -> None:
    head, refs = head_of(), []

    def pack(tensor: Tensor) -> Tensor:
        refs.append(weakref.ref(packed := tensor.detach()))
        return packed

    gc.disable()
    try:
        for trained in (True, False):
            tensors = leaves(head)
            with saved_tensors_hooks(pack, lambda packed: packed):
                loss = loss_of(head, what, tensors, columns)
            assert len(refs) > 4 and all(each() is not None for each in refs)
            if trained:
                loss.backward()
            else:
                del loss
            assert [each for each in refs if each() is not None] == []
            refs.clear()
    finally:
        gc.enable()
