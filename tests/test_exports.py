"""The API is `__all__`: what a file lists is what it defines or passes on, no more and no less."""

from __future__ import annotations

import pytest

from tests.support.source_tree import ROOT, Module, modules, parse

LIMIT = 300


def faults(module: Module) -> list[str]:
    """What `__all__` of `module` lists that is not there, and leaves out that is."""
    listed = module.exports or []
    defined = module.public_definitions
    # A package that defines nothing is a facade: what it imports from within is there to be passed on.
    required = defined or (module.reexports if module.is_package else set())
    found = [f"{name} is public and not in __all__" for name in sorted(required - set(listed))]
    available = defined | (module.reexports if module.is_package else set())
    found += [f"{name} is in __all__ and not defined here" for name in sorted(set(listed) - available)]
    return found + [f"{name} is in __all__ twice" for name in sorted(set(listed)) if listed.count(name) > 1]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_all_lists_exactly_the_public_names(module: Module) -> None:
    assert faults(module) == []


@pytest.mark.parametrize(
    ("source", "is_package", "fault"),
    [
        ("def f(): ...", False, "f is public and not in __all__"),
        ("T = TypeVar('T')\nlogger = logging.getLogger(__name__)\nX: int = 1", False, "X is public and not in __all__"),
        ("from compact_logits.rows import select", True, "select is public and not in __all__"),
        ("__all__ = ['gone']", False, "gone is in __all__ and not defined here"),
        ("from compact_logits.rows import select\n__all__ = ['select']", False, "select is in __all__ and not defined"),
        ("class C: ...\n__all__ = ['C', 'C']", False, "C is in __all__ twice"),
    ],
)
def test_each_kind_of_fault_is_found(source: str, is_package: bool, fault: str) -> None:
    found = faults(parse("compact_logits.example", source, is_package=is_package))
    assert len(found) == 1 and fault in found[0]


def test_no_file_is_long() -> None:
    files = [path for folder in ("compact_logits", "tests", "tools") for path in (ROOT / folder).rglob("*")]
    lengths = {
        path: len(path.read_text().splitlines()) for path in files if path.suffix in (".py", "") and path.is_file()
    }
    assert len(lengths) > 30
    assert not {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LIMIT}


def test_no_file_is_a_place_for_everything() -> None:
    forbidden = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [module.name for module in modules() if forbidden & set(module.name.split("."))]
