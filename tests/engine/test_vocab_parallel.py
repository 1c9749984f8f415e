"""A vocabulary cut over ranks gives what one rank gives: any cut, each output, each gradient, each collective once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits import VocabShard, linear_log_probs, log_probs
from compact_logits.errors import DisagreementError
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of, whole, with_partial_sums

NAN, INF = math.nan, math.inf
VOCAB = 37
# Even as can be, one id alone, empty slices at either end and between.
CUTS = [
    [0, 19, 37],
    [0, 1, 37],
    [0, 37, 37],
    [0, 0, 37],
    [0, 10, 20, 30, 37],
    [0, 5, 5, 36, 37],
    [0, 0, 0, 0, 37],
]

each_cut = pytest.mark.parametrize("cuts", CUTS, ids=str)


def compact(rank: int, world: int, head: Head, cuts: list[int], entropy: str, **options: Any) -> dict[str, Any]:
    return of_rank(head, rank, cuts).compact(entropy, shard=shard_of(rank, cuts), **options)


def compact_in_few_bytes(rank: int, world: int, head: Head, cuts: list[int], entropy: str) -> dict[str, Any]:
    return compact(rank, world, head, cuts, entropy, chunk_bytes=400)


def with_logits(rank: int, world: int, head: Head, cuts: list[int], entropy: str) -> dict[str, Any]:
    """`log_probs` on the slice of the logits: its gradient is the slice of the gradient."""
    z = (head.hidden @ head.weight.T + head.bias)[:, cuts[rank] : cuts[rank + 1]].clone().requires_grad_()
    result = log_probs(z, head.targets, shard=shard_of(rank, cuts), temperature=head.temperature, entropy=entropy)
    torch.autograd.backward(list(result), [head.d_log_probs, head.d_entropy])
    return {"log_probs": result.log_probs.detach(), "entropy": result.entropy.detach(), "d_logits": z.grad}


@each_cut
@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
def test_case_3_7_sharded_is_as_good_as_plain(rank_pool: RankPool, cuts: list[int], entropy: str) -> None:
    head = Head.random(14, 9, VOCAB, bias=True, temperature="rows")
    plain, truth = head.plain(entropy), head.truth(entropy)
    for run in (compact, compact_in_few_bytes):
        ours = whole(rank_pool.run(len(cuts) - 1, run, head, cuts, entropy))
        assert_as_good_as_plain(ours, plain, truth)
    # What it must catch: the gradient summed once a rank.
    with pytest.raises(AssertionError, match="d_hidden: relative error"):
        assert_as_good_as_plain(ours | {"d_hidden": ours["d_hidden"] * (len(cuts) - 1)}, plain, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("cuts", [CUTS[0], CUTS[5]], ids=str)
def test_sharded_in_each_dtype(rank_pool: RankPool, cuts: list[int], dtype: torch.dtype) -> None:
    head = Head.random(64, 48, VOCAB, dtype, bias=True, temperature="rows")
    ours = whole(rank_pool.run(len(cuts) - 1, compact, head, cuts, "loss"))
    assert_as_good_as_plain(ours, with_partial_sums(head, cuts, "loss"), head.truth())


@each_cut
@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row(rank_pool: RankPool, cuts: list[int], rows: int) -> None:
    head = Head.random(rows, 9, VOCAB, bias=True)
    assert_as_good_as_plain(
        whole(rank_pool.run(len(cuts) - 1, compact, head, cuts, "loss")), head.plain(), head.truth()
    )


@each_cut
def test_sharded_logits(rank_pool: RankPool, cuts: list[int]) -> None:
    head = Head.random(14, 9, VOCAB, bias=True)
    results = rank_pool.run(len(cuts) - 1, with_logits, head, cuts, "loss")
    assert all(torch.equal(result["log_probs"], results[0]["log_probs"]) for result in results)
    logits = head.hidden @ head.weight.T + head.bias
    as_leaf = replace(head, hidden=logits, weight=torch.eye(VOCAB), bias=None)
    expected, truth = as_leaf.plain(), as_leaf.truth()
    ours = {name: results[0][name] for name in ("log_probs", "entropy")}
    ours["d_hidden"] = torch.cat([result["d_logits"] for result in results], dim=1)
    assert_as_good_as_plain(ours, {n: expected[n] for n in ours}, {n: truth[n] for n in ours})


@pytest.mark.parametrize("world", [2, 4])
def test_case_6_1_a_padded_vocabulary_that_no_size_divides(rank_pool: RankPool, world: int) -> None:
    vocab, padded = 50257, 50260
    head = Head.random(6, 4, padded, bias=True)
    head.bias[vocab:] = -INF
    head.targets[0] = vocab - 1
    cuts = [padded // world * rank for rank in range(world + 1)]
    ours = whole(rank_pool.run(world, compact, head, cuts, "loss"))
    assert bool((ours["d_weight"][vocab:] == 0).all()) and bool((ours["d_bias"][vocab:] == 0).all())
    real = replace(head, weight=head.weight[:vocab], bias=head.bias[:vocab])
    ours |= {name: ours[name][:vocab] for name in ("d_weight", "d_bias")}
    assert_as_good_as_plain(ours, real.plain(), real.truth())


@pytest.mark.parametrize("cuts", [[0, 4, 8], [0, 3, 8], [0, 6, 8], [0, 2, 3, 5, 8]], ids=str)
def test_case_6_2_a_slice_of_padding_alone_has_no_share(rank_pool: RankPool, cuts: list[int]) -> None:
    # Three real ids: the border to the padding lies inside a slice, on a cut, and before whole slices.
    hidden = torch.tensor([[1.0, 2, 3, 5, 5, 5, 5, 5]])
    bias = torch.tensor([0.0] * 3 + [-INF] * 5)
    head = Head(hidden, torch.eye(8), torch.tensor([2]), torch.ones(1), torch.ones(1), bias)
    masked = whole(rank_pool.run(len(cuts) - 1, compact, head, cuts, "loss"))
    assert masked["log_probs"].item() == pytest.approx(-0.4076060, abs=1e-6)
    assert masked["entropy"].item() == pytest.approx(0.8323956, abs=1e-6)
    assert all(bool(torch.isfinite(masked[name]).all()) for name in masked)
    assert bool((masked["d_weight"][3:] == 0).all())
    counted = whole(rank_pool.run(len(cuts) - 1, compact, replace(head, bias=torch.zeros(8)), cuts, "metric"))
    exact = torch.log_softmax(hidden.double()[0], 0)
    assert counted["log_probs"].item() == pytest.approx(exact[2].item(), abs=1e-6)
    assert counted["entropy"].item() == pytest.approx(-(exact.exp() * exact).sum().item(), abs=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("cuts", CUTS[:2] + CUTS[4:6], ids=str)
def test_one_ranks_bad_logit_spoils_its_row_everywhere(rank_pool: RankPool, cuts: list[int], bad: float) -> None:
    head = Head.random(3, 9, VOCAB, bias=True)
    head.bias[VOCAB - 1] = bad
    for entropy in ("none", "loss"):
        for result in rank_pool.run(len(cuts) - 1, compact, head, cuts, entropy):
            assert bool(result["log_probs"].isnan().all()) and bool(result["d_hidden"].isnan().all())
            assert entropy == "none" or bool(result["entropy"].isnan().all())


def unknown_target(rank: int, world: int, cuts: list[int], target: int) -> tuple[Tensor, ...]:
    head = of_rank(Head.random(3, 5, 12), rank, cuts)
    hidden, weight = head.hidden.requires_grad_(), head.weight.requires_grad_()
    targets = torch.tensor([0, target, 11])
    result = linear_log_probs(hidden, weight, targets, shard=shard_of(rank, cuts), entropy="loss")
    (result.log_probs.sum() + result.entropy.sum()).backward()
    return result.log_probs.detach(), result.entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("target", [12, 2**31 + 5, 2**62])
def test_a_target_that_no_rank_has_is_nan_in_value_and_gradient(rank_pool: RankPool, target: int) -> None:
    for log_prob, entropy, d_hidden, d_weight in rank_pool.run(2, unknown_target, [0, 7, 12], target):
        assert log_prob.isnan().tolist() == [False, True, False]
        assert bool(torch.isfinite(entropy).all())
        assert d_hidden.isnan().any(dim=1).tolist() == [False, True, False]
        assert bool(d_weight.isnan().all())


def gathered_twice(rank: int, world: int) -> Tensor:
    """Logits gathered already, passed as this rank's slice."""
    given = torch.zeros(2, 6), torch.tensor([0, 5])
    with pytest.raises(DisagreementError, match=r"got \[0, 6\), \[0, 6\) of ranks 0 to 1, and two ranks hold the ids"):
        log_probs(*given, shard=shard_of(0, [0, 6]))
    return log_probs(*given, shard=shard_of(0, [0, 6]), check_ranks=False).log_probs


def test_case_6_6_the_whole_vocabulary_on_each_rank_is_not_scored_as_slices(rank_pool: RankPool) -> None:
    for log_prob in rank_pool.run(2, gathered_twice):
        assert bool(log_prob.isnan().all())


def frozen_on_one_rank(rank: int, world: int, head: Head, cuts: list[int]) -> dict[str, Any]:
    mine = of_rank(head, rank, cuts)
    hidden = mine.hidden.clone().requires_grad_()
    weight = mine.weight.clone().requires_grad_(rank == 0)
    bias = mine.bias.clone().requires_grad_(rank == 0)
    shard = shard_of(rank, cuts)
    result = linear_log_probs(hidden, weight, mine.targets, bias=bias, shard=shard, entropy="loss", chunk_bytes=400)
    torch.autograd.backward(list(result), [mine.d_log_probs, mine.d_entropy])
    return {"d_hidden": hidden.grad, "d_weight": weight.grad, "d_bias": bias.grad}


def test_case_3_8_a_head_frozen_on_one_rank_only_hangs_nothing(rank_pool: RankPool) -> None:
    head, cuts = Head.random(14, 9, VOCAB, bias=True), [0, 19, VOCAB]
    plain, truth = head.plain(), head.truth()
    trained, frozen = rank_pool.run(2, frozen_on_one_rank, head, cuts, timeout=60)
    assert frozen["d_weight"] is None and frozen["d_bias"] is None
    assert torch.equal(trained["d_hidden"], frozen["d_hidden"])
    expected, exact = (
        {"d_hidden": of["d_hidden"], "d_weight": of["d_weight"][:19], "d_bias": of["d_bias"][:19]}
        for of in (plain, truth)
    )
    assert_as_good_as_plain(trained, expected, exact)


def in_a_group_of_two(rank: int, world: int, heads: list[Head], cuts: list[int], steps: int) -> list[dict[str, Any]]:
    """Ranks 0 and 2 share one head, 1 and 3 the other, and each pair has its own rows at each step."""
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    slot = group.rank()
    results = []
    for step in range(steps):
        head = of_rank(heads[(rank % 2 + step) % len(heads)], slot, cuts)
        results.append(head.compact(shard=VocabShard(cuts[slot], cuts[slot + 1], group), chunk_bytes=20_000))
    dist.destroy_process_group(group)
    return results


def test_case_4_2_groups_with_64_320_and_no_rows_do_not_wait_for_each_other(rank_pool: RankPool) -> None:
    heads, cuts, steps = [Head.random(rows, 9, VOCAB, bias=True, seed=rows) for rows in (64, 320, 0)], [0, 19, VOCAB], 3
    results = rank_pool.run(4, in_a_group_of_two, heads, cuts, steps)
    for first in (0, 1):
        for step in range(steps):
            head = heads[(first + step) % len(heads)]
            ours = whole([results[first][step], results[first + 2][step]])
            assert_as_good_as_plain(ours, head.plain(), head.truth())
