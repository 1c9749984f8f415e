"""What the engine asks of a scorer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Scorer"]


class Scorer(Protocol):
    """Per-row scalars of a row of logits whose vocabulary is spread over the ranks of a group.

    The engine walks row blocks. For each it hands over fp32 logits of this rank's slice, `z`, which the scorer may
    overwrite, and `spare`, scratch of the same shape. It calls `local_stats` for all blocks, then `merge` once, which
    is where the only collectives are; and in backward `d_logits_` for all blocks.
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
    def differentiable(self) -> tuple[bool, ...]:
        """For each output of `merge`, whether a gradient may come back for it."""
        ...

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The caller's tensors that `d_logits_` reads: the engine saves them, so that autograd notices a change."""
        ...

    def local_stats(
        self,
        z: Tensor,  # (block, vocab_local) fp32, may be overwritten
        spare: Tensor | None,  # (block, vocab_local) fp32 scratch
        rows: slice,  # which rows the block holds
    ) -> Tensor:  # (block, stats_width) fp32
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
        z: Tensor,  # (block, vocab_local) fp32 logits; overwritten by their gradient
        spare: Tensor | None,  # (block, vocab_local) fp32 scratch
        rows: slice,
        saved: tuple[Tensor, ...],  # what merge returned, cut to the block
        grads: tuple[Tensor | None, ...],  # one an output, cut to the block; None where nothing came back
    ) -> None: ...
