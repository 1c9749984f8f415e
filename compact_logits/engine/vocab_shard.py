"""Which part of the vocabulary a rank holds, and the all-gather of the ranks' statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from compact_logits.engine.collectives import all_gather
from compact_logits.errors import InputError
from compact_logits.host_values import as_index, describe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["VocabShard", "gather_stats"]


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
                f"a vocabulary shard's start and stop must be whole numbers, got start={describe(self.start)}, "
                f"stop={describe(self.stop)}; pass this rank's first id and the one after its last"
            )
        if self.group is not None and not callable(getattr(self.group, "rank", None)):
            raise InputError(
                f"a vocabulary shard's group must be a process group that this rank is in, or None, got "
                f"{describe(self.group)}; of a mesh, pass mesh.get_group()"
            )
        # As plain ints, whatever integer type they were given in.
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
        """The part of this shard with ids below `vocab_size`; empty if all of it is padding."""
        stop = self.stop if vocab_size is None else max(self.start, min(self.stop, vocab_size))
        return VocabShard(self.start, stop, self.group)

    def local_ids(
        self,
        ids: Tensor,  # (...) int64, global
    ) -> tuple[Tensor, Tensor]:  # local ids (...), clamped into the shard; owned (...) bool
        """Translate global ids. An id of another shard gets some legal local id and `owned=False`. No collective."""
        owned = (ids >= self.start) & (ids < self.stop)
        return (ids - self.start).clamp(0, max(self.size - 1, 0)), owned


def gather_stats(
    stats: Tensor,  # (rows, stats)
    shard: VocabShard,
) -> Tensor:  # (ranks, rows, stats)
    """All ranks' statistics of the same rows, in rank order, so that every rank merges them to the same bits.

    One all-gather where the vocabulary is sharded, none otherwise. With zero rows the all-gather still takes place,
    over one row, since not all backends accept empty messages.
    """
    if not shard.sharded:
        return stats[None]
    assert shard.group is not None
    rows, width = stats.shape
    sent = stats.contiguous() if rows else stats.new_zeros(1, width)
    received = sent.new_empty(shard.group.size() * sent.shape[0], width)
    all_gather(received, sent, shard.group)
    return received.view(shard.group.size(), -1, width)[:, :rows]
