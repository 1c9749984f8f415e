"""Switching the compact path on in slime, and off again: what is replaced, where, and when nothing is."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel

from compact_logits.errors import ConfigError, PatchError, RefusedError
from compact_logits.integrations import slime
from compact_logits.integrations.slime.passes import current_pass
from tests.support.slime_stand_in import run_arguments, slime_stand_in

REPLACED = {
    "data": ["get_batch"],
    "loss": ["get_log_probs_and_entropy", "compute_advantages_and_returns"],
    "model": ["get_batch", "forward_only", "train", "train_one_step"],
    "actor": ["get_log_probs_and_entropy", "compute_advantages_and_returns", "forward_only", "train"],
}


@pytest.fixture
def run() -> Namespace:
    return run_arguments()


@pytest.fixture
def modules(run: Namespace) -> Iterator[dict[str, ModuleType]]:
    with slime_stand_in(run) as stand_ins:
        yield stand_ins
        slime.uninstall()


def bound(modules: dict[str, ModuleType]) -> dict[str, Any]:
    everything = {f"{name}.{key}": value for name, module in modules.items() for key, value in vars(module).items()}
    return {**everything, "seam": vars(GPTModel)["_postprocess"]}


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_changes_while_it_is_not_asked_for(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("COMPACT_LOGITS", raising=False)
    if value is not None:
        monkeypatch.setenv("COMPACT_LOGITS", value)
    before = bound(modules)
    slime.install(run_arguments())
    after = bound(modules)
    assert before.keys() == after.keys() and all(before[key] is after[key] for key in before)
    assert [finding.state for finding in slime.check()] == ["off"]


def test_every_module_that_has_a_function_by_name_gets_the_new_one(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    before = bound(modules)
    slime.install(run_arguments())
    changed = {key for key, value in bound(modules).items() if value is not before[key]}
    assert changed == {f"{name}.{key}" for name, keys in REPLACED.items() for key in keys} | {"seam"}
    assert modules["actor"].forward_only is modules["model"].forward_only
    assert [finding.state for finding in slime.check()] == ["on"]
    slime.install(run_arguments())  # twice is once
    slime.uninstall()
    after = bound(modules)
    assert all(before[key] is after[key] for key in before)
    assert [finding.state for finding in slime.check()] == ["off"]


@pytest.mark.parametrize(
    ("asked", "flag", "remedy"),
    [
        ({"use_rollout_entropy": True}, "--use-rollout-entropy", "remove the flag"),
        ({"custom_advantage_function_path": "a.b"}, "--custom-advantage-function-path", "remove the flag"),
        ({"custom_pg_loss_reducer_function_path": "a.b"}, "--custom-pg-loss-reducer-function-path", "remove the flag"),
        ({"rollout_data_postprocess_path": "a.b"}, "--rollout-data-postprocess-path", "remove the flag"),
        ({"custom_tis_function_path": "a.b"}, "--custom-tis-function-path: a.b may read", "use one of"),
        ({"loss_type": "custom_loss"}, "--loss-type: the custom_loss reads", "use policy_loss or sft_loss"),
        ({"advantage_estimator": "ppo", "kl_coef": 0.1}, "--kl-coef: generalised advantage", "set --kl-coef 0"),
        ({"save_debug_train_data": "there"}, "--save-debug-train-data", "remove the flag"),
        ({"dump_details": "there"}, "--dump-details", "remove the flag"),
        ({"megatron_deepgemm_forward_layers": ["0"]}, "--megatron-deepgemm-forward-layers", "remove the flag"),
        ({"true_on_policy_mode": True}, "--true-on-policy-mode", "remove the flag"),
        ({"batch_invariant_mode": True}, "--batch-invariant-mode", "remove the flag"),
        ({"label_smoothing": 0.1}, "--label-smoothing", "set it to 0"),
        ({"cuda_graph_scope": ["full_iteration"]}, "--cuda-graph-scope", "capture layers instead"),
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-scope", "capture layers instead"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp", "use the distributed optimizer"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2", "use the distributed optimizer"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute", "remove the flag"),
        ({"enable_mtp_training": True}, "--enable-mtp-training", "remove the flag"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unproven_recipe_is_left_alone_and_says_why(
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: dict[str, Any],
    flag: str,
    remedy: str,
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    before = bound(modules)
    slime.install(run_arguments(**asked))
    after = bound(modules)
    # Every function is slime's own still, so the run is that without this package.
    assert all(before[key] is after[key] for key in before)
    assert caplog.text.count(f"full path for the whole run: {flag}") == 1
    (finding,) = slime.check()
    assert finding.state == "refused" and finding.remedy.startswith(remedy)


def test_strict_raises_instead(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "strict")
    with pytest.raises(RefusedError, match="COMPACT_LOGITS=strict: --use-rollout-entropy"):
        slime.install(run_arguments(use_rollout_entropy=True))
    for estimator in ("grpo", "cispo", "reinforce_plus_plus_baseline"):
        with pytest.raises(RefusedError, match="--kl-coef: the metric rollout/kl is a mean over every row"):
            slime.install(run_arguments(advantage_estimator=estimator, kl_coef=0.1))
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    slime.install(run_arguments(kl_coef=0.1))  # exact in training, so compacted unless strict
    assert [finding.state for finding in slime.check()] == ["on"]


def test_without_arguments_the_first_pass_decides_for_all(
    modules: dict[str, ModuleType], run: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    run.custom_advantage_function_path = "my.advantages"
    slime.install()
    actor = modules["actor"]
    assert actor.train(0, lambda _: current_pass()) is None
    run.custom_advantage_function_path = None  # too late: old, ref and actor passes must not differ
    log_probs = actor.get_log_probs_and_entropy
    assert actor.forward_only(log_probs, run, None, lambda _: current_pass(), [1]) is None


def test_which_pass_runs_and_what_it_asks(
    modules: dict[str, ModuleType], run: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    original = modules["loss"].get_log_probs_and_entropy
    slime.install()
    actor = modules["actor"]

    def seen(_: ModuleType) -> Any:
        return current_pass()

    assert actor.train(0, seen).entropy == "loss"
    run.entropy_coef = 0.0
    assert actor.train(0, seen).entropy == "metric"
    for callback in (original, actor.get_log_probs_and_entropy):
        asked = actor.forward_only(callback, run, None, seen, [1])
        assert (asked.entropy, asked.temperature) == ("none", 0.9)
    assert actor.forward_only(lambda logits: None, run, None, seen, [1]) is None  # a critic's values, say
    # So the log-prob server asks where it samples from the logits or reads other labels' too.
    assert actor.forward_only(partial(actor.get_log_probs_and_entropy), run, None, seen, [1]) is None
    run.loss_type = "sft_loss"
    assert actor.train(0, seen).entropy == "none"
    run.loss_type = "value_loss"  # the critic's own step, in the same process
    assert actor.train(0, seen) is None
    assert current_pass() is None


def test_the_top_p_is_replayed_where_slime_replays_it(
    modules: dict[str, ModuleType], run: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    run.rollout_top_p = 0.9
    slime.install()
    actor = modules["actor"]
    log_probs = actor.get_log_probs_and_entropy

    def replays(_: ModuleType) -> bool:
        asked = current_pass()
        assert asked is not None
        return asked.replays_top_p

    assert actor.train(0, replays)
    assert actor.forward_only(log_probs, run, None, replays, [1], use_rollout_top_p_replay=True)
    assert actor.forward_only(log_probs, run, None, replays, [1], "ref_", True)
    assert not actor.forward_only(log_probs, run, None, replays, [1])


def test_an_unknown_signature_is_refused_by_name_and_nothing_is_left_behind(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    modules["model"].train = lambda step, chunks: None
    before = bound(modules)
    with pytest.raises(PatchError, match="needed the parameters rollout_id, model"):
        slime.install(run_arguments())
    assert all(before[key] is value for key, value in bound(modules).items())
    del modules["loss"]._allgather_cp_redistribute
    with pytest.raises(PatchError, match="_allgather_cp_redistribute"):
        slime.install(run_arguments())
    assert [finding.state for finding in slime.check()] == ["refused"]


def test_an_unknown_setting_raises(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "yes")
    with pytest.raises(ConfigError, match="COMPACT_LOGITS must be unset, 0, 1 or strict, got 'yes'"):
        slime.install(run_arguments())
