"""The metrics of attached heads: counted on the host, by the path each micro-batch took."""

from __future__ import annotations

import json
import weakref
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.engine import linear
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import PatchError
from compact_logits.megatron import HeadMetrics, attach, metrics_of
from compact_logits.scorers.log_prob_scorer import LogProbScorer
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
        with pytest.raises(PatchError, match="this GPTModel has no metrics: its head is not attached; call attach"):
            metrics_of(model)
        attach(model)
        for micro in micros:
            call(model, micro, marked(micro, chunk_bytes=1000)[0])
        call(model, micros[0])  # asks nothing
        metrics = metrics_of(model)
        assert (metrics.micro_batches, metrics.rows, metrics.projected_rows) == (3, 3 * 56, sum(kept))
        logits = 4 * 56 * VOCAB
        assert metrics.most_bytes_not_allocated == logits, "of the micro-batch without rows"
        assert metrics.bytes_not_allocated == 3 * logits - 4 * 64 * sum(kept), "one least slice of each"
        assert str(metrics) == (
            f"projected {sum(kept)} of 168 rows ({sum(kept) / 168:.1%}), up to 0.00 GiB of logits not allocated, "
            f"0 of 3 micro-batches on the full path"
        )
        step = metrics.take()
        assert step.rows == 168 and metrics == HeadMetrics()
        model.output_layer.gather_output = True
        call(model, micros[0], marked(micros[0])[0])
        model.output_layer.gather_output = False
        for batch in (2, 4):
            call(model, micros[0], marked(micros[0], batch=batch)[0])
        found = metrics_of(model).take().metrics()
        assert found == json.loads(json.dumps(found))
        reason = "the_hidden_states_are_and_the_request_is_for_rows_hidden"
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


@pytest.mark.parametrize(("rows", "chunk_bytes"), [(0, 10**6), (1, 1), (40, 10**6), (40, 9000), (40, 20000), (40, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_held_are_those_that_are_allocated(rows: int, chunk_bytes: int, dtype: torch.dtype) -> None:
    vocab, live, most = 301, [0], [0]
    project = linear.project

    def counted_project(*args: Any) -> Tensor:
        logits = project(*args)
        size = logits.nbytes
        live[0] += size
        most[0] = max(most[0], live[0])
        weakref.finalize(logits, lambda: live.__setitem__(0, live[0] - size))
        return logits

    for keep, entropy in product((False, True), ("none", "metric")):
        live[0] = most[0] = 0
        hidden = torch.randn(rows, 8).to(dtype).requires_grad_(keep)
        weight = torch.randn(vocab, 8).to(dtype)
        targets = torch.zeros(rows, dtype=torch.int64)
        scorer = LogProbScorer(targets, VocabShard(0, vocab), torch.full((rows,), 1.4), entropy)
        with mock.patch.object(linear, "project", counted_project):
            outputs = linear.score_hidden(hidden, weight, None, scorer, chunk_bytes=chunk_bytes)
        slices = linear.slices_of(scorer, rows, weight, dtype, chunk_bytes)
        assert slices.peak_logits(keep=keep) * dtype.itemsize == most[0], (slices, len(outputs))
