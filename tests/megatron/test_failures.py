"""A call that raises somewhere inside the compact path, and a critic beside the actor: each model is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.engine import linear
from compact_logits.engine.scorer import SoftmaxGrad
from compact_logits.engine.weight_grad import ReturnedWeightGrad
from compact_logits.megatron import attach, output_layer
from compact_logits.megatron.postprocess import postprocess_wrapper
from compact_logits.patching import Patch
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.gpt_paths import VOCAB, Cut, Micro, micro_batch
from tests.support.marked_gpt import Came, call, came_of, differences, kept_scalars, marked, objective
from tests.support.ranks import RankPool
from tests.support.refused_heads import ValueHead

ASKED: dict[str, Any] = {"entropy": "loss", "chunk_bytes": 1200}


class OnPurpose(Exception):
    """No error of anybody's own."""


def fails_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises at its call of that number, so that a part of the work is done before."""
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise OnPurpose
        return function(*args, **kwargs)

    return counting


# What goes wrong, and at which of its calls.
IN_FORWARD: list[tuple[Any, str, int]] = [
    (output_layer, "check_head", 1),
    (output_layer, "project_rows", 1),
    (LogProbScorer, "add_slice_", 1),
    (LogProbScorer, "add_slice_", 2),
    (LogProbScorer, "merge", 1),
    (linear, "project", 2),
    (output_layer, "scatter", 1),
]
IN_BACKWARD: list[tuple[Any, str, int]] = [
    (LogProbScorer, "logits_grad", 1),
    (SoftmaxGrad, "write_", 2),
    (linear, "project", 1),
    (ReturnedWeightGrad, "add", 2),
    (ReturnedWeightGrad, "finish", 1),
]


@contextmanager
def going_wrong(owner: Any, name: str, number: int) -> Iterator[None]:
    with mock.patch.object(owner, name, fails_at(number, getattr(owner, name))), pytest.raises(OnPurpose):
        yield


def ordinary(model: Any, micro: Micro) -> Came:
    return came_of(model, call(model, micro), lambda out: objective(out, micro, None))


def asked(model: Any, micro: Micro) -> Came:
    loss_mask, request = marked(micro, **ASKED)
    output = call(model, micro, loss_mask)
    assert request.compact, request.outcome
    return came_of(model, output, lambda out: objective(out, micro, request))


def raises(rank: int, world: int, cut: Cut) -> None:
    micro = micro_batch(rank, cut, "holes")
    with cpu_megatron(rank, world, tp=cut.tp):
        model: Any = build_gpt(tp=cut.tp, vocab=4 * VOCAB, layers=1)  # three slices on each of two ranks
        plain = ordinary(model, micro)
        attach(model)
        names = set(vars(model.output_layer)), set(vars(model))
        right = asked(model, micro)

        def as_before() -> None:
            assert (set(vars(model.output_layer)), set(vars(model))) == names
            assert differences(ordinary(model, micro), plain) == []
            assert differences(asked(model, micro), right) == []

        for place in IN_FORWARD:
            loss_mask, request = marked(micro, **ASKED)
            with going_wrong(*place):
                call(model, micro, loss_mask)
            assert request.outcome is None
            as_before()
            # The same question, asked again, is answered.
            again = kept_scalars(call(model, micro, loss_mask), micro, request)
            assert request.compact and torch.equal(again, right.output[0, micro.selection.indices])
            # And what came of it stays, should a forward that is run again not come to its end.
            with going_wrong(*place):
                call(model, micro, loss_mask)
            assert request.compact

        for place in IN_BACKWARD:
            loss_mask, request = marked(micro, **ASKED)
            loss = objective(call(model, micro, loss_mask), micro, request)
            with going_wrong(*place):
                loss.backward(retain_graph=True)
            # What has been overwritten is recomputed: the same graph still has its gradients.
            model.zero_grad(set_to_none=True)
            loss.backward()
            for weight, gradient in right.gradients.items():
                assert gradient is not None and torch.equal(model.get_parameter(weight).grad, gradient), weight
            as_before()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_call_that_raises_leaves_the_model_as_it_was(rank_pool: RankPool, tp: int) -> None:
    rank_pool.run(tp, raises, Cut(tp))


@contextmanager
def on_the_class(actor: Any) -> Iterator[None]:
    """As an integration does it, for all models of the class."""
    patch = Patch(type(actor), "_postprocess", postprocess_wrapper)
    patch.apply()
    try:
        yield
    finally:
        patch.revert()


@contextmanager
def on_the_actor(actor: Any) -> Iterator[None]:
    attach(actor)
    yield


def actor_and_critic(rank: int, world: int, cut: Cut) -> None:
    micro = micro_batch(rank, cut, "holes")
    with cpu_megatron(rank, world, tp=cut.tp):
        actor, critic = (build_gpt(tp=cut.tp, vocab=VOCAB, layers=1, seed=seed) for seed in (0, 1))
        with torch.no_grad():
            width = actor.config.hidden_size
            critic.output_layer = ValueHead(width, 1, bias=False)
            critic.output_layer.weight.copy_(torch.linspace(-1, 1, width)[None])
        values_alone = came_of(critic, call(critic, micro), squared)
        dense = ordinary(actor, micro)
        for seam in (on_the_actor, on_the_class):
            with seam(actor):
                alone = asked(actor, micro)
                # A step of both, their forwards before their backwards; the critic's own mask asks nothing.
                loss_mask, request = marked(micro, **ASKED)
                output, values = call(actor, micro, loss_mask), call(critic, micro)
                assert request.answered_by(output) and not request.answered_by(values)
                trained = came_of(critic, values, squared)
                assert differences(trained, values_alone) == []
                came = came_of(actor, output, lambda out, request=request: objective(out, micro, request))
                assert differences(came, alone) == []
                for name, expected in dense.gradients.items():
                    found = came.gradients[name]
                    assert found is not None and expected is not None
                    assert (found - expected).norm() <= 1e-4 * expected.norm(), name
                # Should the actor's mask reach it, its values are still its own.
                values = call(critic, micro, loss_mask)
                assert values.shape[-1] == 1 and differences(came_of(critic, values, squared), trained) == []


def squared(values: Tensor) -> Tensor:
    return values.square().sum()


@pytest.mark.parametrize("tp", [1, 2])
def test_case_14_4_actor_on_and_a_critic_of_one_column_off(rank_pool: RankPool, tp: int) -> None:
    rank_pool.run(tp, actor_and_critic, Cut(tp))
