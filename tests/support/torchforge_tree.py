"""torchforge's modules, for a machine without GPU, Monarch and torchtitan: its own from a checkout, or stand-ins.

Of a checkout, `forge.util.ops`, the losses and the reference model are real; what they import of Monarch, of torchtitan
and of torchforge's controller stands in. Without one, modules of the same names and signatures stand in for those too.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compact_logits.cli.without_cuda import without_cuda
from tests.support.torchforge_plain import plain_logprobs

__all__ = ["Endpoint", "forge_modules", "reference_forward"]

_OWNED = ("forge", "monarch", "torchtitan")


class Endpoint:
    """As Monarch's: found by looking up the class or the actor, and holding the method that the actor runs."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method

    def __get__(self, instance: object, owner: type) -> Endpoint:
        return self


@contextmanager
def forge_modules(root: str | None = None) -> Iterator[None]:
    """`forge` importable: from the checkout at `root`, or as stand-ins. What was imported meanwhile is forgotten."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in _OWNED}
    path = list(sys.path)
    try:
        for name in before:
            del sys.modules[name]
        if root is None:
            _stand_in_for_torchforge()
        else:
            sys.path.insert(0, str(Path(root) / "src"))
            _stand_in_for_what_it_imports()
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.split(".")[0] in _OWNED]:
            del sys.modules[name]
        sys.modules.update(before)


def reference_forward(model: nn.Module, ids: Tensor, prompt: int, *, log_probs: bool) -> Tensor:
    """What the reference model's `forward` endpoint answers, run as the actor would run it."""
    module = sys.modules["forge.actors.reference_model"]
    actor = object.__new__(module.ReferenceModel)
    actor.model, actor.step = model, 0
    actor.engine = SimpleNamespace(
        gc_handler=SimpleNamespace(run=lambda step: None),
        model_parts=[model],
        parallel_dims=SimpleNamespace(pp_enabled=False),
        train_context=lambda context: contextlib.nullcontext(),
        maybe_enable_amp=contextlib.nullcontext(),
    )
    with without_cuda():
        return asyncio.run(actor.forward._method(actor, ids, prompt, return_logprobs=log_probs))


def _module(name: str, **contents: Any) -> ModuleType:
    module = sys.modules.get(name) or ModuleType(name)
    module.__spec__ = module.__spec__ or ModuleSpec(name, loader=None)
    module.__dict__.update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(_module(parent), child, module)
        sys.modules[parent].__dict__.setdefault("__path__", [])
    return module


def _stand_in_for_what_it_imports() -> None:
    _module("monarch.actor", endpoint=Endpoint, current_rank=None, current_size=None)
    kinds = {name: type(name, (), {}) for name in ("Checkpoint", "Comm", "Compile", "Model", "Parallelism", "Training")}
    _module("torchtitan.config.job_config", **kinds)
    _module("torchtitan.experiments.forge.engine", ForgeEngine=object)
    _module("torchtitan.experiments.forge.job_config", ForgeJobConfig=object)
    # Of torchforge itself, what would start Monarch.
    import forge
    import forge.env

    for package in ("controller", "observability"):
        _module(f"forge.{package}")
    _module("forge.controller", ForgeActor=object)
    _module("forge.observability.metrics", record_metric=lambda *args: None, Reduce=SimpleNamespace(SUM=0, MEAN=1))
    tracer = SimpleNamespace(start=lambda: None, step=lambda name: None, stop=lambda: None)
    _module("forge.observability.perf_tracker", Tracer=lambda *args, **kwargs: tracer)
    assert forge.__path__


def _stand_in_for_torchforge() -> None:
    def compute_logprobs(logits: Tensor, input_ids: Tensor, temperature: float = 1.0, align: bool = True) -> Tensor:
        return plain_logprobs(logits, input_ids.long(), temperature, align)

    class ReferenceModel:
        model: nn.Module

        @Endpoint
        async def forward(self, input_ids: Tensor, max_req_tokens: int, return_logprobs: bool) -> Tensor:
            with torch.inference_mode():
                logits = self.model(input_ids)
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            if not return_logprobs:
                return logits
            return actor_module.compute_logprobs(logits, input_ids[:, max_req_tokens:])

    _module("forge.util.ops", compute_logprobs=compute_logprobs)
    _module("forge.losses.reinforce_loss", compute_logprobs=compute_logprobs)
    actor_module = _module("forge.actors.reference_model", compute_logprobs=compute_logprobs, DTensor=DTensor)
    actor_module.ReferenceModel = ReferenceModel
