"""How verl's settings and ours reach `topk_kl`: the budget of copied logits, and what the ranks compare."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compact_logits.errors import InputError
from tests.support.rank_calls import DIFFERENT, REMEDY
from tests.support.ranks import RankPool
from tests.support.verl_process import VOCAB, installed, loss_config, micro_batch, packed_logits, start


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A process that has the stand-in for verl, which no other test may meet."""
    ranks = RankPool()
    yield ranks
    ranks.close()


def budget_of(rank: int, world: int, budget: str | None, dtype: torch.dtype, settings: dict[str, Any]) -> list[int]:
    """The bytes of logits that the KL may copy at a time."""
    start()
    os.environ.pop("COMPACT_LOGITS_CHUNK_BYTES", None)
    if budget is not None:
        os.environ["COMPACT_LOGITS_CHUNK_BYTES"] = budget
    request, budgets = importlib.import_module("compact_logits.integrations.verl.request"), []
    topk_kl = request.topk_kl
    request.topk_kl = lambda *args, **kwargs: budgets.append(kwargs["chunk_bytes"]) or topk_kl(*args, **kwargs)
    try:
        with installed() as (_, megatron, workers, _):
            logits, batch = packed_logits(megatron).to(dtype), micro_batch()
            teacher = batch["teacher_logprobs"], batch["teacher_ids"]
            megatron.compute_forward_kl_topk(logits, *teacher, loss_config(workers, **settings), "thd")
    finally:
        request.topk_kl = topk_kl
        os.environ.pop("COMPACT_LOGITS_CHUNK_BYTES", None)
    return budgets


@pytest.mark.parametrize(
    ("budget", "dtype", "settings", "expected"),
    [
        (None, torch.bfloat16, {}, 256 * 2**20),  # the default of a CPU
        (None, torch.bfloat16, {"use_chunked_topk": True, "chunked_topk_chunk_size": 3}, 3 * VOCAB * 2),
        (None, torch.float32, {"use_chunked_topk": True, "chunked_topk_chunk_size": 3}, 3 * VOCAB * 4),
        ("100", torch.float32, {"use_chunked_topk": True, "chunked_topk_chunk_size": 3}, 100),
        ("100", torch.float32, {"chunked_topk_chunk_size": 3}, 100),
    ],
)
def test_the_smaller_of_our_budget_and_verls_own_bound_on_tokens(
    pool: RankPool, budget: str | None, dtype: torch.dtype, settings: dict[str, Any], expected: int
) -> None:
    assert pool.run(1, budget_of, budget, dtype, settings) == [[expected]]


def over_two_ranks(rank: int, world: int, check_ranks: str, mode: str) -> str:
    """Half of the vocabulary on each rank, and on rank 1 another teacher's log-probs."""
    start()
    os.environ["COMPACT_LOGITS_CHECK_RANKS"] = check_ranks
    with installed() as (_, megatron, workers, _):
        logits = packed_logits(megatron, mode).detach().chunk(world, dim=-1)[rank].contiguous().requires_grad_()
        batch = micro_batch()
        teacher = batch["teacher_logprobs"] - 0.1 * rank
        try:
            megatron.compute_forward_kl_topk(logits, teacher, batch["teacher_ids"], loss_config(workers), mode)
        except InputError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("mode", ["thd", "bshd"])
def test_ranks_with_different_teachers_say_so(pool: RankPool, mode: str) -> None:
    error = f"{DIFFERENT}the teacher's log-probs of rank 1 is not that of rank 0{REMEDY}"
    assert pool.run(2, over_two_ranks, "1", mode) == [error, error]
    assert pool.run(2, over_two_ranks, "0", mode) == ["nothing", "nothing"]
