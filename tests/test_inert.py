"""Importing changes nothing: seen from a fresh process, before and after every module of the package is imported."""

from __future__ import annotations

import subprocess
import sys

from tests.support.source_tree import PACKAGE, ROOT, modules

OBSERVE = """
import importlib, logging, os, signal, sys, threading, warnings
import torch, torch.distributed, torch.nn.functional, torch.utils.checkpoint, einops
import megatron.core.models.gpt.gpt_model, megatron.core.tensor_parallel.layers, megatron.core.pipeline_parallel

LIBRARIES = {"torch", "megatron", "einops"}

def attributes(owner):
    return {name: id(value) for name, value in vars(owner).items()}

def observe():
    holders = [torch.Tensor, torch.nn.Module, torch.autograd.Function]
    loaded = [module for name, module in list(sys.modules.items()) if name.split(".")[0] in LIBRARIES]
    holders += loaded
    # Class by class, since a patch of a method leaves the module's own names alone.
    for module in loaded:
        if module.__name__.startswith("megatron"):
            holders += [value for value in vars(module).values() if isinstance(value, type)]
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "paths": list(sys.path),
        "import hooks": [id(hook) for hook in sys.meta_path],
        "exception hooks": [id(sys.excepthook), id(threading.excepthook)],
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": threading.active_count(),
        "warnings": list(warnings.filters),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "loggers": {name: (logger.level, list(logger.handlers), logger.propagate)
                    for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)},
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
                  torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()),
        "attributes": {(repr(holder), name): value for holder in holders for name, value in attributes(holder).items()},
    }

before = observe()
for name in MODULES:
    importlib.import_module(name)
CHANGE
after = observe()
# A library's module that is imported late appears as a new attribute; nothing that was there may change.
for what, old in before.items():
    new = after[what]
    if what == "attributes":
        new = {key: new.get(key) for key in old}
        old, new = set(old.items()), set(new.items())
    if what == "loggers":
        ours = {name: state for name, state in new.items() if name.split(".")[0] == "compact_logits"}
        assert all(state == (logging.NOTSET, [], True) for state in ours.values()), ours
        new = {name: new[name] for name in old}
    if old != new:
        print(what, "changed:", sorted(map(str, old ^ new))[:5] if isinstance(old, set) else (old, new))
"""


def importable() -> list[str]:
    return [module.name for module in modules() if not module.name.endswith("__main__")]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def observed(change: str) -> str:
    return run(OBSERVE.replace("MODULES", repr(importable())).replace("CHANGE", change))


def test_importing_every_module_changes_nothing() -> None:
    assert len(importable()) > 20
    assert observed("") == ""


def test_every_kind_of_change_is_seen() -> None:
    seen = observed(
        "os.environ['A_NEW_NAME'] = '1'; logging.basicConfig(); logging.getLogger('compact_logits').propagate = True\n"
        "torch.cuda.current_device = lambda: 0; torch.Tensor.add = None; torch.set_num_threads(3)\n"
        "megatron.core.models.gpt.gpt_model.GPTModel._postprocess = None; warnings.simplefilter('error')\n"
    )
    for what in ("environment", "logging", "torch", "warnings", "attributes"):
        assert f"{what} changed:" in seen
    for name in ("current_device", "add", "_postprocess"):
        assert f"'{name}'" in seen


def test_the_package_itself_needs_no_megatron_and_no_terminal() -> None:
    loaded = run(f"import {PACKAGE}, sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))").split()
    assert {PACKAGE, "torch", "einops"} <= set(loaded)
    assert not {"megatron", "slime", "verl", "forge", "rich", "matplotlib"} & set(loaded)
