"""The command line, run in this process, and what docs/cli.md promises of it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from vllm_delta_snapshot.cli.app import app

ERROR_FIELDS = {"kind", "what", "file", "tensor", "expected", "found", "hint"}

_DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


class Outcome:
    """What a call of ``delta-snapshot`` left."""

    def __init__(self, *args: object) -> None:
        result = CliRunner().invoke(app, list(map(str, args)), prog_name="delta-snapshot")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code, self.stdout, self.stderr = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value

    @property
    def usage(self) -> str:
        """The message of a usage error, without the box around it."""
        assert (self.code, self.stdout) == (2, "")
        return " ".join(re.sub("[│╭╮╰╯─]", " ", self.stderr).split())

    def assert_ok(self) -> None:
        """Check that it went well, and that nothing but data was said."""
        assert (self.code, self.stderr) == (0, "")

    def assert_failed(self, code: int, kind: str) -> str:
        """Check that it failed with one paragraph on stderr and no more than an object on stdout; return the former."""
        message = self.stderr.removesuffix("\n")
        assert self.code == code, message
        assert "\n" not in message
        assert "Traceback" not in message
        assert message.endswith(f" [{kind}]")
        if self.stdout:
            answer = self.json
            assert set(answer) == {"ok", "error"}
            assert answer["ok"] is False
            assert set(answer["error"]) == ERROR_FIELDS
            assert answer["error"]["kind"] == kind
            assert answer["error"]["what"] in message
        return message


def documented_fields(row: str) -> set[str]:
    """Return the fields that a row of the table of --json names, those of the members of its lists included."""
    (cell,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", _DOCS.read_text().partition("## `--json`")[2], re.M)
    return set(re.findall(r"`([a-z_0-9]+)`", cell))


def fields_of(value: Any, *, into: Collection[str] = ()) -> set[str]:
    """Return the fields of an object and of the members of its lists; what a user may name (metrics) is left out.

    Args:
        value: the object.
        into: the names of members that are objects, whose fields are returned too.
    """
    if isinstance(value, list):
        return set().union(*(fields_of(member, into=into) for member in value))
    if not isinstance(value, dict):
        return set()
    members = (member for name, member in value.items() if isinstance(member, list) or name in into)
    return set(value).union(*(fields_of(member, into=into) for member in members))
