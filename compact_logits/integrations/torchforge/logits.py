"""torchforge's `compute_logprobs` over logits whose vocabulary may be sharded, without gathering it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compact_logits.engine import validation
from compact_logits.engine.dtensor import VocabPlacement
from compact_logits.engine.logits import score_logits
from compact_logits.engine.rank_check import RankCheck
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import InputError
from compact_logits.integrations.torchforge.targets import (
    Targets,
    aligned_window,
    check_settings,
    log_prob_scorer,
    window_settings,
)

__all__ = ["compute_logprobs", "place_logits"]


# A custom autograd function with a process group in it is nothing to trace: a compiled loss calls it as it is.
@torch.compiler.disable
def compute_logprobs(
    logits: Tensor,  # (batch, positions, vocab), plain or DTensor
    input_ids: Tensor,  # (batch, target positions) int, plain or DTensor
    temperature: float = 1.0,
    align: bool = True,
    *,
    compile: bool = False,
    chunk_bytes: int | None = None,
    check_ranks: bool | None = None,
) -> Tensor:  # (batch, target positions) fp32
    """Log-prob of each of `input_ids` under `softmax(logits / temperature)`, as torchforge's function of this name.

    `align=True` takes the logits one position before each id, `logits[:, -target positions - 1 : -1]`; `align=False`
    takes them as they are, and then there are as many. An id of -100 gives 0.0 with zero gradient, as it does there.
    Equals `reference.log_probs`. Holds no second tensor of the size of `logits` in forward, and their gradient in
    backward; everything after the logits is fp32 (fp64 for fp64 logits), the division by the temperature too. Where
    the logits of one position are not adjacent, as many positions as take `chunk_bytes` are copied at a time.

    A DTensor may be sharded on the vocabulary by one mesh axis, also unevenly or with empty shards, and on the batch by
    others (with `align=False` on the positions too); its gradient is a DTensor with its placements. The result comes
    as the ids do: plain ids are this rank's own rows, and give a plain tensor; DTensor ids give a DTensor that is
    replicated over the vocabulary's mesh axis. `compile` does nothing any more, which is logged once.

    `check_ranks`: the ranks of that axis compare their ids, temperature and window, and wait for the answer on the
    host; None at the first call of a group, True at every call, False at none. Where they compare, all raise the same
    `DisagreementError` if those differ, and all raise `InputError` if one does. Pass `False`, on all ranks, while a
    CUDA graph is captured.

    Collectives over that axis: forward one all-gather of 120 bytes a rank where ranks are compared, and one of three
    fp64 a row; backward none. Raises `InputError` for any other placement, shapes that do not fit, ids outside the
    vocabulary (on a device, where nothing is compared, they give NaN) and a temperature that is not positive.
    """
    validation.check_tensor("logits", logits)
    if logits.dim() != 3:
        raise InputError(f"needed logits (batch, positions, vocab), got {tuple(logits.shape)}")
    placement = place_logits(logits, align) if isinstance(logits, DTensor) else None
    shard = VocabShard(0, logits.shape[-1]) if placement is None else placement.shard
    with RankCheck("compute_logprobs", shard, check_ranks, logits) as check:
        check_settings(temperature, align=align, compile=compile)
        chunk_bytes = validation.check_chunk_bytes(chunk_bytes)
        targets = Targets.of(input_ids, placement, logits.shape[-1], logits.device)
        local = logits
        if placement is not None:
            assert isinstance(logits, DTensor)
            local = logits.to_local(grad_placements=placement.placements)
        window = aligned_window(local.shape, targets.ids.shape, align, "logits")
        validation.check_logits(local, shard)
        scorer = log_prob_scorer(targets.ids, shard, temperature, local.dtype)
        settings = window_settings(local.shape, window) | {"dtype": local.dtype}
        check.compare(scorer.targets, float(temperature), settings, place=targets.ignored)
    (log_probs,) = score_logits(local, scorer, window=window, chunk_bytes=chunk_bytes)
    return targets.returned(log_probs.view(targets.ids.shape))


def place_logits(
    logits: DTensor,  # (batch, positions, vocab)
    align: bool,
) -> VocabPlacement:
    """Where the logits' vocabulary lies. Raises `InputError` where `compute_logprobs` does not take them."""
    placement = VocabPlacement.of(logits, dim=2, row_dims=(0, 1), name="logits")
    if align and placement.is_sharded(1):
        raise InputError(
            f"the positions of logits are sharded ({list(placement.placements)}), so the one before an id may be on "
            f"another rank; shift the ids yourself and pass align=False, or redistribute the logits"
        )
    return placement
