"""verl's own loss, from its source tree: the scalar, its metrics and its training are what they are without us."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits import reference
from tests.support.ranks import run_ranks
from tests.support.verl_process import VOCAB, installed, micro_batch
from tests.support.verl_tree import actor_config, needs_verl, settings_of, start_verl

pytestmark = needs_verl


def full_batch() -> dict[str, Any]:
    batch = micro_batch()
    lengths = batch["prompts"].offsets().diff() + batch["responses"].offsets().diff()
    tokens = torch.nested.as_nested_tensor(
        [torch.zeros(int(n), dtype=torch.int64) for n in lengths], layout=torch.jagged
    )
    kept = int(batch["response_mask"].values().sum())
    return batch | {"input_ids": tokens, "dp_size": 1, "batch_num_tokens": kept, "global_batch_size": 3}


def loss_of(modules: list[Any], config: Any, all_logits: Tensor, data_format: str = "thd") -> tuple[Tensor, dict]:
    """As verl's Megatron engine: rows laid out, per-token values from logits, back to sequences, the scalar.

    `all_logits` are those of every token, padding included, of which each context-parallel rank has its part.
    """
    import verl.models.mcore.util as util

    losses, batch = modules[0], full_batch()
    loss = partial(losses.distillation_ppo_loss, config=actor_config(), distillation_config=config)
    where = {"thd": util.preprocess_thd_engine, "bshd": util.preprocess_bshd_engine}[data_format]
    numbers = torch.nested.nested_tensor_from_jagged(
        torch.arange(1, batch["input_ids"].values().shape[0] + 1), batch["input_ids"].offsets()
    )
    rows, packing, *_ = where(numbers, pre_process=True)
    outputs = loss(student_logits=all_logits[rows], data=batch, data_format=data_format)
    if data_format == "thd":
        back = partial(util.postprocess_thd_engine, packed_seq_params=packing, input_ids=numbers, batch_size=3)
    else:
        back = partial(util.postprocess_bshd_engine, attention_mask=packing)
    model_output = {name: back(value) for name, value in outputs.items()}
    return loss(model_output=model_output, data=batch)


def plain(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(getattr(value, "values", [value])[0]) for name, value in metrics.items()}


def before_and_after(
    rank: int, world: int, parallel: dict[str, int], data_format: str, settings: dict[str, Any]
) -> Any:
    modules = start_verl(**parallel)
    results = []
    for ours in (False, True):
        logits = torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(7)).requires_grad_()

        def run(logits: Tensor = logits) -> Any:
            loss, metrics = loss_of(modules, settings_of(modules[2], **settings), logits, data_format)
            loss.backward()
            return loss.item(), plain(metrics), logits.grad

        if ours:
            with installed():
                results.append(run())
        else:
            results.append(run())
    return results


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
@pytest.mark.parametrize("parallel", [{}, {"context_parallel": 2}], ids=str)
def test_the_same_loss_metrics_and_gradient(parallel: dict[str, int], data_format: str) -> None:
    settings = {"log_prob_min_clamp": -5.0}
    world = parallel.get("context_parallel", 1)
    for verls, ours in run_ranks(world, before_and_after, parallel, data_format, settings, timeout=200):
        assert verls[0] > 0.05
        assert ours[0] == pytest.approx(verls[0], abs=1e-6)
        assert ours[1] == pytest.approx(verls[1], abs=1e-6)
        assert "distillation/overlap_ratio" in ours[1]
        assert verls[2].abs().max() > 1e-3
        torch.testing.assert_close(ours[2], verls[2], rtol=1e-5, atol=1e-8)


def tail_loss(rank: int, world: int) -> Any:
    modules = start_verl()
    logits = torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(7)).requires_grad_()
    with installed():
        made = settings_of(modules[2], loss_mode="forward_kl_topk_tail", log_prob_min_clamp=None, tail_mass_eps=1e-7)
        loss, metrics = loss_of(modules, made, logits)
        loss.backward()
        refused = []
        for wrong in ({"log_prob_min_clamp": -10.0}, {"log_prob_min_clamp": None, "tail_mass_eps": 2.0}):
            with pytest.raises(ValueError) as raised:
                settings_of(modules[2], loss_mode="forward_kl_topk_tail", **wrong)
            refused.append(str(raised.value))
    with pytest.raises(ValueError, match="Unsupported loss mode"):
        settings_of(modules[2], loss_mode="forward_kl_topk_tail", log_prob_min_clamp=None)
    return loss.item(), plain(metrics), logits.grad, refused


def test_the_tail_aware_mode_in_verls_own_registry_and_configuration() -> None:
    ((loss, metrics, d_logits, refused),) = run_ranks(1, tail_loss, timeout=200)
    batch, read = full_batch(), torch.tensor([2, 3, 6, 9, 14, 15, 16, 17, 18])
    # Row numbers count from one: row zero of the logits is the padding's.
    z = torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(7))[read + 1].double().requires_grad_()
    teacher = batch["teacher_logprobs"].values()[read].double(), batch["teacher_ids"].values()[read].long()
    truth = reference.topk_kl(z, *teacher, tail=True, tail_mass_eps=1e-7)
    truth["loss"].mean().backward()
    assert loss == pytest.approx(truth["loss"].mean().item(), abs=1e-6)
    torch.testing.assert_close(d_logits[read + 1].double(), z.grad, rtol=1e-5, atol=1e-8)
    means = {"topk_loss": "head_loss", "tail_loss": "tail_loss", "student_tail_mass": "student_tail_mass"}
    for metric, name in means.items():
        assert metrics[f"distillation/{metric}"] == pytest.approx(truth[name].mean().item(), abs=1e-6)
    assert "takes no log_prob_min_clamp" in refused[0] and "strictly between 0 and 1" in refused[1]


def four_steps(rank: int, world: int) -> Any:
    modules = start_verl()

    def train() -> tuple[list[float], Tensor]:
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(32, 16, generator=generator)
        weight = (torch.randn(VOCAB, 16, generator=generator) * 0.3).requires_grad_()
        optimizer, losses = torch.optim.AdamW([weight], lr=1e-2), []
        for _ in range(4):
            loss, _ = loss_of(modules, settings_of(modules[2], log_prob_min_clamp=None), hidden @ weight.t())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, weight.detach()

    verls = train()
    with installed():
        return verls, train()


def test_four_steps_of_an_optimiser_are_verls_own() -> None:
    (((verls, weight), (ours, our_weight)),) = run_ranks(1, four_steps, timeout=200)
    assert verls[-1] < verls[0] - 0.01
    assert ours == pytest.approx(verls, rel=1e-5)
    torch.testing.assert_close(our_weight, weight, rtol=0, atol=2e-5)


def identity(rank: int, world: int) -> tuple[list[str], list[str]]:
    modules = start_verl()
    watched = [
        *modules,
        modules[1]._VocabParallelKLDivergence,
        modules[2].DistillationLossConfig,
        modules[3].BaseEngine,
    ]

    def observe() -> dict[str, Any]:
        registries = {f"{key}": value for key, value in modules[0].DISTILLATION_LOSS_REGISTRY.items()}
        return registries | {f"{owner} {name}": value for owner in watched for name, value in vars(owner).items()}

    def changed() -> list[str]:
        after = observe()
        return sorted(name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))

    before = observe()
    with installed():
        during = changed()
    return during, changed()


def test_identity_is_restored_in_verl_itself() -> None:
    ((during, after),) = run_ranks(1, identity, timeout=200)
    assert len(during) == 7
    assert after == []
