# SPDX-License-Identifier: Apache-2.0
"""Every error this project raises, grouped by what has to be done about it.

::

    DeltaSnapshotError
    |- StoreError                    the store said no
    |  |- StoreUnavailable           it may pass: try again
    |  |- ObjectNotFound             (also FileNotFoundError)
    |  |- ObjectExists               (also FileExistsError) somebody created it first
    |  `- ExclusiveCreateUnsupported two trainers could not be told apart here
    |- FormatError                   (also ValueError) bytes that are not what they should be
    |  |- UnsupportedFormat          a version, encoding or type this reader does not know
    |  |- CorruptFile                size, checksum or structure is wrong
    |  `- LimitExceeded              larger than a reader accepts
    |- ChainError                    versions that do not fit together
    |  |- BrokenChain                a version between here and there is missing
    |  |- RunMismatch                the folder belongs to another run
    |  |- BaseMismatch               the weights here are not the ones the delta starts from
    |  |- OutOfOrder                 the engine is already past the version asked for
    |  `- VersionConflict            another trainer committed this version
    |- SourceError                   the trainer's tensors do not fit the base checkpoint
    |- NotPublished                  skipped, abandoned or not committed yet; the next publication carries it
    |- RankFailed                    another of the trainer's processes failed or is gone
    |- StageError                    staging failed or did not end in time
    |  |- NotStaged                  not there yet; ask again
    |  `- MirrorBusy                 a worker reads the mirror just now; try again
    |- ApplyError                    the engine cannot take this update; its weights are unchanged
    |  |- NotInitialized             the engine follows nothing yet, or was restarted
    |  |- TensorRefused              named tensors that no way can serve
    |  `- WeightsUncertain           half applied and not undone: never resume this worker
    |- VerifyError                   the weights are not what they should be
    `- CompatibilityError            a missing extra, or a vLLM that does not fit

A message says what failed, on which file and tensor, what was expected and found, and what to do next. The same facts
are attributes. It ends with the name of its class in brackets, because that is all that survives vLLM's way from a
worker to an HTTP answer; `error_kind` reads it back. Nothing else of a message is ever matched.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, ClassVar, Final

__all__ = [
    "ApplyError",
    "BaseMismatch",
    "BrokenChain",
    "ChainError",
    "CompatibilityError",
    "CorruptFile",
    "DeltaSnapshotError",
    "ExclusiveCreateUnsupported",
    "FormatError",
    "LimitExceeded",
    "MirrorBusy",
    "NotInitialized",
    "NotPublished",
    "NotStaged",
    "ObjectExists",
    "ObjectNotFound",
    "OutOfOrder",
    "RankFailed",
    "Recovery",
    "RunMismatch",
    "SourceError",
    "StageError",
    "StoreError",
    "StoreUnavailable",
    "TensorRefused",
    "UnsupportedFormat",
    "VerifyError",
    "VersionConflict",
    "WeightsUncertain",
    "error_kind",
    "error_of_fields",
]

_KIND: Final = re.compile(r"\[([A-Z]\w+)\]")


class Recovery(Enum):
    """What gets a caller past an error."""

    RETRY = "retry"
    REFETCH = "refetch"
    REPUBLISH = "republish"
    REPLACE_WORKER = "replace the worker"
    FIX_SETUP = "fix the set-up"


class DeltaSnapshotError(Exception):
    """The root of the tree.

    Args:
        what: what failed, lower case, without a full stop.
        file: the file or object concerned.
        tensor: the checkpoint name of the tensor concerned.
        expected: what should have been there.
        found: what was there.
        hint: the next thing to do or command to run, a sentence.
    """

    recovery: ClassVar[Recovery] = Recovery.FIX_SETUP

    def __init__(
        self,
        what: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.file = file
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(self._message())

    def _message(self) -> str:
        fields = {"file": self.file, "tensor": self.tensor, "expected": self.expected, "found": self.found}
        given = ((name, value) for name, value in fields.items() if value is not None)
        facts = ", ".join(f"{name} {_without_kinds(value)}" for name, value in given)
        what = _without_kinds(self.what)
        message = f"{what}: {facts}" if facts else what
        message = f"{message}. {self.hint}" if self.hint else message
        return f"{message} [{type(self).__name__}]"

    def to_fields(self) -> dict[str, str | None]:
        """Return kind and fields as strings: for JSON, and for `error_of_fields`."""
        fields = {name: getattr(self, name) for name in ("what", "file", "tensor", "expected", "found", "hint")}
        return {"kind": type(self).__name__} | {k: None if v is None else str(v) for k, v in fields.items()}

    def placed(self, *, file: str, hint: str) -> DeltaSnapshotError:
        """Return this error with a file and a hint, where it has none of its own."""
        fields = {name: getattr(self, name) for name in ("tensor", "expected", "found")}
        placed = type(self)(self.what, file=self.file or file, hint=self.hint or hint, **fields)
        placed.__cause__ = self
        return placed

    def moved(self, local: str, where: str, *, hint: str) -> DeltaSnapshotError:
        """Return this error with the store's object in the place of the local copy that it was found in.

        Args:
            local: the folder of the copies, which may be gone when somebody reads this.
                Errors without a file are of it.
            where: what they are copies of.
            hint: what to do, where it says nothing itself.
        """
        file = None if self.file is None else str(self.file)
        if file is None or file.startswith(local):
            file = where + (file or local).removeprefix(local)
        fields = {name: getattr(self, name) for name in ("tensor", "expected", "found")}
        return type(self)(self.what, file=file, hint=self.hint or hint, **fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (a stager's report, an engine's reply); keep the fields with them.
        fields = {key: getattr(self, key) for key in ("file", "tensor", "expected", "found", "hint")}
        return _rebuild, (type(self), self.what, fields)


def _rebuild(kind: type[DeltaSnapshotError], what: str, fields: dict[str, Any]) -> DeltaSnapshotError:
    return kind(what, **fields)


def _without_kinds(fact: object) -> str:
    # A fact may come from anywhere; it must not look like the name of an error.
    return _KIND.sub(lambda match: f"({match[1]})", str(fact))


def error_kind(text: str) -> type[DeltaSnapshotError] | None:
    """Return the class of the error whose message is in `text`; the last, if there are several."""
    for name in reversed(_KIND.findall(text)):
        kind = _kind_of(name)
        if kind is not None:
            return kind
    return None


def _kind_of(name: str) -> type[DeltaSnapshotError] | None:
    kind = globals().get(name) if name in __all__ else None
    return kind if isinstance(kind, type) and issubclass(kind, DeltaSnapshotError) else None


def error_of_fields(fields: dict[str, str | None]) -> DeltaSnapshotError:
    """Rebuild an error from `DeltaSnapshotError.to_fields`; an unknown kind becomes the root of the tree."""
    kind = _kind_of(fields.get("kind") or "") or DeltaSnapshotError
    rest = {name: fields.get(name) for name in ("file", "tensor", "expected", "found", "hint")}
    return kind(fields.get("what") or "unknown error", **rest)


class StoreError(DeltaSnapshotError):
    """The store refused or failed an operation."""


class StoreUnavailable(StoreError):
    """The store could not be reached, or failed in a way that may pass."""

    recovery = Recovery.RETRY


class ObjectNotFound(StoreError, FileNotFoundError):
    """An object that should be in the store is not."""


class ObjectExists(StoreError, FileExistsError):
    """An exclusive create lost: the object exists."""


class ExclusiveCreateUnsupported(StoreError):
    """This store cannot create an object exclusively."""


class FormatError(DeltaSnapshotError, ValueError):
    """Bytes that are not in the format they claim."""

    recovery = Recovery.REFETCH


class UnsupportedFormat(FormatError):
    """A format version, encoding or element type that this reader does not know."""

    recovery = Recovery.FIX_SETUP


class CorruptFile(FormatError):
    """A file whose size, checksum, structure or content is wrong."""


class LimitExceeded(FormatError):
    """A size or count beyond what a reader accepts before it allocates."""


class ChainError(DeltaSnapshotError):
    """Versions that do not fit together."""


class BrokenChain(ChainError):
    """A version that is needed is missing, or does not continue the one before it."""


class RunMismatch(ChainError):
    """The folder, file or engine belongs to another run."""


class BaseMismatch(ChainError):
    """The weights at hand are not the ones that the delta was made against."""


class OutOfOrder(ChainError):
    """The engine already has a later version than the one asked for."""


class VersionConflict(ChainError):
    """Another trainer committed this version first."""


class SourceError(DeltaSnapshotError):
    """The trainer's tensors do not fit the base checkpoint."""


class NotPublished(DeltaSnapshotError):
    """There is no such version, at least not yet: the call was skipped or abandoned, or still runs."""

    recovery = Recovery.REPUBLISH


class RankFailed(DeltaSnapshotError):
    """Another of the trainer's processes failed, or is gone. Nothing is lost: the next publication carries it."""


class StageError(DeltaSnapshotError):
    """Staging failed."""

    recovery = Recovery.RETRY


class NotStaged(StageError):
    """The version is not staged yet."""


class MirrorBusy(StageError):
    """The mirror cannot be written while a worker reads it, or another process writes it."""


class ApplyError(DeltaSnapshotError):
    """The engine did not take the update; its weights are what they were."""


class NotInitialized(ApplyError):
    """The engine's weight transfer was not initialized, or not since the engine was started."""


class TensorRefused(ApplyError):
    """Tensors that this engine has no exact way to update."""


class WeightsUncertain(ApplyError):
    """Some weights were written and could not be put back: the worker must not serve again."""

    recovery = Recovery.REPLACE_WORKER


class VerifyError(DeltaSnapshotError):
    """Weights are not what the publication says they are."""


class CompatibilityError(DeltaSnapshotError):
    """A missing extra, or a vLLM that does not fit: its version, or how it was started."""
