"""One linear head with its rows, scored three ways: in fp64, in plain torch of the same dtype, by the compact path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from compact_logits import VocabShard, linear_log_probs, linear_topk_kl, log_probs, reference, topk_kl
from compact_logits.engine.linear import score_hidden
from compact_logits.engine.scorer import Scorer
from compact_logits.scorers.log_prob_scorer import LogProbScorer, inverse_temperatures
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from compact_logits.scorers.topk_scorer import TopKScorer
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth

__all__ = ["CLAMP", "SCORERS", "Head", "Results", "assert_as_good_as_plain", "named_outputs"]

# Log-prob with no entropy, one without and one with a graph, and with the squares; then the other scorers.
SCORERS = ("none", "metric", "loss", "sum_p2", "top_p", "topk", "topk clamped", "tail")
CLAMP = -3.0

# "log_probs" or "loss" and the other outputs by their names, and "d_<input>".
Results = dict[str, Tensor | None]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Head:
    """Inputs of a head, and the gradients that come back for its first output and for the entropy."""

    hidden: Tensor  # (rows, hidden)
    weight: Tensor  # (vocab, hidden)
    targets: Tensor  # (rows,) int64
    d_log_probs: Tensor  # (rows,)
    d_entropy: Tensor  # (rows,)
    bias: Tensor | None = None  # (vocab,)
    temperature: float | Tensor = 1.0
    mask: TopPMask | None = None
    teacher_log_probs: Tensor | None = None  # (rows, k)
    teacher_ids: Tensor | None = None  # (rows, k) int64

    @classmethod
    def random(
        cls,
        rows: int,
        hidden: int,
        vocab: int,
        dtype: torch.dtype = torch.float32,
        *,
        bias: bool = False,
        temperature: float | str = 1.0,
        seed: int = 0,
        k: int = 5,
    ) -> Head:
        """Logits a few units wide, gradients of both signs. `temperature="rows"` draws one a row, from 0.5 to 1.5."""
        source = torch.Generator().manual_seed(seed)
        work = torch.promote_types(dtype, torch.float32)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        head = cls(
            hidden=normal(rows, hidden).to(dtype),
            weight=(normal(vocab, hidden) * 2 / hidden**0.5).to(dtype),
            targets=torch.randint(0, vocab, (rows,), generator=source),
            d_log_probs=normal(rows).to(work),
            d_entropy=normal(rows).to(work),
            bias=normal(vocab).to(dtype) if bias else None,
            temperature=0.5 + torch.rand(rows, generator=source) if temperature == "rows" else temperature,
        )
        sizes = torch.randint(0, 9, (rows,), generator=source)
        stops = sizes.cumsum(0)
        ids = torch.randint(vocab, (int(sizes.sum()),), generator=source)
        logits = head.hidden.double() @ head.weight.double().T
        top = (0.7 * logits + normal(rows, vocab)).log_softmax(dim=1).topk(min(k, vocab), dim=1)
        return replace(
            head,
            mask=TopPMask.build(ids, stops - sizes, stops, sizes > 2),
            teacher_log_probs=top.values.to(work),
            teacher_ids=top.indices,
        )

    @property
    def wide(self) -> Head:
        """The very numbers that these tensors hold, in fp64."""
        tensors = {name: each.double() for name, each in vars(self).items() if _is_float(each)}
        return replace(self, **tensors)

    def of_rows(self, rows: Tensor | slice) -> Head:
        cut = {
            n: each[rows] for n, each in vars(self).items() if isinstance(each, Tensor) and n not in ("weight", "bias")
        }
        if self.mask is not None:
            stops = self.mask.row_of.bincount(minlength=len(self.targets)).cumsum(0)
            starts = torch.cat([stops[:0].new_zeros(1), stops])[: len(stops)]
            cut["mask"] = TopPMask.build(self.mask.ids, starts[rows], stops[rows], self.mask.recorded[rows])
        return replace(self, **cut)

    def plain(self, what: str = "loss", cuts: Sequence[int] = (), *, vocab_size: int | None = None) -> Results:
        """Dense logits through `reference` and ordinary autograd.

        With `cuts`, the gradient of `hidden` is summed over these slices of the vocabulary in the model's dtype, as an
        all-reduce does.
        """
        columns = len(self.weight) if vocab_size is None else vocab_size
        bounds = [0, *(min(cut, columns) for cut in cuts), columns]

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            parts = [slice(*ends) for ends in pairwise(bounds)]
            products = [linear(hidden, weight[part], None if bias is None else bias[part]) for part in parts]
            return self.defined(torch.cat(products, dim=1), what)

        return self._run(score)

    def truth(self, what: str = "loss", *, vocab_size: int | None = None) -> Results:
        return self.wide.plain(what, vocab_size=vocab_size)

    def defined(
        self,
        logits: Tensor,  # (rows, vocab)
        what: str,
    ) -> Outputs:
        """The scorer's outputs by their definition over dense logits."""
        if what in _KL:
            assert self.teacher_log_probs is not None and self.teacher_ids is not None
            settings: Any = {"temperature": self.temperature, **_KL[what]}
            return reference.topk_kl(logits, self.teacher_log_probs, self.teacher_ids, **settings)
        log_prob, entropy = reference.log_probs(logits, self.targets, temperature=self.temperature)
        if what == "top_p":
            log_prob = self._replayed(logits, log_prob)
        found = {"log_probs": log_prob}
        if what != "none":
            found["entropy"] = entropy.detach() if what == "metric" else entropy
        if what == "sum_p2":
            found["sum_p2"] = reference.sum_p2(logits, temperature=self.temperature).detach()
        return found

    def scorer(self, what: str, shard: VocabShard) -> Scorer:
        """The engine's scorer; its outputs are those of `names(what)`."""
        dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        inverse = inverse_temperatures(self.temperature, self.targets, dtype)
        if what in _KL:
            assert self.teacher_log_probs is not None and self.teacher_ids is not None
            clamp = _KL[what].get("log_prob_min_clamp")
            log_q = self.teacher_log_probs if clamp is None else self.teacher_log_probs.clamp(min=clamp)
            return TopKScorer(log_q, self.teacher_ids, shard, inverse, clamp, 1e-6 if what == "tail" else None)
        entropy: Any = {"sum_p2": "loss", "top_p": "loss"}.get(what, what)
        base = LogProbScorer(self.targets, shard, inverse, entropy, sum_p2=what == "sum_p2")
        if what != "top_p":
            return base
        assert self.mask is not None
        return TopPScorer(base, self.mask)

    def compact(self, what: str = "loss", **options: Any) -> Results:
        """Through the public function, with its options; top-p replay and a `gather` through the engine."""
        return self._run(lambda *tensors: self.scored(what, *tensors, **options))

    def scored(self, what: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Outputs:
        given: Any = {"bias": bias, "temperature": self.temperature, **options}
        if what == "top_p" or "gather" in options:
            whole = VocabShard(0, len(weight))
            shard, vocab_size = given.pop("shard", None) or whole, given.pop("vocab_size", None)
            given = {name: value for name, value in given.items() if name in ("gather", "weight_grad", "chunk_bytes")}
            scorer = self.scorer(what, shard.below(vocab_size))
            return named_outputs(what, score_hidden(hidden, weight, bias, scorer, group=shard.group, **given))
        if what in _KL:
            return _of_kl(
                linear_topk_kl(hidden, weight, self.teacher_log_probs, self.teacher_ids, **given, **_KL[what])
            )
        return _of_stats(linear_log_probs(hidden, weight, self.targets, **given, **_settings(what)))

    def with_logits(self, what: str = "loss", **options: Any) -> Results:
        """Through a plain product and `log_probs` or `topk_kl`, with its options."""

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            logits, given = linear(hidden, weight, bias), {"temperature": self.temperature, **options}
            if what in _KL:
                return _of_kl(topk_kl(logits, self.teacher_log_probs, self.teacher_ids, **given, **_KL[what]))
            return _of_stats(log_probs(logits, self.targets, **given, **_settings(what)))

        return self._run(score)

    def _run(self, score: Callable[..., Outputs]) -> Results:
        inputs = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        leaves = {n: None if t is None else t.detach().clone().requires_grad_() for n, t in inputs.items()}
        outputs = score(*leaves.values())
        roots = [(each, self.d_entropy if n == "entropy" else self.d_log_probs) for n, each in outputs.items()]
        roots = [(each, grad) for each, grad in roots if each.requires_grad][: 1 + ("entropy" in outputs)]
        torch.autograd.backward(*zip(*roots, strict=True))
        gradients = {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf is not None}
        if self.hidden.dtype.itemsize == 2:  # several logits may be the k-th largest
            outputs = {name: each for name, each in outputs.items() if not name.startswith("overlap")}
        return {name: output.detach() for name, output in outputs.items()} | gradients

    def _replayed(self, logits: Tensor, whole: Tensor) -> Tensor:  # (rows,)
        assert self.mask is not None
        keep = torch.zeros(logits.shape, dtype=torch.bool)
        real = self.mask.ids < logits.shape[1]
        keep[self.mask.row_of[real], self.mask.ids[real]] = True
        keep.scatter_(1, self.targets[:, None], True)
        z = logits.to(whole.dtype)
        z = z / (self.temperature[:, None] if isinstance(self.temperature, Tensor) else self.temperature)
        replayed = z.gather(1, self.targets[:, None])[:, 0] - z.masked_fill(~keep, -torch.inf).logsumexp(dim=1)
        return torch.where(self.mask.recorded, replayed, whole)


_KL: dict[str, dict[str, Any]] = {"topk": {}, "topk clamped": {"log_prob_min_clamp": CLAMP}, "tail": {"tail": True}}
_KL_NAMES = ("loss", "student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage")
_TAIL_NAMES = ("head_loss", "tail_loss", "student_tail_mass", "teacher_tail_mass")


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _settings(what: str) -> dict[str, Any]:
    return {"entropy": "loss", "sum_p2": True} if what == "sum_p2" else {"entropy": what}


def named_outputs(what: str, outputs: tuple[Tensor, ...]) -> Outputs:
    names = ("log_probs", "entropy", "sum_p2") if what not in _KL else (*_KL_NAMES, *_TAIL_NAMES)
    return dict(zip(names, outputs, strict=False))


def _of_stats(stats: Any) -> Outputs:
    named = {"log_probs": stats.log_probs, "entropy": stats.entropy, "sum_p2": stats.sum_p2}
    return {name: each for name, each in named.items() if each is not None}


def _of_kl(result: Any) -> Outputs:
    return {name: each for name, each in result._asdict().items() if each is not None}


def assert_as_good_as_plain(
    ours: Results,
    plain: Results,
    truth: Results,
    *,
    factor: float = 1.1,
    floor: float = 1e-6,
    where: str = "",
) -> None:
    """Every result in `truth`, outputs by their largest error and gradients by their L2 error; no more and no less."""
    assert ours.keys() == plain.keys() == truth.keys() - _missing(ours, truth), f"{where}{list(ours)}, {list(plain)}"
    for name, of_ours in ours.items():
        if name == "overlap_count":
            assert of_ours is not None and torch.equal(of_ours, truth[name]), f"{where}{name}"
            continue
        check = assert_gradient_close_to_truth if name.startswith("d_") else assert_close_to_truth
        check(of_ours, plain[name], truth[name], factor=factor, floor=floor, name=f"{where}{name}")  # type: ignore[arg-type]


def _missing(ours: Results, truth: Results) -> set[str]:
    """In 16 bits there is no one top k to compare."""
    return {name for name in truth if name.startswith("overlap")} - ours.keys()
