# SPDX-License-Identifier: Apache-2.0
"""The command ``delta-snapshot``. Its libraries are an extra; without them it says how to install them."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command. Exits with 0 (ok), 1 (a problem was found), 2 (usage) or 3 (the store is unreachable)."""
    try:
        from vllm_delta_snapshot.cli.app import app

        app()
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("typer", "rich"):
            raise
        print(
            f"delta-snapshot needs {library}, which is not installed. Run: pip install 'vllm-delta-snapshot[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
