"""The message by which ranks compare what they were asked: how it comes to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compact_logits.agreement import _message


class Copies(TorchDispatchMode):
    """Counts the operators that are given a tensor on the host and have a result on another device."""

    between_devices = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if isinstance(out, Tensor) and not out.is_cpu and any(each.is_cpu for each in given):
            self.between_devices += 1
        return out


def test_what_the_host_knows_travels_in_one_copy() -> None:
    meta = torch.device("meta")
    on_device = torch.zeros((), dtype=torch.int64, device=meta)
    values: list[int | Tensor] = [3, on_device, torch.tensor(7), 2**40, on_device, torch.tensor(5)]
    with Copies() as copies:
        message = _message(values, meta)
    assert message.shape == (6,) and message.device == meta and copies.between_devices == 1
    with Copies() as copies:
        for place, value in enumerate(values):
            message[place] = value
    assert copies.between_devices > 1, "what it is there to catch"


def test_the_values_in_their_order() -> None:
    assert _message([3, torch.tensor(7), 2**40, -1], torch.device("cpu")).tolist() == [3, 7, 2**40, -1]
