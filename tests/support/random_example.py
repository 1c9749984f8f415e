"""A random micro-batch: all that two of them may differ in, and how hypothesis draws one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hypothesis import strategies as st

from tests.support.linear_head import SCORERS

__all__ = ["Example", "examples"]

DTYPES = ("float32", "float64", "bfloat16", "float16")
MASKS = ("holes", "all", "sparse", "one", "tail", "all", "holes", "none")
STRIDES = ("plain", "transposed", "cut")
INCOMING = ("responses", "contiguous", "strided", "expanded", "first output", "second output")
BUDGETS = (None, 1, 400, 1500, 4000)
MOST_RANKS = 4


@dataclass(frozen=True)
class Example:
    """Numbers alone: the tensors follow from `seed`, on every rank the same."""

    seed: int
    scorer: str
    given: str  # "hidden", or "logits" that exist already
    tp: int
    cp: int
    spread: bool  # context-parallel ranks are processes too, tensor-parallel groups parts of the world
    sequence_parallel: bool
    layout: str
    lengths: tuple[tuple[int, int], ...]  # a sample's total and response length
    masks: tuple[str, ...]
    padding: int
    cuts: tuple[int, ...]  # where the shards of the vocabulary begin and end
    real: int  # ids from here on are padding
    hidden: int
    dtype: str
    exact: bool  # logits that every dtype can hold
    chunk_bytes: int | None
    narrow: bool  # slices of a few columns, of which the budget keeps as many as of a real head's
    strides: tuple[str, str]  # of hidden states or logits, and of the weight
    incoming: str
    temperature: float | str
    bias: bool
    k: int
    trained: tuple[str, ...]
    in_place: bool = False  # the weight's gradient is added to an fp32 sum

    @property
    def world(self) -> int:
        return self.tp * self.cp if self.spread else self.tp

    @property
    def vocab(self) -> int:
        return self.cuts[-1]

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Example:
        return cls(**{name: _tuples(value) for name, value in json.loads(text).items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@st.composite
def examples(draw: st.DrawFn, ranks: bool = True) -> Example:
    """With `ranks=False` the vocabulary is whole, and one process plays all context-parallel ranks."""

    def one_of(values: Any) -> Any:
        return draw(st.sampled_from(values))

    tp = one_of((1, 2, 2, 3, 4)) if ranks else 1
    cp = one_of((1, 1, 2, 3))
    given = one_of(("hidden", "hidden", "hidden", "logits"))
    sequence_parallel = tp > 1 and given == "hidden" and draw(st.booleans())
    totals = [one_of((7, 12, 9, 16, 5, 3, 12, 1, 0)) for _ in range(one_of((2, 3, 4, 1, 2, 3, 4, 0)))]
    vocab = draw(st.integers(2, 40))
    narrow = one_of((True, False))
    inner = sorted(draw(st.integers(0, vocab)) for _ in range(tp - 1))
    scorer = one_of([each for each in SCORERS if given == "hidden" or each != "top_p"])
    incoming = one_of(INCOMING)
    if incoming == "second output" and scorer not in ("loss", "sum_p2", "top_p"):
        incoming = "first output"
    dtype = one_of(DTYPES)
    bias = given == "hidden" and draw(st.booleans())
    inputs = ("hidden", "weight", *(("bias",) if bias else ())) if given == "hidden" else ("logits",)
    return Example(
        seed=draw(st.integers(0, 2**31 - 1)),
        scorer=scorer,
        given=given,
        tp=tp,
        cp=cp,
        spread=ranks and cp > 1 and tp * cp <= MOST_RANKS and draw(st.booleans()),
        sequence_parallel=sequence_parallel,
        layout=one_of(("zigzag", "contiguous")) if cp > 1 else "packed",
        lengths=tuple(
            (total, one_of((total - total // 3, total // 2, total, total - total // 4, min(total, 1), 0)))
            for total in totals
        ),
        masks=tuple(one_of(MASKS) for _ in totals),
        padding=draw(st.integers(0, 5)),
        cuts=(0, *inner, vocab),
        real=vocab if scorer in ("topk", "topk clamped", "tail") else vocab - one_of((0, 0, 1, vocab // 3)),
        hidden=draw(st.integers(1, 3 if narrow else 8)),  # few, so that a quarter of them is less than a slice
        dtype=dtype,
        exact=dtype in ("bfloat16", "float16") or draw(st.booleans()),
        chunk_bytes=one_of(BUDGETS),
        narrow=narrow,
        strides=(one_of(STRIDES), one_of(STRIDES)),
        incoming=incoming,
        temperature=one_of((1.0, 0.7, 2.5, "rows")),
        bias=bias,
        k=min(draw(st.integers(1, 5)), vocab),
        trained=one_of((inputs, inputs, inputs, inputs[:1], inputs[1:])),
        in_place=given == "hidden" and dtype != "float64" and one_of((False, False, True, False)),
    )
