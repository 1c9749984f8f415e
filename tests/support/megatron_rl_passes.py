"""One micro-batch through Megatron-RL's `get_logprobs`, over the gathered path or the compact one, and the truth."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from compact_logits.cli.cpu_model import sum_gradients
from compact_logits.integrations import megatron_rl
from compact_logits.integrations.megatron_rl.marks import mark_tokens

__all__ = ["VOCAB", "Passed", "Sampled", "compacted", "passed", "sampled", "true_log_probs"]

VOCAB, SEQUENCE = 160, 24


@dataclass(frozen=True)
class Sampled:
    """A micro-batch as `get_logprobs` takes it, and what a trainer holds against its log-probs."""

    tokens: Tensor  # (batch, sequence)
    positions: Tensor  # (batch, sequence)
    loss_mask: Tensor  # (batch, sequence - 1)
    slope: Tensor  # (batch, sequence - 1): the loss is the sum of slope * loss_mask * log-prob
    packed_seq_params: Any

    @property
    def arguments(self) -> dict[str, Any]:
        packed = self.packed_seq_params is not None
        return {"sequence_packing": packed, "packed_seq_params": self.packed_seq_params}


def sampled(rl_utils: ModuleType, kind: str) -> Sampled:
    """`"one"` sequence, `"two"` side by side, or three of different lengths in a `"packed"` bin."""
    random = torch.Generator().manual_seed(3)
    batch = {"one": 1, "two": 2, "packed": 3}[kind]
    tokens = torch.randint(1, VOCAB, (batch, SEQUENCE), generator=random)
    generated = torch.rand(batch, SEQUENCE, generator=random) < 0.3
    generated[:, :2] = False
    positions, params = torch.arange(SEQUENCE).expand(batch, -1), None
    if kind == "packed":
        for row, length in enumerate((11, 7, 4)):
            tokens[row, length:], generated[row, length:] = 0, False
        context = rl_utils.pack_all_trajectories(tokens, generated, None, torch.ones(12), SEQUENCE * 2, 4, "fifo")
        tokens, _, _, loss_mask, positions, _, _, _, _, _, params = rl_utils.load_packed_data_by_index(
            0, context, False
        )
    else:
        loss_mask = generated[:, 1:]
    slope = torch.randn(loss_mask.shape, generator=random)
    return Sampled(tokens.clone(), positions, loss_mask, slope, params)


@dataclass(frozen=True)
class Passed:
    log_probs: Tensor  # (batch, sequence - 1)
    gradients: Tensor  # all of this rank's, one after another, complete over TP and CP
    d_hidden: Tensor  # (local sequence, batch, hidden)


def passed(
    rl_utils: ModuleType, model: Any, micro: Sampled, *, select: bool = False, temperature: float = 1.0
) -> Passed:
    """Forward and backward. `select`: let the log-probs that count alone be computed, where the path can do that."""
    tokens = micro.tokens.clone()
    if select or temperature != 1.0:
        mark_tokens(tokens, loss_mask=micro.loss_mask if select else None, temperature=temperature)
    hidden: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> None:
        output.retain_grad()
        hidden.append(output)

    with model.module.decoder.register_forward_hook(keep):
        log_probs = rl_utils.get_logprobs(model, tokens, micro.positions, **micro.arguments)
    (log_probs.float() * micro.slope * micro.loss_mask).sum().backward()
    sum_gradients(model)
    gradients = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    model.zero_grad(set_to_none=True)
    d_hidden = hidden[0].grad
    assert d_hidden is not None
    return Passed(log_probs.detach(), gradients, d_hidden)


def true_log_probs(rl_utils: ModuleType, model: Any, micro: Sampled, *, temperature: float = 1.0) -> Tensor:
    """fp64 log-softmax of the very logits that the model gives the gathered path, cut and joined as it does."""
    before = rl_utils.selective_log_softmax
    rl_utils.selective_log_softmax = lambda logits, index: (
        torch.log_softmax(logits.double() / temperature, dim=-1).gather(-1, index[..., None]).squeeze(-1)
    )
    try:
        return rl_utils.get_logprobs(model, micro.tokens, micro.positions, no_grad=True, **micro.arguments)
    finally:
        rl_utils.selective_log_softmax = before


@contextmanager
def compacted(**environ: str) -> Iterator[Callable[[], list[Any]]]:
    """With the compact path installed; gives the integration's `check`."""
    environ = {"COMPACT_LOGITS": "1", **environ}
    os.environ.update(environ)
    try:
        megatron_rl.install()
        yield megatron_rl.check
    finally:
        megatron_rl.uninstall()
        for name in environ:
            os.environ.pop(name, None)
