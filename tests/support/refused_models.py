"""Models that do something with the result of GPTModel's `_postprocess` which is meant for logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

__all__ = ["SETUPS"]


def capped(logits: Tensor) -> Tensor:
    """A soft cap, as some model families put on their logits."""
    return 3 * torch.tanh(logits / 3)


class CapsInPostprocess(GPTModel):
    def _postprocess(
        self,
        hidden_states: Tensor,
        *args: Any,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        kwargs |= {"labels": labels, "loss_mask": loss_mask, "inference_context": inference_context}
        kwargs |= {"runtime_gather_output": runtime_gather_output}
        return capped(super()._postprocess(hidden_states, *args, **kwargs))


class CapsInForward(GPTModel):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return capped(super().forward(*args, **kwargs))


class CapsWhereScaled(GPTModel):
    def _scale_logits(self, logits: Tensor) -> Tensor:
        return capped(logits)


def _becomes(kind: type) -> Callable[[Any, ExitStack], None]:
    def prepare(model: Any, stack: ExitStack) -> None:
        model.__class__ = kind

    return prepare


def _own_forward(model: Any, stack: ExitStack) -> None:
    ordinary = model.forward
    model.forward = lambda *args, **kwargs: capped(ordinary(*args, **kwargs))


def _hook(model: Any, stack: ExitStack) -> None:
    model.register_forward_hook(lambda module, args, output: capped(output))


def _hook_on_every_module(model: Any, stack: ExitStack) -> None:
    def hook(module: Any, args: Any, output: Any) -> Any:
        return capped(output) if module is model else None

    stack.callback(torch.nn.modules.module.register_module_forward_hook(hook).remove)


# By name: what the reason says, and the change that brings it about.
SETUPS: dict[str, tuple[str, Callable[[Any, ExitStack], None]]] = {
    "subclass caps in _postprocess": ("overrides GPTModel._postprocess", _becomes(CapsInPostprocess)),
    "subclass caps in forward": ("overrides GPTModel.forward", _becomes(CapsInForward)),
    "subclass caps where logits are scaled": ("overrides GPTModel._scale_logits", _becomes(CapsWhereScaled)),
    "own forward": ("the model's forward is overridden on the instance", _own_forward),
    "forward hook": ("the model has forward hooks, which expect logits", _hook),
    "forward hook on every module": ("the model has forward hooks, which expect logits", _hook_on_every_module),
}
