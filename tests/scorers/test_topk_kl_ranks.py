"""The top-k KL over a sharded vocabulary: uneven and empty shards, ids anywhere, and a fixed number of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compact_logits import TopKKL, VocabShard, linear_topk_kl, topk_kl
from tests.support.collectives import count_collectives
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth
from tests.support.ranks import RankPool
from tests.support.topk_case import TopKCase, plain, topk_case

VOCAB, K, HIDDEN = 40, 9, 12
CUTS = {
    1: [[0, 40]],
    2: [[0, 20, 40], [0, 3, 40], [0, 40, 40]],
    4: [[0, 10, 20, 30, 40], [0, 5, 5, 33, 40]],  # narrower than k, and empty
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"log_prob_min_clamp": -4.0, "temperature": 0.8},
    {"tail": True},
    {"tail": True, "temperature": 1.3},
]


def shard_of(rank: int, cuts: list[int]) -> VocabShard:
    assert dist.group.WORLD is not None
    return VocabShard(cuts[rank], cuts[rank + 1], dist.group.WORLD)


def spread_case(rows: int) -> TopKCase:
    """Teachers whose ids lie on all shards, one of them twice."""
    case = topk_case(rows, vocab=VOCAB, k=K)
    ids = case.ids.clone()
    ids[0] = torch.arange(K) * (VOCAB // K)
    ids[1, 2] = ids[1, 0]
    return case._replace(ids=ids)


def on_a_rank(rank: int, world: int, cuts: list[int], settings: dict[str, Any], rows: int) -> tuple[Any, ...]:
    shard = shard_of(rank, cuts)
    case = spread_case(14)
    z = case.logits.detach()[:rows, shard.start : shard.stop].clone().requires_grad_()
    teacher = case.log_probs[:rows], case.ids[:rows]
    with count_collectives() as forward:
        out = topk_kl(z, *teacher, shard=shard, **settings)
    with count_collectives() as backward:
        out.loss.sum().backward()
    return tuple(None if v is None else v.detach() for v in out), z.grad, dict(forward), dict(backward)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("cuts", [cuts for world in CUTS.values() for cuts in world], ids=str)
def test_sharded_is_as_good_as_plain_code_on_one_rank(
    rank_pool: RankPool, cuts: list[int], settings: dict[str, Any]
) -> None:
    world = len(cuts) - 1
    answers = rank_pool.run(world, on_a_rank, cuts, settings, 14)
    case = spread_case(14)
    same, d_same = plain(case, torch.ones(14), torch.float32, **settings)
    truth, d_truth = plain(case, torch.ones(14), torch.float64, **settings)
    for outputs, _, forward, backward in answers:
        named = TopKKL(*outputs)._asdict()
        for name, value in named.items():
            if name == "overlap_count":
                assert torch.equal(value, truth[name])
            elif value is not None:
                assert_close_to_truth(value, same[name].detach(), truth[name].detach(), limit=1e-4, name=name)
        assert forward == ({"all_gather_into_tensor": 3} if world > 1 else {})
        assert backward == {}
    gradient = torch.cat([answer[1] for answer in answers], dim=1)
    assert_gradient_close_to_truth(gradient, d_same, d_truth)
    for outputs, *_ in answers[1:]:
        assert all(a is None or torch.equal(a, b) for a, b in zip(answers[0][0], outputs, strict=True)), "bits differ"


@pytest.mark.parametrize("tail", [False, True])
def test_without_a_row_every_rank_still_makes_the_same_calls(rank_pool: RankPool, tail: bool) -> None:
    for outputs, gradient, forward, backward in rank_pool.run(2, on_a_rank, [0, 20, 40], {"tail": tail}, 0):
        assert all(value is None or value.shape == (0,) for value in outputs)
        assert gradient.shape == (0, 20)
        assert (forward, backward) == ({"all_gather_into_tensor": 3}, {})


def counted(
    rank: int, world: int, chunk_bytes: int, kind: str, check_ranks: bool
) -> tuple[dict[str, int], dict[str, int]]:
    shard = shard_of(rank, [0, 15, VOCAB])
    case = topk_case(50, vocab=VOCAB, k=K)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(50, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)[shard.start : shard.stop].clone().requires_grad_()
    options: Any = {"shard": shard, "chunk_bytes": chunk_bytes, "check_ranks": check_ranks}
    with count_collectives() as forward:
        if kind == "logits":
            z = case.logits.detach()[:, shard.start : shard.stop].clone().requires_grad_()
            out = topk_kl(z, *case[1:], **options)
        else:
            out = linear_topk_kl(hidden, weight, *case[1:], **options)
    with count_collectives() as backward:
        out.loss.sum().backward()
    return dict(forward), dict(backward)


@pytest.mark.parametrize("check_ranks", [True, False])
@pytest.mark.parametrize("kind", ["logits", "hidden"])
def test_no_more_collectives_with_more_chunks(rank_pool: RankPool, kind: str, check_ranks: bool) -> None:
    one, many = (rank_pool.run(2, counted, budget, kind, check_ranks) for budget in (2**28, 2**11))
    assert one == many
    expected = {} if kind == "logits" else {"all_reduce": 1}
    assert one == [({"all_gather_into_tensor": 2 + check_ranks}, expected)] * 2


class Messages(TorchDispatchMode):
    """How many numbers each collective sends, seen where all of them pass."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.sent.append(min(tensor.numel() for tensor in tensors))
        return func(*args, **(kwargs or {}))


def message_sizes(rank: int, world: int) -> list[int]:
    shard = shard_of(rank, [0, 2000, 4000])
    case = topk_case(6, vocab=4000, k=K)
    with Messages() as messages:
        topk_kl(case.logits.detach()[:, shard.start : shard.stop], *case[1:], shard=shard, tail=True)
    return messages.sent


def test_what_travels_is_a_few_numbers_a_row_and_no_vocabulary(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, message_sizes) == [[12, 6 * (K + 3), 6 * 6]] * 2


def a_foreign_id(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    shard = shard_of(rank, [0, 20, 40])
    case = topk_case(3, vocab=VOCAB, k=K)
    ids = case.ids.clone()
    ids[1, 4] = 40
    z = case.logits.detach()[:, shard.start : shard.stop].clone().requires_grad_()
    loss = topk_kl(z, case.log_probs, ids, shard=shard).loss
    loss.sum().backward()
    return loss.detach(), z.grad


def test_an_id_that_no_shard_has_gives_no_number(rank_pool: RankPool) -> None:
    for loss, gradient in rank_pool.run(2, a_foreign_id):
        assert loss.isnan().tolist() == [False, True, False]
        assert gradient.isnan().all(dim=1).tolist() == [False, True, False]
        assert bool(gradient[::2].isfinite().all())


def a_teacher_not_a_number(rank: int, world: int, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    shard = shard_of(rank, [0, 20, 40])
    case = spread_case(3)
    log_probs = case.log_probs.clone()
    log_probs[0, K - 1] = torch.nan  # an id of the second rank's
    z = case.logits.detach()[:, shard.start : shard.stop].clone().requires_grad_()
    loss = topk_kl(z, log_probs, case.ids, shard=shard, log_prob_min_clamp=clamp).loss
    loss.sum().backward()
    return loss.detach(), z.grad


@pytest.mark.parametrize("clamp", [None, -0.01])
def test_a_teacher_that_is_not_a_number_gives_none_on_any_rank(rank_pool: RankPool, clamp: float | None) -> None:
    for loss, gradient in rank_pool.run(2, a_teacher_not_a_number, clamp):
        assert loss.isnan().tolist() == gradient.isnan().all(dim=1).tolist() == [True, False, False]
        assert bool(gradient[1:].isfinite().all())


def from_hidden(rank: int, world: int, cuts: list[int], tail: bool) -> tuple[torch.Tensor, ...]:
    shard = shard_of(rank, cuts)
    hidden, weight, bias, case = a_head()
    mine = weight[shard.start : shard.stop].clone().requires_grad_()
    my_bias = bias[shard.start : shard.stop].clone().requires_grad_()
    out = linear_topk_kl(hidden, mine, *case[1:], bias=my_bias, shard=shard, tail=tail, chunk_bytes=4000)
    out.loss.sum().backward()
    return out.loss.detach(), hidden.grad, mine.grad, my_bias.grad


def a_head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TopKCase]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(14, HIDDEN, generator=generator, requires_grad=True)
    weight, bias = torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, generator=generator)
    return hidden, weight, bias, spread_case(14)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("cuts", [[0, 40], [0, 20, 40], [0, 5, 5, 33, 40]], ids=str)
def test_from_hidden_states_every_gradient_is_the_plain_one(rank_pool: RankPool, cuts: list[int], tail: bool) -> None:
    answers = rank_pool.run(len(cuts) - 1, from_hidden, cuts, tail)
    plains = []
    for dtype in (torch.float32, torch.float64):
        hidden, weight, bias, case = a_head()
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)]
        on_logits = case._replace(logits=leaves[0] @ leaves[1].t() + leaves[2])
        z = on_logits.logits
        out, d_z = plain(on_logits, torch.ones(14), dtype, tail=tail)
        z.backward(d_z)
        plains.append((out["loss"].detach(), *[leaf.grad for leaf in leaves]))
    loss, d_hidden, d_weight, d_bias = (
        answers[0][0],
        answers[0][1],
        *(torch.cat([answer[i] for answer in answers]) for i in (2, 3)),
    )
    assert_close_to_truth(loss, plains[0][0], plains[1][0])
    for ours, same, truth in zip((d_hidden, d_weight, d_bias), plains[0][1:], plains[1][1:], strict=True):
        assert_gradient_close_to_truth(ours, same, truth)
    assert all(torch.equal(answer[1], d_hidden) for answer in answers), "summed over the group, once"
