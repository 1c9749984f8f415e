"""The tensors of a random micro-batch, one entry a token of the joined sequences, and its dense definition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compact_logits import reference
from tests.support.random_example import Example

__all__ = ["Data", "clamp_of", "dense", "kept_rows", "masks_of"]

# Below it, in some examples, a truncated top-k KL has no gradient.
CLAMP = -3.0


@dataclass(frozen=True)
class Data:
    hidden: Tensor  # (tokens, hidden)
    weight: Tensor  # (vocab, hidden)
    bias: Tensor | None  # (vocab,)
    logits: Tensor  # (tokens, vocab), their product in the example's dtype
    tokens: Tensor  # (tokens,) int64
    targets: Tensor  # (tokens,) int64, the token after it
    temperature: float | Tensor  # scalar or (tokens,)
    gradients: tuple[Tensor, Tensor]  # (tokens,) each, of log-prob or loss, and of the entropy
    nucleus: tuple[tuple[int, ...] | None, ...]  # a token's recorded ids, None for none recorded
    teacher_log_probs: Tensor  # (tokens, k)
    teacher_ids: Tensor  # (tokens, k) int64

    @classmethod
    def of(cls, example: Example) -> Data:
        random = torch.Generator().manual_seed(example.seed)
        dtype = getattr(torch, example.dtype)
        count, vocab, width = sum(total for total, _ in example.lengths), example.vocab, example.hidden

        def values(*shape: int, scale: float) -> Tensor:
            if example.exact:
                return (torch.randint(-4, 5, shape, generator=random) / 4 * scale).to(dtype)
            return (torch.randn(*shape, generator=random, dtype=torch.float64) * scale).to(dtype)

        hidden, weight = values(count, width, scale=2.0), values(vocab, width, scale=1.0)
        bias = values(vocab, scale=1.0) if example.bias else None
        tokens = torch.randint(vocab, (count,), generator=random)
        work = torch.promote_types(dtype, torch.float32)
        gradients = torch.randn(2, count, generator=random, dtype=torch.float64).to(work)
        if example.incoming == "expanded":
            gradients = gradients[:, :1].expand(2, count)
        if example.incoming == "first output" or example.entropy != "loss":
            gradients = torch.stack([gradients[0], torch.zeros_like(gradients[1])])
        if example.incoming == "second output":
            gradients = torch.stack([torch.zeros_like(gradients[0]), gradients[1]])
        recorded = [
            tuple(torch.randint(vocab, (int(size),), generator=random).tolist()) if size < 8 else None
            for size in torch.randint(0, 10, (count,), generator=random)
        ]
        student = torch.randn(count, vocab, generator=random, dtype=torch.float64)
        top = torch.log_softmax(2 * student, dim=-1).topk(example.k, dim=-1)
        return cls(
            hidden=hidden,
            weight=weight,
            bias=bias,
            logits=torch.nn.functional.linear(hidden, weight, bias),
            tokens=tokens,
            targets=torch.cat([tokens[1:], torch.zeros_like(tokens[:1])]),
            temperature=0.5 + torch.rand(count, generator=random)
            if example.temperature == "rows"
            else float(example.temperature),
            gradients=(gradients[0], gradients[1]),
            nucleus=tuple(recorded),
            teacher_log_probs=top.values.to(work),
            teacher_ids=top.indices,
        )

    def temperature_of(self, rows: Tensor) -> float | Tensor:
        return self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature


def masks_of(example: Example) -> list[Tensor]:  # per sample (response,) int64
    random = torch.Generator().manual_seed(example.seed + 1)
    masks = []
    for (total, response), kind in zip(example.lengths, example.masks, strict=True):
        place, chance = torch.arange(response), torch.rand(response, generator=random)
        mask = {
            "all": place >= 0,
            "none": place < 0,
            "holes": chance < 0.5,
            "sparse": chance < 0.15,
            "one": place == response // 2,
            "tail": place >= response - 2,
        }[kind].long()
        if total == response:
            mask[:1] = 0  # nothing predicts the first token of a sequence
        masks.append(mask)
    return masks


def kept_rows(example: Example) -> Tensor:  # (kept,) int64
    """The tokens before those that count, by their places in the joined sequences."""
    rows, start = [], 0
    for (total, response), mask in zip(example.lengths, masks_of(example), strict=True):
        rows += [start + total - response + place - 1 for place in mask.nonzero().flatten().tolist()]
        start += total
    return torch.tensor(rows, dtype=torch.int64)


def dense(
    example: Example,
    data: Data,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Every output and every gradient of the kept rows, by plain code in `dtype`; off the kept rows all is zero.

    On several ranks it rounds each rank's part of the hidden states' gradient, and then adds them up in `dtype`:
    so does this one, with one product a shard.
    """
    rows = kept_rows(example)
    named = {"hidden": data.hidden[rows], "weight": data.weight, "bias": data.bias, "logits": data.logits[rows]}
    if example.given == "hidden":
        del named["logits"]
    else:
        named = {"logits": named["logits"]}
    leaves = {n: None if t is None else t.detach().to(dtype).clone().requires_grad_() for n, t in named.items()}
    logits = leaves["logits"] if example.given == "logits" else _projected(example.cuts, **leaves)
    temperature = data.temperature_of(rows)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(torch.promote_types(dtype, torch.float32))
    if example.scorer.startswith("topk"):
        outputs = reference.topk_kl(
            logits,
            data.teacher_log_probs[rows].to(torch.promote_types(dtype, torch.float32)),
            data.teacher_ids[rows],
            tail=example.scorer == "topk tail",
            log_prob_min_clamp=clamp_of(example),
            temperature=temperature,
        )
        del outputs["overlap_count"], outputs["overlap_token_advantage"]  # equal logits have no one top
        roots = [outputs["loss"]]
    else:
        log_prob, entropy = reference.log_probs(logits, data.targets[rows], temperature=temperature)
        if example.scorer == "nucleus":
            log_prob = _replayed(logits, data, rows, temperature, log_prob)
        outputs = {"log_probs": log_prob} | ({} if example.entropy == "none" else {"entropy": entropy})
        roots = [log_prob, entropy]
    loss = sum((g[rows].to(o.dtype) * o).sum() for g, o in zip(data.gradients, roots, strict=False))
    loss.backward()
    gradients = {f"d_{n}": leaf.grad for n, leaf in leaves.items() if leaf is not None and n in example.trained}
    return {name: output.detach() for name, output in outputs.items()} | gradients


def _projected(cuts: tuple[int, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (rows, vocab)
    shards = [slice(*ends) for ends in pairwise(cuts)]
    linear = torch.nn.functional.linear
    return torch.cat([linear(hidden, weight[own], None if bias is None else bias[own]) for own in shards], dim=1)


def clamp_of(example: Example) -> float | None:
    return CLAMP if example.scorer == "topk" and example.seed % 2 else None


def _replayed(
    logits: Tensor, data: Data, rows: Tensor, temperature: float | Tensor, everywhere: Tensor
) -> Tensor:  # (kept,)
    z = logits.to(everywhere.dtype)
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    chosen = []
    for place, row in enumerate(rows.tolist()):
        ids = data.nucleus[row]
        target = int(data.targets[row])
        if ids is None:
            chosen.append(everywhere[place])
        else:
            chosen.append(z[place, target] - z[place, sorted({*ids, target})].logsumexp(dim=0))
    return torch.stack(chosen) if chosen else everywhere
