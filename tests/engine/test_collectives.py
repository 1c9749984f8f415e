"""How many collectives a micro-batch takes: the same few for one chunk and for many, for many rows and for none."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits import linear_log_probs, log_probs
from compact_logits.engine.slices import Block
from compact_logits.engine.row_gather import SequenceSharded
from compact_logits.engine.linear import score_hidden
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.collectives import count_collectives
from tests.support.linear_head import Head
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of

# Under the second a chunk holds one row.
BUDGETS = [None, 1]
CUTS = {2: [0, 3, 11], 4: [0, 5, 5, 8, 11]}

Counts = tuple[dict[str, int], dict[str, int]]


def counted(
    rank: int, world: int, rows: int, chunk_bytes: int | None, trained: str, entropy: str, check_ranks: bool = False
) -> Counts:
    """Calls in forward and in backward, with gradients of the inputs named in `trained`."""
    head, shard = of_rank(Head.random(rows, 4, 11), rank, CUTS[world]), shard_of(rank, CUTS[world])
    hidden = head.hidden.requires_grad_("hidden" in trained)
    weight = head.weight.requires_grad_("weight" in trained)
    with count_collectives() as forward:
        options: Any = {"entropy": entropy, "chunk_bytes": chunk_bytes, "check_ranks": check_ranks}
        result = linear_log_probs(hidden, weight, head.targets, shard=shard, **options)
    with count_collectives() as backward:
        if result.log_probs.requires_grad:
            result.log_probs.sum().backward()
    return dict(forward), dict(backward)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("chunk_bytes", BUDGETS)
def test_replicated_rows(rank_pool: RankPool, chunk_bytes: int | None, rows: int, world: int) -> None:
    gather, reduce = {"all_gather_into_tensor": 1}, {"all_reduce": 1}
    for entropy in ("none", "metric", "loss"):
        every = rank_pool.run(world, counted, rows, chunk_bytes, "hidden weight", entropy)
        assert every == [(gather, reduce)] * world
    assert rank_pool.run(world, counted, rows, chunk_bytes, "hidden", "none") == [(gather, reduce)] * world
    compared = {"all_gather_into_tensor": 2}
    assert rank_pool.run(world, counted, rows, chunk_bytes, "hidden", "loss", True) == [(compared, reduce)] * world
    assert rank_pool.run(world, counted, rows, chunk_bytes, "weight", "none") == [(gather, {})] * world
    assert rank_pool.run(world, counted, rows, chunk_bytes, "", "none") == [(gather, {})] * world


def counted_given_logits(rank: int, world: int, rows: int, chunk_bytes: int | None, check_ranks: bool) -> Counts:
    shard = shard_of(rank, CUTS[world])
    logits = torch.randn(rows, shard.size, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    with count_collectives() as forward:
        options: Any = {"chunk_bytes": chunk_bytes, "check_ranks": check_ranks}
        result = log_probs(logits, targets, shard=shard, entropy="loss", **options)
    with count_collectives() as backward:
        (result.log_probs.sum() + result.entropy.sum()).backward()
    return dict(forward), dict(backward)


@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("chunk_bytes", BUDGETS)
def test_given_logits(rank_pool: RankPool, chunk_bytes: int | None, rows: int) -> None:
    for world in (2, 4):
        for check_ranks in (False, True):
            every = rank_pool.run(world, counted_given_logits, rows, chunk_bytes, check_ranks)
            assert every == [({"all_gather_into_tensor": 1 + check_ranks}, {})] * world


def counted_sequence_sharded(rank: int, world: int, counts: tuple[int, ...], chunk_bytes: int | None) -> Counts:
    head, shard = of_rank(Head.random(sum(counts), 4, 11), rank, CUTS[world]), shard_of(rank, CUTS[world])
    hidden = head.hidden.split(list(counts))[rank].clone().requires_grad_()
    weight = head.weight.requires_grad_()
    assert dist.group.WORLD is not None
    exchange = SequenceSharded(dist.group.WORLD, counts)
    scorer = LogProbScorer(head.targets, shard, 1.0, "loss")
    with count_collectives() as forward:
        outputs = score_hidden(hidden, weight, None, scorer, exchange=exchange, chunk_bytes=chunk_bytes)
    with count_collectives() as backward:
        (outputs[0].sum() + outputs[1].sum()).backward()
    return dict(forward), dict(backward)


@pytest.mark.parametrize("counts", [(0, 0), (0, 5), (3, 0), (7, 2), (0, 5, 0, 2), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("chunk_bytes", BUDGETS)
def test_sequence_sharded_rows(rank_pool: RankPool, chunk_bytes: int | None, counts: tuple[int, ...]) -> None:
    every = rank_pool.run(len(counts), counted_sequence_sharded, counts, chunk_bytes)
    assert every == [({"all_gather_into_tensor": 2}, {"reduce_scatter_tensor": 1})] * len(counts)


def counted_with_one_a_block(rank: int, world: int, chunk_bytes: int | None) -> Counts:
    """What the counts are there to catch: a scorer that merges each block on its own."""
    of_block = LogProbScorer.local_stats

    def local_stats(self: LogProbScorer, block: Block) -> Tensor:
        maximum = block.logits.amax(dim=1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self.shard.group)
        return of_block(self, block)

    with mock.patch.object(LogProbScorer, "local_stats", local_stats):
        return counted(rank, world, 17, chunk_bytes, "hidden weight", "none")


def test_one_collective_a_block_would_be_seen(rank_pool: RankPool) -> None:
    for forward, _ in rank_pool.run(2, counted_with_one_a_block, 1):
        assert forward == {"all_gather_into_tensor": 1, "all_reduce": 17}


def warned(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counted_sequence_sharded(rank, world, (1, 2), None)
    return [str(warning.message) for warning in caught]


def test_no_collective_warns(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, warned) == [[], []]


def counted_alone(rank: int, world: int) -> dict[str, Any]:
    head = Head.random(5, 4, 11)
    with count_collectives() as counts:
        head.compact(chunk_bytes=1)
        head.with_logits()
    return dict(counts)


def test_a_whole_vocabulary_takes_none_even_among_other_ranks(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, counted_alone) == [{}, {}]
