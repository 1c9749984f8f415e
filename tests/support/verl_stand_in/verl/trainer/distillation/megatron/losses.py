"""The vocab-parallel KL by the dense formula, on one rank, and the way from sequences to the rows of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compact_logits import reference

ALIGNED_TO = 4


def preprocess_thd_engine(input_ids: Tensor, pre_process: bool = True) -> tuple[Tensor, ...]:
    """All sequences one after another, each padded with zeros to a multiple of `ALIGNED_TO`: (1, tokens, ...)."""
    padded = []
    for sequence in input_ids.unbind():
        missing = -sequence.shape[0] % ALIGNED_TO
        padded.append(torch.cat([sequence, sequence.new_zeros(missing, *sequence.shape[1:])]))
    return torch.cat(padded)[None], None, None


def preprocess_bshd_engine(input_ids: Tensor, pre_process: bool = True) -> tuple[Tensor, ...]:
    """All sequences below one another, padded with zeros to the longest: (batch, tokens, ...)."""
    return torch.nn.utils.rnn.pad_sequence(list(input_ids.unbind()), batch_first=True), None, None


class _VocabParallelKLDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vp_logits: Tensor,
        target_topk_logps: Tensor,
        target_topk_indices: Tensor,
        log_prob_min_clamp: float | None,
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            logits = vp_logits.detach().requires_grad_()
            out = reference.topk_kl(
                logits, target_topk_logps, target_topk_indices.long(), log_prob_min_clamp=log_prob_min_clamp
            )
            (d_logits,) = torch.autograd.grad(out["loss"].sum(), logits)
        ctx.save_for_backward(d_logits)
        results = tuple(value.detach() for value in out.values())
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad_loss[..., None], None, None, None


def compute_forward_kl_topk(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    preprocess = preprocess_thd_engine if data_format == "thd" else preprocess_bshd_engine
    losses, student_mass, teacher_mass, overlap_count, overlap_token_advantage = _VocabParallelKLDivergence.apply(
        student_logits,
        preprocess(teacher_topk_log_probs)[0],
        preprocess(teacher_topk_ids)[0],
        config.distillation_loss.log_prob_min_clamp,
    )
    return {
        "distillation_losses": losses,
        "student_mass": student_mass,
        "teacher_mass": teacher_mass,
        "overlap_count": overlap_count,
        "overlap_token_advantage": overlap_token_advantage,
    }
