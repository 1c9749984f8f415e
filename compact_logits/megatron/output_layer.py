"""For one call, the output layer computes per-row scalars of the kept rows instead of logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from compact_logits.engine.linear import score_hidden, slices_of
from compact_logits.engine.matmul import unrounded_dtype
from compact_logits.engine.slices import accumulation_dtype
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.engine.weight_grad import ReturnedWeightGrad, WeightGrad
from compact_logits.megatron.kept_rows import ProjectedRows, project_rows
from compact_logits.megatron.main_grad import MainGrad
from compact_logits.megatron.rank_check import check_head
from compact_logits.megatron.refusals import refuse_rows
from compact_logits.megatron.request import Outcome, Request
from compact_logits.rows import scatter
from compact_logits.scorers.log_prob_scorer import LogProbScorer, inverse_temperatures
from compact_logits.scorers.top_p import TopPScorer

__all__ = ["compact_output_layer"]


@contextmanager
def compact_output_layer(
    head: Any,  # a ColumnParallelLinear
    request: Request,
    *,
    ordinary_calls: int = 0,
    logit_scale: float = 1.0,
) -> Iterator[None]:
    """Context manager: a call of `head` returns `((sequence, batch, 2) fp32, None)`, log-prob and entropy of every row,
    zeros for rows that are not kept; with `request.sum_p2` a third scalar.

    Only `head.forward` is overridden, on the instance, so that a call still enters through the module and its pre-hooks
    run (DDP waits there for the weight's all-gather). One call is compact: the first `ordinary_calls` calls and all
    later ones compute logits. So do calls of other threads, whose requests are refused meanwhile. On exit, also by an
    exception, the override is removed.
    """
    ordinary: Callable[..., Any] = head.forward
    thread, calls = threading.get_ident(), 0

    def forward(
        input_: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
        weight: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        nonlocal calls
        if threading.get_ident() != thread:
            return ordinary(input_, weight, *args, **kwargs)
        calls += 1
        if calls != ordinary_calls + 1:
            return ordinary(input_, weight, *args, **kwargs)
        used = head.weight if weight is None else weight
        reason = refuse_rows(input_, used, request, head.tp_group.size() if head.sequence_parallel else 1)
        check_head(head, input_, used, request, reason)
        if reason is not None:
            request.outcome = Outcome("full", reason)
            return ordinary(input_, weight, *args, **kwargs)
        scalars, request.outcome = _scalars(head, input_, used, request, logit_scale)
        return scalars, None

    head.forward = forward
    try:
        yield
    finally:
        vars(head).pop("forward", None)


def _scalars(
    head: Any,
    hidden: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    request: Request,
    logit_scale: float,
) -> tuple[Tensor, Outcome]:  # (sequence, batch, 2 or 3) fp32
    # Megatron leaves the group None where torch.distributed was never started.
    group = head.tp_group if head.tp_group is not None and head.tp_group.size() > 1 else None
    rows = rearrange(hidden, "sequence batch hidden -> (sequence batch) hidden")
    projected = project_rows(rows, request.selection, group, request.share, sequence_parallel=head.sequence_parallel)
    start = 0 if group is None else group.rank() * weight.shape[0]
    base = LogProbScorer(
        targets=projected.targets,
        shard=VocabShard(start, start + weight.shape[0], group).below(request.vocab_size),
        inverse_temperature=inverse_temperatures(
            request.temperature / logit_scale, projected.targets, accumulation_dtype(hidden.dtype)
        ),
        entropy=request.entropy,
        sum_p2=request.sum_p2,
    )
    scorer = base if request.top_p is None else TopPScorer(base, request.top_p)
    outputs = score_hidden(
        projected.rows,
        weight,
        head.bias,
        scorer,
        gather=projected.gather,
        weight_grad=_weight_grad(head, weight),
        chunk_bytes=request.chunk_bytes,
        fp32_logits=request.fp32_logits,
    )
    stats = base.named(outputs)
    entropy = torch.zeros_like(stats.log_probs) if stats.entropy is None else stats.entropy
    columns = [stats.log_probs, entropy] + ([] if stats.sum_p2 is None else [stats.sum_p2])
    of_kept = projected.give_back(torch.stack(columns, dim=-1))
    of_rows = scatter(of_kept, request.selection.indices, request.selection.num_rows)
    scalars = rearrange(of_rows, "(sequence batch) scalar -> sequence batch scalar", batch=request.batch)
    return scalars, _outcome(hidden, weight, request, scorer, projected)


def _weight_grad(head: Any, weight: Tensor) -> Callable[[Tensor], WeightGrad]:
    main_grad = getattr(weight, "main_grad", None)
    if head.gradient_accumulation_fusion and weight.requires_grad and main_grad is not None:
        return partial(MainGrad, weight, main_grad)
    return ReturnedWeightGrad


def _outcome(
    hidden: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    request: Request,
    scorer: LogProbScorer | TopPScorer,
    projected: ProjectedRows,
) -> Outcome:
    """`bytes_not_allocated`: the fp32 logits of every row, which the full path passes to the loss, less the logits that
    the compact forward allocates."""
    rows = projected.targets.shape[0]
    dtype = unrounded_dtype(hidden) if request.fp32_logits else hidden.dtype
    slices = slices_of(scorer, rows, weight, dtype, request.chunk_bytes)
    keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    full = 4 * request.selection.num_rows * weight.shape[0]
    held = slices.peak_logits(keep=keep) * dtype.itemsize
    return Outcome("compact", projected_rows=rows, bytes_not_allocated=max(full - held, 0))
