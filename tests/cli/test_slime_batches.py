"""Packing as slime packs, and the rows and kept rows of every rank: against slime's rule written out token by token."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

import pytest

from compact_logits.cli.rollouts import Rollout
from compact_logits.cli.slime_batches import first_fit, rows_of_ranks


def some_rollouts(count: int, seed: int = 0) -> list[Rollout]:
    numbers = random.Random(seed)
    found = []
    for _ in range(count):
        prompt, response = numbers.randint(1, 60), numbers.randint(0, 90)
        mask = [int(numbers.random() < 0.3) for _ in range(response)]
        found.append(Rollout([1] * (prompt + response), mask))
    return found


def lengths(batches: list[list[Rollout]]) -> list[list[int]]:
    return [[len(rollout.tokens) for rollout in batch] for batch in batches]


def test_first_fit_keeps_the_order_and_gives_a_long_one_its_own() -> None:
    rollouts = [Rollout([0] * length, []) for length in (5, 4, 9, 3, 1, 2)]
    assert lengths(first_fit(rollouts, 8)) == [[5, 3], [4, 1, 2], [9]]


@pytest.mark.skipif(not os.environ.get("SLIME_ROOT"), reason="SLIME_ROOT does not name slime's source tree")
@pytest.mark.parametrize("budget", [100, 150, 400])
def test_first_fit_is_slimes(budget: int) -> None:
    path = Path(os.environ["SLIME_ROOT"]) / "slime/utils/seqlen_balancing.py"
    spec = importlib.util.spec_from_file_location("slime_seqlen_balancing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rollouts = some_rollouts(60)
    theirs = module.first_fit_pack([len(rollout.tokens) for rollout in rollouts], budget)
    assert [[id(rollout) for rollout in batch] for batch in first_fit(rollouts, budget)] == [
        [id(rollouts[place]) for place in batch] for batch in theirs
    ]


def kept_by_hand(batch: list[Rollout], tp: int, cp: int, allgather: bool, multiple: int) -> list[list[int]]:
    """Of each CP rank the kept rows of each shard: by laying out one flag a row."""
    aligned = []
    for rollout in batch:
        prompt = len(rollout.tokens) - len(rollout.loss_mask)
        aligned.append([0] * (prompt - 1) + rollout.loss_mask + [0])
    ranks: list[list[int]] = [[] for _ in range(cp)]
    if allgather:
        packed = [flag for flags in aligned for flag in flags]
        packed += [0] * (-len(packed) % (cp * tp * multiple))
        share = len(packed) // cp
        ranks = [packed[rank * share : (rank + 1) * share] for rank in range(cp)]
    else:
        for flags in aligned:
            chunk = -(-len(flags) // (2 * cp)) if cp > 1 else 0
            padded = flags + [0] * (2 * cp * chunk - len(flags))
            for rank in range(cp):
                if cp == 1:
                    ranks[rank] += flags
                    continue
                for index in (rank, 2 * cp - 1 - rank):
                    ranks[rank] += padded[index * chunk : (index + 1) * chunk]
        ranks = [flags + [0] * (-len(flags) % (tp * multiple)) for flags in ranks]
    return [[shard_sum(flags, shard, tp) for shard in range(tp)] for flags in ranks]


def shard_sum(flags: list[int], shard: int, tp: int) -> int:
    share = len(flags) // tp
    return sum(flags[shard * share : (shard + 1) * share])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("cp", "allgather"), [(1, False), (2, False), (4, False), (2, True), (3, True)])
def test_rows_and_kept_rows_of_every_rank(tp: int, cp: int, allgather: bool) -> None:
    batches = first_fit(some_rollouts(25, seed=cp), 300)
    found = rows_of_ranks(batches, tp=tp, cp=cp, allgather_cp=allgather, pad_multiple=8)
    assert [(each.micro_batch, each.cp_rank) for each in found] == [
        (number, rank) for number in range(len(batches)) for rank in range(cp)
    ]
    for number, batch in enumerate(batches):
        expected = kept_by_hand(batch, tp, cp, allgather, 8)
        ours = found[number * cp : (number + 1) * cp]
        assert [list(each.kept_of_shards) for each in ours] == expected
        assert sum(each.kept for each in ours) == sum(sum(rollout.loss_mask) for rollout in batch)
        assert all(each.rows % (8 * tp) == 0 for each in ours)
        tokens = sum(len(rollout.tokens) for rollout in batch)
        assert tokens <= sum(each.rows for each in ours) <= tokens + cp * (8 * tp + 2 * len(batch))
