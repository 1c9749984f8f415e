"""Importing changes nothing: seen from a fresh process, before and after every module of the package is imported."""

from __future__ import annotations

import subprocess
import sys

from tests.support.source_tree import PACKAGE, ROOT, modules

LIBRARIES = ("torch", "megatron", "einops")

OBSERVE = """
import importlib, logging, os, signal, sys, threading, warnings
import torch, torch.distributed, torch.nn.functional, torch.utils.checkpoint, einops
import megatron.core.models.gpt.gpt_model, megatron.core.tensor_parallel.layers, megatron.core.pipeline_parallel

libraries = [module for name, module in list(sys.modules.items()) if name.split(".")[0] in LIBRARIES]
classes = {torch.Tensor, torch.nn.Module, torch.autograd.Function}
for module in libraries:
    if module.__name__.startswith("megatron"):
        classes |= {value for value in vars(module).values() if isinstance(value, type)}
modules, classes = ({repr(holder): holder for holder in holders} for holders in (libraries, classes))

def attributes(holders):
    # The values themselves, not their ids: an id may be given out again.
    return {(text, name): value for text, holder in holders.items() for name, value in vars(holder).items()}

def observe():
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "paths": list(sys.path),
        "import hooks": list(sys.meta_path),
        "exception hooks": [sys.excepthook, threading.excepthook],
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": threading.active_count(),
        "warnings": list(warnings.filters),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "loggers": {name: (logger.level, list(logger.handlers), logger.propagate)
                    for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)},
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
                  torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()),
        "modules": attributes(modules),
        "classes": attributes(classes),
    }

def report(before, after):
    for name, state in after["loggers"].items():
        if name.split(".")[0] == "compact_logits" and state != before["loggers"].get(name, (logging.NOTSET, [], True)):
            yield "loggers"
    for what, old in before.items():
        new = after[what]
        if what in ("modules", "loggers"):
            # A part of a library that is imported late appears as a new name; what was there stays as it was.
            new = {name: new[name] for name in old}
        if what in ("modules", "classes"):
            changed = [name for name in old.keys() | new.keys() if old.get(name, new) is not new.get(name, old)]
        else:
            changed = [] if old == new else [old, new]
        if changed:
            print(what, changed, file=sys.stderr)
            yield what

before = observe()
for step in STEPS:
    exec(step)
    after = observe()
    print(*sorted(set(report(before, after))))
    before = after
"""

# Inside an integration a module may need its framework; the integration's own package never does.
IMPORT = """
try:
    importlib.import_module({name!r})
except ImportError as error:
    if {name!r}.count(".") < 3 or (error.name or "").startswith("compact_logits"):
        raise
"""


def importable() -> list[str]:
    return [module.name for module in modules() if not module.name.endswith("__main__")]


def run(code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    sys.stderr.write(done.stderr)
    assert done.returncode == 0
    return done.stdout


def observed(steps: list[str]) -> list[str]:
    """The kinds of things that each step changed, in one process."""
    return run(OBSERVE.replace("LIBRARIES", repr(LIBRARIES)).replace("STEPS", repr(steps))).splitlines()


def test_importing_every_module_changes_nothing() -> None:
    assert len(importable()) > 20
    assert observed(["".join(IMPORT.format(name=name) for name in importable())]) == [""]


def test_a_change_is_seen() -> None:
    steps = {
        "pass": "",
        "os.environ['A_NEW_NAME'] = '1'": "environment",
        "logging.basicConfig()": "logging",
        "logging.getLogger('compact_logits.rows').addHandler(logging.NullHandler())": "loggers",
        "logging.getLogger('compact_logits').setLevel('INFO')": "loggers",
        "torch.set_num_threads(torch.get_num_threads() + 1)": "torch",
        "warnings.simplefilter('error')": "warnings",
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)": "signals",
        "torch.cuda.current_device = lambda: 0": "modules",
        "torch.Tensor.add = None": "classes",
        "megatron.core.models.gpt.gpt_model.GPTModel._postprocess = None": "classes",
    }
    assert observed(list(steps)) == list(steps.values())


def test_the_package_itself_needs_no_megatron_and_no_terminal() -> None:
    loaded = run(f"import {PACKAGE}, sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))").split()
    assert {PACKAGE, "torch", "einops"} <= set(loaded)
    assert not {"megatron", "slime", "verl", "forge", "rich", "matplotlib"} & set(loaded)
