"""verl's loss mode `forward_kl_topk_tail`: registered, configured, computed, refused where it cannot be had."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compact_logits import reference
from compact_logits.integrations.verl.tail_mode import config_init_wrapper
from tests.support.ranks import RankPool
from tests.support.verl_process import (
    MODULES,
    installed,
    loss_config,
    micro_batch,
    packed_logits,
    start,
    values_by_sequence,
)

TAIL = {"loss_mode": "forward_kl_topk_tail", "log_prob_min_clamp": None}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A process that has the stand-in for verl, which no other test may meet."""
    ranks = RankPool()
    yield ranks
    ranks.close()


def trained(rank: int, world: int, eps: float) -> Any:
    start()
    with installed() as (losses, megatron, config, _):
        distillation = loss_config(config, **TAIL, tail_mass_eps=eps)
        logits, batch = packed_logits(megatron), micro_batch()
        rows = losses.distillation_ppo_loss(None, distillation, data=batch, student_logits=logits)
        model_output = {name: values_by_sequence(value, megatron.ALIGNED_TO) for name, value in rows.items()}
        loss, metrics = losses.distillation_ppo_loss(None, distillation, model_output, batch)
        loss.backward()
    return loss.item(), metrics, logits.detach(), logits.grad


@pytest.mark.parametrize("eps", [1e-6, 0.9])
def test_loss_metrics_and_gradient_are_those_of_the_definition(pool: RankPool, eps: float) -> None:
    ((loss, metrics, logits, d_logits),) = pool.run(1, trained, eps)
    batch = micro_batch()
    rows = torch.tensor([2, 3, 6, 9, 15, 16, 17, 18, 19])
    without_padding = torch.tensor([2, 3, 6, 9, 14, 15, 16, 17, 18])
    z = logits[0, rows].double().requires_grad_()
    truth = reference.topk_kl(
        z,
        batch["teacher_logprobs"].values()[without_padding].double(),
        batch["teacher_ids"].values()[without_padding].long(),
        tail=True,
        tail_mass_eps=eps,
    )
    truth["loss"].mean().backward()
    assert loss == pytest.approx(truth["loss"].mean().item(), abs=1e-6)
    for metric, name in (
        ("topk_loss", "head_loss"),
        ("tail_loss", "tail_loss"),
        ("student_tail_mass", "student_tail_mass"),
        ("teacher_tail_mass", "teacher_tail_mass"),
        ("student_mass", "student_mass"),
    ):
        assert metrics[f"distillation/{metric}"] == pytest.approx(truth[name].mean().item(), abs=1e-6), metric
    torch.testing.assert_close(d_logits[0, rows].double(), z.grad, rtol=1e-5, atol=1e-8)
    assert int(d_logits.abs().sum(-1).count_nonzero()) == len(rows)


def configured(rank: int, world: int, settings: dict[str, Any]) -> tuple[float | None, str]:
    start()
    with installed() as (_, _, config, _):
        try:
            made = config.DistillationLossConfig(**settings)
        except ValueError as error:
            return None, str(error)
    with pytest.raises(Exception, match="tail_mass_eps"):
        made.tail_mass_eps = 0.5  # frozen, as all of its settings
    return made.tail_mass_eps, ""


@pytest.mark.parametrize(
    ("settings", "eps", "message"),
    [
        (TAIL, 1e-6, ""),
        (TAIL | {"tail_mass_eps": 1e-9}, 1e-9, ""),
        ({"loss_mode": "forward_kl_topk", "log_prob_min_clamp": -10.0}, 1e-6, ""),
        (TAIL | {"tail_mass_eps": 0.0}, None, "tail_mass_eps must lie strictly between 0 and 1, got 0.0"),
        (TAIL | {"tail_mass_eps": 1.0}, None, "tail_mass_eps must lie strictly between 0 and 1, got 1.0"),
        (TAIL | {"log_prob_min_clamp": -10.0}, None, "the tail-aware KL takes no log_prob_min_clamp, got -10.0"),
        ({"loss_mode": "other"}, None, "Unsupported loss mode: other"),
    ],
)
def test_settings_are_judged_when_the_configuration_is_read(
    pool: RankPool, settings: dict[str, Any], eps: float | None, message: str
) -> None:
    ((found, error),) = pool.run(1, configured, settings)
    assert found == eps
    assert message in error


def test_a_configuration_that_has_the_field_keeps_its_own() -> None:
    @dataclass(frozen=True)
    class Settings:
        loss_mode: str
        log_prob_min_clamp: float | None = None
        tail_mass_eps: float = 0.25

    vars_before = set(vars(Settings("other")))
    Settings.__init__ = config_init_wrapper(Settings.__init__)  # type: ignore[method-assign]
    assert Settings("other").tail_mass_eps == Settings(**TAIL).tail_mass_eps == 0.25
    assert Settings(**TAIL, tail_mass_eps=0.5).tail_mass_eps == 0.5 and set(vars(Settings("other"))) == vars_before
    assert Settings("other", tail_mass_eps=0.0).tail_mass_eps == 0.0, "of another mode, and none of ours"
    with pytest.raises(ValueError, match="tail_mass_eps must lie strictly between 0 and 1, got 0.0"):
        Settings(**TAIL, tail_mass_eps=0.0)


def batch_run(rank: int, world: int, strategy: str, mode: str, fused: str, method: str) -> tuple[int, str]:
    start()
    with installed() as (losses, _, config, engines):
        settings = TAIL if mode == TAIL["loss_mode"] else {"loss_mode": mode}
        loss = partial(
            losses.distillation_ppo_loss,
            config=SimpleNamespace(strategy=strategy),
            distillation_config=loss_config(config, **settings),
        )
        engine = engines.BaseEngine(SimpleNamespace(use_fused_kernels=fused == "engine"))
        try:
            getattr(engine, method)({"use_fused_kernels": True} if fused == "batch" else {}, loss_function=loss)
        except ValueError as error:
            return engine.forwards, str(error)
        return engine.forwards, ""


@pytest.mark.parametrize("method", ["train_batch", "infer_batch"])
@pytest.mark.parametrize(
    ("strategy", "mode", "fused", "message"),
    [
        ("megatron", "forward_kl_topk", "", ""),
        ("megatron", "forward_kl_topk_tail", "", ""),
        ("fsdp", "forward_kl_topk", "batch", ""),
        ("fsdp", "forward_kl_topk_tail", "", "got strategy='fsdp'; use megatron, or loss_mode=forward_kl_topk"),
        ("veomni", "forward_kl_topk_tail", "batch", "needs a student tail mass with a gradient"),
        ("megatron", "forward_kl_topk", "batch", "verl's fused Megatron forward does not produce"),
        ("megatron", "forward_kl_topk_tail", "engine", "set actor_rollout_ref.model.use_fused_kernels=False"),
    ],
)
def test_what_cannot_be_given_is_refused_before_the_forward(
    pool: RankPool, method: str, strategy: str, mode: str, fused: str, message: str
) -> None:
    ((forwards, error),) = pool.run(1, batch_run, strategy, mode, fused, method)
    assert forwards == (0 if message else 1)
    assert message in error and bool(message) == bool(error)


def other_losses(rank: int, world: int) -> list[str]:
    """An engine is also run without a loss, and with a loss that is no distillation."""
    start()
    with installed() as (*_, engines):
        engine = engines.BaseEngine()
        return [engine.infer_batch({}), engine.train_batch({}, print), engine.train_batch({}, partial(print, config=1))]


def test_other_losses_pass(pool: RankPool) -> None:
    assert pool.run(1, other_losses) == [["done"] * 3]


def native(rank: int, world: int) -> tuple[bool, bool, list[Any]]:
    start()
    losses = importlib.import_module(MODULES[0])
    from compact_logits.integrations import verl

    def collect() -> None: ...

    losses.DISTILLATION_LOSS_REGISTRY["forward_kl_topk_tail"] = collect
    losses.DISTILLATION_SETTINGS_REGISTRY["forward_kl_topk_tail"] = "settings"
    verl.install()
    kept, diagnostics = losses.DISTILLATION_LOSS_REGISTRY["forward_kl_topk_tail"] is collect, verl.check()
    verl.uninstall()
    after = losses.DISTILLATION_LOSS_REGISTRY.pop("forward_kl_topk_tail") is collect
    losses.DISTILLATION_SETTINGS_REGISTRY.pop("forward_kl_topk_tail")
    return kept, after, diagnostics


def test_a_mode_that_verl_brings_itself_remains_verls(pool: RankPool) -> None:
    ((during, after, diagnostics),) = pool.run(1, native)
    assert during and after
    assert [each.state for each in diagnostics] == ["on", "refused"]
    assert "has a loss mode forward_kl_topk_tail of its own" in diagnostics[1].reason
