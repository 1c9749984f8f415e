"""Rollouts packed into micro-batches as slime packs them, and the rows that each rank then has and keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compact_logits.cli.rollouts import Rollout
from compact_logits.rows import Layout, contiguous, zigzag

__all__ = ["RankRows", "first_fit", "rows_of_ranks"]


@dataclass(frozen=True)
class RankRows:
    """One micro-batch on one context-parallel rank: its rows, padding included, and the kept ones of each sequence
    shard."""

    micro_batch: int
    cp_rank: int
    rows: int
    kept_of_shards: tuple[int, ...]

    @property
    def kept(self) -> int:
        return sum(self.kept_of_shards)


def first_fit(rollouts: list[Rollout], token_budget: int) -> list[list[Rollout]]:
    """Micro-batches of at most `token_budget` tokens: each rollout, in the order given, goes where it fits first.

    One that is longer has a micro-batch of its own. slime does so for each step's samples with
    `--use-dynamic-batch-size` (read at 624b824a8), and may then split some further, so that all data-parallel ranks
    have as many.
    """
    batches: list[list[Rollout]] = []
    filled: list[int] = []
    for rollout in rollouts:
        length = len(rollout.tokens)
        place = next((at for at, tokens in enumerate(filled) if tokens + length <= token_budget), len(filled))
        if place == len(filled):
            batches.append([])
            filled.append(0)
        batches[place].append(rollout)
        filled[place] += length
    return batches


def rows_of_ranks(
    batches: list[list[Rollout]],
    *,
    tp: int,
    cp: int,
    allgather_cp: bool = False,
    pad_multiple: int = 128,
) -> list[RankRows]:
    """The rows of every micro-batch on every context-parallel rank, with slime's padding to `tp * pad_multiple` rows.

    A row is kept where the response token that it predicts has mask 1. `allgather_cp`: contiguous slices of the packed
    sequence, in place of a zigzag through each. Raises `LayoutError` where masks and lengths do not fit together.
    """
    found = []
    for number, batch in enumerate(batches):
        totals = [len(rollout.tokens) for rollout in batch]
        responses = [rollout.response_length for rollout in batch]
        masks = [torch.tensor(rollout.loss_mask, dtype=torch.bool) for rollout in batch]
        rows = _padded_rows(totals, cp, tp * pad_multiple, allgather_cp)
        for rank in range(cp):
            layout: Layout = (contiguous if allgather_cp else zigzag)(totals, responses, rows, rank, cp)
            shards = layout.rows_of_masks(masks).view(tp, -1).sum(dim=1)
            found.append(RankRows(number, rank, rows, tuple(shards.tolist())))
    return found


def _padded_rows(totals: list[int], cp: int, multiple: int, allgather_cp: bool) -> int:
    if allgather_cp or cp == 1:
        rows = -(-sum(totals) // cp)
    else:
        rows = sum(2 * -(-total // (2 * cp)) for total in totals)
    return max(-(-rows // multiple), 1) * multiple
