"""The gate: a way whose numbers are wrong gets no time."""

from __future__ import annotations

import torch
from torch import Tensor

from compact_logits.cli.bench_case import Case, Inputs, Results
from compact_logits.cli.bench_ways import Way
from compact_logits.errors import CompactLogitsError

__all__ = ["OURS", "PEERS", "Bound", "WithoutGradient", "errors", "judge", "results"]

Bound = tuple[float, float]

# The error against fp64 that is allowed: so many times the full path's own, plus so much. Ours must be as good as it
# promises; a peer may divide or sum in another order, but not lose a gradient.
OURS: Bound = (1.1, 1e-6)
PEERS: Bound = (2.0, 1e-5)


def results(way: Way, inputs: Inputs, case: Case) -> Results:
    """Forward and backward of one way."""
    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    log_probs, entropy = way.run(hidden, weight, inputs, case)
    roots = [(log_probs, inputs.d_log_probs)]
    if case.entropy == "loss":
        if entropy is None or not entropy.requires_grad:
            raise WithoutGradient("its entropy has no gradient")
        roots.append((entropy, inputs.d_entropy.to(entropy.dtype)))
    torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
    assert hidden.grad is not None and weight.grad is not None
    return Results(log_probs.detach(), None if entropy is None else entropy.detach(), hidden.grad, weight.grad)


class WithoutGradient(CompactLogitsError):
    """A way that does not have a gradient which the case needs."""


def errors(found: Results, truth: Results) -> dict[str, float]:
    """Values by their largest error, gradients by their error in the L2 norm over that of the truth, if it has any."""
    measured = {}
    for name, of_way, true in zip(Results._fields, found, truth, strict=True):
        if true is None:
            continue
        if of_way is None:
            measured[name] = float("inf")
        elif name.startswith("d_"):
            error, scale = (of_way.double() - true).norm(), true.norm()
            measured[name] = (error / scale if scale > 0 else error).item()
        else:
            measured[name] = _largest(of_way.double() - true)
    return measured


def judge(found: dict[str, float], full_path: dict[str, float], bound: Bound) -> str:
    """Why the errors are too large, or an empty string. An error that is not a number is too large."""
    factor, floor = bound
    for name, error in found.items():
        allowed = factor * full_path[name] + floor
        if not error <= allowed:
            return f"{name} off by {error:.1e}, {allowed:.1e} allowed"
    return ""


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0
