"""The chunked projection: hidden states to per-row scalars, without the logits of all rows ever standing in memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from compact_logits.chunk_product import project, wide_dtype
from compact_logits.chunks import Block, ChunkPlan, Scratch, plan_chunks, work_dtype
from compact_logits.exchange import Local, Replicated, RowExchange
from compact_logits.first_order import edge_of, first_order
from compact_logits.held_logits import HeldLogits
from compact_logits.hidden_grad import HiddenGrad
from compact_logits.joined_stats import JoinedStats
from compact_logits.turned_logits import turned
from compact_logits.weight_grad import ReturnedWeightGrad, WeightGrad

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from compact_logits.scorers.contract import Scorer

__all__ = ["as_autocast", "blocks_of", "plan_for", "score_hidden"]


def as_autocast(
    hidden: Tensor,  # (rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    bias: Tensor | None,  # (vocab_local,)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three in the dtype that a linear layer would compute in here: autocast's where it is on."""
    device_type = hidden.device.type
    # Where a device has no autocast at all, as meta has none, to ask whether it is on is an error.
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)  # autocast passes fp64 by

    return cast(hidden), cast(weight), None if bias is None else cast(bias)


def blocks_of(
    scorer: Scorer,
    dtype: torch.dtype,  # of the hidden states
    logits: torch.dtype,
    *,
    keeps: bool,  # logits for backward
) -> int:
    """How many blocks of scratch the passes of `score_hidden` work on."""
    in_place = logits == work_dtype(logits) and (not keeps or _leaves_shares(scorer, dtype))
    return (not in_place) + scorer.needs_spare


def plan_for(
    scorer: Scorer,
    rows: int,
    weight: Tensor,  # (vocab_local, hidden)
    logits: torch.dtype,
    chunk_bytes: int | None,
    *,
    sums_in_place: bool,  # of the weight's gradient
) -> ChunkPlan:
    """The chunks in which `score_hidden` projects so many rows, with gradients and without."""
    columns, hidden = weight.shape
    work = work_dtype(weight.dtype)
    # A 16-bit gradient that is summed over slices, or over groups of rows, needs a sum in fp32. Of the weight's
    # gradient it stands beside the logits, in whose memory that gradient may stand otherwise.
    cut = work != weight.dtype and (sums_in_place or rows > 2 * columns)
    return plan_chunks(
        rows,
        columns,
        logits,
        weight.device,
        chunk_bytes,
        blocks=blocks_of(scorer, weight.dtype, logits, keeps=True),
        row_sum=hidden * work.itemsize if cut else 0,
    )


def score_hidden(
    hidden: Tensor,  # (local rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    bias: Tensor | None,  # (vocab_local,)
    scorer: Scorer,
    *,
    exchange: RowExchange | None = None,
    group: ProcessGroup | None = None,
    weight_grad: WeightGrad | None = None,
    chunk_bytes: int | None = None,
    fp32_logits: bool = False,
    plan: ChunkPlan | None = None,  # of the projected rows, in place of `chunk_bytes`
) -> tuple[Tensor, ...]:  # the scorer's outputs, each (projected rows, ...)
    """Run `scorer` over `hidden @ weight.T + bias`, chunk by chunk.

    `exchange` says how local rows become the projected ones (default: the same rows on every rank of `group`, the
    vocabulary's group, or one rank where that is `None`). `weight_grad` says where the weight's gradient goes.
    `fp32_logits` leaves out the rounding of 16-bit logits, where the device offers it; `InputError` where not.

    Memory: at most `chunk_bytes` of logits; saved for backward are the projected rows, O(rows) scalars and the logits
    of as many chunks as the budget holds, in fp32 their exponentials if those do. Backward writes over them: it forms
    the other chunks' logits there, and the weight's gradient if that is returned and holds less than they do. Where
    there are several chunks of 16-bit rows, an fp32 sum of the rows' gradient stands beside the budget, or one of the
    weight's where there are more than twice as many rows as columns; none where the weight's is summed in place anyway.
    Collectives: those of `exchange` and of `scorer.merge`, whatever the number of chunks and also with zero rows.
    """
    if exchange is None:
        exchange = Local() if group is None or group.size() == 1 else Replicated(group)
    dtype = wide_dtype(hidden) if fp32_logits else hidden.dtype
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    grad_of_weight = ReturnedWeightGrad() if weight_grad is None else weight_grad
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        # Where forward gathers rows and saves those, not `hidden` itself. In a tuple, it is no input of the node.
        edge = (None if isinstance(exchange, Local | Replicated) else edge_of(hidden),)
        options = (exchange, grad_of_weight, chunk_bytes, dtype, plan, edge)
        return _ScoreHidden.apply(hidden, weight, bias, scorer, *options)
    with torch.no_grad():
        rows = exchange.gather(hidden)
        sums = grad_of_weight.sums_in_place
        plan = plan or plan_for(scorer, rows.shape[0], weight, dtype, chunk_bytes, sums_in_place=sums)
        held = HeldLogits.make(plan, rows, weight, dtype, keep=False, lends=False)
        return _forward(rows, weight, bias, scorer, held, {})[0]


class _ScoreHidden(torch.autograd.Function):
    """One node a micro-batch, so that DDP sees one gradient for the weight however many chunks there were."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scorer: Scorer,
        exchange: RowExchange,
        weight_grad: WeightGrad,
        chunk_bytes: int | None,
        dtype: torch.dtype,
        plan: ChunkPlan | None,
        edge: tuple[Tensor | None],
    ) -> tuple[Tensor, ...]:
        rows = exchange.gather(hidden)
        sums = weight_grad.sums_in_place
        plan = plan or plan_for(scorer, rows.shape[0], weight, dtype, chunk_bytes, sums_in_place=sums)
        lends = weight_grad.lends and ctx.needs_input_grad[1]
        held = HeldLogits.make(plan, rows, weight, dtype, keep=True, lends=lends)
        leaves = _leaves_shares(scorer, rows.dtype)
        ctx.shares = [index for index in range(plan.num_slices) if leaves and held.stays(index)]
        largest = rows.new_empty(len(ctx.shares), plan.height)
        largest_of = dict(zip(ctx.shares, largest, strict=True))
        outputs, saved = _forward(rows, weight, bias, scorer, held, largest_of)
        ctx.save_for_backward(rows, weight, bias, held.own, held.lent, largest, *edge, *scorer.inputs, *saved)
        ctx.spent, ctx.one_at_a_time = False, threading.Lock()
        ctx.lent = None if held.lent is None else StorageWeakRef(held.lent.untyped_storage())
        ctx.scorer, ctx.exchange, ctx.weight_grad, ctx.plan = scorer, exchange, weight_grad, plan
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, scorer.differentiable, strict=True) if not d])
        return outputs

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.one_at_a_time:  # threads may share a graph
            return _ScoreHidden._backward(ctx, *grads)

    @staticmethod
    def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight, bias, own, lent, largest, _, *rest = ctx.saved_tensors
        saved = rest[len(ctx.scorer.inputs) :]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        plan: ChunkPlan = ctx.plan
        work = work_dtype(rows.dtype)
        grads = tuple(g if g is None else g.to(work) for g in grads)
        # The logits that forward has left are turned into their gradient where they are, and all other chunks are
        # formed in the same memory. `data` keeps that from autograd, which would refuse a second backward; that one
        # finds them spent, and the lent memory given away, and forms them again, in the same order.
        ready, ctx.spent = not ctx.spent, True
        there = lent.data.contiguous() if lent is not None and ready else None
        held = HeldLogits(plan, own.data.contiguous(), there, ascends=lent is not None)
        # What a saved-tensor hook has brought is its own, and it may use it again.
        gives = lent is not None and StorageWeakRef(lent.untyped_storage()).cdata == ctx.lent.cdata
        scratch, largest_of = Scratch(plan, rows), dict(zip(ctx.shares, largest, strict=True))
        room = ctx.exchange.room(rows) if needs_hidden else None
        d_bias = torch.zeros(weight.shape[0], dtype=work, device=rows.device) if needs_bias else None
        groups, slices, order = plan.groups(), plan.slices(), held.order
        d_weight = ctx.weight_grad.begin(weight, plan, there if gives else None) if needs_weight else None
        wait = None
        for group in reversed(groups):
            d_group = None if room is None else HiddenGrad(room[group], plan)
            for index in order:
                columns = slices[index]
                logits = held.chunk(index, _length(group), _length(columns))
                stayed = ready and group == groups[-1] and held.stays(index)
                if not stayed:
                    project(rows[group], weight[columns], None if bias is None else bias[columns], logits)
                logits = held.apart(index, logits)
                of_shares = largest_of.get(index) if group == groups[-1] else None
                d_logits = turned(
                    logits,
                    rows.dtype,
                    _part(ctx.scorer, columns, slices),
                    plan,
                    scratch,
                    group.start,
                    saved,
                    grads,
                    None if d_bias is None else d_bias[columns],
                    of_shares,
                    stayed=stayed,
                )
                if d_group is not None:
                    d_group.add(d_logits, weight[columns])
                    if index == order[-1]:
                        d_group.finish()
                        if group == groups[0]:  # the reduction runs while the last weight product is formed
                            wait = ctx.exchange.start_reduce(room)
                if d_weight is not None:
                    d_weight.add(d_logits, rows[group], columns)
        if room is not None and wait is None:
            wait = ctx.exchange.start_reduce(room)
        return (
            wait() if wait is not None else None,
            d_weight.finish() if d_weight is not None else None,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            *[None] * 7,
        )


def _forward(
    rows: Tensor,  # (rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    bias: Tensor | None,
    scorer: Scorer,
    held: HeldLogits,
    largest: dict[int, Tensor],  # (height,) each, written to; of slices of which not the logits stay but exponentials
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # outputs, saved
    plan = held.plan
    scratch = Scratch(plan, rows)
    stats = rows.new_empty(plan.rows, scorer.stats_width, dtype=work_dtype(rows.dtype))
    groups, slices = plan.groups(), plan.slices()
    for group in groups:
        height = _length(group)
        joined = JoinedStats(scorer, len(slices), stats[group])
        for index, columns in enumerate(slices):
            logits = held.chunk(index, height, _length(columns))
            project(rows[group], weight[columns], None if bias is None else bias[columns], logits)
            stays = group == groups[-1] and held.stays(index)
            of_shares = largest.get(index) if stays else None
            part, of_part = _part(scorer, columns, slices), joined.next()
            for local in plan.blocks(height):
                size = (_length(local), _length(columns))
                given = logits[local]
                in_place = given.dtype == stats.dtype and (of_shares is not None or not stays)
                z = given if in_place else scratch.block(*size)
                spare = scratch.spare(*size) if scorer.needs_spare else None
                block = slice(group.start + local.start, group.start + local.stop)
                of_part[local] = part.local_stats(Block(given, z, spare, block))
            if of_shares is not None:
                of_shares[:height] = of_part[:, 0]
        joined.finish()
    return scorer.merge(stats)


def _leaves_shares(scorer: Scorer, dtype: torch.dtype) -> bool:
    return scorer.turn_shares_ is not None and dtype == work_dtype(dtype)


def _part(scorer: Scorer, columns: slice, slices: list[slice]) -> Scorer:
    return scorer if len(slices) == 1 else scorer.part(columns)


def _length(rows: slice) -> int:
    return rows.stop - rows.start
