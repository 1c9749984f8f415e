"""Which of slime's passes is running, and which scalars it needs of each row."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from compact_logits.engine.validation import check_temperature
from compact_logits.scorers.log_prob_scorer import Entropy

__all__ = ["Pass", "current_pass", "of_forward_only", "of_training", "rollout_temperature", "running"]

_CURRENT: ContextVar[Pass | None] = ContextVar("compact_logits_slime_pass", default=None)


@dataclass(frozen=True)
class Pass:
    """Which scalars the running pass needs of each kept row. Settings of the pass, never a micro-batch's data."""

    temperature: float
    entropy: Entropy
    replays_top_p: bool = False


def current_pass() -> Pass | None:
    """The pass that is running, or `None` where its consumer reads more of the logits than masked scalars."""
    return _CURRENT.get()


@contextmanager
def running(pass_: Pass | None) -> Iterator[None]:
    token = _CURRENT.set(pass_)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def of_training(args: Namespace) -> Pass | None:
    """The training step: slime reads entropy with the policy loss, with a gradient if its coefficient is not 0."""
    if args.loss_type == "policy_loss":
        entropy: Entropy = "loss" if getattr(args, "entropy_coef", 0.0) != 0 else "metric"
        return Pass(rollout_temperature(args), entropy, replays_top_p=_records_top_p(args))
    if args.loss_type == "sft_loss":
        return Pass(rollout_temperature(args), "none")
    return None


def of_forward_only(
    args: Namespace,
    callback: Callable[..., Any],
    log_prob_callbacks: tuple[Any, ...],
    *,
    replay: bool,
) -> Pass | None:
    """The no-grad pass, if `callback` is slime's log-prob function (patched or not) and nothing else."""
    if not any(callback is known for known in log_prob_callbacks):
        return None
    entropy: Entropy = "metric" if args.use_rollout_entropy else "none"
    return Pass(rollout_temperature(args), entropy, replays_top_p=replay and _records_top_p(args))


def rollout_temperature(args: Namespace) -> float:
    """What slime divides logits by. Raises `InputError` unless it is a positive, finite number."""
    temperature = getattr(args, "rollout_temperature", 1.0)
    check_temperature(temperature, ())
    return float(temperature)


def _records_top_p(args: Namespace) -> bool:
    return getattr(args, "rollout_top_p", 1.0) != 1.0
