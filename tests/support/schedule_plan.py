"""Megatron's schedule plans (combined forward and backward) on CPU: their head, loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support.gpt_paths import Micro

__all__ = ["InFlight", "one_stream"]


class _Nothing:
    """A stream or an event of a device that has done all it was told by the time it is told more."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...


@contextmanager
def one_stream() -> Iterator[None]:
    """Streams, events, marks for a profiler and memory kept for a stream: none of which a CPU has."""
    with ExitStack() as stack:
        for owner, name, double in (
            (torch.cuda, "Event", _Nothing),
            (torch.cuda, "Stream", _Nothing),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (torch.cuda.nvtx, "range_push", lambda name: None),
            (torch.cuda.nvtx, "range_pop", lambda: None),
            (torch.Tensor, "record_stream", lambda tensor, stream: None),
        ):
            stack.enter_context(patch.object(owner, name, double))
        yield


@dataclass
class InFlight:
    """One micro-batch in a plan: the real nodes of the head and of the loss, between which nothing but data passes."""

    head: Any
    loss: Any
    total: Tensor

    @classmethod
    def forward(
        cls,
        model: Any,  # a GPTModel
        micro: Micro,
        loss_mask: Tensor,
        hidden: Tensor,  # (sequence / tensor-parallel size, 1, hidden), of the last layer
        loss: Callable[[Tensor], Tensor],
        tag: str | None = None,  # an attribute to hang on the head's output
    ) -> InFlight:
        from megatron.core.pipeline_parallel.utils import ScheduleNode

        plan = model.build_schedule_plan(
            micro.tokens, None, None, packed_seq_params=micro.packed_seq_params, loss_mask=loss_mask
        )
        assert plan.state.loss_mask is loss_mask
        plan.pre_process.forward()  # it also leaves the positions where the head's node looks for them
        output = plan.post_process.forward(hidden)
        if tag is not None:
            setattr(output, tag, True)
        node = ScheduleNode(loss, torch.cuda.current_stream(), plan.event, name="loss_func")
        return cls(plan.post_process, node, node.forward(output))

    def backward(self) -> Tensor:  # the gradient of `hidden`
        torch.autograd.backward(self.total)
        gradient = self.loss.get_grad()
        assert gradient is not None, "the loss does not depend on the head's output"
        d_hidden: Tensor = self.head.backward(gradient)
        return d_hidden
