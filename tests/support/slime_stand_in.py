"""Small stand-ins with the signatures of slime's modules, so that the contract is tested where slime is not."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Iterate", "run_arguments", "slime_stand_in"]

PACKAGE = "slime.backends.megatron_utils"


def run_arguments(**changed: Any) -> Namespace:
    """A recipe that is compacted, with `changed` in place of its settings."""
    settings = {
        "loss_type": "policy_loss",
        "advantage_estimator": "grpo",
        "kl_coef": 0.0,
        "entropy_coef": 0.01,
        "rollout_temperature": 0.9,
        "rollout_top_p": 1.0,
        "use_rollout_entropy": False,
        "allgather_cp": False,
    }
    return Namespace(**{**settings, **changed})


class Iterate:
    """slime's data iterator over one micro-batch."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def get_next(self, keys: Any) -> dict[str, Any]:
        return {key: self._fields.get(key) for key in keys}


@contextmanager
def slime_stand_in(run: Namespace) -> Iterator[dict[str, ModuleType]]:
    """slime's `data`, `loss` and `model` modules, and an `actor` that has taken functions of theirs by name."""
    names = [
        "slime",
        "slime.backends",
        PACKAGE,
        *(f"{PACKAGE}.{name}" for name in ("data", "loss", "model", "actor", "cp_utils")),
    ]
    before = {name: sys.modules.get(name) for name in names}
    modules = {name.rpartition(".")[2]: ModuleType(name) for name in names}
    for name in names:
        sys.modules[name] = modules[name.rpartition(".")[2]]
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, sys.modules[name])
    data, loss, model, actor = (modules[name] for name in ("data", "loss", "model", "actor"))

    def get_batch(data_iterator: Any, keys: Any, pad_multiplier: int = 128, allgather_cp: bool = False) -> dict:
        batch = data_iterator.get_next(keys)
        batch["unconcat_tokens"] = batch["tokens"]
        masks = []
        for mask, total, response in zip(batch["loss_masks"], batch["total_lengths"], batch["response_lengths"]):  # noqa: B905
            masks.append(F.pad(mask, (total - response - 1, 1)))
        tokens, joined = torch.cat(batch["tokens"]), torch.cat(masks)
        pad = -tokens.shape[0] % pad_multiplier
        batch["tokens"] = F.pad(tokens, (0, pad))[None]
        batch["full_loss_masks"] = F.pad(joined, (0, pad))[None]
        return batch

    def get_log_probs_and_entropy(
        logits: Tensor,
        *,
        args: Namespace,
        unconcat_tokens: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        non_loss_data: bool = True,
        top_p_token_ids: Any = None,
        top_p_token_offsets: Any = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        return torch.empty(0), {"ordinary": logits}

    def _allgather_cp_redistribute(
        res: dict, *, logits_local_len: int, total_lengths: list[int], response_lengths: list[int]
    ) -> None: ...

    def compute_advantages_and_returns(args: Namespace, rollout_data: dict) -> None:
        rollout_data["advantages"] = [torch.ones_like(mask) for mask in rollout_data["loss_masks"]]

    def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
        return log_prob[::2] if total_length == 99 else log_prob

    def forward_only(
        f: Any,
        args: Namespace,
        model: Any,
        data_iterator: Any,
        num_microbatches: Any,
        store_prefix: str = "",
        use_rollout_top_p_replay: bool = False,
    ) -> Any:
        return data_iterator(modules["model"])

    def train_one_step(args: Namespace, rollout_id: int, step_id: int, model: Any) -> tuple[dict[str, float], float]:
        model(modules["model"])
        return {"loss": 0.5}, 1.0

    def train(rollout_id: int, model: Any, *rest: Any) -> Any:
        return model(modules["model"])

    data.get_batch = model.get_batch = get_batch
    loss.get_log_probs_and_entropy = actor.get_log_probs_and_entropy = get_log_probs_and_entropy
    loss.compute_advantages_and_returns = actor.compute_advantages_and_returns = compute_advantages_and_returns
    modules["cp_utils"].slice_log_prob_with_cp = slice_log_prob_with_cp
    loss._allgather_cp_redistribute = _allgather_cp_redistribute
    model.forward_only = actor.forward_only = forward_only
    model.train = actor.train = train
    model.train_one_step = train_one_step
    model.get_args = lambda: run
    try:
        yield modules
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
