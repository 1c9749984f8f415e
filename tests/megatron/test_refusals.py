"""Setups the head is not proven for: the run is the run without us, to the bit, and the reason has a name."""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.megatron import refusals
from tests.support.gpt_paths import VOCAB, Cut, Micro, micro_batch
from tests.support.marked_gpt import Came, call, came_of, differences, marked
from tests.support.ranks import RankPool
from tests.support.refused_setups import CASES, NATIVE, TAKES_MTP_KWARGS, Case

NAMES = sorted(CASES)
# Sentences that no setup of this version leads to.
ELSEWHERE = (
    *(("MuP scales the logits after",) if NATIVE else ("MuP multiplies the logits by", "the call has an output proc")),
    *(("multi-token prediction shares",) if NATIVE or TAKES_MTP_KWARGS else ()),
)


def output_of(case: Case, model: Any, micro: Micro, loss_mask: Tensor | None, arguments: dict[str, Any]) -> Tensor:
    if not case.direct:
        return call(model, micro, loss_mask, **arguments)
    hidden = torch.randn(micro.loss_mask.shape[1], 1, model.config.hidden_size, generator=torch.Generator())
    given = dict.fromkeys(("input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
    given |= {"hidden_states": hidden, "loss_mask": micro.loss_mask if loss_mask is None else loss_mask}
    output: Tensor = model._postprocess(**{**given, **arguments})
    return output


def run_case(case: Case, *, asks: bool, strict: bool = False) -> tuple[Came | str, str | None]:
    """Output and gradients, or the error's own words where the setup cannot run; and the reason of a refusal."""
    from compact_logits.megatron import attach

    micro = micro_batch(0, Cut(1), "holes")
    model = build_gpt(tp=1, vocab=VOCAB, layers=1)
    loss_mask, request = marked(micro, **{"strict": strict, **case.asked(micro)}) if asks else (None, None)
    with ExitStack() as stack:
        arguments = case.prepare(model, stack) or {}
        if asks:
            attach(model)
        attributes = set(vars(model.output_layer))
        try:
            output = output_of(case, model, micro, loss_mask, arguments)
            reason = None if request is None or request.outcome is None else request.outcome.reason
            came: Came | str = came_of(model, output, lambda logits: (logits * logits.detach().cos()).sum())
        except (AttributeError, RuntimeError, TypeError) as error:
            came = f"{type(error).__name__}: {error}"
            reason = None if request is None or request.outcome is None else request.outcome.reason
        assert set(vars(model.output_layer)) == attributes
    assert request is None or not request.compact
    return came, reason


def every_case(rank: int, world: int) -> dict[str, tuple[str | None, list[str]]]:
    """For each setup the reason, and what was not as without us."""
    found = {}
    with cpu_megatron(rank, world, tp=1):
        for name in NAMES:
            plain, _ = run_case(CASES[name], asks=False)
            ours, reason = run_case(CASES[name], asks=True)
            if isinstance(plain, Came) and isinstance(ours, Came):
                gradients = [gradient for gradient in plain.gradients.values() if gradient is not None]
                assert CASES[name].without_gradient or any(bool(each.any()) for each in gradients), name
                unlike = differences(plain, ours)
            else:
                unlike = [] if plain == ours else [f"{plain} without us, {ours} with us"]
            found[name] = (reason, unlike)
    return found


@pytest.fixture(scope="module")
def outcomes(rank_pool: RankPool) -> dict[str, tuple[str | None, list[str]]]:
    found: dict[str, tuple[str | None, list[str]]] = rank_pool.run(1, every_case, timeout=300)[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_case_8_7_and_8_8_and_10_4_and_12_2_the_full_path_runs_as_without_us(
    outcomes: dict[str, tuple[str | None, list[str]]], name: str
) -> None:
    reason, unlike = outcomes[name]
    assert reason is not None and re.search(CASES[name].reason, reason), reason
    assert unlike == []


def sentences() -> list[str]:
    """What `refusals` returns as a reason, with {} where a value stands."""
    returned = [node.value for node in ast.walk(ast.parse(inspect.getsource(refusals))) if isinstance(node, ast.Return)]
    found = []
    for value in returned:
        said = value.orelse if isinstance(value, ast.IfExp) else value
        if isinstance(said, ast.JoinedStr):
            found.append("".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in said.values))
        elif isinstance(said, ast.Constant) and isinstance(said.value, str):
            found.append(said.value)
    return found


def test_every_sentence_is_reached(outcomes: dict[str, tuple[str | None, list[str]]]) -> None:
    reasons = [reason for reason, _ in outcomes.values() if reason is not None]
    assert len(sentences()) > 25
    unreached = [
        sentence
        for sentence in sentences()
        if not any(re.fullmatch(".*".join(map(re.escape, sentence.split("{}"))), reason) for reason in reasons)
    ]
    assert [each for each in unreached if not each.startswith(ELSEWHERE)] == []


def strict_texts(rank: int, world: int) -> dict[str, str]:
    from compact_logits.errors import RefusedError

    texts = {}
    with cpu_megatron(rank, world, tp=1):
        for name in NAMES:
            try:
                run_case(CASES[name], asks=True, strict=True)
            except RefusedError as error:
                texts[name] = str(error)
    return texts


def test_strict_raises_each_reason(rank_pool: RankPool, outcomes: dict[str, tuple[str | None, list[str]]]) -> None:
    texts = rank_pool.run(1, strict_texts, timeout=300)[0]
    assert texts == {
        name: f"COMPACT_LOGITS=strict: {reason}; set COMPACT_LOGITS=1 to let the full path run"
        for name, (reason, _) in outcomes.items()
    }
