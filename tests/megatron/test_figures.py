"""What attached heads have spared: counted on the host, by the path each micro-batch took."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from compact_logits.engine.slices import plan_chunks
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.errors import PatchError
from compact_logits.held_logits import HeldLogits
from compact_logits.megatron import HeadMetrics, attach, metrics_of
from compact_logits.engine.linear import blocks_of, score_hidden
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.engine.vocab_shard import VocabShard
from tests.support.allocation import AllocationTracker
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import call, marked
from tests.support.ranks import RankPool


def test_of_compact_and_full_micro_batches(rank_pool: RankPool) -> None:
    rank_pool.run(1, counted)


def counted(rank: int, world: int) -> None:
    micros = [micro_batch(0, Cut(1), mask) for mask in ("holes", "nothing", "everything")]
    kept = [micro.selection.kept for micro in micros]
    with cpu_megatron(rank, world, tp=1):
        model = build_gpt(tp=1, vocab=VOCAB, layers=1)
        with pytest.raises(PatchError, match="this GPTModel has no figures: its head is not attached; call attach"):
            metrics_of(model)
        attach(model)
        for micro in micros:
            call(model, micro, marked(micro, chunk_bytes=1000)[0])
        call(model, micros[0])  # asks nothing
        figures = metrics_of(model)
        assert (figures.micro_batches, figures.rows, figures.projected_rows) == (3, 3 * 56, sum(kept))
        logits = 4 * 56 * VOCAB
        assert figures.most_bytes_not_allocated == logits, "of the micro-batch without rows"
        assert 3 * (logits - 1500) <= figures.bytes_not_allocated < 3 * logits
        assert str(figures) == (
            f"projected {sum(kept)} of 168 rows ({sum(kept) / 168:.1%}), up to 0.00 GiB of logits not allocated, "
            f"0 of 3 micro-batches on the full path"
        )
        step = figures.take()
        assert step.rows == 168 and figures == HeadMetrics()
        model.output_layer.gather_output = True
        call(model, micros[0], marked(micros[0])[0])
        model.output_layer.gather_output = False
        for batch in (2, 4):
            call(model, micros[0], marked(micros[0], batch=batch)[0])
        found = metrics_of(model).take().metrics()
        assert found == json.loads(json.dumps(found))
        reason = "the_hidden_states_are_asked_was_rows_hidden"
        assert found == {
            "compact_logits/micro_batches": 3,
            "compact_logits/rows": 168,
            "compact_logits/projected_rows": 168,
            "compact_logits/bytes_not_allocated": 0,
            "compact_logits/most_bytes_not_allocated": 0,
            "compact_logits/full_path_micro_batches": 3,
            "compact_logits/full_path/the_output_layer_uses_gather_output": 1,
            f"compact_logits/full_path/{reason}": 2,
        }
        assert step.metrics().keys() < found.keys()


def spied(make: Callable[..., HeldLogits], made: list[HeldLogits], *args: Any, **kwargs: Any) -> HeldLogits:
    made.append(make(*args, **kwargs))
    return made[-1]


@pytest.mark.parametrize(("rows", "chunk_bytes"), [(0, 10**6), (1, 1), (40, 10**6), (40, 9000), (40, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_held_are_those_that_are_allocated(rows: int, chunk_bytes: int, dtype: torch.dtype) -> None:
    vocab = 101
    for keeps, entropy in product((False, True), ("none", "metric")):
        hidden = torch.randn(rows, 8).to(dtype).requires_grad_(keeps)
        weight = torch.randn(vocab, 8).to(dtype)
        scorer = LogProbScorer(torch.zeros(rows, dtype=torch.int64), VocabShard(0, vocab), 0.7, entropy)
        made = []
        make = partial(spied, HeldLogits.make, made)
        with AllocationTracker() as tracker, mock.patch.object(HeldLogits, "make", make):
            score_hidden(hidden, weight, None, scorer, chunk_bytes=chunk_bytes)
        planned, used = (blocks_of(scorer, dtype, dtype, keeps=kept) for kept in (True, keeps))
        plan = plan_chunks(rows, vocab, dtype, hidden.device, chunk_bytes, blocks=planned)
        scratch = [
            each for each in tracker.records if "new_empty" in each.op and each.shape == (plan.block, plan.width)
        ]
        expected = plan.bytes_in_forward(dtype, keeps=keeps, blocks=used)
        assert made[0].own.nbytes + sum(each.nbytes for each in scratch) == expected
