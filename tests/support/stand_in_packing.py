"""In place of `megatron.rl.sequence_packing_utils`."""

from __future__ import annotations

from typing import Any

__all__ = ["load_packed_data_by_index"]


def load_packed_data_by_index(bin_idx: int, packing_context: Any, logprobs_is_correction: bool) -> tuple[Any, ...]:
    one = slice(bin_idx, bin_idx + 1)
    return packing_context.packed_trajs[one], packing_context.packed_loss_mask[one, 1:]
