"""Every scorer with the Triton kernels against the torch ones, forward and backward, on the CPU under the interpreter.

In fp32: to 16 bits the interpreter truncates, where a GPU rounds. Run by `test_interpreter`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import compact_logits as cl
from compact_logits.engine import kernels
from compact_logits.engine.kernels import torch_kernels, triton_kernels
from compact_logits.engine.linear import score_hidden
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer

ROWS, HIDDEN, VOCAB, K = 6, 16, 331, 5

ONE_SLICE, SLICES = None, ROWS * 64 * 4 * 2  # bytes: slices of 64 columns, so that the last one is an odd 11

Outputs = tuple[Tensor | None, ...]
Head = dict[str, Tensor]


def a_head() -> Head:
    """A confident row, one with nearly even probabilities, and masked columns of all rows."""
    hidden = torch.randn(ROWS, HIDDEN)
    hidden[1] *= 20.0
    hidden[2] *= 0.01
    bias = torch.randn(VOCAB)
    bias[7::50] = -torch.inf
    targets = torch.randint(VOCAB, (ROWS,))
    targets[targets % 50 == 7] += 1
    weight = torch.randn(VOCAB, HIDDEN)
    targets[1] = (hidden[1] @ weight.T + bias).argmax()
    return {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets}


def log_probs_of(**options: Any) -> Callable[[Head, int | None], Outputs]:
    def call(head: Head, chunk_bytes: int | None) -> Outputs:
        stats = cl.linear_log_probs(
            head["hidden"], head["weight"], head["targets"], bias=head["bias"], chunk_bytes=chunk_bytes, **options
        )
        return stats.log_probs, stats.entropy, stats.sum_p2

    return call


def log_probs_of_logits(head: Head, chunk_bytes: int | None) -> Outputs:
    logits = (head["hidden"] @ head["weight"].T + head["bias"]).view(2, ROWS // 2, VOCAB)
    options: Any = {"entropy": "loss", "sum_p2": True, "vocab_size": VOCAB - 9, "chunk_bytes": chunk_bytes}
    stats = cl.log_probs(logits, head["targets"].clamp(max=VOCAB - 10).view(2, -1), **options)
    return stats.log_probs, stats.entropy, stats.sum_p2


def a_teacher(head: Head) -> tuple[Tensor, Tensor]:
    """Ids of which two are the same, and log-probs of which one is missing."""
    ids = head["targets"][:, None] + torch.arange(K) * 40
    ids = ids.remainder(VOCAB)
    ids = ids + (ids % 50 == 7).long()
    ids[0, 1] = ids[0, 0]
    log_probs = torch.linspace(0.0, 1.0, K).expand(ROWS, K).log_softmax(dim=1) - 0.1
    log_probs[3, 2] = -torch.inf
    return log_probs, ids


def topk_kl_of(**options: Any) -> Callable[[Head, int | None], Outputs]:
    def call(head: Head, chunk_bytes: int | None) -> Outputs:
        return cl.linear_topk_kl(
            head["hidden"], head["weight"], *a_teacher(head), bias=head["bias"], chunk_bytes=chunk_bytes, **options
        )

    return call


def topk_kl_of_logits(head: Head, chunk_bytes: int | None) -> Outputs:
    logits = head["hidden"] @ head["weight"].T + head["bias"]
    keep = torch.arange(ROWS) != 4
    return cl.topk_kl(logits, *a_teacher(head), tail=True, loss_mask=keep, chunk_bytes=chunk_bytes)


def top_p(head: Head, chunk_bytes: int | None) -> Outputs:
    sizes = torch.tensor([3, 1, 0, 40, 2, 7])
    ids = torch.cat([(head["targets"][row] + torch.arange(size) * 3) % VOCAB for row, size in enumerate(sizes)])
    stops = sizes.cumsum(0)
    mask = TopPMask.build(ids, stops - sizes, stops, recorded=sizes > 0)
    base = LogProbScorer(head["targets"], VocabShard(0, VOCAB), torch.linspace(0.7, 1.4, ROWS), "loss")
    return score_hidden(head["hidden"], head["weight"], head["bias"], TopPScorer(base, mask), chunk_bytes=chunk_bytes)


CALLS: dict[str, Callable[[Head, int | None], Outputs]] = {
    "log-prob": log_probs_of(),
    "entropy metric": log_probs_of(entropy="metric"),
    "entropy loss": log_probs_of(entropy="loss"),
    "sum_p2": log_probs_of(sum_p2=True),
    "all, padded vocabulary": log_probs_of(entropy="loss", sum_p2=True, vocab_size=VOCAB - 1, temperature=0.7),
    "temperature of each row": log_probs_of(entropy="loss", temperature=torch.linspace(0.7, 1.4, ROWS)),
    "given logits": log_probs_of_logits,
    "top-p": top_p,
    "top-k KL": topk_kl_of(temperature=0.7),
    "top-k KL, clamped": topk_kl_of(log_prob_min_clamp=-3.0),
    "top-k KL with tail": topk_kl_of(tail=True, temperature=torch.linspace(0.7, 1.4, ROWS)),
    "top-k KL with tail, given logits": topk_kl_of_logits,
}


def run(call: Callable[[Head, int | None], Outputs], head: Head, chunk_bytes: int | None) -> list[Tensor]:
    leaves = {name: value.clone().requires_grad_(value.is_floating_point()) for name, value in head.items()}
    outputs = [each for each in call(leaves, chunk_bytes) if each is not None]
    torch.manual_seed(1)
    loss = torch.stack([(each * torch.randn(each.shape)).sum() for each in outputs if each.requires_grad]).sum()
    loss.backward()
    grads = [leaf.grad for leaf in leaves.values() if leaf.requires_grad]
    assert all(grad is not None for grad in grads)
    return [*[each.detach() for each in outputs], *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("chunk_bytes", [ONE_SLICE, SLICES], ids=["one slice", "several slices"])
@pytest.mark.parametrize("name", CALLS)
def test_a_scorer_gives_the_same_with_both_kernels(
    name: str, chunk_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, launched = a_head(), []

    def chosen(module: ModuleType) -> Callable[[Tensor], ModuleType]:
        return lambda logits: launched.append(tuple(logits.shape)) or module

    results = []
    for module in (torch_kernels, triton_kernels):
        monkeypatch.setattr(kernels, "_kernels", chosen(module))
        results.append(run(CALLS[name], head, chunk_bytes))
        assert launched, "no kernel was asked for"
        launched.clear()
    for expected, got in zip(*results, strict=True):
        assert expected.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))


def test_a_row_of_nan_or_of_masked_columns_is_as_the_torch_kernels_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, VOCAB)
    logits[1] = -torch.inf
    logits[2, 9] = torch.nan
    targets, results = torch.tensor([3, 3, 3, 3]), []
    for module in (torch_kernels, triton_kernels):
        monkeypatch.setattr(kernels, "_kernels", lambda logits, module=module: module)
        leaf = logits.clone().requires_grad_()
        stats = cl.log_probs(leaf, targets, entropy="loss", sum_p2=True)
        (stats.log_probs + stats.entropy).sum().backward()  # type: ignore[operator]
        results.append([stats.log_probs, stats.entropy, stats.sum_p2, leaf.grad])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert results[0][0].isfinite().tolist() == [True, False, False, True]
