"""Balance the kept rows between ranks that hold the same slice of the vocabulary, such as context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from compact_logits.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from compact_logits.engine.row_gather import RowGather, Wait

__all__ = ["Balanced", "Transfers", "pays", "return_rows"]

# The busiest rank must lose a tenth of its rows: the exchange costs an all-to-all of hidden states in forward, another
# in backward.
_LEAST_GAIN = 0.1


def pays(
    counts: Sequence[int],  # kept rows of each rank
) -> bool:
    """Whether balancing takes at least a tenth of its rows off the busiest rank."""
    busiest, share = max(counts), -(-sum(counts) // len(counts))
    return busiest - share >= _LEAST_GAIN * busiest > 0


@dataclass(frozen=True)
class Transfers:
    """Rank `j` projects `rows[i][j]` consecutive rows of rank `i`. Rank `i` sends its rows in the order of `j`."""

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def even(
        cls,
        counts: Sequence[int],  # rows of each rank
    ) -> Transfers:
        """Row counts that differ by at most one, the larger ones on the lower ranks. A rank sends only its surplus."""
        ranks, total = len(counts), sum(counts)
        shares = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
        moves = [[0] * ranks for _ in range(ranks)]
        room = [max(share - count, 0) for share, count in zip(shares, counts, strict=True)]
        to = 0
        for rank, (count, share) in enumerate(zip(counts, shares, strict=True)):
            moves[rank][rank] = min(count, share)
            surplus = count - share
            while surplus > 0:
                if room[to] == 0:
                    to += 1
                    continue
                moved = min(surplus, room[to])
                moves[rank][to] += moved
                room[to] -= moved
                surplus -= moved
        return cls(tuple(map(tuple, moves)))

    def sent(self, rank: int) -> list[int]:
        """How many of its rows the rank sends to each rank, itself included."""
        return list(self.rows[rank])

    def received(self, rank: int) -> list[int]:
        """How many rows the rank has afterwards from each rank, in rank order."""
        return [row[rank] for row in self.rows]

    def parts(
        self,
        rank: int,
        of_ranks: Sequence[Tensor],  # (rows, ...) of each rank
    ) -> list[Tensor]:
        """The rank's values afterwards, from each rank. No collective: all ranks know all values."""
        starts = [sum(row[:rank]) for row in self.rows]
        return [
            values[start : start + row[rank]] for values, start, row in zip(of_ranks, starts, self.rows, strict=True)
        ]


@dataclass(frozen=True)
class Balanced:
    """The rows of `inner`, after the ranks of `group` have exchanged rows to balance their counts.

    Collectives over `group`, beside those of `inner`: forward one all-to-all, backward one all-to-all, of hidden
    states of the rows that change rank.
    """

    inner: RowGather
    group: ProcessGroup
    transfers: Transfers

    def gather(self, rows: Tensor) -> Tensor:
        rank = self.group.rank()
        sent, received = self.transfers.sent(rank), self.transfers.received(rank)
        if rows.shape[0] != sum(sent):
            raise InputError(f"this rank's row count is {sum(sent)}, but it has {rows.shape[0]} rows")
        return self.inner.gather(_all_to_all(rows, sent, received, self.group))

    def start_reduce(self, d_rows: Tensor) -> Wait:
        wait_inner, rank = self.inner.start_reduce(d_rows), self.group.rank()

        def wait() -> Tensor:
            sent, received = self.transfers.sent(rank), self.transfers.received(rank)
            return _all_to_all(wait_inner(), received, sent, self.group)

        return wait


def return_rows(
    values: Tensor,  # (projected rows, ...), ordered by shard, then by sending rank
    group: ProcessGroup,
    shards: Sequence[Transfers],  # of each sequence-parallel shard
) -> Tensor:  # (kept rows of this rank, ...), ordered by shard, each in its original order
    """Return the results of other ranks' rows to these ranks. Differentiable.

    Collectives over `group`: forward one all-to-all, backward one all-to-all.
    """
    rank, ranks = group.rank(), group.size()
    received = [each.received(rank) for each in shards]
    sent = [each.sent(rank) for each in shards]
    by_rank = _regrouped(values, received)
    totals_out = [sum(of_shard[i] for of_shard in received) for i in range(ranks)]
    totals_in = [sum(of_shard[i] for of_shard in sent) for i in range(ranks)]
    returned = _Exchange.apply(by_rank, totals_out, totals_in, group)
    return _regrouped(returned, [list(of_rank) for of_rank in zip(*sent, strict=True)])


def _regrouped(
    values: Tensor,  # (rows, ...), ordered by outer, then inner
    sizes: Sequence[Sequence[int]],  # [outer][inner]
) -> Tensor:  # (rows, ...), ordered by inner, then outer
    flat = [size for inner in sizes for size in inner]
    starts = [end - size for end, size in zip(accumulate(flat), flat, strict=True)]
    width = len(sizes[0])
    pieces = [
        values[starts[outer * width + inner] :][: sizes[outer][inner]]
        for inner in range(width)
        for outer in range(len(sizes))
    ]
    return torch.cat(pieces)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(values, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_values: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(d_values, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(values: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    result = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(result, values.contiguous(), received, sent, group=group)
    return result
