"""One size of the bench: its inputs, what comes back for them, and the truth in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compact_logits import reference
from compact_logits.scorers.log_prob_scorer import Entropy

__all__ = ["Case", "Inputs", "Results", "make_inputs", "true_results"]

_TRUTH_ROWS = 512


@dataclass(frozen=True)
class Case:
    """A head of one rank: `tokens` rows, of which a share of `density` counts, at temperature 1."""

    tokens: int
    density: float
    hidden: int
    vocab: int
    dtype: torch.dtype
    entropy: Entropy
    device: torch.device
    seed: int = 0

    @property
    def kept(self) -> int:
        return max(round(self.tokens * self.density), 1)


class Inputs(NamedTuple):
    """What every way is given, and the gradients of what it returns."""

    hidden: Tensor  # (tokens, hidden)
    weight: Tensor  # (vocab, hidden)
    targets: Tensor  # (tokens,) int64
    rows: Tensor  # (kept,) int64, ascending
    d_log_probs: Tensor  # (kept,) fp32
    d_entropy: Tensor  # (kept,) fp32


class Results(NamedTuple):
    """Of one run; `entropy` is None where the case has none."""

    log_probs: Tensor  # (kept,)
    entropy: Tensor | None  # (kept,)
    d_hidden: Tensor  # (tokens, hidden)
    d_weight: Tensor  # (vocab, hidden)


def make_inputs(case: Case) -> Inputs:
    """Logits a few units wide, gradients of both signs, rows drawn without regard to their place."""
    source = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    weight = normal(case.vocab, case.hidden).mul_(2 / case.hidden**0.5)
    rows = torch.randperm(case.tokens, generator=source)[: case.kept].sort().values
    inputs = Inputs(
        hidden=normal(case.tokens, case.hidden).to(case.dtype),
        weight=weight.to(case.dtype),
        targets=torch.randint(0, case.vocab, (case.tokens,), generator=source),
        rows=rows,
        d_log_probs=normal(case.kept),
        d_entropy=normal(case.kept),
    )
    return Inputs(*[tensor.to(case.device) for tensor in inputs])


def true_results(case: Case, inputs: Inputs) -> Results:
    """By the definition, in fp64 on the very numbers that the inputs hold, a few rows at a time."""
    weight = inputs.weight.double().requires_grad_()
    d_hidden = torch.zeros(case.tokens, case.hidden, dtype=torch.float64, device=case.device)
    log_probs, entropies = [], []
    for part in torch.arange(case.kept, device=case.device).split(_TRUTH_ROWS):
        rows = inputs.rows[part]
        hidden = inputs.hidden[rows].double().requires_grad_()
        log_prob, entropy = reference.log_probs(hidden @ weight.T, inputs.targets[rows])
        loss = log_prob @ inputs.d_log_probs[part].double()
        if case.entropy == "loss":
            loss = loss + entropy @ inputs.d_entropy[part].double()
        loss.backward()
        assert hidden.grad is not None
        d_hidden[rows] = hidden.grad
        log_probs.append(log_prob.detach())
        entropies.append(entropy.detach())
    assert weight.grad is not None
    of_rows = None if case.entropy == "none" else torch.cat(entropies)
    return Results(torch.cat(log_probs), of_rows, d_hidden, weight.grad)
