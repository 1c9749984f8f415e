"""Every error of the ground and of the head's modules: what was needed, what came, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits import CompactLogitsError, RowSelection, VocabShard, errors, linear_log_probs, log_probs
from compact_logits.config import Config
from compact_logits.errors import InputError

NAN, INF = float("nan"), float("inf")


def head(**changed: Any) -> Any:
    given = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(7, 4),
        "targets": torch.zeros(3, dtype=torch.int64),
        **changed,
    }
    return linear_log_probs(**given)


def logits(**changed: Any) -> Any:
    given = {"logits": torch.zeros(2, 3, 7), "targets": torch.zeros(2, 3, dtype=torch.int64), **changed}
    return log_probs(**given)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows(keep: list[int] | Tensor, source: list[int] | Tensor, tokens: Tensor | None = None) -> RowSelection:
    keep = torch.tensor(keep, dtype=torch.bool) if isinstance(keep, list) else keep
    source = torch.tensor(source) if isinstance(source, list) else source
    return RowSelection.build(keep, source, torch.arange(10) if tokens is None else tokens)


UNFIT = "needed hidden (rows, hidden) and weight (vocab_local, hidden) with the same hidden size, got "
NOT_THE_LOGITS = "; pass the hidden states, not the logits"
BAD_CHUNK = "chunk_bytes must be a positive whole number of bytes or None, got "
BAD_TEMPERATURE = "the temperature must be positive and finite, got "
TOKENS = "needed keep (rows,) and integer tokens (tokens,), got "
HOST = "needed keep and label_source on the CPU; copy the loss mask there once a micro-batch"
MASKS = "needed bool keep and int64 label_source of one length, got "

CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: VocabShard(-1, 3), "a vocabulary shard needs 0 <= start <= stop, got start=-1, stop=3"),
    (lambda: VocabShard(4, 3), "a vocabulary shard needs 0 <= start <= stop, got start=4, stop=3"),
    (
        lambda: VocabShard(3, 7),
        "a vocabulary shard without other ranks is the whole vocabulary and starts at 0, got start=3; "
        "pass the tensor-parallel group",
    ),
    (lambda: head(hidden=torch.zeros(3, 5)), UNFIT + "hidden (3, 5) and weight (7, 4)" + NOT_THE_LOGITS),
    (lambda: head(hidden=torch.zeros(1, 3, 4)), UNFIT + "hidden (1, 3, 4) and weight (7, 4)" + NOT_THE_LOGITS),
    (lambda: head(weight=torch.zeros(4)), UNFIT + "hidden (3, 4) and weight (4,)" + NOT_THE_LOGITS),
    (
        lambda: head(weight=torch.zeros(7, 4).bfloat16()),
        "hidden and weight need one floating dtype, got torch.float32 and torch.bfloat16; cast one of them",
    ),
    (
        lambda: head(hidden=torch.zeros(3, 4).long(), weight=torch.zeros(7, 4).long()),
        "hidden and weight need one floating dtype, got torch.int64 and torch.int64; cast one of them",
    ),
    (
        lambda: head(bias=torch.zeros(4)),
        "needed a bias (7,) of torch.float32, got (4,) of torch.float32",
    ),
    (
        lambda: head(bias=torch.zeros(7).double()),
        "needed a bias (7,) of torch.float32, got (7,) of torch.float64",
    ),
    (
        lambda: head(shard=VocabShard(0, 6)),
        "the shard [0, 6) holds 6 ids but weight has 7; "
        "pass the VocabShard of this rank's own slice, or no shard where the whole vocabulary is here",
    ),
    (
        lambda: logits(shard=VocabShard(0, 14)),
        "the shard [0, 14) holds 14 ids but logits has 7; "
        "pass the VocabShard of this rank's own slice, or no shard where the whole vocabulary is here",
    ),
    (
        lambda: head(weight=torch.zeros(0, 4)),
        "weight holds no vocabulary; an empty slice needs the VocabShard that says so",
    ),
    (
        lambda: logits(logits=torch.zeros(2, 3, 7).int()),
        "needed floating logits (..., vocab_local), got (2, 3, 7) of torch.int32",
    ),
    (lambda: logits(logits=torch.tensor(1.0)), "needed floating logits (..., vocab_local), got () of torch.float32"),
    (lambda: head(targets=torch.zeros(3).int()), "needed int64 targets (3,), got (3,) of torch.int32"),
    (lambda: head(targets=ids(1, 2)), "needed int64 targets (3,), got (2,) of torch.int64"),
    (lambda: logits(targets=ids(1, 2)), "needed int64 targets (2, 3), got (2,) of torch.int64"),
    (
        lambda: head(targets=ids(1, -100, 2)),
        "targets must be vocabulary ids, got -100; select the rows that count instead of marking rows",
    ),
    (lambda: head(targets=ids(1, 7, 2)), "targets must be below the vocabulary size 7, got 7"),
    (
        lambda: head(temperature=torch.ones(2)),
        "a temperature per row must be floating (3,), got (2,) of torch.float32",
    ),
    (
        lambda: head(temperature=torch.ones(3).long()),
        "a temperature per row must be floating (3,), got (3,) of torch.int64",
    ),
    (
        lambda: head(temperature=torch.ones(3, requires_grad=True)),
        "the temperature gets no gradient here; pass temperature.detach()",
    ),
    (lambda: head(chunk_bytes=0), BAD_CHUNK + "0"),
    (lambda: head(chunk_bytes=-5), BAD_CHUNK + "-5"),
    (lambda: head(chunk_bytes=1.5), BAD_CHUNK + "1.5"),
    (lambda: logits(chunk_bytes=True), BAD_CHUNK + "True"),
    (lambda: logits(chunk_bytes="1MiB"), BAD_CHUNK + "'1MiB'"),
    (lambda: head(entropy="on"), "entropy must be 'none', 'metric' (value without graph) or 'loss', got 'on'"),
    (lambda: rows(torch.zeros(2, dtype=torch.bool, device="meta"), [1, -1]), HOST),
    (lambda: rows([0, 0], torch.zeros(2, dtype=torch.int64, device="meta")), HOST),
    (lambda: rows(torch.ones(2), [1, -1]), MASKS + "(2,) of torch.float32 and (2,) of torch.int64"),
    (lambda: rows([1, 0, 0], [1, -1]), MASKS + "(3,) of torch.bool and (2,) of torch.int64"),
    (lambda: rows([1, 0], torch.ones(2, dtype=torch.bool)), MASKS + "(2,) of torch.bool and (2,) of torch.bool"),
    (lambda: rows([1, 0], torch.ones(2, dtype=torch.uint8)), MASKS + "(2,) of torch.bool and (2,) of torch.uint8"),
    (
        lambda: rows(torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.int64)),
        TOKENS + "(1, 2) and (10,) of torch.int64",
    ),
    (
        lambda: rows([1, 1, 1], [1, -1, 3]),
        "row 1 is kept but has no label: it is the last token of its sequence, or padding; "
        "the loss mask must be aligned to the row that predicts the token",
    ),
    (
        lambda: rows([1, 1, 1], [1, 2, 10]),
        "row 2 is kept but its label is token 10 of only 10; pass the tokens of all the micro-batch's sequences",
    ),
    (lambda: rows([1], [0], torch.zeros(2, 5).long()), TOKENS + "(1,) and (2, 5) of torch.int64"),
    (lambda: rows([1], [0], torch.zeros(5)), TOKENS + "(1,) and (5,) of torch.float32"),
    (lambda: rows([0] * 6, [-1] * 6).counts(4), "6 rows do not divide into 4 sequence-parallel shards; pad them"),
    (lambda: rows([0] * 6, [-1] * 6).of_shard(0, 0), "6 rows do not divide into 0 sequence-parallel shards; pad them"),
]
KEPT = rows([1, 0, 1], [1, 2, 3])
NOT_SELECTED = " is read but was not selected; build the selection of all masks that are read: RowSelection.of_masks"


def mask(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


CASES += [
    (
        lambda given=given: head(vocab_size=given),
        f"vocab_size must be a positive whole number of ids or None, got {given!r}",
    )
    for given in (0, -1, True, 2.5)
]
CASES += [
    (lambda: head(vocab_size=8), "vocab_size is 8, but there are only 7 columns"),
    (
        lambda: head(targets=ids(1, 5, 2), vocab_size=5),
        "targets must be below vocab_size, 5, got 5: that id is padding",
    ),
    (
        lambda: RowSelection.of_masks([], ids(1), ids(1)),
        "needed one or more bool masks of one shape, got none",
    ),
    (
        lambda: RowSelection.of_masks([mask(1, 0), mask(1)], ids(1, 2), ids(1)),
        "needed one or more bool masks of one shape, got (2,) of torch.bool, (1,) of torch.bool",
    ),
    (
        lambda: KEPT.read(torch.zeros(2), mask(1, 0)),
        "needed a bool mask (3,) on the CPU, got (2,) of torch.bool on cpu",
    ),
    (
        lambda: KEPT.read(torch.zeros(4), mask(1, 0, 0)),
        "needed values of the 2 kept rows or of all 3, got (4,)",
    ),
    (lambda: KEPT.read(torch.zeros(2), mask(1, 1, 0)), "row 1" + NOT_SELECTED),
]
ONE_DEVICE = "needed all tensors on one device, got "
A_NUMBER = "the temperature must be a number, or a tensor of one a row, got "
TOO_SMALL = "the temperature must be at least 1e-30, or logits are infinite when divided by it, got "
LARGER = "; pass a larger one"


class Foreign(torch.Tensor):
    """A tensor that says of itself what a DTensor does."""

    device_mesh = None


CASES += [
    (lambda: head(hidden=None), "needed a tensor as hidden, got None"),
    (lambda: head(targets=[1, 2, 3]), "needed a tensor as targets, got '[1, 2, 3]' of list"),
    (lambda: head(bias="x"), "needed a tensor as bias, got 'x'"),
    (lambda: logits(logits=None), "needed a tensor as logits, got None"),
    (
        lambda: logits(logits=torch.zeros(2, 3, 7).to_sparse()),
        "needed a dense tensor as logits, got one of torch.sparse_coo; pass rows of one width, as logits.to_dense()",
    ),
    (
        lambda: logits(logits=torch.nested.nested_tensor([torch.zeros(3, 7), torch.zeros(2, 7)], layout=torch.jagged)),
        "needed a dense tensor as logits, got a nested tensor; pass rows of one width, as logits.to_dense()",
    ),
    (
        lambda: head(weight=torch.zeros(7, 4).as_subclass(Foreign)),
        "weight is a DTensor; pass its local tensor and the VocabShard of it, or call the functions of "
        "compact_logits.integrations.torchforge, which take DTensors",
    ),
    (
        lambda: head(weight=torch.zeros(7, 4, device="meta")),
        ONE_DEVICE + "hidden on cpu, weight on meta, targets on cpu",
    ),
    (lambda: logits(targets=ids(1).to("meta")), ONE_DEVICE + "logits on cpu, targets on meta"),
    (lambda: head(shard=(0, 7)), "needed a VocabShard or None as shard, got '(0, 7)' of tuple"),
    (lambda: head(temperature="x"), A_NUMBER + "'x'"),
    (lambda: logits(temperature=None), A_NUMBER + "None"),
    (lambda: logits(temperature=True), A_NUMBER + "True"),
    (
        lambda: head(temperature=torch.ones(3, device="meta")),
        "a temperature per row must lie on cpu, as the rows do, got meta",
    ),
    (lambda: head(temperature=1e-40), TOO_SMALL + "1e-40" + LARGER),
    (lambda: head(temperature=torch.tensor([1.0, 1e-35, 1.0]).double()), TOO_SMALL + "1e-35" + LARGER),
]
CASES += [
    (lambda given=given: head(temperature=given), BAD_TEMPERATURE + text)
    for given, text in (
        (0.0, "0.0"),
        (-1.0, "-1.0"),
        (NAN, "nan"),
        (INF, "inf"),
        (torch.tensor([1.0, 0.0, 2.0]), "0.0"),
        (torch.tensor([1.0, -2.0, 2.0]), "-2.0"),
        (torch.tensor([1.0, NAN, 2.0]), "nan"),
        (torch.tensor([1.0, INF, 2.0]), "inf"),
    )
]


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("call", "text"), CASES, ids=[text[:60] for _, text in CASES])
def test_case_10_3_and_all_other_wrong_inputs(call: Callable[[], Any], text: str) -> None:
    assert message(call) == text


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30, 1e300])
def test_a_temperature_that_is_taken_gives_numbers(temperature: float) -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    result = head(hidden=hidden, weight=torch.randn(7, 4), temperature=temperature, entropy="loss")
    (result.log_probs.sum() + result.entropy.sum()).backward()
    assert bool(result.entropy.isfinite().all()) and bool(hidden.grad.isfinite().all())
    assert not bool(result.log_probs.isnan().any())


def test_all_are_value_errors_with_a_common_base() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, CompactLogitsError) and issubclass(kind, ValueError) and kind.__doc__
    with pytest.raises(CompactLogitsError):
        Config.from_env({"COMPACT_LOGITS": "perhaps"})


def test_an_error_leaves_nothing_behind() -> None:
    hidden = torch.zeros(3, 4, requires_grad=True)
    message(lambda: head(hidden=hidden, temperature=0.0))
    head(hidden=hidden).log_probs.sum().backward()
    assert hidden.grad is not None
