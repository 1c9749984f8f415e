"""The ways from hidden states to the kept rows' scalars: the full path, ours, and each peer seen from two sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from compact_logits.cli.bench_case import Case, Inputs
from compact_logits.rows import select
from compact_logits.scorers.log_prob import linear_log_probs

__all__ = ["Peer", "Score", "View", "Way", "as_shipped", "full_path", "log_softmax", "on_selected_rows", "ours"]

View = Literal["full path", "ours", "as shipped", "rows selected"]

# (hidden (rows, hidden), weight, targets (rows,), case) -> log-probs (rows,), entropy (rows,) or None
Score = Callable[[Tensor, Tensor, Tensor, Case], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Peer:
    """Another library's function. `entropy`: the settings that it can answer. `masks`: it takes a mask, as targets of
    -100, and leaves the masked rows out itself. `selects`: the kinds of device on which its own callers select the rows
    that count. `off`: why it cannot be run here; then there is no `score`."""

    name: str
    entropy: tuple[str, ...] = ("none",)
    masks: bool = False
    selects: tuple[str, ...] = ()
    score: Score | None = None
    off: str = ""


@dataclass(frozen=True)
class Way:
    """One line of the table. `run` takes leaves in place of the inputs' hidden states and weight."""

    name: str
    view: View
    run: Callable[[Tensor, Tensor, Inputs, Case], tuple[Tensor, Tensor | None]]


def full_path(name: str, score: Score) -> Way:
    """Project and score all rows, then read those that count: what the frameworks do."""
    return Way(name, "full path", _of_all_rows(score))


def as_shipped(peer: Peer, device: torch.device) -> Way:
    """The peer with all rows, or with those that its own library would give it."""
    assert peer.score is not None
    if device.type in peer.selects:
        return Way(peer.name, "as shipped", _of_selected_rows(peer.score))
    return Way(peer.name, "as shipped", _masked(peer.score) if peer.masks else _of_all_rows(peer.score))


def on_selected_rows(peer: Peer) -> Way:
    """The control: the rows that count are selected by hand, and the peer is given those alone."""
    assert peer.score is not None
    return Way(f"select + {peer.name}", "rows selected", _of_selected_rows(peer.score))


def ours(chunk_bytes: int) -> Way:
    """This package with a budget; it selects, so it is compared with both views."""

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        return linear_log_probs(hidden, weight, targets, entropy=case.entropy, chunk_bytes=chunk_bytes)

    size = f"{chunk_bytes / 2**20:g} MiB" if chunk_bytes < 2**30 else f"{chunk_bytes / 2**30:g} GiB"
    return Way(f"compact-logits, {size}", "ours", _of_selected_rows(score))


def log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
    """Plain torch: fp32 logits, their log-softmax, and the entropy of it."""
    log_p = F.linear(hidden, weight).float().log_softmax(dim=-1)
    selected = log_p.gather(1, targets[:, None]).squeeze(1)
    if case.entropy == "none":
        return selected, None
    with torch.set_grad_enabled(case.entropy == "loss"):
        return selected, -(log_p.exp() * log_p).sum(dim=-1)


def _of_all_rows(score: Score) -> Callable[[Tensor, Tensor, Inputs, Case], tuple[Tensor, Tensor | None]]:
    def run(hidden: Tensor, weight: Tensor, inputs: Inputs, case: Case) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = score(hidden, weight, inputs.targets, case)
        return log_probs[inputs.rows], None if entropy is None else entropy[inputs.rows]

    return run


def _masked(score: Score) -> Callable[[Tensor, Tensor, Inputs, Case], tuple[Tensor, Tensor | None]]:
    def run(hidden: Tensor, weight: Tensor, inputs: Inputs, case: Case) -> tuple[Tensor, Tensor | None]:
        masked = torch.full_like(inputs.targets, -100)
        masked[inputs.rows] = inputs.targets[inputs.rows]
        log_probs, entropy = score(hidden, weight, masked, case)
        return log_probs[inputs.rows], None if entropy is None else entropy[inputs.rows]

    return run


def _of_selected_rows(score: Score) -> Callable[[Tensor, Tensor, Inputs, Case], tuple[Tensor, Tensor | None]]:
    def run(hidden: Tensor, weight: Tensor, inputs: Inputs, case: Case) -> tuple[Tensor, Tensor | None]:
        return score(select(hidden, inputs.rows), weight, inputs.targets[inputs.rows], case)

    return run
