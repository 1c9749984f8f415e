"""From slime's micro-batch to the head's question, and from the head's answer to what slime's loss reads."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.errors import InputError, LayoutError, RefusedError
from compact_logits.integrations import slime
from compact_logits.integrations.slime.batch import TokenList
from compact_logits.integrations.slime.replay import top_p_mask
from compact_logits.megatron import HeadMetrics, Outcome, request_of
from compact_logits.rows import RowSelection, packed
from tests.support.slime_stand_in import Iterate, run_arguments, slime_stand_in

KEYS = ["tokens", "loss_masks", "total_lengths", "response_lengths", "rollout_top_p_token_ids"]
RUN = run_arguments()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    for name, value in (
        ("is_pipeline_last_stage", True),
        ("get_context_parallel_rank", 0),
        ("get_context_parallel_world_size", 1),
    ):
        monkeypatch.setattr(f"megatron.core.parallel_state.{name}", lambda *_, value=value, **__: value)
    with slime_stand_in(RUN) as stand_ins:
        slime.install(RUN)
        yield stand_ins
        slime.uninstall()


def samples(**changed: Any) -> Iterate:
    fields: dict[str, Any] = {
        "tokens": [torch.arange(10, 15), torch.arange(20, 24)],
        "loss_masks": [torch.tensor([1, 0, 3]), torch.tensor([1, 1])],
        "total_lengths": [5, 4],
        "response_lengths": [3, 2],
    }
    return Iterate(**{**fields, **changed})


def batch_of(modules: dict[str, ModuleType], iterator: Iterate, pad: int = 4) -> dict[str, Any]:
    return modules["actor"].train(0, lambda model: model.get_batch(iterator, KEYS, pad))


def test_a_marked_batch_keeps_the_predictors_of_the_counted_tokens(modules: dict[str, ModuleType]) -> None:
    batch = batch_of(modules, samples())
    request = request_of(batch["full_loss_masks"])
    assert request is not None and request is batch["unconcat_tokens"].request
    # Sample 0: prompt 10 11, response 12 13 14 of which 12 and 14 count; the last prompt row predicts 12.
    assert request.selection.indices.tolist() == [1, 3, 6, 7]
    assert request.selection.targets.tolist() == [12, 14, 22, 23]
    assert (request.selection.num_rows, request.temperature, request.entropy) == (12, 0.9, "loss")
    assert isinstance(batch["unconcat_tokens"], list) and len(batch["unconcat_tokens"]) == 2


def test_outside_a_known_pass_the_batch_is_slime_s_own(modules: dict[str, ModuleType]) -> None:
    batch = modules["model"].get_batch(samples(), KEYS, 4)
    assert request_of(batch["full_loss_masks"]) is None and type(batch["unconcat_tokens"]) is list


def test_not_the_last_pipeline_stage(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.parallel_state.is_pipeline_last_stage", lambda **_: False)
    assert request_of(batch_of(modules, samples())["full_loss_masks"]) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"loss_masks": [torch.ones(3), torch.ones(3)]},
            "sample 1: the loss mask has 3 entries and the response 2 tokens",
        ),
        # Together as long as they should be: only the look at each sample finds it.
        (
            {"loss_masks": [torch.ones(2), torch.ones(3)]},
            "sample 0: the loss mask has 2 entries and the response 3 tokens",
        ),
        ({"loss_masks": [torch.ones(3)]}, "2 token lists, 1 loss masks"),
        ({"response_lengths": [5, 2], "loss_masks": [torch.ones(5), torch.ones(2)]}, "which no row predicts"),
    ],
)
def test_case_7_10_masks_and_lengths_that_disagree(
    modules: dict[str, ModuleType], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        batch_of(modules, samples(**changed))


def test_a_mask_on_a_row_that_predicts_no_response_token(modules: dict[str, ModuleType]) -> None:
    original = modules["data"].get_batch.__wrapped__
    slime.uninstall()

    def shifted(*args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = original(*args, **kwargs)
        batch["full_loss_masks"] = batch["full_loss_masks"].roll(1)
        return batch

    def get_batch(data_iterator: Any, keys: Any, pad_multiplier: int = 128, allgather_cp: bool = False) -> dict:
        return shifted(data_iterator, keys, pad_multiplier, allgather_cp)

    modules["data"].get_batch = modules["model"].get_batch = get_batch
    slime.install(RUN)
    with pytest.raises(LayoutError, match="row 4 is in the loss mask but predicts no response token"):
        batch_of(modules, samples())


def read(modules: dict[str, ModuleType], tokens: Any, logits: Tensor, **changed: Any) -> Any:
    settings = {"with_entropy": True, "total_lengths": [5, 4], "response_lengths": [3, 2], "args": RUN}
    return modules["actor"].get_log_probs_and_entropy(logits, unconcat_tokens=tokens, **{**settings, **changed})


def answered(modules: dict[str, ModuleType]) -> tuple[TokenList, Tensor]:
    tokens = batch_of(modules, samples())["unconcat_tokens"]
    tokens.request.outcome = Outcome("compact")
    return tokens, tokens.request.set_output(torch.arange(24, dtype=torch.float32).view(1, 12, 2).requires_grad_())


def test_the_consumer_cuts_the_answer_into_responses(modules: dict[str, ModuleType]) -> None:
    tokens, scalars = answered(modules)
    _, result = read(modules, tokens, scalars)
    assert [each.tolist() for each in result["log_probs"]] == [[2.0, 4.0, 6.0], [12.0, 14.0]]
    assert [each.tolist() for each in result["entropy"]] == [[3.0, 5.0, 7.0], [13.0, 15.0]]
    assert all(each.requires_grad for each in result["log_probs"] + result["entropy"])
    tokens.request.entropy = "metric"
    metric_run = run_arguments(entropy_coef=0.0)
    _, result = read(modules, tokens, scalars, args=metric_run)
    assert not any(each.requires_grad for each in result["entropy"])
    assert "entropy" not in read(modules, tokens, scalars, with_entropy=False)[1]


def test_without_an_answer_the_original_reads_the_logits(modules: dict[str, ModuleType]) -> None:
    tokens = batch_of(modules, samples())["unconcat_tokens"]
    two_wide = torch.zeros(1, 12, 2)  # a vocabulary of two must not be taken for an answer
    tokens.request.outcome = Outcome("full", "any reason")
    assert read(modules, tokens, two_wide)[1]["ordinary"] is two_wide
    assert read(modules, list(tokens), two_wide)[1]["ordinary"] is two_wide


def test_case_8_3_a_head_that_never_saw_the_request_is_warned_of_once(
    modules: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    two_wide = torch.zeros(1, 12, 2)
    for _ in range(2):
        tokens = batch_of(modules, samples())["unconcat_tokens"]
        for _ in range(2):  # slime may recompute the loss
            assert read(modules, tokens, two_wide)[1]["ordinary"] is two_wide
        assert tokens.request.reason.startswith("the model's head never saw the request")
    assert [record.message[:49] for record in caplog.records] == ["full path: the model's head never saw the request"]
    counted = metrics_of_installation().take()
    assert (counted.micro_batches, counted.rows, counted.projected_rows) == (2, 24, 24)
    assert list(counted.full_path.values()) == [2]


def test_strict_raises_where_the_head_never_saw_the_request(modules: dict[str, ModuleType]) -> None:
    tokens = batch_of(modules, samples())["unconcat_tokens"]
    tokens.request.strict = True
    with pytest.raises(
        RefusedError, match="COMPACT_LOGITS=strict: the model's head never saw the request: a wrapper has"
    ):
        read(modules, tokens, torch.zeros(1, 12, 2))


def metrics_of_installation() -> HeadMetrics:
    assert slime._installation is not None
    return slime._installation.metrics


def test_case_8_9_another_tensor_than_the_head_s_is_not_read(modules: dict[str, ModuleType]) -> None:
    tokens, scalars = answered(modules)
    assert read(modules, tokens, scalars.detach())[1]["log_probs"], "as a schedule plan hands it on"
    with pytest.raises(InputError, match=r"loss was given another tensor, \(1, 12, 2\) of torch.float32; hand on what"):
        read(modules, tokens, scalars * 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"args": run_arguments(rollout_temperature=1.0)}, "asked at temperature 0.9, the loss reads at 1.0"),
        (
            {"top_p_token_ids": [[]], "top_p_token_offsets": [[]]},
            "asked without the recorded top-p sets, the loss reads with",
        ),
    ],
)
def test_an_answer_to_another_question_is_not_read(
    modules: dict[str, ModuleType], changed: dict[str, Any], message: str
) -> None:
    tokens, scalars = answered(modules)
    with pytest.raises(InputError, match=message):
        read(modules, tokens, scalars, **changed)


def test_an_answer_without_entropy_or_of_another_shape_is_not_read(modules: dict[str, ModuleType]) -> None:
    tokens, scalars = answered(modules)
    with pytest.raises(InputError, match=r"needed the head's fp32 \(1, 12, 2\), got \(1, 11, 2\)"):
        read(modules, tokens, scalars[:, :11])
    tokens.request.entropy = "metric"
    with pytest.raises(InputError, match="asked for entropy='metric', the loss reads entropy='loss'"):
        read(modules, tokens, scalars)
    tokens.request.entropy = "none"
    with torch.no_grad(), pytest.raises(InputError, match="asked for entropy='none', the loss reads entropy='metric'"):
        read(modules, tokens, scalars)


def test_recorded_nuclei_stand_at_the_kept_rows() -> None:
    layout = packed([5, 4], [3, 2], 12)
    joined = torch.arange(9)
    keep = layout.rows_of_masks([torch.tensor([1, 0, 1]), torch.tensor([1, 1])])
    selection = RowSelection.build(keep, layout.label_source, joined)
    ids = [torch.tensor([7, 7, 3, 4, 9], dtype=torch.int32), [5]]
    offsets = [torch.tensor([0, 3, 4, 5], dtype=torch.int32), [0, 1]]  # the second sample recorded one token of two
    top_p = top_p_mask(ids, offsets, layout, selection)
    assert top_p.recorded.tolist() == [True, True, True, False]
    assert list(zip(top_p.row_of.tolist(), top_p.ids.tolist(), strict=True)) == [(0, 3), (0, 7), (1, 9), (2, 5)]
    with pytest.raises(LayoutError, match="for each of 2 samples, got 1 and 2"):
        top_p_mask(ids[:1], offsets, layout, selection)
    with pytest.raises(
        InputError, match=r"the top-p set of row 1 is \[4, 8\) of 6 recorded ids; record the offsets and the ids"
    ):
        top_p_mask(ids, [torch.tensor([0, 3, 4, 8]), [0, 1]], layout, selection)


def test_log_probs_of_other_engines_are_zero_where_the_mask_is(modules: dict[str, ModuleType]) -> None:
    reported = [torch.tensor([-1.0, -90.0, -2.0]), torch.tensor([-torch.inf, -3.0])]
    rollout = {
        "loss_masks": [torch.tensor([1, 0, 3]), torch.tensor([0, 7, 1])],
        "total_lengths": [5, 99],  # of which the stand-in cuts out every other token
        "response_lengths": [3, 3],
        "rollout_log_probs": list(reported),
        "teacher_log_probs": None,
    }
    modules["actor"].compute_advantages_and_returns(RUN, rollout)
    assert [each.tolist() for each in rollout["rollout_log_probs"]] == [[-1.0, 0.0, -2.0], [0.0, -3.0]]
    assert reported[0][1] == -90 and rollout["teacher_log_probs"] is None and len(rollout["advantages"]) == 2


def test_they_are_left_alone_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    run = run_arguments(use_rollout_entropy=True)
    with slime_stand_in(run) as modules:
        slime.install()  # decided by the first pass
        reported = [torch.tensor([-1.0, -90.0])]
        rollout = {"loss_masks": [torch.tensor([1, 0])], "total_lengths": [5], "response_lengths": [2]}
        rollout["teacher_log_probs"] = reported
        modules["actor"].compute_advantages_and_returns(run, rollout)
        assert rollout["teacher_log_probs"] is reported
        slime.uninstall()
