"""The log-prob scorer with its passes over a block fused by `torch.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compact_logits.chunks import Block
from compact_logits.scorers.log_prob_scorer import LEAST_EXPONENT, LogProbScorer
from compact_logits.scorers.temperature import inverse_temperature

__all__ = ["CompiledLogProbScorer"]


@dataclass(frozen=True)
class CompiledLogProbScorer(LogProbScorer):
    """`LogProbScorer` by the same formulas, each block read twice in forward and once in backward.

    Compiles twice, once for forward and once for backward, whatever the numbers of rows and of columns: both are
    symbolic, and a block of a single row, for which torch would compile again, takes the uncompiled way (on a CPU,
    whose blocks are small, all of them do where a rank has more than 131,072 columns). Another setting of entropy or
    `sum_p2` has its own two. Without a compiler that works, torch's error reaches the caller.
    """

    @property
    def turn_shares_(self) -> None:
        return None

    def local_stats(self, block: Block) -> Tensor:
        logits, z, _, rows = block
        if min(z.shape[0], self.counted.size) < 2:
            return super().local_stats(block)
        ids, owned = self._local_targets
        stats, _ = _compiled()
        columns = _no_view(self._counted_columns(logits))
        given = (columns, ids[rows].clone(), owned[rows].clone(), self._temperatures(rows, z))
        return stats(*given, with_entropy=self.entropy != "none", with_squares=self.sum_p2)

    def d_logits_(self, block: Block, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        logits, z, _, rows = block
        if min(z.shape[0], self.counted.size) < 2 or grads[0] is None:
            super().d_logits_(block, saved, grads)
            return
        if logits is not z:
            z.copy_(logits)
        if self.counted.size < z.shape[1]:
            z[:, self.counted.size :] = 0.0
            z = self._counted_columns(z)
        ids, owned = self._local_targets
        maximum, inverse_sum = saved[0], saved[1]
        d_entropy = None if self.entropy == "none" else grads[1]
        scale = inverse_temperature(self.temperature, rows, maximum)
        constant = grads[0] if d_entropy is None else grads[0] + d_entropy * saved[2]
        scaled = inverse_sum * scale
        at_target = (grads[0] * scale).masked_fill(~owned[rows], 0.0)
        slope = None if d_entropy is None else -d_entropy * scaled
        _, d_logits_ = _compiled()
        d_logits_(
            _no_view(z),
            ids[rows].clone(),
            self._temperatures(rows, z),
            maximum.clone(),
            -constant * scaled,
            at_target,
            slope,
        )

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
    *,
    with_entropy: bool,
    with_squares: bool,
) -> Tensor:  # (block, 3 to 5)
    z = z / temperature[:, None]
    maximum = z.amax(dim=1)
    selected = z.gather(1, ids[:, None]).squeeze(1).masked_fill(~owned, torch.nan)
    z = z - maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]
    if with_entropy:
        z = z.clamp(min=LEAST_EXPONENT)
    shares = z.exp()
    columns = [maximum, shares.sum(dim=1), selected]
    if with_entropy:
        columns.append((z * shares).sum(dim=1))
    if with_squares:
        columns.append((shares * shares).sum(dim=1))
    return torch.stack(columns, dim=1)


def _d_logits_(
    z: Tensor,  # (block, vocab_local), overwritten
    ids: Tensor,  # (block,) int64, local
    temperature: Tensor,  # (block,)
    maximum: Tensor,  # (block,)
    constant: Tensor,  # (block,)
    at_target: Tensor,  # (block,)
    slope: Tensor | None,  # (block,)
) -> None:
    shifted = z / temperature[:, None] - maximum[:, None]
    factor = constant[:, None]
    if slope is not None:
        shifted = shifted.clamp(min=LEAST_EXPONENT)
        factor = factor + slope[:, None] * shifted
    hit = torch.arange(z.shape[1], device=z.device) == ids[:, None]
    z.copy_(shifted.exp() * factor + torch.where(hit, at_target[:, None], 0.0))


@functools.cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    return torch.compile(_stats, dynamic=True), torch.compile(_d_logits_, dynamic=True)
