"""Fuzz every reader with atheris, guided by coverage: ``python -m tests.fuzz [--seconds N] [READER ...]``.

Each reader gets a process of its own, with limits of time and memory for every input. Ends with the first input that a
reader neither accepts nor refuses, and leaves it in a file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

_LIMITS = ["-rss_limit_mb=2048", "-timeout=20", "-max_len=65536"]


def _fuzz(name: str, arguments: list[str]) -> None:
    """Fuzz one reader in this process; does not return."""
    import atheris

    with atheris.instrument_imports(include=["vllm_delta_snapshot"]):
        from tests.fuzz.readers import READERS
    reader = READERS[name]

    def one(data: bytes) -> None:
        reader(data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> int:
    """Run what the command line says."""
    if sys.argv[1:2] == ["--one"]:
        _fuzz(sys.argv[2], sys.argv[3:])
    from tests.fuzz.readers import READERS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", help=", ".join(READERS))
    parser.add_argument("--seconds", type=int, default=3, help="for each reader")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="where inputs go that a reader failed on")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.readers or READERS:
        with tempfile.TemporaryDirectory() as corpus:
            for number, seed in enumerate(READERS[name].seeds):
                (Path(corpus) / str(number)).write_bytes(seed)
            options = [f"-max_total_time={given.seconds}", f"-artifact_prefix={given.out}/", *_LIMITS, corpus]
            command = [sys.executable, "-m", "tests.fuzz", "--one", name, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        runs = [line for line in done.stderr.splitlines() if line.startswith("Done")]
        sys.stdout.write(f"{name}: {runs[-1] if runs else 'FAILED'}\n")
        sys.stdout.flush()
        if done.returncode:
            sys.stdout.write(f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
