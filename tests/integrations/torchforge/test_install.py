"""`install` in torchforge: where its function is looked up, the reference model, refusals, and the way back.

Against stand-ins of the same signatures, and against torchforge's own modules if `TORCHFORGE_ROOT` names a checkout.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from compact_logits.errors import ConfigError, PatchError, RefusedError
from compact_logits.integrations import torchforge
from compact_logits.integrations.torchforge import installation
from compact_logits.integrations.torchforge.endpoint import EndpointPatch
from compact_logits.integrations.torchforge.targets import warn_of_compile
from tests.support.collectives import count_collectives
from tests.support.meshes import mesh_of
from tests.support.ranks import RankPool
from tests.support.torchforge_tree import Endpoint, forge_modules, reference_forward

ROOT = os.environ.get("TORCHFORGE_ROOT")
TREES = [
    pytest.param(None, id="stand-ins"),
    pytest.param(ROOT, id="checkout", marks=pytest.mark.skipif(not ROOT, reason="TORCHFORGE_ROOT is unset")),
]
LOOKUPS = ("forge.util.ops", "forge.actors.reference_model", "forge.losses.reinforce_loss")
VOCAB, PROMPT = 14, 3
GATHER = "functional.all_gather_into_tensor"


@pytest.fixture(params=TREES)
def forge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    with forge_modules(request.param):
        for name in LOOKUPS:
            importlib.import_module(name)
        yield
        torchforge.uninstall()


def bound() -> list[object]:
    """Everything that `install` may replace."""
    endpoint = vars(sys.modules[LOOKUPS[1]].ReferenceModel)["forward"]
    return [sys.modules[name].compute_logprobs for name in LOOKUPS] + [endpoint, endpoint._method]


def test_installing_replaces_every_lookup_and_uninstalling_restores_them(forge: None) -> None:
    before = bound()
    torchforge.install()
    after = bound()
    assert after[0] is after[1] is after[2] and after[0] is not before[0]
    assert after[3] is before[3] and isinstance(after[3], Endpoint) and after[4] is not before[4]
    torchforge.install()
    assert bound() == after
    torchforge.uninstall()
    assert all(now is then for now, then in zip(bound(), before, strict=True))
    torchforge.uninstall()


def test_an_endpoint_is_patched_once_and_put_back_once(forge: None) -> None:
    owner = sys.modules[LOOKUPS[1]].ReferenceModel
    original = vars(owner)["forward"]._method

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        async def forward(*args: Any, **kwargs: Any) -> Any:
            return await method(*args, **kwargs)

        return forward

    patch = EndpointPatch(owner, "forward", wrap, requires=("input_ids",))
    patch.revert()
    patch.apply()
    ours = vars(owner)["forward"]._method
    patch.apply()
    assert vars(owner)["forward"]._method is ours is not original and ours.__wrapped__ is original
    patch.revert()
    patch.revert()
    assert vars(owner)["forward"]._method is original


def test_with_the_variable_unset_nothing_changes(forge: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bound()
    for value in (None, "0"):
        monkeypatch.delenv("COMPACT_LOGITS") if value is None else monkeypatch.setenv("COMPACT_LOGITS", value)
        torchforge.install()
        assert all(now is then for now, then in zip(bound(), before, strict=True))
    monkeypatch.setenv("COMPACT_LOGITS", "yes")
    with pytest.raises(ConfigError, match="COMPACT_LOGITS must be unset, 0, 1 or strict"):
        torchforge.install()


def test_a_loss_calls_ours(forge: None, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = torch.randn(2, 5, VOCAB), torch.randint(0, VOCAB, (2, 5))
    look_up = sys.modules["forge.losses.reinforce_loss"]
    theirs = look_up.compute_logprobs(logits, ids, align=False)
    calls = []
    monkeypatch.setattr(
        installation,
        "compute_logprobs",
        lambda *args, **kwargs: calls.append(kwargs) or torchforge.compute_logprobs(*args),
    )
    torchforge.install()
    ours = look_up.compute_logprobs(logits, ids, align=False)
    assert calls == [{"chunk_bytes": None, "check_ranks": None}]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("args", "warned"),
    [
        (None, False),
        (Namespace(compile=True), True),
        ({"compile": False}, False),
        ({"compile": {"enable": True}}, True),
        (Namespace(compile=Namespace(enable=False)), False),
        (Namespace(), False),
        (Namespace(compile=None), False),
        (nn.Linear(1, 1), False),  # whose `compile` is a method
    ],
)
def test_an_actors_compile_does_nothing_and_is_warned_of_once(
    forge: None, args: object, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_compile.cache_clear()
    for _ in range(2):
        torchforge.install(args)
        torchforge.uninstall()
    assert len([record for record in caplog.records if "does nothing in this release" in record.message]) == warned
    warn_of_compile.cache_clear()


def test_what_ours_refuses_is_answered_by_theirs_and_logged_once(
    forge: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = sys.modules["forge.util.ops"]
    logits, ids = torch.randn(2, 4, VOCAB), torch.randint(0, VOCAB, (2, 3))
    theirs = look_up.compute_logprobs(logits, ids, -1.0)
    torchforge.install()
    with caplog.at_level(logging.WARNING, "compact_logits"):
        for _ in range(2):
            assert torch.equal(look_up.compute_logprobs(logits, ids, -1.0), theirs)
    assert [record.message for record in caplog.records] == [
        "torchforge's own compute_logprobs takes this call: the temperature must be positive and finite, got -1.0"
    ]
    assert [(f.name, f.state) for f in torchforge.check()] == [("torchforge", "refused")]
    torchforge.uninstall()
    monkeypatch.setenv("COMPACT_LOGITS", "strict")
    torchforge.install()
    with pytest.raises(RefusedError, match="COMPACT_LOGITS=strict: the temperature must be positive"):
        look_up.compute_logprobs(logits, ids, -1.0)


def test_another_signature_is_not_patched(forge: None) -> None:
    before = bound()
    module = sys.modules[LOOKUPS[1]]

    class Changed:
        @Endpoint
        async def forward(self, input_ids: Tensor, max_req_tokens: int) -> None: ...

    class Plain:
        def forward(self, input_ids: Tensor, max_req_tokens: int, return_logprobs: bool) -> None: ...

    original = module.ReferenceModel
    try:
        for kind, text in (
            (Changed, "needed the parameters return_logprobs"),
            (Plain, "needed an endpoint with a coro"),
        ):
            module.ReferenceModel = kind
            with pytest.raises(PatchError, match=text):
                torchforge.install()
    finally:
        module.ReferenceModel = original
    assert all(now is then for now, then in zip(bound(), before, strict=True))


def test_a_patch_on_top_is_not_undone(forge: None) -> None:
    torchforge.install()
    endpoint = bound()[3]
    ours = endpoint._method

    async def on_top(*args: object) -> object:
        return await ours(*args)

    endpoint._method = on_top
    with pytest.raises(PatchError, match=r"ReferenceModel.forward was patched by compact_logits and has been replaced"):
        torchforge.uninstall()
    assert bound()[0] is not None and bound()[4] is on_top
    endpoint._method = ours


def test_check_names_each_state(forge: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (torchforge.check()[0].state, torchforge.check()[0].reason) == ("off", "not installed in this process")
    torchforge.install()
    assert torchforge.check()[0].state == "on"
    torchforge.uninstall()
    monkeypatch.delenv("COMPACT_LOGITS")
    assert torchforge.check()[0].reason == "COMPACT_LOGITS is unset or 0"
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    monkeypatch.setitem(sys.modules, "forge.actors.reference_model", None)
    assert torchforge.check()[0].state == "refused"


class Actor(nn.Module):
    """A model that ends in a tensor-parallel head, as torchtitan lays it out."""

    def __init__(self, partial: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)
        self.partial = partial

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.output(self.embedding(ids))
        if self.partial:
            mesh = logits.device_mesh
            return DTensor.from_local(logits.full_tensor() / mesh.size(), mesh, [Partial()], run_check=False)
        return logits


def reference(rank: int, world: int, root: str | None, partial: bool, check_ranks: str = "1") -> dict[str, object]:
    os.environ["COMPACT_LOGITS"], os.environ["COMPACT_LOGITS_CHECK_RANKS"] = "1", check_ranks
    model = Actor(partial)
    layout = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh_of(world), {"output": layout})
    ids = torch.randint(0, VOCAB, (2, 9))
    with forge_modules(root):
        for name in LOOKUPS:
            importlib.import_module(name)
        with count_collectives() as full:
            theirs = reference_forward(model, ids, PROMPT, log_probs=True)
        logits = reference_forward(model, ids, PROMPT, log_probs=False)
        torchforge.install()
        with count_collectives() as compact:
            ours = reference_forward(model, ids, PROMPT, log_probs=True)
        same_logits = reference_forward(model, ids, PROMPT, log_probs=False)
        diagnostics = [(each.state, each.reason) for each in torchforge.check()]
        torchforge.uninstall()
        assert not model._forward_hooks
        restored = reference_forward(model, ids, PROMPT, log_probs=True)
    assert torch.equal(restored, theirs) and torch.equal(same_logits, logits) and logits.shape == (2, 9, VOCAB)
    return {
        "difference": (ours - theirs).abs().max().item(),
        "type": type(ours).__name__,
        "shape": tuple(ours.shape),
        "full": dict(full),
        "compact": dict(compact),
        "diagnostics": diagnostics,
    }


@pytest.mark.parametrize("root", TREES)
def test_the_reference_model_no_longer_gathers(rank_pool: RankPool, root: str | None) -> None:
    for check_ranks, messages in (("1", 2), ("0", 1)):
        for found in rank_pool.run(2, reference, root, False, check_ranks):
            assert found["difference"] <= 1e-5 and found["type"] == "Tensor" and found["shape"] == (2, 6)
            assert found["full"][GATHER] == 1 and found["compact"] == {"all_gather_into_tensor": messages}
            assert found["diagnostics"] == [("on", "installed, mode on")]


@pytest.mark.parametrize("root", TREES)
def test_logits_that_ours_cannot_place_are_gathered_as_before(rank_pool: RankPool, root: str | None) -> None:
    for found in rank_pool.run(2, reference, root, True):
        assert found["difference"] <= 1e-5 and found["compact"] == found["full"]
        assert [state for state, _ in found["diagnostics"]] == ["refused"]
        assert "a Partial value is not summed yet" in found["diagnostics"][0][1]
