"""The scorer of log-prob and entropy, over a vocabulary that may be sharded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compact_logits.chunks import Block
from compact_logits.errors import InputError
from compact_logits.host_values import shown
from compact_logits.scorers.contract import TurnShares
from compact_logits.scorers.passes import affine_, exponentials
from compact_logits.scorers.temperature import inverse_temperature, tempered
from compact_logits.vocab_parallel import VocabShard, gather_stats, merge_softmax

__all__ = ["LEAST_EXPONENT", "Entropy", "LogProbScorer", "TokenStats", "check_entropy"]

# A logit of -inf (a masked column) has p = 0 and adds nothing to the entropy, but 0 * -inf would be NaN. From here down
# p is 0 in fp64 too, and the product with any gradient is still finite.
LEAST_EXPONENT = -1e3

Entropy = Literal["none", "metric", "loss"]


class _LogProbsAndEntropy(NamedTuple):
    log_probs: Tensor
    entropy: Tensor | None


class TokenStats(_LogProbsAndEntropy):
    """Per-row results, fp32 and of the shape of the targets; `None` where not asked for.

    A pair, `log_probs` and `entropy`, that also knows `sum_p2`, the sum of squared probabilities, without a graph.
    """

    sum_p2: Tensor | None

    def __new__(cls, log_probs: Tensor, entropy: Tensor | None, sum_p2: Tensor | None = None) -> TokenStats:
        # Not the pair's own: torch 2.6 compiles into that, and ends in an internal error.
        stats = tuple.__new__(cls, (log_probs, entropy))
        stats.sum_p2 = sum_p2
        return stats


@dataclass(frozen=True)
class LogProbScorer:
    """`log p_t = (z_t - M) - log S` and `H = log S - U / S` with the shifted sums of `merge_softmax`.

    The shifted form loses nothing for large logits, where `M + log S` would round at the scale of `M`.
    Gradients: `d log p_t / dz_j = [j = t] - p_j` and `dH / dz_j = - p_j (log p_j + H)`, divided by the temperature.
    An id that no shard owns, or two, has a NaN log-prob, and its row NaN gradients: no number to be mistaken for one.
    With `sum_p2` also `sum_j p_j^2 = Q / S^2`, `Q` the sum of the squared exponentials. Columns from `vocab_size` on
    are as if they were not there, and get a gradient of exactly zero.
    """

    targets: Tensor  # (rows,) int64, global
    shard: VocabShard
    temperature: float | Tensor  # scalar or (rows,)
    entropy: Entropy
    sum_p2: bool = False
    vocab_size: int | None = None

    @cached_property
    def counted(self) -> VocabShard:
        """The part of this rank's shard that is no padding."""
        return self.shard.below(self.vocab_size)

    @cached_property
    def _local_targets(self) -> tuple[Tensor, Tensor]:  # local ids (rows,), owned (rows,) bool
        """Once for all blocks, since a few operations on a few rows weigh as much as a pass over a small block."""
        return self.counted.local_ids(self.targets)

    @property
    def stats_width(self) -> int:
        return 3 + (self.entropy != "none") + self.sum_p2

    @property
    def needs_spare(self) -> bool:
        return self.entropy != "none"

    @property
    def turn_shares_(self) -> TurnShares | None:
        # The entropy's gradient needs the logits themselves, and squares are formed in the place of the shares.
        return None if self.entropy == "loss" or self.sum_p2 else self._turn_shares_

    @property
    def differentiable(self) -> tuple[bool, ...]:
        entropy = () if self.entropy == "none" else (self.entropy == "loss",)
        return (True, *entropy, *[False] * self.sum_p2)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.targets, self.temperature) if isinstance(self.temperature, Tensor) else (self.targets,)

    def part(self, columns: slice) -> LogProbScorer:
        return replace(self, shard=self.shard.columns(columns))

    def local_stats(self, block: Block) -> Tensor:
        logits, z, spare, rows = block
        stats = z.new_zeros(z.shape[0], self.stats_width)
        if self.counted.size == 0:
            stats[:, 0], stats[:, 2] = -torch.inf, torch.nan
            return stats
        logits, z = self._counted_columns(logits), self._counted_columns(z)
        logits = tempered(logits, z, self.temperature, rows)
        ids, owned = (tensor[rows] for tensor in self._local_targets)
        stats[:, 2] = logits.gather(1, ids[:, None]).squeeze(1).masked_fill(~owned, torch.nan)
        maximum = logits.amax(dim=1).to(z.dtype)
        stats[:, 0] = maximum
        shifted = z if spare is None else self._counted_columns(spare)
        torch.sub(logits, maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None], out=shifted)
        if spare is not None:
            shifted.clamp_(min=LEAST_EXPONENT)
        shares = exponentials(shifted, out=z)
        stats[:, 1] = shares.sum(dim=1)
        if spare is not None:
            stats[:, 3] = shifted.mul_(shares).sum(dim=1)
        if self.sum_p2:
            stats[:, -1] = shares.square_().sum(dim=1)
        return stats

    def _counted_columns(
        self,
        z: Tensor,  # (block, vocab_local)
    ) -> Tensor:  # (block, counted.size), a view
        return z if self.counted.size == z.shape[1] else z[:, : self.counted.size]

    def combine(self, parts: Tensor) -> Tensor:
        wide = parts.double()
        moments = None if self.entropy == "none" else wide[:, :, 3]
        maximum, sum_exp, moment = merge_softmax(wide[:, :, 0], wide[:, :, 1], moments)
        columns = [maximum, sum_exp, self.selected(wide)]
        if moment is not None:
            columns.append(moment)
        if self.sum_p2:
            squares = (2 * (wide[:, :, 0] - maximum)).exp() * wide[:, :, -1]
            # A part with no columns has an exponent of -inf, and where none has a finite logit all is NaN anyway.
            columns.append(torch.where(wide[:, :, 0] > -torch.inf, squares, 0.0).sum(dim=0))
        return torch.stack(columns, dim=1).to(parts.dtype)

    def merge(self, stats: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.merge_ranks(gather_stats(stats, self.shard))

    def merge_ranks(
        self,
        ranks: Tensor,  # (ranks, rows, stats_width) fp32
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`merge` of statistics that have been gathered already."""
        # In fp64, which costs nothing for a few numbers a row, so that each result is rounded once.
        maximum, sum_exp, selected, *others = self.combine(ranks.double()).unbind(dim=1)
        log_sum = sum_exp.log()
        log_prob = (selected - maximum) - log_sum
        # A NaN log-prob must not come back with a gradient that looks like a number.
        inverse_sum = sum_exp.reciprocal().masked_fill(selected.isnan(), torch.nan)
        outputs, saved = [log_prob], [maximum, inverse_sum]
        if self.entropy != "none":
            mean = others[0] / sum_exp
            outputs.append(log_sum - mean)
            saved.append(-mean)
        if self.sum_p2:
            outputs.append(others[-1] / sum_exp.square())
        return tuple(o.to(ranks.dtype) for o in outputs), tuple(s.to(ranks.dtype) for s in saved)

    def selected(
        self,
        ranks: Tensor,  # (ranks, rows, stats_width) fp32
    ) -> Tensor:  # (rows,)
        """The target's tempered logit, from the one rank that owns it; NaN where none does, or more than one."""
        of_ranks = ranks[:, :, 2]
        owned = ~of_ranks.isnan()  # NaN stands for "not mine"
        return torch.where(owned, of_ranks, 0.0).sum(dim=0).masked_fill_(owned.sum(dim=0) != 1, torch.nan)

    def d_logits_(self, block: Block, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        logits, z, spare, rows = block
        if self.counted.size < z.shape[1]:
            z[:, self.counted.size :] = 0.0
        if self.counted.size == 0:
            return
        logits, z = self._counted_columns(logits), self._counted_columns(z)
        logits = tempered(logits, z, self.temperature, rows)
        maximum = saved[0]
        d_log_prob = grads[0] if grads[0] is not None else torch.zeros_like(maximum)
        d_entropy = None if self.entropy == "none" else grads[1]
        scale = inverse_temperature(self.temperature, rows, maximum)
        inverse_sum = saved[1] * scale
        torch.sub(logits, maximum[:, None], out=z)
        if d_entropy is None:
            exponentials(z, out=z).mul_((-d_log_prob * inverse_sum)[:, None])
        else:
            # -p (d_log_prob + d_entropy (log p + H)), the bracket being affine in the shifted logit.
            assert spare is not None
            constant = d_log_prob + d_entropy * saved[2]
            shares = exponentials(z.clamp_(min=LEAST_EXPONENT), out=self._counted_columns(spare))
            affine_(z, -d_entropy * inverse_sum, -constant * inverse_sum)
            z.mul_(shares)
        self.add_at_target_(z, rows, d_log_prob * scale)

    def _turn_shares_(
        self,
        shares: Tensor,  # (block, vocab_local) fp32
        largest: Tensor,  # (block,) fp32
        rows: slice,
        saved: tuple[Tensor, ...],
        grads: tuple[Tensor | None, ...],
    ) -> None:
        if self.counted.size < shares.shape[1]:
            shares[:, self.counted.size :] = 0.0
        if self.counted.size == 0:
            return
        maximum, inverse_sum = saved[0], saved[1]
        d_log_prob = grads[0] if grads[0] is not None else torch.zeros_like(maximum)
        d_selected = d_log_prob * inverse_temperature(self.temperature, rows, maximum)
        self._counted_columns(shares).mul_((-d_selected * inverse_sum * (largest - maximum).exp())[:, None])
        self.add_at_target_(shares, rows, d_selected)

    def named(
        self,
        outputs: tuple[Tensor, ...],  # as `merge` returns them
    ) -> TokenStats:
        return TokenStats(
            outputs[0], None if self.entropy == "none" else outputs[1], outputs[-1] if self.sum_p2 else None
        )

    def add_at_target_(
        self,
        z: Tensor,  # (block, vocab_local) fp32
        rows: slice,
        values: Tensor,  # (block,)
    ) -> None:
        """Add a value to each row's target column, where this rank has it."""
        if self.counted.size == 0:
            return
        # One id a row, so reading, adding and writing back is exact and deterministic where scatter_add_ is not.
        ids, owned = (tensor[rows] for tensor in self._local_targets)
        z.scatter_(1, ids[:, None], z.gather(1, ids[:, None]) + values.masked_fill(~owned, 0.0)[:, None])


def check_entropy(entropy: object) -> None:
    """Raise `InputError` unless `entropy` is one of the three settings."""
    if not isinstance(entropy, str) or entropy not in ("none", "metric", "loss"):
        raise InputError(f"entropy must be 'none', 'metric' (value without graph) or 'loss', got {shown(entropy)}")
