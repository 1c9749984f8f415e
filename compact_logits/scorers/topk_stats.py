"""What a top-k KL needs of k numbers a row: the student's own top, which ids are in it, and ids listed twice."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_top_", "chosen_of_all", "first_of_each_id", "place_in", "summed_by_id"]


def add_top_(
    top: Tensor,  # (rows, k), the largest logits so far, descending; overwritten
    top_ids: Tensor,  # (rows, k) int64, their global ids; overwritten
    logits: Tensor,  # (rows, columns)
    first: int,  # the global id of the first column
) -> None:
    """Let the logits of a slice take their places among the k largest.

    Which of several equal logits counts as larger is what `torch.topk` says.
    """
    k = top.shape[1]
    values, columns = logits.topk(min(k, logits.shape[1]), dim=1)
    values, chosen = torch.cat([top, values.to(top.dtype)], dim=1).topk(k, dim=1)
    top.copy_(values)
    top_ids.copy_(torch.cat([top_ids, columns + first], dim=1).gather(1, chosen))


def place_in(
    top_ids: Tensor,  # (rows, k) int64, distinct but for -1
    ids: Tensor,  # (rows, k) int64
) -> Tensor:  # (rows, k) int64
    """At which place of `top_ids` each id stands, `k` for at none."""
    # By looking each id up in the sorted ones: (rows, k) numbers, where comparing all pairs takes k times that.
    ordered, order = top_ids.sort(dim=1)
    at = torch.searchsorted(ordered, ids.contiguous()).clamp_(max=ids.shape[1] - 1)
    return order.gather(1, at).masked_fill_(ordered.gather(1, at) != ids, ids.shape[1])


def chosen_of_all(
    tops: Tensor,  # (ranks, rows, k), the largest logits of each rank, descending
    rank: int,
    place: Tensor,  # (rows, k) int64, of this rank's ids among its own top, k for none
) -> Tensor:  # (rows, k) bool
    """Which of this rank's ids are among the `k` largest logits of all ranks."""
    ranks, rows, k = tops.shape
    best = torch.cat(tuple(tops), dim=1).topk(k, dim=1).indices
    chosen = torch.zeros(rows, ranks * k + 1, dtype=torch.bool, device=tops.device).scatter_(1, best, True)
    # The last column is nobody's: ids with no place look there.
    return chosen.gather(1, torch.where(place < k, place + rank * k, ranks * k))


def first_of_each_id(
    ids: Tensor,  # (rows, k)
) -> Tensor:  # (rows, k) bool
    """Set at the first of several entries with the same id, so that what belongs to an id is counted once."""
    ordered, order = ids.sort(dim=1, stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(first).scatter_(1, order, first)


def summed_by_id(
    ids: Tensor,  # (rows, k)
    values: Tensor,  # (rows, k)
) -> Tensor:  # (rows, k)
    """At each entry the sum over all entries of the row with its id."""
    ordered, order = ids.sort(dim=1, stable=True)
    new = torch.zeros_like(ids)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    of_id = new.cumsum(dim=1)  # which of the row's distinct ids, in their order
    sums = torch.zeros_like(values).scatter_add_(1, of_id, values.gather(1, order))
    return torch.empty_like(values).scatter_(1, order, sums.gather(1, of_id))
