"""What a soak counts, and the page that it writes."""

from __future__ import annotations

import collections
import platform
from dataclasses import dataclass, field

HEAD = """# The soak

`make soak` ran it and wrote this page. One real vLLM server on the CPU, requests that never stop, two trainers of the
same base that publish into runs of their own, and one follower that takes the server from one run to the other
(`--switch-run`). Trainers change weights at random, frozen ones in the ways that people write them
(`tests/soak/trainer.py`), and at random moments something is killed. What a version must be is known by a file that the
trainer wrote with the safetensors library before it published; what the server holds, by the SHA-256 of every live
parameter, taken in its worker (`tests/soak/expected.py`). Nothing of the product is used for either.
"""


@dataclass
class Counts:
    """Counters, by what they count."""

    seed: int
    seconds: float = 0.0
    versions: collections.Counter[str] = field(default_factory=collections.Counter)
    updates: int = 0
    looks: int = 0
    tensors: int = 0
    requests: int = 0
    verified: collections.Counter[str] = field(default_factory=collections.Counter)
    switches: int = 0
    odd_writes: collections.Counter[str] = field(default_factory=collections.Counter)
    troubles: collections.Counter[str] = field(default_factory=collections.Counter)
    controls: int = 0
    longest_wait_s: float = 0.0
    longest_wait_after: str = ""
    faults: list[str] = field(default_factory=list)

    def waited(self, seconds: float, after: str) -> None:
        """Note how long an update took to be served."""
        if seconds > self.longest_wait_s:
            self.longest_wait_s, self.longest_wait_after = seconds, after

    def page(self) -> str:
        """Return the page."""
        rows = [
            ("ran for", f"{self.seconds / 60:.1f} minutes, seed {self.seed}, on {_machine()}"),
            ("versions published", _each(self.versions)),
            ("updates served and compared, every parameter", str(self.updates)),
            ("looks at label and weights meanwhile", str(self.looks)),
            ("parameters compared", f"{self.tensors:,}"),
            ("times that the server went to the other run", str(self.switches)),
            ("frozen tensors written", _each(self.odd_writes)),
            ("troubles", _each(self.troubles)),
            ("checks by command", _each(self.verified)),
            ("requests answered meanwhile", str(self.requests)),
            ("weights changed behind everybody's back, to see that this page can fail: seen", str(self.controls)),
            (
                "longest time until a version was served",
                f"{self.longest_wait_s:.1f} s, after: {self.longest_wait_after}",
            ),
            ("**wrong weights, wrong labels, and whatever else must not be**", f"**{len(self.faults)}**"),
        ]
        lines = [HEAD, "| what | how many |", "|---|---|", *(f"| {what} | {count} |" for what, count in rows)]
        return "\n".join([*lines, *(["", *(f"* {fault}" for fault in self.faults)] if self.faults else [])]) + "\n"


def _each(counter: collections.Counter[str]) -> str:
    return f"{counter.total()} ({', '.join(f'{what}: {count}' for what, count in sorted(counter.items()))})"


def _machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}"
