"""The same log-probs from hidden states: only the rows that predict the ids are projected."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from compact_logits.engine import validation
from compact_logits.engine.linear import as_autocast, score_hidden
from compact_logits.engine.rank_check import RankCheck
from compact_logits.errors import InputError
from compact_logits.integrations.torchforge.head import refuse_sharded_by_fsdp, through_head
from compact_logits.integrations.torchforge.head_placement import HeadPlacement
from compact_logits.integrations.torchforge.targets import (
    Targets,
    aligned_window,
    check_settings,
    log_prob_scorer,
    window_settings,
)

__all__ = ["compute_logprobs_from_hidden"]


@torch.compiler.disable
def compute_logprobs_from_hidden(
    hidden: Tensor,  # (batch, positions, hidden), plain or DTensor
    lm_head_weight: Tensor | nn.Module,  # (vocab, hidden), plain or DTensor; or the head itself
    input_ids: Tensor,  # (batch, target positions) int, plain or DTensor
    temperature: float = 1.0,
    align: bool = True,
    *,
    bias: Tensor | None = None,  # (vocab,), placed as the weight
    compile: bool = False,
    chunk_bytes: int | None = None,
    check_ranks: bool | None = None,
) -> Tensor:  # (batch, target positions) fp32
    """`compute_logprobs(hidden @ lm_head_weight.T, input_ids, temperature, align)`, without all the logits in memory.

    Only the positions that predict an id are projected, slice by slice of the vocabulary, of which at most
    `chunk_bytes` are held (default: 1 GiB on a GPU, 256 MiB on a CPU); the product is in the dtype of `hidden`,
    everything after it in fp32. `input_ids`, `temperature`, `align`, `compile`, `check_ranks`, the form of the result
    and errors as in `compute_logprobs`.

    The weight may be sharded on the vocabulary by one mesh axis. `hidden` then is a plain tensor, the same on all ranks
    of that axis, or a DTensor of the same mesh: replicated over that axis, or sharded on the positions (sequence
    parallelism: only the positions that count are gathered); and on the other axes replicated, or sharded on the batch.
    Gradients have the placements of their inputs; the weight's is summed over the axes that shard the batch.

    `lm_head_weight` may be the `nn.Linear` itself, and must be where FSDP2 shards it: its hooks then run as in any
    other call, and gather the weight, in backward too. Raises `InputError` for a head with other hooks or another
    `forward`.

    Collectives over the vocabulary's mesh axis: forward one all-gather of 120 bytes a rank where ranks are compared,
    and one of three fp64 a row, backward one all-reduce of the gradient of the projected rows; for sharded positions
    also an all-gather of those rows, and a reduce-scatter in place of the all-reduce. Over each axis that shards the
    batch: one all-reduce of the weight's gradient.
    """

    def score(entered: Tensor, weight: Tensor, own_bias: Tensor | None) -> tuple[Tensor, Targets]:
        return _score(entered, weight, own_bias, input_ids, temperature, align, compile, chunk_bytes, check_ranks)

    if isinstance(lm_head_weight, nn.Module):
        if bias is not None:
            raise InputError("a head that is passed as a module has its own bias; pass no other")
        log_probs, targets = through_head(lm_head_weight, hidden, score)
    else:
        refuse_sharded_by_fsdp(lm_head_weight)
        log_probs, targets = score(hidden, lm_head_weight, bias)
    return targets.returned(log_probs)


def _score(
    hidden: Tensor,  # (batch, positions, hidden)
    weight: Tensor,  # (vocab, hidden)
    bias: Tensor | None,  # (vocab,)
    input_ids: Tensor,  # (batch, target positions)
    temperature: float,
    align: bool,
    compile: bool,
    chunk_bytes: int | None,
    check_ranks: bool | None,
) -> tuple[Tensor, Targets]:  # (local batch, target positions), and what they are log-probs of
    validation.check_tensor("hidden", hidden)
    validation.check_tensor("lm_head_weight", weight)
    if bias is not None:
        validation.check_tensor("bias", bias)
    if hidden.dim() != 3 or weight.dim() != 2:
        raise InputError(
            f"needed hidden (batch, positions, hidden) and a weight (vocab, hidden), got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    head = HeadPlacement.of(hidden, weight)
    with RankCheck("compute_logprobs_from_hidden", head.shard, check_ranks, hidden) as check:
        check_settings(temperature, align=align, compile=compile)
        budget = validation.check_chunk_bytes(chunk_bytes)
        targets = Targets.of(input_ids, head.rows, weight.shape[0], hidden.device)
        local = head.localize_hidden(hidden)
        shape = (local.shape[0], hidden.shape[1])
        window = aligned_window(shape, targets.ids.shape, align, "hidden")
        positions = head.positions(window, *shape)
        rows = rearrange(local[:, positions.local], "batch position hidden -> (batch position) hidden")
        local_weight, local_bias = head.localize(weight), None if bias is None else head.localize(bias)
        rows, local_weight, local_bias = as_autocast(rows, local_weight, local_bias)
        shard = validation.check_head(rows, local_weight, local_bias, head.shard)
        if positions.gather is not None:
            positions.gather.check(rows)
        scorer = log_prob_scorer(positions.in_order(targets.ids), shard, temperature, rows.dtype)
        settings = window_settings(shape, window) | {"dtype": rows.dtype, "hidden size": rows.shape[1]}
        settings["bias"] = bias is not None
        check.compare(targets.ids.flatten(), float(temperature), settings, place=targets.ignored, hidden=rows)
    (log_probs,) = score_hidden(
        rows, local_weight, local_bias, scorer, gather=positions.gather, group=shard.group, chunk_bytes=budget
    )
    return positions.back(log_probs, local.shape[0]), targets
