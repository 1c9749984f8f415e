"""verl's own source, from the checkout that `VERL_ROOT` names, on CPU: for fresh processes, changed for good by it."""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core import parallel_state

from compact_logits.integrations.verl import check
from tests.support.absent_libraries import stand_in_for
from tests.support.verl_process import MODULES, start

__all__ = ["actor_config", "needs_verl", "settings_of", "start_verl"]

needs_verl = pytest.mark.skipif("VERL_ROOT" not in os.environ, reason="VERL_ROOT names no verl source tree")

# What verl imports on the way to its losses and engines, and does not use in them.
_UNUSED = ["accelerate", "cachetools", "codetiming", "datasets", "hydra", "huggingface_hub", "mbridge", "omegaconf"]
_UNUSED += ["orjson", "pandas", "peft", "psutil", "pylatexenc", "qwen_vl_utils", "ray", "safetensors", "tensordict"]
_UNUSED += ["torchdata", "transformers", "vllm", "wandb"]


def start_verl(tensor_parallel: int = 1, context_parallel: int = 1) -> list[ModuleType]:
    """verl's losses, Megatron losses, configuration and engines, with Megatron's groups set up.

    Imported with `COMPACT_LOGITS` unset: verl loads the plugin of an installed package, which would install ours.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles a few of the functions that verl calls
    start(os.environ["VERL_ROOT"], mode=None)
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel
    )
    stand_in_for(_UNUSED)
    if not hasattr(logging.Logger, "warning_once"):  # transformers' doing, where it is installed
        logging.Logger.warning_once = logging.Logger.warning  # type: ignore[attr-defined]
    modules = [importlib.import_module(name) for name in MODULES]
    os.environ["COMPACT_LOGITS"] = "1"
    assert [each.state for each in check()] == ["off"]
    return modules


def settings_of(config: ModuleType, **settings: Any) -> Any:
    """A `DistillationConfig` with that loss, of no teacher."""
    return config.DistillationConfig(
        distillation_loss=config.DistillationLossConfig(
            **{"loss_mode": "forward_kl_topk", "use_task_rewards": False, "use_policy_gradient": False, "topk": 4}
            | settings
        )
    )


def actor_config() -> SimpleNamespace:
    return SimpleNamespace(
        strategy="megatron", loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None
    )
