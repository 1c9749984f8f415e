"""The output layer, for the time of one call, computing per-row scalars of the kept rows instead of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from compact_logits.engine.matmul import wide_dtype
from compact_logits.megatron.kept_rows import project_rows
from compact_logits.megatron.main_grad import MainGrad
from compact_logits.megatron.refusals import refuse_rows
from compact_logits.megatron.request import Outcome, Request
from compact_logits.megatron.rank_check import check_same_question
from compact_logits.megatron.thread_forward import forward_replaced
from compact_logits.engine.linear import blocks_of, plan_for, score_hidden
from compact_logits.rows import scatter
from compact_logits.scorers.compiled import CompiledLogProbScorer
from compact_logits.engine.scorer import Scorer
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPScorer
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.engine.weight_grad import ReturnedWeightGrad, WeightGrad

__all__ = ["armed"]


@contextmanager
def armed(
    head: Any,  # a ColumnParallelLinear
    request: Request,
    *,
    ordinary_calls: int = 0,
    logit_scale: float = 1.0,
) -> Iterator[None]:
    """Within the context, a call of `head` answers `request`: it returns `((sequence, batch, 2) fp32, None)`, log-prob
    and entropy of every row, zeros for rows that are not kept. If asked for, `sum_p2` is a third scalar.

    Only `head.forward` is overridden, on the instance, so that a call still enters through the module and its
    pre-hooks run (DDP waits there for the weight's all-gather). One call is answered: the first `ordinary_calls`, all
    after the answer, and those of other threads are the head's own. On leaving, also by an exception, the head is as
    it was.
    """
    calls = 0

    def forward(
        ordinary: Callable[..., Any],
        input_: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
        weight: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        nonlocal calls
        calls += 1
        if calls != ordinary_calls + 1:
            return ordinary(input_, weight, *args, **kwargs)
        used = head.weight if weight is None else weight
        reason = refuse_rows(input_, used, request, head.tp_group.size() if head.sequence_parallel else 1)
        check_same_question(head, input_, request, refused=reason is not None)
        if reason is not None:
            request.outcome = Outcome("full", reason)
            return ordinary(input_, weight, *args, **kwargs)
        answer, scorer, projected = _answer(head, input_, used, request, logit_scale)
        request.outcome = Outcome(
            "compact",
            projected_rows=projected,
            bytes_not_allocated=_bytes_not_allocated(head, input_, used, request, scorer, projected),
        )
        return answer, None

    with forward_replaced(head, forward):
        yield


def _weight_grad(
    head: Any,
    weight: Tensor,  # (vocab_local, hidden)
) -> WeightGrad:
    """Where the weight's gradient goes, or would go if there were one: a no-grad pass is cut in the same chunks."""
    stands = getattr(weight, "main_grad", None) is not None
    if head.gradient_accumulation_fusion and weight.requires_grad and stands:
        return MainGrad(weight)
    return ReturnedWeightGrad(frozen=not weight.requires_grad)


def _bytes_not_allocated(
    head: Any,
    hidden: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    request: Request,
    scorer: Scorer,
    projected: int,
) -> int:
    """The fp32 logits of every row, which the full path hands to the loss, less what the compact forward holds."""
    selection, vocab_local = request.selection, weight.shape[0]
    dtype = wide_dtype(hidden) if request.fp32_logits else hidden.dtype
    keeps = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    sums = _weight_grad(head, weight).sums_in_place
    plan = plan_for(scorer, projected, weight, dtype, request.chunk_bytes, sums_in_place=sums)
    held = plan.bytes_in_forward(dtype, keeps=keeps, blocks=blocks_of(scorer, hidden.dtype, dtype, keeps=keeps))
    return max(4 * selection.num_rows * vocab_local - held, 0)


def _answer(
    head: Any,
    hidden: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    request: Request,
    logit_scale: float,
) -> tuple[Tensor, Scorer, int]:  # (sequence, batch, 2 or 3) fp32; by what, and of how many projected rows
    selection = request.selection
    # Megatron leaves the group None where torch.distributed was never started.
    group = head.tp_group if head.tp_group is not None and head.tp_group.size() > 1 else None
    rows = rearrange(hidden, "sequence batch hidden -> (sequence batch) hidden")
    projected = project_rows(rows, selection, group, request.share, sequence_parallel=head.sequence_parallel)
    start = 0 if group is None else group.rank() * weight.shape[0]
    kind = CompiledLogProbScorer if request.compile else LogProbScorer
    base = kind(
        targets=projected.targets,
        shard=VocabShard(start, start + weight.shape[0], group),
        temperature=request.temperature / logit_scale,
        entropy=request.entropy,
        sum_p2=request.sum_p2,
        vocab_size=request.vocab_size,
    )
    scorer: LogProbScorer | TopPScorer = base if request.nucleus is None else TopPScorer(base, request.nucleus)
    outputs = score_hidden(
        projected.rows,
        weight,
        head.bias,
        scorer,
        exchange=projected.exchange,
        weight_grad=_weight_grad(head, weight),
        chunk_bytes=request.chunk_bytes,
        fp32_logits=request.fp32_logits,
    )
    stats = base.named(outputs)
    entropy = torch.zeros_like(stats.log_probs) if stats.entropy is None else stats.entropy
    columns = [stats.log_probs, entropy] + ([] if stats.sum_p2 is None else [stats.sum_p2])
    scalars = projected.give_back(torch.stack(columns, dim=-1))
    scattered = scatter(scalars, selection.indices, selection.num_rows)
    answer = rearrange(scattered, "(sequence batch) scalar -> sequence batch scalar", batch=request.batch)
    return answer, scorer, projected.targets.shape[0]
