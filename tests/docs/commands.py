"""What is known of the commands in the docs without running them: verbs, options, targets, extras."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from tests.docs.blocks import ROOT

SLOW_TARGETS = {
    "demo": "four minutes; tests/vllm covers what it does, and the demo checks itself",
    "test": "runs this",
    "test-fast": "runs this",
    "test-vllm": "makes an environment of its own, and runs this",
    "test-processor": "runs this",
    "test-compiled": "runs this",
    "test-skyrl": "makes an environment of its own, from the network",
    "fuzz": "makes an environment of its own, from the network",
    "faults": "minutes, and writes docs/faults.md",
    "soak": "half an hour, and writes docs/soak.md",
    "pictures": "needs the demo's run, and writes into docs/",
    "setup": "makes the environment that this runs in",
    "lint": "CI runs it",
    "typecheck": "CI runs it",
    "format": "rewrites the sources",
    "bench": "an hour of measuring",
    "clean": "would remove the environment that this runs in",
}
"""Targets of the Makefile that are not run again here, and why; bench-... as bench. That they exist is checked."""


def check_make(words: Sequence[str]) -> bool:
    """Check that the targets and variables of a ``make`` command exist; return whether it is quick enough to be run."""
    asked = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(asked) <= set(known), f"no such target: {set(asked) - set(known)}"
    for word in words[1:]:
        name, _, value = word.partition("=")
        is_known = not value or re.search(rf"^{name} \?=", (ROOT / "Makefile").read_text(), re.M)
        assert is_known or name.startswith("DEMO_"), f"no such variable of the Makefile: {name}"
    return not any(target in SLOW_TARGETS or target.startswith("bench-") for target in asked)


def can_run(words: Sequence[str]) -> bool:
    """Say whether a command is one that these tests can deal with, so that it must not be marked as not run."""
    return not words or words[0] in ("make", "pip", "vllm", "export", "curl") or words[0].endswith("delta-snapshot")


def check_pip(words: Sequence[str]) -> None:
    """Check the extras of this project in a ``pip install``: installing would change what the tests run in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        named = re.fullmatch(r"vllm[-_]delta[-_]snapshot(?:\[([\w,-]+)\])?(?:[=<>~!]=?.*)?", word)
        if named and named[1]:
            missing = set(named[1].split(",")) - set(project["optional-dependencies"])
            assert not missing, f"no such extra: {missing}"


def check_cli(words: Sequence[str]) -> None:
    """Have the command line's own parser read the arguments of a ``delta-snapshot``, which may hold variables.

    Raises:
        AssertionError: there is no such verb or option, or an argument is missing or of the wrong type.
    """
    arguments = [_without_variables(word) for word in words]
    if not arguments or arguments[0] in ("--help", "--version"):
        return
    group = _group()
    verb = group.commands.get(arguments[0])
    assert verb is not None, f"no such verb: {arguments[0]}"
    if "--help" in arguments:
        return
    try:
        verb.make_context(arguments[0], arguments[1:])
    except Exception as error:
        raise AssertionError(f"delta-snapshot {' '.join(words)}: {getattr(error, 'message', error)}") from error


def check_verb_and_options(words: Sequence[str]) -> None:
    """Check a ``delta-snapshot`` in running text, where arguments may be left out: its verb and options exist."""
    verb = _group().commands.get(words[0].split("/")[0].strip(".,:;"))
    assert verb is not None, f"no such verb: {words[0]}"
    known = {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    used = {word.partition("=")[0] for word in words[1:] if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
    assert used <= known, f"delta-snapshot {words[0]} has no {used - known}"


def arguments_of_server(words: Sequence[str]) -> list[str] | None:
    """Return the arguments of a vLLM server that a command starts, the model first; ``None`` if it starts none."""
    module = "vllm.entrypoints.openai.api_server"
    if module in words:
        return list(words[words.index(module) + 1 :])
    starts = [place for place in range(len(words) - 1) if list(words[place : place + 2]) == ["vllm", "serve"]]
    return list(words[starts[0] + 2 :]) if starts else None


def check_server(arguments: Sequence[str]) -> None:
    """Have vLLM's own parser read the arguments of a server, which may hold variables.

    Raises:
        AssertionError: vLLM does not take them, or the server would not take updates.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        found = make_arg_parser(FlexibleArgumentParser()).parse_args([_without_variables(word) for word in arguments])
    except SystemExit as error:
        raise AssertionError(f"vLLM does not take {' '.join(arguments)}") from error
    assert found.weight_transfer_config.backend == "delta_snapshot"


def _without_variables(word: str) -> str:
    return re.sub(r"\$(\w+|\{.*?\}|\(\(.*?\)\)|\(.*?\))", "1", word)


@functools.cache
def _group() -> Any:
    import typer

    from vllm_delta_snapshot.cli.app import app

    return typer.main.get_command(app)
