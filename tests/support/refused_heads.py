"""Output layers that are not a plain ColumnParallelLinear, or are used in a way only the full path knows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

__all__ = ["SETUPS"]


class LowRankAdapted(torch.nn.Module):
    """A head with a low-rank adapter; whoever reads `weight` misses the adapter."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.config = base, base.config
        random = torch.Generator().manual_seed(7)
        self.down = torch.nn.Parameter(torch.randn(4, base.input_size, generator=random))
        self.up = torch.nn.Parameter(torch.randn(base.output_size_per_partition, 4, generator=random))

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.base.weight
        return weight

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        logits, _ = self.base(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        return logits + F.linear(F.linear(input_, self.down), self.up), None


class ValueHead(torch.nn.Linear):
    """A critic's head: one column."""

    def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
        return super().forward(input_).float(), None


class Doubled(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class OddParameter(torch.nn.Parameter):
    """Somebody's parameter that might not be what it seems."""


def _adapter(model: Any, stack: ExitStack) -> None:
    model.output_layer = LowRankAdapted(model.output_layer)


def _value_head(model: Any, stack: ExitStack) -> None:
    model.output_layer = ValueHead(model.config.hidden_size, 1, bias=False)
    with torch.no_grad():
        model.output_layer.weight.copy_(torch.linspace(-1, 1, model.config.hidden_size))


def _parametrized(model: Any, stack: ExitStack) -> None:
    register_parametrization(model.output_layer, "weight", Doubled())


def _own_forward(model: Any, stack: ExitStack) -> None:
    ordinary = model.output_layer.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return 2 * ordinary(*args, **kwargs)[0], None

    model.output_layer.forward = forward


def _forward_hook(model: Any, stack: ExitStack) -> None:
    model.output_layer.register_forward_hook(lambda module, args, output: (2 * output[0], None))


def _backward_hook(model: Any, stack: ExitStack) -> None:
    model.output_layer.register_full_backward_hook(lambda module, grad_input, grad_output: (2 * grad_input[0],))


def _backward_pre_hook(model: Any, stack: ExitStack) -> None:
    model.output_layer.register_full_backward_pre_hook(lambda module, grad_output: (2 * grad_output[0], None))


def _flag(**values: Any) -> Callable[[Any, ExitStack], None]:
    def prepare(model: Any, stack: ExitStack) -> None:
        vars(model.output_layer).update(values)

    return prepare


def _deferred(model: Any, stack: ExitStack) -> None:
    head = model.output_layer
    head.config = copy.copy(model.config)  # the other layers would defer theirs too
    head.config.defer_embedding_wgrad_compute, head.config.wgrad_deferral_limit = True, 0
    head.embedding_activation_buffer, head.grad_output_buffer = [], []


def _offloading(model: Any, stack: ExitStack) -> None:
    model.config._cpu_offloading_context = SimpleNamespace(inside_context=True)


def _no_weight(model: Any, stack: ExitStack) -> None:
    model.output_layer.weight = None


def _odd_weight(model: Any, stack: ExitStack) -> None:
    model.output_layer.weight = OddParameter(model.output_layer.weight.detach().clone())


def _fsdp(model: Any, stack: ExitStack) -> None:
    vars(model.output_layer.weight)["__fsdp_param__"] = True


def _sharded(model: Any, stack: ExitStack) -> None:
    weight = model.output_layer.weight
    whole = weight.data.clone()
    weight.data = whole.new_empty(0)
    model.output_layer.register_forward_pre_hook(lambda module, args: setattr(module.weight, "data", whole))


# By name: what the reason says, and the change that brings it about.
SETUPS: dict[str, tuple[str, Callable[[Any, ExitStack], None]]] = {
    "low-rank adapter": ("is a LowRankAdapted, proven are plain ColumnParallelLinear heads", _adapter),
    "value head": ("is a ValueHead, proven are plain ColumnParallelLinear heads", _value_head),
    "parametrized": ("is a Parametrized", _parametrized),
    "own forward": ("output layer's forward is overridden on the instance", _own_forward),
    "forward hook": ("output layer has forward hooks, which expect logits", _forward_hook),
    "backward hook": ("output layer has backward hooks, which expect logits", _backward_hook),
    "backward pre-hook": ("output layer has backward pre hooks, which expect logits", _backward_pre_hook),
    "bias apart": ("uses skip_bias_add", _flag(skip_bias_add=True)),
    "gathers": ("uses gather_output", _flag(gather_output=True)),
    "no reduction": ("uses disable_grad_reduce", _flag(disable_grad_reduce=True)),
    "expert": ("uses is_expert", _flag(is_expert=True)),
    "deferred weight gradient": ("uses defer_embedding_wgrad_compute", _deferred),
    "remat groups": ("uses weight sharding by remat groups", _flag(gtp_remat_size=2)),
    "own dtype": ("uses an output dtype of its own", _flag(output_dtype=torch.float32)),
    "offloading": ("runs inside CPU offloading", _offloading),
    "no weight": ("has no weight and was given none", _no_weight),
    "odd weight": ("output weight is a OddParameter", _odd_weight),
    "FSDP": ("belongs to Megatron-FSDP", _fsdp),
    "sharded weight": (r"output weight is \(0,\) at the time of the call", _sharded),
    "fusion without main_grad": ("has no main_grad", _flag(gradient_accumulation_fusion=True)),
}
