"""Forward KL of a teacher's top-k ids a row, truncated to them or with all other ids as one category more."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from compact_logits.engine import validation
from compact_logits.engine.eager import eager
from compact_logits.engine.linear import as_autocast, score_hidden
from compact_logits.engine.logits import rows_of, score_logits
from compact_logits.engine.rank_check import RankCheck
from compact_logits.engine.slices import accumulation_dtype
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import InputError
from compact_logits.host_values import as_float, describe
from compact_logits.rows import scatter
from compact_logits.scorers.log_prob_scorer import inverse_temperatures
from compact_logits.scorers.topk_scorer import TopKScorer

__all__ = ["TopKKL", "check_form", "linear_topk_kl", "topk_kl"]


class TopKKL(NamedTuple):
    """Per-row results of the shape of the teacher's tensors less their last axis, fp32 but for the count.

    `loss` has a graph, the others have none. The last four are `None` unless the form is the tail-aware one.
    """

    loss: Tensor
    student_mass: Tensor  # sum of p_k over the teacher's ids, of the clamped log-probs where there is a clamp
    teacher_mass: Tensor  # sum of q_k, also after the clamp, which may raise it above the teacher's own, and above 1
    overlap_count: Tensor  # int64, how many of the teacher's ids are among the student's k most likely
    overlap_token_advantage: Tensor  # mean of q_k (log p_k - log q_k) over these, 0 where there are none
    head_loss: Tensor | None = None  # sum of q_k (log q_k - log p_k) over the teacher's ids
    tail_loss: Tensor | None = None  # the same of the one category that all other ids are
    student_tail_mass: Tensor | None = None  # sum of p_j over all other ids, not cut off at the guard
    teacher_tail_mass: Tensor | None = None  # 1 - teacher_mass, at least 0


@eager
def topk_kl(
    logits: Tensor,  # (..., vocab_local)
    teacher_log_probs: Tensor,  # (..., k)
    teacher_ids: Tensor,  # (..., k) int64, global ids
    *,
    shard: VocabShard | None = None,
    tail: bool = False,
    log_prob_min_clamp: float | None = None,
    tail_mass_eps: float = 1e-6,
    temperature: float | Tensor = 1.0,  # scalar or (...)
    chunk_bytes: int | None = None,
    loss_mask: Tensor | None = None,  # (...) bool
    inplace_backward: bool = False,
    check_ranks: bool | None = None,
) -> TopKKL:  # (...) each
    """`sum_k q_k (log q_k - log p_k)` over the teacher's ids, with `p = softmax(logits / temperature)`.

    Equals `reference.topk_kl`; holds their gradient, in their dtype, in backward, and with `tail` a copy of as many
    rows of `logits` as take `chunk_bytes`.
    The teacher's log-probs are taken as given, at whatever temperature they were made, and get no gradient; an id may
    be listed twice, and then counts twice, but once with `tail`. The truncated KL may be negative. A log-prob that is
    NaN gives a loss that is NaN.

    `log_prob_min_clamp`: a lower bound for the log-probs of both sides; where the student's is below it, no gradient
    but that of a NaN. Both masses are counted after the clamp.
    `tail`: the exact KL of k + 1 categories, all ids not listed being one: never negative, and never above the KL over
    the whole vocabulary. Of an id listed twice the first log-prob counts, and an entry of -inf, which the teacher did
    not give, lists nothing. `tail_mass_eps` bounds the student's tail from below inside the logarithm; a clamp is
    refused.
    `loss_mask`: rows where it is not set are not computed; their outputs and gradients are exactly zero. To find the
    others, one wait for the device.
    `inplace_backward`: backward writes the gradient over `logits`, which must be contiguous and which nobody may need
    any more: whoever saved them for a backward of his own gets autograd's error, and so does a second backward.
    `check_ranks`: as in `linear_log_probs`; compared are also the loss mask, and the teacher of the rows it counts.

    Collectives over `shard.group`: forward one all-gather of 120 bytes a rank where ranks are compared, and two, of
    `k + 2` (`tail`: `k + 3`) and of 5 fp64 a row (6 with a clamp), however many slices; backward none. Raises
    `InputError` before all but the first.
    """
    with RankCheck("topk_kl", shard, check_ranks, logits, teacher_log_probs, teacher_ids) as check:
        teacher = {"teacher_log_probs": teacher_log_probs, "teacher_ids": teacher_ids}
        validation.check_tensors(logits=logits, **teacher, loss_mask=loss_mask)
        resolved = validation.check_logits(logits, shard)
        scorer = _checked_scorer(
            teacher_log_probs, teacher_ids, logits, resolved, tail, log_prob_min_clamp, tail_mass_eps, temperature
        )
        chunk_bytes = validation.check_chunk_bytes(chunk_bytes)
        validation.check_flag("inplace_backward", inplace_backward)
        if inplace_backward and not logits.is_contiguous():
            raise InputError(
                "inplace_backward needs contiguous logits, or it would save nothing; pass logits.contiguous()"
            )
        leading = logits.shape[:-1]
        kept = None if loss_mask is None else _kept_rows(loss_mask, leading)
        if kept is not None:
            scorer = scorer.of_rows(kept)
        _compare(check, scorer, logits, leading.numel(), place=kept)
    if kept is None:
        outputs = score_logits(rows_of(logits), scorer, overwrite=inplace_backward, chunk_bytes=chunk_bytes)
        return TopKKL(*[output.view(leading) for output in outputs])
    flat = rearrange(logits, "... vocab -> (...) vocab")
    outputs = score_logits(flat, scorer, window=kept, overwrite=inplace_backward, chunk_bytes=chunk_bytes)
    return TopKKL(*[scatter(output, kept, flat.shape[0]).view(leading) for output in outputs])


@eager
def linear_topk_kl(
    hidden: Tensor,  # (..., hidden)
    weight: Tensor,  # (vocab_local, hidden)
    teacher_log_probs: Tensor,  # (..., k)
    teacher_ids: Tensor,  # (..., k) int64, global ids
    *,
    bias: Tensor | None = None,  # (vocab_local,)
    shard: VocabShard | None = None,
    tail: bool = False,
    log_prob_min_clamp: float | None = None,
    tail_mass_eps: float = 1e-6,
    temperature: float | Tensor = 1.0,  # scalar or (...)
    chunk_bytes: int | None = None,
    check_ranks: bool | None = None,
) -> TopKKL:  # (...) each
    """`topk_kl(hidden @ weight.T + bias, ...)`, without all the logits standing in memory.

    Holds at most `chunk_bytes` of them (default: 1 GiB on a GPU, 256 MiB on a CPU), slice by slice of the vocabulary,
    and O(rows * k) numbers. The product is in the
    dtype of `hidden`, everything after it in fp32. With a shard, `hidden` and the teacher's tensors are the same on all
    ranks of its group, and the gradient of `hidden` is summed over it here. Gradients have the dtypes of their inputs;
    sums over slices are formed in fp32. The other arguments and the errors are as in `topk_kl`.

    Collectives over `shard.group`: forward as `topk_kl`; backward one all-reduce of the gradient of `hidden`, if it
    needs one. Also with zero rows.
    """
    with RankCheck("linear_topk_kl", shard, check_ranks, hidden, weight, teacher_log_probs, teacher_ids) as check:
        teacher = {"teacher_log_probs": teacher_log_probs, "teacher_ids": teacher_ids}
        validation.check_tensors(hidden=hidden, weight=weight, **teacher, bias=bias)
        rows = rearrange(hidden, "... hidden -> (...) hidden") if hidden.dim() else hidden
        rows, weight, bias = as_autocast(rows, weight, bias)
        resolved = validation.check_head(rows, weight, bias, shard)
        scorer = _checked_scorer(
            teacher_log_probs, teacher_ids, hidden, resolved, tail, log_prob_min_clamp, tail_mass_eps, temperature
        )
        chunk_bytes = validation.check_chunk_bytes(chunk_bytes)
        _compare(check, scorer, rows, rows.shape[0], hidden=rows, bias=bias)
    outputs = score_hidden(rows, weight, bias, scorer, group=resolved.group, chunk_bytes=chunk_bytes)
    return TopKKL(*[output.view(hidden.shape[:-1]) for output in outputs])


def _checked_scorer(
    teacher_log_probs: Tensor,  # (..., k)
    teacher_ids: Tensor,  # (..., k)
    student: Tensor,  # (..., any), logits or hidden states
    shard: VocabShard,
    tail: bool,
    log_prob_min_clamp: float | None,
    tail_mass_eps: float,
    temperature: float | Tensor,
) -> TopKScorer:
    leading = student.shape[:-1]
    _check_teacher(teacher_log_probs, teacher_ids, leading)
    validation.check_row_ids(teacher_ids, teacher_log_probs.shape, shard, name="teacher_ids")
    validation.check_temperature(temperature, leading, teacher_ids.device)
    clamp, eps = check_form(tail, log_prob_min_clamp, tail_mass_eps)
    dtype = accumulation_dtype(student.dtype)
    log_probs = teacher_log_probs.to(dtype)
    if clamp is not None:
        # The same number for teacher and student, or entries below it on both sides would leave a loss.
        clamp = torch.tensor(clamp, dtype=dtype, device="cpu").item()
        log_probs = log_probs.clamp(min=clamp)
    ids = rearrange(teacher_ids, "... k -> (...) k")
    per_row = temperature.flatten() if isinstance(temperature, Tensor) else float(temperature)
    return TopKScorer(
        teacher_log_probs=rearrange(log_probs, "... k -> (...) k"),
        teacher_ids=ids,
        shard=shard,
        inverse_temperature=inverse_temperatures(per_row, ids, dtype),
        log_prob_min_clamp=clamp,
        tail_mass_eps=eps if tail else None,
    )


def _compare(
    check: RankCheck,
    scorer: TopKScorer,
    student: Tensor,  # (..., any), logits or hidden states
    rows: int,
    *,
    place: Tensor | None = None,  # (kept,) int64
    hidden: Tensor | None = None,  # (rows, hidden)
    bias: Tensor | None = None,  # (vocab_local,)
) -> None:
    settings = {
        "tail_mass_eps": scorer.tail_mass_eps,  # None without the tail
        "log_prob_min_clamp": scorer.log_prob_min_clamp,
        "k": scorer.teacher_ids.shape[1],
        "dtype": student.dtype,
        "hidden size": None if hidden is None else hidden.shape[1],
        "bias": bias is not None,
    }
    check.compare(
        scorer.teacher_ids,
        scorer.inverse_temperature,
        settings,
        rows=rows,
        place=place,
        teacher=scorer.teacher_log_probs,
        hidden=hidden,
    )


def _kept_rows(loss_mask: Tensor, leading: torch.Size) -> Tensor:  # (kept,) int64
    if loss_mask.dtype != torch.bool or loss_mask.shape != leading:
        raise InputError(f"needed a bool loss_mask {tuple(leading)}, got {tuple(loss_mask.shape)} of {loss_mask.dtype}")
    return loss_mask.flatten().nonzero().squeeze(1)


def _check_teacher(log_probs: Tensor, ids: Tensor, leading: torch.Size) -> None:
    if log_probs.dim() < 1 or log_probs.shape[:-1] != leading or not log_probs.is_floating_point():
        raise InputError(
            f"needed floating teacher_log_probs {(*leading, 'k')}, got {tuple(log_probs.shape)} of {log_probs.dtype}; "
            f"the teacher's rows are those of the student"
        )
    if log_probs.shape[-1] == 0:
        raise InputError("needed at least one teacher id a row, got k = 0")
    if log_probs.requires_grad:
        raise InputError("the teacher gets no gradient here; pass teacher_log_probs.detach()")


def check_form(
    tail: object,
    log_prob_min_clamp: object,
    tail_mass_eps: object,
) -> tuple[float | None, float]:  # clamp, eps
    """The two bounds as floats. Raises `InputError` unless the settings name one of the two forms of the top-k KL."""
    validation.check_flag("tail", tail)
    eps = as_float(tail_mass_eps)
    if eps is None or not 0.0 < eps < 1.0:
        raise InputError(f"tail_mass_eps must lie strictly between 0 and 1, got {describe(tail_mass_eps)}")
    if log_prob_min_clamp is None:
        return None, eps
    if tail:
        raise InputError(
            f"the tail-aware KL takes no log_prob_min_clamp, got {describe(log_prob_min_clamp)}: clamped log-probs and "
            f"their tail are not one distribution; pass None, tail_mass_eps bounds the loss"
        )
    clamp = as_float(log_prob_min_clamp)
    if clamp is None or not clamp <= 0.0:
        raise InputError(
            f"log_prob_min_clamp bounds log-probs, which are at most 0, got {describe(log_prob_min_clamp)}"
        )
    return clamp, eps
