"""``python -m tests.soak``: run a soak, write docs/soak.md. Ends with 1, and keeps its files, if something is wrong."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.run import Soak

OUT = Path("docs/soak.md")


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="by default from the clock; printed and written down")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    sys.stderr.write(f"seed {seed}; everything lies in {folder}\n")
    soak = Soak(folder, seed)
    soak.last(options.minutes)
    options.out.write_text(soak.counts.page())
    sys.stdout.write(soak.counts.page())
    if soak.counts.faults:
        sys.stderr.write(f"wrong: all files are kept in {folder}\n")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
