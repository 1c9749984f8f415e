"""In place of `megatron.rl.rl_utils`: functions of its names and parameters, and no more than they promise."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["compute_logprobs_batch", "get_args", "get_logprobs", "run", "selective_log_softmax"]

run = Namespace(fp16=False, bf16=False)


def get_args() -> Namespace:
    return run


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    chosen = [torch.log_softmax(row, dim=-1).gather(-1, ids[:, None]) for row, ids in zip(logits, index, strict=True)]
    return torch.stack(chosen).squeeze(-1)


def get_logprobs(
    model: Any,
    tokens: Tensor,
    position_ids: Tensor,
    no_grad: bool = False,
    sequence_packing: bool = False,
    packed_seq_params: Any = None,
) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not no_grad):
        output = model(
            tokens,
            position_ids,
            None,
            packed_seq_params=packed_seq_params,
            runtime_gather_output=True,
            fp32_output=False,
        )
    if not model.post_process:
        return output
    return selective_log_softmax(output[:, :-1], tokens[:, 1:])


def compute_logprobs_batch(model: Any, batches: list[Any], dtype: torch.dtype, pp_group: Any) -> Tensor:
    found = torch.cat([get_logprobs(model, tokens, None, no_grad=True) for tokens in batches])
    assert found.dtype == dtype, f"{found.dtype} where the pipeline's other stages expect {dtype}"
    return found
