"""Attaching to one model and no other, and every way in which the request does not reach its head."""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits import reference
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.errors import PatchError
from compact_logits.megatron import attach, attached, detach, request_of
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import call, came_of, differences, kept_scalars, marked
from tests.support.ranks import RankPool

MICRO = micro_batch(0, Cut(1), "holes")


def plain_model(**config: Any) -> Any:
    return build_gpt(tp=1, vocab=VOCAB, layers=1, **config)


def test_case_8_4_and_12_6_one_of_two_models_attached_twice(rank_pool: RankPool) -> None:
    rank_pool.run(1, one_of_two)


def one_of_two(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        ours, other = plain_model(), plain_model()
        before = type(other)._postprocess
        attach(ours)
        attach(ours)
        assert attached(ours) and not attached(other) and type(other)._postprocess is before
        loss_mask, request = marked(MICRO)
        answer = call(ours, MICRO, loss_mask)
        assert answer.shape == (1, 56, 2) and request.answered_by(answer) and request.answered_by(answer.detach())
        assert not request.answered_by(answer.clone()), "another tensor, of whatever was made of the answer"
        # The other model knows nothing of the request, whose outcome still speaks of the first one.
        logits = call(other, MICRO, loss_mask)
        assert logits.shape == (1, 56, VOCAB) and request.compact and not request.answered_by(logits)
        detach(ours)
        detach(ours)
        assert not attached(ours) and "_postprocess" not in vars(ours)
        assert torch.equal(call(ours, MICRO, loss_mask), logits)


def test_case_8_5_unmarked_calls_are_untouched(rank_pool: RankPool) -> None:
    rank_pool.run(1, unmarked)


def unmarked(rank: int, world: int) -> None:
    labels = MICRO.labels[None]
    with cpu_megatron(rank, world, tp=1):
        for given in ({"labels": None}, {"labels": labels}, {"runtime_gather_output": True}):
            plain, ours = plain_model(), plain_model()
            attach(ours)
            runs = [came_of(model, call(model, MICRO, **given), lambda out: out.cos().sum()) for model in (plain, ours)]
            assert differences(*runs) == [] and runs[0].output.shape[:2] == (1, 56)
            assert any(
                "output" in each
                for each in differences(runs[0], came_of(ours, call(ours, MICRO, marked(MICRO)[0]), Tensor.sum))
            )


def test_case_8_4_a_wrapper_that_makes_a_new_loss_mask_gets_logits(rank_pool: RankPool) -> None:
    rank_pool.run(1, new_mask)


class VisionLanguageModel(torch.nn.Module):
    """Puts rows of its own among the text's, so makes a loss mask of its own."""

    def __init__(self, language_model: Any, keeps: bool) -> None:
        super().__init__()
        self.language_model, self.keeps = language_model, keeps

    def forward(self, *args: Any, loss_mask: Tensor, **kwargs: Any) -> Tensor:
        own = loss_mask if self.keeps else loss_mask * 1
        output: Tensor = self.language_model(*args, loss_mask=own, **kwargs)
        return output


def new_mask(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        for keeps in (True, False):
            wrapper = VisionLanguageModel(plain_model(), keeps)
            plain = call(wrapper, MICRO)
            attach(wrapper)
            assert attached(wrapper) and attached(wrapper.language_model)
            loss_mask, request = marked(MICRO)
            output = call(wrapper, MICRO, loss_mask)
            assert request_of(loss_mask) is request
            assert request.compact == keeps
            assert keeps or (request.outcome is None and torch.equal(output, plain))


def test_case_8_4_an_exception_leaves_the_model_as_it_was(rank_pool: RankPool) -> None:
    rank_pool.run(1, raises_midway)


def raises_midway(rank: int, world: int) -> None:
    def stumble(*_: Any) -> None:
        raise KeyError("on purpose")

    with cpu_megatron(rank, world, tp=1):
        model = plain_model()
        plain = call(model, MICRO)
        attach(model)
        for module in (model.decoder, model.output_layer):
            loss_mask, request = marked(MICRO)
            with module.register_forward_pre_hook(stumble), pytest.raises(KeyError, match="on purpose"):
                call(model, MICRO, loss_mask)
            assert "forward" not in vars(model.output_layer) and request.outcome is None
            assert torch.equal(call(model, MICRO), plain)
            assert torch.equal(kept_scalars(call(model, MICRO, loss_mask), MICRO, request), answers(model))


def answers(model: Any) -> Tensor:
    loss_mask, request = marked(MICRO)
    return kept_scalars(call(model, MICRO, loss_mask), MICRO, request)


def test_a_reason_is_logged_once(rank_pool: RankPool) -> None:
    rank_pool.run(1, logs)


def logs(rank: int, world: int) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("compact_logits")
    logger.addHandler(handler)
    try:
        with cpu_megatron(rank, world, tp=1):
            model = plain_model()
            attach(model)
            model.output_layer.gather_output = True
            for _ in range(3):
                call(model, MICRO, marked(MICRO)[0])
            model.output_layer.gather_output = False
            for batch in (2, 4, 7):  # another number in the sentence is not another reason
                call(model, MICRO, marked(MICRO, batch=batch)[0])
    finally:
        logger.removeHandler(handler)
    assert said == [
        "full path: the output layer uses gather_output",
        "full path: the hidden states are (56, 1, 32), and the request is for (rows, 2, hidden)",
    ]


def test_what_cannot_be_attached_to_is_named(rank_pool: RankPool) -> None:
    with pytest.raises(PatchError, match=r"needed a megatron-core GPTModel or a wrapper of one, got Linear around Li"):
        attach(torch.nn.Linear(2, 2))
    rank_pool.run(1, taken)


def taken(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        model = plain_model()
        model._postprocess = MethodType(lambda self, **given: given["hidden_states"], model)
        assert not attached(model), "somebody else's"
        with pytest.raises(
            PatchError, match=r"this GPTModel is replaced already, by taken\.<locals>\.<lambda>; undo that"
        ):
            attach(model)
        detach(model)
        assert "_postprocess" in vars(model), "not ours to take off"


def test_answers_are_the_definition(rank_pool: RankPool) -> None:
    rank_pool.run(1, definition)


def definition(rank: int, world: int) -> None:
    """So that the tests above compare with something that is right, also after the weight has changed in place."""
    with cpu_megatron(rank, world, tp=1):
        model = plain_model(dtype=torch.float64)
        attach(model)
        for _ in range(2):
            logits = call(model, MICRO)[0]
            loss_mask, request = marked(MICRO, entropy="metric", temperature=0.7)
            ours = kept_scalars(call(model, MICRO, loss_mask), MICRO, request)
            expected = torch.stack(reference.log_probs(logits, MICRO.labels, temperature=0.7), dim=1)
            torch.testing.assert_close(ours, expected[MICRO.selection.indices].to(ours.dtype))
            with torch.no_grad():
                model.output_layer.weight.mul_(0.5).add_(0.1)
