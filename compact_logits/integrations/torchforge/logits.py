"""torchforge's `compute_logprobs` over logits whose vocabulary may be sharded, without gathering it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compact_logits.engine import validation
from compact_logits.engine.rank_check import AskedAlike
from compact_logits.engine.dtensor import VocabPlacement
from compact_logits.errors import InputError
from compact_logits.engine.logits import score_logits
from compact_logits.integrations.torchforge.targets import (
    Targets,
    aligned_window,
    check_settings,
    log_prob_scorer,
    window_settings,
)
from compact_logits.engine.vocab_shard import VocabShard

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
    check_ranks: bool = True,
) -> Tensor:  # (batch, target positions) fp32
    """Log-prob of each of `input_ids` under `softmax(logits / temperature)`, as torchforge's function of this name.

    `align=True` takes the logits one position before each id, `logits[:, -target positions - 1 : -1]`; `align=False`
    takes them as they are, and then there are as many. An id of -100 gives 0.0 with zero gradient, as it does there.
    Equals `reference.log_probs`. Holds no second tensor of the size of `logits` in forward, and their gradient in
    backward; everything after the logits is fp32 (fp64 for fp64 logits), the division by the temperature too.

    A DTensor may be sharded on the vocabulary by one mesh axis, also unevenly or with empty shards, and on the batch by
    others (with `align=False` on the positions too); its gradient is a DTensor with its placements. The result comes
    as the ids do: plain ids are this rank's own rows, and give a plain tensor; DTensor ids give a DTensor that is
    replicated over the vocabulary's mesh axis. `compile=True` fuses the passes over the logits, see
    `CompiledLogProbScorer`.

    Collectives over the vocabulary's mesh axis: forward one all-gather of 96 bytes a rank with `check_ranks`, and one
    of three fp32 a row, backward none. Raises `InputError` for any other placement, shapes that do not fit, ids outside
    the vocabulary and a temperature that is not positive; and with `check_ranks` on every rank of that axis where it
    does on one of them, or where they were asked different things (`DisagreementError`). Pass `check_ranks=False` while
    a CUDA graph is captured.
    """
    validation.check_tensor("logits", logits)
    if logits.dim() != 3:
        raise InputError(f"needed logits (batch, positions, vocab), got {tuple(logits.shape)}")
    placement = place_logits(logits, align) if isinstance(logits, DTensor) else None
    shard = VocabShard(0, logits.shape[-1]) if placement is None else placement.shard
    with AskedAlike("compute_logprobs", shard, check_ranks, logits) as asked:
        check_settings(temperature, align=align, compile=compile)
        chunk_bytes = validation.check_chunk_bytes(chunk_bytes)
        targets = Targets.of(input_ids, placement, logits.shape[-1], logits.device)
        local = logits
        if placement is not None:
            assert isinstance(logits, DTensor)
            local = logits.to_local(grad_placements=placement.placements)
        window = aligned_window(local.shape, targets.ids.shape, align, "logits")
        validation.check_logits(local, shard)
        scorer = log_prob_scorer(targets.ids, shard, temperature, compile=compile)
        asked.told(targets.asked, scorer.temperature, window_settings(local.shape, window) | {"dtype": local.dtype})
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
