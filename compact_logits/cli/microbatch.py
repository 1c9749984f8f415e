"""Rollouts packed into the tensors that a Megatron actor is called with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compact_logits.cli.cpu_model import packed_seq_params
from compact_logits.cli.rollouts import Rollout
from compact_logits.rows import RowSelection, packed

__all__ = ["MicroBatch", "pack"]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The sequences one after another, then padding. A row's label is the token after it; `loss_mask` stands at the
    row that predicts, not at the token predicted."""

    tokens: Tensor  # (1, rows) int64
    positions: Tensor  # (1, rows) int64
    labels: Tensor  # (rows,) int64, 0 where there is none
    loss_mask: Tensor  # (1, rows) int64
    advantages: Tensor  # (rows,) fp32
    selection: RowSelection
    packed_seq_params: Any


def pack(rollouts: list[Rollout], advantages: list[float], *, multiple: int) -> MicroBatch:
    """Pack `rollouts`, one advantage each, padded to a multiple of `multiple` rows, which the TP size must divide.

    Mask and labels are shifted here by hand, as a trainer does, and the selection comes from `layouts`: two ways to
    the same rows, so that a comparison of the two paths also finds a row that is off by one.
    """
    lengths = [len(rollout.tokens) for rollout in rollouts]
    padding = -sum(lengths) % multiple
    layout = packed(lengths, [rollout.response_length for rollout in rollouts], sum(lengths) + padding)
    tokens = layout.join_tokens([torch.tensor(rollout.tokens) for rollout in rollouts])
    masks = [torch.tensor(rollout.loss_mask, dtype=torch.int64) for rollout in rollouts]
    keep = layout.rows_of_masks(masks)
    shifted = [F.pad(mask, (length - len(mask) - 1, 1)) for mask, length in zip(masks, lengths, strict=True)]
    spread = [torch.full((length,), value) for length, value in zip(lengths, advantages, strict=True)]
    bounds = list(accumulate(lengths, initial=0)) + ([sum(lengths) + padding] if padding else [])
    return MicroBatch(
        tokens=F.pad(tokens, (0, padding))[None],
        positions=torch.cat([torch.arange(length) for length in [*lengths, padding]])[None],
        labels=F.pad(tokens[1:], (0, padding + 1)),
        loss_mask=F.pad(torch.cat(shifted), (0, padding))[None],
        advantages=F.pad(torch.cat(spread), (0, padding)),
        selection=RowSelection.build(keep, layout.label_source, tokens),
        packed_seq_params=packed_seq_params(bounds),
    )
