"""What the doctor found, as tables or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compact_logits.cli.environment import Seam, Setting, Version
from compact_logits.cli.launch_script import Launch
from compact_logits.cli.slime_features import Features
from compact_logits.cli.slime_recipe import Decision
from compact_logits.cli.tables import print_table, printable
from compact_logits.diagnostics import Diagnostic

__all__ = ["Diagnosis"]

_INSTALL = "--custom-megatron-init-path compact_logits.integrations.slime.install"


@dataclass(frozen=True)
class Diagnosis:
    """The whole of it; `launch` and `recipe` where a recipe was given."""

    versions: list[Version]
    seam: Seam
    setting: Setting
    kernels: Diagnostic
    integrations: list[Diagnostic]
    launch: Launch | None = None
    recipe: Decision | None = None

    @property
    def refused(self) -> bool:
        """Whether something that is switched on gets the full path or raises, as far as is known."""
        config = self.setting.config
        if config is None or (self.recipe is not None and self.recipe.refused):
            return True
        if config.mode == "strict" and self.kernels.state == "refused":
            return True
        return config.enabled and any(each.state == "refused" for each in self.integrations)

    def as_json(self) -> dict[str, Any]:
        """For a JSON file."""
        config = self.setting.config
        report: dict[str, Any] = {
            "refused": self.refused,
            "versions": [asdict(version) for version in self.versions],
            "seam": asdict(self.seam),
            "setting": {
                "variables": self.setting.variables,
                "valid": config is not None,
                "mode": config.mode if config else None,
                "chunk_bytes": config.chunk_bytes if config else None,
                "error": self.setting.error,
            },
            "kernels": asdict(self.kernels),
            "integrations": [asdict(each) for each in self.integrations],
        }
        if self.recipe is not None and self.launch is not None:
            report["slime_recipe"] = {
                **asdict(self.recipe),
                "settings": self.launch.settings,
                "notes": self.launch.notes,
            }
            report["slime_features"] = Features.read().as_json()
        return report

    def print_tables(self) -> None:
        """The same for reading; needs rich."""
        versions = [(each.name, each.version or "not installed", each.location) for each in self.versions]
        print_table("Versions", ("", "version", "from"), versions)
        rows = [
            ("seam", self.seam.kind, self.seam.reason),
            ("kernels", "Triton" if self.kernels.state == "on" else "torch", self.kernels.reason),
            *[(name, value, "") for name, value in self.setting.variables.items()],
            ("setting", *self._setting()),
        ]
        print_table("Switch", ("", "", ""), rows)
        found = [(each.name, each.state, each.reason, each.remedy) for each in self.integrations]
        print_table("Integrations", ("", "state", "why", "remedy"), found)
        if self.recipe is not None and self.launch is not None:
            self._print_recipe(self.recipe, self.launch)

    def _setting(self) -> tuple[str, str]:
        config = self.setting.config
        if config is None:
            return "not valid", self.setting.error
        if config.mode == "off":
            return config.mode, "COMPACT_LOGITS is unset or 0"
        if config.chunk_bytes is None:
            return config.mode, "logits take up to 1 GiB on a GPU, 256 MiB on a CPU"
        return config.mode, f"logits take up to {config.chunk_bytes:,} bytes"

    def _print_recipe(self, recipe: Decision, launch: Launch) -> None:
        decided = [
            (row.flag, f"{row.value} (assumed)" if row.assumed else row.value, row.verdict) for row in recipe.rows
        ]
        print_table("The slime recipe, flag by flag", ("flag", "value", "verdict"), decided)
        for row in recipe.rows:
            if row.reason:
                print(printable(f"{row.flag} {row.value}: {row.reason}; {row.remedy}"))
        assumed = sum(row.assumed for row in recipe.rows)
        print(f"verdict: {recipe.verdict}{' as far as is known' if recipe.unknown else ''}")
        print(f"{assumed} of {len(recipe.rows)} flags are not given, and slime's defaults for them assumed")
        for unknown in recipe.unknown:
            print(printable(f"not known: {unknown}"))
        for note in launch.notes:
            print(printable(f"note: {note}"))
        if not recipe.installs:
            print(f"not switched on by this recipe: add {_INSTALL}")
        if "COMPACT_LOGITS" not in launch.settings:
            print("not set by this recipe: COMPACT_LOGITS=1, which the training actors' environment needs")
        features = Features.read()
        print_table(f"Tested in {', '.join(features.layouts)}", ("came to", "recipes"), features.by_verdict())
        print(f"tested with {features.versions}")
