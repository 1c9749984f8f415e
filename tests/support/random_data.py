"""The tensors of a random micro-batch, one entry a token of the joined sequences, and its dense definition."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compact_logits.scorers.top_p import TopPMask
from tests.support.linear_head import Head, Results
from tests.support.random_example import Example

__all__ = ["Data", "dense", "kept_rows", "masks_of"]


@dataclass(frozen=True)
class Data:
    head: Head  # a row a token, whose target is the token after it
    tokens: Tensor  # (tokens,) int64
    logits: Tensor  # (tokens, vocab), in the example's dtype

    @classmethod
    def of(cls, example: Example) -> Data:
        random = torch.Generator().manual_seed(example.seed)
        dtype = getattr(torch, example.dtype)
        work = torch.promote_types(dtype, torch.float32)
        count, vocab, width = sum(total for total, _ in example.lengths), example.vocab, example.hidden

        def values(*shape: int, scale: float) -> Tensor:
            if example.exact:
                return (torch.randint(-4, 5, shape, generator=random) / 4 * scale).to(dtype)
            return (torch.randn(*shape, generator=random, dtype=torch.float64) * scale).to(dtype)

        hidden, weight = values(count, width, scale=2.0), values(vocab, width, scale=1.0)
        bias = values(vocab, scale=1.0) if example.bias else None
        tokens = torch.randint(example.real, (count,), generator=random)
        gradients = torch.randn(2, count, generator=random, dtype=torch.float64).to(work)
        if example.incoming == "expanded":
            gradients = gradients[:, :1].expand(2, count)
        if example.incoming == "first output" or example.scorer in ("none", "metric"):
            gradients = torch.stack([gradients[0], torch.zeros_like(gradients[1])])
        if example.incoming == "second output":
            gradients = torch.stack([torch.zeros_like(gradients[0]), gradients[1]])
        sizes = torch.randint(0, 10, (count,), generator=random)
        recorded, sizes = sizes < 8, sizes * (sizes < 8)
        stops, ids = sizes.cumsum(0), torch.randint(vocab, (int(sizes.sum()),), generator=random)
        student = torch.randn(count, vocab, generator=random, dtype=torch.float64)
        top = torch.log_softmax(2 * student, dim=-1).topk(example.k, dim=-1)
        of_rows = 0.5 + torch.rand(count, generator=random)
        head = Head(
            hidden=hidden,
            weight=weight,
            targets=torch.cat([tokens[1:], torch.zeros_like(tokens[:1])]),
            d_log_probs=gradients[0],
            d_entropy=gradients[1],
            bias=bias,
            temperature=of_rows if example.temperature == "rows" else float(example.temperature),
            mask=TopPMask.build(ids, stops - sizes, stops, recorded),
            teacher_log_probs=top.values.to(work),
            teacher_ids=top.indices,
        )
        logits = torch.nn.functional.linear(hidden, weight, bias)
        for padded in (weight, logits.t()):
            padded[example.real :] = torch.nan  # nothing may read it
        return cls(head, tokens, logits)


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


def dense(example: Example, data: Data, *, truth: bool) -> Results:
    """Every output and every gradient of the kept rows, by plain code in the example's dtype or in fp64.

    On several ranks it rounds each rank's part of the hidden states' gradient, and then adds them up in the dtype.
    """
    rows = kept_rows(example)
    head, cuts = data.head.of_rows(rows), example.cuts[1:-1]
    if example.given == "logits":  # whose gradient is that of hidden states before an identity
        identity = torch.eye(example.vocab, dtype=data.logits.dtype)
        head, cuts = replace(head, hidden=data.logits[rows].nan_to_num(0.0), weight=identity, bias=None), ()
    real = example.real
    found = head.truth(example.scorer, vocab_size=real) if truth else head.plain(example.scorer, cuts, vocab_size=real)
    if example.given == "logits":
        found["d_logits"] = found.pop("d_hidden")
    outputs = {name: each for name, each in found.items() if not name.startswith(("d_", "overlap"))}
    return outputs | {f"d_{name}": found[f"d_{name}"] for name in example.trained}
