"""What the ranks are asked to run. Each function takes `(rank, world, layout, ...)` and leaves slime imported."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from compact_logits.cli.cpu_model import packed_seq_params
from tests.upstream.slime.compact_path import compact_path
from tests.upstream.slime.harness import Result, run_recipe, world_of
from tests.upstream.slime.parts import build_chunks
from tests.upstream.slime.recipes import Layout, Recipe
from tests.upstream.slime.rollout import make_rollout
from tests.upstream.slime.tree import parse_flags

__all__ = ["both_paths", "full_path", "sequences_alone", "with_a_row_lost", "with_wild_values_left"]


def both_paths(rank: int, world: int, layout: Layout, recipes: Sequence[Recipe]) -> list[tuple[Result, Result]]:
    with world_of(rank, world, layout):
        return [(run_recipe(each, layout), run_recipe(each, layout, before=compact_path)) for each in recipes]


def full_path(rank: int, world: int, layout: Layout, recipes: Sequence[Recipe]) -> list[Result]:
    with world_of(rank, world, layout):
        return [run_recipe(each, layout) for each in recipes]


def with_a_row_lost(rank: int, world: int, layout: Layout, recipe: Recipe) -> tuple[Result, Result]:
    """The full path, and a compact one that overlooks the last counted row of every micro-batch."""
    with world_of(rank, world, layout):
        return run_recipe(recipe, layout), run_recipe(recipe, layout, before=_losing_a_row)


def with_wild_values_left(
    rank: int, world: int, layout: Layout, recipes: Sequence[Recipe]
) -> list[tuple[Result, Result]]:
    """The full path, and a compact one to which the log-probs of other engines come as they were reported."""
    with world_of(rank, world, layout):
        return [(run_recipe(each, layout), run_recipe(each, layout, before=_as_reported)) for each in recipes]


def sequences_alone(rank: int, world: int, layout: Layout, recipe: Recipe) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies of each response by their definition in fp64, from the model run on each sample alone."""
    with world_of(rank, world, layout), torch.no_grad():
        args = parse_flags(recipe.flags)
        rollout = make_rollout(recipe, args)
        (chunk,) = build_chunks(recipe, layout)
        log_probs, entropies = [], []
        for tokens, length in zip(rollout["tokens"], rollout["response_lengths"], strict=True):
            logits = chunk(
                input_ids=tokens[None],
                position_ids=None,
                attention_mask=None,
                packed_seq_params=packed_seq_params([0, len(tokens)]),
            )
            rows = (logits[0, -length - 1 : -1].double() / args.rollout_temperature).log_softmax(-1)
            log_probs.append(rows.gather(-1, tokens[-length:, None])[:, 0])
            entropies.append(-(rows.exp() * rows).sum(-1))
        return log_probs, entropies


@contextmanager
def _losing_a_row(args: Namespace) -> Iterator[None]:
    from compact_logits.rows import RowSelection

    build = RowSelection.build

    def build_without_last(keep: Tensor, *rest: Any, **named: Any) -> Any:
        keep = keep.clone()
        keep[keep.nonzero()[-1:]] = False
        return build(keep, *rest, **named)

    with patch.object(RowSelection, "build", build_without_last), compact_path(args):
        yield


@contextmanager
def _as_reported(args: Namespace) -> Iterator[None]:
    from compact_logits.integrations.slime import advantages

    with patch.object(advantages, "_FROM_OTHER_ENGINES", ()), compact_path(args):
        yield
