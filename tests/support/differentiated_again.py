"""Random leaves, and what is said to whoever differentiates a gradient of ours again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.errors import InputError

__all__ = ["COLUMNS", "HIDDEN", "IDS", "ROWS", "given", "refused"]

ROWS, HIDDEN, COLUMNS = 5, 4, 11
IDS = torch.arange(ROWS * 2).view(ROWS, 2)

TOLD = r"a gradient of \(.*\), which compact_logits has computed under create_graph=True, was differentiated again"


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).requires_grad_()


def refused(differentiate: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=TOLD) as caught:
        differentiate()
    assert str(caught.value).endswith(
        "and it offers no second derivatives; use the gradient's detach() where it is a mere number, or compute these "
        "rows in plain torch, as compact_logits.reference does"
    )
