"""slime's actor, imported from `SLIME_ROOT` over the Megatron of `MEGATRON_ROOT`, in a process given over to it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["leave_blank", "load_actor", "needs_trees", "parse_flags"]

_ROOTS = ("SLIME_ROOT", "MEGATRON_ROOT")  # in the order of the path: both have a folder of examples

# Rollout engines, trackers, weight updates, checkpoints: imported beside the passes, never reached by them.
_NOT_ON_THE_PATH = (
    "httpx",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.initialize",
    "megatron.training.tokenizer",
    "megatron.training.training",
    "psutil",
    "ray",
    "requests",
    "safetensors",
    "sglang",
    "sglang_router",
    "torch_memory_saver",
    "tqdm",
    "transformers",
    "wandb",
    "yaml",
)

needs_trees = pytest.mark.skipif(
    not all(os.environ.get(root) for root in _ROOTS),
    reason=f"{' and '.join(_ROOTS)} do not name slime's source tree and that of the Megatron it pins, with its patch",
)


@cache
def load_actor() -> ModuleType:
    """slime's actor module. It binds `forward_only`, `train` and `get_log_probs_and_entropy` by name when imported.

    Changes `sys.path`, `sys.meta_path` and what slime takes for its accelerator, for good: for spawned ranks only.
    """
    # slime compiles its elementwise functions when it is imported; a compiler need not be there.
    importlib.import_module("torch._dynamo").config.disable = True
    roots = [Path(os.environ[root]).resolve() for root in _ROOTS]
    sys.path[:0] = [str(root) for root in roots]
    leave_blank()
    core = importlib.import_module("megatron.core")
    assert Path(core.__file__).is_relative_to(roots[1]), f"megatron.core came from {core.__file__}, not {roots[1]}"
    actor = importlib.import_module("slime.backends.megatron_utils.actor")
    assert Path(actor.__file__).is_relative_to(roots[0]), f"slime came from {actor.__file__}, not {roots[0]}"
    accelerator = importlib.import_module("slime.utils.accelerator")
    answers = {
        "device": lambda index=None: "cpu",
        "current_device": lambda: "cpu",
        "synchronize": lambda device=None: None,
    }
    vars(accelerator).update(answers)
    return actor


def leave_blank() -> None:
    """From now on, what slime imports and the passes never reach may be imported, and does nothing. For good."""
    sys.meta_path.insert(0, _Blanks())


def parse_flags(flags: str) -> Namespace:
    """What slime's own parser makes of command-line flags, with its own defaults for the rest."""
    load_actor()
    arguments = importlib.import_module("slime.utils.arguments")
    parser = argparse.ArgumentParser()
    arguments.get_slime_extra_args_provider()(parser)
    args = parser.parse_args(["--rollout-batch-size", "2", *flags.split()])
    if args.eps_clip_high is None:  # as its validation has it, which also wants checkpoints and a cluster
        args.eps_clip_high = args.eps_clip
    args.use_critic = args.advantage_estimator == "ppo"
    return args


class _Nothing:
    """Takes any arguments and does nothing: a progress bar, a client."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def update(self, *_: Any) -> None: ...

    def close(self) -> None: ...


class _Blank(ModuleType):
    """A module in which every name is that class."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Nothing)
        return _Nothing


class _Blanks(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        off_path = any(name == each or name.startswith(each + ".") for each in _NOT_ON_THE_PATH)
        return ModuleSpec(name, self, is_package=True) if off_path else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Blank(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
