"""A random micro-batch over the compact path, as the ranks of a tensor-parallel group run it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits import VocabShard, chunks, linear_log_probs, linear_topk_kl
from compact_logits.engine.slices import ChunkPlan
from compact_logits.engine.row_gather import Local, Replicated, SequenceSharded
from compact_logits.engine.logits import rows_of, score_logits
from compact_logits.rows import Layout, contiguous, packed, zigzag
from compact_logits.engine.linear import score_hidden
from compact_logits.rows import RowSelection, scatter, select
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from compact_logits.scorers.topk_scorer import TopKScorer
from compact_logits.engine.weight_grad import ReturnedWeightGrad, WeightSum
from tests.support.random_data import Data, clamp_of, masks_of
from tests.support.random_example import Example

__all__ = ["Part", "run_alone", "run_on_ranks"]

# What one rank computed of one context-parallel rank's rows, by name.
Part = dict[str, Any]

# A rank's groups for as long as it lives, by tp and cp. On torch 2.6 to end one is to hold Python's lock and wait for
# gloo's thread, which may wait for that lock to free the tensor of the last message.
_GROUPS: dict[tuple[int, int], list[Any]] = {}

JUNK = 7.0  # gradient that comes back for rows that do not count


def run_alone(example: Example) -> list[list[Part]]:
    """Parts by tensor-parallel and context-parallel rank, of which this process plays all."""
    return [[_run(example, Data.of(example), cp_rank, 0, None) for cp_rank in range(example.cp)]]


def run_on_ranks(rank: int, world: int, batch: list[Example]) -> list[list[Part]]:
    """For each example the parts that this rank computed: of all context-parallel ranks, or of its own."""
    results = []
    for example in batch:
        tp, cp = example.tp, example.cp
        if example.spread and (tp, cp) not in _GROUPS:
            _GROUPS[tp, cp] = [dist.new_group(range(each * tp, each * tp + tp)) for each in range(cp)]
        places = [rank // tp] if example.spread else range(cp)
        data = Data.of(example)
        results.append(
            [
                _run(example, data, place, rank % tp, _GROUPS[tp, cp][place] if example.spread else dist.group.WORLD)
                for place in places
            ]
        )
    return results


def layout_of(example: Example, cp_rank: int) -> Layout:
    totals, responses = zip(*example.lengths, strict=True) if example.lengths else ((), ())
    needed = {
        "packed": sum(totals),
        "contiguous": -(-sum(totals) // example.cp),
        "zigzag": 2 * sum(-(-total // (2 * example.cp)) for total in totals),
    }[example.layout]
    rows = max(needed + example.padding, 1)
    if example.sequence_parallel:
        rows += -rows % example.tp
    build = {"packed": packed, "contiguous": contiguous, "zigzag": zigzag}[example.layout]
    return build(totals, responses, rows, *(() if example.layout == "packed" else (cp_rank, example.cp)))


def _run(example: Example, data: Data, cp_rank: int, tp_rank: int, group: Any) -> Part:
    narrow = {"_CHUNK_BYTES": {"cpu": 1}, "_GOOD_WIDTH": 4, "_LEAST_WIDTH": {"cpu": 4}}
    with mock.patch.multiple(chunks, **narrow) if example.narrow else nullcontext():
        return _run_one(example, data, cp_rank, tp_rank, group)


def _run_one(example: Example, data: Data, cp_rank: int, tp_rank: int, group: Any) -> Part:
    layout = layout_of(example, cp_rank)
    sequences = data.tokens.split([total for total, _ in example.lengths])
    selection = RowSelection.build(
        layout.rows_of_masks(masks_of(example)), layout.label_source, layout.join_tokens(sequences)
    )
    kept = layout.source[selection.indices]
    shard = VocabShard(*example.cuts[tp_rank : tp_rank + 2], group if example.tp > 1 else None)
    columns = slice(shard.start, shard.stop)
    scorer, names = _scorer(example, data, kept, selection.targets, shard)
    if example.given == "hidden":
        leaves = _leaves(example, data, layout, selection, tp_rank, columns)
        outputs = _project(example, leaves, selection, tp_rank, scorer, data, kept)
    else:
        leaves = {"logits": _strided(data.logits[kept][:, columns], example.strides[0])}
        leaves["logits"].requires_grad_("logits" in example.trained)
        outputs = score_logits(rows_of(leaves["logits"]), scorer, chunk_bytes=example.chunk_bytes)
    _backward(example, data, layout, selection, kept, outputs)
    part = {"kept": kept, "scattered": scatter(outputs[0].detach(), selection.indices, selection.num_rows)}
    part |= {name: output.detach() for name, output in zip(names, outputs, strict=True) if name}
    part["responses"] = layout.to_responses(part["scattered"])
    part["positions"] = [layout.response_positions(sample) for sample in range(len(example.lengths))]
    part |= {f"d_{name}": leaf.grad for name, leaf in leaves.items() if name in example.trained}
    part["shard_rows"] = _shard_rows(example, layout, tp_rank)
    part["source"] = layout.source[part["shard_rows"]]
    return part


def _shard_rows(example: Example, layout: Layout, tp_rank: int) -> slice:
    """The rows of the model's input that this rank holds."""
    shards = example.tp if example.sequence_parallel else 1
    size, place = layout.num_rows // shards, tp_rank if example.sequence_parallel else 0
    return slice(place * size, (place + 1) * size)


def _leaves(
    example: Example, data: Data, layout: Layout, selection: RowSelection, tp_rank: int, columns: slice
) -> dict[str, Tensor]:
    rows = data.hidden.new_full((layout.num_rows, example.hidden), math.nan)  # whatever stands in the other rows
    rows[selection.indices] = data.hidden[layout.source[selection.indices]]
    leaves = {
        "hidden": _strided(rows[_shard_rows(example, layout, tp_rank)], example.strides[0]),
        "weight": _strided(data.weight[columns], example.strides[1]),
    }
    if data.bias is not None:
        leaves["bias"] = data.bias[columns].clone()
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in example.trained)
    return leaves


def _strided(tensor: Tensor, style: str) -> Tensor:
    if style == "transposed":
        return tensor.t().contiguous().t()
    if style == "cut":
        wide = tensor.new_full((2 * tensor.shape[0], tensor.shape[1] + 3), math.nan)
        wide[::2, 1:-2] = tensor
        return wide[::2, 1:-2]
    return tensor.clone(memory_format=torch.contiguous_format)


def _scorer(
    example: Example, data: Data, kept: Tensor, targets: Tensor, shard: VocabShard
) -> tuple[Any, tuple[str, ...]]:
    """The scorer and the names of its outputs, empty for those that are not compared."""
    temperature = data.temperature_of(kept)
    if example.scorer.startswith("topk"):
        tail = example.scorer == "topk tail"
        log_q = data.teacher_log_probs[kept]
        clamp = clamp_of(example)
        names = ("loss", "student_mass", "teacher_mass", "", "")
        return TopKScorer(
            log_q if clamp is None else log_q.clamp(min=clamp),
            data.teacher_ids[kept],
            shard,
            temperature,
            clamp,
            1e-6 if tail else None,
        ), (*names, "head_loss", "tail_loss", "student_tail_mass", "teacher_tail_mass") if tail else names
    base = LogProbScorer(targets, shard, temperature, example.entropy)
    names = ("log_probs",) if example.entropy == "none" else ("log_probs", "entropy")
    if example.scorer == "log_prob":
        return base, names
    sets = [data.nucleus[row] for row in kept.tolist()]
    sizes = torch.tensor([0 if ids is None else len(ids) for ids in sets], dtype=torch.int64)
    stops = sizes.cumsum(0)
    listed = torch.tensor([each for ids in sets for each in ids or ()], dtype=torch.int64)
    recorded = torch.tensor([ids is not None for ids in sets], dtype=torch.bool)
    return TopPScorer(base, TopPMask.build(listed, stops - sizes, stops, recorded)), names


def _project(
    example: Example,
    leaves: dict[str, Tensor],
    selection: RowSelection,
    tp_rank: int,
    scorer: Any,
    data: Data,
    kept: Tensor,
) -> tuple[Tensor, ...]:
    hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    shard = scorer.base.shard if isinstance(scorer, TopPScorer) else scorer.shard
    given: Any = {"bias": bias, "shard": shard, "temperature": data.temperature_of(kept)}
    given["chunk_bytes"] = example.chunk_bytes
    if not example.sequence_parallel and example.seed % 3 == 0:  # as users call it
        rows = select(hidden, selection.indices)
        if isinstance(scorer, LogProbScorer):
            stats = linear_log_probs(rows, weight, selection.targets, entropy=example.entropy, **given)
            return tuple(each for each in stats if each is not None)
        if isinstance(scorer, TopKScorer):
            result = linear_topk_kl(
                rows,
                weight,
                data.teacher_log_probs[kept],
                data.teacher_ids[kept],
                tail=scorer.tail,
                log_prob_min_clamp=scorer.log_prob_min_clamp,
                **given,
            )
            return tuple(each for each in result if each is not None)
    exchange: Any = Local() if shard.group is None else Replicated(shard.group)
    indices = selection.indices
    if example.sequence_parallel:
        exchange = SequenceSharded(shard.group, selection.counts(example.tp))
        indices = selection.of_shard(tp_rank, example.tp)
    rows = select(hidden, indices)
    options: Any = {"exchange": exchange, "chunk_bytes": example.chunk_bytes}
    if example.in_place:
        options["weight_grad"] = _InPlace() if weight.requires_grad else ReturnedWeightGrad(frozen=True)
    return score_hidden(rows, weight, bias, scorer, **options)


class _InPlace:
    """The weight's gradient, added to memory in fp32 as Megatron's fused kernels do, and returned at the end."""

    lends, sums_in_place = False, True

    def begin(self, weight: Tensor, plan: ChunkPlan, memory: Tensor | None = None) -> WeightSum:
        self._total, self._dtype = torch.zeros(weight.shape), weight.dtype
        return self

    def add(self, d_logits: Tensor, hidden: Tensor, columns: slice) -> None:
        self._total[columns] += d_logits.t().float() @ hidden.float()

    def finish(self) -> Tensor:
        return self._total.to(self._dtype)


def _backward(
    example: Example, data: Data, layout: Layout, selection: RowSelection, kept: Tensor, outputs: tuple[Tensor, ...]
) -> None:
    """Give the outputs' gradients back, in the memory layout that the example asks for."""
    roots, gradients = [], []
    for index, (output, of_tokens) in enumerate(zip(outputs[:2], data.gradients, strict=False)):
        skipped = {"first output": 1, "second output": 0}.get(example.incoming)
        if not output.requires_grad or index == skipped:
            continue
        gradient = of_tokens[kept]
        if example.incoming == "responses" and example.lengths:
            full = torch.full((layout.num_rows,), JUNK, dtype=gradient.dtype)
            full[selection.indices] = gradient
            scattered = scatter(output, selection.indices, selection.num_rows)
            roots += layout.to_responses(scattered)
            gradients += layout.to_responses(full)
        else:
            roots.append(output)
            if example.incoming == "strided":
                gradient = torch.stack([gradient, torch.full_like(gradient, JUNK)], dim=1)[:, 0]
            elif example.incoming == "expanded" and of_tokens.numel():
                gradient = of_tokens[0].expand(kept.shape)
            gradients.append(gradient)
    if roots:
        torch.autograd.backward(roots, gradients)
