"""What the package's source says about itself, read without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["PACKAGE", "ROOT", "Import", "Module", "modules", "parse"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "compact_logits"

_PRIVATE_BY_NATURE = r"(logging\.getLogger|(typing\.)?(TypeVar|ParamSpec))\("


@dataclass(frozen=True)
class Import:
    """One imported module or name. `runs_at_import`: neither inside a function nor for the type checker only."""

    target: str
    line: int
    runs_at_import: bool


@dataclass(frozen=True)
class Module:
    name: str
    is_package: bool
    tree: ast.Module

    @cached_property
    def imports(self) -> list[Import]:
        """All imports, those inside functions too, by absolute name; `from a import b` as `a.b`."""
        return list(self._imports(self.tree, True))

    def _imports(self, node: ast.AST, runs: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, runs) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._base(child)
                yield from (Import(f"{base}.{alias.name}", child.lineno, runs) for alias in child.names)
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from self._imports(child, runs and not later and not for_types)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parents = parts[: len(parts) - node.level + self.is_package]
        return ".".join(parents + ([node.module] if node.module else []))

    @property
    def exports(self) -> list[str] | None:
        """`__all__`, or None where there is none."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        return None

    @property
    def public_definitions(self) -> set[str]:
        """Classes, functions and constants of the top level without a leading underscore.

        Loggers and type variables are named plainly everywhere, and are nobody's to import.
        """
        names: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign) and not re.match(_PRIVATE_BY_NATURE, ast.unparse(node.value)):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
        return {name for name in names if not name.startswith("_")}

    @property
    def reexports(self) -> set[str]:
        """Names without a leading underscore that the top level takes from the package itself."""
        return {
            alias.asname or alias.name
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and self._base(node).split(".")[0] == PACKAGE
            for alias in node.names
            if not (alias.asname or alias.name).startswith("_")
        }


def parse(name: str, source: str, *, is_package: bool = False) -> Module:
    return Module(name, is_package, ast.parse(source, filename=name))


def modules() -> list[Module]:
    """Every module of the package, sorted by name."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append(parse(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package=is_package))
    return found
