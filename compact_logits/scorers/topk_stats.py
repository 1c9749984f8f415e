"""What a top-k KL needs of a block of logits: the logits at the teacher's ids, the student's own top, and row sums."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_at_", "chosen_of_all", "clear_at_", "first_of_each_id", "joined_tops", "row_sums", "student_top"]

_TILE = 4096


def row_sums(
    values: Tensor,  # (block, vocab_local)
) -> Tensor:  # (block,)
    """The sum of each row, to the same bits however many rows the block has.

    A sum over one long row is split among threads where a sum over several is not. Summed tile by tile, no row is.
    """
    whole = values.shape[1] - values.shape[1] % _TILE
    tiles = values[:, :whole].unflatten(1, (whole // _TILE, _TILE)).sum(dim=2)
    return tiles.sum(dim=1) + values[:, whole:].sum(dim=1)


def student_top(
    z: Tensor,  # (block, vocab_local)
    ids: Tensor,  # (block, k) int64, local
) -> tuple[Tensor, Tensor]:  # values (block, k), descending; place (block, k) int64
    """The `k` largest logits of this slice, and at which place among them each of `ids` stands, `k` for at none.

    A slice narrower than `k` is filled up with -inf. Which of several equal logits counts as larger is what
    `torch.topk` says, here as wherever the student's top-k is formed from whole rows.
    """
    k = ids.shape[1]
    narrow = min(k, z.shape[1])
    values, columns = z.topk(narrow, dim=1)
    # By looking each id up in the sorted columns: (block, k) numbers, where comparing all pairs takes k times that.
    columns, order = columns.sort(dim=1)
    at = torch.searchsorted(columns, ids).clamp_(max=narrow - 1)
    place = order.gather(1, at).masked_fill_(columns.gather(1, at) != ids, k)
    return torch.nn.functional.pad(values, (0, k - narrow), value=-torch.inf), place


def joined_tops(
    tops: Tensor,  # (parts, rows, k), the largest logits of each part of a slice, descending
    places: Tensor,  # (parts, rows, k) int64, of the ids among each part's top, k for none
) -> tuple[Tensor, Tensor]:  # values (rows, k), descending; place (rows, k) int64
    """What `student_top` says of all parts together; an id has a place in one of them at most."""
    parts, _, k = tops.shape
    values, chosen = torch.cat(tuple(tops), dim=1).topk(k, dim=1)
    # Where each of all entries went to, k for those that were left out; the last column is that of no place.
    went = torch.full((values.shape[0], parts * k + 1), k, device=tops.device)
    went.scatter_(1, chosen, torch.arange(k, device=tops.device).expand_as(chosen))
    starts = torch.arange(parts, device=tops.device)[:, None, None] * k
    entry = torch.where(places < k, places + starts, parts * k).amin(dim=0)
    return values, went.gather(1, entry)


def chosen_of_all(
    tops: Tensor,  # (ranks, rows, k), the largest logits of each slice, descending
    rank: int,
    place: Tensor,  # (rows, k) int64, of this rank's ids among its own top, k for none
) -> Tensor:  # (rows, k) bool
    """Which of this rank's ids are among the `k` largest logits of all slices."""
    ranks, rows, k = tops.shape
    best = torch.cat(tuple(tops), dim=1).topk(k, dim=1).indices
    chosen = torch.zeros(rows, ranks * k + 1, dtype=torch.bool, device=tops.device).scatter_(1, best, True)
    # The last column is nobody's: ids with no place look there.
    return chosen.gather(1, torch.where(place < k, place + rank * k, ranks * k))


def first_of_each_id(
    ids: Tensor,  # (rows, k), global: ids of other slices share a local one
) -> Tensor:  # (rows, k) bool
    """Set at the first of several entries with the same id, so that what belongs to an id is counted once."""
    ordered, order = ids.sort(dim=1, stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(first).scatter_(1, order, first)


def clear_at_(
    values: Tensor,  # (block, vocab_local), none negative
    ids: Tensor,  # (block, k) int64, local
    owned: Tensor,  # (block, k) bool
) -> None:
    """Zero the columns at the owned ids. As a minimum, since ids of other slices point at some column here as well."""
    values.scatter_reduce_(1, ids, torch.where(owned, 0.0, torch.inf).to(values.dtype), "amin")


def add_at_(
    values: Tensor,  # (block, vocab_local)
    ids: Tensor,  # (block, k) int64, local
    owned: Tensor,  # (block, k) bool
    addends: Tensor,  # (block, k)
) -> None:
    """Add to the columns at the owned ids; where an id is listed twice, both addends count."""
    values.scatter_add_(1, ids, addends.masked_fill(~owned, 0.0))
