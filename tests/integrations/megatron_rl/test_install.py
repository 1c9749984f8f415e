"""Installing the Megatron-RL integration: off by default, everywhere or nowhere, and gone without a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.errors import ConfigError, InputError, PatchError
from compact_logits.integrations import megatron_rl
from tests.support.megatron_rl_passes import compacted
from tests.support.megatron_rl_stand_in import build_stand_in, stand_in
from tests.support.ranks import RankPool

PATCHED = ("get_logprobs", "selective_log_softmax", "compute_logprobs_batch")
FLAG = "--rl-use-vocab-parallel-selected-logprobs"


@pytest.fixture
def rl_utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.delenv("COMPACT_LOGITS", raising=False)
    with stand_in() as module:
        yield module
        megatron_rl.uninstall()


def parsed(*given: str) -> argparse.Namespace:
    return megatron_rl.add_arguments(argparse.ArgumentParser()).parse_args(given)


@pytest.mark.parametrize("args", [None, parsed(), argparse.Namespace()])
def test_off_by_default(rl_utils: ModuleType, args: Any) -> None:
    before = dict(vars(rl_utils))
    megatron_rl.install(args)
    assert vars(rl_utils) == before
    (finding,) = megatron_rl.check()
    assert (finding.state, finding.remedy) == ("off", f"export COMPACT_LOGITS=1, or pass {FLAG}")


@pytest.mark.parametrize(("environ", "given"), [("1", []), (None, [FLAG]), ("0", [FLAG]), ("strict", [])])
def test_on_by_environment_or_by_flag(
    rl_utils: ModuleType, monkeypatch: pytest.MonkeyPatch, environ: str | None, given: list[str]
) -> None:
    if environ is not None:
        monkeypatch.setenv("COMPACT_LOGITS", environ)
    assert megatron_rl.check()[0].state == "off"
    before = {name: getattr(rl_utils, name) for name in PATCHED}
    megatron_rl.install(parsed(*given))
    megatron_rl.install(parsed(*given))
    assert all(getattr(rl_utils, name).__wrapped__ is original for name, original in before.items())
    (finding,) = megatron_rl.check()
    assert finding.state == "on" and ("strict" if environ == "strict" else "on") in finding.reason


def test_whoever_imported_the_function_by_name_has_the_patch_and_gives_it_back(
    rl_utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    packing = sys.modules["megatron.rl.sequence_packing_utils"]
    before = [dict(vars(module)) for module in (rl_utils, packing, sys.modules["train_rl_stand_in"])]
    megatron_rl.install()
    assert sys.modules["train_rl_stand_in"].get_logprobs is rl_utils.get_logprobs
    assert rl_utils.get_logprobs is not before[0]["get_logprobs"]
    assert packing.load_packed_data_by_index is not before[1]["load_packed_data_by_index"]
    megatron_rl.uninstall()
    megatron_rl.uninstall()
    after = [dict(vars(module)) for module in (rl_utils, packing, sys.modules["train_rl_stand_in"])]
    assert after == before


def test_an_unknown_setting_names_the_valid_ones(rl_utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "yes")
    with pytest.raises(ConfigError, match="must be unset, 0, 1 or strict, got 'yes'"):
        megatron_rl.install()


def test_another_signature_is_no_supported_version(rl_utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")

    def compute_logprobs_batch(model: Any, pp_group: Any) -> None: ...

    before = dict(vars(rl_utils)) | {"compute_logprobs_batch": compute_logprobs_batch}
    rl_utils.compute_logprobs_batch = compute_logprobs_batch  # type: ignore[attr-defined]
    with pytest.raises(PatchError, match="needed the parameters dtype of megatron.rl.rl_utils.compute_logprobs_batch"):
        megatron_rl.install()
    assert vars(rl_utils) == before, "a half-installed integration"
    assert megatron_rl.check()[0].state == "off"


def test_check_without_megatron_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    (finding,) = megatron_rl.check()
    assert (finding.state, finding.reason) == ("off", "megatron.rl is not on this Python's path")


def test_check_says_what_keeps_it_from_being_installed(rl_utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", None)
    monkeypatch.delattr(sys.modules["megatron.rl"], "rl_utils", raising=False)
    (finding,) = megatron_rl.check()
    assert finding.state == "refused" and "rl_utils" in finding.reason and finding.remedy.startswith("proven: ")


def test_a_bin_of_packed_sequences_is_marked_with_its_loss_mask(
    rl_utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compact_logits.integrations.megatron_rl.marks import mark_of

    monkeypatch.setenv("COMPACT_LOGITS", "1")
    packing = sys.modules["megatron.rl.sequence_packing_utils"]
    loss_mask = torch.tensor([[0.0, 1, 0, 1], [0, 0, 1, 1]])
    context = SimpleNamespace(packed_trajs=torch.arange(8).view(2, 4), packed_loss_mask=loss_mask)
    assert mark_of(packing.load_packed_data_by_index(1, context, False)[0]).loss_mask is None
    megatron_rl.install()
    tokens, returned = packing.load_packed_data_by_index(1, context, logprobs_is_correction=False)
    marked = mark_of(tokens).loss_mask
    assert marked is not None and torch.equal(marked, loss_mask[1:, 1:]) and torch.equal(returned, marked)


@pytest.mark.parametrize(
    ("tokens", "mark", "text"),
    [
        (torch.ones(4), {}, r"needed int64 tokens \(batch, sequence\), got \(4,\) of torch.float32"),
        (
            torch.ones(2, 4).long(),
            {"loss_mask": torch.ones(2, 4)},
            r"needed a loss mask \(2, 3\).*; of a mask over all tokens, pass mask\[:, 1:\]",
        ),
        (torch.ones(2, 4).long(), {"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
    ],
)
def test_bad_marks_are_named(tokens: Tensor, mark: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        megatron_rl.mark_tokens(tokens, **mark)


def test_a_later_pipeline_stage_alone_is_asked(rank_pool: RankPool) -> None:
    rank_pool.run(1, hidden_states_come_back)


def hidden_states_come_back(rank: int, world: int) -> None:
    with stand_in() as rl_utils, cpu_megatron(rank, world, tp=1), compacted():
        policy = build_stand_in(torch.randn(1, 4, 8))
        policy.post_process = False
        assert rl_utils.get_logprobs(policy, torch.zeros(1, 4).long(), None) is policy.hidden


def test_old_log_probs_are_fp32_of_a_bf16_model(rank_pool: RankPool) -> None:
    rank_pool.run(1, batches_of_a_bf16_model)


def batches_of_a_bf16_model(rank: int, world: int) -> None:
    with stand_in(bf16=True) as rl_utils, cpu_megatron(rank, world, tp=1):
        policy = build_stand_in(torch.randn(1, 4, 8), dtype=torch.bfloat16)
        arguments = {"batches": [torch.zeros(1, 4).long()], "dtype": torch.bfloat16, "pp_group": None}
        assert rl_utils.compute_logprobs_batch(policy, **arguments).dtype == torch.bfloat16
        with compacted():
            old = rl_utils.compute_logprobs_batch(policy, **arguments)
            current = rl_utils.get_logprobs(policy, torch.zeros(1, 4).long(), None)
            assert old.dtype == torch.float32 and torch.equal(old, current.detach())
