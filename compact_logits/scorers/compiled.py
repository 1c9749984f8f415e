"""The log-prob scorer with its two passes over a block fused by `torch.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compact_logits.errors import InputError
from compact_logits.scorers.log_prob import LogProbScorer
from compact_logits.scorers.temperature import inverse_temperature

__all__ = ["CompiledLogProbScorer"]


@dataclass(frozen=True)
class CompiledLogProbScorer(LogProbScorer):
    """`LogProbScorer` without entropy; the same formulas, each block read twice in forward and once in backward.

    Compiles twice, once for forward and once for backward, whatever the numbers of rows and of columns: both are
    symbolic, and a block of a single row, for which torch would compile again, takes the uncompiled way (on a CPU,
    whose blocks are small, all of them do where a rank has more than 131,072 columns). Without a compiler that works,
    torch's error reaches the caller.
    """

    def __post_init__(self) -> None:
        if self.entropy != "none":
            raise InputError(
                f"the compiled scorer computes no entropy, got entropy={self.entropy!r}; leave compile off"
            )
        if self.sum_p2 or self.vocab_size is not None:
            raise InputError(
                f"the compiled scorer computes no sum_p2 and counts every column, got sum_p2={self.sum_p2} and "
                f"vocab_size={self.vocab_size}; leave compile off"
            )

    def local_stats(self, z: Tensor, spare: Tensor | None, rows: slice) -> Tensor:
        if min(z.shape) < 2:
            return super().local_stats(z, spare, rows)
        ids, owned = self.shard.local_ids(self.targets[rows])
        stats, _ = _compiled()
        return stats(_no_view(z), ids, owned, self._temperatures(rows, z))

    def d_logits_(
        self, z: Tensor, spare: Tensor | None, rows: slice, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> None:
        if min(z.shape) < 2 or grads[0] is None:
            super().d_logits_(z, spare, rows, saved, grads)
            return
        ids, owned = self.shard.local_ids(self.targets[rows])
        maximum, inverse_sum = saved[0], saved[1]
        scale = inverse_temperature(self.temperature, rows, maximum)
        factor = -grads[0] * inverse_sum * scale
        at_target = (grads[0] * scale).masked_fill(~owned, 0.0)
        _, d_logits_ = _compiled()
        d_logits_(_no_view(z), ids, self._temperatures(rows, z), maximum.clone(), factor, at_target)

    def _temperatures(
        self,
        rows: slice,
        z: Tensor,  # (block, vocab_local)
    ) -> Tensor:  # (block,)
        """Always one a row: a number would be compiled in."""
        if isinstance(self.temperature, Tensor):
            return self.temperature[rows].to(z.dtype, copy=True)
        return z.new_full((z.shape[0],), self.temperature)


def _no_view(tensor: Tensor) -> Tensor:
    """The same memory without its history: of a view, torch would compile the whole's size in."""
    return tensor.data


def _stats(
    z: Tensor,  # (block, vocab_local)
    ids: Tensor,  # (block,) int64, local
    owned: Tensor,  # (block,) bool
    temperature: Tensor,  # (block,)
) -> Tensor:  # (block, 3)
    z = z / temperature[:, None]
    maximum = z.amax(dim=1)
    sum_exp = (z - maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]).exp().sum(dim=1)
    selected = z.gather(1, ids[:, None]).squeeze(1).masked_fill(~owned, torch.nan)
    return torch.stack((maximum, sum_exp, selected), dim=1)


def _d_logits_(
    z: Tensor,  # (block, vocab_local), overwritten
    ids: Tensor,  # (block,) int64, local
    temperature: Tensor,  # (block,)
    maximum: Tensor,  # (block,)
    factor: Tensor,  # (block,)
    at_target: Tensor,  # (block,)
) -> None:
    d_z = (z / temperature[:, None] - maximum[:, None]).exp() * factor[:, None]
    hit = torch.arange(z.shape[1], device=z.device) == ids[:, None]
    z.copy_(d_z + torch.where(hit, at_target[:, None], 0.0))


@functools.cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    return torch.compile(_stats, dynamic=True), torch.compile(_d_logits_, dynamic=True)
