"""Rows that each rank has its own of: gathered in rank order, and their gradient back to where they came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.engine.row_gather import Local, Replicated, SequenceSharded
from tests.support.linear_head import SCORERS, Head, Results, assert_as_good_as_plain
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of, whole

COUNTS = [(0, 5), (3, 0), (0, 0), (7, 2), (4, 4), (1, 0, 0, 0), (0, 5, 0, 2), (0, 0, 0, 0), (3, 1, 4, 2)]
CUTS = {2: [0, 70, 137], 4: [0, 5, 5, 136, 137]}

each_count = pytest.mark.parametrize("counts", COUNTS, ids=str)


def group() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def of_this_rank(rows: Tensor, rank: int, counts: tuple[int, ...]) -> Tensor:
    return rows.split(list(counts))[rank]


def there_and_back(rank: int, world: int, counts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    gather = SequenceSharded(group(), counts)
    all_rows = torch.arange(sum(counts) * 3.0).view(-1, 3) + 1
    mine = of_this_rank(all_rows, rank, counts).clone()
    gathered = gather.gather(mine)
    # Another part of the gradient on each rank, so that a sum that misses one shows.
    return mine, gathered, gather.start_reduce(gathered * 10.0**rank)()


@each_count
def test_rows_are_gathered_and_their_gradient_is_summed_once(rank_pool: RankPool, counts: tuple[int, ...]) -> None:
    world = len(counts)
    all_rows = torch.arange(sum(counts) * 3.0).view(-1, 3) + 1
    total = sum(10.0**rank for rank in range(world))
    for mine, gathered, back in rank_pool.run(world, there_and_back, counts):
        assert torch.equal(gathered, all_rows)
        assert torch.equal(back, mine * total)


def score(rank: int, world: int, head: Head, counts: tuple[int, ...]) -> list[Results]:
    """By every scorer, with a gradient of the rank's own rows."""
    cuts = CUTS[world]
    rows = torch.arange(sum(counts)).split(list(counts))[rank]
    mine, found = of_rank(head, rank, cuts), []
    for what in SCORERS:
        for chunk_bytes in (1, None):
            tensors = [each.clone().requires_grad_() for each in (mine.hidden[rows], mine.weight)]
            gather = SequenceSharded(group(), counts)
            given: Any = {"shard": shard_of(rank, cuts), "gather": gather, "chunk_bytes": chunk_bytes}
            outputs = mine.scored(what, *tensors, None, **given)
            roots = [(each, head.d_entropy if n == "entropy" else head.d_log_probs) for n, each in outputs.items()]
            torch.autograd.backward(*zip(*[pair for pair in roots if pair[0].requires_grad], strict=True))
            results = {name: each.detach() for name, each in outputs.items() if not name.startswith("overlap")}
            found.append(results | {"d_hidden": tensors[0].grad, "d_weight": tensors[1].grad})
    return found


@each_count
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_projection_of_rows_of_all_ranks(rank_pool: RankPool, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    head, cuts = Head.random(sum(counts), 160, 137, dtype), CUTS[len(counts)]
    results = rank_pool.run(len(counts), score, head, counts)
    for place, of_ranks in enumerate(zip(*results, strict=True)):
        what = SCORERS[place // 2]
        d_hidden = torch.cat([each["d_hidden"] for each in of_ranks])
        ours = whole([each | {"d_hidden": d_hidden} for each in of_ranks])
        plain, truth = ({n: of[n] for n in ours} for of in (head.plain(what, cuts[1:-1]), head.truth(what)))
        assert_as_good_as_plain(ours, plain, truth, where=f"{what} ")


def test_local_rows_are_left_where_they_are() -> None:
    rows = torch.randn(3, 2)
    assert Local().gather(rows) is rows
    assert Local().start_reduce(rows)() is rows


def summed(rank: int, world: int, rows: int) -> tuple[Tensor, Tensor]:
    gather = Replicated(group())
    mine = torch.full((rows, 3), 10.0**rank)
    return gather.gather(mine), gather.start_reduce(mine.clone())()


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


def group_of_one(rank: int, world: int) -> Results:
    alone = [dist.new_group([member]) for member in range(world)][rank]
    shard = replace(shard_of(0, [0, 7]), group=alone)
    found = Head.random(5, 4, 7).compact("none", shard=shard, gather=SequenceSharded(alone, (5,)))
    dist.destroy_process_group(alone)
    return found


def test_a_group_of_one_rank(rank_pool: RankPool) -> None:
    head = Head.random(5, 4, 7)
    for ours in rank_pool.run(2, group_of_one):
        assert_as_good_as_plain(ours, head.plain("none"), head.truth("none"))
