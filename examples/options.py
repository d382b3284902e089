# SPDX-License-Identifier: Apache-2.0
"""What every example of an integration is told on its command line."""

import argparse
from collections.abc import Sequence


def parse(
    doc: str | None, argv: Sequence[str] | None, *, steps: int, lr: float, every: int | None = None
) -> argparse.Namespace:
    """Parse the options; the last three are defaults. Without `every` there is no such option."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint that the servers were started from")
    parser.add_argument("--sync-dir", required=True, help="the run's folder, which trainer and servers share")
    parser.add_argument("--server", action="append", default=[], help="URL of a server; may be repeated")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (%(default)s)")
    if every is not None:
        parser.add_argument("--every", type=int, default=every, help="optimizer steps a version (%(default)s)")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate (%(default)s)")
    return parser.parse_args(argv)
