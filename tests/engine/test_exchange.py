"""Rows that each rank has its own of: gathered in rank order, and their gradient back to where they came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits import exchange as exchange_module
from compact_logits.engine.row_gather import Local, Replicated, SequenceSharded
from compact_logits.engine.linear import score_hidden
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.allocation import AllocationTracker
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of, whole, with_partial_sums

COUNTS = [(0, 5), (3, 0), (0, 0), (7, 2), (4, 4), (1, 0, 0, 0), (0, 5, 0, 2), (0, 0, 0, 0), (3, 1, 4, 2)]
COUNTS += [(8, 9), (9, 8), (9, 8, 9, 8)]  # so little padding that it stays
CUTS = {2: [0, 19, 37], 4: [0, 5, 5, 36, 37]}

each_count = pytest.mark.parametrize("counts", COUNTS, ids=str)


def group() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def of_this_rank(rows: Tensor, rank: int, counts: tuple[int, ...]) -> Tensor:
    return rows.split(list(counts))[rank]


def filled(exchange: SequenceSharded, d_rows: Tensor) -> Tensor:
    """The room for a gradient, with it, and what nobody may read behind it."""
    room = exchange.room(d_rows).fill_(torch.nan)
    room[: d_rows.shape[0]] = d_rows
    return room


def there_and_back(
    rank: int, world: int, counts: tuple[int, ...], moved_bytes: int = exchange_module._MOVED_BYTES
) -> tuple[Tensor, Tensor, Tensor]:
    with mock.patch.object(exchange_module, "_MOVED_BYTES", moved_bytes):
        return _there_and_back(rank, counts)


def _there_and_back(rank: int, counts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    exchange = SequenceSharded(group(), counts)
    all_rows = torch.arange(sum(counts) * 3.0).view(-1, 3) + 1
    mine = of_this_rank(all_rows, rank, counts).clone()
    gathered = exchange.gather(mine)
    # Another part of the gradient on each rank, so that a sum that misses one shows.
    back = exchange.start_reduce(filled(exchange, gathered * 10.0**rank))()
    return mine, gathered, back


@each_count
@pytest.mark.parametrize("moved_bytes", [2**20, 24, 1], ids=["at once", "two rows", "row by row"])
def test_rows_are_gathered_and_their_gradient_is_summed_once(
    rank_pool: RankPool, counts: tuple[int, ...], moved_bytes: int
) -> None:
    world = len(counts)
    all_rows = torch.arange(sum(counts) * 3.0).view(-1, 3) + 1
    total = sum(10.0**rank for rank in range(world))
    for mine, gathered, back in rank_pool.run(world, there_and_back, counts, moved_bytes):
        assert torch.equal(gathered, all_rows)
        assert torch.equal(back, mine * total)


def allocated(rank: int, world: int, counts: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """Most bytes that stand beside the rows while they are gathered, and beside their gradient while it is reduced; and
    whether what was gathered has the padding in its memory."""
    exchange = SequenceSharded(group(), counts)
    mine = torch.ones(counts[rank], 1024)
    with AllocationTracker() as forward:
        gathered = exchange.gather(mine)
    room = exchange.room(gathered).fill_(1.0)
    with AllocationTracker() as backward:
        exchange.start_reduce(room)()
    padded = gathered.untyped_storage().nbytes() == room.nbytes
    return forward.peak_bytes - gathered.nbytes, backward.peak_bytes, gathered.nbytes, padded


def test_rows_move_where_they_are(rank_pool: RankPool) -> None:
    with_little, with_much = (rank_pool.run(2, allocated, counts) for counts in ((8000, 7999), (8000, 4000)))
    for (forward, backward, rows, padded), own in zip(with_little, (8000, 8000), strict=True):
        assert padded and forward <= own * 4096 + 2**24 < rows and backward <= own * 4096 + 2**24 < rows
    for forward, backward, rows, padded in with_much:
        assert not padded and backward <= 8000 * 4096 + 2**24
        assert forward > rows, "a copy, as this test sees it"


def score(rank: int, world: int, head: Head, counts: tuple[int, ...], chunk_bytes: int | None) -> dict[str, Any]:
    mine, shard = of_rank(head, rank, CUTS[world]), shard_of(rank, CUTS[world])
    hidden = of_this_rank(mine.hidden, rank, counts).clone().requires_grad_()
    weight = mine.weight.clone().requires_grad_()
    outputs = score_hidden(
        hidden,
        weight,
        None,
        LogProbScorer(mine.targets, shard, 1.0, "loss"),
        exchange=SequenceSharded(group(), counts),
        chunk_bytes=chunk_bytes,
    )
    torch.autograd.backward(list(outputs), [mine.d_log_probs, mine.d_entropy])
    log_prob, entropy = (output.detach() for output in outputs)
    return {"log_probs": log_prob, "entropy": entropy, "d_hidden": hidden.grad, "d_weight": weight.grad}


@each_count
@pytest.mark.parametrize("chunk_bytes", [1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_projection_of_rows_of_all_ranks(
    rank_pool: RankPool, dtype: torch.dtype, chunk_bytes: int | None, counts: tuple[int, ...]
) -> None:
    head, world = Head.random(sum(counts), 24, 37, dtype), len(counts)
    results = rank_pool.run(world, score, head, counts, chunk_bytes)
    d_hidden = torch.cat([result["d_hidden"] for result in results])
    ours = whole([result | {"d_hidden": d_hidden} for result in results])
    assert_as_good_as_plain(ours, with_partial_sums(head, CUTS[world], "loss"), head.truth())


def test_local_rows_stay_where_they_are() -> None:
    rows = torch.randn(3, 2)
    assert Local().gather(rows) is rows
    assert Local().start_reduce(rows)() is rows


def summed(rank: int, world: int, rows: int) -> tuple[Tensor, Tensor]:
    exchange = Replicated(group())
    mine = torch.full((rows, 3), 10.0**rank)
    return exchange.gather(mine), exchange.start_reduce(mine.clone())()


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_replicated_rows_have_their_gradient_summed_in_place(rank_pool: RankPool, rows: int) -> None:
    for rank, (gathered, back) in enumerate(rank_pool.run(2, summed, rows)):
        assert torch.equal(gathered, torch.full((rows, 3), 10.0**rank))
        assert torch.equal(back, torch.full((rows, 3), 11.0))


def refused(rank: int, world: int) -> tuple[str, str]:
    messages = []
    for attempt in (
        lambda: SequenceSharded(group(), (1, 2, 3)),
        lambda: SequenceSharded(group(), (2, 2)).gather(torch.zeros(3, 4)),
    ):
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return tuple(messages)


def test_counts_that_do_not_fit_are_refused(rank_pool: RankPool) -> None:
    for messages in rank_pool.run(2, refused):
        assert messages == (
            "needed one row count for each of the 2 ranks of the group, got 3",
            "this rank's row count is 2, but it has 3 rows",
        )


def group_of_one(rank: int, world: int) -> list[dict[str, Tensor]]:
    alone = [dist.new_group([member]) for member in range(world)][rank]
    head = Head.random(5, 4, 7, seed=rank)
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    shard = replace(shard_of(0, [0, 7]), group=alone)
    exchange = SequenceSharded(alone, (5,))
    outputs = score_hidden(
        hidden, weight, None, LogProbScorer(head.targets, shard, 1.0, "none"), exchange=exchange, group=alone
    )
    outputs[0].backward(head.d_log_probs)
    dist.destroy_process_group(alone)
    names = ("log_probs", "d_hidden", "d_weight")
    ours = dict(zip(names, (outputs[0].detach(), hidden.grad, weight.grad), strict=True))
    return [ours, {n: head.plain("none")[n] for n in names}, {n: head.truth("none")[n] for n in names}]


def test_a_group_of_one_rank(rank_pool: RankPool) -> None:
    for results in rank_pool.run(2, group_of_one):
        assert_as_good_as_plain(*results)
