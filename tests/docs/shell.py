"""Runs the commands of a block in bash, one by one, each with the exit status that its comment promises."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STATUS = re.compile(r"#.*\bexits with (\d)\b")
_PROMPT = re.compile(r"^\$ ?")


@dataclass(frozen=True)
class Statement:
    """A command, with all lines that it has.

    Attributes:
        line: in the block, from 0.
        text: as written.
    """

    line: int
    text: str

    @property
    def status(self) -> int:
        """What it exits with: 0, or what its comment says."""
        said = _STATUS.search(self.text)
        return int(said[1]) if said else 0

    def words(self) -> list[str]:
        """Return the words of the command, without variables that are set for it, comments and what it is piped to."""
        words = shlex.split(self.text.replace("\\\n", " "), comments=True)
        ends = [n for n, word in enumerate(words) if word in ("|", "&&", "||", ";", ">", "2>", "&", "<")]
        words = words[: min(ends, default=None)]
        while words and re.match(r"^\w+=", words[0]):
            words = words[1:]
        return words


def without_prompts(console: str) -> str:
    """Return the commands of a ``console`` block; lines without a prompt are output."""
    return "\n".join(_PROMPT.sub("", line) if _PROMPT.match(line) else "#" for line in console.splitlines())


def statements(text: str) -> Iterator[Statement]:
    """Yield the statements of a script: as few lines at a time as are complete for bash.

    Raises:
        AssertionError: the script is not valid.
    """
    first, lines = 0, list[str]()
    for number, line in enumerate(text.splitlines()):
        if not lines:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            first = number
        lines.append(line)
        if not line.endswith("\\") and complaint_of("\n".join(lines)) == "":
            yield Statement(first, "\n".join(lines))
            lines = []
    assert not lines, complaint_of("\n".join(lines)) or f"it ends in the middle of {lines[-1]!r}"


def complaint_of(script: str) -> str:
    """Return what bash has against the syntax of a script; nothing is run."""
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False).stderr


def script_of(parts: Sequence[Statement]) -> str:
    """Return a script that ends with the first statement that exits otherwise than promised."""
    steps = ["set -uo pipefail", 'source "$DOCS_STATE"']
    for part in parts:
        failed = f"line {part.line}: exit status $__got, not {part.status}"
        steps += [part.text, "__got=$?", f'[ "$__got" = {part.status} ] || {{ echo "{failed}" >&2; exit 99; }}']
    return "\n".join([*steps, 'export -p > "$DOCS_STATE"', ""])


@dataclass
class Shell:
    """A shell for the blocks of a page: variables that one exports hold in the next.

    Args:
        folder: where it stands.
        state: a file for the variables.
        environment: what it starts with.
    """

    folder: Path
    state: Path
    environment: Mapping[str, str]

    def run(self, parts: Sequence[Statement], *, timeout_s: float, **environment: str) -> str:
        """Run statements; return what they wrote to stdout and stderr.

        Raises:
            AssertionError: one of them failed; the message has its line in the block and the output.
        """
        if not self.state.exists():
            self.state.write_text("")
        ended = subprocess.run(
            ["bash", "-c", script_of(parts)],
            cwd=self.folder,
            env={**os.environ, **self.environment, **environment, "DOCS_STATE": str(self.state)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-6000:]
        return ended.stdout
