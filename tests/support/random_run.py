"""A random micro-batch over the compact path, as the ranks of a tensor-parallel group run it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits import RowSelection, VocabShard, scatter, select
from compact_logits.engine import slices
from compact_logits.engine.logits import rows_of, score_logits
from compact_logits.engine.row_gather import Local, Replicated, SequenceSharded
from compact_logits.rows import Layout, contiguous, packed, zigzag
from tests.support.linear_head import Head, named_outputs
from tests.support.random_data import Data, masks_of
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
    narrow = {"_ALIGNMENT": 4, "_CPU_SLICE": 400}
    with mock.patch.multiple(slices, **narrow) if example.narrow else nullcontext():
        return _run_one(example, data, cp_rank, tp_rank, group)


def _run_one(example: Example, data: Data, cp_rank: int, tp_rank: int, group: Any) -> Part:
    layout = layout_of(example, cp_rank)
    selection = RowSelection.build(layout.rows_of_masks(masks_of(example)), layout.label_source, data.tokens)
    kept = layout.source[selection.indices]
    columns = slice(*example.cuts[tp_rank : tp_rank + 2])
    shard = VocabShard(columns.start, columns.stop, group if example.tp > 1 else None)
    head = replace(data.head.of_rows(kept), targets=selection.targets)
    if example.given == "hidden":
        leaves = _leaves(example, data, layout, selection, tp_rank, columns)
        outputs = _project(example, leaves, selection, tp_rank, head, shard)
    else:
        leaves = {"logits": _strided(data.logits[kept][:, columns], example.strides[0])}
        leaves["logits"].requires_grad_("logits" in example.trained)
        scorer = head.scorer(example.scorer, shard.below(example.real))
        found = score_logits(rows_of(leaves["logits"]), scorer, chunk_bytes=example.chunk_bytes)
        outputs = named_outputs(example.scorer, found)
    _backward(example, head, layout, selection, outputs)
    part: Part = {name: output.detach() for name, output in outputs.items() if not name.startswith("overlap")}
    scattered = scatter(next(iter(outputs.values())).detach(), selection.indices, selection.num_rows)
    part |= {"kept": kept, "responses": layout.to_responses(scattered)}
    part["positions"] = [layout.response_positions(sample) for sample in range(len(example.lengths))]
    part |= {f"d_{name}": leaf.grad for name, leaf in leaves.items() if name in example.trained}
    part["shard_rows"] = _shard_rows(example, layout, tp_rank)
    part["source"] = layout.source[part["shard_rows"]]
    part["padding"] = max(example.real - columns.start, 0)
    return part


def _shard_rows(example: Example, layout: Layout, tp_rank: int) -> slice:
    """The rows of the model's input that this rank holds."""
    shards = example.tp if example.sequence_parallel else 1
    size, place = layout.num_rows // shards, tp_rank if example.sequence_parallel else 0
    return slice(place * size, (place + 1) * size)


def _leaves(
    example: Example, data: Data, layout: Layout, selection: RowSelection, tp_rank: int, columns: slice
) -> dict[str, Tensor]:
    rows = data.head.hidden.new_full((layout.num_rows, example.hidden), math.nan)  # whatever stands in the other rows
    rows[selection.indices] = data.head.hidden[layout.source[selection.indices]]
    leaves = {
        "hidden": _strided(rows[_shard_rows(example, layout, tp_rank)], example.strides[0]),
        "weight": _strided(data.head.weight[columns], example.strides[1]),
    }
    if data.head.bias is not None:
        leaves["bias"] = data.head.bias[columns].clone()
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


def _project(
    example: Example, leaves: dict[str, Tensor], selection: RowSelection, tp_rank: int, head: Head, shard: VocabShard
) -> dict[str, Tensor]:
    indices, gather = selection.indices, {}
    if example.sequence_parallel:
        assert shard.group is not None
        gather = {"gather": SequenceSharded(shard.group, selection.counts(example.tp))}
        indices = selection.of_shard(tp_rank, example.tp)
    elif example.in_place:
        gather = {"gather": Local() if shard.group is None else Replicated(shard.group)}
    options: Any = {"shard": shard, "chunk_bytes": example.chunk_bytes, **gather}
    if example.in_place:
        options["weight_grad"] = _InPlace
    if example.real < example.vocab:
        options["vocab_size"] = example.real
    rows = select(leaves["hidden"], indices)
    return head.scored(example.scorer, rows, leaves["weight"], leaves.get("bias"), **options)


class _InPlace:
    """The weight's gradient, added to memory in fp32 as Megatron's fused kernels do, and returned at the end."""

    def __init__(self, weight: Tensor) -> None:
        self._total, self._dtype = torch.zeros(weight.shape), weight.dtype

    def add(self, columns: slice, d_logits: Tensor, rows: Tensor) -> None:
        self._total[columns] += d_logits.t().float() @ rows.float()

    def finish(self) -> Tensor:
        return self._total.to(self._dtype)


def _backward(
    example: Example, head: Head, layout: Layout, selection: RowSelection, outputs: dict[str, Tensor]
) -> None:
    """Give the outputs' gradients back, in the memory layout that the example asks for."""
    roots, gradients = [], []
    skipped = {"first output": 1, "second output": 0}.get(example.incoming)
    for index, (output, gradient) in enumerate(zip(outputs.values(), (head.d_log_probs, head.d_entropy), strict=False)):
        if not output.requires_grad or index == skipped:
            continue
        if example.incoming == "responses" and example.lengths:
            full = torch.full((layout.num_rows,), JUNK, dtype=gradient.dtype)
            full[selection.indices] = gradient
            roots += layout.to_responses(scatter(output, selection.indices, selection.num_rows))
            gradients += layout.to_responses(full)
        else:
            roots.append(output)
            if example.incoming == "strided":
                gradient = torch.stack([gradient, torch.full_like(gradient, JUNK)], dim=1)[:, 0]
            elif example.incoming == "expanded" and len(gradient):
                gradient = gradient[0].expand(len(gradient))
            gradients.append(gradient)
    if roots:
        torch.autograd.backward(roots, gradients)
