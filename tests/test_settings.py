"""Switches, choices and numbers that are none: each public function names the setting, what came, what it takes."""

from __future__ import annotations

import ast
from fractions import Fraction

import pytest
import torch

from tests.support.called_with import CALLS, Loud, message
from tests.support.source_tree import modules

FORGE = ("compute_logprobs", "from hidden", "from a head")
FLAGS = [
    *[(name, "sum_p2") for name in ("log_probs", "linear_log_probs", "request")],
    *[(name, "fp32_logits") for name in ("linear_log_probs", "request")],
    *[(name, "tail") for name in ("topk_kl", "linear_topk_kl")],
    ("topk_kl", "inplace_backward"),
    *[(name, flag) for name in FORGE for flag in ("align", "compile")],
    *[(name, "check_ranks") for name in ("log_probs", "linear_log_probs", "topk_kl", "linear_topk_kl", *FORGE)],
    *[("request", flag) for flag in ("strict", "check_ranks")],
    *[("size", flag) for flag in ("sequence_parallel", "frozen", "fused")],
    *[("policy", flag) for flag in ("sequence_parallel", "fused")],
    ("verl", "use_chunked_topk"),
]
NO_FLAGS = [
    ("False", "'False'"),
    (-1, "-1"),
    (0, "0"),
    (2, "2"),
    (1.0, "1.0"),
    (None, "None"),
    ([], "'[]' of list"),
    (torch.tensor(True), "a tensor () of torch.bool on cpu"),
    (Loud(), "'<Loud instance at "),
]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_a_switch_is_true_or_false(name: str, flag: str) -> None:
    for value, text in NO_FLAGS:
        if value is None and flag == "check_ranks":  # for a group's first call
            continue
        error = message(lambda value=value: CALLS[name](**{flag: value}))
        assert error.startswith(f"{flag} must be True or False, got {text}")
        assert error.endswith("; pass one of the two")


@pytest.mark.parametrize("name", ["log_probs", "linear_log_probs", "request", "size"])
@pytest.mark.parametrize(
    ("value", "text"), [("on", "'on'"), (True, "True"), (None, "None"), (["loss"], "\"['loss']\" of list")]
)
def test_a_choice_is_one_of_its_words(name: str, value: object, text: str) -> None:
    error = message(lambda: CALLS[name](entropy=value))
    assert error == f"entropy must be 'none', 'metric' (value without graph) or 'loss', got {text}"


TEMPERED = [name for name in CALLS if name not in ("policy", "verl")]
A_NUMBER = "the temperature must be a number, or a tensor of one a row, got "


@pytest.mark.parametrize("name", TEMPERED)
def test_a_temperature_that_no_float_holds(name: str) -> None:
    digits = "the temperature must be positive and finite, got an int of some "
    for value, text in (
        (10**400, digits + "401 digits"),
        (-(10**400), digits + "401 digits"),
        (10**6000, digits + "6001 digits"),
        (float("1e400"), "the temperature must be positive and finite, got inf"),
        (float("nan"), "the temperature must be positive and finite, got nan"),
        (-1, "the temperature must be positive and finite, got -1"),
        (Fraction(10**400), "the temperature must be positive and finite, got 'Fraction(1000"),
        (True, A_NUMBER + "True"),
        ("0" * 10**6, A_NUMBER + "'000"),
        ([0.7] * 10**6, A_NUMBER + "'[0.7, 0.7, 0.7, 0.7, 0.7, 0.7, ...]' of list"),
        (Loud(), A_NUMBER + "'<Loud instance at "),
        (1e-40, "the temperature must be at least 1e-30"),
    ):
        assert message(lambda value=value: CALLS[name](temperature=value)).startswith(text)
    CALLS[name](temperature=Fraction(1, 2))
    CALLS[name](temperature=10**30)


KL = ("topk_kl", "linear_topk_kl")


@pytest.mark.parametrize("name", KL)
def test_bounds_of_the_kl_are_numbers_in_their_range(name: str) -> None:
    clamp = "log_prob_min_clamp bounds log-probs, which are at most 0, got "
    for value, text in (
        (10**400, "an int of some 401 digits"),
        (torch.zeros(10**5), "a tensor (100000,) of torch.float32 on cpu"),
        (torch.tensor(-1.0), "a tensor () of torch.float32 on cpu"),
        (True, "True"),
        (False, "False"),
        ("-1", "'-1'"),
        (float("nan"), "nan"),
        (Loud(), "'<Loud instance at "),
    ):
        assert message(lambda value=value: CALLS[name](log_prob_min_clamp=value)).startswith(clamp + text)
    assert message(lambda: CALLS[name](tail=True, log_prob_min_clamp=-(10**6000))).startswith(
        "the tail-aware KL takes no log_prob_min_clamp, got an int of some 6001 digits: clamped"
    )
    eps = "tail_mass_eps must lie strictly between 0 and 1, got "
    for value, text in (
        (10**400, "an int of some 401 digits"),
        (torch.zeros(10**5), "a tensor (100000,) of torch.float32 on cpu"),
        (None, "None"),
        (True, "True"),
        (0, "0"),
        ("1e-6", "'1e-6'"),
        (b"0" * 10**6, "b'000"),
    ):
        assert message(lambda value=value: CALLS[name](tail_mass_eps=value)).startswith(eps + text)
    as_floats = CALLS[name](log_prob_min_clamp=-1.5).loss
    assert torch.equal(CALLS[name](log_prob_min_clamp=Fraction(-3, 2)).loss, as_floats)
    assert torch.equal(CALLS[name](log_prob_min_clamp=-(10**400)).loss, CALLS[name]().loss)
    half = CALLS[name](tail=True, tail_mass_eps=0.5).loss
    assert torch.equal(CALLS[name](tail=True, tail_mass_eps=Fraction(1, 2)).loss, half)


def test_a_share_is_a_number() -> None:
    error = "the density is a share of the log-probs, from 0 to 1, got "
    for value, text in ((10**400, "an int of some 401 digits"), ("all", "'all'"), (1.5, "1.5"), (True, "True")):
        assert message(lambda value=value: CALLS["policy"](density=value)) == error + text


def whole_values(tree: ast.AST) -> list[str]:
    """What the raises of a module print by `repr`."""
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    values = [node for each in raises for node in ast.walk(each) if isinstance(node, ast.FormattedValue)]
    return [ast.unparse(value.value) for value in values if value.conversion == ord("r")]


def test_no_message_prints_the_whole_of_what_came() -> None:
    found = {module.name: whole_values(module.tree) for module in modules()}
    assert {name: values for name, values in found.items() if values} == {
        "compact_logits.integrations.slime.consumer": ["request.entropy", "wanted"],
        "compact_logits.integrations.verl": ["__name__", "name"],
        "compact_logits.megatron.postprocess": ["missing[0]"],
    }
