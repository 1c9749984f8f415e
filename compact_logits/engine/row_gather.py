"""From the rows of hidden states that a rank has to the rows that it projects, and the gradient's way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.engine.collectives import all_gather, start_reduce_scatter
from compact_logits.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Local", "Replicated", "RowGather", "SequenceSharded", "Wait"]

Wait = Callable[[], Tensor]


class RowGather(Protocol):
    """From the rows that this rank has to the rows that it projects, and back for the gradient."""

    def gather(
        self,
        rows: Tensor,  # (local rows, hidden)
    ) -> Tensor:  # (projected rows, hidden)
        ...

    def start_reduce(
        self,
        d_rows: Tensor,  # (projected rows, hidden), this rank's part of the gradient; overwritten
    ) -> Wait:  # wait() -> (local rows, hidden)
        """Start to sum the ranks' parts. The last product for the weight's gradient runs meanwhile."""
        ...


class Local:
    """The rows and the whole vocabulary are here. No collective."""

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def start_reduce(self, d_rows: Tensor) -> Wait:
        return lambda: d_rows


@dataclass(frozen=True)
class Replicated:
    """Every rank of the group has the same rows and a slice of the vocabulary.

    Collectives: forward none; backward one all-reduce of `(rows, hidden)`, of one row of zeros where there are none.
    """

    group: ProcessGroup

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def start_reduce(self, d_rows: Tensor) -> Wait:
        sent = d_rows if d_rows.shape[0] else d_rows.new_zeros(1, d_rows.shape[1])
        work = dist.all_reduce(sent, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return d_rows

        return wait


@dataclass(frozen=True)
class SequenceSharded:
    """Every rank of the group has its own rows (sequence parallelism) and a slice of the vocabulary.

    `counts[r]` is how many rows rank `r` has; every rank knows all of them, since the loss mask is replicated, so only
    the rows that count travel, padded to the largest count. The padding is not projected.

    Collectives: forward one all-gather, backward one reduce-scatter, both of `(ranks * max(counts), hidden)`, of one
    row a rank where there are none.
    """

    group: ProcessGroup
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != self.group.size():
            raise InputError(
                f"needed one row count for each of the {self.group.size()} ranks of the group, got {len(self.counts)}"
            )

    @property
    def _padded(self) -> int:
        return max(1, *self.counts)

    def check(self, rows: Tensor) -> None:
        """Raise `InputError`, as `gather` does, unless `rows` has as many rows as `counts` says for this rank."""
        mine = self.counts[self.group.rank()]
        if rows.shape[0] != mine:
            raise InputError(f"this rank's row count is {mine}, but it has {rows.shape[0]} rows")

    def gather(self, rows: Tensor) -> Tensor:
        self.check(rows)
        padded = rows.shape[0] < self._padded
        sent = torch.cat([rows, rows.new_zeros(self._padded - rows.shape[0], rows.shape[1])]) if padded else rows
        received = sent.new_empty(self.group.size() * self._padded, rows.shape[1])
        all_gather(received, sent.contiguous(), self.group)
        if min(self.counts) == self._padded:
            return received
        return torch.cat([part[:count] for part, count in zip(self._parts(received), self.counts, strict=True)])

    def start_reduce(self, d_rows: Tensor) -> Wait:
        sent = d_rows
        if min(self.counts) < self._padded:
            sent = d_rows.new_zeros(self.group.size() * self._padded, d_rows.shape[1])
            for part, own in zip(self._parts(sent), d_rows.split(self.counts), strict=True):
                part[: own.shape[0]] = own
        received = sent.new_empty(self._padded, sent.shape[1])
        work = start_reduce_scatter(received, sent, self.group)

        def wait() -> Tensor:
            work.wait()
            return received[: self.counts[self.group.rank()]]

        return wait

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:  # per rank (padded, hidden)
        return rows.split(self._padded)
