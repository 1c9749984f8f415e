"""Log-prob of one id a row, and entropy of the row, from hidden states or from logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compact_logits.engine import validation
from compact_logits.engine.eager import eager
from compact_logits.engine.linear import as_autocast, score_hidden
from compact_logits.engine.logits import rows_of, score_logits
from compact_logits.engine.rank_check import RankCheck
from compact_logits.engine.slices import accumulation_dtype
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.scorers.log_prob_scorer import (
    Entropy,
    LogProbScorer,
    TokenStats,
    check_entropy,
    inverse_temperatures,
)

__all__ = ["linear_log_probs", "log_probs"]


@eager
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
    check_ranks: bool | None = None,
) -> TokenStats:  # fp32 (rows,) each
    """Log-prob of `targets` and entropy under `softmax((hidden @ weight.T + bias) / temperature)`, without the logits.

    Equals `reference.log_probs(hidden @ weight.T, targets)`. Logits are computed slice by slice of the vocabulary; at
    most `chunk_bytes` of them are in memory (default: 1 GiB on a GPU, 256 MiB on a CPU), or one slice of
    `max(64, hidden / 4)` columns where that is more. Those that fit are saved for backward. The product is in the dtype
    of `hidden`, everything after it in fp32; with `fp32_logits` a product of 16-bit factors is not rounded either,
    which only CUDA offers (`InputError` elsewhere).

    `shard=None`: `weight` is the whole vocabulary. With a shard, `hidden` and `targets` are the same on all ranks of
    its group, and the gradient of `hidden` is summed over it here. `entropy`: `"none"`, `"metric"` (a value, no graph)
    or `"loss"` (differentiable). `sum_p2` adds the sum of squared probabilities, a value without a graph. With
    `vocab_size`, columns from there on are ignored, and their rows of the weight get a gradient of exactly zero;
    without it, padded columns count like any other. Gradients have the dtypes of their inputs. The gradient of `hidden`
    is summed over the slices in fp32; each row of the weight's gradient is one product.

    `check_ranks`: first, the ranks of `shard.group` compare their arguments (rows, targets, settings, shards), and the
    host waits for the result. All ranks raise the same `DisagreementError` if the arguments differ, and `InputError` if
    an id is in no shard or one rank's arguments are rejected. None compares at a group's first call, True at every
    call; pass `False`, on all ranks, while a CUDA graph is captured. Without the comparison, an id that no shard has
    gives NaN in its row.

    Collectives over `shard.group`: forward one all-gather of 120 bytes a rank where ranks are compared, and one of
    three to five fp64 a row; backward one all-reduce of the gradient of `hidden`, if it needs one. Also with zero rows.
    Raises `InputError` before all but the first.
    """
    with RankCheck("linear_log_probs", shard, check_ranks, hidden, weight, targets) as check:
        validation.check_tensors(hidden=hidden, weight=weight, targets=targets, bias=bias)
        hidden, weight, bias = as_autocast(hidden, weight, bias)
        resolved = validation.check_head(hidden, weight, bias, shard)
        scorer = _checked_scorer(targets, hidden, resolved, temperature, entropy, sum_p2, vocab_size)
        chunk_bytes = validation.check_chunk_bytes(chunk_bytes)
        validation.check_flag("fp32_logits", fp32_logits)
        settings = _settings(scorer) | {"fp32_logits": fp32_logits, "bias": bias is not None}
        of_hidden = {"dtype": hidden.dtype, "hidden size": hidden.shape[1]}
        check.compare(scorer.targets, temperature, settings | of_hidden, vocab_size=vocab_size, hidden=hidden)
    options: Any = {"group": resolved.group, "chunk_bytes": chunk_bytes, "fp32_logits": fp32_logits}
    return scorer.named(score_hidden(hidden, weight, bias, scorer, **options))


@eager
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
    check_ranks: bool | None = None,
) -> TokenStats:  # fp32 (...) each
    """Log-prob of `targets` and entropy under `softmax(logits / temperature)`, over logits that exist already.

    Equals `reference.log_probs`; never writes to `logits`. Forward allocates no second tensor of their size, and
    backward only their gradient, in their dtype. That holds for any strides of up to three axes, if a row's logits are
    adjacent. `shard`, `entropy`, `sum_p2`, `vocab_size`, `check_ranks` and errors as in `linear_log_probs`.

    Collectives over `shard.group`: forward one all-gather of 120 bytes a rank where ranks are compared, and one of
    three to five fp64 a row; backward none.
    """
    with RankCheck("log_probs", shard, check_ranks, logits, targets) as check:
        validation.check_tensors(logits=logits, targets=targets)
        resolved = validation.check_logits(logits, shard)
        leading = logits.shape[:-1]
        scorer = _checked_scorer(targets, logits, resolved, temperature, entropy, sum_p2, vocab_size)
        chunk_bytes = validation.check_chunk_bytes(chunk_bytes)
        settings = _settings(scorer) | {"dtype": logits.dtype}
        check.compare(scorer.targets, temperature, settings, vocab_size=vocab_size)
    outputs = score_logits(rows_of(logits), scorer, chunk_bytes=chunk_bytes)
    return scorer.named(tuple(output.view(leading) for output in outputs))


def _checked_scorer(
    targets: Tensor,  # (...) int64
    student: Tensor,  # (..., any), logits or hidden states
    shard: VocabShard,
    temperature: float | Tensor,
    entropy: Entropy,
    sum_p2: bool,
    vocab_size: int | None,
) -> LogProbScorer:
    shape = student.shape[:-1]
    validation.check_row_ids(targets, shape, shard)
    validation.check_temperature(temperature, shape, targets.device)
    vocab_size = validation.check_vocab_size(vocab_size, targets, shard)
    check_entropy(entropy)
    validation.check_flag("sum_p2", sum_p2)
    per_row = temperature.flatten() if isinstance(temperature, Tensor) else float(temperature)
    rows = targets.flatten()
    inverse = inverse_temperatures(per_row, rows, accumulation_dtype(student.dtype))
    return LogProbScorer(rows, shard.below(vocab_size), inverse, entropy, sum_p2=sum_p2)


def _settings(scorer: LogProbScorer) -> dict[str, object]:
    return {"entropy": scorer.entropy, "sum_p2": scorer.sum_p2}
