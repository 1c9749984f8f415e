"""Calls that overlap: micro-batches in flight, forwards that are run again, two models at once, two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compact_logits import reference
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.cli.without_cuda import without_cuda
from compact_logits.megatron import attach, detach
from tests.support.gpt_paths import VOCAB, Cut, Micro, micro_batch
from tests.support.marked_gpt import call, marked
from tests.support.ranks import RankPool

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Question:
    """A micro-batch, and what is asked of it."""

    micro: Micro
    asked: dict[str, Any]

    @staticmethod
    def of(rank: int, cut: Cut, mask: str, temperature: float) -> Question:
        asked = {"entropy": "loss", "chunk_bytes": 5000 if mask == "everything" else None}
        return Question(micro_batch(rank, cut, mask), asked | {"temperature": temperature})

    def loss(self, model: Any, asks: bool, *, around: Callable[..., Tensor] = call) -> Tensor:  # scalar
        """Of one forward, over the compact path or by the definition from logits; `around` runs the model."""
        from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

        micro, kept = self.micro, self.micro.selection.indices
        if asks:
            loss_mask, request = marked(micro, **self.asked)
            output = around(model, micro, loss_mask)
            assert request.compact and "forward" not in vars(model.output_layer), request.outcome
            scalars = output[0, kept]
        else:
            output = around(model, micro)
            whole = gather_from_tensor_model_parallel_region(output)[0]
            scored = reference.log_probs(whole, micro.labels, temperature=self.asked["temperature"])
            scalars = torch.stack(scored, dim=1)[kept]
        return (scalars * micro.weights[kept].to(scalars.dtype)).sum() + 0 * output.sum()


def two_questions(rank: int, cut: Cut, second: str = "everything") -> list[Question]:
    return [Question.of(rank, cut, "holes", 0.7), Question.of(rank, cut, second, 1.3)]


def double_model(cut: Cut, **more: Any) -> Any:
    """In fp64, so that what is compared with logits hides in no rounding but that of the fp32 answers."""
    return build_gpt(**{"tp": cut.tp, "vocab": VOCAB, "layers": 1, "dtype": torch.float64, **more})


def take_gradients(model: Any) -> Gradients:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def one_by_one(model: Any, questions: list[Question], asks: bool) -> Gradients:
    for question in questions:
        question.loss(model, asks).backward()
    return take_gradients(model)


def assert_close(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys() and expected["output_layer.weight"].any()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def assert_equal(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)] == []


def in_flight(rank: int, world: int, cut: Cut, second: str) -> None:
    with cpu_megatron(rank, world, tp=cut.tp):
        questions = two_questions(rank, cut, second)
        model = double_model(cut)
        dense = one_by_one(model, questions, asks=False)
        attach(model)
        apart = one_by_one(model, questions, asks=True)
        assert_close(apart, dense)
        for order in ((0, 1), (1, 0)):
            losses = [question.loss(model, asks=True) for question in questions]
            for number in order:
                losses[number].backward()
            assert_equal(take_gradients(model), apart)
        # And among them a forward that asks nothing, with a backward between theirs.
        losses = [questions[0].loss(model, True), questions[1].loss(model, False), questions[1].loss(model, True)]
        losses[1].backward()
        assert_close(take_gradients(model), one_by_one(model, questions[1:], asks=False))
        for number in (2, 0):
            losses[number].backward()
        assert_equal(take_gradients(model), apart)


@pytest.mark.parametrize("second", ["everything", "holes"], ids=["of other sizes", "of one size"])
@pytest.mark.parametrize("tp", [1, 2])
def test_two_micro_batches_in_flight_in_both_orders(rank_pool: RankPool, tp: int, second: str) -> None:
    rank_pool.run(tp, in_flight, Cut(tp), second)


def run_again(rank: int, world: int, cut: Cut) -> None:
    begun: list[int] = []

    def again(reentrant: bool) -> Callable[..., Tensor]:
        def around(model: Any, *given: Any) -> Tensor:
            def forward(anchor: Tensor) -> Tensor:
                begun.append(1)
                return call(model, *given) + 0 * anchor

            # A reentrant checkpoint's input must need a gradient, and its outputs are tensors of its own.
            return checkpoint(forward, torch.zeros((), requires_grad=True), use_reentrant=reentrant)

        return around

    with cpu_megatron(rank, world, tp=cut.tp):
        questions = two_questions(rank, cut)
        model = double_model(cut)
        dense = one_by_one(model, questions, asks=False)
        attach(model)
        plain = one_by_one(model, questions, asks=True)
        for reentrant in (True, False):
            begun.clear()
            losses = [question.loss(model, True, around=again(reentrant)) for question in questions]
            assert len(begun) == 2
            for number in (1, 0):
                losses[number].backward()
                assert "forward" not in vars(model.output_layer)
            assert len(begun) == 4
            found = take_gradients(model)
            assert_equal(found, plain)
            assert_close(found, dense)


@pytest.mark.parametrize("tp", [1, 2])
def test_case_12_5_two_forwards_that_are_run_again_in_the_other_order(rank_pool: RankPool, tp: int) -> None:
    rank_pool.run(tp, run_again, Cut(tp))


def layers_again(rank: int, world: int) -> None:
    """Megatron's own recomputation of every layer, for which a GPU's generator has to have a state."""
    from megatron.core.tensor_parallel import random

    states = {"_get_cuda_rng_state": lambda *_, **__: torch.zeros(0), "_set_cuda_rng_state": lambda *_, **__: None}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    cut = Cut(1)
    with cpu_megatron(rank, world, tp=1), mock.patch.multiple(random, **states):
        questions = two_questions(0, cut)
        dense = one_by_one(double_model(cut, layers=2), questions, asks=False)
        plain, ours = (double_model(cut, layers=2, **more) for more in ({}, recompute))
        runs: list[int] = []
        ours.decoder.layers[1].register_forward_hook(lambda *_: runs.append(1))
        for model in (plain, ours):
            attach(model)
        losses = [question.loss(ours, asks=True) for question in questions]
        assert len(runs) == 2
        for number in (1, 0):
            losses[number].backward()
        assert len(runs) == 4, "no layer was run again"
        found = take_gradients(ours)
        assert_equal(found, one_by_one(plain, questions, asks=True))
        assert_close(found, dense)


def test_layers_that_megatron_runs_again(rank_pool: RankPool) -> None:
    rank_pool.run(1, layers_again)


def two_models(cut: Cut) -> list[Any]:
    """Of one class, and of different vocabularies."""
    return [double_model(cut, seed=seed, vocab=vocab) for seed, vocab in ((0, VOCAB), (1, 2 * VOCAB))]


def both_at_once(rank: int, world: int, cut: Cut) -> None:
    with cpu_megatron(rank, world, tp=cut.tp):
        questions = two_questions(rank, cut)
        models = two_models(cut)
        pairs = list(zip(models, questions, strict=True))
        dense = [one_by_one(model, [question], asks=False) for model, question in pairs]
        for model in models:
            attach(model)
        alone = [one_by_one(model, [question], asks=True) for model, question in pairs]
        for order in ((0, 1), (1, 0)):
            losses = [question.loss(model, asks=True) for model, question in pairs]
            for number in order:
                losses[number].backward()
            for model, once, truth in zip(models, alone, dense, strict=True):
                found = take_gradients(model)
                assert_equal(found, once)
                assert_close(found, truth)
        # One model is asked while the other is about to answer.
        inner: list[Tensor] = []
        hook = models[0].output_layer.register_forward_pre_hook(
            lambda *_: inner.append(questions[1].loss(models[1], asks=True))
        )
        loss_of_outer = questions[0].loss(models[0], asks=True)
        hook.remove()
        (loss_of_outer + inner[0]).backward()
        for model, once in zip(models, alone, strict=True):
            assert_equal(take_gradients(model), once)
        detach(models[1])
        assert_equal(one_by_one(models[1], questions[1:], asks=False), dense[1])
        assert_equal(one_by_one(models[0], questions[:1], asks=True), alone[0])


@pytest.mark.parametrize("tp", [1, 2])
def test_case_8_4_two_models_of_one_class_asked_at_once(rank_pool: RankPool, tp: int) -> None:
    rank_pool.run(tp, both_at_once, Cut(tp))


def in_two_threads(rank: int, world: int) -> None:
    """Forwards and backwards of two models at one time, three times over, with different questions."""
    cut = Cut(1)
    with cpu_megatron(rank, world, tp=1):
        models = two_models(cut)
        questions = two_questions(0, cut)
        pairs = list(zip(models, questions, strict=True))
        dense = [one_by_one(model, [question], asks=False) for model, question in pairs]
        for model in models:
            attach(model)
        alone = [one_by_one(model, [question], asks=True) for model, question in pairs]
        meet = threading.Barrier(2, timeout=60)
        came: list[list[Gradients]] = [[], []]
        failed: list[BaseException] = []

        def train(number: int) -> None:
            model, question = pairs[number]
            try:
                with without_cuda():  # it holds on one thread
                    for _ in range(3):
                        loss = question.loss(model, asks=True)
                        meet.wait()
                        loss.backward()
                        came[number].append(take_gradients(model))
            except BaseException as error:
                failed.append(error)
                meet.abort()

        for model in models:  # both inside the head's call, and so inside the seam
            model.output_layer.register_forward_pre_hook(lambda *_: void(meet.wait()))
        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert failed == []
        for found, once, truth in zip(came, alone, dense, strict=True):
            assert len(found) == 3
            for each in found:
                assert_equal(each, once)
                assert_close(each, truth)


def void(_: object) -> None:
    """A hook that returns something replaces the module's arguments by it."""


def test_two_threads_train_two_models(rank_pool: RankPool) -> None:
    rank_pool.run(1, in_two_threads)
