"""What a slime recipe's flags come to: the compact path, the compact path with another metric, or the full path."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from compact_logits.cli.launch_flags import Flags, Given
from compact_logits.cli.launch_script import Word
from compact_logits.integrations.slime.recipe import Refusal, refusals

__all__ = ["LOOKED_AT", "Decision", "Flag", "Row", "Verdict", "decide"]

Verdict = Literal["compact", "compact with another metric", "full path", "unknown"]

_INSTALL = "compact_logits.integrations.slime.install"
# More ways than this to fill in what is not known are not tried out.
_MOST_WAYS = 4096


@dataclass(frozen=True)
class Flag:
    """A flag of slime or Megatron that the decision looks at, and its default there. `other`: a value that decides
    otherwise than the default, for a flag whose value is not known."""

    kind: Literal["switch", "number", "text", "list"]
    default: Any
    other: Any

    def values(self, use: Given) -> tuple[Word, ...]:
        """Those of the words after the flag that are its own."""
        return use.values[: {"switch": 0, "list": None}.get(self.kind, 1)]

    def written(self, uses: list[Given]) -> str:
        said = [" ".join(word.text for word in self.values(use)) or "given" for use in uses]
        branches = ["" if use.certain else " (in a branch of the script)" for use in uses]
        return ", or ".join(map(str.__add__, said, branches))


_SWITCH = Flag("switch", False, True)
_PATH = Flag("text", None, "some.function")
_LIST = Flag("list", None, ["0"])

# Defaults as in slime 624b824a8 (slime/utils/arguments.py) and Megatron-LM 1dcf0dafa8. The decision knows some flags of
# other versions too; where a version has no such flag, it is as if it were off.
LOOKED_AT: dict[str, Flag] = {
    "--advantage-estimator": Flag("text", "grpo", "ppo"),
    "--kl-coef": Flag("number", 0.0, 0.1),
    "--loss-type": Flag("text", "policy_loss", "custom_loss"),
    "--custom-advantage-function-path": _PATH,
    "--custom-pg-loss-reducer-function-path": _PATH,
    "--custom-tis-function-path": _PATH,
    "--rollout-data-postprocess-path": _PATH,
    "--use-rollout-entropy": _SWITCH,
    "--use-opsm": _SWITCH,
    "--use-opd": _SWITCH,
    "--save-debug-train-data": _PATH,
    "--dump-details": _PATH,
    "--megatron-deepgemm-forward-layers": _LIST,
    "--megatron-deepgemm-forward-modules": _LIST,
    "--megatron-deepgemm-moe-forward-layers": _LIST,
    "--megatron-deepgemm-moe-forward-modules": _LIST,
    "--true-on-policy-mode": _SWITCH,
    "--batch-invariant-mode": _SWITCH,
    "--label-smoothing": Flag("number", 0.0, 0.1),
    "--cuda-graph-impl": Flag("text", "none", "full_iteration"),
    "--cuda-graph-scope": Flag("list", [], ["full_iteration"]),
    "--use-megatron-fsdp": _SWITCH,
    "--use-torch-fsdp2": _SWITCH,
    "--use-custom-fsdp": _SWITCH,
    "--defer-embedding-wgrad-compute": _SWITCH,
    "--enable-mtp-training": _SWITCH,
}
# A YAML file that sets flags on top of the command line.
_FILES = ("--custom-config-path", "--megatron-config-path")
_HOOK = "--custom-megatron-init-path"


@dataclass(frozen=True)
class Row:
    """One flag of the table. `value` is as written, or the default that was assumed."""

    flag: str
    value: str
    assumed: bool
    verdict: Verdict
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Decision:
    """The verdict on a recipe, a row for every flag looked at, and what it rests on."""

    verdict: Verdict
    rows: list[Row]
    unknown: list[str]
    installs: bool

    @property
    def refused(self) -> bool:
        return self.verdict == "full path"


def decide(flags: Flags, *, strict: bool = False) -> Decision:
    """Decide as slime's integration does, from the flags alone. `strict`: as under `COMPACT_LOGITS=strict`.

    A flag whose value is not known is tried with each value that it may have; a verdict that does not depend on them
    is a verdict, another is `"unknown"`.
    """
    ways = {flag: list(_ways(spec, flags.uses(flag))) for flag, spec in LOOKED_AT.items()}
    unknown = [f"{flag} is {spec.written(flags.uses(flag))}" for flag, spec in LOOKED_AT.items() if len(ways[flag]) > 1]
    every: list[list[Refusal]] | None = None
    if prod(map(len, ways.values())) <= _MOST_WAYS:
        names = [flag.strip("-").replace("-", "_") for flag in ways]
        every = [refusals(Namespace(**dict(zip(names, way, strict=True)))) for way in product(*ways.values())]
    unknown += [f"{name} may hold more flags" for name in flags.open_ends]
    files = [(flag, uses) for flag in _FILES if (uses := flags.uses(flag))]
    unknown += [f"{flag} {_PATH.written(uses)} sets flags in a file that is not read" for flag, uses in files]
    hook = flags.uses(_HOOK)
    return Decision(
        verdict=_verdict(every, strict),
        rows=[_row(flag, spec, flags.uses(flag), every, strict) for flag, spec in LOOKED_AT.items()],
        unknown=unknown,
        installs=bool(hook) and _PATH.written(hook) == _INSTALL,
    )


def _ways(spec: Flag, uses: list[Given]) -> Iterator[Any]:
    """The values that the flag may have."""
    if not any(use.certain for use in uses):
        yield spec.default
    for use in uses:
        values = spec.values(use)
        if any(word.unknown for word in values) or (spec.kind != "switch" and not values):
            yield from (spec.default, spec.other)
        elif spec.kind == "switch":
            yield True
        elif spec.kind == "list":
            yield [word.text for word in values]
        elif spec.kind == "number":
            yield _number(values[0].text)
        else:
            yield values[0].text


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:  # slime's own parser will say so
        return text


def _verdict(every: list[list[Refusal]] | None, strict: bool) -> Verdict:
    if every is None:
        return "unknown"
    verdicts: set[Verdict] = set()
    for found in every:
        if any(strict or not refusal.metric_only for refusal in found):
            verdicts.add("full path")
        else:
            verdicts.add("compact with another metric" if found else "compact")
    return verdicts.pop() if len(verdicts) == 1 else "unknown"


def _row(flag: str, spec: Flag, uses: list[Given], every: list[list[Refusal]] | None, strict: bool) -> Row:
    of_flag = None if every is None else [[each for each in found if each.flag == flag] for found in every]
    refusal = next((each for found in of_flag or [] for each in found), None)
    return Row(
        flag=flag,
        value=spec.written(uses) if uses else _shown(spec.default),
        assumed=not uses,
        verdict=_verdict(of_flag, strict),
        reason=refusal.reason if refusal else "",
        remedy=refusal.remedy if refusal else "",
    )


def _shown(default: Any) -> str:
    return "not given" if default is None or default is False or default == [] else str(default)
