"""Every public function with settings, each called with one of them alone; and values that are none."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compact_logits import RowSelection, linear_log_probs, linear_topk_kl, log_probs, topk_kl
from compact_logits.errors import InputError
from compact_logits.integrations.megatron_rl.fit import Policy
from compact_logits.integrations.megatron_rl.marks import mark_tokens
from compact_logits.integrations.slime.passes import of_training
from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden
from compact_logits.integrations.verl.request import Request as VerlRequest
from compact_logits.megatron import Request
from compact_logits.memory import HeadSize

__all__ = ["CALLS", "SELECTION", "Loud", "message"]

HIDDEN, WEIGHT, LOGITS = torch.ones(3, 4), torch.ones(7, 4), torch.arange(21.0).view(3, 7)
IDS, TEACHER = torch.arange(6).view(3, 2), torch.full((3, 2), -1.5)
HEAD = torch.nn.Linear(4, 7)
TOKENS = torch.zeros(1, 5, dtype=torch.int64)
SELECTION = RowSelection.build(torch.tensor([True, True, False]), torch.tensor([1, 2, -1]), torch.arange(3))

Call = Callable[..., Any]

CALLS: dict[str, Call] = {
    "log_probs": lambda **more: log_probs(LOGITS, IDS[:, 0], **more),
    "linear_log_probs": lambda **more: linear_log_probs(HIDDEN, WEIGHT, IDS[:, 0], **more),
    "topk_kl": lambda **more: topk_kl(LOGITS, TEACHER, IDS, **more),
    "linear_topk_kl": lambda **more: linear_topk_kl(HIDDEN, WEIGHT, TEACHER, IDS, **more),
    "compute_logprobs": lambda **more: compute_logprobs(LOGITS[None], TOKENS[:, :2], **more),
    "from hidden": lambda **more: compute_logprobs_from_hidden(HIDDEN[None], WEIGHT, TOKENS[:, :2], **more),
    "from a head": lambda **more: compute_logprobs_from_hidden(HIDDEN[None], HEAD, TOKENS[:, :2], **more),
    "request": lambda **more: Request(SELECTION, **more),
    "mark": lambda **more: mark_tokens(TOKENS.clone(), **more),
    "size": lambda **more: HeadSize(**{"rows": 8, "kept": 4, "vocab": 16, "hidden": 4, **more}),
    "policy": lambda **more: Policy(vocab=16, hidden=4, sequence=8, **more),
    "slime": lambda temperature: of_training(Namespace(loss_type="sft_loss", rollout_temperature=temperature)),
    "verl": lambda **more: VerlRequest.of(SimpleNamespace(**more)),
}


class Loud:
    """Its words are an error."""

    def __repr__(self) -> str:
        raise KeyError("no words")

    __str__ = __repr__


def message(call: Callable[[], Any], kind: type[Exception] = InputError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert len(str(caught.value)) < 400
    return str(caught.value)
