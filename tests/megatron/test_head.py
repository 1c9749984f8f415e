"""Output layers of every proven kind: the weight that is used is the one the full path uses, and gets its gradient."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import attach
from tests.support.gpt_paths import VOCAB, Cut, micro_batch
from tests.support.marked_gpt import (
    Came,
    assert_as_the_full_path,
    call,
    came_of,
    kept_scalars,
    marked,
    objective,
)
from tests.support.ranks import RankPool

MICRO = micro_batch(0, Cut(1), "holes")
EMPTY = micro_batch(0, Cut(1), "nothing")
MODEL: dict[str, Any] = {"tp": 1, "vocab": VOCAB, "layers": 1, "dtype": torch.float64}
HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def double_model(**more: Any) -> Any:
    """fp64, without the wrapper that a bf16 model has."""
    return build_gpt(**{**MODEL, **more})


def test_case_9_1_tied_and_untied(rank_pool: RankPool) -> None:
    rank_pool.run(1, weights_of_both)


def stale_head() -> Any:
    """A stage with a tied weight, and an output layer that also has one of its own, never used."""
    model = double_model(tied=True)
    model.output_layer.weight = torch.nn.Parameter(torch.full((VOCAB, 32), torch.nan, dtype=torch.float64))
    return model


def weights_of_both(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        untied = assert_as_the_full_path(double_model, MICRO)[1]
        assert untied.gradients[HEAD].norm() > 0
        tied = assert_as_the_full_path(lambda: double_model(tied=True), MICRO)[1]
        assert HEAD not in tied.gradients and tied.gradients[EMBEDDING].norm() > untied.gradients[EMBEDDING].norm()
        assert assert_as_the_full_path(stale_head, MICRO)[1].gradients[HEAD] is None


def test_bias_and_frozen_parts(rank_pool: RankPool) -> None:
    rank_pool.run(1, bias_and_frozen)


def bias_and_frozen(rank: int, world: int) -> None:
    def with_bias() -> Any:
        model = double_model()
        model.output_layer.bias = torch.nn.Parameter(torch.linspace(-2, 2, VOCAB, dtype=torch.float64))
        return model

    def frozen(*names: str) -> Any:
        model = double_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(name.startswith(each) for each in names))
        return model

    with cpu_megatron(rank, world, tp=1):
        assert assert_as_the_full_path(with_bias, MICRO)[1].gradients["output_layer.bias"].norm() > 0
        head = assert_as_the_full_path(lambda: frozen("output_layer"), MICRO)[1].gradients
        assert head[HEAD] is None and head[EMBEDDING].norm() > 0
        rest = assert_as_the_full_path(lambda: frozen("embedding", "decoder"), MICRO)[1].gradients
        assert rest[EMBEDDING] is None and rest[HEAD].norm() > 0
        assert_as_the_full_path(lambda: frozen(""), MICRO)


def test_case_9_2_a_weight_that_a_pre_hook_fills(rank_pool: RankPool) -> None:
    rank_pool.run(1, filled_by_a_pre_hook)


def filled_by_a_pre_hook(rank: int, world: int) -> None:
    """As DDP does it with overlapping all-gathers: whoever does not call the module reads what was there before."""
    calls: list[str] = []

    def waits_for_its_weight() -> Any:
        model = double_model()
        whole = model.output_layer.weight.detach().clone()
        with torch.no_grad():
            model.output_layer.weight.zero_()

        def fill(module: Any, args: Any) -> None:
            calls.append("filled")
            with torch.no_grad():
                module.weight.copy_(whole)

        model.output_layer.register_forward_pre_hook(fill)
        return model

    with cpu_megatron(rank, world, tp=1):
        assert_as_the_full_path(waits_for_its_weight, MICRO, chunk_bytes=3000)
        assert calls == ["filled"] * 2, "once for the full path, once for ours, however many chunks"
        bypassed = F.linear(torch.ones(1, 32, dtype=torch.float64), waits_for_its_weight().output_layer.weight)
        assert not bypassed.any(), "what a product beside the module would have seen"


def test_rows_that_do_not_count_may_hold_anything(rank_pool: RankPool) -> None:
    rank_pool.run(1, nan_where_masked)


def nan_where_masked(rank: int, world: int) -> None:
    def poisoned(micro: Any, value: float) -> Any:
        model = double_model()
        off = (micro.loss_mask[0] == 0)[:, None, None]
        model.decoder.register_forward_hook(lambda module, args, hidden: hidden.masked_fill(off, value))
        return model

    with cpu_megatron(rank, world, tp=1):
        for micro in (MICRO, EMPTY):
            plain, ours = (asked_for(poisoned(micro, value), micro) for value in (0.0, torch.nan))
            assert torch.equal(plain.output, ours.output) and torch.isfinite(ours.output).all()
            for name, gradient in ours.gradients.items():
                assert gradient is not None and torch.equal(gradient, plain.gradients[name]), name
        naive = poisoned(MICRO, torch.nan)
        masked = (call(naive, MICRO).log_softmax(-1)[0, :, 0] * MICRO.loss_mask[0]).sum()
        assert masked.isnan(), "multiplying by the mask keeps the NaN"


def asked_for(model: Any, micro: Any, **asked: Any) -> Came:
    attach(model)
    loss_mask, request = marked(micro, entropy="loss", **asked)
    output = call(model, micro, loss_mask)
    return came_of(model, output, lambda out: objective(out, micro, request))


def test_no_rows_give_exact_zeros_also_in_used_memory(rank_pool: RankPool) -> None:
    rank_pool.run(1, poisoned_allocator)


def poisoned_allocator(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        for dtype in (torch.float32, torch.float64):
            model = double_model(dtype=dtype)
            for _ in range(4):  # what an uninitialised gradient would then find
                torch.full((VOCAB, 32), torch.nan, dtype=dtype)
            came = asked_for(model, EMPTY)
            assert not came.output.any()
            for name, gradient in came.gradients.items():
                assert gradient is not None and not gradient.any(), name


def test_case_10_5_mup_scales_the_logits(rank_pool: RankPool) -> None:
    from megatron.core.models.gpt import GPTModel

    if "output_processor" not in inspect.signature(GPTModel._postprocess).parameters:
        pytest.skip("this version of Megatron has no output processor, and MuP is refused")
    rank_pool.run(1, scaled)


def scaled(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        for mult in (0.25, 3.0):
            settings = {"use_mup": True, "mup_output_mult": mult, "mup_width_mult": 1.0}

            def model(settings: dict[str, Any] = settings) -> Any:
                built = double_model()
                vars(built.config).update(settings)
                return built

            logits, unscaled = call(model(), MICRO), call(double_model(), MICRO)
            torch.testing.assert_close(logits, mult * unscaled)
            assert_as_the_full_path(model, MICRO)


def test_two_threads_that_share_a_model_are_right_on_either_path(rank_pool: RankPool) -> None:
    rank_pool.run(1, two_threads)


def two_threads(rank: int, world: int) -> None:
    """Both inside the head's call at one time, and the first out before the second."""
    with cpu_megatron(rank, world, tp=1):
        model = double_model()
        attach(model)
        hidden = torch.randn(56, 1, 32, dtype=torch.float64)
        alone = {name: answer(model, hidden, micro)[1] for name, micro in MICROS.items()}
        meet = threading.Barrier(2, timeout=30)
        together: dict[str, tuple[str, Tensor]] = {}

        def wait_for_the_other(module: Any, args: Any) -> None:
            meet.wait()

        model.output_layer.register_forward_pre_hook(wait_for_the_other)

        def ask(name: str) -> None:
            try:
                together[name] = answer(model, hidden, MICROS[name])
            except BaseException as error:
                together[name] = repr(error), hidden

        for _ in range(5):
            threads = [threading.Thread(target=ask, args=(name,)) for name in MICROS]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            reasons = sorted(reason for reason, _ in together.values())
            assert reasons in (["", "the output layer's forward is overridden on the instance"], ["", ""]), reasons
            for name, expected in alone.items():
                torch.testing.assert_close(together.pop(name)[1].double(), expected.double(), rtol=1e-5, atol=1e-5)
            assert "forward" not in vars(model.output_layer)


MICROS = {"holes": MICRO, "first": micro_batch(0, Cut(1), "first sequence")}


def answer(model: Any, hidden: Tensor, micro: Any) -> tuple[str, Tensor]:  # why not compact; (kept, 2)
    loss_mask, request = marked(micro, entropy="metric")
    given = dict.fromkeys(("input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
    output = model._postprocess(hidden_states=hidden, loss_mask=loss_mask, **given)
    return request.reason, kept_scalars(output, micro, request)
