"""What the engine asks of a scorer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from compact_logits.chunks import Block

__all__ = ["Scorer", "TurnShares"]


class TurnShares(Protocol):
    def __call__(
        self,
        shares: Tensor,  # (block, columns) fp32, overwritten by the gradient of the logits
        largest: Tensor,  # (block,) fp32, by which they are shifted
        rows: slice,  # which of all rows the block holds
        saved: tuple[Tensor, ...],  # what merge returned, cut to the block
        grads: tuple[Tensor | None, ...],  # one an output, cut to the block; None where nothing came back
    ) -> None: ...


class Scorer(Protocol):
    """Per-row scalars of a row of logits whose vocabulary is spread over the ranks of a group.

    The engine walks blocks of some rows and some columns of this rank's slice. It asks the `part` of each stretch of
    columns for the `local_stats` of each block, joins those of one row with `combine`, then calls `merge` once, where
    the only collectives are; and in backward each part's `d_logits_` for all blocks.
    """

    @property
    def stats_width(self) -> int:
        """Columns that `local_stats` returns."""
        ...

    @property
    def needs_spare(self) -> bool:
        """Whether `spare` is written to; if not, the engine passes none."""
        ...

    @property
    def turn_shares_(self) -> TurnShares | None:
        """`d_logits_` of what `local_stats` leaves where `z` is `logits`: `exp(z - largest)`, the row's largest
        tempered logit of these columns being the first of its statistics. `None` where the logits are needed."""
        ...

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """For each output of `merge`, whether a gradient may come back for it."""
        ...

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The caller's tensors that `d_logits_` reads: the engine saves them, so that autograd notices a change."""
        ...

    def part(
        self,
        columns: slice,  # of this rank's slice of the vocabulary
    ) -> Scorer:
        """The scorer of these columns alone; what it needs of `merge` comes from the whole."""
        ...

    def local_stats(self, block: Block) -> Tensor:  # (block, stats_width) fp32
        ...

    def combine(
        self,
        parts: Tensor,  # (parts, rows, stats_width) fp32, of different columns of this rank's slice
    ) -> Tensor:  # (rows, stats_width) fp32
        """The same statistics of all these columns together."""
        ...

    def merge(
        self,
        stats: Tensor,  # (rows, stats_width) fp32, of this rank's slice
    ) -> tuple[
        tuple[Tensor, ...], tuple[Tensor, ...]
    ]:  # outputs, each (rows, ...); saved for backward, each (rows, ...)
        ...

    def d_logits_(
        self,
        block: Block,
        saved: tuple[Tensor, ...],  # what merge returned, cut to the block
        grads: tuple[Tensor | None, ...],  # one an output, cut to the block; None where nothing came back
    ) -> None: ...
