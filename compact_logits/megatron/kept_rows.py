"""From a rank's hidden states to the rows that it projects, and from their scalars back to the rank's own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compact_logits.engine.balance import Balanced, Transfers, pays, return_rows
from compact_logits.engine.row_gather import Local, Replicated, RowGather, SequenceSharded
from compact_logits.errors import InputError
from compact_logits.rows import RowSelection, select

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ContextShare", "ProjectedRows", "project_rows"]


@dataclass(frozen=True, eq=False)
class ContextShare:
    """The row selections of all context-parallel ranks, so that each rank projects an equal number of rows.

    Every rank of `group` must have the same ones, and must run the same micro-batches in the same order. If the busiest
    rank would lose less than a tenth of its rows, nothing is exchanged.
    """

    group: ProcessGroup
    selections: tuple[RowSelection, ...]  # in rank order

    def __post_init__(self) -> None:
        if len(self.selections) != self.group.size():
            raise InputError(
                f"needed the row selection of each of the {self.group.size()} context-parallel ranks, got "
                f"{len(self.selections)}"
            )

    @property
    def pays(self) -> bool:
        return pays([selection.kept for selection in self.selections])


@dataclass(frozen=True)
class ProjectedRows:
    """The rows that a rank passes to the engine, and how they become the projected ones."""

    rows: Tensor  # (local rows, hidden)
    targets: Tensor  # (projected rows,) int64
    gather: RowGather
    give_back: Callable[[Tensor], Tensor]  # (projected rows, ...) to (kept rows of this rank, ...)


def project_rows(
    hidden: Tensor,  # (rows / shards, hidden)
    selection: RowSelection,
    group: ProcessGroup | None,  # tensor-parallel, None for one rank
    share: ContextShare | None,
    *,
    sequence_parallel: bool,
) -> ProjectedRows:
    """Select this rank's kept rows, and say how they become the projected ones. If all rows are kept, none is copied.

    Collectives: none here. If `share` pays, `gather` and `give_back` have one all-to-all each over the context-parallel
    group, in forward and again in backward.
    """
    shards = group.size() if sequence_parallel and group is not None else 1
    shard = group.rank() if sequence_parallel and group is not None else 0
    counts = selection.counts(shards)
    every = counts[shard] == hidden.shape[0]
    rows = hidden if every else select(hidden, selection.of_shard(shard, shards))
    if share is None or not share.pays:
        gather = _gather(group, counts, sequence_parallel)
        return ProjectedRows(rows, selection.targets, gather, lambda values: values)
    over, rank = share.group, share.group.rank()
    of_shards = zip(*(each.counts(shards) for each in share.selections), strict=True)
    transfers = [Transfers.even(of_ranks) for of_ranks in of_shards]
    shares = tuple(sum(each.received(rank)) for each in transfers)
    return ProjectedRows(
        rows=rows,
        targets=_targets(share, transfers, rank),
        gather=Balanced(_gather(group, shares, sequence_parallel), over, transfers[shard]),
        give_back=lambda values: return_rows(values, over, transfers),
    )


def _gather(group: ProcessGroup | None, counts: tuple[int, ...], sequence_parallel: bool) -> RowGather:
    if sequence_parallel:
        assert group is not None, "Megatron switches sequence parallelism off where there is one rank"
        return SequenceSharded(group, counts)
    return Local() if group is None else Replicated(group)


def _targets(share: ContextShare, transfers: list[Transfers], rank: int) -> Tensor:  # (projected rows,)
    of_ranks = [each.targets.split(list(each.counts(len(transfers)))) for each in share.selections]
    parts = [
        part
        for shard, each in enumerate(transfers)
        for part in each.parts(rank, [of_shards[shard] for of_shards in of_ranks])
    ]
    return torch.cat(parts)
