# SPDX-License-Identifier: Apache-2.0
"""One client of `benchmarks.stores`, in a process of its own, so that its processor time is nobody else's.

Puts a payload into a store and gets it back, either as this project does (from the publisher's memory, digests and all;
back by the stager's fetch, every byte compared) or as the vendor's own tool does with its defaults (from a file, into a
file). Prints seconds and processor seconds as one JSON object. What landed is compared with what was sent, untimed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import xxhash

from vllm_delta_snapshot.format.digest import file_digest
from vllm_delta_snapshot.format.metadata import FileEntry
from vllm_delta_snapshot.runs.fetch import fetch_file
from vllm_delta_snapshot.store import StoreConfig, open_store

CHUNK_BYTES: Final = 3_000_000
"""About what a tensor's encoded part has."""


class Client(Protocol):
    """Moves one payload."""

    def put(self) -> object:
        """Send it; durable when this returns."""
        ...

    def get(self) -> object:
        """Bring it back into a local file."""
        ...


class Ours:
    """What publisher and stager do."""

    def __init__(self, uri: str, source: Path, landing: Path) -> None:
        folder, _, self._key = uri.rpartition("/")
        self._store = open_store(folder)
        self._payload = memoryview(source.read_bytes())
        self._landing = landing
        self._entry = FileEntry(name=landing.name, bytes=len(self._payload), xxh3_128="0" * 32)

    def put(self) -> None:
        """Write as `write_delta_folder` does: hashed on its way."""
        digest = xxhash.xxh3_128()

        def hashed() -> Iterator[memoryview]:
            for first in range(0, len(self._payload), CHUNK_BYTES):
                chunk = self._payload[first : first + CHUNK_BYTES]
                digest.update(chunk)
                yield chunk

        num_bytes = self._store.put(self._key, hashed())
        self._entry = FileEntry(name=self._landing.name, bytes=num_bytes, xxh3_128=digest.hexdigest())

    def get(self) -> None:
        """Fetch as the stager does: every byte compared before the file has its name."""
        fetch_file(self._store, self._key, self._entry, self._landing)


class Cp:
    """``cp``, and a sync after it has written: an object that is published must be there after a power cut."""

    def __init__(self, uri: str, source: Path, landing: Path) -> None:
        self._path, self._source, self._landing = uri, source, landing

    def put(self) -> None:
        """Copy there, and sync."""
        subprocess.run(["cp", self._source, self._path], check=True)
        for path in (self._path, Path(self._path).parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def get(self) -> None:
        """Copy back."""
        subprocess.run(["cp", self._path, self._landing], check=True)


class Boto3:
    """boto3's managed transfer."""

    def __init__(self, uri: str, source: Path, landing: Path) -> None:
        import boto3

        self._bucket, self._key = _bucket_and_key(uri)
        self._client = boto3.client("s3", endpoint_url=StoreConfig.load().endpoint_url)
        self._source, self._landing = source, landing

    def put(self) -> None:
        """Upload."""
        self._client.upload_file(str(self._source), self._bucket, self._key)

    def get(self) -> None:
        """Download."""
        self._client.download_file(self._bucket, self._key, str(self._landing))


class GoogleCloudStorage:
    """google-cloud-storage's blobs."""

    def __init__(self, uri: str, source: Path, landing: Path) -> None:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        bucket, key = _bucket_and_key(uri)
        client = storage.Client(
            project="none",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": StoreConfig.load().endpoint_url},
        )
        self._blob = client.bucket(bucket).blob(key)
        self._source, self._landing = source, landing

    def put(self) -> None:
        """Upload."""
        self._blob.upload_from_filename(str(self._source))

    def get(self) -> None:
        """Download."""
        self._blob.download_to_filename(str(self._landing))


VENDORS: Final[dict[str, Callable[[str, Path, Path], Client]]] = {"": Cp, "s3": Boto3, "gs": GoogleCloudStorage}


def main() -> int:
    """Move the payload once, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ours", "vendor"))
    parser.add_argument("uri")
    parser.add_argument("source", type=Path)
    parser.add_argument("landing", type=Path)
    parser.add_argument("--server", type=int, help="process whose processor time is told beside")
    arguments = parser.parse_args()
    make = Ours if arguments.side == "ours" else VENDORS[urlsplit(arguments.uri).scheme]
    client = make(arguments.uri, arguments.source, arguments.landing)
    result = {"put": _measured(client.put, arguments.server), "get": _measured(client.get, arguments.server)}
    if file_digest(arguments.landing) != file_digest(arguments.source):
        raise SystemExit(f"{arguments.side}: what came back from {arguments.uri} is not what was sent")
    print(json.dumps(result))
    return 0


def _measured(work: Callable[[], object], server: int | None) -> dict[str, Any]:
    cpu, server_cpu, started = _cpu_s(), _cpu_s_of(server), time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return {"s": seconds, "cpu_s": _cpu_s() - cpu, "server_cpu_s": _cpu_s_of(server) - server_cpu}


def _cpu_s() -> float:
    """Return the processor seconds of this process and of those that it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _cpu_s_of(process: int | None) -> float:
    """Return the processor seconds of another process."""
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bucket_and_key(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.partition("://")[2].partition("/")
    return bucket, key


if __name__ == "__main__":
    sys.exit(main())
