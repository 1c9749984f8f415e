"""Which ranks share rows of hidden states, and how the gradient of these rows goes back to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.collectives import all_gather, start_reduce_scatter
from compact_logits.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Local", "Replicated", "RowExchange", "SequenceSharded", "Wait"]

Wait = Callable[[], Tensor]

_MOVED_BYTES = 8 * 2**20  # of rows that move, at a time
_PADDING_PART = 8  # padding stays in memory where it is no more than this part of the rows


class RowExchange(Protocol):
    """Between the rows this rank was given and the rows it projects."""

    def gather(
        self,
        rows: Tensor,  # (local rows, hidden)
    ) -> Tensor:  # (projected rows, hidden)
        ...

    def room(
        self,
        rows: Tensor,  # (projected rows, hidden)
    ) -> Tensor:  # (projected rows or more, hidden), not initialised
        """Where the gradient of these rows is to be formed, in its first ones."""
        ...

    def start_reduce(
        self,
        room: Tensor,  # this rank's part of the gradient is in its first rows; overwritten
    ) -> Wait:  # wait() -> (local rows, hidden)
        ...


class Local:
    """The rows and the whole vocabulary are here. No collective."""

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def room(self, rows: Tensor) -> Tensor:
        return rows.new_empty(rows.shape)

    def start_reduce(self, room: Tensor) -> Wait:
        return lambda: room


@dataclass(frozen=True)
class Replicated:
    """Every rank of the group has the same rows and a slice of the vocabulary.

    Collectives: forward none; backward one all-reduce of `(rows, hidden)`, of one row of zeros where there are none.
    """

    group: ProcessGroup

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def room(self, rows: Tensor) -> Tensor:
        return rows.new_empty(rows.shape)

    def start_reduce(self, room: Tensor) -> Wait:
        sent = room if room.shape[0] else room.new_zeros(1, room.shape[1])
        work = dist.all_reduce(sent, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return room

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
    def _slot(self) -> int:
        return max(1, *self.counts)

    def check(self, rows: Tensor) -> None:
        """Raise the `InputError` that `gather` would raise, unless these are as many rows as this rank's count says."""
        mine = self.counts[self.group.rank()]
        if rows.shape[0] != mine:
            raise InputError(f"this rank's row count is {mine}, but it has {rows.shape[0]} rows")

    def gather(self, rows: Tensor) -> Tensor:
        self.check(rows)
        mine = rows.shape[0]
        sent = rows.new_zeros(self._slot, rows.shape[1])
        sent[:mine] = rows
        received = sent.new_empty(self.group.size() * self._slot, rows.shape[1])
        all_gather(received, sent, self.group)
        total = sum(self.counts)
        if (len(received) - total) * _PADDING_PART > total:
            slots = received.view(self.group.size(), self._slot, -1)
            return torch.cat([slots[rank, :count] for rank, count in enumerate(self.counts)])
        # The rows move together where they are: a copy would be as large as all of them, to spare a little padding.
        for rank, (count, end) in enumerate(zip(self.counts, accumulate(self.counts), strict=True)):
            _move(received, rank * self._slot, end - count, count)
        return received[:total]

    def room(self, rows: Tensor) -> Tensor:
        return rows.new_empty(self.group.size() * self._slot, rows.shape[1])

    def start_reduce(self, room: Tensor) -> Wait:
        # The rows move apart where they are, the last ones first.
        end = sum(self.counts)
        for rank, count in reversed([*enumerate(self.counts)]):
            start = rank * self._slot
            _move(room, end - count, start, count)
            room[start + count : start + self._slot] = 0
            end -= count
        received = room.new_empty(self._slot, room.shape[1])
        work = start_reduce_scatter(received, room, self.group)

        def wait() -> Tensor:
            work.wait()
            return received[: self.counts[self.group.rank()]]

        return wait


def _move(
    rows: Tensor,  # (rows, hidden)
    start: int,
    to: int,  # the two ranges may overlap
    count: int,
) -> None:
    step = max(_MOVED_BYTES // max(rows[:1].nbytes, 1), 1)
    pieces = range(0, count if to != start else 0, step)
    for first in pieces if to < start else reversed(pieces):
        last = min(first + step, count)
        rows[to + first : to + last] = rows[start + first : start + last].clone()
