"""A process with verl on its path, the stand-in or a checkout, and a micro-batch as its engines see one."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

__all__ = [
    "MODULES",
    "STAND_IN",
    "VOCAB",
    "installed",
    "loss_config",
    "micro_batch",
    "packed_logits",
    "start",
    "values_by_sequence",
]

STAND_IN = Path(__file__).parent / "verl_stand_in"
MODULES = (
    "verl.trainer.distillation.losses",
    "verl.trainer.distillation.megatron.losses",
    "verl.workers.config",
    "verl.workers.engine.base",
)
VOCAB, K = 40, 4
PROMPTS, RESPONSES = (3, 1, 4), (5, 2, 6)
MASKS = ([1, 1, 0, 0, 1], [0, 1], [1, 1, 1, 1, 1, 0])


def start(root: Path | str = STAND_IN, mode: str | None = "1") -> None:
    """Put verl on the path, all ranks into one tensor-parallel group, and `mode` into `COMPACT_LOGITS`."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    os.environ.pop("COMPACT_LOGITS", None)
    if mode is not None:
        os.environ["COMPACT_LOGITS"] = mode
    # The one group that is there: to have Megatron make its twenty takes longer than any test here.
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = dist.group.WORLD


@contextmanager
def installed() -> Iterator[list[Any]]:
    """The integration in place. Yields verl's modules: losses, Megatron losses, configuration, engines."""
    from compact_logits.integrations import verl

    verl.install()
    try:
        yield [importlib.import_module(name) for name in MODULES]
    finally:
        verl.uninstall()


def nested(sequences: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(sequences, layout=torch.jagged)


def micro_batch() -> dict[str, Any]:
    """Three packed sequences, with holes in their response masks, and a teacher's top-k at each row."""
    generator = torch.Generator().manual_seed(4)
    log_probs, ids = [], []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        top = torch.log_softmax(torch.randn(prompt + response, VOCAB, generator=generator), -1).topk(K)
        log_probs.append(top.values)
        ids.append(top.indices.to(torch.int32))
    return {
        "prompts": nested([torch.zeros(length, dtype=torch.int64) for length in PROMPTS]),
        "responses": nested([torch.zeros(length, dtype=torch.int64) for length in RESPONSES]),
        "response_mask": nested([torch.tensor(mask) for mask in MASKS]),
        "teacher_logprobs": nested(log_probs),
        "teacher_ids": nested(ids),
    }


def packed_logits(losses: Any, data_format: str = "thd") -> Tensor:  # (batch, tokens, VOCAB), a leaf
    """Logits laid out as verl's own functions lay out the teacher's tensors."""
    to_rows = losses.preprocess_thd_engine if data_format == "thd" else losses.preprocess_bshd_engine
    shape = to_rows(micro_batch()["teacher_ids"])[0].shape[:2]
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(7)).requires_grad_()


def values_by_sequence(rows: Tensor, alignment: int) -> Tensor:  # (all tokens,)
    """Per-row values of a packed batch, the padding taken out, as verl hands them to its consumer."""
    kept, start_of = [], 0
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        length = prompt + response
        kept.append(rows[0, start_of : start_of + length])
        start_of += length + -length % alignment
    return torch.cat(kept)


def loss_config(config: Any, **settings: Any) -> SimpleNamespace:
    return SimpleNamespace(distillation_loss=config.DistillationLossConfig(**settings))
