"""The API is `__all__`: what a file lists is what it defines or passes on, no more and no less."""

from __future__ import annotations

import pytest

from tests.support.source_tree import ROOT, Module, modules

LIMIT = 300


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_all_lists_exactly_the_public_names(module: Module) -> None:
    if module.name.endswith(".__main__"):
        return
    public = module.public_definitions | (module.reexports if module.is_package else set())
    listed = module.exports or []
    assert len(listed) == len(set(listed)), "a name stands in __all__ twice"
    assert set(listed) == public, f"only in __all__: {set(listed) - public}; missing: {public - set(listed)}"


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
