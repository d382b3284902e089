"""The three JSON objects of a run as plain dictionaries, to be bent in tests."""

from __future__ import annotations

import copy
import json
from typing import Any

RUN_ID = "01234567-89ab-cdef-0123-456789abcdef"
PUBLICATION_ID = "0123456789abcdef" * 2

RUN: dict[str, Any] = {
    "format": "delta_snapshot_run",
    "format_version": 1,
    "run_id": RUN_ID,
    "created_at": "2026-01-02T03:04:05+00:00",
    "tool": "tests",
    "digest_algorithm": "summix64",
    "encodings": ["raw"],
    "base": {"name": "/models/base", "state_digest": "0" * 16, "num_tensors": 2, "total_elements": 10},
    "tensors": [{"name": "a", "shape": [4], "dtype": "BF16"}, {"name": "b", "shape": [2, 3], "dtype": "F32"}],
}

VERSION: dict[str, Any] = {
    "format": "delta_snapshot_version",
    "format_version": 1,
    "kind": "delta",
    "run_id": RUN_ID,
    "version": 7,
    "base_version": 6,
    "publication_id": PUBLICATION_ID,
    "folder": "deltas/00000007-01234567",
    "metadata_bytes": 10,
    "metadata_xxh3_128": "a" * 32,
    "payload_bytes": 20,
    "changed_elements": 3,
    "base_state_digest": "1" * 16,
    "state_digest": "2" * 16,
    "created_at": "2026-01-02T03:04:05+00:00",
}

METADATA: dict[str, Any] = {
    "format": "sparse_delta",
    "format_version": 2,
    "kind": "sampler",
    "base_model": None,
    "model_id": None,
    "created_at": "2026-01-02T03:04:05+00:00",
    "timestamp": 1767323045.25,
    "changed_elements": 3,
    "total_elements": 10,
    "density_pct": 30.0,
    "layer_names": ["a", "b"],
    "layer_shapes": [[4], [2, 3]],
    "run_id": RUN_ID,
    "publication_id": PUBLICATION_ID,
    "version": 7,
    "base_version": 6,
    "base_state_digest": "1" * 16,
    "state_digest": "2" * 16,
    "files": [{"name": "delta.safetensors", "bytes": 100, "xxh3_128": "a" * 32}],
    "tensors": [
        {
            "name": name,
            "shape": shape,
            "dtype": dtype,
            "changed": changed,
            "encoding": "raw",
            "file": 0,
            "old_digest": "3" * 16,
            "new_digest": "4" * 16,
        }
        for name, shape, dtype, changed in (("a", [4], "BF16", 1), ("b", [2, 3], "F32", 2))
    ],
    "step": None,
    "metrics": {},
    "timings": {"diff_s": 0.5, "upload_s": 0.25},
    "writer": "tests",
}


def bent(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with the field at ``a.0.b`` set; `...` takes it away."""
    result = copy.deepcopy(fields)
    *parents, last = path.split(".")
    inner: Any = result
    for part in parents:
        inner = inner[int(part) if part.isdigit() else part]
    key: Any = int(last) if last.isdigit() else last
    if value is ...:
        del inner[key]
    else:
        inner[key] = value
    return result


def as_json(fields: dict[str, Any]) -> bytes:
    """Return the bytes."""
    return json.dumps(fields).encode()
