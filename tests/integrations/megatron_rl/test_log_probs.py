"""Megatron-RL's `get_logprobs` over the compact path, by the numbers, on stand-ins for Megatron-RL's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.integrations.megatron_rl import mark_tokens
from tests.support.allocation import AllocationTracker
from tests.support.collectives import count_collectives
from tests.support.megatron_rl_passes import compacted
from tests.support.megatron_rl_stand_in import build_stand_in, stand_in
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth
from tests.support.ranks import RankPool

BATCH, SEQUENCE, VOCAB = 2, 16, 320


def given(scale: float = 4.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (batch, sequence, vocab), tokens sampled from them, a loss mask and a slope (batch, sequence - 1)."""
    random = torch.Generator().manual_seed(7)
    logits = torch.randn(BATCH, SEQUENCE, VOCAB, generator=random) * scale
    tokens = (
        torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=random).view(BATCH, SEQUENCE).roll(1, dims=1)
    )
    loss_mask = torch.rand(BATCH, SEQUENCE - 1, generator=random) < 0.4
    return logits, tokens, loss_mask, torch.randn(BATCH, SEQUENCE - 1, generator=random)


def true_values(logits: Tensor, tokens: Tensor, slope: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """fp64 log-probs (batch, sequence - 1), and the gradient of `(slope * log_probs).sum()` for the logits."""
    wide = logits.double().requires_grad_()
    log_probs = torch.log_softmax(wide[:, :-1] / temperature, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    (d_logits,) = torch.autograd.grad((log_probs * slope).sum(), wide)
    return log_probs.detach(), d_logits


def both_paths(
    rank: int, world: int, dtype: torch.dtype, sequence_parallel: bool, temperature: float, select: bool
) -> dict[str, Any]:
    logits, tokens, loss_mask, slope = given()
    logits = logits.to(dtype)
    if select:
        slope = slope * loss_mask
    else:
        loss_mask = None
    results: dict[str, Any] = {}
    with stand_in(bf16=dtype == torch.bfloat16) as rl_utils, cpu_megatron(rank, world, tp=world):
        for path in ("gathered", "compact"):
            policy = build_stand_in(logits, dtype=dtype, sequence_parallel=sequence_parallel and world > 1)
            asked = tokens.clone()
            if path == "compact":
                mark_tokens(asked, loss_mask=loss_mask, temperature=temperature)
                with compacted():
                    log_probs = rl_utils.get_logprobs(policy, asked, None)
            else:
                logits_full, _ = policy.output_layer(policy.hidden, runtime_gather_output=True)
                tempered = logits_full.transpose(0, 1)[:, :-1] / temperature
                log_probs = rl_utils.selective_log_softmax(tempered, tokens[:, 1:])
            (log_probs * slope).sum().backward()
            results[path] = {
                "log_probs": log_probs.detach(),
                "d_weight": policy.output_layer.weight.grad,
                "d_hidden": policy.hidden.grad,
            }
    truth, d_logits = true_values(logits, tokens, slope, temperature)
    width = VOCAB // world
    mine = slice(rank * width, (rank + 1) * width)
    results["truth"] = {"log_probs": truth, "d_weight": d_logits.flatten(0, 1).t()[mine].contiguous()}
    results["loss_mask"] = loss_mask
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "select"), [(1.0, False), (0.7, True)])
def test_numbers_of_both_paths(
    rank_pool: RankPool, world: int, dtype: torch.dtype, temperature: float, select: bool
) -> None:
    for result in rank_pool.run(world, both_paths, dtype, True, temperature, select):
        ours, plain, truth = result["compact"], result["gathered"], result["truth"]
        assert ours["log_probs"].dtype == torch.float32 and ours["log_probs"].shape == (BATCH, SEQUENCE - 1)
        keep = torch.ones(BATCH, SEQUENCE - 1, dtype=torch.bool) if result["loss_mask"] is None else result["loss_mask"]
        error = assert_close_to_truth(
            ours["log_probs"][keep], plain["log_probs"][keep].float(), truth["log_probs"][keep], limit=1.9e-6
        )
        assert error < 1.9e-6
        assert torch.all(ours["log_probs"][~keep] == 0.0)
        assert_gradient_close_to_truth(ours["d_weight"], plain["d_weight"], truth["d_weight"])
        cosine = torch.cosine_similarity(
            ours["d_hidden"].flatten().double(), plain["d_hidden"].flatten().double(), dim=0
        )
        assert cosine > (0.99999 if dtype == torch.float32 else 0.9998)


def operator_errors(rank: int, world: int) -> tuple[Tensor, Tensor]:
    logits, tokens, _, _ = given(scale=3.0)
    with stand_in() as rl_utils, cpu_megatron(rank, world, tp=world), compacted():
        log_probs = rl_utils.get_logprobs(build_stand_in(logits), tokens, None, no_grad=True)
    truth, _ = true_values(logits, tokens, torch.zeros(BATCH, SEQUENCE - 1), 1.0)
    return (log_probs - truth).abs(), truth


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fp32_operator_is_within_an_ulp(rank_pool: RankPool, world: int) -> None:
    """2.4e-7 is one ulp of a log-prob between -2 and -4; above 4 in size, rounding the exact result takes as much."""
    for error, truth in rank_pool.run(world, operator_errors):
        likely = truth.abs() < 4
        assert likely.float().mean() > 0.5
        assert error[likely].max() <= 2.4e-7
        ulp = torch.finfo(torch.float32).eps * torch.exp2(truth.abs().clamp_min(1).log2().floor())
        assert torch.all(error <= torch.maximum(ulp, torch.tensor(2.4e-7)))


def five_positions(rank: int, world: int) -> Tensor:
    logits, tokens, _, _ = given()
    with stand_in() as rl_utils, cpu_megatron(rank, world, tp=world), compacted():
        policy = build_stand_in(logits[:, :5])
        return rl_utils.get_logprobs(policy, tokens[:, :5], None, no_grad=True)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_length_that_no_rank_count_divides(rank_pool: RankPool, world: int) -> None:
    logits, tokens, _, _ = given()
    truth, _ = true_values(logits[:, :5], tokens[:, :5], torch.zeros(BATCH, 4), 1.0)
    for log_probs in rank_pool.run(world, five_positions):
        assert log_probs.shape == (2, 4)
        assert (log_probs - truth).abs().max() <= 2e-6


def masked_gradients(rank: int, world: int, poison: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits, tokens, loss_mask, slope = given()
    with stand_in() as rl_utils, cpu_megatron(rank, world, tp=world), compacted():
        policy = build_stand_in(logits, sequence_parallel=world > 1)
        kept = torch.nn.functional.pad(loss_mask, (0, 1)).t().chunk(world)[rank] if world > 1 else None
        if kept is None:
            kept = torch.nn.functional.pad(loss_mask, (0, 1)).t()
        if poison:
            with torch.no_grad():
                policy.hidden[~kept] = torch.nan
        log_probs = rl_utils.get_logprobs(policy, mark_tokens(tokens, loss_mask=loss_mask), None)
        (log_probs * slope).sum().backward()
    return log_probs.detach(), policy.hidden.grad, kept


@pytest.mark.parametrize("world", [1, 2])
def test_masked_positions_have_no_gradient_whatever_stands_there(rank_pool: RankPool, world: int) -> None:
    for clean, poisoned in zip(
        rank_pool.run(world, masked_gradients, False), rank_pool.run(world, masked_gradients, True), strict=True
    ):
        log_probs, d_hidden, kept = poisoned
        assert torch.equal(log_probs, clean[0]) and torch.equal(d_hidden, clean[1])
        assert torch.all(d_hidden[~kept] == 0.0) and torch.any(d_hidden[kept] != 0.0)


def vocabulary_of(rank: int, world: int, path: str, chunk_bytes: str) -> dict[str, Any]:
    logits, tokens, _, slope = given()
    with stand_in() as rl_utils, cpu_megatron(rank, world, tp=world):
        policy = build_stand_in(logits, sequence_parallel=world > 1)
        if path == "compact":
            with (
                compacted(COMPACT_LOGITS_CHUNK_BYTES=chunk_bytes),
                AllocationTracker() as made,
                count_collectives() as called,
            ):
                (rl_utils.get_logprobs(policy, tokens, None) * slope).sum().backward()
        else:
            with AllocationTracker() as made, count_collectives() as called:
                (rl_utils.get_logprobs(policy, tokens, None) * slope).sum().backward()
    shapes = {record.shape for record in made.records}
    return {
        "whole": sorted(shape for shape in shapes if VOCAB in shape) if world > 1 else [],
        "rows": made.largest_rows(VOCAB // world),
        "called": dict(called),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_case_1_16_the_whole_vocabulary_never_exists(rank_pool: RankPool, world: int) -> None:
    for result in rank_pool.run(world, vocabulary_of, "compact", "1"):
        assert result["whole"] == []
        assert result["rows"] <= 1, "more rows of this rank's vocabulary than the budget has room for"
        # The request, the head's state (once), kept rows and statistics forward, the rows' gradient backward: no size
        # knows the vocabulary.
        assert result["called"] == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 1}


@pytest.mark.parametrize("world", [2, 4])
def test_the_gathered_path_has_the_whole_vocabulary(rank_pool: RankPool, world: int) -> None:
    for result in rank_pool.run(world, vocabulary_of, "gathered", "1"):
        assert (BATCH, SEQUENCE, VOCAB) in result["whole"]
        assert result["rows"] >= BATCH * SEQUENCE
