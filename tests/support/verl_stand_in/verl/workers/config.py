"""The loss configuration: frozen once set, its settings looked up by the loss mode."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import Any


@dataclass
class DistillationLossConfig:
    loss_mode: str = "forward_kl_topk"
    topk: int = 4
    log_prob_min_clamp: float | None = -10.0
    use_chunked_topk: bool = False
    chunked_topk_chunk_size: int = 4096
    loss_settings: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name != "loss_settings":
            raise FrozenInstanceError(name)
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY

        if self.loss_mode not in DISTILLATION_SETTINGS_REGISTRY:
            raise ValueError(f"Unsupported loss mode: {self.loss_mode}")
        self.loss_settings = DISTILLATION_SETTINGS_REGISTRY[self.loss_mode]


@dataclass
class DistillationConfig:
    distillation_loss: DistillationLossConfig
