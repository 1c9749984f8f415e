"""The same inputs and the same budget give the same bits: twice, in ranks, and whatever ran in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits import VocabShard, linear_log_probs, linear_topk_kl, log_probs, topk_kl
from compact_logits.engine.linear import score_hidden
from compact_logits.scorers import log_prob_scorer
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from tests.support.ranks import RankPool
from tests.support.sharded_head import shard_of

ROWS, HIDDEN, VOCAB, K = 29, 16, 301, 7
CUTS = [0, 130, VOCAB]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

Bits = dict[str, Tensor]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Where torch has no deterministic algorithm it raises; what is made without values is filled with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Inputs:
    """Leaves and constants of one call, a slice of the vocabulary."""

    def __init__(self, dtype: torch.dtype, shard: VocabShard) -> None:
        random = torch.Generator().manual_seed(3)
        work = torch.promote_types(dtype, torch.float32)
        self.shard = shard if shard.sharded else None
        columns = slice(shard.start, shard.stop)
        self.hidden = torch.randn(ROWS, HIDDEN, generator=random).to(dtype).requires_grad_()
        self.weight = torch.randn(VOCAB, HIDDEN, generator=random)[columns].to(dtype).requires_grad_()
        self.bias = torch.randn(VOCAB, generator=random)[columns].to(dtype).requires_grad_()
        self.logits = (3 * torch.randn(ROWS, VOCAB, generator=random))[:, columns].to(dtype).requires_grad_()
        self.targets = torch.randint(VOCAB, (ROWS,), generator=random)
        self.temperature = 0.5 + torch.rand(ROWS, generator=random)
        top = torch.randn(ROWS, VOCAB, generator=random).mul(2).log_softmax(dim=-1).topk(K, dim=-1)
        self.teacher = top.values.to(work), top.indices
        self.teacher[1][3:9, 1] = self.teacher[1][3:9, 0]  # listed twice
        sizes = torch.randint(0, 40, (ROWS,), generator=random)
        stops = sizes.cumsum(0)
        ids = torch.randint(VOCAB, (int(stops[-1]),), generator=random)
        self.nucleus = TopPMask.build(ids, stops - sizes, stops, sizes > 4)
        self.gradients = torch.randn(2, ROWS, generator=random).to(work)
        self.mask = torch.rand(ROWS, generator=random) < 0.6

    def bits(self, outputs: list[Tensor]) -> Bits:
        """The outputs and, after backward, every gradient."""
        roots = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(roots, list(self.gradients[: len(roots)]))
        found = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
        leaves = {name: getattr(self, name) for name in ("hidden", "weight", "bias", "logits")}
        return found | {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def of_log_prob(given: Inputs, budget: int | None) -> list[Tensor]:
    return list(
        linear_log_probs(
            given.hidden,
            given.weight,
            given.targets,
            bias=given.bias,
            shard=given.shard,
            temperature=given.temperature,
            entropy="loss",
            chunk_bytes=budget,
        )
    )


def of_nucleus(given: Inputs, budget: int | None) -> list[Tensor]:
    shard = given.shard or VocabShard(0, VOCAB)
    scorer = TopPScorer(LogProbScorer(given.targets, shard, given.temperature, "loss"), given.nucleus)
    group = given.shard.group if given.shard else None
    return list(score_hidden(given.hidden, given.weight, given.bias, scorer, group=group, chunk_bytes=budget))


def of_top_k(given: Inputs, budget: int | None) -> list[Tensor]:
    result = linear_topk_kl(given.hidden, given.weight, *given.teacher, shard=given.shard, chunk_bytes=budget)
    return [each for each in result if each is not None]


def of_tail(given: Inputs, budget: int | None) -> list[Tensor]:
    result = linear_topk_kl(
        given.hidden,
        given.weight,
        *given.teacher,
        shard=given.shard,
        tail=True,
        temperature=given.temperature,
        chunk_bytes=budget,
    )
    return list(result)


def of_given_logits(given: Inputs, budget: int | None) -> list[Tensor]:
    stats = log_probs(given.logits, given.targets, shard=given.shard, entropy="loss", chunk_bytes=budget)
    return list(stats)


def of_given_top_k(given: Inputs, budget: int | None) -> list[Tensor]:
    logits = given.logits * 1  # its memory is written over
    result = topk_kl(
        logits,
        *given.teacher,
        shard=given.shard,
        tail=True,
        chunk_bytes=budget,
        loss_mask=given.mask,
        inplace_backward=True,
    )
    return list(result)


WAYS: dict[str, Callable[[Inputs, int | None], list[Tensor]]] = {
    "log-prob and entropy": of_log_prob,
    "nucleus": of_nucleus,
    "top-k KL": of_top_k,
    "tail-aware KL": of_tail,
    "given logits": of_given_logits,
    "top-k KL of given logits": of_given_top_k,
}

each_way = pytest.mark.parametrize("way", WAYS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_budget = pytest.mark.parametrize("budget", [1, 9000, None])


def once(way: str, dtype: torch.dtype, budget: int | None, shard: VocabShard | None = None) -> Bits:
    given = Inputs(dtype, VocabShard(0, VOCAB) if shard is None else shard)
    return given.bits(WAYS[way](given, budget))


def differing(one: Bits, other: Bits) -> list[str]:
    assert one.keys() == other.keys() and len(one) > 2
    return [name for name in one if not torch.equal(one[name], other[name])]


@each_way
@each_dtype
@each_budget
def test_case_11_4_twice_the_same_bits(way: str, dtype: torch.dtype, budget: int | None) -> None:
    first = once(way, dtype, budget)
    assert all(torch.isfinite(values).all() for values in first.values()), "memory without values was read"
    assert differing(first, once(way, dtype, budget)) == []


def on_ranks(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for way in WAYS:
            for budget in (1, None):
                runs = [once(way, dtype, budget, shard_of(rank, CUTS)) for _ in range(2)]
                assert all(torch.isfinite(values).all() for values in runs[0].values()), way
                found += [f"{way}: {name}" for name in differing(*runs)]
        return found
    finally:
        torch.use_deterministic_algorithms(False)


@each_dtype
def test_ranks_twice_the_same_bits(rank_pool: RankPool, dtype: torch.dtype) -> None:
    assert rank_pool.run(2, on_ranks, dtype) == [[], []]


@each_way
def test_the_same_bits_whatever_ran_before(way: str) -> None:
    first = once(way, torch.bfloat16, 9000)
    for other in WAYS:
        for dtype, budget in ((torch.float64, 1), (torch.float32, None), (torch.bfloat16, 2000)):
            once(other, dtype, budget)
        torch.full((ROWS * VOCAB * 4,), torch.nan)  # what the allocator gives out next
        assert differing(first, once(way, torch.bfloat16, 9000)) == [], f"after {other}"


@each_way
@each_dtype
def test_a_pass_without_gradients_has_the_bits_of_one_with(way: str, dtype: torch.dtype) -> None:
    given = Inputs(dtype, VocabShard(0, VOCAB))
    trained = WAYS[way](given, 9000)
    with torch.no_grad():
        scored = WAYS[way](given, 9000)
    assert len(trained) == len(scored) and not any(output.requires_grad for output in scored)
    assert all(torch.equal(one.detach(), other) for one, other in zip(trained, scored, strict=True))


def test_other_bits_would_be_seen() -> None:
    def shaken(original: Any) -> Any:
        return lambda *given: original(*given) * (1 + 1e-5 * torch.rand(()))

    with mock.patch.object(log_prob_scorer, "inverse_temperature", shaken(log_prob_scorer.inverse_temperature)):
        runs = [once("log-prob and entropy", torch.float32, 1) for _ in range(2)]
    assert differing(*runs) == ["d_hidden", "d_weight", "d_bias"]


def test_memory_without_values_would_be_seen() -> None:
    right = LogProbScorer.merge

    def reads_it(self: LogProbScorer, stats: Tensor) -> Any:
        return right(self, stats + 0.0 * torch.empty_like(stats))

    with mock.patch.object(LogProbScorer, "merge", reads_it):
        assert not torch.isfinite(once("log-prob and entropy", torch.float32, 1)["output 0"]).all()
