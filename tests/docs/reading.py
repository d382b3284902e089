"""Goes through a page as a reader would: block by block, from the top, each once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.docs import names
from tests.docs.blocks import ROOT, Block, blocks_of, follows_bucket
from tests.docs.code import check_code, names_wanted, run_code
from tests.docs.commands import arguments_of_server, check_cli, check_make, check_pip
from tests.docs.data import check_data
from tests.docs.shell import Shell, Statement, statements, without_prompts
from tests.docs.world import Desk, World
from tests.support.cli import ERROR_FIELDS
from tests.support.follower import follower
from tests.support.waiting import eventually

TIMEOUT_S = 300
FLAGS = ("--switch-run",)  # options without a value


@dataclass
class Reading:
    """One reader at one page.

    Args:
        page: the page.
        world: where.
    """

    page: str
    world: World
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "docs"})
    outputs: dict[int, str] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.blocks = blocks_of(self.page)
        self.desk: Desk = self.world.desk(self.page)
        if self.world.servers and follows_bucket(self.blocks):
            self.desk.move_servers("s3")
        paths = [str(self.world.commands), f"{sys.prefix}/bin", os.environ["PATH"]]
        self.shell = Shell(
            self.desk.here,
            self.desk.here / ".state",
            {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)},
        )

    def read(self, block: Block) -> None:
        """Run or check a block, after those before it.

        Raises:
            AssertionError: something in it is wrong.
        """
        for before in self.blocks:
            if before.line >= block.line:
                break
            if before.line not in self._done and before.not_run is None:
                with contextlib.suppress(Exception):  # its own test says why
                    self._do(before)
        self._do(block)

    def _do(self, block: Block) -> None:
        self._done.add(block.line)
        text = block.text if block.not_run else self.desk.translated(block)
        if block.language == "python":
            check_code(block.text)
            if block.not_run is None:
                self._run_code(block, text)
        elif block.language in ("bash", "console"):
            self._run_commands(block, without_prompts(text) if block.language == "console" else text)
        elif block.language == "text":
            self._compare(block)
        elif block.language in ("json", "yaml", "toml"):
            check_data(block.language, block.text)
            if '"error"' in block.text:
                self._check_error(json.loads(block.text))

    def _run_code(self, block: Block, text: str) -> None:
        with self._environment(block) as patched, contextlib.ExitStack() as stack:
            patched.chdir(self.desk.here)
            for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
                patched.setenv(name, value)  # as torchrun has them
            patched.setenv("MASTER_PORT", str(self.desk.port))
            names.prepare(names_wanted(text), self.namespace, self.desk)
            if "wait_applied" in text:
                self._have_acknowledged(text, stack)
            run_code(block, text, self.namespace)
            names.settle(self.namespace)

    @contextlib.contextmanager
    def _environment(self, block: Block) -> Iterator[pytest.MonkeyPatch]:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in self.desk.environment(block).items():
                patched.setenv(name, value)
            yield patched

    def _have_acknowledged(self, text: str, stack: contextlib.ExitStack) -> None:
        """Have followers run beside the servers that are waited for; where there are none, their words are written."""
        publisher = self.namespace["publisher"]
        sync_dir = publisher.state_dict()["sync_dir"]
        if not self.world.servers:
            names.acknowledge(publisher, sync_dir)
        for node in re.findall(r'"node(\d)-8000"', text) if self.world.servers else ():
            log, server = self.desk.here / f"follower-{node}.log", self.desk.server(int(node))
            stack.enter_context(follower(sync_dir, server, log, "--sampler", f"node{node}-8000"))

    def _run_commands(self, block: Block, text: str) -> None:
        found = list(statements(text))
        runnable = [part for part in found if self._check(part) and block.not_run is None]
        said = [self._follow(block, part) or self._run(block, part) for part in runnable]
        self.outputs[block.line] = "".join(said)

    def _check(self, part: Statement) -> bool:
        """Check what can be told without running; return whether it can be run here."""
        words = part.words()
        if not words:
            return True
        if words[0] == "make":
            return check_make(words)
        if words[:2] == ["pip", "install"]:
            check_pip(words)
            return False
        for place, word in enumerate(words):
            if Path(word).name == "delta-snapshot":
                check_cli(words[place + 1 :])
        return arguments_of_server(words) is None  # those that start one: tests/vllm/test_docs.py

    def _run(self, block: Block, part: Statement) -> str:
        is_costly = "doctor" in part.text and "--model" in part.text  # starts an engine
        if is_costly and part.words() in self.world.costly:
            return ""  # another page has it too
        try:
            said = self.shell.run([part], timeout_s=TIMEOUT_S, **self.desk.environment(block))
        except AssertionError as error:
            raise AssertionError(f"{block.page}:{block.line + part.line}: {part.text}\n{error}") from None
        if is_costly:
            self.world.costly.append(part.words())
        return said

    def _follow(self, block: Block, part: Statement) -> str:
        """Run a follower until it is ready, then end it; return what it wrote, or nothing if it is no follower."""
        words = part.words()
        if words[:2] != ["delta-snapshot", "follow"]:
            return ""
        flags = [word for word in words[2:] if word in FLAGS]
        paired = [word for word in words[2:] if word not in FLAGS]
        options = dict(zip(paired[::2], paired[1::2], strict=True))
        sync_dir, server = options.pop("--sync-dir"), options.pop("--server", self.desk.server())
        options.pop("--listen", None)
        log = self.desk.here / f"follow-{len(list(self.desk.here.iterdir()))}.log"
        rest = [*(word for option in options.items() for word in option), *flags]
        with self._environment(block), follower(sync_dir, server, log, *rest) as process:
            eventually(lambda: process.is_ready)
            process.terminate()
            assert process.wait() == part.status, process.log
        if flags:
            self.desk.bring_back(server)
        return process.log

    def _compare(self, block: Block) -> None:
        """Check that what is shown right behind a command still has the words that the command prints."""
        before = [other for other in self.blocks if other.line < block.line]
        printed = self.outputs.get(before[-1].line, "") if before and block.after <= 2 else ""
        if not printed:
            return
        for shown in block.text.splitlines():
            missing = set(_words(shown)) - set(_words(printed))
            assert not missing, f"{block}: the command prints no {missing} as in {shown!r}, but:\n{printed}"

    def _check_error(self, shown: dict[str, Any]) -> None:
        assert set(shown["error"]) == ERROR_FIELDS
        [statement] = statements(f"delta-snapshot log {self.desk.here}/nowhere --json # exits with 1")
        printed = self.shell.run([statement], timeout_s=TIMEOUT_S)
        answer = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
        assert answer.keys() == shown.keys()
        assert answer["error"].keys() == shown["error"].keys()
        assert (answer["ok"], answer["error"]["kind"]) == (shown["ok"], shown["error"]["kind"])


class Library:
    """All pages that are read in one world, each by one reader.

    Args:
        world: the world.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._readings: dict[str, Reading] = {}

    def read(self, block: Block) -> None:
        """Run or check a block. Raises: AssertionError, and what it raises itself."""
        if block.page not in self._readings:
            for reading in self._readings.values():
                names.clear(reading.namespace)  # its reader has left
            self._readings[block.page] = Reading(block.page, self._world)
        self._readings[block.page].read(block)

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        with self._world.stack:
            for reading in self._readings.values():
                names.clear(reading.namespace)


def _words(text: str) -> Iterator[str]:
    yield from re.findall(r"(?<![\w/.-])[A-Za-z_]{3,}(?![\w/-])", text)  # no ids, paths and dates
