"""A student's logits and a teacher's top-k of the same rows, and both KLs of them in plain code."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compact_logits import TopKKL, reference
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth

__all__ = ["TopKCase", "assert_as_good_as_plain", "plain", "topk_case"]


class TopKCase(NamedTuple):
    logits: Tensor  # (..., vocab), a leaf that requires grad
    log_probs: Tensor  # (..., k)
    ids: Tensor  # (..., k) int64


def topk_case(
    *leading: int,
    vocab: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    student_scale: float = 1.0,
    likeness: float = 0.5,  # of the teacher to the student, so that their top-k overlap
) -> TopKCase:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(*leading, vocab, generator=generator) * student_scale
    teacher = likeness * z + torch.randn(*leading, vocab, generator=generator)
    top = torch.log_softmax(teacher, dim=-1).topk(k, dim=-1)
    log_probs = top.values.to(torch.promote_types(dtype, torch.float32))
    return TopKCase(z.to(dtype).requires_grad_(), log_probs, top.indices)


def plain(
    case: TopKCase,
    weights: Tensor,  # (...), what the loss is multiplied by before backward
    dtype: torch.dtype,
    **settings: object,
) -> tuple[dict[str, Tensor], Tensor]:  # outputs, gradient of the logits
    """The definition on a copy of the case in `dtype`."""
    logits = case.logits.detach().to(dtype).requires_grad_()
    out = reference.topk_kl(logits, case.log_probs.to(torch.promote_types(dtype, torch.float32)), case.ids, **settings)
    (out["loss"] * weights.to(out["loss"].dtype)).sum().backward()
    assert logits.grad is not None
    return out, logits.grad


def assert_as_good_as_plain(
    ours: TopKKL,
    gradient: Tensor | None,
    case: TopKCase,
    weights: Tensor,
    **settings: object,
) -> None:
    """Every output and the gradient, against fp64 truth, by the error of plain code in the case's dtype."""
    same, d_same = plain(case, weights, case.logits.dtype, **settings)
    truth, d_truth = plain(case, weights, torch.float64, **settings)
    assert {name for name, value in ours._asdict().items() if value is not None} == truth.keys()
    for name, value in ours._asdict().items():
        if name == "overlap_count":
            assert torch.equal(value, truth[name]), name
        elif value is not None:
            assert_close_to_truth(value, same[name].detach(), truth[name].detach(), name=name)
    assert_gradient_close_to_truth(gradient, d_same, d_truth)
