"""Random micro-batches, values and all gradients, against the dense definition: a quick look, and that it can see."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from compact_logits import VocabShard
from compact_logits.engine import linear, scorer
from compact_logits.engine.kernels import torch_kernels
from compact_logits.engine.row_gather import SequenceSharded
from compact_logits.engine.weight_grad import ReturnedWeightGrad
from compact_logits.rows import Layout
from compact_logits.scorers import log_prob, topk_scorer
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.linear_head import SCORERS
from tests.support.random_check import mismatches
from tests.support.random_data import kept_rows
from tests.support.random_example import Example, examples
from tests.support.random_run import Part, run_alone, run_on_ranks
from tests.support.random_soak import check, draw, main, soak
from tests.support.ranks import RankPool

pytestmark = pytest.mark.slow


@given(examples(ranks=False))
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_one_process(example: Example) -> None:
    assert mismatches(example, run_alone(example)) == []


def test_ranks(rank_pool: RankPool) -> None:
    reports: list[str] = []
    result = soak(120, 1, rank_pool, reports.append)
    assert result["mismatches"] == 0, "\n".join(reports)
    assert result["examples"] == 120 and result["rows_compared"] > 300
    assert set(result["world"]) == {"1", "2", "3", "4"}


def test_what_is_drawn() -> None:
    """So that no setting has become one that never comes up."""
    drawn = list(draw(600, 3))
    assert len(set(drawn)) == 600 and drawn[:20] == list(draw(600, 3))[:20]
    for example in drawn[:50]:
        assert Example.loads(example.dumps()) == example
    frequent = {
        "scorer": set(SCORERS),
        "dtype": {"float32", "float64", "bfloat16", "float16"},
        "layout": {"packed", "zigzag", "contiguous"},
        "incoming": {"responses", "contiguous", "strided", "expanded", "first output", "second output"},
        "temperature": {1.0, 0.7, 2.5, "rows"},
        "chunk_bytes": {None, 1, 400, 1500, 4000},
        "narrow": {True, False},
        "sequence_parallel": {True, False},
        "spread": {True, False},
        "in_place": {True, False},
    }
    for name, values in frequent.items():
        found = [getattr(example, name) for example in drawn]
        assert set(found) == values and min(map(found.count, values)) >= 5, name
    assert 30 < sum(each.real < each.vocab for each in drawn) < 400
    assert any(start == stop for each in drawn for start, stop in zip(each.cuts, each.cuts[1:], strict=False))
    kept = [len(kept_rows(example)) for example in drawn]
    assert kept.count(0) > 30 and sum(count > 10 for count in kept) > 30


# What a soak is there to find: each stands for a kind, and is small. From the right function to the wrong one.


def gradient_of_the_entropy(right: Any) -> Any:
    def logits_grad(self: Any, saved: Any, grads: Any) -> Any:
        return right(self, saved, tuple(g * 1.01 if g is not None and i else g for i, g in enumerate(grads)))

    return logits_grad


def gradient_of_known_ids(right: Any) -> Any:
    return lambda logits, ids, values, first: right(logits, ids, values * 0.99, first)


def clamped_ids(right: Any) -> Any:
    return lambda logits, ids, values, first: right(
        logits, ids.clamp(first, first + logits.shape[1] - 1), values, first
    )


def no_temperature(right: Any) -> Any:
    return lambda temperature, like, dtype: torch.ones_like(like, dtype=dtype)


def products_of_many_slices(right: Any) -> Any:
    return lambda total, left, right_factor: right(total, left, right_factor * 1.05)


def statistics_of_one_slice(right: Any) -> Any:
    return lambda parts, **kinds: right(parts[-1:], **kinds)


def rows_of_another_rank(right: Any) -> Any:
    return lambda self, rows: right(self, rows).roll(1, dims=0)


def own_token_as_label(right: Any) -> Any:
    return property(lambda self: self.source)


def not_merged(right: Any) -> Any:
    return lambda stats, shard: stats.expand(len(right(stats, shard)), *stats.shape)


def padding_that_counts(right: Any) -> Any:
    return lambda self, vocab_size: self


def gradient_of_unwritten_memory(right: Any) -> Any:
    return lambda self: self._total


def of_half_precision(right: Any) -> Any:
    return lambda self, ranks: right(self, ranks.half().double())


FAULTS = {
    "entropy": (LogProbScorer, "logits_grad", gradient_of_the_entropy),
    "known ids": (scorer, "write_at_", gradient_of_known_ids),
    "ids of other slices": (scorer, "write_at_", clamped_ids),
    "temperature": (log_prob, "inverse_temperatures", no_temperature),
    "products of slices": (linear, "add_product_", products_of_many_slices),
    "statistics of slices": (torch_kernels, "combine_stats", statistics_of_one_slice),
    "gather": (SequenceSharded, "gather", rows_of_another_rank),
    "label": (Layout, "label_source", own_token_as_label),
    "merge of the top-k": (topk_scorer, "gather_stats", not_merged),
    "padding": (VocabShard, "below", padding_that_counts),
    "gradient of the padding": (ReturnedWeightGrad, "finish", gradient_of_unwritten_memory),
    "precision": (LogProbScorer, "merge_ranks", of_half_precision),
}


def run_with_fault(name: str, rank: int, world: int, batch: list[Example]) -> list[list[Part]]:
    where, attribute, fault = FAULTS[name]
    with mock.patch.object(where, attribute, fault(getattr(where, attribute))):
        return run_on_ranks(rank, world, batch)


@pytest.mark.once
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(rank_pool: RankPool, name: str) -> None:
    reports: list[str] = []
    # Most show at once, and none may stay hidden in ten thousand.
    for count, seed in ((40, 2), (160, 3), (640, 4)):
        found = soak(count, seed, rank_pool, reports.append, partial(run_with_fault, name))["mismatches"]
        if found:
            break
    assert found
    first = next(line for line in reports if line.startswith("mismatch: "))
    assert Example.loads(first.partition("--example '")[2].rstrip("'")).seed >= 0
    assert "Error" not in first, "a wrong number is what is sought, not a fault that cannot run"


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--examples", "20", "--seed", "4", "--report", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert printed.startswith("seed 4\n") and printed.endswith((tmp_path / "report.json").read_text())
    assert report["examples"] == 20 and report["mismatches"] == 0 and report["seed"] == 4
    assert report["torch"] == torch.__version__ and {"machine", "python", "commit", "date"} <= report.keys()

    scored = [each for each in draw(200, 4) if each.world == 1 and each.scorer in ("none", "metric", "loss", "sum_p2")]
    alone = next(each for each in scored if kept_rows(each).numel())
    assert main(["--example", alone.dumps()]) == 0
    assert capsys.readouterr().out == "as the definition says\n"
    assert main(["--example", alone.dumps()], partial(run_with_fault, "precision")) == 1
    assert "log_probs is off by" in capsys.readouterr().out


def stumble(rank: int, world: int, batch: list[Example]) -> list[list[Part]]:
    if any(example.scorer == "top_p" for example in batch):
        raise ValueError("on purpose")
    return run_on_ranks(rank, world, batch)


def test_an_example_that_raises_is_a_mismatch_of_its_own(rank_pool: RankPool) -> None:
    alone = [each for each in draw(1000, 4) if each.world == 1]
    batch = [next(each for each in alone if each.scorer == scorer) for scorer in ("topk", "top_p", "loss")]
    for example, found in zip(batch, check(rank_pool, batch, stumble), strict=True):
        assert ("on purpose" in "".join(found)) == (example.scorer == "top_p")
