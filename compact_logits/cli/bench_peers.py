"""The peers: packages that are installed, and checkouts named by the environment. None of their code is here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from compact_logits.cli.bench_case import Case
from compact_logits.cli.bench_ways import Peer, Score
from compact_logits.cli.quiet import quiet

__all__ = ["ROOTS", "find_peers"]

_EVERY = ("none", "metric", "loss")
# Checkouts: the variable, and where in it the packages begin.
ROOTS = {
    "SLIME_ROOT": "",
    "VERL_ROOT": "",
    "TORCHFORGE_ROOT": "src",
    "NEMO_RL_ROOT": "",
    "AREAL_ROOT": "",
    "PRIME_RL_ROOT": "src",
}


def find_peers(environ: Mapping[str, str]) -> list[Peer]:
    """Every peer that the bench knows, the ones that cannot be imported with the reason.

    Imports them, for which the folders of `ROOTS` are put on `sys.path`; those that want one get a process group of
    one rank.
    """
    found = []
    for peer, variable, load in _PEERS:
        if variable and not environ.get(variable):
            found.append(replace(peer, off=f"{variable} is not set"))
            continue
        if variable:
            folder = str(Path(environ[variable]) / ROOTS[variable])
            if folder not in sys.path:
                sys.path.insert(0, folder)
        try:
            with quiet():
                found.append(replace(peer, score=load()))
        except (Exception, SystemExit) as error:
            # Whatever an installation that is not whole raises is what its user needs to hear of.
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
            found.append(replace(peer, off=f"cannot be imported: {reason}"))
    return found


def _single_rank() -> Any:
    """The group of this process alone, started where none is."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = importlib.import_module("torch.distributed").HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return dist.group.WORLD


def _slime() -> Score:
    function = importlib.import_module("slime.utils.ppo_utils").calculate_log_probs_and_entropy
    group = _single_rank()

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        # Megatron's wrapper of 16-bit models hands fp32 logits to the loss.
        log_probs, entropy = function(
            F.linear(hidden, weight).float(),
            targets,
            group,
            with_entropy=case.entropy != "none",
            with_entropy_grad=case.entropy == "loss",
        )
        return log_probs.squeeze(-1), entropy if case.entropy != "none" else None

    return score


def _megatron(fused: bool) -> Callable[[], Score]:
    def load() -> Score:
        group = _single_rank()
        state = importlib.import_module("megatron.core.parallel_state")
        if not state.model_parallel_is_initialized():
            state.initialize_model_parallel()
        plain = importlib.import_module("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
        fusions = importlib.import_module("megatron.core.fusions.fused_cross_entropy")

        def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
            logits = F.linear(hidden, weight)[:, None]
            if fused:
                return -fusions.fused_vocab_parallel_cross_entropy(logits, targets[:, None], group)[:, 0], None
            return -plain(logits, targets[:, None])[:, 0], None

        return score

    return load


def _trl() -> Score:
    function = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    importlib.import_module("trl.trainer.utils")  # its backward imports this, which takes seconds

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        outputs = () if case.entropy == "none" else ("entropy",)
        log_probs, entropy, *_ = function.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, outputs)
        return log_probs, entropy

    return score


def _cut_cross_entropy() -> Score:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        impl = "cce" if case.device.type == "cuda" else "torch_compile"
        return -function(hidden, weight, targets, reduction="none", impl=impl), None

    return score


def _verl() -> Score:
    # The module by its file: verl's package imports ray, tensordict and more.
    path = Path(os.environ["VERL_ROOT"], "verl/utils/experimental/torch_functional.py")
    spec = importlib.util.spec_from_file_location("verl_torch_functional", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = module.FusedLinearForPPO()

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = function(hidden, weight, targets)
        return log_probs, entropy if case.entropy != "none" else None

    return score


def _torchforge() -> Score:
    function = importlib.import_module("forge.util.ops").compute_logprobs

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        return function(F.linear(hidden, weight)[None], targets[None], align=False)[0], None

    return score


def _nemo_rl() -> Score:
    function = importlib.import_module("nemo_rl.distributed.model_utils").ChunkedDistributedHiddenStatesToLogprobs
    group = _single_rank()

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        return function.apply(hidden[:, None], targets[None], weight, 0, weight.shape[0], 256, group)[0], None

    return score


def _areal() -> Score:
    module = importlib.import_module("areal.utils.functional.vocab_parallel")

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        logits = F.linear(hidden, weight)
        if case.entropy == "none":
            return module.gather_logprobs(logits, targets), None
        log_probs, entropy = module.gather_logprobs_entropy(logits, targets)
        return log_probs, entropy

    return score


def _prime_rl() -> Score:
    module = importlib.import_module("prime_rl.trainer.models.layers.lm_head")

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        ones = torch.ones(hidden.shape[0], device=hidden.device)
        log_probs, entropy = module._SequenceChunkedLogProbEntropyFn.apply(hidden, weight, targets, ones, 8192)
        return log_probs, entropy if case.entropy != "none" else None

    return score


# The peer, the variable of its checkout, and how to come by its function.
_PEERS: tuple[tuple[Peer, str, Callable[[], Score]], ...] = (
    (Peer("slime", _EVERY), "SLIME_ROOT", _slime),
    (Peer("megatron-core CE"), "", _megatron(fused=False)),
    (Peer("megatron-core fused CE"), "", _megatron(fused=True)),
    (Peer("TRL chunked", _EVERY, selects=("cuda", "xpu")), "", _trl),
    (Peer("ml-cross-entropy", masks=True), "", _cut_cross_entropy),
    (Peer("verl torch fused", _EVERY), "VERL_ROOT", _verl),
    (Peer("torchforge"), "TORCHFORGE_ROOT", _torchforge),
    (Peer("NeMo-RL chunked"), "NEMO_RL_ROOT", _nemo_rl),
    (Peer("AReaL", _EVERY), "AREAL_ROOT", _areal),
    (Peer("prime-rl", ("none", "metric")), "PRIME_RL_ROOT", _prime_rl),
)
