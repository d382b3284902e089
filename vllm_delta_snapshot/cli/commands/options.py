# SPDX-License-Identifier: Apache-2.0
"""Arguments that several verbs share, and the choices that an option has."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

__all__ = ["AsJson", "ExportFormat", "Pause", "Policy", "Run"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; see docs/cli.md for its fields.")]
Run = Annotated[
    str, typer.Argument(metavar="SYNC_DIR", help="The run's folder: /path, s3://bucket/prefix or gs://bucket/prefix.")
]


class Pause(StrEnum):
    """What a pause does with running requests."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class Policy(StrEnum):
    """Which versions a follower takes."""

    NEWEST = "newest"
    EVERY = "every"


class ExportFormat(StrEnum):
    """The forms that ``export`` writes."""

    OPENRL_V2 = "openrl-v2"
