"""Which rows count, and how to select and scatter them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compact_logits.errors import InputError
from compact_logits.host_values import as_index, describe, to_device

__all__ = ["RowSelection", "scatter", "select"]


@dataclass(frozen=True, eq=False)
class RowSelection:
    """The rows of one micro-batch, on one context-parallel rank, that are projected.

    Built once a micro-batch from host values, so that nothing later waits for the device. It is the same on every
    tensor-parallel rank. Under sequence parallelism over `shards` ranks, shard `r` holds the `num_rows / shards` rows
    from `r * num_rows / shards` on; `counts` and `of_shard` say which of the kept rows these are.
    """

    indices: Tensor  # (kept,) int64, ascending, positions among the `num_rows` rows
    targets: Tensor  # (kept,) int64, the id of the token at the next position of the same sequence
    num_rows: int
    host_indices: Tensor  # (kept,) int64, `indices` on the CPU

    @classmethod
    def build(
        cls,
        keep: Tensor,  # (rows,) bool, on the CPU
        label_source: Tensor,  # (rows,) int64, on the CPU: index into `tokens` of the row's label, -1 for none
        tokens: Tensor,  # (tokens,) int64, all sequences of the micro-batch one after another, on any device
    ) -> RowSelection:
        """Select the rows where `keep` is set. Collectives: none. Device synchronisation: none.

        Raises `InputError` where a kept row has no label (the last token of a sequence, padding) or one beyond
        `tokens`, and where `keep` or `label_source` is not on the CPU. `indices` and `targets` are on the device of
        `tokens`.
        """
        if keep.device.type != "cpu" or label_source.device.type != "cpu":
            raise InputError("needed keep and label_source on the CPU; copy the loss mask there once a micro-batch")
        if (keep.dtype, label_source.dtype) != (torch.bool, torch.int64) or keep.shape != label_source.shape:
            raise InputError(
                f"needed bool keep and int64 label_source of one length, got {tuple(keep.shape)} of {keep.dtype} "
                f"and {tuple(label_source.shape)} of {label_source.dtype}"
            )
        if keep.dim() != 1 or tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise InputError(
                f"needed keep (rows,) and integer tokens (tokens,), got {tuple(keep.shape)} and "
                f"{tuple(tokens.shape)} of {tokens.dtype}"
            )
        host_indices = keep.nonzero().squeeze(1)
        sources = label_source[host_indices]
        if bool((sources < 0).any()):
            row = int(host_indices[sources < 0][0])
            raise InputError(
                f"row {row} is kept but has no label: it is the last token of its sequence, or padding; "
                f"the loss mask must be aligned to the row that predicts the token"
            )
        if bool((sources >= tokens.shape[0]).any()):
            row = int(host_indices[sources >= tokens.shape[0]][0])
            raise InputError(
                f"row {row} is kept but its label is token {int(label_source[row])} of only {tokens.shape[0]}; "
                f"pass the tokens of all the micro-batch's sequences"
            )
        indices, sources = to_device(torch.stack([host_indices, sources]), tokens.device)
        targets = tokens[sources].to(torch.int64)
        return cls(indices=indices, targets=targets, num_rows=keep.shape[0], host_indices=host_indices)

    @classmethod
    def of_masks(
        cls,
        masks: Sequence[Tensor],  # (rows,) bool each, on the CPU, one for each loss term
        label_source: Tensor,  # (rows,) int64, on the CPU
        tokens: Tensor,  # (tokens,) int64
    ) -> RowSelection:
        """Select the rows that any of the masks keeps, so that each term can `read` its own. As `build` otherwise."""
        if not masks or any(mask.dtype != torch.bool or mask.shape != masks[0].shape for mask in masks):
            given = ", ".join(f"{tuple(mask.shape)} of {mask.dtype}" for mask in masks) or "none"
            raise InputError(f"needed one or more bool masks of one shape, got {given}")
        return cls.build(torch.stack(tuple(masks)).any(dim=0), label_source, tokens)

    def read(
        self,
        values: Tensor,  # (kept, ...) as computed, or (rows, ...) as scattered
        mask: Tensor,  # (rows,) bool, on the CPU
    ) -> Tensor:  # (rows of the mask, ...)
        """The values of the rows where `mask` is set, differentiable. Collectives: none. Device synchronisation: none.

        Raises `InputError` where a row of the mask was not selected: it has no value, and a scattered 0 would be
        mistaken for one.
        """
        if mask.device.type != "cpu" or mask.dtype != torch.bool or tuple(mask.shape) != (self.num_rows,):
            raise InputError(
                f"needed a bool mask ({self.num_rows},) on the CPU, got {tuple(mask.shape)} of {mask.dtype} "
                f"on {mask.device}"
            )
        if values.shape[:1] not in ((self.kept,), (self.num_rows,)):
            raise InputError(
                f"needed values of the {self.kept} kept rows or of all {self.num_rows}, got {tuple(values.shape)}"
            )
        wanted = mask.nonzero().squeeze(1)
        places = torch.searchsorted(self.host_indices, wanted)
        found = torch.zeros_like(wanted, dtype=torch.bool)
        inside = places < self.kept
        found[inside] = self.host_indices[places[inside]] == wanted[inside]
        if not bool(found.all()):
            raise InputError(
                f"row {int(wanted[~found][0])} is read but was not selected; build the selection of all masks that "
                f"are read: RowSelection.of_masks"
            )
        chosen = places if values.shape[0] == self.kept else wanted
        return values.index_select(0, to_device(chosen, values.device))

    @property
    def kept(self) -> int:
        return self.host_indices.shape[0]

    def counts(self, shards: int) -> tuple[int, ...]:
        """How many kept rows each of `shards` sequence-parallel shards holds; 1 for no sequence parallelism.

        Raises `InputError` where the rows do not divide into the shards.
        """
        per_shard = self._rows_per_shard(shards)
        starts = torch.arange(shards + 1) * per_shard
        return tuple(torch.searchsorted(self.host_indices, starts).diff().tolist())

    def of_shard(self, rank: int, shards: int) -> Tensor:  # (counts(shards)[rank],) int64, on the device of `indices`
        """The kept rows of one sequence-parallel shard, counted from the shard's first row.

        Raises `InputError` as `counts` does, and where there is no such shard.
        """
        counts = self.counts(shards)
        place = as_index(rank)
        if place is None or not 0 <= place < len(counts):
            raise InputError(
                f"there are the shards 0 to {len(counts) - 1}, got {describe(rank)}; pass the rank in the group"
            )
        start = sum(counts[:place])
        return self.indices[start : start + counts[place]] - place * self._rows_per_shard(shards)

    def _rows_per_shard(self, shards: int) -> int:
        count = as_index(shards)
        if count is None or count < 1 or self.num_rows % count:
            raise InputError(
                f"{self.num_rows} rows do not divide into {describe(shards)} sequence-parallel shards; pad them"
            )
        return self.num_rows // count


def select(
    rows: Tensor,  # (rows, ...)
    indices: Tensor,  # (kept,) int64, distinct
) -> Tensor:  # (kept, ...)
    """The rows at `indices`. The gradient of every other row is exactly zero, whatever its values."""
    return rows.index_select(0, indices)


def scatter(
    values: Tensor,  # (kept, ...)
    indices: Tensor,  # (kept,) int64, distinct
    num_rows: int,
) -> Tensor:  # (rows, ...), own storage
    """The inverse of `select`: a new tensor, `values` at `indices` and exactly 0.0 elsewhere.

    Raises `InputError` unless `num_rows` is a whole number, 0 or more.
    """
    total = as_index(num_rows)
    if total is None or total < 0:
        raise InputError(
            f"num_rows must be a whole number, 0 or more, got {describe(num_rows)}; pass how many rows there were"
        )
    return values.new_zeros(total, *values.shape[1:]).index_copy(0, indices, values)
