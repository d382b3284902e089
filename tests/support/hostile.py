"""What a hostile store would hold, read under a limit of memory: ``python -m tests.support.hostile RUN WORK``.

RUN is a good run folder of `make_run`. Prints, as JSON, what each reading came to: error, seconds, and by how many MiB
the process grew.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.format.safetensors_io import MappedFile
from vllm_delta_snapshot.interop.openrl import read_openrl_delta
from vllm_delta_snapshot.interop.skyrl import open_skyrl_delta
from vllm_delta_snapshot.runs.replay import opened_version
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

MORE_BYTES = 768 << 20
"""How much the process may grow."""
BIG = 100_000_000

Harm = Callable[[Path], None]


def read_all(run: Path) -> None:
    """Read version 1 as a stager does."""
    folder = RunFolder(PosixStore(run))
    record = folder.read_version(1)
    with opened_version(folder, record, folder.read_run().specs()):
        pass


def record_of(run: Path) -> Path:
    return run / "versions" / "00000001.json"


def metadata_of(run: Path) -> Path:
    return run / json.loads(record_of(run).read_bytes())["folder"] / "metadata.json"


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))


def pin(run: Path) -> None:
    """Make the record name the metadata as it is now."""
    data = metadata_of(run).read_bytes()
    edit(record_of(run), metadata_bytes=len(data), metadata_xxh3_128=xxhash.xxh3_128_hexdigest(data))


def put_metadata(**fields: Any) -> Harm:
    def harm(run: Path) -> None:
        edit(metadata_of(run), **fields)
        pin(run)

    return harm


def put_record(**fields: Any) -> Harm:
    return lambda run: edit(record_of(run), **fields)


def fill(find: Callable[[Path], Path], unit: bytes, head: bytes = b"[", tail: bytes = b"0]", size: int = BIG) -> Harm:
    """Replace a file by much JSON."""

    def harm(run: Path) -> None:
        path = find(run)
        path.write_bytes(head + unit * (size // len(unit)) + tail)
        if path.name == "metadata.json":
            pin(run)

    return harm


def double_a_name(find: Callable[[Path], Path]) -> Harm:
    def harm(run: Path) -> None:
        path = find(run)
        path.write_bytes(path.read_bytes().replace(b"{", b'{"format_version": 1, ', 1))
        if path.name == "metadata.json":
            pin(run)

    return harm


def replace_by(find: Callable[[Path], Path], make: Callable[[Path], object]) -> Harm:
    def harm(run: Path) -> None:
        path = find(run)
        path.unlink()
        make(path)

    return harm


def payload_of(run: Path) -> Path:
    return metadata_of(run).with_name("delta.safetensors")


def repay(run: Path, data: bytes) -> None:
    """Replace the payload, and make the metadata name it as it is now."""
    payload_of(run).write_bytes(data)
    entry = {"name": "delta.safetensors", "bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    put_metadata(files=[entry])(run)


def bomb(run: Path) -> None:
    """Have every array of the payload be a frame of 1 GB of zeros."""
    frame = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    zeros = bytes(1 << 24)
    data = b"".join(frame.compress(zeros) for _ in range(64)) + frame.flush()
    names = list(MappedFile(payload_of(run)).specs)
    offsets = range(0, len(data) * len(names), len(data))
    header = {
        name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        for name, at in zip(names, offsets, strict=True)
    }
    repay(run, header_bytes(header) + data * len(names))


def header_bytes(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def overlap(run: Path) -> None:
    """Have two arrays of the payload share their bytes."""
    header = {f"0.{part}": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for part in ("indices", "values")}
    repay(run, header_bytes(header) + bytes(8))


def claim_a_terabyte(run: Path) -> None:
    """Have the payload's header speak of more than there is."""
    repay(run, header_bytes({"0.values": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}))


def long_header(run: Path) -> None:
    """Have the payload say that its header is as long as a header may be, and nothing else."""
    repay(run, struct.pack("<Q", BIG) + b" " * 100)


def run_json(run: Path) -> Path:
    return run / "run.json"


CASES: dict[str, Harm] = {
    "run.json of 100 MB": fill(run_json, b"1,"),
    "version record of 100 MB": fill(record_of, b"1,"),
    "metadata.json of 100 MB": fill(metadata_of, b"[],"),
    "metadata.json of 100 MB of brackets": fill(metadata_of, b"["),
    "run.json of 20 MB of junk": fill(run_json, b"0,", b'{"tensors":[', b"0]}", 20_000_000),
    "run.json of 2 MB of strings": fill(run_json, b'"aaaa",', b'{"tensors":[', b"0]}", 2_000_000),
    "run.json nested 100 000 deep": lambda run: run_json(run).write_bytes(b"[" * 100_000),
    "run.json with a name twice": double_a_name(run_json),
    "version record with a name twice": double_a_name(record_of),
    "metadata.json with a name twice": double_a_name(metadata_of),
    "version record whose folder is absolute": put_record(folder="/etc"),
    "version record whose folder leaves the run": put_record(folder="deltas/../../etc"),
    "version record of version 2^70": put_record(version=1 << 70),
    "version record with a negative size": put_record(payload_bytes=-1),
    "version record with metadata of 2^62 bytes": put_record(metadata_bytes=1 << 62),
    "file name that is absolute": put_metadata(files=[{"name": "/etc/passwd", "bytes": 1, "xxh3_128": "0" * 32}]),
    "file name that leaves its folder": put_metadata(files=[{"name": "../x", "bytes": 1, "xxh3_128": "0" * 32}]),
    "file of 2^62 bytes": put_metadata(files=[{"name": "delta.safetensors", "bytes": 1 << 62, "xxh3_128": "0" * 32}]),
    "run.json that is a pipe": replace_by(run_json, lambda path: os.mkfifo(path)),
    "run.json that leads to a device": replace_by(run_json, lambda path: path.symlink_to("/dev/zero")),
    "payload that is a pipe": replace_by(payload_of, lambda path: os.mkfifo(path)),
    "payload that leads to a device": replace_by(payload_of, lambda path: path.symlink_to("/dev/zero")),
    "payload that leads to another file": replace_by(payload_of, lambda path: path.symlink_to("/etc/passwd")),
    "payload of frames that hold 1 GB each": bomb,
    "payload whose arrays overlap": overlap,
    "payload that speaks of a terabyte": claim_a_terabyte,
    "payload that is all header": long_header,
}

FOREIGN: dict[str, tuple[Callable[[Path], object], Harm]] = {
    "OpenRL metadata that leads to a device": (
        read_openrl_delta,
        lambda folder: (folder / "metadata.json").symlink_to("/dev/zero"),
    ),
    "OpenRL metadata that is a pipe": (read_openrl_delta, lambda folder: os.mkfifo(folder / "metadata.json")),
    "SkyRL manifest that leads to a device": (
        open_skyrl_delta,
        lambda folder: (folder / "manifest.json").symlink_to("/dev/zero"),
    ),
    "SkyRL manifest that is a pipe": (open_skyrl_delta, lambda folder: os.mkfifo(folder / "manifest.json")),
    "safetensors index that is a pipe": (
        Checkpoint,
        lambda folder: (os.mkfifo(folder / "model.safetensors.index.json"), (folder / "x").touch())[1],
    ),
    "safetensors index that leaves the folder": (
        Checkpoint,
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'),
    ),
}


def measured(read: Callable[[], object]) -> dict[str, Any]:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        read()
        error = "accepted"
    except DeltaSnapshotError as caught:
        error = f"{type(caught).__name__}: {caught.what}"
    except BaseException as caught:  # noqa: BLE001
        error = f"NOT OURS {caught!r}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"error": error, "seconds": round(time.monotonic() - started, 2), "grown_mb": grown >> 10}


def main(pristine: Path, work: Path) -> None:
    """Read everything."""
    read_all(pristine)  # what is loaded at the first use is not counted
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MORE_BYTES, resource.RLIM_INFINITY))
    found = {}
    for number, (name, harm) in enumerate(CASES.items()):
        sys.stderr.write(f"{name}\n")
        run = work / str(number)
        shutil.copytree(pristine, run)
        harm(run)
        found[name] = measured(lambda run=run: read_all(run))
        shutil.rmtree(run)
    for number, (name, (read, harm)) in enumerate(FOREIGN.items()):
        folder = work / f"foreign-{number}"
        folder.mkdir()
        harm(folder)
        found[name] = measured(lambda read=read, folder=folder: read(folder))
    sys.stdout.write(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
