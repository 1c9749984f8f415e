"""A GPTModel called with a loss mask that may carry a request, and everything that came of the call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compact_logits import reference
from compact_logits.megatron import Request, attach, mark
from compact_logits.megatron.attach import gpt_model_of
from tests.support.gpt_paths import Micro

__all__ = [
    "Came",
    "assert_as_the_full_path",
    "call",
    "came_of",
    "differences",
    "kept_scalars",
    "marked",
    "objective",
]


@dataclass(frozen=True)
class Came:
    """Output and gradients of one call, none of them part of a graph."""

    output: Tensor
    gradients: dict[str, Tensor | None]


def marked(micro: Micro, **asked: Any) -> tuple[Tensor, Request]:
    """A copy of the micro-batch's loss mask that asks the head for its rows."""
    request = Request(**{"selection": micro.selection, **asked})
    return mark(micro.loss_mask.clone(), request), request


def call(
    model: torch.nn.Module,
    micro: Micro,
    loss_mask: Tensor | None = None,  # (1, rows); the micro-batch's own, which asks nothing, where it is None
    **more: Any,
) -> Tensor:
    given = {"labels": None, "loss_mask": micro.loss_mask if loss_mask is None else loss_mask, **more}
    output: Tensor = model(micro.tokens, None, None, packed_seq_params=micro.packed_seq_params, **given)
    return output


def kept_scalars(
    output: Tensor,  # (1, rows, 2) where the head has answered, else (1, rows, vocab_local)
    micro: Micro,
    request: Request | None,
) -> Tensor:  # (kept, 2) log-prob and entropy
    """The answer, or what the definition makes of the logits, gathered by Megatron's own differentiable gather."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    kept = micro.selection.indices
    if request is not None and request.compact:
        return output[0, kept]
    log_probs, entropy = reference.log_probs(gather_from_tensor_model_parallel_region(output)[0], micro.labels)
    return torch.stack([log_probs[kept], entropy[kept]], dim=1)


def objective(output: Tensor, micro: Micro, request: Request | None) -> Tensor:  # scalar
    """A loss of log-probs and entropies that hangs on the model also where no row is kept."""
    scalars = kept_scalars(output, micro, request)
    return (scalars * micro.weights[micro.selection.indices].to(scalars.dtype)).sum() + 0 * output.sum()


def came_of(
    model: torch.nn.Module,
    output: Tensor,
    backward: Callable[[Tensor], Tensor],  # of the output, a scalar
) -> Came:
    """Run backward from a function of the output; the parameters' gradients start from nothing."""
    model.zero_grad(set_to_none=True)
    if output.requires_grad:
        backward(output).backward()
    inner = gpt_model_of(model)
    gradients = {name: copy.deepcopy(parameter.grad) for name, parameter in inner.named_parameters()}
    return Came(output.detach().clone(), gradients)


def differences(one: Came, other: Came) -> list[str]:
    """What is not the same in both, to the bit."""
    found = []
    if one.output.dtype != other.output.dtype or not torch.equal(one.output, other.output):
        found.append("output")
    for name in one.gradients.keys() | other.gradients.keys():
        ours, theirs = one.gradients.get(name), other.gradients.get(name)
        if (ours is None) != (theirs is None) or (ours is not None and not torch.equal(ours, theirs)):
            found.append(f"gradient of {name}")
    return sorted(found)


def assert_as_the_full_path(
    build: Callable[[], torch.nn.Module],  # the same model each time, in fp64, so that nothing hides in rounding
    micro: Micro,
    *,
    relative: float = 1e-5,  # the answers are fp32, and so are their gradients
    **asked: Any,
) -> tuple[Came, Came]:
    """Log-probs, entropies and every gradient of both paths agree; returned are the full path's run and ours."""
    runs, scalars = [], []
    for asks in (False, True):
        model = build()
        loss_mask, request = (
            marked(micro, **{"entropy": "loss", "chunk_bytes": 9000, **asked}) if asks else (None, None)
        )
        if asks:
            attach(model)
        output = call(model, micro, loss_mask)
        assert request is None or request.compact, request.outcome
        scalars.append(kept_scalars(output, micro, request).detach().double())
        runs.append(came_of(model, output, lambda out, request=request: objective(out, micro, request)))
    torch.testing.assert_close(scalars[1], scalars[0], atol=1e-5, rtol=1e-5)
    for name, expected in runs[0].gradients.items():
        found = runs[1].gradients[name]
        assert (found is None) == (expected is None), f"gradient of {name}: {found} instead of {expected}"
        if found is not None and expected is not None:
            assert found.dtype == expected.dtype
            error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
            assert error <= relative, f"gradient of {name} is off by {error:.1e}"
    return runs[0], runs[1]
