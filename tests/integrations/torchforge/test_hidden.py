"""`compute_logprobs_from_hidden`: the head's product included, plain and sharded any way that is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from compact_logits.errors import InputError
from compact_logits.integrations.torchforge import compute_logprobs_from_hidden
from tests.support.allocation import AllocationTracker
from tests.support.collectives import count_collectives
from tests.support.meshes import cut, mesh_of
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth
from tests.support.ranks import RankPool
from tests.support.torchforge_plain import plain_logprobs

R, S = Replicate(), Shard
BATCH, POSITIONS, HIDDEN = 3, 7, 6


def inputs(vocab: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, ids and the gradient that comes back, alike on every rank."""
    torch.manual_seed(vocab)
    hidden, weight = torch.randn(BATCH, POSITIONS, HIDDEN).to(dtype), torch.randn(vocab, HIDDEN).to(dtype)
    ids = torch.randint(0, vocab, (BATCH, width))
    return hidden, weight, torch.randn(vocab).to(dtype), ids, torch.randn(BATCH, width)


def dense(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, upstream: Tensor, align: bool
) -> list[Tensor]:
    """Values, then the gradient of each input, in the inputs' dtype."""
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    values = plain_logprobs(torch.nn.functional.linear(*leaves), ids, 0.7, align)
    return [values.detach(), *torch.autograd.grad(values, leaves, upstream.to(values.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_plain_tensors(dtype: torch.dtype, align: bool, with_bias: bool) -> None:
    hidden, weight, bias, ids, upstream = inputs(13, 4 if align else POSITIONS, dtype)
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)[: 3 if with_bias else 2]]
    ours = compute_logprobs_from_hidden(*leaves[:2], ids, 0.7, align, bias=bias if with_bias else None, chunk_bytes=500)
    assert ours.dtype == torch.float32 and ours.shape == ids.shape
    results = [ours.detach(), *torch.autograd.grad(ours, leaves, upstream)]
    given = (hidden.detach(), weight.detach(), bias.detach() if with_bias else None)
    plain = dense(*given, ids, upstream, align)
    truth = dense(*[g if g is None else g.double() for g in given], ids, upstream, align)
    assert_close_to_truth(results[0], plain[0], truth[0])
    for result, own, true in zip(results[1:], plain[1:], truth[1:], strict=True):
        assert_gradient_close_to_truth(result, own, true, floor=1e-5 if dtype == torch.float32 else 2e-3)


def test_logits_take_the_budget_at_most_and_are_only_of_positions_that_count() -> None:
    hidden, weight = torch.randn(2, 400, 8), torch.randn(4096, 8)
    ids = torch.randint(0, 4096, (2, 40))
    with AllocationTracker() as seen:
        values = compute_logprobs_from_hidden(hidden, weight, ids, chunk_bytes=2**19)
    torch.testing.assert_close(values, plain_logprobs(hidden @ weight.T, ids), atol=1e-5, rtol=0)
    assert 2**17 < max(each.nbytes for each in seen.records) <= 2**18, "a slice is half of the budget"
    with AllocationTracker() as whole:
        compute_logprobs_from_hidden(hidden, weight, ids)
    assert 2**19 < max(each.nbytes for each in whole.records) <= 80 * 4096 * 4


def on_mesh(
    rank: int,
    world: int,
    sizes: tuple[int, ...],
    hidden_at: list[Placement] | None,
    weight_at: list[Placement],
    vocab: int,
    align: bool,
    ids_form: str,
    check_ranks: bool,
) -> dict[str, int]:
    mesh = mesh_of(*sizes)
    hidden, weight, bias, ids, upstream = inputs(vocab, 4 if align else POSITIONS)
    truth = dense(hidden, weight, bias, ids, upstream, align)
    rows = [R if p == S(1) else p for p in hidden_at] if hidden_at else [R] * len(sizes)
    leaf = hidden.requires_grad_() if hidden_at is None else cut(hidden, mesh, hidden_at, grad=True)
    leaves = [leaf, cut(weight, mesh, weight_at, grad=True), cut(bias, mesh, weight_at, grad=True)]
    given_ids = cut(ids, mesh, rows) if ids_form == "shared" else cut(ids, mesh, rows).to_local()
    with count_collectives() as counts:
        options: Any = {"bias": leaves[2], "chunk_bytes": 300, "check_ranks": check_ranks}
        ours = compute_logprobs_from_hidden(*leaves[:2], given_ids, 0.7, align, **options)
        back = cut(upstream, mesh, rows)
        grads = torch.autograd.grad(ours, leaves, back if ids_form == "shared" else back.to_local())
    values = (
        ours.detach()
        if isinstance(ours, DTensor)
        else DTensor.from_local(ours.detach(), mesh, rows, run_check=False, shape=ids.shape, stride=ids.stride())
    )
    assert isinstance(ours, DTensor) == (ids_form == "shared") and list(values.placements) == rows
    torch.testing.assert_close(values.full_tensor(), truth[0], atol=1e-5, rtol=0)
    for leaf, grad, true in zip(leaves, grads, truth[1:], strict=True):
        if isinstance(leaf, DTensor):
            assert isinstance(grad, DTensor) and grad.placements == leaf.placements
            grad = grad.full_tensor()
        torch.testing.assert_close(grad, true, atol=1e-5, rtol=1e-5)
    return dict(counts)


@pytest.mark.parametrize("ids_form", ["plain", "shared"])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize(
    ("world", "sizes", "hidden_at", "weight_at", "vocab"),
    [
        (2, (2,), None, [S(0)], 13),
        (2, (2,), [R], [S(0)], 13),
        (2, (2,), [S(1)], [S(0)], 13),
        (4, (4,), [R], [S(0)], 5),  # a rank without vocabulary
        (4, (4,), [S(1)], [S(0)], 13),  # 7 positions: 2, 2, 2, 1
        (4, (2, 2), [S(0), R], [R, S(0)], 13),
        (4, (2, 2), [S(0), S(1)], [R, S(0)], 13),
        (4, (2, 2), [R, S(0)], [S(0), R], 13),
        (4, (2, 2), [S(0), R], [R, R], 13),
    ],
)
def test_every_mesh_gives_dense_values_and_gradients(
    rank_pool: RankPool,
    world: int,
    sizes: tuple[int, ...],
    hidden_at: list[Placement] | None,
    weight_at: list[Placement],
    vocab: int,
    align: bool,
    ids_form: str,
) -> None:
    check_ranks = align == (ids_form == "plain")  # with the comparison and without
    counts = rank_pool.run(world, on_mesh, sizes, hidden_at, weight_at, vocab, align, ids_form, check_ranks)
    assert all(each == counts[0] for each in counts)
    vocabulary_is_cut = S(0) in weight_at
    if hidden_at is not None and S(1) in hidden_at:
        assert counts[0]["all_gather_into_tensor"] == 2 + check_ranks and counts[0]["reduce_scatter_tensor"] == 1
    elif vocabulary_is_cut:
        assert counts[0]["all_gather_into_tensor"] == 1 + check_ranks and counts[0]["all_reduce"] == 1
    batch_is_cut = hidden_at is not None and S(0) in hidden_at
    assert counts[0].get("functional.all_reduce", 0) == (2 if batch_is_cut else 0)  # the weight's and the bias's


def refusals(rank: int, world: int) -> list[str]:
    mesh = mesh_of(2, 2)
    hidden, weight, _, ids, _ = inputs(12, 4)
    here = cut(weight, mesh, [R, S(0)])
    cases = [
        (hidden, here),
        (cut(hidden, mesh, [R, R]), weight),
        (cut(hidden, mesh_of(4), [R]), here),
        (cut(hidden, mesh, [R, S(0)]), here),
        (cut(hidden, mesh, [S(1), R]), here),
        (DTensor.from_local(hidden, mesh, [R, Partial()], run_check=False), here),
        (cut(hidden, mesh, [R, R]), cut(weight, mesh, [R, S(1)])),
        (hidden, cut(weight, mesh, [S(0), S(0)])),
        (hidden[0], weight),
    ]
    messages = []
    for given, given_weight in cases:
        with pytest.raises(InputError) as error:
            compute_logprobs_from_hidden(given, given_weight, ids)
        messages.append(str(error.value))
    return messages


def test_refusals_say_what_to_do(rank_pool: RankPool) -> None:
    parts = [
        "a plain hidden does not say whether its rows differ over mesh axes [0]",
        "hidden is a DTensor and lm_head_weight a plain tensor; pass both in the same form",
        "needed the weight's mesh",
        "on mesh axis 1, needed Replicate() or Shard(1) there; redistribute it",
        "on mesh axis 0, needed Replicate() or Shard(0) there; redistribute it",
        "needed Replicate() or Shard(1) there; redistribute it",
        "lm_head_weight is (12, 6) with R on 'dp', S(1) on 'tp': dimension 1 is sharded",
        "the vocabulary, dimension 0, is sharded on two mesh axes",
        "needed hidden (batch, positions, hidden) and a weight (vocab, hidden)",
    ]
    for messages in rank_pool.run(4, refusals):
        for message, part in zip(messages, parts, strict=True):
            assert part in message


@pytest.mark.parametrize("bias", [0, "x", [0.0] * 12])
def test_a_bias_that_is_no_tensor_is_named(bias: object) -> None:
    hidden, weight, _, ids, _ = inputs(12, 4)
    with pytest.raises(InputError, match="needed a tensor as bias, got "):
        compute_logprobs_from_hidden(hidden, weight, ids, bias=bias)  # type: ignore[arg-type]
