# SPDX-License-Identifier: Apache-2.0
"""How to reach an object store: what credentials do not say. By argument, else environment, else file, else defaults.

Credentials are not here: boto3 and google-cloud-storage find them where they always do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.store.secrets import refuse_credentials

__all__ = ["StoreConfig"]

_PREFIX: Final = "DELTA_SNAPSHOT_STORE_"
_FILE: Final = f"{_PREFIX}CONFIG"


class StoreConfig(BaseModel):
    """See the module.

    A field is set by ``DELTA_SNAPSHOT_STORE_<NAME>``, or in the JSON file that ``DELTA_SNAPSHOT_STORE_CONFIG`` names.

    Attributes:
        endpoint_url: of an S3-compatible store (MinIO, Ceph, R2), or of another GCS; by default the vendor's.
        region: the bucket's; by default what the vendor's own configuration says.
        path_style: whether the bucket is in the path and not in the host name; ``None``: if there is an `endpoint_url`.
        anonymous: whether to send no credentials.
        connect_timeout_s: for a connection.
        read_timeout_s: for an answer, and between any two bytes of one.
        attempts: how often a request that may pass is made, with back-off and jitter.
        concurrency: how many parts are on their way at once.
        part_bytes: how large a part is, up, and down as well if it is small: memory is this many bytes times
            `concurrency`.
        checksums: ``when_supported`` has the vendor's library add checksums of its own; ``when_required`` is for
            S3-compatible stores that do not know them. Ours are always compared. ``auto``: by whether there is an
            `endpoint_url`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None
    anonymous: bool = False
    connect_timeout_s: float = Field(default=10.0, gt=0)
    read_timeout_s: float = Field(default=60.0, gt=0)
    attempts: int = Field(default=5, ge=1, le=20)
    concurrency: int = Field(default=8, ge=1, le=64)
    part_bytes: int = Field(default=16 << 20, ge=5 << 20, le=1 << 30)
    checksums: Literal["auto", "when_supported", "when_required"] = "auto"

    @classmethod
    def load(cls, **given: Any) -> StoreConfig:
        """Return the configuration that holds here.

        Args:
            given: fields that come before environment and file; ``None`` for those that do not.

        Raises:
            CorruptFile: a field or the file is wrong; names it and where it was set.
            StoreError: the endpoint's URL holds credentials.
        """
        path = os.environ.get(_FILE)
        fields = {} if path is None else _read(Path(path))
        fields |= {
            name: os.environ[_PREFIX + name.upper()]
            for name in cls.model_fields
            if _PREFIX + name.upper() in os.environ
        }
        fields |= {name: value for name, value in given.items() if value is not None}
        if isinstance(fields.get("endpoint_url"), str):
            refuse_credentials(fields["endpoint_url"], "endpoint_url")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise CorruptFile(
                f"store configuration: {name}: {first['msg']}",
                file=path,
                expected=" ".join(sorted(cls.model_fields)) if first["type"] == "extra_forbidden" else None,
                found=None if _may_be_secret(name) else repr(first["input"])[:200],
                hint=f"It is set by an argument, by {_PREFIX}{name.upper()}, or in the file that {_FILE} names.",
            ) from error


def _may_be_secret(name: str) -> bool:
    """Say whether a value may be one that no message shows: an address, or a field that is none of ours."""
    return name == "endpoint_url" or name not in StoreConfig.model_fields


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CorruptFile("store configuration cannot be read", file=str(path), found=error) from error
    if not isinstance(fields, dict):
        raise CorruptFile("store configuration is no JSON object", file=str(path), found=type(fields).__name__)
    return fields
