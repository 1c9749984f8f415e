"""Who decides for a model of Megatron-RL: its innermost kind, its layout, a running engine, the last pipeline stage."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.config import Config
from compact_logits.integrations.megatron_rl import recipe
from compact_logits.integrations.megatron_rl.installation import Installation, _of_last_stage
from compact_logits.integrations.megatron_rl.recipe import Refusal, refusals
from tests.support.megatron_rl_stand_in import build_stand_in, stand_in
from tests.support.ranks import RankPool

OURS, THEIRS = Refusal("a reason", "a remedy"), "the last pipeline stage refuses its output layer"


def test_a_wrapped_model_is_named_by_what_is_inside() -> None:
    wrapped = SimpleNamespace(module=SimpleNamespace(module=torch.nn.Linear(2, 2)))
    (refusal,) = refusals(wrapped, Namespace())
    assert refusal.reason == "the model is a Linear, proven is megatron-core's GPTModel"


@pytest.mark.parametrize(("size", "cuts", "refused"), [(2, True, False), (2, False, True), (1, False, False)])
def test_a_version_that_does_not_cut_sequences_is_refused_context_parallelism(
    size: int, cuts: bool, refused: bool
) -> None:
    inner = SimpleNamespace(pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: size)))
    with stand_in() as rl_utils:
        if not cuts:
            vars(rl_utils).pop("_scatter_for_context_parallel", None)
        elif not hasattr(rl_utils, "_scatter_for_context_parallel"):
            rl_utils._scatter_for_context_parallel = lambda tokens, packed_seq_params, cp_group: None
        found = Installation(Config())._of_layout(inner)
    expected = "this version's get_logprobs does not know context parallelism"
    assert [refusal.reason for refusal in found] == [expected] * refused


def while_an_engine_runs(rank: int, world: int) -> list[str]:
    running = SimpleNamespace(is_active=lambda: True)
    with stand_in() as rl_utils, cpu_megatron(rank, world, tp=1):
        policy = build_stand_in(torch.randn(1, 4, 8))
        with mock.patch.object(recipe.inference, "InferenceMode", running, create=True):
            return [refusal.reason for refusal in refusals(policy, rl_utils.get_args())]


def test_no_log_probs_while_an_engine_uses_the_model(rank_pool: RankPool) -> None:
    assert rank_pool.run(1, while_an_engine_runs) == [["an inference engine is using the model"]]


def decided(rank: int, world: int, refusing: set[int]) -> list[str]:
    arguments = {"pp_group": dist.group.WORLD, "model": torch.nn.Linear(2, 2)}
    found = (OURS,) if rank in refusing else ()
    return [refusal.reason for refusal in _of_last_stage(found, arguments)]


@pytest.mark.parametrize(
    ("refusing", "decisions"),
    [
        (set(), [[], []]),
        ({0, 1}, [[OURS.reason], [OURS.reason]]),
        ({1}, [[THEIRS], [OURS.reason]]),
        ({0}, [[], []]),
    ],
)
def test_all_stages_follow_the_last(rank_pool: RankPool, refusing: set[int], decisions: list[list[str]]) -> None:
    assert rank_pool.run(2, decided, refusing) == decisions
