"""The compiled scorer: the eager one's numbers in every setting, from two compilations over any row counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch._dynamo.utils import counters

from compact_logits.engine.slices import Block
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import Request
from compact_logits.megatron.output_layer import armed
from compact_logits.engine.linear import score_hidden
from compact_logits.scorers.compiled import CompiledLogProbScorer
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.engine.vocab_shard import VocabShard
from tests.support.gpt_paths import Cut, micro_batch
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.ranks import RankPool

VOCAB, HIDDEN = 97, 12


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def run(kind: type[LogProbScorer], head: Head, **options: Any) -> dict[str, Tensor | None]:
    leaves = [head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()]
    asked = {name: options.pop(name) for name in ("sum_p2", "vocab_size") if name in options}
    scorer = kind(head.targets, VocabShard(0, head.weight.shape[0]), head.temperature, options.pop("entropy"), **asked)
    outputs = score_hidden(*leaves, None, scorer, **options)
    names = ["log_probs", "entropy"] if scorer.entropy != "none" else ["log_probs"]
    roots = [(o, g) for o, g in zip(outputs, (head.d_log_probs, head.d_entropy), strict=False) if o.requires_grad]
    torch.autograd.backward(*zip(*roots, strict=True))
    found = dict(zip([*names, *["sum_p2"] * scorer.sum_p2], outputs, strict=True))
    detached = {name: output.detach() for name, output in found.items()}
    return detached | {"d_hidden": leaves[0].grad, "d_weight": leaves[1].grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
def test_as_good_as_plain(entropy: str, dtype: torch.dtype) -> None:
    head = Head.random(40, HIDDEN, VOCAB, dtype, temperature="rows")
    ours = run(CompiledLogProbScorer, head, entropy=entropy, chunk_bytes=20_000)
    assert counters["stats"]["unique_graphs"] == 2
    assert_as_good_as_plain(ours, head.plain(entropy), head.truth(entropy))


@pytest.mark.parametrize("entropy", ["none", "loss"])
def test_case_12_3_any_sequence_of_row_counts_compiles_twice(entropy: str) -> None:
    for rows in (2, 3, 17, 1, 64, 0, *range(37, 31 * 37, 37)):
        head = Head.random(rows, HIDDEN, VOCAB, temperature=0.7)
        ours = run(CompiledLogProbScorer, head, entropy=entropy, chunk_bytes=2**16)
        eager = run(LogProbScorer, head, entropy=entropy, chunk_bytes=2**16)
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("asked", [{"sum_p2": True}, {"vocab_size": 90}, {"sum_p2": True, "vocab_size": 90}], ids=str)
def test_squares_and_padded_columns(asked: dict[str, Any]) -> None:
    head = Head.random(20, HIDDEN, VOCAB)
    head.targets.clamp_(max=89)
    ours, eager = (run(kind, head, entropy="loss", **asked) for kind in (CompiledLogProbScorer, LogProbScorer))
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    padding = ours["d_weight"][90:]
    assert ("vocab_size" in asked) == (not padding.any())


@pytest.mark.parametrize("entropy", ["none", "loss"])
def test_what_is_compiled_is_right_before_it_is_compiled(entropy: str) -> None:
    head = Head.random(20, HIDDEN, VOCAB, temperature="rows")
    with torch.compiler.set_stance("force_eager"):
        ours = run(CompiledLogProbScorer, head, entropy=entropy, sum_p2=True)
    assert counters["stats"]["unique_graphs"] == 0
    eager = run(LogProbScorer, head, entropy=entropy, sum_p2=True)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_masked_columns_add_nothing_to_the_entropy() -> None:
    logits = torch.randn(3, VOCAB)
    logits[:, 5] = -torch.inf
    targets = torch.tensor([3, 11, 4])
    results = []
    for kind in (CompiledLogProbScorer, LogProbScorer):
        scorer = kind(targets, VocabShard(0, VOCAB), 1.0, "loss")
        z = torch.empty_like(logits)
        block = Block(logits, z, torch.empty_like(z), slice(0, 3))
        outputs, saved = scorer.merge(scorer.local_stats(block))
        scorer.d_logits_(block, saved, (torch.ones(3), torch.ones(3)))
        results.append((*outputs, z))
    for compiled, eager in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
        assert bool(compiled.isfinite().all())


def head_of_a_model(rank: int, world: int, compile: bool) -> tuple[int, Tensor]:
    torch._dynamo.reset()
    counters.clear()
    with cpu_megatron(rank, world, tp=1):
        model = build_gpt(tp=1, vocab=128, layers=1)
        micro = micro_batch(rank, Cut(1), "holes")
        hidden = torch.randn(micro.layout.num_rows, 1, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        request = Request(micro.selection, entropy="loss", compile=compile)
        with armed(model.output_layer, request):
            answer, _ = model.output_layer(hidden)
        answer.sum().backward()
        return counters["stats"]["unique_graphs"], answer.detach()


def test_a_request_that_asks_for_it_compiles_the_heads_passes(rank_pool: RankPool) -> None:
    (eager,), (compiled,) = (rank_pool.run(1, head_of_a_model, compile) for compile in (False, True))
    # From torch 2.15 on the mode that keeps Megatron off CUDA here is compiled, too.
    assert (eager[0], compiled[0]) == (0, 3 if Version(torch.__version__) >= Version("2.15") else 2)
    torch.testing.assert_close(compiled[1], eager[1], rtol=1e-5, atol=1e-5)
