"""The definition, in plain dense torch: what each fast function equals. Tests and the roof use it, production never."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["log_probs", "sum_p2", "topk_kl"]


def log_probs(
    logits: Tensor,  # (rows, vocab), the whole vocabulary
    targets: Tensor,  # (rows,) int64
    *,
    temperature: float | Tensor = 1.0,  # scalar or (rows,)
) -> tuple[Tensor, Tensor]:  # log_probs (rows,), entropy (rows,)
    """Log-prob of each row's target and entropy of each row, differentiable, in the dtype of `logits`, at least fp32.

    `log p_j = z_j - log sum_i exp z_i` and `H = - sum_j p_j log p_j` with `z = logits / temperature`.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(z, dim=-1)
    selected = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(dim=-1)
    return selected, entropy


def sum_p2(
    logits: Tensor,  # (rows, vocab), the whole vocabulary
    *,
    temperature: float | Tensor = 1.0,  # scalar or (rows,)
) -> Tensor:  # (rows,)
    """`sum_j p_j^2` of `p = softmax(logits / temperature)`, in the dtype of `logits`, at least fp32."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    return torch.softmax(z, dim=-1).square().sum(dim=-1)


def topk_kl(
    logits: Tensor,  # (..., vocab), the whole vocabulary
    teacher_log_probs: Tensor,  # (..., k)
    teacher_ids: Tensor,  # (..., k) int64
    *,
    tail: bool = False,
    log_prob_min_clamp: float | None = None,
    tail_mass_eps: float = 1e-6,
    temperature: float | Tensor = 1.0,  # scalar or (...)
) -> dict[str, Tensor]:  # (...) each
    """`sum_k q_k (log q_k - log p_k)` over the teacher's ids, `"loss"` differentiable, under the names of `TopKKL`.

    `q` is the teacher as given, `p = softmax(logits / temperature)`; each entry counts, an id listed twice twice. The
    clamp bounds both log-probs from below, before anything is counted; where the teacher's is NaN, so are loss and
    gradient, also if the student's is below the clamp. With `tail`, all ids that are not listed are one category more,
    of mass `q_0 = max(1 - sum_k q_k, 0)` and `p_0`: plus `q_0 (log q_0 - log max(p_0, tail_mass_eps))`; of entries with
    one id the first counts then, and those of -inf list nothing. The tail-aware loss is never negative; what rounding
    and the guard leave below zero is reported as zero, with the gradient it has.
    """
    work = torch.promote_types(logits.dtype, torch.float32)
    z = logits.to(work) / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(z, dim=-1)
    log_q, log_p_k = teacher_log_probs.to(work), log_p.gather(-1, teacher_ids)
    compared = log_p_k
    if log_prob_min_clamp is not None:
        log_q, log_p_k = log_q.clamp(min=log_prob_min_clamp), log_p_k.clamp(min=log_prob_min_clamp)
        compared = torch.where(log_q.isnan(), compared, log_p_k)
    counted = _first_given(log_q, teacher_ids) if tail else torch.ones_like(teacher_ids, dtype=torch.bool)
    q = log_q.exp().masked_fill(~counted, 0.0)
    terms = torch.where(q == 0, 0.0, q * (log_q - compared))
    top = z.topk(teacher_ids.shape[-1], dim=-1).indices
    shared = (teacher_ids[..., :, None] == top[..., None, :]).any(dim=-1) & counted
    count = shared.sum(dim=-1)
    results = {
        "loss": terms.sum(dim=-1),
        "student_mass": (log_p_k.exp() * counted).sum(dim=-1),
        "teacher_mass": q.sum(dim=-1),
        "overlap_count": count,
        "overlap_token_advantage": -terms.masked_fill(~shared, 0.0).sum(dim=-1) / count.clamp(min=1),
    }
    if tail:
        listed = torch.zeros_like(z).scatter_add(-1, teacher_ids, counted.to(z.dtype)) > 0
        p_0 = log_p.exp().masked_fill(listed, 0.0).sum(dim=-1)
        q_0 = (1.0 - q.sum(dim=-1)).clamp(min=0.0)
        of_tail = torch.where(q_0 == 0, 0.0, q_0 * (q_0.log() - p_0.clamp(min=tail_mass_eps).log()))
        head, total = results["loss"], results["loss"] + of_tail
        results |= {"loss": total + (-total).clamp(min=0.0).detach(), "head_loss": head, "tail_loss": of_tail}
        results |= {"student_tail_mass": p_0, "teacher_tail_mass": q_0}
    return results


def _first_given(
    log_q: Tensor,  # (..., k)
    ids: Tensor,  # (..., k) int64
) -> Tensor:  # (..., k) bool
    """Where an entry is not -inf and no entry before it has its id, unless that one is -inf."""
    given = log_q != -torch.inf
    same = (ids[..., :, None] == ids[..., None, :]) & given[..., None, :]
    return given & ~same.tril(-1).any(dim=-1)
