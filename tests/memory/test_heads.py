"""The full heads compute what they hold: their memory would be no measure if their numbers were wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from compact_logits.memory.heads import full_head, full_topk_head


def test_against_autograd_through_a_dense_softmax() -> None:
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 8, generator=random, dtype=torch.float64).requires_grad_()
    weight = torch.randn(13, 8, generator=random, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([1, 12, 0, 3, 3])
    keep = (torch.rand(5, 13, generator=random) < 0.5).scatter_(1, targets[:, None], True)
    teacher, ids = torch.randn(5, 3, generator=random).log_softmax(1), torch.randint(13, (5, 3), generator=random)

    def gradients(*outputs: Tensor) -> list[Tensor]:
        total = sum((k + 1) * each.double().sum() for k, each in enumerate(outputs))
        return list(torch.autograd.grad(total, [rows], retain_graph=True))  # type: ignore[arg-type]

    logits = rows @ weight.t() / 0.7
    kept = logits.masked_fill(~keep, -torch.inf).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    kl = (teacher.exp() * (teacher - logits.log_softmax(1).gather(1, ids))).sum(1)
    ours = full_head(rows, weight, targets, temperature=0.7, entropy_gradient=True, keep=keep)
    torch.testing.assert_close(ours, (kept, entropy), check_dtype=False, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(*ours), gradients(kept, entropy), rtol=1e-4, atol=1e-4)
    loss = full_topk_head(rows, weight, teacher, ids, temperature=0.7)
    torch.testing.assert_close(loss, kl, check_dtype=False, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(loss), gradients(kl), rtol=1e-4, atol=1e-4)
