# SPDX-License-Identifier: Apache-2.0
"""What every example of an integration is told on its command line."""

import argparse
from collections.abc import Sequence


def parse(doc: str | None, argv: Sequence[str] | None, *, steps: int, lr: float) -> argparse.Namespace:
    """Parse the options; `steps` and `lr` are the defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint that the servers were started from")
    parser.add_argument("--sync-dir", required=True, help="the run's folder, which trainer and servers share")
    parser.add_argument("--server", action="append", default=[], help="URL of a server; may be repeated")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--every", type=int, default=1, help="optimizer steps between two versions (%(default)s)")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate (%(default)s)")
    return parser.parse_args(argv)
