"""A micro-batch or a rank without a counted row: slime's own log-prob function has no graph for it, the head has."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.ranks import RankError, RankPool
from tests.upstream.slime.compact_path import compact_path
from tests.upstream.slime.compare import EQUAL, Tolerance, verdict
from tests.upstream.slime.harness import Result, run_recipe, world_of
from tests.upstream.slime.recipes import RECIPES, Layout, Recipe
from tests.upstream.slime.tree import needs_trees

pytestmark = needs_trees

SOME, NONE = (next(each for each in RECIPES if each.name == name) for name in ("sft", "every sample all masked"))


@contextmanager
def reusing_slime_s_function(args: Namespace) -> Iterator[None]:
    """A head that projects the kept rows and hands them to the function that slime has for all of them."""
    from megatron.core import parallel_state
    from slime.utils.ppo_utils import calculate_log_probs_and_entropy

    from compact_logits.megatron import Outcome, output_layer
    from compact_logits.rows import scatter

    def scalars_of(head: Any, hidden: Tensor, weight: Tensor, request: Any, logit_scale: float) -> Any:
        kept = request.selection.indices
        logits = F.linear(hidden[kept, 0], weight).float()
        group = parallel_state.get_tensor_model_parallel_group()
        both = calculate_log_probs_and_entropy(logits, request.selection.targets, group, with_entropy=True)
        scalars = torch.stack([each.reshape(-1) for each in both], dim=1)
        outcome = Outcome("compact", projected_rows=len(kept))
        return scatter(scalars, kept, request.selection.num_rows)[:, None], outcome

    with patch.object(output_layer, "_scalars", scalars_of), compact_path(args):
        yield


def naive(rank: int, world: int, recipe: Recipe) -> tuple[Result, Result]:
    with world_of(rank, world, Layout()):
        return run_recipe(recipe, Layout()), run_recipe(recipe, Layout(), before=reusing_slime_s_function)


def ours(rank: int, world: int, recipe: Recipe) -> tuple[Result, Result]:
    with world_of(rank, world, Layout()):
        return run_recipe(recipe, Layout()), run_recipe(recipe, Layout(), before=compact_path)


def test_graphless_zeros_are_noticed_and_the_head_has_none(slime_ranks: RankPool) -> None:
    tolerance = Tolerance.of(Layout().dtype)
    ((full, theirs),) = slime_ranks.run(1, naive, SOME)
    assert verdict([full], [theirs], tolerance) == EQUAL, "with rows, their function does"
    with pytest.raises(RankError, match="has no gradient on this rank|does not require grad"):
        slime_ranks.run(1, naive, NONE)
    ((full, mine),) = slime_ranks.run(1, ours, NONE)
    assert verdict([full], [mine], tolerance) == EQUAL
