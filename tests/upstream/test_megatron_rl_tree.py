"""Against Megatron-RL's own `get_logprobs`, through a real GPTModel: however it is cut, packed and not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.allocation import AllocationTracker
from tests.support.megatron_rl_passes import VOCAB, Passed, compacted, passed, sampled, true_log_probs
from tests.support.megatron_rl_tree import build_policy, needs_tree, on_tree_ranks, rl_utils_on_cpu, settings

pytestmark = needs_tree

KINDS = ("one", "two", "packed")
CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]  # TP, CP


def knows_context_parallelism() -> bool:
    with open(os.path.join(os.environ["MEGATRON_MAIN_ROOT"], "megatron/rl/rl_utils.py")) as file:
        return "_scatter_for_context_parallel" in file.read()


def every_kind(rank: int, world: int, tp: int, cp: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    results = []
    bf16 = dtype == torch.bfloat16
    with rl_utils_on_cpu(rank, world, tp=tp, cp=cp, args=settings(bf16=bf16)) as rl_utils:
        model = build_policy(tp=tp, cp=cp, vocab=VOCAB, dtype=dtype)
        for kind in KINDS:
            micro = sampled(rl_utils, kind)
            truth = true_log_probs(rl_utils, model, micro)
            gathered = passed(rl_utils, model, micro)
            with compacted() as check:
                compact = passed(rl_utils, model, micro)
                selected = passed(rl_utils, model, micro, select=True)
                state = check()[0].state
            assert passed(rl_utils, model, micro).log_probs.dtype == dtype, "uninstalled, and still compact"
            results.append(
                {
                    "kind": kind,
                    "state": state,
                    "keep": micro.loss_mask != 0,
                    "truth": truth,
                    "gathered": gathered,
                    "compact": compact,
                    "selected": selected,
                }
            )
    return results


def cosine(ours: Tensor, plain: Tensor) -> float:
    return torch.cosine_similarity(ours.double().flatten(), plain.double().flatten(), dim=0).item()


def largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp", "cp"), CUTS)
def test_log_probs_and_gradients_of_the_gathered_path(tp: int, cp: int, dtype: torch.dtype) -> None:
    if cp > 1 and not knows_context_parallelism():
        pytest.skip("this checkout's get_logprobs does not know context parallelism")
    for results in on_tree_ranks(every_kind, tp, cp, dtype):
        for result in results:
            truth, keep = result["truth"], result["keep"]
            gathered, compact, selected = result["gathered"], result["compact"], result["selected"]
            assert result["state"] == "on"
            assert compact.log_probs.dtype == torch.float32 and compact.log_probs.shape == gathered.log_probs.shape
            error, plain = largest(compact.log_probs - truth), largest(gathered.log_probs - truth)
            assert error <= 1.9e-6, f"{result['kind']}: {error:.2e}"
            assert error <= 1.1 * plain + 1e-6
            assert largest((selected.log_probs - truth)[keep]) <= 1.9e-6
            assert torch.all(selected.log_probs[~keep] == 0.0)
            for ours in (compact, selected):
                assert_same_gradients(ours, gathered, 0.99999 if dtype == torch.float32 else 0.9998, bool(keep.any()))


def assert_same_gradients(ours: Passed, gathered: Passed, at_least: float, any_kept: bool) -> None:
    if not any_kept:  # an empty bin of packed sequences: still connected, and exactly nothing
        assert torch.all(ours.d_hidden == 0.0) and torch.all(ours.gradients == 0.0)
        return
    assert cosine(ours.gradients, gathered.gradients) >= at_least
    assert torch.isclose(ours.gradients.norm(), gathered.gradients.norm(), rtol=1e-2)
    if gathered.d_hidden.any():  # a rank of sequence or context parallelism may hold no counted position
        assert cosine(ours.d_hidden, gathered.d_hidden) >= at_least
    # Positions that the loss does not count have no gradient at all, whether their log-probs were computed or not.
    nowhere = (gathered.d_hidden == 0.0).all(dim=-1)
    assert torch.all(ours.d_hidden[nowhere] == 0.0)


def temperature_and_memory(rank: int, world: int) -> dict[str, Any]:
    with rl_utils_on_cpu(rank, world, tp=2, cp=1, args=settings()) as rl_utils:
        model = build_policy(tp=2, vocab=VOCAB)
        micro = sampled(rl_utils, "two")
        truth = true_log_probs(rl_utils, model, micro, temperature=0.7)
        with compacted():
            ours = passed(rl_utils, model, micro, temperature=0.7)
        with compacted(COMPACT_LOGITS_CHUNK_BYTES="1KiB"):
            in_chunks = passed(rl_utils, model, micro, temperature=0.7)
            with AllocationTracker() as compact:
                passed(rl_utils, model, micro)
        with AllocationTracker() as gathered:
            passed(rl_utils, model, micro)
    return {
        "error": largest(ours.log_probs - truth),
        # A product of one row adds in another order than that of all rows, so these are not the very logits of `truth`.
        "error_in_chunks": largest(in_chunks.log_probs - truth),
        "whole": {
            name: any(VOCAB in record.shape for record in made.records)
            for name, made in (("compact", compact), ("gathered", gathered))
        },
        "rows": {name: made.largest_rows(VOCAB // 2) for name, made in (("compact", compact), ("gathered", gathered))},
    }


def test_temperature_and_no_whole_vocabulary() -> None:
    for result in on_tree_ranks(temperature_and_memory):
        assert result["error"] <= 1.9e-6 and result["error_in_chunks"] <= 1e-5
        assert result["whole"] == {"compact": False, "gathered": True}
        assert result["rows"]["compact"] <= 2 < 48 <= result["rows"]["gathered"]
