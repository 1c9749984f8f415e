"""verl loads its plugins while it is itself half imported: the installation waits for its Megatron engine."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import subprocess
import sys

import pytest

from tests.support.ranks import run_ranks
from tests.support.source_tree import ROOT
from tests.support.verl_process import STAND_IN, start

ENGINE = "verl.workers.engine.megatron.transformer_impl"


def entry_point() -> importlib.metadata.EntryPoint:
    """As the project file declares it, whether or not this checkout is installed."""
    lines = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."verl.plugins"]\n')[1].splitlines()
    name, _, value = lines[0].partition(" = ")
    return importlib.metadata.EntryPoint(name, value.strip('"'), "verl.plugins")


def load(rank: int, world: int, mode: str | None) -> list[bool]:
    """Whether a finder waits before the engine is imported; whether verl's loss is replaced then, and at the end."""
    start(mode=mode)
    finders = list(sys.meta_path)
    entry_point().load()
    entry_point().load()
    importlib.import_module("verl.workers.engine.base")
    losses = importlib.import_module("verl.trainer.distillation.losses")
    original = losses.compute_topk_loss
    states = [sys.meta_path != finders]
    engine = importlib.import_module(ENGINE)
    states.append(losses.compute_topk_loss is not original)
    assert (
        sys.meta_path == finders and type(engine.__loader__).__module__ != "compact_logits.integrations.verl.deferred"
    )
    importlib.import_module("compact_logits.integrations.verl").uninstall()
    return [*states, losses.compute_topk_loss is not original]


@pytest.mark.parametrize(("mode", "states"), [("1", [True, True, False]), (None, [False, False, False])])
def test_installed_when_the_megatron_engine_is_imported_and_not_before(mode: str | None, states: list[bool]) -> None:
    assert run_ranks(1, load, mode) == [states]


def late(rank: int, world: int) -> tuple[bool, bool]:
    start()
    importlib.import_module(ENGINE)
    losses = importlib.import_module("verl.trainer.distillation.losses")
    original = losses.compute_topk_loss
    entry_point().load()
    return losses.compute_topk_loss is not original


def test_at_once_where_the_engine_is_there_already() -> None:
    assert run_ranks(1, late) == [True]


def called_off(rank: int, world: int) -> tuple[bool, bool]:
    start()
    finders = list(sys.meta_path)
    entry_point().load()
    importlib.import_module("compact_logits.integrations.verl").uninstall()
    losses = importlib.import_module("verl.trainer.distillation.losses")
    original = losses.compute_topk_loss
    importlib.import_module(ENGINE)
    return sys.meta_path == finders, losses.compute_topk_loss is original


def test_uninstalled_before_it_was_installed() -> None:
    assert run_ranks(1, called_off) == [(True, True)]


def unknown_version(rank: int, world: int, mode: str) -> list[str]:
    start(mode=mode)
    entry_point().load()
    megatron = importlib.import_module("verl.trainer.distillation.megatron.losses")
    megatron._VocabParallelKLDivergence.forward = staticmethod(lambda ctx, logits: 0)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("compact_logits").addHandler(handler)
    try:
        importlib.import_module(ENGINE)
    except ValueError as error:
        messages.append(f"raised {error}")
    return messages


@pytest.mark.parametrize(("mode", "how"), [("1", "full path for top-k distillation: "), ("strict", "raised ")])
def test_a_verl_that_is_not_the_proven_one_is_logged_or_raises(mode: str, how: str) -> None:
    (messages,) = run_ranks(1, unknown_version, mode)
    assert len(messages) == 1 and messages[0].startswith(f"{how}needed _VocabParallelKLDivergence.forward(ctx, ")


def test_a_mistyped_switch_is_logged_although_verl_swallows_what_a_plugin_raises() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(STAND_IN)!r})
import compact_logits.integrations.verl as plugin
try:
    plugin.plugin
except ValueError:
    print("raised")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={"COMPACT_LOGITS": "yes", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "raised\n"
    assert "compact_logits is not installed in verl: COMPACT_LOGITS must be unset, 0, 1 or strict" in done.stderr
