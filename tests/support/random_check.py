"""Put the ranks' parts of a random micro-batch together and compare them with the dense definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.random_data import Data, dense, kept_rows, masks_of
from tests.support.random_example import Example
from tests.support.random_run import Part

__all__ = ["mismatches"]

# Against the error of plain code of the same dtype, as everywhere, and this many roundings of what was added up: two
# ways of adding the same few numbers may differ by so much, and one draw in ten thousand finds where they do.
FACTOR, ROUNDINGS = 1.1, 8.0


def mismatches(
    example: Example,
    parts: list[list[Part]],  # by tensor-parallel rank, by context-parallel rank
) -> list[str]:
    """What is wrong with the ranks' results, one sentence each; empty where all is as the definition says."""
    data = Data.of(example)
    found = [*_structure(example, parts)]
    if found:
        return found
    rows = kept_rows(example)
    ours = _joined(example, parts, rows)
    same, truth = dense(example, data, truth=False), dense(example, data, truth=True)
    if ours.keys() != truth.keys():
        return [f"results are {sorted(ours)}, needed {sorted(truth)}"]
    floors = _Floors(example, data, rows)
    for name, expected in truth.items():
        result = ours[name]
        if result is None or result.shape != expected.shape:
            found.append(f"{name} is {None if result is None else tuple(result.shape)}, needed {tuple(expected.shape)}")
            continue
        error, plain = _largest(result.double() - expected), _largest(same[name].double() - expected)
        bound = FACTOR * plain + floors.of(name, expected)
        if not error <= bound:
            found.append(f"{name} is off by {error:.3e}, plain code by {plain:.3e}, allowed is {bound:.3e}")
    return found


def _structure(example: Example, parts: list[list[Part]]) -> list[str]:
    """What must hold exactly: the same bits on all ranks, each row and response entry once, zeros elsewhere."""
    found = []
    first = parts[0]
    for name in first[0]:
        # A slice of the vocabulary, or of the rows, is each rank's own.
        own = {"d_weight", "d_bias", "d_logits", "source", "shard_rows", "padding"}
        own |= {"d_hidden"} if example.sequence_parallel else set()
        if name not in own:
            found += [f"{name} differs between ranks" for other in parts[1:] if not _equal(first, other, name)]
    rows = torch.cat([part["kept"] for part in first]).sort().values
    if not torch.equal(rows, kept_rows(example).sort().values):
        return [*found, f"kept are the rows {rows.tolist()}, needed {kept_rows(example).tolist()}"]
    for rank in parts:
        for part in rank:
            off = ~torch.isin(part["source"], part["kept"])
            if part.get("d_hidden") is not None and part["d_hidden"][off].count_nonzero():
                found.append("rows that do not count have a gradient")
            of_ids = [part.get("d_weight"), part.get("d_bias"), part["d_logits"].t() if "d_logits" in part else None]
            if any(each is not None and each[part["padding"] :].count_nonzero() for each in of_ids):
                found.append("padded ids have a gradient")
    for sample, mask in enumerate(masks_of(example)):
        total, response = example.lengths[sample]
        place = torch.cat([part["positions"][sample] for part in first])
        values = torch.cat([part["responses"][sample] for part in first])
        needed = set(range(response))
        if len(set(place.tolist())) != len(place) or not needed - ({0} if total == response else set()) <= set(
            place.tolist()
        ):
            found.append(f"sample {sample} has the response entries {place.tolist()} of {response}")
        elif values[mask[place] == 0].count_nonzero():
            found.append(f"sample {sample} has values where the mask is 0")
    scattered = torch.cat([part["responses"][s] for part in first for s in range(len(example.lengths))] or [rows])
    counted = torch.cat([part[next(iter(_outputs(part)))] for part in first])
    if example.lengths and not torch.equal(
        scattered[scattered != 0].sort().values, counted[counted != 0].sort().values
    ):
        found.append("the response layout holds other values than the rows")
    return found


def _equal(first: list[Part], other: list[Part], name: str) -> bool:
    def same(one: Any, two: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            return torch.equal(one, two)
        if isinstance(one, list):
            return all(map(same, one, two))
        return bool(one == two)

    return all(same(mine[name], theirs[name]) for mine, theirs in zip(first, other, strict=True))


def _outputs(part: Part) -> list[str]:
    """The first entries: what the scorer returned."""
    return list(part)[: list(part).index("kept")]


def _joined(example: Example, parts: list[list[Part]], rows: Tensor) -> dict[str, Tensor | None]:
    """What one rank would have, in the order of `rows`."""
    first = parts[0]
    order = torch.cat([part["kept"] for part in first])
    place = torch.empty_like(order)
    place[order.argsort()] = torch.arange(len(order))
    by_row = rows.argsort().argsort()
    pick = order.argsort()[by_row]
    joined: dict[str, Tensor | None] = {
        name: torch.cat([part[name] for part in first])[pick] for name in _outputs(first[0])
    }
    trained = {f"d_{name}" for name in example.trained}
    for name in trained & {"d_weight", "d_bias"}:
        joined[name] = torch.cat([sum(part[name].double() for part in rank) for rank in parts])
    if "d_logits" in trained:
        whole = [torch.cat([rank[cp]["d_logits"] for rank in parts], dim=1) for cp in range(len(first))]
        joined["d_logits"] = torch.cat(whole)[pick]
    if "d_hidden" in trained:
        holders = parts if example.sequence_parallel else parts[:1]
        holding = [part for rank in holders for part in rank]
        sources, grads = torch.cat([p["source"] for p in holding]), torch.cat([p["d_hidden"] for p in holding])
        of_token = grads.new_zeros(sum(total for total, _ in example.lengths) + 1, example.hidden)
        of_token[sources] = grads  # padding rows are the last entry's
        joined["d_hidden"] = of_token[rows]
    return joined


class _Floors:
    """How far two right ways may lie apart: roundings, times the largest sum of absolute values."""

    def __init__(self, example: Example, data: Data, rows: Tensor) -> None:
        dtype = getattr(torch, example.dtype)
        self.narrow = torch.finfo(dtype).eps * (0.5 if dtype.itemsize == 2 else ROUNDINGS)
        self.wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * ROUNDINGS
        head = data.head.of_rows(rows)
        low = float(torch.as_tensor(head.temperature).amin()) if len(rows) else 1.0
        self.logit = 1.0 + _largest(data.logits[rows, : example.real].double()) / low
        of_entropy = 2.0 * (1.0 + self.logit)
        gross = 2.0 * head.d_log_probs.double().abs() + of_entropy * head.d_entropy.double().abs()
        self.row, self.sum = _largest(gross) / low, float(gross.sum()) / low
        self.weight, self.hidden = _largest(head.weight[: example.real].double()), _largest(head.hidden.double())
        # In a dtype that cannot hold the logits, they are rounded before anything else is.
        self.shift = 0.0 if example.given == "logits" or example.exact else self.wide * self.logit
        # Three parts of a gradient have more than one sum in 16 bits, by the order in which ranks add them.
        self.sums = max(example.tp - 2, 0)
        # The tail's logarithm is that of a difference, down to the guard.
        self.steep = 1e3 if example.scorer == "tail" else 1.0

    def of(self, name: str, expected: Tensor) -> float:
        if not name.startswith("d_"):
            return self.wide * (self.logit + _largest(expected)) * self.steep
        rounding = (self.narrow + self.shift) * self.steep
        size = {
            "d_logits": self.row,
            "d_hidden": self.row * self.weight + self.sums * _largest(expected),
            "d_weight": self.sum * self.hidden,
            "d_bias": self.sum,
        }[name]
        return rounding * size


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
