"""Every reader of bytes that others wrote, as a function of bytes, with good bytes to start from.

A reader returns, or raises one of this project's errors; anything else is a bug. Shared by the property tests and by
`make fuzz`; imports neither torch nor the test tools.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.checkpoint import INDEX_NAME, Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.format.encodings import ENCODINGS, encoding_of
from vllm_delta_snapshot.format.encodings.base import Stated
from vllm_delta_snapshot.format.metadata import DeltaMetadata, parse_metadata
from vllm_delta_snapshot.format.run import RunInfo
from vllm_delta_snapshot.format.safetensors_io import MappedFile
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.interop.openrl import read_folder_metadata, read_openrl_delta
from vllm_delta_snapshot.interop.skyrl import open_skyrl_delta
from vllm_delta_snapshot.runs.acks import Acknowledgement
from vllm_delta_snapshot.store import StoreConfig
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec

__all__ = ["READERS", "Reader"]

GOLDEN = Path(__file__).parents[1] / "golden"
COMPACT = GOLDEN / "compact"
SKYRL = GOLDEN / "skyrl" / "delta-00000001"
SPECS = RunInfo.from_json((COMPACT / "run.json").read_bytes(), file="run.json").specs()
_ACK = Acknowledgement(
    run_id="01234567-89ab-cdef-0123-456789abcdef", sampler="a", version=3, applied_at=1.5, pause_s=0.25
).to_json()


@dataclass(frozen=True)
class Reader:
    """A reader.

    Attributes:
        read: reads bytes.
        seeds: bytes that it accepts.
    """

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]

    def __call__(self, data: bytes) -> bool:
        """Read; say whether the bytes were accepted."""
        try:
            self.read(data)
        except DeltaSnapshotError as error:
            str(error)
            return False
        return True


@contextlib.contextmanager
def _folder(**files: bytes) -> Iterator[Path]:
    """Give a folder with these files; a dot of a name is written as "__"."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        for file, data in files.items():
            (Path(name) / file.replace("__", ".")).write_bytes(data)
        yield Path(name)


def _container(data: bytes) -> None:
    with _folder(x__safetensors=data) as folder:
        mapped = MappedFile(folder / "x.safetensors")
        for name in mapped.specs:
            mapped.bits(name).sum()


def _index(data: bytes) -> None:
    with _folder(**{INDEX_NAME.replace(".", "__"): data}, x__safetensors=_all("base/*.safetensors")[0]) as folder:
        Checkpoint(folder)


def _as_index() -> bytes:
    """Return an index of the one file that `_index` puts beside it."""
    file = _all("base/*.safetensors")[0]
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    names = [name for name in header if name != "__metadata__"]
    return json.dumps({"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(names, "x.safetensors")}).encode()


def _payload(delta: Path) -> Reader:
    """Read a payload file against its metadata: the container, and the decoders of its encodings."""
    metadata = read_folder_metadata(delta)
    assert isinstance(metadata, DeltaMetadata)

    def read(data: bytes) -> None:
        with _folder(delta__safetensors=data) as folder:
            decode(metadata, folder, SPECS)

    return Reader(read, ((delta / "delta.safetensors").read_bytes(),))


def _decoder(name: str) -> Reader:
    """Read arrays of an encoding: the first bytes say how many changes of how large a tensor of which type."""
    encoding = encoding_of(name)
    spec = TensorSpec("t", (1000,), "BF16")
    seeds = []
    for count in (0, 1, 40):
        positions = np.arange(count, dtype=np.int32) * 3
        values = (np.arange(count) % 5 + 1).astype(np.uint16)
        if name.startswith("dense"):
            count, positions = 1000, np.arange(1000, dtype=np.int32)
            values = (np.arange(1000) % 5 + 1).astype(np.uint16)
        parts = encoding.encode([_change(encoding.is_difference, spec, positions, values)])
        body = b"".join(len(a.tobytes()).to_bytes(2, "little") + a.tobytes() for _, (_, a) in sorted(parts.items()))
        seeds.append(count.to_bytes(2, "little") + body)
    names = [(key, code) for key, (code, _) in sorted(parts.items())]

    def read(data: bytes) -> None:
        changed, rest = int.from_bytes(data[:2], "little"), data[2:]
        arrays = {}
        for key, code in names:
            size, rest = int.from_bytes(rest[:2], "little"), rest[2:]
            taken, rest = rest[:size], rest[size:]
            width = TensorSpec("x", (), code).element
            arrays[key] = (code, _bits(taken, width.bits))
        for change in encoding.decode([Stated(spec, changed)], arrays):
            assert change.changed == changed
            assert not changed or 0 <= int(change.positions[0]) <= int(change.positions[-1]) < spec.numel

    return Reader(read, tuple(seeds))


def _bits(data: bytes, kind: np.dtype[np.unsignedinteger]) -> Bits:
    size = np.dtype(kind).itemsize
    return np.frombuffer(data[: len(data) // size * size], kind)


def _change(is_difference: bool, spec: TensorSpec, positions: np.ndarray, values: np.ndarray) -> Change:
    return (TensorDifference if is_difference else TensorPatch)(spec, positions, values)


def _openrl_metadata(data: bytes) -> None:
    payload = (GOLDEN / "run" / "deltas" / "00000001-00000001" / "delta.safetensors").read_bytes()
    with _folder(metadata__json=data, delta__safetensors=payload) as folder:
        read_openrl_delta(folder)


def _openrl_payload(data: bytes) -> None:
    with _folder(metadata__json=_as_openrl(), delta__safetensors=data) as folder:
        read_openrl_delta(folder)


def _as_openrl() -> bytes:
    """Return a metadata.json as OpenRL writes it: ours without what tells it from theirs."""
    fields = json.loads((GOLDEN / "run" / "deltas" / "00000001-00000001" / "metadata.json").read_bytes())
    del fields["run_id"]
    return json.dumps(fields).encode()


def _skyrl_manifest(data: bytes) -> None:
    payloads = {path.name.replace(".", "__"): path.read_bytes() for path in SKYRL.glob("*.safetensors")}
    with _folder(manifest__json=data, **payloads) as folder:
        open_skyrl_delta(folder)


def _skyrl_payload(data: bytes) -> None:
    with _folder(
        manifest__json=(SKYRL / "manifest.json").read_bytes(), **{"delta-rank00000-file000000__safetensors": data}
    ) as folder:
        delta = open_skyrl_delta(folder)
        for name in delta.specs:
            delta.count_changed(name)


def _config(data: bytes) -> None:
    with _folder(config__json=data) as folder:
        before = os.environ.get("DELTA_SNAPSHOT_STORE_CONFIG")
        os.environ["DELTA_SNAPSHOT_STORE_CONFIG"] = str(folder / "config.json")
        try:
            StoreConfig.load()
        finally:
            del os.environ["DELTA_SNAPSHOT_STORE_CONFIG"]
            if before is not None:
                os.environ["DELTA_SNAPSHOT_STORE_CONFIG"] = before


def _all(pattern: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(GOLDEN.glob(pattern)))


READERS: dict[str, Reader] = {
    "run.json": Reader(lambda data: RunInfo.from_json(data, file="x").specs(), _all("*/run.json")),
    "version record": Reader(
        lambda data: VersionRecord.from_json(data, file="x"), _all("run/versions/*.json") + _all("compact/versions/*")
    ),
    "metadata.json": Reader(lambda data: parse_metadata(data, file="x"), _all("*/deltas/*/metadata.json")),
    "acknowledgement": Reader(lambda data: Acknowledgement.from_json(data, file="x"), (_ACK,)),
    "safetensors file": Reader(_container, _all("base/*.safetensors") + _all("run/deltas/0000000[12]*/*.safetensors")),
    "safetensors index": Reader(_index, (_as_index(),)),
    "OpenRL metadata": Reader(_openrl_metadata, (_as_openrl(),)),
    "OpenRL payload": Reader(_openrl_payload, _all("run/deltas/00000001*/delta.safetensors")),
    "SkyRL manifest": Reader(_skyrl_manifest, _all("skyrl/delta-00000001/manifest.json")),
    "SkyRL payload": Reader(_skyrl_payload, _all("skyrl/delta-00000001/*.safetensors")),
    "configuration": Reader(_config, (b'{"attempts": 3, "endpoint_url": "http://127.0.0.1:9000"}',)),
    **{f"encoding {name}": _decoder(name) for name in ENCODINGS},
    **{
        f"payload {delta.name[:8]}": _payload(delta)
        for delta in sorted((COMPACT / "deltas").iterdir())
        if (delta / "delta.safetensors").exists()
    },
}
