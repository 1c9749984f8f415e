"""Hidden states to per-row scalars: the output projection and its gradients, slice by slice of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compact_logits.engine.matmul import add_product_, project, unrounded_dtype
from compact_logits.engine.row_gather import Local, Replicated, RowGather
from compact_logits.engine.slices import VocabSlices, accumulation_dtype, vocab_slices
from compact_logits.engine.weight_grad import ReturnedWeightGrad, WeightGrad

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from compact_logits.engine.scorer import Scorer

__all__ = ["as_autocast", "score_hidden", "slices_of"]


def score_hidden(
    hidden: Tensor,  # (local rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    bias: Tensor | None,  # (vocab_local,)
    scorer: Scorer,
    *,
    gather: RowGather | None = None,
    group: ProcessGroup | None = None,
    weight_grad: Callable[[Tensor], WeightGrad] = ReturnedWeightGrad,
    chunk_bytes: int | None = None,
    fp32_logits: bool = False,
) -> tuple[Tensor, ...]:  # the scorer's outputs, each (projected rows, ...)
    """Run `scorer` over `hidden @ weight.T + bias`, with `chunk_bytes` of logits in memory at a time (`vocab_slices`).

    `gather` says how local rows become the projected ones (default: the same rows on every rank of `group`, the
    vocabulary's group, or one rank where that is `None`). `weight_grad` says where the weight's gradient goes.
    `fp32_logits` keeps the logits of 16-bit inputs in fp32; `InputError` where the device has no such product.

    Gradients have the dtypes of their inputs. The gradient of the rows is summed over the slices in fp32 and rounded
    once. Each row of the weight's gradient is one product. Padded columns (outside `scorer.shard`) contribute nothing,
    and their rows of the weight's gradient are exactly zero.
    Memory: saved for backward are the projected rows, O(rows) scalars, and the logits of as many slices as fit the
    budget beside the slice being computed. Backward overwrites these logits; a second backward recomputes them,
    one slice beside the saved ones at a time.
    Collectives: those of `gather` and of `scorer.merge`, whatever the number of slices and also with zero rows.
    """
    if gather is None:
        gather = Local() if group is None or group.size() == 1 else Replicated(group)
    dtype = unrounded_dtype(hidden) if fp32_logits else hidden.dtype
    # Computed here: inside forward, needs_input_grad is true under no_grad as well.
    keep = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (hidden, weight, bias))
    return _ScoreHidden.apply(hidden, weight, bias, scorer, gather, weight_grad, chunk_bytes, dtype, keep)


def slices_of(
    scorer: Scorer,
    rows: int,
    weight: Tensor,  # (vocab_local, hidden)
    logits: torch.dtype,
    chunk_bytes: int | None,
) -> VocabSlices:
    """How `score_hidden` cuts the vocabulary for `rows` projected rows."""
    columns, hidden = min(scorer.shard.size, weight.shape[0]), weight.shape[1]
    return vocab_slices(rows, columns, hidden, logits, weight.device, chunk_bytes)


class _ScoreHidden(torch.autograd.Function):
    """One autograd node for all slices, so that DDP sees one gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scorer: Scorer,
        gather: RowGather,
        weight_grad: Callable[[Tensor], WeightGrad],
        chunk_bytes: int | None,
        dtype: torch.dtype,
        keep: bool,
    ) -> tuple[Tensor, ...]:
        rows = gather.gather(hidden)
        slices = slices_of(scorer, rows.shape[0], weight, dtype, chunk_bytes)
        stats, saved_logits = scorer.new_stats(), []
        for index, columns in enumerate(slices):
            logits = project(rows, weight[columns], None if bias is None else bias[columns], dtype)
            scorer.add_slice_(stats, logits, scorer.shard.start + columns.start)
            if keep and index < slices.saved:
                saved_logits.append(logits)
            del logits  # before the next slice is formed
        outputs, per_row = scorer.merge(stats)
        # All as saved tensors, so that checkpointing frees them and offloading sees them.
        ctx.save_for_backward(rows, weight, bias, *scorer.inputs, *per_row, *saved_logits)
        ctx.counts = len(scorer.inputs), len(per_row)
        ctx.scorer, ctx.gather, ctx.weight_grad, ctx.slices, ctx.dtype = scorer, gather, weight_grad, slices, dtype
        ctx.logits_are_intact = True
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, scorer.differentiable, strict=True) if not d])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight, bias, *rest = ctx.saved_tensors
        inputs, count = ctx.counts
        per_row, saved_logits = rest[inputs : inputs + count], rest[inputs + count :]
        # Saved logits are overwritten through `data`, which autograd does not count. A second backward recomputes them.
        intact, ctx.logits_are_intact = ctx.logits_are_intact, False
        saved_logits = [each.data.contiguous() for each in saved_logits] if intact else []
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scorer, slices, wide = ctx.scorer, ctx.slices, accumulation_dtype(rows.dtype)
        grad = scorer.logits_grad(tuple(per_row), grads)
        d_weight = ctx.weight_grad(weight) if needs_weight else None
        d_bias = torch.zeros_like(bias) if needs_bias else None
        d_rows = None
        if needs_hidden:
            d_rows = torch.empty_like(rows) if len(slices) == 1 else torch.zeros_like(rows, dtype=wide)
        reduced = None
        for index, columns in enumerate(slices):
            if index < len(saved_logits):
                logits = saved_logits[index]
            else:
                logits = project(rows, weight[columns], None if bias is None else bias[columns], ctx.dtype)
            grad.write_(logits, scorer.shard.start + columns.start)
            d_logits = logits.to(rows.dtype)
            del logits
            if d_rows is not None:
                if len(slices) == 1:
                    torch.mm(d_logits, weight[columns], out=d_rows)
                else:
                    add_product_(d_rows, d_logits, weight[columns])
                if index == len(slices) - 1:  # the reduction overlaps the weight's last product
                    reduced = ctx.gather.start_reduce(d_rows.to(rows.dtype))
            if d_weight is not None:
                d_weight.add(columns, d_logits, rows)
            if d_bias is not None:
                d_bias[columns] = d_logits.sum(dim=0, dtype=wide)
            del d_logits
        if d_rows is not None and reduced is None:  # no rows or no columns here: other ranks wait
            reduced = ctx.gather.start_reduce(d_rows.to(rows.dtype))
        return (
            None if reduced is None else reduced(),
            None if d_weight is None else d_weight.finish(),
            d_bias,
            *[None] * 6,
        )


def as_autocast(
    hidden: Tensor,  # (rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    bias: Tensor | None,  # (vocab_local,)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the three to the dtype in which a linear layer would compute here: autocast's where it is on."""
    device_type = hidden.device.type
    # For a device without autocast, such as meta, `is_autocast_enabled` raises.
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)  # autocast leaves fp64 alone

    return cast(hidden), cast(weight), None if bias is None else cast(bias)
