"""One micro-batch of packed sequences through a real GPTModel, over the full path or over the compact one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compact_logits import reference
from compact_logits.cli.cpu_model import build_gpt, packed_seq_params, sum_gradients
from compact_logits.megatron import Request, attach, mark
from compact_logits.megatron.attach import gpt_model_of
from compact_logits.megatron.kept_rows import ContextShare
from compact_logits.rows import Layout, RowSelection, contiguous, packed, zigzag
from compact_logits.scorers.log_prob_scorer import Entropy

__all__ = ["MASKS", "VOCAB", "Cut", "Micro", "compact_pass", "full_pass", "micro_batch"]

TOTALS, RESPONSES, VOCAB = (17, 24, 5, 10), (9, 20, 3, 10), 96
MASKS = ("holes", "nothing", "everything", "one row", "first sequence")


@dataclass(frozen=True)
class Cut:
    """How the model lies over the ranks, tensor parallelism first."""

    tp: int
    cp: int = 1
    all_gather_cp: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.cp


@dataclass(frozen=True)
class Micro:
    """What one rank calls the model with, and what it then reads."""

    layout: Layout
    selection: RowSelection
    tokens: Tensor  # (1, rows)
    loss_mask: Tensor  # (1, rows)
    labels: Tensor  # (rows,), 0 where there is none
    packed_seq_params: Any
    weights: Tensor  # (rows, 2): d loss / d (log-prob, entropy), a function of the token, not of the rank
    global_rows: Tensor  # (kept,): the kept rows as positions of the joined sequences


def micro_batch(rank: int, cut: Cut, mask: str) -> Micro:
    random = torch.Generator().manual_seed(5)
    sequences = [torch.randint(VOCAB, (total,), generator=random) for total in TOTALS]
    masks = []
    for sample, response in enumerate(RESPONSES):
        keep = {
            "holes": torch.rand(response, generator=random) < 0.4,
            "nothing": torch.zeros(response, dtype=torch.bool),
            "everything": torch.ones(response, dtype=torch.bool),
            "one row": (torch.arange(response) == 4) & (sample == 1),
            "first sequence": torch.full((response,), sample == 0),
        }[mask]
        if RESPONSES[sample] == TOTALS[sample]:
            keep[0] = False  # its first token has no predictor
        masks.append(keep.int())
    multiple = 4 * cut.tp
    if cut.cp == 1 or cut.all_gather_cp:
        used = -(-sum(TOTALS) // cut.cp)
        num_rows = used + -used % multiple
        bounds = [0]
        for total in TOTALS:
            bounds.append(bounds[-1] + total)
        bounds.append(num_rows * cut.cp)
    else:
        chunks = [-(-total // (2 * cut.cp)) for total in TOTALS]
        used = 2 * sum(chunks)
        num_rows = used + -used % multiple
        bounds = [0]
        for chunk in chunks:
            bounds.append(bounds[-1] + 2 * chunk * cut.cp)
        bounds.append(num_rows * cut.cp)
    make = {(False, False): packed, (False, True): packed, (True, False): zigzag, (True, True): contiguous}
    build = make[cut.cp > 1, cut.all_gather_cp]
    place = () if cut.cp == 1 else (rank // cut.tp, cut.cp)
    layout = build(TOTALS, RESPONSES, num_rows, *place)
    joined = layout.join_tokens(sequences)
    keep = layout.rows_of_masks(masks)
    selection = RowSelection.build(keep, layout.label_source, joined)
    source = layout.source
    per_token = torch.randn(joined.shape[0], 2, generator=random)
    return Micro(
        layout=layout,
        selection=selection,
        tokens=torch.where(source < 0, 0, joined[source])[None],
        loss_mask=keep.int()[None],
        labels=torch.where(layout.label_source < 0, 0, joined[layout.label_source]),
        packed_seq_params=packed_seq_params(
            [bound for i, bound in enumerate(bounds) if i == 0 or bound > bounds[i - 1]]
        ),
        weights=per_token[source.clamp_min(0)],
        global_rows=source[selection.indices],
    )


@dataclass(frozen=True)
class Passed:
    """What came of it: of the kept rows, in order; gradients complete over TP and CP, this rank's slices."""

    log_probs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]
    output: Tensor


def full_pass(cut: Cut, micro: Micro, *, temperature: float = 1.0, **model: Any) -> Passed:
    """Logits of every row, gathered over the vocabulary by Megatron itself, differentiably, then the definition."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    gpt = _gpt(cut, model)
    logits = gpt(
        micro.tokens, None, None, labels=None, packed_seq_params=micro.packed_seq_params, loss_mask=micro.loss_mask
    )
    whole = gather_from_tensor_model_parallel_region(logits)[0]
    log_probs, entropy = reference.log_probs(whole, micro.labels, temperature=temperature)
    return _backward(gpt, micro, log_probs, entropy, logits)


def compact_pass(
    cut: Cut,
    micro: Micro,
    *,
    temperature: float = 1.0,
    entropy: Entropy = "loss",
    chunk_bytes: int | None = None,
    share: ContextShare | None = None,
    **model: Any,
) -> Passed:
    gpt = _gpt(cut, model)
    attach(gpt)
    request = Request(micro.selection, temperature=temperature, entropy=entropy, chunk_bytes=chunk_bytes, share=share)
    marked = mark(micro.loss_mask.clone(), request)
    scalars = gpt(micro.tokens, None, None, labels=None, packed_seq_params=micro.packed_seq_params, loss_mask=marked)
    assert request.compact, request.outcome
    return _backward(gpt, micro, scalars[0, :, 0], scalars[0, :, 1], scalars)


def _gpt(cut: Cut, settings: dict[str, Any]) -> torch.nn.Module:
    return build_gpt(tp=cut.tp, cp=cut.cp, contiguous_cp=cut.all_gather_cp, vocab=VOCAB, **settings)


def _backward(gpt: torch.nn.Module, micro: Micro, log_probs: Tensor, entropy: Tensor, output: Tensor) -> Passed:
    kept = micro.selection.indices
    ours = torch.stack([log_probs[kept], entropy[kept]], dim=1)
    # Also where nothing is kept, the loss must reach the model: the trainer adds this very term.
    loss = (ours * micro.weights[kept].to(ours.dtype)).sum() + 0 * output.sum()
    loss.backward()
    sum_gradients(gpt)
    inner = gpt_model_of(gpt)  # without the mixed-precision wrapper, so that names are alike
    gradients = {name: parameter.grad for name, parameter in inner.named_parameters() if parameter.grad is not None}
    return Passed(ours[:, 0].detach(), ours[:, 1].detach(), gradients, output.detach())
