"""What is installed here, which seam of Megatron's GPTModel is there, which kernels run, and what the settings are."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from compact_logits.cli.quiet import quiet
from compact_logits.config import Config
from compact_logits.diagnostics import Diagnostic
from compact_logits.engine.kernels import verdict
from compact_logits.errors import CompactLogitsError, ConfigError
from compact_logits.integrations import INTEGRATIONS

__all__ = [
    "Seam",
    "Setting",
    "Version",
    "find_diagnostics",
    "find_kernels",
    "find_seam",
    "find_versions",
    "read_setting",
]

# Distribution and module of what matters here.
_PACKAGES = (
    ("compact-logits", "compact_logits"),
    ("torch", "torch"),
    ("triton", "triton"),
    ("megatron-core", "megatron.core"),
    ("einops", "einops"),
    ("transformer-engine", "transformer_engine"),
    ("slime", "slime"),
    ("verl", "verl"),
    ("torchforge", "forge"),
    ("torchtitan", "torchtitan"),
    ("rich", "rich"),
    ("matplotlib", "matplotlib"),
)


@dataclass(frozen=True)
class Version:
    """`version` is None where nothing is installed, and "unknown" for a source tree that does not say."""

    name: str
    version: str | None
    location: str = ""


@dataclass(frozen=True)
class Seam:
    """How a GPTModel is entered: by its own contract, by a patch guarded by signature, or not at all, for `reason`."""

    kind: Literal["official output processor", "guarded patch", "none"]
    reason: str


@dataclass(frozen=True)
class Setting:
    """The variables as they are, and what they come to; `config` is None where they are not valid, for `error`."""

    variables: dict[str, str]
    config: Config | None
    error: str = ""

    @property
    def enabled(self) -> bool:
        return self.config is None or self.config.enabled


def find_versions() -> list[Version]:
    """Versions by what installers noted, or by the module itself; nothing but megatron.core's parent is imported."""
    found = [Version("python", platform.python_version(), sys.executable)]
    for name, module in _PACKAGES:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError, AttributeError):
            spec = None
        if spec is None:
            found.append(Version(name, None))
            continue
        folders = list(spec.submodule_search_locations or [])
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
        found.append(Version(name, version, folders[0] if folders else spec.origin or ""))
    return found


def find_seam() -> Seam:
    """Look at the signature of `GPTModel._postprocess`, as the patch itself does. Imports megatron-core."""
    with quiet():
        try:
            model = importlib.import_module("megatron.core.models.gpt").GPTModel
            needed = importlib.import_module("compact_logits.megatron.postprocess").NEEDED_PARAMETERS
            official = importlib.import_module("compact_logits.megatron.output_processor").PROCESSOR_PARAMETERS
        except (Exception, SystemExit) as error:
            # Whatever a broken installation raises is what its user needs to hear of.
            return Seam("none", f"megatron-core cannot be imported: {_described(error)}")
    postprocess = getattr(model, "_postprocess", None)
    if postprocess is None:
        return Seam("none", "this megatron-core's GPTModel has no _postprocess: 0.16 or newer is needed")
    parameters = inspect.signature(postprocess).parameters
    missing = [name for name in needed if name not in parameters]
    if missing:
        return Seam("none", f"GPTModel._postprocess has no parameter {missing[0]}, which the compact path relies on")
    if all(name in parameters for name in official):
        return Seam("official output processor", f"GPTModel._postprocess takes {' and '.join(official)}")
    return Seam(
        "guarded patch",
        f"GPTModel._postprocess takes no {official[0]}: the output layer's forward is overridden for each call",
    )


def find_kernels() -> Diagnostic:
    """Which kernels run here, and why. Compiles the Triton kernels where there is a GPU, and nothing elsewhere."""
    name = "Triton kernels"
    with quiet():
        on_gpu = torch.cuda.is_available()
    if not on_gpu:
        return Diagnostic(
            name, "off", "Triton kernels run on CUDA only, and torch finds no GPU here: torch kernels run"
        )
    with quiet():
        found = verdict(torch.device("cuda", torch.cuda.current_device()))
    if found.proven:
        return Diagnostic(name, "on", found.reason)
    remedy = "none is needed: torch kernels run, slower and with the same numbers; COMPACT_LOGITS=strict raises instead"
    return Diagnostic(name, "refused", found.reason, remedy)


def read_setting(environ: Mapping[str, str]) -> Setting:
    """What `COMPACT_LOGITS...` variables say."""
    variables = {name: value for name, value in sorted(environ.items()) if name.startswith("COMPACT_LOGITS")}
    try:
        return Setting(variables, Config.from_env(environ))
    except ConfigError as error:
        return Setting(variables, None, str(error))


def find_diagnostics(names: tuple[str, ...] = INTEGRATIONS) -> list[Diagnostic]:
    """What each integration reports of itself. Imports the frameworks that are installed."""
    found: list[Diagnostic] = []
    for name in names:
        with quiet():
            try:
                found += importlib.import_module(f"compact_logits.integrations.{name}").check()
            except CompactLogitsError as error:
                found.append(Diagnostic(name, "refused", str(error), "correct the environment variable"))
            except (Exception, SystemExit) as error:
                # As above. One framework that cannot be imported says nothing of the others.
                remedy = "repair that installation, or ask for the others only"
                found.append(Diagnostic(name, "refused", f"it cannot be looked at: {_described(error)}", remedy))
    return found


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
