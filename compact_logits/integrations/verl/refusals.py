"""What cannot be given is refused before the model runs, and not missed after it has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compact_logits.errors import ConfigError
from compact_logits.host_values import describe
from compact_logits.integrations.verl.tail_mode import TAIL_MODE

__all__ = ["batch_wrapper", "check_loss"]


def batch_wrapper(original: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    """Around an engine's `train_batch` or `infer_batch`, of every back end, before any forward.

    `default(data, key=..., default=...)` is verl's way to a batch's settings.
    """

    def run_batch(self: Any, data: Any, loss_function: Any = None) -> Any:
        given = getattr(loss_function, "keywords", {})
        if given.get("distillation_config") is not None:
            engine_config = getattr(self, "engine_config", None)
            fused = default(data, key="use_fused_kernels", default=getattr(engine_config, "use_fused_kernels", False))
            check_loss(given["distillation_config"].distillation_loss, given["config"].strategy, fused=bool(fused))
        return original(self, data, loss_function)

    return run_batch


def check_loss(loss_config: Any, strategy: str, *, fused: bool) -> None:
    """Raise `ConfigError` for a top-k loss whose outputs the back end would not produce."""
    mode = loss_config.loss_mode
    if mode == TAIL_MODE and strategy != "megatron":
        raise ConfigError(
            f"loss_mode={TAIL_MODE} needs a student tail mass with a gradient, which of verl's back ends only megatron "
            f"gives here, got strategy={describe(strategy)}; use megatron, or loss_mode=forward_kl_topk"
        )
    if strategy == "megatron" and getattr(loss_config.loss_settings, "use_topk", False) and fused:
        raise ConfigError(
            f"loss_mode={mode} reads top-k outputs, which verl's fused Megatron forward does not produce; set "
            f"actor_rollout_ref.model.use_fused_kernels=False"
        )
