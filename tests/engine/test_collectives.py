"""How many collectives a micro-batch takes: the same few for one slice and for many, for many rows and for none."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compact_logits import linear_topk_kl
from compact_logits.engine.row_gather import SequenceSharded
from compact_logits.engine.vocab_shard import gather_stats
from compact_logits.memory.meta_collectives import meta_collectives
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.collectives import count_collectives
from tests.support.linear_head import SCORERS, Head
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of

CUTS = {2: [0, 70, 301], 4: [0, 70, 70, 200, 301]}
Counts = tuple[dict[str, int], dict[str, int]]  # forward, backward


def counted(head: Head, what: str, trained: str = "hidden weight", **options: Any) -> Counts:
    """With gradients of the inputs named in `trained`; `logits` for logits that exist already."""
    tensors = {
        name: getattr(head, name).clone().requires_grad_(name in trained) for name in ("hidden", "weight", "bias")
    }
    with count_collectives() as forward:
        outputs = head.with_logits(what, **options) if trained == "logits" else head.scored(what, **tensors, **options)
    with count_collectives() as backward:
        roots = [each for each in outputs.values() if each is not None and each.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])
    return dict(forward), dict(backward)


def expected(what: str, trained: str = "hidden", *, compared: bool = False, gathered: bool = False) -> Counts:
    of_statistics = 2 if what in ("topk", "topk clamped", "tail") else 1
    back = {"reduce_scatter_tensor" if gathered else "all_reduce": 1} if "hidden" in trained else {}
    return {"all_gather_into_tensor": of_statistics + compared + gathered}, back


def replicated(rank: int, world: int, rows: int) -> list[str]:
    cuts, head = CUTS[world], Head.random(rows, 4, 301, bias=True)
    given: dict[str, Any] = {"shard": shard_of(rank, cuts)}
    mine, wrong = of_rank(head, rank, cuts), []
    cases = [(trained, 1, False) for trained in ("hidden weight", "hidden", "weight", "", "logits")]
    cases += [(trained, None, compared) for trained in ("hidden weight", "logits") for compared in (False, True)]
    for what in SCORERS:
        for trained, chunk_bytes, compared in cases:
            if what != "top_p" or not (compared or trained == "logits"):
                found = counted(mine, what, trained, chunk_bytes=chunk_bytes, check_ranks=compared, **given)
                if found != expected(what, trained, compared=compared):
                    wrong.append(f"{what}, {chunk_bytes}, trained {trained}, compared {compared}: {found}")
    return wrong


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_replicated_rows_and_given_logits(rank_pool: RankPool, rows: int, world: int) -> None:
    assert rank_pool.run(world, replicated, rows) == [[]] * world


def sequence_sharded(rank: int, world: int, counts: tuple[int, ...]) -> list[str]:
    cuts, head = CUTS[world], Head.random(sum(counts), 4, 301, bias=True)
    mine, wrong = of_rank(head, rank, cuts), []
    rows = torch.arange(sum(counts)).split(list(counts))[rank]
    local = {name: getattr(mine, name) for name in ("weight", "bias")} | {"hidden": mine.hidden[rows]}
    for what in SCORERS:
        for chunk_bytes in (1, None):
            tensors = {name: each.clone().requires_grad_() for name, each in local.items()}
            gather = SequenceSharded(dist.group.WORLD, counts)
            with count_collectives() as forward:
                outputs = mine.scored(
                    what, **tensors, shard=shard_of(rank, cuts), gather=gather, chunk_bytes=chunk_bytes
                )
            with count_collectives() as backward:
                next(iter(outputs.values())).sum().backward()
            if (dict(forward), dict(backward)) != expected(what, gathered=True):
                wrong.append(f"{what}, {chunk_bytes}: {forward}, {backward}")
    return wrong


@pytest.mark.parametrize("counts", [(0, 0), (0, 5), (3, 0), (7, 2), (0, 5, 0, 2), (0, 0, 0, 0)], ids=str)
def test_sequence_sharded_rows(rank_pool: RankPool, counts: tuple[int, ...]) -> None:
    assert rank_pool.run(len(counts), sequence_sharded, counts) == [[]] * len(counts)


def first_call_of_a_group(rank: int, world: int) -> list[int]:
    """All-gathers of each of three calls by what `check_ranks` says, of another function each."""
    found = []
    for check_ranks in (None, True, False):
        group = dist.new_group(range(world))
        head, shard = of_rank(Head.random(5, 4, 301), rank, CUTS[2]), shard_of(rank, CUTS[2])
        shard = type(shard)(shard.start, shard.stop, group)
        for what in ("loss", "topk", "none"):
            with count_collectives() as counts:
                head.scored(what, head.hidden, head.weight, None, shard=shard, check_ranks=check_ranks)
            found.append(counts["all_gather_into_tensor"] - (2 if what == "topk" else 1))
        dist.destroy_process_group(group)
    return found


def test_ranks_are_compared_at_the_first_call_of_a_group_or_always_or_never(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, first_call_of_a_group) == [[1, 0, 0, 1, 1, 1, 0, 0, 0]] * 2


def merged_slice_by_slice(rank: int, world: int) -> Counts:
    """What the counts are there to catch."""
    right = LogProbScorer.add_slice_

    def add_slice_(self: LogProbScorer, stats: tuple[Tensor, ...], logits: Tensor, first: int) -> None:
        right(self, stats, logits, first)
        gather_stats(stats[0], self.shard)

    head = of_rank(Head.random(17, 4, 301, bias=True), rank, [0, 150, 301])
    with mock.patch.object(LogProbScorer, "add_slice_", add_slice_):
        return counted(head, "none", shard=shard_of(rank, [0, 150, 301]), chunk_bytes=1, check_ranks=False)


def test_one_collective_a_slice_would_be_seen(rank_pool: RankPool) -> None:
    for forward, _ in rank_pool.run(2, merged_slice_by_slice):
        assert forward == {"all_gather_into_tensor": 1 + 3}


class Messages(TorchDispatchMode):
    """How many bytes a rank sends with each collective, seen where all of them pass."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d"):
            self.sent.append(min(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)))
        return func(*args, **(kwargs or {}))


def message_bytes(rank: int, world: int, rows: int) -> dict[str, list[int]]:
    head, shard, found = of_rank(Head.random(rows, 4, 301, k=9), rank, CUTS[2]), shard_of(rank, CUTS[2]), {}
    for what in ("none", "loss", "sum_p2", "topk", "tail"):
        with Messages() as messages:
            head.scored(what, head.hidden, head.weight, None, shard=shard, check_ranks=True)
        found[what] = messages.sent
    return found


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_what_travels_is_a_few_numbers_a_row_and_no_vocabulary(rank_pool: RankPool, rows: int) -> None:
    """Of one row where there are none, since back ends disagree about empty messages."""
    count, found = max(rows, 1), rank_pool.run(2, message_bytes, rows)[0]
    for what, numbers in (("none", 3), ("loss", 4), ("sum_p2", 5)):
        assert found[what] == [120, count * numbers * 8]
    for what in ("topk", "tail"):  # the student's top k and its statistics; sums over the teacher's ids
        check, of_top, of_sums = found[what]
        assert check == 120 and count * 9 * 4 < of_top <= count * (9 + 3) * 8 and 0 < of_sums <= count * 6 * 8


def warned(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sequence_sharded(rank, world, (1, 2)) == replicated(rank, world, 2) == []
    return [str(warning.message) for warning in caught]


def test_no_collective_warns(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, warned) == [[], []]


def alone(rank: int, world: int) -> Counter[str]:
    """A whole vocabulary, in no group and in a group of one."""
    one = [dist.new_group([each]) for each in range(world)][rank]
    head = Head.random(5, 4, 301)
    shard = type(shard_of(0, [0, 301]))(0, 301, one)
    with count_collectives() as counts:
        for what in SCORERS:
            head.compact(what, chunk_bytes=1)
            head.compact(what, shard=shard)
    dist.destroy_process_group(one)
    return counts


def test_a_whole_vocabulary_takes_none_even_among_other_ranks(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, alone) == [Counter(), Counter()]


def without_memory(rank: int, world: int) -> Counter[str]:
    head = of_rank(Head.random(5, 4, 301), rank, CUTS[2])
    tensors: Any = [each.to("meta") for each in (head.hidden, head.weight, head.teacher_log_probs, head.teacher_ids)]
    with meta_collectives(), count_collectives() as counts:
        linear_topk_kl(*tensors, shard=shard_of(rank, CUTS[2]), check_ranks=True)
    return counts


def test_tensors_without_memory_are_not_compared(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, without_memory) == [Counter(all_gather_into_tensor=2)] * 2
