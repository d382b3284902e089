"""Reads the fenced blocks of README.md and docs/: language, line, text, and why one is not run, if it says so."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LANGUAGES = frozenset({"bash", "console", "python", "yaml", "json", "toml", "text", "mermaid"})
"""What a fence may be. ``text`` is what a command shows, or a figure; ``mermaid`` is a figure."""

ENDPOINT = "https://s3.example.com"
"""In the pages, the address of an S3-compatible store of one's own."""

_OPENING = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_NOT_RUN = re.compile(r"^\s*<!--\s*not run:\s*(?P<reason>\S.*?)\s*-->\s*$")
_SERVER = re.compile(
    r"https?://(?:localhost|127\.0\.0\.1|node\d):8000|\bvllm serve\b|doctor .*--model|openai\.api_server"
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: the file, relative to the repository.
        line: of its first line of text, from 1.
        language: the first word behind the fence; empty if there is none.
        text: what is in it, without the fence's own indentation.
        not_run: why it cannot run on a CPU machine; ``None`` if it can.
        after: the number of lines that are neither empty nor a comment between it and the block before.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str | None
    after: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs_engine(self) -> bool:
        """Whether what it does is done by, or to, a vLLM server."""
        return (
            self.not_run is None and self.language in ("bash", "console", "python") and bool(_SERVER.search(self.text))
        )

    @property
    def needs_bucket(self) -> bool:
        """Whether it reaches an object store."""
        code = "\n".join(line.partition("#")[0] for line in self.text.splitlines())
        is_code = self.not_run is None and self.language in ("bash", "console", "python")
        return is_code and any(name in code for name in ("://bucket/", ENDPOINT))


def follows_bucket(blocks: Sequence[Block]) -> bool:
    """Say whether a page has a server that follows a run in a bucket."""
    return any(block.needs_bucket and "--sync-dir s3://" in block.text for block in blocks)


def pages() -> list[str]:
    """Return README.md and every page under docs/."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str) -> list[Block]:
    """Return a page's blocks, in order."""
    return list(read_blocks(page, (ROOT / page).read_text()))


def read_blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a text, those inside lists and tabs too.

    Raises:
        AssertionError: a fence is not closed, or a reason stands before something else.
    """
    lines = iter(enumerate(text.splitlines(), 1))
    reason: str | None = None
    between = 0
    for number, line in lines:
        opening = _OPENING.match(line)
        if opening is None:
            assert reason is None, f"{page}:{number}: a block must follow its 'not run' at once"
            said = _NOT_RUN.match(line)
            reason = said["reason"] if said else None
            between += bool(line.strip()) and not line.lstrip().startswith("<!--")
            continue
        inside: list[str] = []
        for _, line in lines:
            if line.strip() == opening["fence"]:
                break
            inside.append(line)
        else:
            raise AssertionError(f"{page}:{number}: the fence is not closed")
        language = re.match(r"\s*\{?\.?([\w-]*)", opening["info"])
        assert language is not None
        yield Block(page, number + 1, language[1], textwrap.dedent("\n".join(inside)) + "\n", reason, between)
        reason, between = None, 0


def parameters(*, needs_engine: bool) -> list[object]:
    """Return the blocks of the pages that need an engine, or of the others, as parameters of a test.

    From the first block of a page that reaches a bucket on, they need servers. Pages on which a server
    follows a bucket are the last: it leaves the folder that it has followed.
    """
    found: list[object] = []
    read = [blocks for page in pages() if (blocks := blocks_of(page))]
    for blocks in sorted(read, key=follows_bucket):
        if any(block.needs_engine for block in blocks) != needs_engine:
            continue
        marks: list[pytest.MarkDecorator] = []
        for block in blocks:
            if block.needs_bucket:
                marks = [pytest.mark.servers]
            found.append(pytest.param(block, id=str(block), marks=marks))
    return found
