"""The loss as verl's engines call it: with logits for the per-token values, without for the scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class DistillationLossSettings:
    names: list[str]
    use_topk: bool = False


DISTILLATION_LOSS_REGISTRY: dict[str, Any] = {}
DISTILLATION_SETTINGS_REGISTRY: dict[str, DistillationLossSettings] = {}


def no_padding_2_padding(tensor: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Each response's values, from the row before its first token on, padded with zeros to one length."""
    values = tensor.values() if tensor.is_nested else tensor
    prompts, responses = (data[name].offsets().diff() for name in ("prompts", "responses"))
    ends = (prompts + responses).cumsum(0)
    rows = [
        F.pad(values[end - length - 1 : end - 1], (0, 0) * (values.dim() - 1) + (0, int(responses.max() - length)))
        for end, length in zip(ends.tolist(), responses.tolist(), strict=True)
    ]
    return torch.stack(rows)


def compute_topk_loss(
    config: Any, distillation_config: Any, data: dict[str, Tensor], student_logits: Tensor, data_format: str
) -> dict[str, Tensor]:
    import verl.trainer.distillation.megatron.losses as megatron_losses

    outputs = megatron_losses.compute_forward_kl_topk(
        student_logits=student_logits,
        teacher_topk_log_probs=data["teacher_logprobs"],
        teacher_topk_ids=data["teacher_ids"],
        config=distillation_config,
        data_format=data_format,
    )
    assert all(value.shape == student_logits.shape[:2] for value in outputs.values())
    return outputs


def compute_forward_kl_topk(
    config: Any, distillation_config: Any, model_output: dict[str, Tensor], data: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    mask = data["response_mask"].bool().to_padded_tensor(False)
    losses, mass = (no_padding_2_padding(model_output[name], data) for name in ("distillation_losses", "student_mass"))
    return losses.clamp_min(0.0), {"distillation/student_mass": mass[mask].mean().item()}


def distillation_ppo_loss(
    config: Any,
    distillation_config: Any,
    model_output: dict[str, Tensor] | None = None,
    data: Any = None,
    dp_group: Any = None,
    student_logits: Tensor | None = None,
    data_format: str = "thd",
) -> Any:
    if student_logits is not None:
        return compute_topk_loss(config, distillation_config, data, student_logits, data_format)
    collect = DISTILLATION_LOSS_REGISTRY[distillation_config.distillation_loss.loss_mode]
    losses, metrics = collect(config, distillation_config, model_output, data)
    mask = data["response_mask"].bool().to_padded_tensor(False)
    return (losses * mask).sum() / mask.sum(), metrics


DISTILLATION_LOSS_REGISTRY["forward_kl_topk"] = compute_forward_kl_topk
DISTILLATION_SETTINGS_REGISTRY["forward_kl_topk"] = DistillationLossSettings(["forward_kl_topk"], use_topk=True)
