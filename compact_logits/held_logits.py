"""Where the chunks' logits stand, and which of them forward leaves for backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compact_logits.chunks import ChunkPlan

__all__ = ["HeldLogits", "lending_pays"]


@dataclass(frozen=True)
class HeldLogits:
    """Places for `plan`'s chunks, in memory of their own and, if there is any, in memory that is `lent`.

    Lent is what the gradient of the weight will take. That gradient is written slice by slice, from the first on, and
    so the first slices' logits stand there, each no further to the front than its own part of the gradient: whatever a
    part is written over has been read by then. The following slices stand in own memory, and its first place is where
    the rest are formed, one after the other. Without lent memory the last slices stay, whose logits forward has left,
    and backward begins with them: their places are where it forms the others.
    """

    plan: ChunkPlan
    own: Tensor  # (logits,), their dtype; of a place that only the last slice takes, no more than that
    lent: Tensor | None = None  # (vocab_local, hidden), the logits' dtype, contiguous
    keeps: bool = True  # for backward
    ascends: bool = False  # without lent memory too, so that a second backward adds in the order of the first

    @classmethod
    def make(
        cls,
        plan: ChunkPlan,
        rows: Tensor,  # (rows, hidden)
        weight: Tensor,  # (vocab_local, hidden)
        dtype: torch.dtype,  # of the logits
        *,
        keep: bool,  # for backward
        lends: bool,  # whether the weight's gradient takes memory in which logits stood
    ) -> HeldLogits:
        """No more bytes than the plan holds, lent ones included."""
        most = plan.held if keep else 1
        places, lent, last = min(most, plan.num_slices) if plan.rows else 0, None, True
        if keep and lends and lending_pays(plan, weight, dtype):
            lent = weight.new_empty(weight.shape)
            whole, rest = divmod(weight.numel(), plan.height * plan.width)
            places = min(most - whole - (rest > 0), plan.num_slices - whole + 1)
            last = places == plan.num_slices - whole + 1
        return cls(plan, rows.new_empty(plan.logits_in(places, last=last), dtype=dtype), lent, keep)

    @property
    def order(self) -> list[int]:
        """The slices, as backward is to go through them."""
        every = range(self.plan.num_slices)
        if self.lent is not None or self.ascends:
            return list(every)
        first = self.plan.num_slices - self._own_places
        return [*every[first:], *every[:first]]

    def stays(self, index: int) -> bool:
        """Whether forward leaves the logits of slice `index`."""
        if not self.keeps:
            return False
        if self.lent is not None:
            return index < self._lent_places + self._own_places - 1
        return index >= self.plan.num_slices - self._own_places

    def chunk(self, index: int, rows: int, columns: int) -> Tensor:  # (rows, columns), contiguous
        """The place of slice `index`."""
        if self.lent is None:
            return self._own(index - (self.plan.num_slices - self._own_places), rows, columns)
        if index < self._lent_places:
            return _cut(self.lent, index * self._chunk, rows, columns)
        return self._own((index - self._lent_places + 1) if self.stays(index) else 0, rows, columns)

    def apart(
        self,
        index: int,
        logits: Tensor,  # (rows, columns), in their place
    ) -> Tensor:  # (rows, columns)
        """The logits of slice `index` where its part of the weight's gradient is not written over them."""
        if self.lent is None or index >= self._lent_places:
            return logits
        begin, end = index * self._chunk, (index + 1) * self.plan.width * self.lent.shape[1]
        return logits if begin >= end else self._own(0, *logits.shape).copy_(logits)

    def _own(self, place: int, rows: int, columns: int) -> Tensor:
        return _cut(self.own, max(place, 0) * self._chunk, rows, columns)

    @property
    def _own_places(self) -> int:
        return -(-self.own.shape[0] // max(self._chunk, 1))

    @property
    def _lent_places(self) -> int:
        return 0 if self.lent is None else self.lent.numel() // self._chunk

    @property
    def _chunk(self) -> int:
        return self.plan.height * self.plan.width


def lending_pays(
    plan: ChunkPlan,
    weight: Tensor,  # (vocab_local, hidden)
    dtype: torch.dtype,  # of the logits
) -> bool:
    """Whether chunks should stand in the memory of the weight's gradient.

    Not where that holds more than the logits or than the budget: it would stand between forward and backward for
    nothing. Nor where it holds less than two chunks: at an equal peak fewer logits would be left for backward. Where it
    pays, a slice's part of the gradient is smaller than its chunk, since there are fewer hidden than rows.
    """
    chunk = plan.height * plan.width
    if not chunk or plan.height < plan.rows or dtype != weight.dtype:
        return False
    whole, rest = divmod(weight.numel(), chunk)
    return whole >= 2 and whole + (rest > 0) < min(plan.held, plan.num_slices)


def _cut(memory: Tensor, first: int, rows: int, columns: int) -> Tensor:
    return memory.view(-1)[first : first + rows * columns].view(rows, columns)
