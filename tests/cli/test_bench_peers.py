"""How the bench calls each peer: with stand-ins that have the peer's signature, and with checkouts that are here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compact_logits import reference
from compact_logits.cli.bench_case import Case, make_inputs, true_results
from compact_logits.cli.bench_gate import PEERS, errors, judge, results
from compact_logits.cli.bench_peers import ROOTS, find_peers
from compact_logits.cli.bench_ways import Peer, as_shipped, full_path, log_softmax, on_selected_rows
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

CASE = Case(tokens=24, density=0.5, hidden=8, vocab=50, dtype=torch.float32, entropy="loss", device=torch.device("cpu"))

Pair = tuple[Tensor, Tensor]


def slime(logits: Tensor, tokens: Tensor, group: Any, *, with_entropy: bool, with_entropy_grad: bool) -> Any:
    assert logits.dtype == torch.float32 and group.size() == 1
    log_probs, entropy = reference.log_probs(logits, tokens)
    return log_probs[:, None], (entropy if with_entropy_grad else entropy.detach()) if with_entropy else None


def trl(
    hidden: Tensor,
    weight: Tensor,
    bias: None,
    targets: Tensor,
    temperature: float,
    tile: int,
    softcap: None,
    *rest: Any,
) -> Any:
    scale, outputs = rest
    assert bias is softcap is None and temperature == scale == 1.0 and tile > 0
    log_probs, entropy = reference.log_probs(hidden @ weight.T, targets)
    return log_probs, entropy if "entropy" in outputs else None, None


def cut_cross_entropy(e: Tensor, c: Tensor, targets: Tensor, *, reduction: str, impl: str) -> Tensor:
    assert (reduction, impl) == ("none", "torch_compile")
    return F.cross_entropy(e @ c.T, targets, reduction="none", ignore_index=-100)


def torchforge(logits: Tensor, input_ids: Tensor, temperature: float = 1.0, align: bool = True) -> Tensor:
    assert logits.dim() == 3 and input_ids.dim() == 2 and not align and temperature == 1.0
    return reference.log_probs(logits[0], input_ids[0])[0][None]


def nemo_rl(
    hidden: Tensor,  # (sequence, batch, hidden)
    targets: Tensor,  # (batch, sequence)
    weight: Tensor,
    start: int,
    stop: int,
    chunk: int,
    group: Any,
) -> Tensor:
    assert (start, stop, group.size()) == (0, weight.shape[0], 1) and chunk > 0
    return reference.log_probs((hidden @ weight.T)[:, 0], targets[0])[0][None]


def areal_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return reference.log_probs(logits, labels)[0]


def prime_rl(hidden: Tensor, weight: Tensor, labels: Tensor, inverse_temperature: Tensor, chunk: int) -> Pair:
    assert inverse_temperature.shape == labels.shape and bool((inverse_temperature == 1).all()) and chunk > 0
    log_probs, entropy = reference.log_probs(hidden @ weight.T, labels)
    return log_probs, entropy.detach()


def applied(function: Callable[..., Any]) -> type:
    return type("Function", (), {"apply": staticmethod(function)})


STAND_INS: dict[str, dict[str, Any]] = {
    "slime.utils.ppo_utils": {"calculate_log_probs_and_entropy": slime},
    "trl.kernels": {"ChunkedLogProbFunction": applied(trl)},
    "trl.trainer.utils": {},
    "cut_cross_entropy": {"linear_cross_entropy": cut_cross_entropy},
    "forge.util.ops": {"compute_logprobs": torchforge},
    "nemo_rl.distributed.model_utils": {"ChunkedDistributedHiddenStatesToLogprobs": applied(nemo_rl)},
    "areal.utils.functional.vocab_parallel": {
        "gather_logprobs": areal_log_probs,
        "gather_logprobs_entropy": reference.log_probs,
    },
    "prime_rl.trainer.models.layers.lm_head": {"_SequenceChunkedLogProbEntropyFn": applied(prime_rl)},
}
# verl's is read from its file.
VERL = """
from compact_logits import reference

class FusedLinearForPPO:
    def __call__(self, hidden, weight, targets):
        return reference.log_probs(hidden @ weight.T, targets)
"""


def failures(peer: Peer) -> dict[str, str]:
    """Of each view and kind of entropy that the peer has, why its numbers are not the definition's."""
    found = {}
    for entropy in peer.entropy:
        case = replace(CASE, entropy=entropy)
        inputs = make_inputs(case)
        truth = true_results(case, inputs)
        plain = errors(results(full_path("plain", log_softmax), inputs, case), truth)
        for way in (as_shipped(peer, case.device), on_selected_rows(peer)):
            told = judge(errors(results(way, inputs, case), truth), plain, PEERS)
            if told:
                found[f"{way.name}, {way.view}, entropy {entropy}"] = told
    return found


def with_stand_ins(rank: int, world: int, folder: str) -> dict[str, dict[str, str] | str]:
    for name, contents in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    os.environ["VERL_ROOT"] = folder
    peers = find_peers(dict.fromkeys(ROOTS, folder))
    return {peer.name: peer.off if peer.score is None else failures(peer) for peer in peers}


def test_each_peer_is_asked_as_its_signature_has_it(tmp_path: Path) -> None:
    (tmp_path / "verl/utils/experimental").mkdir(parents=True)
    (tmp_path / "verl/utils/experimental/torch_functional.py").write_text(VERL)
    (found,) = run_ranks(1, with_stand_ins, str(tmp_path))
    assert len(found) == 10
    # Megatron's own is the real one, whose gradients are rounded to bf16 whatever they are of: the gate says so.
    fused = found.pop("megatron-core fused CE")
    assert isinstance(fused, dict) and all(told.startswith("d_hidden off by") for told in fused.values())
    assert {name: told for name, told in found.items() if told} == {}


def from_checkout(rank: int, world: int, name: str) -> dict[str, str] | str:
    peer = next(peer for peer in find_peers(os.environ) if peer.name == name)
    return peer.off if peer.score is None else failures(peer)


@pytest.mark.parametrize(
    ("name", "variable"),
    [("slime", "SLIME_ROOT"), ("verl torch fused", "VERL_ROOT"), ("torchforge", "TORCHFORGE_ROOT")],
)
def test_a_peer_that_is_here_gives_the_definition(name: str, variable: str) -> None:
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set")
    assert run_ranks(1, from_checkout, name) == [{}]
