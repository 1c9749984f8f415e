"""Megatron-RL from a Megatron-LM checkout, on CPU: its own `rl_utils`, its own `get_logprobs`, a real GPTModel.

`MEGATRON_MAIN_ROOT` names the checkout. Where the installed megatron-core is of the checkout's minor version, that is
what `megatron.rl` runs on; otherwise the checkout's own.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor

from compact_logits.cli.cpu_attention import ZigzagAttention
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from tests.support.ranks import RankPool

__all__ = ["ROOT", "build_policy", "needs_tree", "on_tree_ranks", "rl_utils_on_cpu", "settings"]

ROOT = "MEGATRON_MAIN_ROOT"

# Agents, servers and loggers, and what only they import: nothing that computes a log-prob.
_NOT_ON_THE_PATH = (
    "megatron.rl.agent",
    "megatron.rl.inference",
    "megatron.rl.server",
    "pydantic",
    "torch.utils.tensorboard",
    "wandb",
    "yaml",
)

needs_tree = pytest.mark.skipif(
    not os.environ.get(ROOT) or sys.version_info < (3, 12),
    reason=f"{ROOT} does not name a Megatron-LM checkout, or this Python is older than 3.12, which it needs",
)


def on_tree_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `fn(rank, 4, *args)` on four ranks that stay, with the checkout imported: that alone takes them seconds."""
    return _pool().run(4, fn, *args, timeout=600.0)


@cache
def _pool() -> RankPool:
    pool = RankPool()
    atexit.register(pool.close)
    return pool


class _Blank(ModuleType):
    """A module in which every class name is an empty class."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)
        blank = type(name, (), {"__init_subclass__": classmethod(lambda cls, **_: None), "__init__": _accept})
        setattr(self, name, blank)
        return blank


def _accept(self: Any, *_: Any, **__: Any) -> None: ...


class _Blanks(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        off_path = any(name == each or name.startswith(each + ".") for each in _NOT_ON_THE_PATH)
        return ModuleSpec(name, self, is_package=True) if off_path else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Blank(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def settings(**changed: Any) -> Namespace:
    """The arguments that `rl_utils` and the integration read of a run."""
    given = {"fp16": False, "bf16": False, "rl_sequence_packing_max_sequences_per_bin": 4, "cuda_graph_impl": "none"}
    return Namespace(**{**given, **changed})


@contextmanager
def rl_utils_on_cpu(
    rank: int, world: int, *, tp: int, cp: int = 1, pp: int = 1, args: Namespace | None = None
) -> Iterator[ModuleType]:
    """`megatron.rl.rl_utils` in a process with that parallel state over gloo, and with `args` as its arguments."""
    _put_tree_on_path()
    rl_utils = importlib.import_module("megatron.rl.rl_utils")
    given = settings() if args is None else args
    packing = importlib.import_module("megatron.rl.sequence_packing_utils")
    replaced = {
        "get_args": lambda: given,
        "get_nvtx_range": lambda: lambda *_, **__: nullcontext(),
        # Transformer Engine's way of cutting sequences, which get_logprobs asks for.
        "tex": SimpleNamespace(thd_get_partitioned_indices=_partitioned_indices),
        "HAVE_TEX": True,
        "get_tokenizer": lambda: SimpleNamespace(pad=0),
    }
    before = [(module, dict(vars(module))) for module in (rl_utils, packing)]
    gather = collectives.all_gather
    for module, _ in before:
        vars(module).update(replaced)
    collectives.all_gather = lambda tensor, group: _GatherScalars.apply(tensor, group)
    try:
        with cpu_megatron(rank, world, tp=tp, cp=cp, pp=pp):
            yield rl_utils
    finally:
        collectives.all_gather = gather
        for module, names in before:
            vars(module).clear()
            vars(module).update(names)


def build_policy(**sizes: Any) -> torch.nn.Module:
    """A policy as Megatron-RL calls it: one that takes `fp32_output`, packed bins, and batches of any size."""
    model = build_gpt(**sizes)
    inner = model.module if hasattr(model, "module") else model
    for layer in inner.decoder.layers:
        layer.self_attention.core_attention = _SlotAttention(inner.config, layer.layer_number, None, "self")
    inner.decoder.register_forward_pre_hook(_unpack_batches, with_kwargs=True)
    return model if hasattr(model, "module") else _Fp32Policy(inner)


class _GatherScalars(torch.autograd.Function):
    """What `torch.distributed.nn.functional.all_gather` does over NCCL. Over gloo its backward takes ranks of the group
    for ranks of the world, and works for the default group alone."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor, group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = torch.stack(grads)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


class _Fp32Policy(torch.nn.Module):
    """Stands where a Float16Module would, since `get_logprobs` passes what only that takes."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.config, self.pg_collection = module.config, module.pg_collection

    def forward(self, *args: Any, fp32_output: bool, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_input_tensor(self, tensor: Any) -> None:
        self.module.set_input_tensor(tensor)


class _SlotAttention(ZigzagAttention):
    """Attends within the slots of a bin, each sequence of a batch by itself."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        params = kwargs.get("packed_seq_params")
        if params is not None:
            padded = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
            kwargs["packed_seq_params"] = SimpleNamespace(cu_seqlens_q=padded)
        if query.dim() == 3:
            return super().forward(query, key, value, *args, **kwargs)
        each = [t.split(1, dim=1) for t in (query, key, value)]
        return torch.cat(
            [super(_SlotAttention, self).forward(*qkv, *args, **kwargs) for qkv in zip(*each, strict=True)], 1
        )


def _unpack_batches(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Several sequences side by side are no packed bin, but `get_logprobs` describes them as one, which Megatron's
    attention, made for one, then folds into the hidden size."""
    if kwargs["hidden_states"] is not None and kwargs["hidden_states"].shape[1] > 1:
        kwargs = {**kwargs, "packed_seq_params": None}
    return args, kwargs


def _put_tree_on_path() -> None:
    root = Path(os.environ[ROOT])
    if str(root) in sys.path:
        return
    sys.meta_path.insert(0, _Blanks())
    spec = importlib.util.spec_from_file_location("_package_info", root / "megatron/core/package_info.py")
    assert spec is not None and spec.loader is not None
    info = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(info)
    same = version("megatron-core").split(".")[:2] == info.__version__.split(".")[:2]
    sys.path.insert(len(sys.path) if same else 0, str(root))
    if same:  # the installed package has no megatron.rl, the checkout adds it
        importlib.invalidate_caches()


def _partitioned_indices(cu_seqlens: Tensor, total: int, size: int, rank: int) -> Tensor:
    parts = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        if stop > start:
            cuts = torch.arange(start, stop, dtype=torch.int32).chunk(2 * size)
            parts += [cuts[rank], cuts[2 * size - 1 - rank]]
    return torch.cat(parts)
