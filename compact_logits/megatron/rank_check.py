"""Whether the tensor-parallel ranks were given the same request for the same rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compact_logits.agreement import check_agreement, digest, fingerprint
from compact_logits.megatron.request import Request

__all__ = ["check_same_question"]


def check_same_question(
    head: Any,  # a ColumnParallelLinear
    hidden: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
    request: Request,
    *,
    refused: bool,
) -> None:
    """Raise the same `DisagreementError` on every tensor-parallel rank, where one of them was asked something else.

    Also where only some of them refuse their hidden states, since the others would wait for them.
    Collectives: one all-gather of 72 bytes a rank, none where there is one rank or the request asks for no check.
    """
    group = head.tp_group
    if not request.check_ranks or group is None or group.size() == 1:
        return
    selection, nucleus = request.selection, request.nucleus
    settings = (request.batch, request.entropy, request.sum_p2, request.vocab_size, request.fp32_logits, hidden.dtype)
    temperature = request.temperature
    # Where context-parallel ranks share their rows, also those of the others decide who computes how many.
    selections = (selection, *(() if request.share is None else request.share.selections))
    of_nucleus = [torch.zeros(0)] if nucleus is None else [nucleus.ids, nucleus.row_of, nucleus.recorded]
    check_agreement(
        group,
        {
            "the number of rows": selection.num_rows,
            "the number of kept rows": selection.kept,
            "whether a rank refuses its hidden states": int(refused),
            "whether the hidden states need a gradient": int(torch.is_grad_enabled() and hidden.requires_grad),
            "the entropy, batch size, dtype or vocabulary size asked for": fingerprint(*settings),
            "the place of the kept rows": torch.stack([digest(each.host_indices) for each in selections]).sum(),
            "the target ids": digest(selection.targets),
            "the temperature": digest(torch.as_tensor(temperature, dtype=torch.float64)),
            "the recorded nucleus": torch.stack([digest(each) for each in of_nucleus]).sum(),
        },
        hidden.device,
    )
