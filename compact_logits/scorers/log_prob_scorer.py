"""The scorer of log-prob and entropy, over a vocabulary that may be sharded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compact_logits.engine.kernels import LEAST_EXPONENT, combine_stats, new_stats, row_stats_
from compact_logits.engine.scorer import SoftmaxGrad, read_at_
from compact_logits.engine.vocab_shard import VocabShard, gather_stats
from compact_logits.errors import InputError
from compact_logits.host_values import describe

__all__ = ["Entropy", "LogProbScorer", "TokenStats", "check_entropy", "inverse_temperatures"]

Entropy = Literal["none", "metric", "loss"]


class _LogProbsAndEntropy(NamedTuple):
    log_probs: Tensor
    entropy: Tensor | None


class TokenStats(_LogProbsAndEntropy):
    """Per-row results, fp32 (fp64 for fp64 inputs), of the shape of the targets; `None` where not requested.

    It unpacks as the pair `log_probs, entropy`. `sum_p2`, the sum of squared probabilities, is an attribute; it has no
    graph.
    """

    sum_p2: Tensor | None

    def __new__(cls, log_probs: Tensor, entropy: Tensor | None, sum_p2: Tensor | None = None) -> TokenStats:
        # Not the NamedTuple's own `__new__`: torch 2.6 traces into it and fails with an internal error.
        stats = tuple.__new__(cls, (log_probs, entropy))
        stats.sum_p2 = sum_p2
        return stats


@dataclass(frozen=True, eq=False)
class LogProbScorer:
    """`log p_t = (z_t - M) - log S`, `H = log S - U / S`, `sum_j p_j^2 = Q / S^2` of the row statistics M, S, U and Q.

    The shifted form loses nothing for large logits, where `M + log S` would round at the scale of `M`.
    Gradients: `d log p_t / dz_j = [j = t] - p_j` and `dH / dz_j = - p_j (log p_j + H)`, times the inverse temperature.
    An id that no shard owns, or that two own, has a NaN log-prob. Its row's gradient is NaN unless the incoming
    gradient of that log-prob is zero.
    """

    targets: Tensor  # (rows,) int64, global
    shard: VocabShard  # of the ids that count
    inverse_temperature: Tensor  # (rows,) fp32, fp64 for fp64 logits
    entropy: Entropy
    sum_p2: bool = False

    writes_logits = False

    @property
    def _kinds(self) -> dict[str, bool]:
        return {"moment": self.entropy != "none", "squares": self.sum_p2}

    @property
    def differentiable(self) -> tuple[bool, ...]:
        entropy = () if self.entropy == "none" else (self.entropy == "loss",)
        return (True, *entropy, *[False] * self.sum_p2)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.targets, self.inverse_temperature)

    def of_rows(self, rows: slice | Tensor) -> LogProbScorer:
        return replace(self, targets=self.targets[rows], inverse_temperature=self.inverse_temperature[rows])

    def new_stats(self) -> tuple[Tensor, ...]:  # row statistics; the target's logit (rows, 1), NaN where it is not here
        target = self.inverse_temperature.new_full((self.targets.shape[0], 1), torch.nan)
        return new_stats(target, **self._kinds), target

    def add_slice_(self, stats: tuple[Tensor, ...], logits: Tensor, first: int) -> None:
        rows, target = stats
        read_at_(target, logits, self.targets[:, None], first)
        row_stats_(rows, logits, self.inverse_temperature, **self._kinds)

    def merge(self, stats: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.merge_ranks(gather_stats(self.to_send(stats), self.shard))

    def to_send(self, stats: tuple[Tensor, ...]) -> Tensor:  # (rows, 3 to 5) fp64
        """What a rank sends of each row: its statistics, and the target's tempered logit, NaN if it is not here."""
        rows, target = stats
        return torch.cat([rows, target * self.inverse_temperature[:, None]], dim=1)

    def merge_ranks(
        self,
        ranks: Tensor,  # (ranks, rows, 3 to 5) fp64
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`merge`, after the all-gather. In fp64, so that each result is rounded once."""
        target = self.target_of(ranks)
        maximum, total, *others = combine_stats(ranks[:, :, :-1], **self._kinds).unbind(dim=1)
        log_total = total.log()
        outputs, saved = [(target - maximum) - log_total], [maximum, total, target]
        if self.entropy != "none":
            mean = others[0] / total
            outputs.append(log_total - mean)
            saved.append(mean)
        if self.sum_p2:
            outputs.append(others[-1] / total.square())
        return tuple(each.to(self.inverse_temperature.dtype) for each in outputs), tuple(saved)

    def target_of(
        self,
        ranks: Tensor,  # (ranks, rows, 3 to 5) fp64
    ) -> Tensor:  # (rows,) fp64
        """The target's tempered logit, from the one rank that owns it; NaN if no rank does, or more than one."""
        of_ranks = ranks[:, :, -1]
        owned = ~of_ranks.isnan()
        return torch.where(owned, of_ranks, 0.0).sum(dim=0).masked_fill(owned.sum(dim=0) != 1, torch.nan)

    def logits_grad(self, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> SoftmaxGrad:
        maximum, total, target, *mean = saved
        d_target = torch.zeros_like(target) if grads[0] is None else grads[0].double() * self.inverse_temperature
        # A NaN log-prob gets a NaN gradient, unless its incoming gradient is zero.
        scale = -d_target.masked_fill(target.isnan() & (d_target != 0), torch.nan)
        slope = None
        d_entropy = grads[1] if self.entropy == "loss" else None
        if d_entropy is not None:
            slope = -d_entropy.double() * self.inverse_temperature
            scale = scale - slope * mean[0]
            slope = slope / total
        scale = scale / total
        z = target - maximum
        factor = scale if slope is None else scale + slope * z.clamp(min=LEAST_EXPONENT)
        at_target = z.exp() * factor + d_target
        dtype = self.inverse_temperature.dtype
        return SoftmaxGrad(
            inverse_temperature=self.inverse_temperature,
            shift=maximum.to(dtype),
            scale=scale.to(dtype),
            slope=None if slope is None else slope.to(dtype),
            ids=self.targets[:, None],
            values=at_target.to(dtype)[:, None],
        )

    def named(
        self,
        outputs: tuple[Tensor, ...],  # as `merge` returns them
    ) -> TokenStats:
        return TokenStats(
            outputs[0], None if self.entropy == "none" else outputs[1], outputs[-1] if self.sum_p2 else None
        )


def inverse_temperatures(
    temperature: float | Tensor,  # scalar, or (rows,)
    like: Tensor,  # (rows, ...)
    dtype: torch.dtype,  # fp32, fp64 for fp64 logits
) -> Tensor:  # (rows,)
    if isinstance(temperature, Tensor):
        return temperature.to(dtype).reciprocal()
    return torch.full(like.shape[:1], 1.0 / temperature, dtype=dtype, device=like.device)


def check_entropy(entropy: object) -> None:
    """Raise `InputError` unless `entropy` is one of the three settings."""
    if not isinstance(entropy, str) or entropy not in ("none", "metric", "loss"):
        raise InputError(f"entropy must be 'none', 'metric' (value without graph) or 'loss', got {describe(entropy)}")
