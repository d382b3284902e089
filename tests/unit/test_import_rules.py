"""Imports point one way: the rooms of docs/design.md, and vLLM only where it belongs."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = "vllm_delta_snapshot"
ROOMS: dict[str, str] = {
    # who may import whom; each only rooms that stand above it, so there are no circles
    "vllm_delta_snapshot": "",
    "util": "vllm_delta_snapshot",
    "store": "vllm_delta_snapshot util",
    "format": "vllm_delta_snapshot util",
    "checkpoint": "vllm_delta_snapshot util format",
    "changes": "vllm_delta_snapshot format",
    "runs": "vllm_delta_snapshot util store format checkpoint changes",
    "upkeep": "vllm_delta_snapshot util store format checkpoint changes runs",
    "audit": "vllm_delta_snapshot util format checkpoint changes runs",
    "interop": "vllm_delta_snapshot util format checkpoint changes runs",
    "report": "vllm_delta_snapshot util format runs audit",
    "host": "vllm_delta_snapshot util store format checkpoint changes runs interop",
    "drive": "vllm_delta_snapshot util store runs host",
    "engine.base": "vllm_delta_snapshot util store checkpoint",
    "engine.vllm_patches": "vllm_delta_snapshot engine.base",
    "engine.plan": "vllm_delta_snapshot checkpoint host engine.base engine.vllm_patches",
    "engine.write": "vllm_delta_snapshot format checkpoint changes interop host engine.base engine.plan",
    "engine": "vllm_delta_snapshot host engine.base engine.plan engine.write",
    "plugin": "engine.vllm_patches engine.plan",
    "cli": "vllm_delta_snapshot util store format checkpoint runs upkeep audit interop report host drive engine.base"
    " engine plugin",
    "trainer_hooks.ranks": "vllm_delta_snapshot",
    "trainer_hooks.source": "vllm_delta_snapshot util checkpoint",
    "trainer_hooks.compare": "vllm_delta_snapshot util format checkpoint trainer_hooks.source",
    "trainer_hooks.publication": "vllm_delta_snapshot util store format checkpoint changes runs upkeep"
    " trainer_hooks.ranks trainer_hooks.source trainer_hooks.compare",
    "trainer_hooks": "vllm_delta_snapshot util store format checkpoint runs upkeep"
    " trainer_hooks.ranks trainer_hooks.source trainer_hooks.compare trainer_hooks.publication",
    "trainer_hooks.integrations": "vllm_delta_snapshot trainer_hooks trainer_hooks.source trainer_hooks.publication",
}
ENGINE_BASE = ("agree", "bits", "compat", "log", "messages", "threads", "ways")
"""Modules of the engine that know nothing of its rooms."""


def room_of(module: str) -> str:
    """Return the room that a module is in."""
    if inside(module, "trainer_hooks"):
        below = ".".join(module.split(".")[:2])
        return below if below in ROOMS else "trainer_hooks"
    parts = module.split(".")[1:]
    if parts and parts[0] == "engine":
        if len(parts) > 1 and parts[1] in ENGINE_BASE:
            return "engine.base"
        below = ".".join(parts[:2])
        return below if below in ROOMS else "engine"
    return parts[0] if parts and parts[0] in ROOMS else OURS


@dataclass(frozen=True)
class Import:
    """One import statement: in which module, of what, and whether it runs when the module is imported."""

    module: str
    target: str
    line: int
    at_import: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_types(node: ast.AST) -> bool:
    """Say whether a statement never runs: it is there for type checkers."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_of(path: Path) -> Iterator[Import]:
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_types(function)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(part for part in (above, node.module) if part)
            targets = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(module, target, node.lineno, id(node) not in lazy)


ALL = [
    found
    for package in (OURS, "trainer_hooks")
    for path in sorted((ROOT / package).rglob("*.py"))
    for found in imports_of(path)
]


def listed(imports: list[Import]) -> list[str]:
    return [str(found) for found in imports]


def test_import_rules_see_the_imports():
    assert any(found.target == "numpy" for found in ALL)
    assert any(inside(found.module, "trainer_hooks") and inside(found.target, OURS) for found in ALL)


def test_vllm_is_imported_only_in_the_engine_the_plugin_and_the_trainers_adapter():
    allowed = (f"{OURS}.engine", f"{OURS}.plugin", "trainer_hooks.integrations.vllm")
    wrong = [f for f in ALL if inside(f.target, "vllm") and not any(inside(f.module, place) for place in allowed)]
    assert listed(wrong) == []


def test_plugin_imports_vllm_and_the_engine_only_when_it_is_called():
    heavy = ("vllm", "torch", f"{OURS}.engine")
    wrong = [
        f for f in ALL if f.module == f"{OURS}.plugin" and f.at_import and any(inside(f.target, name) for name in heavy)
    ]
    assert listed(wrong) == []


def arrows() -> dict[tuple[str, str], list[str]]:
    """Return who imports whom, room by room, with the statements."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in ALL:
        if inside(each.target, OURS) or inside(each.target, "trainer_hooks"):
            pair = room_of(each.module), room_of(each.target)
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append(str(each))
    return found


def test_a_room_may_import_only_rooms_above_it():
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert [other for other in allowed.split() if order.index(other) >= order.index(room)] == [], room


def test_rooms_import_what_the_list_allows():
    wrong = [s for (who, whom), statements in arrows().items() if whom not in ROOMS[who].split() for s in statements]
    assert wrong == []


def test_what_the_list_allows_is_used():
    seen = arrows()
    assert [(who, whom) for who, allowed in ROOMS.items() for whom in allowed.split() if (who, whom) not in seen] == []


def test_every_folder_is_a_room_and_tests_mirror_rooms():
    folders = {path.name for path in (ROOT / OURS).iterdir() if (path / "__init__.py").exists()}
    assert folders <= set(ROOMS)
    of_trainers = {path.name for path in (ROOT / "trainer_hooks").iterdir() if (path / "__init__.py").exists()}
    assert {f"trainer_hooks.{name}" for name in of_trainers} <= set(ROOMS)
    tested = {path.parent.relative_to(ROOT / "tests" / "unit") for path in (ROOT / "tests" / "unit").rglob("test_*.py")}
    for folder in tested:
        home = ROOT / folder if folder.parts[:1] == ("trainer_hooks",) else ROOT / OURS / folder
        assert home.is_dir(), folder


def test_adapters_share_only_what_is_for_all_of_them():
    inner = {"rounds", "handshake"}
    apart = {"skyrl": {"vllm"}}  # SkyRL takes its engines from vLLM's factory
    wrong = [
        f
        for f in ALL
        if inside(f.module, "trainer_hooks.integrations")
        and inside(f.target, "trainer_hooks.integrations")
        and f.target.split(".")[2] not in inner | apart.get(f.module.split(".")[-1], set())
    ]
    assert listed(wrong) == []


def test_our_side_never_imports_the_trainers():
    wrong = [f for f in ALL if inside(f.module, OURS) and inside(f.target, "trainer_hooks")]
    assert listed(wrong) == []


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("zstandard", f"{OURS}.format.encodings.planes"),
        ("numba", "trainer_hooks.compare.kernel"),
        ("huggingface_hub", f"{OURS}.checkpoint.hub_cache"),
    ],
)
def test_library_is_used_in_one_module(library: str, home: str):
    found = [f for f in ALL if inside(f.target, library)]
    assert {f.module for f in found} == {home}


def test_compiler_is_imported_only_when_it_is_asked_for():
    assert listed([f for f in ALL if inside(f.target, "numba") and f.at_import]) == []


@pytest.mark.parametrize(
    "library",
    [
        *("transformers", "accelerate", "trl", "skyrl", "datasets", "tensorboard", "wandb"),
        *("matplotlib", "typer", "rich", "huggingface_hub", "boto3", "google", "prometheus_client"),
    ],
)
def test_optional_library_is_imported_only_where_it_is_needed(library: str):
    homes = {"typer": f"{OURS}.cli", "rich": f"{OURS}.cli", "matplotlib": f"{OURS}.report.figures"}
    homes |= {name: f"trainer_hooks.integrations.{name}" for name in ("transformers", "accelerate", "trl", "skyrl")}
    wrong = [
        f
        for f in ALL
        if inside(f.target, library) and f.at_import and not inside(f.module, homes.get(library, "nowhere"))
    ]
    assert listed(wrong) == []


def test_nothing_unpickles():
    wrong = [f for f in ALL if f.target.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle")]
    assert listed(wrong) == []


STAGES = {
    "package": "vllm_delta_snapshot",
    "receiving side": ", ".join(
        module_name(path)
        for folder in ("format", "store", "changes", "runs", "host")
        for path in sorted((ROOT / OURS / folder).rglob("*.py"))
        if path.name != "__main__.py"
    ),
    "trainer": "trainer_hooks, trainer_hooks.integrations.rounds, trainer_hooks.integrations.handshake",
}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Return the top-level modules in memory after each stage, one after the other in one fresh interpreter."""
    seen = "sorted({name.split('.')[0] for name in sys.modules})"
    imports = "\n".join(f"import {what}\nfound[{stage!r}] = {seen}" for stage, what in STAGES.items())
    code = f"import json, sys\nfound = {{}}\n{imports}\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {stage: set(names) for stage, names in json.loads(done.stdout.splitlines()[-1]).items()}


def test_import_of_our_package_loads_neither_vllm_nor_torch(loaded: dict[str, set[str]]):
    assert loaded["package"] & {"vllm", "torch", "transformers", "pydantic", "typer", "numba"} == set()


def test_import_of_the_receiving_side_without_engine_loads_no_vllm(loaded: dict[str, set[str]]):
    assert loaded["receiving side"] & {"vllm", "transformers", "typer", "numba"} == set()
    assert "pydantic" in loaded["receiving side"]


def test_import_of_the_trainers_package_loads_no_vllm(loaded: dict[str, set[str]]):
    assert loaded["trainer"] & {"vllm", "transformers", "accelerate", "typer", "matplotlib", "numba"} == set()
    assert "torch" in loaded["trainer"]
