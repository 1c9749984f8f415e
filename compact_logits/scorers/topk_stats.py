"""What a top-k KL needs of k numbers a row: the student's own top, which ids are in it, and ids listed twice."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_top_", "in_top", "repeats", "summed_by_id"]


def add_top_(
    top: Tensor,  # (rows, k), the largest logits so far, descending, -inf where there are none yet; overwritten
    top_ids: Tensor,  # (rows, k) int64, their global ids; overwritten
    logits: Tensor,  # (rows, columns)
    first: int,  # the global id of the first column
) -> None:
    """Let the logits of a slice take their places among the k largest.

    Which of several equal logits counts as larger is what `torch.topk` says.
    """
    k = top.shape[1]
    values, columns = logits.topk(min(k, logits.shape[1]), dim=1)
    # A logit of -inf comes before a place that no id has taken, here and among the ranks.
    values = values.clamp(min=torch.finfo(values.dtype).min)
    chosen = torch.empty_like(top_ids)
    torch.topk(torch.cat([top, values], dim=1), k, dim=1, out=(top, chosen))
    torch.gather(torch.cat([top_ids, columns + first], dim=1), 1, chosen, out=top_ids)


def in_top(
    top_ids: Tensor,  # (rows, k) int64, of this rank's largest logits, distinct but for -1
    tops: Tensor,  # (ranks, rows, k), the largest logits of each rank, descending
    rank: int,
    ids: Tensor,  # (rows, k) int64
) -> Tensor:  # (rows, k) bool
    """Which of the ids are this rank's and among the `k` largest logits of all ranks."""
    # By looking each id up in the sorted ones: (rows, k) numbers, where comparing all pairs takes k times that.
    ordered, order = top_ids.sort(dim=1)
    at = torch.searchsorted(ordered, ids.contiguous()).clamp_(max=ids.shape[1] - 1)
    found = ordered.gather(1, at) == ids
    ranks, rows, k = tops.shape
    if ranks == 1:
        return found
    best = torch.cat(tuple(tops), dim=1).topk(k, dim=1).indices
    chosen = torch.zeros(rows, ranks * k, dtype=torch.bool, device=tops.device).scatter_(1, best, True)
    return found & chosen[:, rank * k : (rank + 1) * k].gather(1, order.gather(1, at))


def repeats(
    ids: Tensor,  # (rows, k)
) -> Tensor:  # (rows, k) bool
    """Set at all entries with the same id but the first, so that what belongs to an id is counted once."""
    ordered, order = ids.sort(dim=1, stable=True)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    torch.eq(ordered[:, 1:], ordered[:, :-1], out=repeated[:, 1:])
    return torch.empty_like(repeated).scatter_(1, order, repeated)


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
