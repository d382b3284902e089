# SPDX-License-Identifier: Apache-2.0
"""Snapshots of models in the local cache of the Hugging Face Hub: where one lies, and how to download what is missing.

Nothing here goes to the network. A revision is a name of the Hub's ("main" is what it was when it was downloaded) or a
commit. huggingface_hub comes with transformers and vLLM; it is imported when a Hub id is looked up, and only here.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from vllm_delta_snapshot.errors import ObjectNotFound

__all__ = ["INDEX_NAME", "HubId", "cached_snapshot"]

INDEX_NAME: Final = "model.safetensors.index.json"

_ID: Final = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
_REPOSITORY: Final = "models--"
_WEIGHTS: Final = ["*.safetensors", INDEX_NAME]
_NOT_OURS: Final = ["*/*", ".*", "consolidated*", "adapter_model*"]
_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the Hub.

    Attributes:
        name: ``organization/model``.
        revision: a branch, a tag or a commit; ``None`` for ``main``.
        cache_dir: where the cache is; ``None`` for where huggingface_hub has it.
    """

    name: str
    revision: str | None = None
    cache_dir: str | None = None

    @classmethod
    def of(cls, text: str, revision: str | None = None, cache_dir: str | None = None) -> Self | None:
        """Read ``organization/model`` or ``organization/model@revision``; ``None`` if it cannot be one."""
        match = _ID.fullmatch(text)
        if match is None or ".." in (match["revision"] or ""):
            return None
        return cls(match["name"], match["revision"] or revision, cache_dir)

    @classmethod
    def of_snapshot(cls, folder: Path) -> Self | None:
        """Return what a folder of a Hub cache is a snapshot of, or belongs to; ``None`` if it is in none."""
        for place, part in enumerate(folder.parts):
            if part.startswith(_REPOSITORY):
                below = folder.parts[place + 1 :]
                revision = below[1] if len(below) > 1 and below[0] == "snapshots" else None
                return cls(part.removeprefix(_REPOSITORY).replace("--", "/", 1), revision)
        return None

    def __str__(self) -> str:
        return self.name + (f"@{self.revision}" if self.revision else "")

    @property
    def download(self) -> str:
        """The command that downloads it."""
        options = [("--revision", self.revision), ("--cache-dir", self.cache_dir)]
        words = ["hf", "download", self.name, *(word for name, value in options if value for word in (name, value))]
        return shlex.join(words)


def cached_snapshot(hub_id: HubId, folder: Path) -> Path:
    """Return the folder of a model's snapshot in the local cache. Whether all its weights are there is not looked at.

    Args:
        hub_id: the model.
        folder: what its name would be as a local folder, for messages.

    Raises:
        ObjectNotFound: it is not there; or it is known which of its files are not.
        OSError: the cache cannot be read.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ObjectNotFound(
            "no such checkpoint folder, and without huggingface_hub no Hub id can be looked up",
            file=str(folder),
            hint=f"If {hub_id} is a Hub id: pip install huggingface_hub, then {hub_id.download}",
        ) from error
    try:
        found = snapshot_download(
            hub_id.name,
            revision=hub_id.revision,
            cache_dir=hub_id.cache_dir,
            local_files_only=True,
            # What of it has to be there: engines download the weights and leave the rest.
            allow_patterns=_WEIGHTS,
            ignore_patterns=_NOT_OURS,
        )
    except HFValidationError as error:
        raise ObjectNotFound(
            "no such checkpoint folder, nor can this be a Hub id",
            file=str(folder),
            found=error,
            hint='Give a local folder with safetensors files, or a Hub id ("org/model") that was downloaded.',
        ) from error
    except LocalEntryNotFoundError as error:
        part = getattr(error, "snapshot_path", None)
        if part is not None and os.path.lexists(Path(part) / INDEX_NAME):
            return Path(part)  # the index says which files it takes, and they are looked for
        cache = Path(hub_id.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
        raise ObjectNotFound(
            f"no such checkpoint folder, nor is the model {hub_id} in the local Hub cache",
            file=str(folder),
            found=error if part is not None else _what_is_there(hub_id, cache),
            hint=f"If it is a Hub id, download it: {hub_id.download}",
        ) from error
    return Path(found).absolute()


def _what_is_there(hub_id: HubId, cache: Path) -> str:
    snapshots = cache / (_REPOSITORY + hub_id.name.replace("/", "--")) / "snapshots"
    try:
        revisions = sorted(os.listdir(snapshots))
    except (FileNotFoundError, NotADirectoryError):
        revisions = []
    if not revisions:
        return f"no snapshot of it in {cache}"
    listed = ", ".join(f"{hub_id.name}@{revision}" for revision in revisions[:_LISTED])
    return f"other revisions in {cache}: {listed}" + (" and more" if len(revisions) > _LISTED else "")
