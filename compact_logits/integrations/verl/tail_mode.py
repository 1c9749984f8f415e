"""verl's loss mode `forward_kl_topk_tail`: its registration, its settings, and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

from torch import Tensor

from compact_logits.scorers.topk_kl import check_form

__all__ = ["TAIL_MODE", "TailMode", "config_init_wrapper", "tail_mass_eps"]

TAIL_MODE = "forward_kl_topk_tail"

_EPS = "tail_mass_eps"
_DEFAULT_EPS = 1e-6
_METRICS = {
    "head_loss": "distillation/topk_loss",
    "tail_loss": "distillation/tail_loss",
    "student_tail_mass": "distillation/student_tail_mass",
    "teacher_tail_mass": "distillation/teacher_tail_mass",
}


def tail_mass_eps(loss_config: Any) -> float:
    """As it stands in the configuration; `check_form` judges it."""
    eps: float = getattr(loss_config, _EPS, _DEFAULT_EPS)
    return eps


def config_init_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `DistillationLossConfig.__init__`: takes `tail_mass_eps` where the class has no such field, and refuses
    settings that the tail-aware form cannot have, when the run's configuration is read."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if all(f.name != _EPS for f in fields(self)):
            # Past the class's own __setattr__, as its fields are: set once, then frozen.
            object.__setattr__(self, _EPS, kwargs.pop(_EPS, _DEFAULT_EPS))
        original(self, *args, **kwargs)
        if self.loss_mode == TAIL_MODE:
            check_form(True, self.log_prob_min_clamp, getattr(self, _EPS))

    return __init__


class TailMode:
    """The mode's entries in verl's two registries, for as long as they are needed.

    A verl that brings the mode itself keeps it: `native` says so.
    """

    def __init__(self, losses: ModuleType) -> None:
        self._losses = losses
        self.native = TAIL_MODE in losses.DISTILLATION_LOSS_REGISTRY
        self._collector = _collector(losses)

    def register(self) -> None:
        if not self.native:
            settings = self._losses.DistillationLossSettings(names=[TAIL_MODE], use_topk=True)
            self._losses.DISTILLATION_LOSS_REGISTRY[TAIL_MODE] = self._collector
            self._losses.DISTILLATION_SETTINGS_REGISTRY[TAIL_MODE] = settings

    def unregister(self) -> None:
        if self._losses.DISTILLATION_LOSS_REGISTRY.get(TAIL_MODE) is self._collector:
            del self._losses.DISTILLATION_LOSS_REGISTRY[TAIL_MODE]
            del self._losses.DISTILLATION_SETTINGS_REGISTRY[TAIL_MODE]


def _collector(losses: ModuleType) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """verl's own collector of the top-k outputs, and the four means that the tail-aware form adds."""

    def collect(
        config: Any, distillation_config: Any, model_output: dict[str, Tensor], data: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        collected, metrics = losses.compute_forward_kl_topk(config, distillation_config, model_output, data)
        mask = data["response_mask"].bool()
        mask = mask.to_padded_tensor(False) if mask.is_nested else mask
        for name, metric in _METRICS.items():
            metrics[metric] = losses.no_padding_2_padding(model_output[name], data)[mask].mean().item()
        return collected, metrics

    return collect
