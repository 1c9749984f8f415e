"""A rollout of several turns a sample, random and the same on every rank, as slime's actor receives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.upstream.slime.recipes import Recipe

__all__ = ["VOCAB", "make_rollout"]

VOCAB = 96
# Of samples 3 and 4 every token but few is prompt, or response; sample 5 has no tool output.
_TOTALS = (37, 50, 12, 61, 24, 33)
_RESPONSES = (21, 45, 6, 9, 23, 30)
_STEPS = {1: [[[0, 1], [2, 3], [4], [5]]], 2: [[[0, 1], [2, 3]], [[4], [5]]]}
_SHUFFLED = {1: [[[3, 0], [5, 1], [4], [2]]], 2: [[[3, 0], [5, 1]], [[4], [2]]]}


def make_rollout(recipe: Recipe, args: Any) -> dict[str, Any]:
    """The fields that do not depend on a model: tokens, masks, lengths, rewards, schedule, recorded nuclei."""
    random = torch.Generator().manual_seed(11)
    schedule = (_SHUFFLED if args.use_dynamic_batch_size else _STEPS)[recipe.steps]
    masks = [_mask(recipe, sample, length, random) for sample, length in enumerate(_RESPONSES)]
    tokens = [torch.randint(VOCAB, (total,), generator=random) for total in _TOTALS]
    rollout: dict[str, Any] = {
        "tokens": tokens,
        "loss_masks": masks,
        "total_lengths": list(_TOTALS),
        "response_lengths": list(_RESPONSES),
        "rewards": torch.randn(len(_TOTALS), generator=random).tolist(),
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]).float(),
        "micro_batch_indices": [indices for step in schedule for indices in step],
        "num_microbatches": [len(step) for step in schedule],
        "global_batch_sizes": [sum(len(indices) for indices in step) for step in schedule],
    }
    if args.rollout_top_p != 1.0:
        nuclei = [
            _nuclei(ids[-length:], mask, random) for ids, mask, length in zip(tokens, masks, _RESPONSES, strict=True)
        ]
        rollout["rollout_top_p_token_ids"] = [ids for ids, _ in nuclei]
        rollout["rollout_top_p_token_offsets"] = [offsets for _, offsets in nuclei]
    return rollout


def _mask(recipe: Recipe, sample: int, length: int, random: torch.Generator) -> Tensor:  # (length,) int32
    mask = torch.zeros(length, dtype=torch.int)
    if recipe.masks == "empty" or (recipe.masks == "one empty" and sample == 4):
        return mask
    if recipe.masks == "late":
        mask[-2:] = 1
        return mask
    counted, start = True, 0
    while start < length:
        stop = start + int(torch.randint(2, 7, (), generator=random))
        mask[start:stop] = int(counted or sample == 5)
        counted, start = not counted, stop
    return mask


def _nuclei(response: Tensor, mask: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """What was kept for each counted token, itself among it; nothing for tool output."""
    spans = []
    for token, counted in zip(response.tolist(), mask.tolist(), strict=True):
        others = torch.randperm(VOCAB, generator=random)[: int(torch.randint(1, 40, (), generator=random))]
        spans.append(torch.cat([others[others != token], torch.tensor([token])]) if counted else others[:0])
    offsets = torch.tensor([0, *(len(span) for span in spans)]).cumsum(0)
    return torch.cat(spans).int(), offsets.int()
