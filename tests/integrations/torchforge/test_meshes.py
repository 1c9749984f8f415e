"""`compute_logprobs` on meshes of several axes: the form of ids and results, gradients, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from compact_logits.errors import InputError
from compact_logits.integrations.torchforge import compute_logprobs
from tests.support.allocation import AllocationTracker
from tests.support.meshes import cut, mesh_of
from tests.support.ranks import RankPool
from tests.support.torchforge_plain import plain_logprobs

R, S = Replicate(), Shard


def dense(logits: Tensor, ids: Tensor, upstream: Tensor, align: bool) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    values = plain_logprobs(leaf, ids, 0.7, align)
    values.backward(upstream)
    assert leaf.grad is not None
    return values.detach(), leaf.grad


def on_mesh(
    rank: int, world: int, sizes: tuple[int, ...], placements: list[Placement], batch: int, align: bool, ids_form: str
) -> None:
    torch.manual_seed(1)
    mesh, vocab, positions = mesh_of(*sizes), 7, 4
    logits, width = torch.randn(batch, positions, vocab), 2 if align else positions
    ids, upstream = torch.randint(0, vocab, (batch, width)), torch.randn(batch, width)
    values, d_logits = dense(logits, ids, upstream, align)
    leaf = cut(logits, mesh, placements, grad=True)
    rows = [R if p == S(2) else p for p in placements]
    local_ids = cut(ids, mesh, rows).to_local()
    local_upstream = cut(upstream, mesh, rows).to_local()
    given = {"plain": local_ids, "as the rows": cut(ids, mesh, rows), "replicated": cut(ids, mesh, [R] * len(sizes))}
    ours = compute_logprobs(leaf, given[ids_form], 0.7, align)
    if ids_form == "plain":
        assert type(ours) is Tensor
        ours.backward(local_upstream)
        local = ours.detach()
    else:
        assert isinstance(ours, DTensor) and list(ours.placements) == rows and ours.shape == ids.shape
        ours.backward(cut(upstream, mesh, rows))
        torch.testing.assert_close(ours.detach().full_tensor(), values, atol=1e-5, rtol=0)
        local = ours.detach().to_local()
    torch.testing.assert_close(local, cut(values, mesh, rows).to_local(), atol=1e-5, rtol=0)
    assert isinstance(leaf.grad, DTensor) and leaf.grad.placements == leaf.placements
    torch.testing.assert_close(leaf.grad.full_tensor(), d_logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("ids_form", ["plain", "as the rows", "replicated"])
@pytest.mark.parametrize(
    ("sizes", "placements", "batch", "align"),
    [
        ((2, 2), [S(0), S(2)], 4, True),
        ((2, 2), [S(2), S(0)], 4, True),
        ((2, 2), [S(0), S(2)], 3, True),  # uneven batch
        ((2, 2), [S(0), S(2)], 1, True),  # a row of ranks without a sequence
        ((2, 2), [R, S(2)], 3, True),
        ((2, 2), [S(1), S(2)], 3, False),
        ((1, 2, 2), [R, S(0), S(2)], 3, True),
        ((2, 2), [S(0), R], 3, True),  # the vocabulary is whole everywhere
    ],
)
def test_case_6_5_every_mesh_gives_dense_values_and_gradients(
    rank_pool: RankPool, sizes: tuple[int, ...], placements: list[Placement], batch: int, align: bool, ids_form: str
) -> None:
    rank_pool.run(4, on_mesh, sizes, placements, batch, align, ids_form)


def refusals(rank: int, world: int) -> list[str]:
    mesh, ids = mesh_of(2, 2), torch.zeros(4, 2, dtype=torch.int64)
    logits = torch.zeros(4, 4, 8)
    sharded = cut(logits, mesh, [S(0), S(2)])
    cases = [
        (DTensor.from_local(logits, mesh, [R, Partial()], run_check=False), ids),
        (cut(logits, mesh, [S(2), S(2)]), ids),
        (cut(logits, mesh, [S(1), S(2)]), ids),
        (sharded, ids),  # the ids of all sequences where a rank has two of four
        (sharded, cut(ids, mesh, [R, S(0)])),
        (sharded, cut(ids, mesh_of(4), [R])),
        (logits, cut(ids, mesh, [R, R])),
        (sharded, torch.full((2, 2), 8)),
    ]
    messages = []
    for given, given_ids in cases:
        with pytest.raises(InputError) as error:
            compute_logprobs(given, given_ids)
        messages.append(str(error.value))
    return messages


def test_refusals_say_what_to_do(rank_pool: RankPool) -> None:
    answers = rank_pool.run(4, refusals)
    parts = [
        "a Partial value is not summed yet; redistribute it",
        "sharded on two mesh axes; redistribute it to one",
        "shift the ids yourself and pass align=False, or redistribute the logits",
        "2 sequences on this rank and input_ids 4; plain ids are this rank's own rows, pass a DTensor to give all",
        "or Replicate() throughout",
        "needed the mesh of the other input",
        "input_ids is a DTensor and the other input is a plain tensor",
        "must be below the vocabulary size 8, got 8",
    ]
    for messages in answers:  # on every rank alike, or one would wait for another
        for message, part in zip(messages, parts, strict=True):
            assert part in message


def largest(rank: int, world: int, gather: bool) -> tuple[int, int, float]:
    """In forward, most rows of any tensor as wide as the slice, and as the vocabulary; backward's peak in gradients."""
    torch.manual_seed(0)
    vocab, rows = 4096, 96
    leaf = cut(torch.randn(2, rows + 1, vocab).bfloat16(), mesh_of(world), [S(2)], grad=True)
    ids = torch.randint(0, vocab, (2, rows))
    with AllocationTracker() as forward:
        if gather:
            values = plain_logprobs(leaf.full_tensor(), ids)
        else:
            values = compute_logprobs(leaf, ids, chunk_bytes=2**17)
    with AllocationTracker() as backward:
        values.sum().backward()
    assert isinstance(leaf.grad, DTensor)
    share = backward.peak_bytes / leaf.grad.to_local().untyped_storage().nbytes()
    return forward.largest_rows(vocab // world), forward.largest_rows(vocab), share


def test_no_logits_are_held_beside_the_given_ones_and_their_gradient(rank_pool: RankPool) -> None:
    for narrow, wide, gradients in rank_pool.run(2, largest, False):
        assert narrow < 16 and wide == 0 and gradients < 1.5
    for _, wide, gradients in rank_pool.run(2, largest, True):
        assert wide >= 192 and gradients > 4
