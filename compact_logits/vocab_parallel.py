"""Where a rank's slice of the vocabulary stands, and how per-row statistics of all slices become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compact_logits.collectives import all_gather
from compact_logits.errors import InputError
from compact_logits.host_values import as_index, shown

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["VocabShard", "gather_stats", "merge_softmax"]


@dataclass(frozen=True)
class VocabShard:
    """This rank holds the vocabulary ids `start <= id < stop`; the ranks of `group` hold the others.

    Shards may be uneven and may be empty; together they must cover the vocabulary once. `group=None`, or a group of one
    rank, says that this shard is the whole vocabulary, and then it starts at 0.
    """

    start: int
    stop: int
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        start, stop = as_index(self.start), as_index(self.stop)
        if start is None or stop is None:
            raise InputError(
                f"a vocabulary shard's start and stop must be whole numbers, got start={shown(self.start)}, "
                f"stop={shown(self.stop)}; pass this rank's first id and the one after its last"
            )
        if self.group is not None and not callable(getattr(self.group, "rank", None)):
            raise InputError(
                f"a vocabulary shard's group must be a process group that this rank is in, or None, got "
                f"{shown(self.group)}; of a mesh, pass mesh.get_group()"
            )
        # As plain numbers, whoever's type they were given in.
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", stop)
        if not 0 <= self.start <= self.stop:
            raise InputError(f"a vocabulary shard needs 0 <= start <= stop, got start={self.start}, stop={self.stop}")
        if not self.sharded and self.start != 0:
            raise InputError(
                f"a vocabulary shard without other ranks is the whole vocabulary and starts at 0, "
                f"got start={self.start}; pass the tensor-parallel group"
            )

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def sharded(self) -> bool:
        """Whether other ranks hold other ids."""
        return self.group is not None and self.group.size() > 1

    def below(
        self,
        vocab_size: int | None,  # None for no bound
    ) -> VocabShard:
        """The part of this shard with ids below `vocab_size`; empty, where it starts, if it is padding throughout."""
        stop = self.stop if vocab_size is None else max(self.start, min(self.stop, vocab_size))
        return _Columns(self.start, stop, self.group)

    def columns(
        self,
        columns: slice,  # counted from this shard's first id
    ) -> VocabShard:
        """Some of this rank's columns, as a shard of their own; the group's ranks hold all others."""
        return _Columns(self.start + columns.start, self.start + columns.stop, self.group)

    def local_ids(
        self,
        ids: Tensor,  # (...) int64, global
    ) -> tuple[Tensor, Tensor]:  # local ids (...), clamped into the shard; owned (...) bool
        """Translate global ids. An id of another shard gets some legal local id and `owned=False`. No collective."""
        owned = (ids >= self.start) & (ids < self.stop)
        return (ids - self.start).clamp(0, max(self.size - 1, 0)), owned


@dataclass(frozen=True)
class _Columns(VocabShard):
    """A part of one rank's shard, which may start anywhere also where there are no other ranks."""

    def __post_init__(self) -> None:
        pass


def gather_stats(
    stats: Tensor,  # (rows, stats) fp32
    shard: VocabShard,
) -> Tensor:  # (ranks, rows, stats) fp32
    """All ranks' statistics of the same rows, in rank order, so that every rank merges them to the same bits.

    One all-gather where the vocabulary is sharded, none otherwise. With zero rows the all-gather still takes place,
    over one row, since back ends disagree about empty messages.
    """
    if not shard.sharded:
        return stats[None]
    assert shard.group is not None
    rows, width = stats.shape
    sent = stats.contiguous() if rows else stats.new_zeros(1, width)
    received = sent.new_empty(shard.group.size() * sent.shape[0], width)
    all_gather(received, sent, shard.group)
    return received.view(shard.group.size(), -1, width)[:, :rows]


def merge_softmax(
    maximum: Tensor,  # (ranks, rows), max_j z_j of each shard, -inf where a shard has nothing
    sum_exp: Tensor,  # (ranks, rows), sum_j exp(z_j - maximum)
    sum_exp_shifted: Tensor | None = None,  # (ranks, rows), sum_j exp(z_j - maximum) (z_j - maximum)
) -> tuple[Tensor, Tensor, Tensor | None]:  # maximum (rows,), sum_exp (rows,), sum_exp_shifted (rows,)
    """The same three sums over the whole vocabulary, shifted by its maximum. No collective.

    With `M = max_r m_r` and `w_r = exp(m_r - M)`: `S = sum_r w_r s_r` and `U = sum_r w_r (u_r + (m_r - M) s_r)`;
    the online softmax of Milakov and Gimelshein (arXiv:1805.02867), with its first moment.
    """
    top = maximum.amax(dim=0)
    finite_top = top.masked_fill(top == -torch.inf, 0.0)
    shift = maximum - finite_top
    weight = shift.exp()
    total = (weight * sum_exp).sum(dim=0)
    if sum_exp_shifted is None:
        return top, total, None
    # An empty shard has weight 0 and shift -inf, whose product would be NaN.
    moment = torch.where(weight > 0, weight * (sum_exp_shifted + shift * sum_exp), 0.0).sum(dim=0)
    return top, total, moment
