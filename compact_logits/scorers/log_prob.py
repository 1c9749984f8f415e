"""Log-prob of one id a row, and entropy of the row, over a vocabulary that may be sharded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compact_logits import validation
from compact_logits.errors import InputError
from compact_logits.given_logits import rows_of, score_logits
from compact_logits.projection import as_autocast, score_hidden
from compact_logits.scorers.passes import affine_, exponentials
from compact_logits.scorers.temperature import inverse_temperature, temper_
from compact_logits.vocab_parallel import VocabShard, gather_stats, merge_softmax

__all__ = ["LEAST_EXPONENT", "Entropy", "LogProbScorer", "TokenStats", "check_entropy", "linear_log_probs", "log_probs"]

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
        stats = super().__new__(cls, log_probs, entropy)
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
    def differentiable(self) -> tuple[bool, ...]:
        entropy = () if self.entropy == "none" else (self.entropy == "loss",)
        return (True, *entropy, *[False] * self.sum_p2)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.targets, self.temperature) if isinstance(self.temperature, Tensor) else (self.targets,)

    def local_stats(self, z: Tensor, spare: Tensor | None, rows: slice) -> Tensor:
        stats = z.new_zeros(z.shape[0], self.stats_width)
        if self.counted.size == 0:
            stats[:, 0], stats[:, 2] = -torch.inf, torch.nan
            return stats
        z, spare = self._counted_columns(z), None if spare is None else self._counted_columns(spare)
        temper_(z, self.temperature, rows)
        ids, owned = (tensor[rows] for tensor in self._local_targets)
        stats[:, 2] = z.gather(1, ids[:, None]).squeeze(1).masked_fill_(~owned, torch.nan)
        maximum = z.amax(dim=1)
        stats[:, 0] = maximum
        z.sub_(maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None])
        if spare is None:
            shares = exponentials(z, out=z)
            stats[:, 1] = shares.sum(dim=1)
        else:
            shares = exponentials(z.clamp_(min=LEAST_EXPONENT), out=spare)
            stats[:, 1] = shares.sum(dim=1)
            stats[:, 3] = z.mul_(shares).sum(dim=1)
        if self.sum_p2:
            stats[:, -1] = shares.square_().sum(dim=1)
        return stats

    def _counted_columns(
        self,
        z: Tensor,  # (block, vocab_local)
    ) -> Tensor:  # (block, counted.size), a view
        return z if self.counted.size == z.shape[1] else z[:, : self.counted.size]

    def merge(self, stats: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.merge_ranks(gather_stats(stats, self.shard))

    def merge_ranks(
        self,
        ranks: Tensor,  # (ranks, rows, stats_width) fp32
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`merge` of statistics that have been gathered already."""
        # In fp64, which costs nothing for a few numbers a row, so that each result is rounded once.
        wide = ranks.double()
        selected = self.selected(wide)
        moments = None if self.entropy == "none" else wide[:, :, 3]
        maximum, sum_exp, moment = merge_softmax(wide[:, :, 0], wide[:, :, 1], moments)
        log_sum = sum_exp.log()
        log_prob = (selected - maximum) - log_sum
        # A NaN log-prob must not come back with a gradient that looks like a number.
        inverse_sum = sum_exp.reciprocal().masked_fill(selected.isnan(), torch.nan)
        outputs, saved = [log_prob], [maximum, inverse_sum]
        if moment is not None:
            mean = moment / sum_exp
            outputs.append(log_sum - mean)
            saved.append(-mean)
        if self.sum_p2:
            # A rank with no columns has an exponent of -inf, and where no rank has a finite logit all is NaN anyway.
            squares = (2 * (wide[:, :, 0] - maximum)).exp() * wide[:, :, -1]
            outputs.append(torch.where(wide[:, :, 0] > -torch.inf, squares, 0.0).sum(dim=0) / sum_exp.square())
        return tuple(o.to(ranks.dtype) for o in outputs), tuple(s.to(ranks.dtype) for s in saved)

    def selected(
        self,
        ranks: Tensor,  # (ranks, rows, stats_width) fp32
    ) -> Tensor:  # (rows,)
        """The target's tempered logit, from the one rank that owns it; NaN where none does, or more than one."""
        of_ranks = ranks[:, :, 2]
        owned = ~of_ranks.isnan()  # NaN stands for "not mine"
        return torch.where(owned, of_ranks, 0.0).sum(dim=0).masked_fill_(owned.sum(dim=0) != 1, torch.nan)

    def d_logits_(
        self, z: Tensor, spare: Tensor | None, rows: slice, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> None:
        if self.counted.size < z.shape[1]:
            z[:, self.counted.size :] = 0.0
            z, spare = self._counted_columns(z), None if spare is None else self._counted_columns(spare)
        if self.counted.size == 0:
            return
        temper_(z, self.temperature, rows)
        maximum = saved[0]
        d_log_prob = grads[0] if grads[0] is not None else torch.zeros_like(maximum)
        d_entropy = None if self.entropy == "none" else grads[1]
        scale = inverse_temperature(self.temperature, rows, maximum)
        inverse_sum = saved[1] * scale
        z.sub_(maximum[:, None])
        if d_entropy is None:
            exponentials(z, out=z).mul_((-d_log_prob * inverse_sum)[:, None])
        else:
            # -p (d_log_prob + d_entropy (log p + H)), the bracket being affine in the shifted logit.
            assert spare is not None
            constant = d_log_prob + d_entropy * saved[2]
            exponentials(z.clamp_(min=LEAST_EXPONENT), out=spare)
            affine_(z, -d_entropy * inverse_sum, -constant * inverse_sum)
            z.mul_(spare)
        self.add_at_target_(z, rows, d_log_prob * scale)

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


def check_entropy(entropy: str) -> None:
    """Raise `InputError` unless `entropy` is one of the three settings."""
    if entropy not in ("none", "metric", "loss"):
        raise InputError(f"entropy must be 'none', 'metric' (value without graph) or 'loss', got {entropy!r}")


def linear_log_probs(
    hidden: Tensor,  # (rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    targets: Tensor,  # (rows,) int64, global ids
    *,
    bias: Tensor | None = None,  # (vocab_local,)
    shard: VocabShard | None = None,
    temperature: float | Tensor = 1.0,  # scalar or (rows,)
    entropy: Entropy = "none",
    sum_p2: bool = False,
    vocab_size: int | None = None,  # ids from here on are padding
    chunk_bytes: int | None = None,
    fp32_logits: bool = False,
) -> TokenStats:  # fp32 (rows,) each
    """Log-prob of `targets` and entropy under `softmax((hidden @ weight.T + bias) / temperature)`, without the logits.

    Equals `reference.log_probs(hidden @ weight.T, targets)`; never holds `(rows, vocab_local)`, but chunks of at most
    `chunk_bytes` (default 256 MiB). The product is in the dtype of `hidden`, everything after it in fp32; with
    `fp32_logits` a product of 16-bit factors is not rounded either, which only CUDA offers (`InputError` elsewhere).

    `shard=None`: `weight` is the whole vocabulary. With a shard, `hidden` and `targets` are the same on all ranks of
    its group, and the gradient of `hidden` is summed over it here. `entropy`: `"none"`, `"metric"` (a value, no graph)
    or `"loss"` (differentiable). `sum_p2` asks for the sum of squared probabilities, a value without a graph. With
    `vocab_size`, columns from there on count in nothing, and their rows of the weight get a gradient of exactly zero;
    without, padded columns count like any other. Gradients have the dtypes of their inputs; the weight's is
    accumulated in fp32.

    Collectives over `shard.group`: forward one all-gather of three to five fp32 a row; backward one all-reduce of
    the gradient of `hidden`, if it needs one. Also with zero rows. Raises `InputError` before them, on
    every rank alike.
    """
    validation.check_tensors(hidden=hidden, weight=weight, targets=targets, bias=bias)
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    resolved = validation.check_head(hidden, weight, bias, shard)
    scorer = _checked_scorer(targets, hidden.shape[:1], resolved, temperature, entropy, sum_p2, vocab_size)
    validation.check_chunk_bytes(chunk_bytes)
    options: Any = {"group": resolved.group, "chunk_bytes": chunk_bytes, "fp32_logits": fp32_logits}
    return scorer.named(score_hidden(hidden, weight, bias, scorer, **options))


def log_probs(
    logits: Tensor,  # (..., vocab_local)
    targets: Tensor,  # (...) int64, global ids
    *,
    shard: VocabShard | None = None,
    temperature: float | Tensor = 1.0,  # scalar or (...)
    entropy: Entropy = "none",
    sum_p2: bool = False,
    vocab_size: int | None = None,  # ids from here on are padding
    chunk_bytes: int | None = None,
) -> TokenStats:  # fp32 (...) each
    """Log-prob of `targets` and entropy under `softmax(logits / temperature)`, over logits that exist already.

    Equals `reference.log_probs`; never writes to `logits`, and holds no second tensor of their size in forward and
    only their gradient (in their dtype) in backward, whatever the strides of up to three axes. `shard`, `entropy`,
    `sum_p2`, `vocab_size` and errors as in `linear_log_probs`.

    Collectives over `shard.group`: forward one all-gather of three to five fp32 a row; backward none.
    """
    validation.check_tensors(logits=logits, targets=targets)
    resolved = validation.check_logits(logits, shard)
    leading = logits.shape[:-1]
    scorer = _checked_scorer(targets, leading, resolved, temperature, entropy, sum_p2, vocab_size)
    validation.check_chunk_bytes(chunk_bytes)
    outputs = score_logits(rows_of(logits), scorer, chunk_bytes=chunk_bytes)
    return scorer.named(tuple(output.view(leading) for output in outputs))


def _checked_scorer(
    targets: Tensor,  # (...) int64
    shape: torch.Size,
    shard: VocabShard,
    temperature: float | Tensor,
    entropy: Entropy,
    sum_p2: bool,
    vocab_size: int | None,
) -> LogProbScorer:
    validation.check_row_ids(targets, shape, shard)
    validation.check_temperature(temperature, shape, targets.device)
    validation.check_vocab_size(vocab_size, targets, shard)
    check_entropy(entropy)
    per_row = temperature.flatten() if isinstance(temperature, Tensor) else float(temperature)
    return LogProbScorer(targets.flatten(), shard, per_row, entropy, sum_p2=sum_p2, vocab_size=vocab_size)
