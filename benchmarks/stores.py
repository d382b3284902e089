# SPDX-License-Identifier: Apache-2.0
"""A delta's payload in and out of each kind of store, beside the vendor's own tool: ``python -m benchmarks.stores``.

Real servers on loopback (rclone for S3, fake-gcs-server for GCS) and two folders, on disk and in memory. Ours and the
vendor's defaults (``cp`` with a sync, boto3's managed transfer, google-cloud-storage's blobs) alternate, every try in a
client process of its own (`benchmarks.stores_client`), whose processor seconds are counted apart from the server's.
Progress goes to stderr, the result to stdout as one JSON object, a table to docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import spread
from benchmarks.report import machine, progress, write_section
from tests.support.object_stores import fake_gcs, rclone

SIDES: Final = ("ours", "vendor")
DIRECTIONS: Final = ("put", "get")
VENDORS: Final = {"posix": "cp", "posix_memory": "cp", "s3": "boto3", "gcs": "google-cloud-storage"}
PLACES: Final = {
    "posix": "folder on disk",
    "posix_memory": "folder in memory",
    "s3": "S3 (rclone)",
    "gcs": "GCS (fake-gcs-server)",
}
_CHECKSUMS: Final = {"AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required"}
"""Else boto3 reads nothing back in parts from rclone, which sends the checksum of the whole object with each."""
PAYLOAD_MB: Final = {"posix": 1000, "posix_memory": 1000, "s3": 1000, "gcs": 200}
"""The servers of GCS that run here take 20 MB a second at best."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where payloads go.

    Attributes:
        folder: URI.
        environment: what clients need to reach it.
        server: the server's process; ``None`` for a folder.
    """

    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)
    server: int | None = None


def main() -> int:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, help="size of every payload, where 1 GB takes too long")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--stores", nargs="+", choices=VENDORS, default=list(VENDORS))
    arguments = parser.parse_args()
    result: dict[str, Any] = {"repetitions": arguments.repetitions}
    with tempfile.TemporaryDirectory() as on_disk, _in_memory() as in_memory:
        for name in arguments.stores:
            source = in_memory / "payload"
            _write_random(source, 1_000_000 * (arguments.mb or PAYLOAD_MB[name]))
            with _place(name, Path(on_disk), in_memory) as place:
                result[name] = _measure(name, place, source, in_memory / "landed", arguments.repetitions)
    result["load_average"] = os.getloadavg()[0]
    if arguments.stores == list(VENDORS):
        _write_report(result, "`make bench-stores`" + (f" with `--mb {arguments.mb}`" if arguments.mb else ""))
    print(json.dumps(result))
    return 0


@contextlib.contextmanager
def _in_memory() -> Iterator[Path]:
    """Give a folder in memory where there is one, so that no local disk is measured with a store."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def _write_random(path: Path, num_bytes: int) -> None:
    """Write what no store and no server can compress."""
    with path.open("wb") as file:
        for first in range(0, num_bytes, 1 << 24):
            file.write(os.urandom(min(1 << 24, num_bytes - first)))


@contextlib.contextmanager
def _place(name: str, on_disk: Path, in_memory: Path) -> Iterator[Place]:
    if name in ("posix", "posix_memory"):
        folder = (on_disk if name == "posix" else in_memory) / "store"
        folder.mkdir()
        yield Place(str(folder))
        shutil.rmtree(folder)
        return
    log, root = on_disk / "log", in_memory / "served"
    bucket = root / "bucket"  # for both servers a bucket is a folder
    bucket.mkdir(parents=True)
    with rclone(log, root) if name == "s3" else fake_gcs(log, root) as server:
        yield Place(f"{server.scheme}://{bucket.name}", server.environment | _CHECKSUMS, server.process)
    shutil.rmtree(root)


def _measure(name: str, place: Place, source: Path, landing: Path, repetitions: int) -> dict[str, Any]:
    tries: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for repetition in range(repetitions):
        for side in SIDES if repetition % 2 == 0 else SIDES[::-1]:
            tries[side].append(_once(side, place, source, landing))
            progress(f"{name} {repetition + 1}/{repetitions} {side}: {_said(tries[side][-1], source.stat().st_size)}")
    result: dict[str, Any] = {"payload_bytes": source.stat().st_size}
    for side, prefix in zip(SIDES, ("", "vendor_"), strict=True):
        for direction in DIRECTIONS:
            seconds = [once[direction]["s"] for once in tries[side]]
            rates = [source.stat().st_size / 1e6 / each for each in seconds]
            result[f"{prefix}{direction}_mb_s"] = round(spread(rates)[0], 1)
            result[f"{prefix}{direction}_mb_s_spread"] = [round(rate, 1) for rate in spread(rates)]
            result[f"{prefix}{direction}_cpu_s"] = spread([once[direction]["cpu_s"] for once in tries[side]])
            if place.server is not None:
                busy = [once[direction]["server_cpu_s"] / once[direction]["s"] for once in tries[side]]
                result[f"{prefix}{direction}_server_busy"] = spread(busy)
    return result


def _once(side: str, place: Place, source: Path, landing: Path) -> dict[str, Any]:
    uri = f"{place.folder}/{side}"
    command = [sys.executable, "-m", "benchmarks.stores_client", side, uri, str(source), str(landing)]
    if place.server is not None:
        command += ["--server", str(place.server)]
    environment = {**os.environ, **place.environment}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    landing.unlink()
    _delete(uri, environment)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _delete(uri: str, environment: Mapping[str, str]) -> None:
    program = (
        "import sys; from vllm_delta_snapshot.store import open_store; open_store(sys.argv[1]).delete(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", program, *uri.rsplit("/", 1)], env=dict(environment), check=True)


def _said(once: dict[str, Any], num_bytes: int) -> str:
    return ", ".join(
        f"{direction} {num_bytes / 1e6 / once[direction]['s']:.0f} MB/s"
        f" (client {once[direction]['cpu_s']:.2f} s, server {once[direction]['server_cpu_s']:.2f} s of processor)"
        for direction in DIRECTIONS
    )


def _write_report(result: dict[str, Any], command: str) -> None:
    rows = []
    for name, vendor in VENDORS.items():
        for side, prefix in (("ours", ""), (vendor, "vendor_")):
            row: list[object] = [PLACES[name], side, round(result[name]["payload_bytes"] / 1e6)]
            for direction in DIRECTIONS:
                rate = result[name][f"{prefix}{direction}_mb_s_spread"]
                cpu = result[name][f"{prefix}{direction}_cpu_s"]
                busy = result[name].get(f"{prefix}{direction}_server_busy")
                row.append("{:.0f} ({:.0f}-{:.0f})".format(*rate))
                row.append("{:.2f} ({:.2f}-{:.2f})".format(*cpu))
                row.append("-" if busy is None else f"{busy[0]:.2f}")
            rows.append(row)
    heads = [
        "store",
        "client",
        "MB",
        "put, MB/s",
        "client CPU, s",
        "server's share",
        "get, MB/s",
        "client CPU, s",
        "server's share",
    ]
    write_section("stores", "In and out of each store", _method(result, command), heads, rows)


def _method(result: dict[str, Any], command: str) -> str:
    return (
        f"{command}. One file of random bytes, {machine()}; client and server"
        f" share the cores. Medians of {result['repetitions']} alternating repetitions, smallest and largest in brackets; every"
        " try is a process of its own. *ours* puts from memory with the file's xxh3 on the way, and gets as the stager does,"
        " every byte compared before the file has its name. The vendors' tools have their defaults and go from file to file, in"
        " memory on the client's side; `cp` is followed by a sync, since `put` promises that the object outlives a power cut (in"
        " memory that costs nothing: plain `cp`). boto3 compares nothing of what it downloads in parts. *server's share* is the"
        " server's processor seconds per second, the client's share what is left of two cores at most: where the server has the"
        " larger part of what both used, it is the server that is measured, and the client's CPU seconds are what tells clients"
        " apart. That is so for every put through a server here. fake-gcs-server copies all bytes once more to compose the parts of"
        " ours, which Google does not."
        f" Load average of the machine at the end: {result['load_average']:.1f}."
    )


if __name__ == "__main__":
    sys.exit(main())
