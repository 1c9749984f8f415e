"""`compile=True`: the same numbers from two compilations, however lengths change; and life inside a compiled loss."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from compact_logits.engine.slices import Block
from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden
from compact_logits.scorers.compiled import CompiledLogProbScorer
from compact_logits.engine.vocab_shard import VocabShard
from tests.support.torchforge_plain import plain_logprobs

VOCAB = 211


@pytest.fixture
def compilations() -> Iterator[object]:
    """How many graphs were compiled since the test began."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()


def case(rows: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(batch, rows + 1, VOCAB).mul_(4).to(dtype), torch.randint(0, VOCAB, (batch, rows))


def test_thirty_lengths_compile_twice(compilations) -> None:
    for index in range(1, 31):
        logits, ids = case(index * 37)
        leaf, plain = logits.requires_grad_(), logits.detach().clone().requires_grad_()
        ours, full = compute_logprobs(leaf, ids, 0.7, compile=True), plain_logprobs(plain, ids, 0.7)
        ours.sum().backward()
        full.sum().backward()
        torch.testing.assert_close(ours, full, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(leaf.grad, plain.grad, atol=1e-5, rtol=1e-5)
    assert compilations() == 2


def test_the_count_sees_a_compilation_for_each_length(compilations) -> None:
    fixed = torch.compile(lambda rows: rows.exp().sum(dim=1), dynamic=False)
    for rows in (3, 4, 5):
        fixed(torch.zeros(rows, 2))
    assert compilations() == 3


def test_a_batch_of_any_shape_and_a_single_row_compile_no_more(compilations) -> None:
    for rows, batch in ((5, 3), (1, 1), (2, 1), (0, 2), (64, 2), (1, 4)):
        logits, ids = case(rows, batch=batch)
        leaf = logits.requires_grad_()
        # A block of 4 rows: those of one sequence end in a shorter one.
        ours = compute_logprobs(leaf, ids, compile=True, chunk_bytes=4 * VOCAB * 4 * 16)
        ours.sum().backward()
        torch.testing.assert_close(ours, plain_logprobs(logits, ids), atol=1e-5, rtol=1e-6)
    assert compilations() <= 2


def test_inference_compiles_once(compilations) -> None:
    with torch.inference_mode():
        for rows in (37, 74, 111, 9):
            logits, ids = case(rows)
            values = compute_logprobs(logits, ids, 0.7, compile=True)
            torch.testing.assert_close(values, plain_logprobs(logits, ids, 0.7), atol=1e-5, rtol=1e-6)
    assert compilations() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states(compilations, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows in (5, 9, 30):
        hidden, weight = torch.randn(2, rows + 1, 16, dtype=dtype), torch.randn(VOCAB, 16, dtype=dtype)
        ids = torch.randint(0, VOCAB, (2, rows))
        leaves, same = [[each.clone().requires_grad_() for each in (hidden, weight)] for _ in range(2)]
        ours = compute_logprobs_from_hidden(*leaves, ids, 0.7, compile=True, chunk_bytes=60_000)
        eager = compute_logprobs_from_hidden(*same, ids, 0.7, chunk_bytes=60_000)
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-6)
        for grad, expected in zip(
            torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(eager.sum(), same), strict=True
        ):
            torch.testing.assert_close(grad, expected, atol=1e-5 if dtype == torch.float32 else 1e-3, rtol=0.016)
    assert compilations() == 2


def test_an_id_of_another_shard_and_a_masked_column_are_as_without_compilation() -> None:
    targets = torch.tensor([3, 11, 4])
    logits = torch.randn(3, 8)
    logits[:, 2] = -torch.inf
    results = []
    for kind in (CompiledLogProbScorer, CompiledLogProbScorer.__mro__[1]):
        scorer = kind(
            targets=targets, shard=VocabShard(0, 8), temperature=torch.tensor([0.5, 1.0, 2.0]), entropy="none"
        )
        z = torch.empty_like(logits)
        block = Block(logits, z, None, slice(0, 3))
        stats = scorer.local_stats(block)
        outputs, saved = scorer.merge(stats)
        scorer.d_logits_(block, saved, (torch.ones(3),))
        results.append((stats, outputs[0], z))
    for compiled, eager in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, equal_nan=True)
    assert torch.isnan(results[0][1][1])


@pytest.mark.parametrize("compile", [False, True])
def test_a_compiled_loss_calls_it(compile: bool) -> None:
    """torchforge compiles its losses: around the call, which is no part of their graphs."""

    @torch.compile
    def loss(logits: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
        log_probs = compute_logprobs(logits, ids, compile=compile)
        return -(torch.exp(log_probs - log_probs.detach()) * advantages).sum(dim=1).mean()

    for rows in (6, 8, 12):
        logits, ids = case(rows, batch=2)
        advantages = torch.randn(2, 1)
        leaf, plain = logits.requires_grad_(), logits.detach().clone().requires_grad_()
        ours = loss(leaf, ids, advantages)
        ours.backward()
        log_probs = plain_logprobs(plain, ids)
        expected = -(torch.exp(log_probs - log_probs.detach()) * advantages).sum(dim=1).mean()
        expected.backward()
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(leaf.grad, plain.grad, atol=1e-6, rtol=1e-5)
