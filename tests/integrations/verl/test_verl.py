"""The verl integration against small stand-ins of the same signatures: what it replaces, and what comes out then."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.ranks import RankPool, run_ranks
from tests.support.verl_process import (
    MODULES,
    installed,
    loss_config,
    micro_batch,
    packed_logits,
    start,
    values_by_sequence,
)

OUTPUTS = ("distillation_losses", "student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A process that has the stand-in for verl, which no other test may meet."""
    ranks = RankPool()
    yield ranks
    ranks.close()


def everything() -> dict[str, Any]:
    """Each attribute of verl's modules and classes."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            if key.startswith("__") and key != "__init__":
                continue
            found[f"{name}.{key}"] = value
            if isinstance(value, type):
                found |= {f"{name}.{key}.{attribute}": member for attribute, member in vars(value).items()}
            if isinstance(value, dict):
                found |= {f"{name}.{key}[{entry}]": member for entry, member in value.items()}
    return found


def changed(before: dict[str, Any]) -> set[str]:
    after = everything()
    return {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}


def install_and_back(rank: int, world: int, mode: str | None) -> tuple[set[str], set[str], list[Any]]:
    start(mode=mode)
    from compact_logits.integrations import verl

    before = everything()
    verl.install()
    verl.install()
    installed, diagnostics = changed(before), verl.check()
    verl.uninstall()
    verl.uninstall()
    return installed, changed(before), diagnostics


def test_installed_and_put_back(pool: RankPool) -> None:
    ((installed, after, diagnostics),) = pool.run(1, install_and_back, "1")
    assert {name.removeprefix("verl.") for name in installed} == {
        "trainer.distillation.losses.compute_topk_loss",
        "trainer.distillation.megatron.losses.compute_forward_kl_topk",
        "trainer.distillation.megatron.losses._VocabParallelKLDivergence.apply",
        "workers.config.DistillationLossConfig.__init__",
        "workers.engine.base.BaseEngine.train_batch",
        "workers.engine.base.BaseEngine.infer_batch",
        "trainer.distillation.losses.DISTILLATION_LOSS_REGISTRY[forward_kl_topk_tail]",
        "trainer.distillation.losses.DISTILLATION_SETTINGS_REGISTRY[forward_kl_topk_tail]",
    }
    assert after == set()
    assert [(each.name, each.state) for each in diagnostics] == [("verl", "on")]


@pytest.mark.parametrize("mode", [None, "0"])
def test_without_the_switch_nothing_changes(pool: RankPool, mode: str | None) -> None:
    ((installed, after, diagnostics),) = pool.run(1, install_and_back, mode)
    assert installed == after == set()
    assert [(each.state, each.remedy) for each in diagnostics] == [("off", "export COMPACT_LOGITS=1")]


def per_token(data_format: str, *, with_batch: bool, **settings: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The per-token outputs, through the loss with the micro-batch or from below it without, and d_logits."""
    losses = importlib.import_module(MODULES[0])
    megatron = importlib.import_module(MODULES[1])
    config = loss_config(importlib.import_module(MODULES[2]), **settings)
    logits, batch = packed_logits(megatron, data_format), micro_batch()
    if with_batch:
        out = losses.distillation_ppo_loss(None, config, data=batch, student_logits=logits, data_format=data_format)
    else:
        teacher = batch["teacher_logprobs"], batch["teacher_ids"]
        out = megatron.compute_forward_kl_topk(logits, *teacher, config, data_format)
    (
        out["distillation_losses"] * torch.linspace(0.5, 2, logits.shape[0] * logits.shape[1]).view(logits.shape[:2])
    ).sum().backward()
    return {name: value.detach() for name, value in out.items()}, logits.grad


def before_and_after(rank: int, world: int, data_format: str, with_batch: bool, settings: dict[str, Any]) -> Any:
    start()
    dense = per_token(data_format, with_batch=with_batch, **settings)
    with installed():
        ours = per_token(data_format, with_batch=with_batch, **settings)
    again = per_token(data_format, with_batch=with_batch, **settings)
    return dense, ours, again


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
@pytest.mark.parametrize(
    "settings",
    [
        {"log_prob_min_clamp": None},
        {"log_prob_min_clamp": -3.0},
        {"use_chunked_topk": True, "chunked_topk_chunk_size": 1},
    ],
    ids=str,
)
def test_below_the_micro_batch_every_row_is_what_it_was(
    pool: RankPool, data_format: str, settings: dict[str, Any]
) -> None:
    ((dense, ours, again),) = pool.run(1, before_and_after, data_format, False, settings)
    assert tuple(ours[0]) == OUTPUTS
    for name in OUTPUTS:
        torch.testing.assert_close(ours[0][name], dense[0][name], rtol=1e-6, atol=1e-6)
        assert torch.equal(again[0][name], dense[0][name])
    torch.testing.assert_close(ours[1], dense[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
def test_with_the_micro_batch_at_hand_the_rows_it_reads_are_computed_and_no_others(
    pool: RankPool, data_format: str
) -> None:
    ((dense, ours, _),) = pool.run(1, before_and_after, data_format, True, {"log_prob_min_clamp": None})
    # By hand: a row predicts the next token, so responses are read from the last row of the prompt on.
    rows = {"thd": [2, 3, 6, 9, 15, 16, 17, 18, 19], "bshd": [2, 3, 6, 11, 23, 24, 25, 26, 27]}[data_format]
    read = torch.zeros(ours[0]["distillation_losses"].numel(), dtype=torch.bool)
    read[rows] = True
    read = read.view(ours[0]["distillation_losses"].shape)
    for name in OUTPUTS:
        torch.testing.assert_close(ours[0][name][read], dense[0][name][read], rtol=1e-6, atol=1e-6)
        assert not ours[0][name][~read].any() and dense[0][name][~read].any(), name
    torch.testing.assert_close(ours[1][read], dense[1][read], rtol=1e-5, atol=1e-7)
    assert not ours[1][~read].any()


def whole_loss(rank: int, world: int) -> Any:
    start()
    losses, megatron, config = (importlib.import_module(name) for name in MODULES[:3])
    distillation = loss_config(config, log_prob_min_clamp=None)

    def run() -> tuple[float, dict[str, float], torch.Tensor]:
        logits, batch = packed_logits(megatron), micro_batch()
        rows = losses.distillation_ppo_loss(None, distillation, data=batch, student_logits=logits)
        model_output = {name: values_by_sequence(value, megatron.ALIGNED_TO) for name, value in rows.items()}
        loss, metrics = losses.distillation_ppo_loss(None, distillation, model_output, batch)
        loss.backward()
        return loss.item(), metrics, logits.grad

    dense = run()
    with installed():
        return dense, run()


def test_the_scalar_loss_its_metrics_and_its_gradient_stay_the_same(pool: RankPool) -> None:
    (((dense, metrics, d_logits), (ours, our_metrics, our_d_logits)),) = pool.run(1, whole_loss)
    assert dense > 0.05
    assert ours == pytest.approx(dense, abs=1e-6)
    assert our_metrics == pytest.approx(metrics, abs=1e-6)
    torch.testing.assert_close(our_d_logits, d_logits, rtol=1e-5, atol=1e-8)


def other_mask(rank: int, world: int) -> None:
    start()
    batch = micro_batch()
    batch["response_mask"] = torch.ones(3, 9)
    message = r"needed a response mask \(3, 6\), as the responses are, got \(3, 9\)"
    with installed() as (losses, megatron, config, _), pytest.raises(ValueError, match=message):
        losses.compute_topk_loss(None, loss_config(config), batch, packed_logits(megatron), "thd")


def test_a_mask_of_other_responses_is_refused(pool: RankPool) -> None:
    pool.run(1, other_mask)


def elsewhere(rank: int, world: int, change: str) -> tuple[str, list[Any]]:
    start()
    from compact_logits.integrations import verl

    megatron = importlib.import_module(MODULES[1])
    if change == "another signature":
        megatron._VocabParallelKLDivergence.forward = staticmethod(lambda ctx, logits, log_probs, ids, clamp, chunk: 0)
    elif change == "gone":
        del megatron.compute_forward_kl_topk
    diagnostics = verl.check()
    with pytest.raises(ValueError) as raised:
        verl.install()
    return str(raised.value), diagnostics


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("another signature", "needed _VocabParallelKLDivergence.forward(ctx, vp_logits, "),
        ("gone", "needed a function at verl.trainer.distillation.megatron.losses.compute_forward_kl_topk"),
    ],
)
def test_another_verl_is_left_alone_with_a_reason(change: str, message: str) -> None:
    ((error, diagnostics),) = run_ranks(1, elsewhere, change)
    assert message in error
    if change == "another signature":
        assert [(each.state, each.reason) for each in diagnostics] == [("refused", error)]
        assert "verl 1dda039b9" in diagnostics[0].remedy


def kl_not_called(rank: int, world: int) -> None:
    start()
    from compact_logits.integrations import verl

    megatron, config = importlib.import_module(MODULES[1]), importlib.import_module(MODULES[2])
    kl = megatron._VocabParallelKLDivergence
    verl.install()
    megatron._VocabParallelKLDivergence = SimpleNamespace(apply=lambda *args: (torch.zeros(1),) * 5)
    batch = micro_batch()
    with pytest.raises(ValueError, match="did not call its vocab-parallel KL; this version is not supported"):
        megatron.compute_forward_kl_topk(
            packed_logits(megatron), batch["teacher_logprobs"], batch["teacher_ids"], loss_config(config), "thd"
        )
    megatron._VocabParallelKLDivergence = kl


def test_a_way_around_the_kl_is_noticed() -> None:
    run_ranks(1, kl_not_called)
