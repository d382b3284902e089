"""Errors: their tree, their message, and the way across a process border."""

import json
import pickle

import pytest

from vllm_delta_snapshot import errors
from vllm_delta_snapshot.errors import (
    CorruptFile,
    DeltaSnapshotError,
    Recovery,
    StageError,
    VersionConflict,
    error_kind,
    error_of_fields,
)
from vllm_delta_snapshot.types import TensorSpec

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DeltaSnapshotError)),
    key=lambda kind: kind.__name__,
)
FIELDS = {"file": "a/b.json", "tensor": "model.w", "expected": 3, "found": "four", "hint": "Do this next."}


@pytest.mark.parametrize("kind", KINDS)
def test_error_pickled_keeps_kind_fields_and_message(kind: type[DeltaSnapshotError]):
    error = kind("it failed", **FIELDS)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert {name: getattr(copy, name) for name in ("what", *FIELDS)} == {"what": "it failed"} | FIELDS
    assert str(copy) == str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_error_message_carries_every_field(kind: type[DeltaSnapshotError]):
    message = str(kind("it failed", **FIELDS))
    facts = "file a/b.json, tensor model.w, expected 3, found four"
    assert message == f"it failed: {facts}. Do this next. [{kind.__name__}]"


@pytest.mark.parametrize("kind", KINDS)
def test_error_without_fields_is_only_what_failed_and_its_kind(kind: type[DeltaSnapshotError]):
    assert str(kind("it failed")) == f"it failed [{kind.__name__}]"


@pytest.mark.parametrize("kind", KINDS)
def test_error_says_how_to_recover(kind: type[DeltaSnapshotError]):
    assert isinstance(kind.recovery, Recovery)


@pytest.mark.parametrize("kind", KINDS)
def test_error_is_exported_and_drawn_in_the_tree(kind: type[DeltaSnapshotError]):
    assert kind.__name__ in errors.__all__
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("value", [0, False, "", ()])
def test_error_message_keeps_a_fact_that_is_falsy(value: object):
    assert str(CorruptFile("it failed", found=value)) == f"it failed: found {value} [CorruptFile]"


@pytest.mark.parametrize("kind", KINDS)
def test_error_kind_is_read_back_from_a_message_in_a_longer_text(kind: type[DeltaSnapshotError]):
    assert error_kind(f'{{"error": "RuntimeError: {kind("it failed", **FIELDS)} See the log."}}') is kind


def test_error_kind_of_an_error_that_wraps_another_is_its_own():
    assert error_kind(str(StageError("cannot stage", found=CorruptFile("it failed")))) is StageError


@pytest.mark.parametrize("field", ["what", "file", "tensor", "expected", "found"])
def test_error_kind_cannot_be_forged_by_a_fact(field: str):
    facts = {"what": "it failed", field: "x [WeightsUncertain]"}
    text = str(CorruptFile(facts.pop("what"), **facts))
    assert "WeightsUncertain" in text
    assert error_kind(text + " please check the stack trace") is CorruptFile


@pytest.mark.parametrize("text", ["", "it failed", "[Recovery]", "[ValueError]", "[error_kind]", "CorruptFile"])
def test_error_kind_of_another_text_is_none(text: str):
    assert error_kind(text) is None


@pytest.mark.parametrize("kind", KINDS)
def test_error_as_json_fields_comes_back(kind: type[DeltaSnapshotError]):
    error = kind("it failed", **FIELDS)
    copy = error_of_fields(json.loads(json.dumps(error.to_fields())))
    assert type(copy) is kind
    assert str(copy) == str(error)


@pytest.mark.parametrize("fields", [{}, {"kind": None}, {"kind": "ValueError"}, {"kind": "Recovery"}])
def test_error_of_unknown_fields_is_the_root(fields: dict[str, str | None]):
    assert type(error_of_fields(fields)) is DeltaSnapshotError


def test_error_with_objects_as_facts_can_be_pickled():
    error = CorruptFile("it failed", expected=TensorSpec("w", (2,), "BF16"), found=OSError(28, "disk full"))
    copy = pickle.loads(pickle.dumps(error))
    assert copy.expected == TensorSpec("w", (2,), "BF16")
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ObjectNotFound, FileNotFoundError),
        (errors.ObjectExists, FileExistsError),
        (errors.FormatError, ValueError),
        (errors.CorruptFile, ValueError),
    ],
)
def test_error_is_caught_as_its_builtin_relative(kind: type[DeltaSnapshotError], builtin: type[Exception]):
    with pytest.raises(builtin, match="it failed"):
        raise kind("it failed", file="f")


def test_error_raised_through_pickle_still_names_its_version_conflict():
    copy = pickle.loads(pickle.dumps(VersionConflict("version 3 was committed", hint="Stop one.")))
    with pytest.raises(VersionConflict, match=r"version 3 was committed\. Stop one\."):
        raise copy
