"""Runs the Python of a page, in order, in one namespace; or checks it without running it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from tests.docs.blocks import ROOT, Block

_OURS = ("trainer_hooks", "vllm_delta_snapshot")


def run_code(block: Block, text: str, namespace: dict[str, Any]) -> None:
    """Run a block; its errors point at the page's own lines."""
    code = compile("\n" * (block.line - 1) + text, str(ROOT / block.page), "exec")
    exec(code, namespace)


def names_wanted(text: str) -> list[str]:
    """Return the names that a block uses before it sets them, if it sets them at all."""
    tree = ast.parse(text)
    set_at: dict[str, int] = {}
    used_at: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            where = used_at if isinstance(node.ctx, ast.Load) else set_at
            where[node.id] = min(node.lineno, where.get(node.id, node.lineno))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            set_at |= {alias.asname or alias.name: node.lineno for alias in node.names}
    return [name for name, line in used_at.items() if line <= set_at.get(name, line)]


def check_code(text: str) -> None:
    """Check a block that is not run: it is Python, and what it uses of this project exists and takes such arguments.

    Raises:
        AssertionError: it does not, or an argument has no such name.
    """
    tree = ast.parse(text)
    found = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found:
            _check_arguments(node, found[node.func.id])


def _imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _OURS:
            assert node.module is not None
            for alias in node.names:
                yield alias.asname or alias.name, _resolved(node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in _OURS:
                    importlib.import_module(alias.name)


def _resolved(module: str, name: str) -> Any:
    """Return what a module of ours calls so; its definition in the source if a framework is not installed."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise AssertionError(f"there is no {error.name}") from error
        source = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        defined = [node for node in source.body if getattr(node, "name", None) == name]
        assert defined, f"{module} has no {name}"
        return defined[0]
    assert hasattr(found, name), f"{module} has no {name}"
    return getattr(found, name)


def _check_arguments(call: ast.Call, of: Any) -> None:
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    if isinstance(of, ast.AST):
        arguments = getattr(of, "args", None)
        if arguments is None or arguments.kwarg is not None:
            return
        known = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
    else:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(of).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        known = set(parameters)
    assert given <= known, f"{ast.unparse(call.func)} takes no {given - known}"
