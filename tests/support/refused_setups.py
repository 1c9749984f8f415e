"""Setups of a model, of its output layer or of a call that keep the full path, each as somebody might have it."""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from tests.support import refused_heads as heads
from tests.support import refused_models as models
from tests.support.gpt_paths import Micro

__all__ = ["CASES", "NATIVE", "TAKES_MTP_KWARGS", "Case"]

_PARAMETERS = inspect.signature(GPTModel._postprocess).parameters
NATIVE = "output_processor" in _PARAMETERS
TAKES_MTP_KWARGS = "mtp_kwargs" in _PARAMETERS

Prepare = Callable[[Any, ExitStack], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Case:
    """`prepare` changes a model, undoes on the stack what it changes elsewhere, and returns arguments of the call.

    `direct`: only `_postprocess` is called, with made-up hidden states, since the layers before would not run so.
    """

    reason: str  # matches the refusal
    prepare: Prepare
    asked: Callable[[Micro], dict[str, Any]] = field(default=lambda micro: {})
    direct: bool = False
    without_gradient: bool = False


def _settings(**values: Any) -> Prepare:
    def prepare(model: Any, stack: ExitStack) -> None:
        vars(model.config).update(values)

    return prepare


def _arguments(**values: Any) -> Prepare:
    return lambda model, stack: values


def _config_logger(model: Any, stack: ExitStack) -> None:
    model.config.config_logger_dir = stack.enter_context(tempfile.TemporaryDirectory())


def _own_processor(model: Any, stack: ExitStack) -> dict[str, Any]:
    return {"output_processor": lambda **given: given["output_layer"](given["hidden_states"])[0] * 2}


def _inference(model: Any, stack: ExitStack) -> dict[str, Any]:
    model.eval()
    if NATIVE:
        from megatron.core.inference.utils import InferenceMode

        stack.enter_context(InferenceMode.active())
        return {"runtime_gather_output": True}
    context = SimpleNamespace(materialize_only_last_token_logits=False)
    return {"runtime_gather_output": True, "inference_context": context}


def _inference_context(model: Any, stack: ExitStack) -> dict[str, Any]:
    return {"inference_context": SimpleNamespace(materialize_only_last_token_logits=False)}


def _capturing(model: Any, stack: ExitStack) -> None:
    for name in ("is_available", "is_current_stream_capturing"):
        stack.enter_context(patch.object(torch.cuda, name, lambda: True))


def _fp8(module: str) -> Prepare:
    def prepare(model: Any, stack: ExitStack) -> None:
        stand_in = ModuleType(module)
        stand_in.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: True)  # type: ignore[attr-defined]
        stack.enter_context(patch.dict(sys.modules, {module: stand_in}))

    return prepare


def _autocast(hidden: torch.dtype) -> Prepare:
    def prepare(model: Any, stack: ExitStack) -> dict[str, Any]:
        stack.enter_context(torch.no_grad())  # Megatron's linear layer leaves the CPU's autocast out of backward
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        return {"hidden_states": torch.randn(56, 1, 32, generator=torch.Generator().manual_seed(3)).to(hidden)}

    return prepare


def _fewer_rows(model: Any, stack: ExitStack) -> dict[str, Any]:
    return {"hidden_states": torch.randn(48, 1, 32, generator=torch.Generator().manual_seed(3))}


def _elsewhere(micro: Micro) -> dict[str, Any]:
    selection = micro.selection
    return {"selection": replace(selection, indices=selection.indices.to("meta"), targets=selection.targets.to("meta"))}


def _head_unused(model: Any, stack: ExitStack) -> None:
    """A version that takes an output processor, and does as it always did."""
    original = GPTModel._postprocess

    @functools.wraps(original)
    def _postprocess(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return F.linear(hidden_states, self.output_layer.weight).transpose(0, 1).contiguous()

    stack.enter_context(patch.object(GPTModel, "_postprocess", _postprocess))


_CALLS = {
    "labels": Case("called with labels", lambda model, stack: {"labels": torch.zeros(1, 56, dtype=torch.int64)}),
    "inference": Case("runs inference", _inference, direct=True),
    "inference context": Case("runs inference", _inference_context, direct=True),
    "gathered": Case("gathered over the vocabulary", _arguments(runtime_gather_output=True)),
    "config logger": Case("config logger dumps logits", _config_logger),
    "batch invariant": Case("batch-invariant mode", _settings(batch_invariant_mode=True)),
    "autocast of the schedule": Case("runs the model under autocast", _settings(enable_autocast=True)),
    "fp8, older TE": Case("fp8 autocast", _fp8("transformer_engine.pytorch.fp8")),
    "fp8, newer TE": Case("fp8 autocast", _fp8("transformer_engine.pytorch.quantization")),
    "graph by kind": Case("captured in a CUDA graph", _settings(cuda_graph_impl="full_iteration"), direct=True),
    "graph by scope": Case("captured in a CUDA graph", _settings(cuda_graph_scope="full_iteration"), direct=True),
    "graph by scopes": Case(
        "captured in a CUDA graph",
        _settings(cuda_graph_scope=[SimpleNamespace(name="full_iteration")]),
        direct=True,
    ),
    "capturing": Case("captured in a CUDA graph", _capturing, direct=True),
    "another batch": Case(
        r"the hidden states are \(56, 1, 32\), and the request is for \(rows, 2, hidden\)",
        _arguments(),
        lambda micro: {"batch": 2},
    ),
    "another row count": Case("the model has 48 rows and the loss mask was marked for 56", _fewer_rows, direct=True),
    "another dtype": Case(
        "hidden states are torch.bfloat16 and the output weight torch.float32",
        _autocast(torch.bfloat16),
        direct=True,
        without_gradient=True,
    ),
    "another device": Case("row selection is on meta, the hidden states on cpu", _arguments(), _elsewhere),
    "autocast": Case("^autocast is on$", _autocast(torch.float32), direct=True, without_gradient=True),
    "head never called": Case("never called", _head_unused),
}
if NATIVE:
    _CALLS |= {
        "own processor": Case("output processor of its own", _own_processor),
        "MuP, negative": Case(
            "multiplies the logits by -0.5, proven are positive", _settings(use_mup=True, mup_output_mult=-0.5)
        ),
    }
else:
    _CALLS["MuP"] = Case("where this version has no output processor", _settings(use_mup=True, mup_output_mult=0.25))
    if not TAKES_MTP_KWARGS:
        _CALLS["multi-token prediction"] = Case("multi-token prediction shares", _settings(mtp_num_layers=1))

CASES: dict[str, Case] = {
    **_CALLS,
    **{f"head: {name}": Case(reason, prepare) for name, (reason, prepare) in heads.SETUPS.items()},
    **{f"model: {name}": Case(reason, prepare) for name, (reason, prepare) in models.SETUPS.items()},
}
