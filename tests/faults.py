"""Try every fault, and write down what was tried, survived and seen: ``python -m tests.faults``.

Runs the tests that try them, with real stores, and writes docs/faults.md from what they recorded. Ends with an error,
and writes nothing, if one of them failed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest

MODULES = [
    "tests/contract/test_store_faults.py",
    "tests/contract/test_fuse.py",
    "tests/contract/test_races.py",
    "tests/contract/test_killed.py",
    "tests/unit/test_hostile.py",
]
OUT = Path("docs/faults.md")
HEAD = """# Faults that were tried

`make faults` tries them on real servers (MiniStack for S3, fake-gcs-server for GCS) and real file systems, with a
trainer that publishes and a host that stages or materializes around each of them, and writes this page. Survived means:
in the end the weights are bit for bit the trainer's, no version is lost or half visible, and the next call succeeds.
What the user saw is "nothing" where it was tried again until it worked.
"""


class Collector:
    """Takes the rows that tests recorded."""

    def __init__(self) -> None:
        self.faults: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.hostile: list[tuple[str, str]] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what one test recorded."""
        if report.skipped:
            self.skipped.append(str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "skipped")
        if report.when != "call" or not report.passed:
            return
        for kind, row in report.user_properties:
            parts = str(row).split("|")
            if kind == "fault":
                what, store, saw = parts
                self.faults[what][saw].append(store)
            elif kind == "hostile":
                self.hostile.append((parts[0], parts[1]))


def table(found: Collector) -> str:
    """Return the page."""
    lines = [HEAD, "| fault | on | survived | what the user saw |", "|---|---|---|---|"]
    for what, answers in found.faults.items():
        for saw, stores in answers.items():
            lines.append(f"| {what} | {', '.join(sorted(set(stores)))} | yes | {saw} |")
    lines += ["", "## Hostile input", "", "| in the store lies | it is refused with |", "|---|---|"]
    lines += [f"| {what} | {error} |" for what, error in found.hostile]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the tests and write the page."""
    collector = Collector()
    code = int(pytest.main(["-q", *(m for m in MODULES if Path(m).exists())], plugins=[collector]))
    if code:
        return code
    for reason in collector.skipped:
        sys.stdout.write(f"not tried: {reason}\n")
    OUT.write_text(table(collector))
    sys.stdout.write(f"wrote {OUT}: {len(collector.faults)} faults, {len(collector.hostile)} hostile inputs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
