"""Imports go down only. The floors, and what each may know of the world outside, stand here in full."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter

import pytest

from tests.support.source_tree import PACKAGE, Module, modules, parse

# A new module at the top of the package has to be put on a floor before the suite passes.
FLOORS: list[set[str]] = [
    {"config", "diagnostics", "errors", "host_values", "patching", "reference"},
    {"rows"},
    {"engine"},
    {"scorers"},
    {"memory"},
    {"megatron"},
    {"integrations"},
    {"cli", "__main__"},
]
KNOWS_MEGATRON = 5
ROOF = 7
# What `import compact_logits` itself may bring in: nothing that knows Megatron.
FACADE = KNOWS_MEGATRON - 1
TRITON = "compact_logits.engine.kernels.triton_kernels"  # imported where CUDA is, which brings Triton

FRAMEWORKS = {"megatron_rl": "megatron", "slime": "slime", "torchforge": "forge", "verl": "verl"}


def floor_of(name: str) -> int:
    parts = name.split(".")
    if len(parts) == 1:
        return FACADE
    floors = [floor for floor, names in enumerate(FLOORS) if parts[1] in names]
    assert len(floors) == 1, f"{name}: put {parts[1]!r} on one floor of tests/test_floors.py, it is on {floors}"
    return floors[0]


def integration_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[2] if parts[1:2] == ["integrations"] and len(parts) > 2 else None


def faults(module: Module) -> list[str]:
    """Every import of `module` that goes up, across, or out to what its floor does not know."""
    floor, own = floor_of(module.name), integration_of(module.name)
    foreign = {"torch", "einops"}
    if floor >= KNOWS_MEGATRON:
        foreign |= {"megatron"}
    if own is not None:
        foreign |= {FRAMEWORKS[own]}
    if module.name == TRITON:
        foreign |= {"triton"}
    if floor == ROOF:
        foreign |= {"matplotlib", "rich"}
    found = []
    for item in module.imports:
        top = item.target.split(".")[0]
        where = f"{module.name}:{item.line} imports {item.target}"
        if top != PACKAGE:
            if top not in foreign and top not in sys.stdlib_module_names:
                found.append(f"{where}, which floor {floor} does not know")
            continue
        # The facade is for users: from inside, a name is taken from where it is defined.
        target = item.target
        if target == PACKAGE or (target.count(".") == 1 and not known(target)):
            found.append(f"{where} from the package's facade")
        elif floor_of(target) > floor:
            found.append(f"{where}, up from floor {floor} to {floor_of(target)}")
        elif own is not None and integration_of(target) not in (None, own, "registry"):
            found.append(f"{where}, another integration")
    return found


def known(name: str) -> bool:
    return any(name.split(".")[1] in names for names in FLOORS)


def names_parallel_state(module: Module) -> bool:
    """Whether Megatron's global groups are named anywhere: imported, or reached as an attribute."""
    said = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    said |= {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    said |= {part for item in module.imports for part in item.target.split(".")}
    return bool(said & {"parallel_state", "mpu"})


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_imports_go_down_only(module: Module) -> None:
    found = faults(module)
    assert not found, "\n".join(found)


def test_process_groups_are_arguments_below_the_megatron_floor() -> None:
    offenders = [m.name for m in modules() if floor_of(m.name) < KNOWS_MEGATRON and names_parallel_state(m)]
    assert not offenders, f"parallel_state belongs on floor {KNOWS_MEGATRON} and above: {offenders}"


def test_no_module_imports_itself_in_a_circle() -> None:
    every = modules()
    names = {module.name for module in every}
    graph: dict[str, set[str]] = {}
    for module in every:
        targets = {item.target for item in module.imports if item.runs_at_import}
        # `from a.b import c` needs module a.b.c if there is one, else a.b.
        needed = {target if target in names else target.rpartition(".")[0] for target in targets}
        graph[module.name] = (needed & names) - {module.name}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("compact_logits.rows", "from compact_logits.engine.linear import score_hidden", "up from floor 1 to 2"),
        ("compact_logits.engine.linear", "from compact_logits.scorers.top_p import TopPMask", "up from floor 2 to 3"),
        ("compact_logits.rows", "def f():\n    import compact_logits.megatron.attach", "up from floor 1 to 5"),
        ("compact_logits.rows", "import megatron.core", "which floor 1 does not know"),
        ("compact_logits.engine.linear", "import triton", "which floor 2 does not know"),
        ("compact_logits.rows.zigzag", "from ..cli import main", "up from floor 1 to 7"),
        ("compact_logits.megatron.postprocess", "import slime.utils", "which floor 5 does not know"),
        ("compact_logits.integrations.slime.batch", "import verl", "which floor 6 does not know"),
        ("compact_logits.integrations.verl", "from compact_logits.integrations import slime", "another integration"),
        ("compact_logits.rows", "from compact_logits import VocabShard", "facade"),
        ("compact_logits", "from compact_logits.megatron import attach", "up from floor 4 to 5"),
    ],
)
def test_each_kind_of_fault_is_found(name: str, source: str, fault: str) -> None:
    found = faults(parse(name, source))
    assert len(found) == 1 and fault in found[0]


@pytest.mark.parametrize(
    "source",
    ["from megatron.core import parallel_state", "import megatron\nmegatron.core.parallel_state.x()", "mpu = 1"],
)
def test_parallel_state_is_found(source: str) -> None:
    assert names_parallel_state(parse("compact_logits.rows", source))
