# SPDX-License-Identifier: Apache-2.0
"""Verify a foreign chain against its base: all that its format lets one check, and a list of what it does not.

Goes on after a problem where it can: a tensor that went wrong is not followed further, and after a delta that cannot be
opened no values are known. Reads every byte; writes nothing. Keeps the touched tensors of a SkyRL chain in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import CorruptFile, DeltaSnapshotError, StoreUnavailable
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.metadata import LAYER_NAMES_KEY, OpenRLMetadata
from vllm_delta_snapshot.format.openrl_write import is_openrl_tensor
from vllm_delta_snapshot.format.safetensors_io import MappedFile
from vllm_delta_snapshot.interop.chain import FolderKind, ForeignChain, ForeignDelta
from vllm_delta_snapshot.interop.replay import Overlay, open_linked, read_openrl
from vllm_delta_snapshot.interop.skyrl import SkyRLDelta
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["ForeignProblem", "ForeignVerification", "verify_chain"]

Progress = Callable[[int, int], None]
"""Called with (deltas done, deltas in all)."""

_OPENRL_HAS_NOT = (
    "whether a file was damaged: OpenRL's deltas have no checksums",
    "whether a delta belongs to these weights: it does not say what it starts from",
    "whether deltas are missing or out of order: they have no numbers",
)


@dataclass(frozen=True, slots=True)
class ForeignProblem:
    """Something wrong with one delta."""

    delta: ForeignDelta
    error: DeltaSnapshotError


@dataclass(slots=True)
class ForeignVerification:
    """What was found.

    Attributes:
        kind: what the deltas are, for people.
        version: the version that they lead to; ``None`` for OpenRL.
        deltas: how many were looked at.
        payload_bytes: bytes of payload of those that could be opened.
        changed_elements: elements that change, of all tensors found good.
        problems: what is wrong, in the order of the chain.
        not_checked: what could not be checked, in words.
    """

    kind: str
    version: int | None
    deltas: int
    payload_bytes: int = 0
    changed_elements: int = 0
    problems: list[ForeignProblem] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_chain(chain: ForeignChain, base: Checkpoint, *, progress: Progress | None = None) -> ForeignVerification:
    """Look at every delta of a chain. Blocks.

    Args:
        chain: the chain.
        base: the checkpoint that it starts from.
        progress: told after every delta.

    Returns:
        What was found; problems are in it, not raised.

    Raises:
        StoreUnavailable: a file could not be read.
    """
    found = ForeignVerification(chain.kind.value, chain.version, len(chain.deltas))
    checks = _SkyRL(base, found) if chain.kind is FolderKind.SKYRL else _OpenRL(base, found)
    for done, delta in enumerate(chain.deltas, start=1):
        try:
            checks.check(delta)
        except StoreUnavailable:
            raise
        except DeltaSnapshotError as error:
            found.problems.append(ForeignProblem(delta, error))
        if progress:
            progress(done, len(chain.deltas))
    found.not_checked.extend(checks.not_checked())
    return found


class _SkyRL:
    """Follows a SkyRL chain tensor by tensor as far as it is good."""

    def __init__(self, base: Checkpoint, found: ForeignVerification) -> None:
        self._base = base
        self._found = found
        self._overlay = Overlay(base)
        self._touched: set[str] = set()
        self._lost: set[str] = set()
        self._is_broken = False

    def check(self, delta: ForeignDelta) -> None:
        try:
            opened = open_linked(delta, self._base.specs)
        except DeltaSnapshotError:
            self._is_broken = True
            raise
        self._found.payload_bytes += opened.payload_bytes
        self._touched |= opened.specs.keys()
        if self._is_broken:
            self._found.not_checked.append(f"checksums of {delta}: what it starts from is damaged")
            return
        unknown = sum(not self._follow(delta, opened, name) for name in opened.specs)
        if unknown:
            self._found.not_checked.append(f"tensors of {delta} that were damaged before ({unknown})")

    def not_checked(self) -> Iterable[str]:
        untouched = [name for name, spec in self._base.specs.items() if spec.numel and name not in self._touched]
        if untouched:
            yield f"tensors that no delta changes ({len(untouched)}): SkyRL has checksums of changed tensors only"

    def _follow(self, delta: ForeignDelta, opened: SkyRLDelta, name: str) -> bool:
        """Check one tensor; say whether it could be."""
        if name in self._lost:
            return False
        try:
            patch = opened.patch(name, self._overlay.bits(name))
        except CorruptFile as error:
            self._lost.add(name)
            self._found.problems.append(ForeignProblem(delta, error))
        else:
            self._overlay.write(patch)
            self._found.changed_elements += patch.changed
        return True


class _OpenRL:
    """Checks OpenRL deltas one by one: each stands alone."""

    def __init__(self, base: Checkpoint, found: ForeignVerification) -> None:
        self._base = base
        self._found = found

    def not_checked(self) -> Iterable[str]:
        return _OPENRL_HAS_NOT

    def check(self, delta: ForeignDelta) -> None:
        metadata, patches = read_openrl(delta, self._base.specs)
        path = delta.folder / layout.delta_file_name(None)
        self._found.payload_bytes += path.stat().st_size
        _check_counted(delta, metadata, patches)
        _check_names(metadata, MappedFile(path))
        for patch in patches:
            _check_float(patch, str(path))
        self._found.changed_elements += sum(patch.changed for patch in patches)


def _check_counted(delta: ForeignDelta, metadata: OpenRLMetadata, patches: list[TensorPatch]) -> None:
    found = sum(patch.changed for patch in patches)
    if "changed_elements" in metadata.model_fields_set and metadata.changed_elements != found:
        raise CorruptFile(
            "changed_elements is not the number of positions",
            file=str(delta.folder / layout.METADATA_NAME),
            expected=metadata.changed_elements,
            found=found,
            hint="metadata.json and delta.safetensors are perhaps of different deltas.",
        )


def _check_names(metadata: OpenRLMetadata, mapped: MappedFile) -> None:
    """Compare the names in the payload's header, which OpenRL writes too, with those in metadata."""
    text = mapped.metadata.get(LAYER_NAMES_KEY)
    expected = list(metadata.layer_names)
    if text is not None and _parsed(text) != expected:
        raise CorruptFile(
            "the payload is of other tensors than metadata.json says",
            file=str(mapped.path),
            expected=json.dumps(expected)[:200],
            found=text[:200],
            hint="metadata.json and delta.safetensors are perhaps of different deltas.",
        )


def _check_float(patch: TensorPatch, file: str) -> None:
    if not is_openrl_tensor(patch.spec):
        raise CorruptFile(
            "values of a type that OpenRL's deltas do not have",
            file=file,
            tensor=patch.spec.name,
            expected="floating point",
            found=patch.spec,
            hint="OpenRL's own reader refuses it.",
        )


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
