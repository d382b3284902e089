"""run.json, versions/N.json and metadata.json: strict, and every refusal names file and field."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.wire import METADATA, RUN, VERSION, as_json, bent
from vllm_delta_snapshot.errors import CorruptFile, FormatError, LimitExceeded, UnsupportedFormat
from vllm_delta_snapshot.format.metadata import DeltaMetadata, OpenRLMetadata, TensorEntry, parse_metadata
from vllm_delta_snapshot.format.run import RunInfo
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.format.wire import WireModel, parse_json

MODELS: dict[str, tuple[type[WireModel], dict[str, Any]]] = {
    "run": (RunInfo, RUN),
    "version": (VersionRecord, VERSION),
    "metadata": (DeltaMetadata, METADATA),
}
every_model = pytest.mark.parametrize(("model", "fields"), MODELS.values(), ids=MODELS)


def parse(model: type[WireModel], fields: dict[str, Any]) -> WireModel:
    found = model.from_json(as_json(fields), file="the/file.json")
    if isinstance(found, RunInfo):
        found.specs()
    return found


def refusal(model: type[WireModel], fields: dict[str, Any]) -> FormatError:
    with pytest.raises(FormatError) as caught:
        parse(model, fields)
    return caught.value


@every_model
def test_object_written_and_parsed_is_the_same(model: type[WireModel], fields: dict[str, Any]):
    parsed = parse(model, fields)
    assert model.from_json(parsed.to_json(), file="f") == parsed


@every_model
def test_object_is_written_with_the_fields_it_was_read_from(model: type[WireModel], fields: dict[str, Any]):
    assert json.loads(parse(model, fields).to_json()) == fields


@every_model
def test_unknown_field_is_corrupt_and_named(model: type[WireModel], fields: dict[str, Any]):
    error = refusal(model, fields | {"surprise": 1})
    assert isinstance(error, CorruptFile)
    assert "surprise" in str(error)
    assert error.file == "the/file.json"


@every_model
def test_every_missing_field_without_default_is_corrupt_and_named(model: type[WireModel], fields: dict[str, Any]):
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    assert required
    for name in required:
        error = refusal(model, bent(fields, name, ...))
        assert isinstance(error, CorruptFile)
        assert f"field {name}:" in str(error)


@every_model
@pytest.mark.parametrize("version", [0, 5, 99, -1, "1", None, 1.5, [1]], ids=repr)
def test_unknown_format_version_is_unsupported(model: type[WireModel], fields: dict[str, Any], version: object):
    error = refusal(model, fields | {"format_version": version})
    assert isinstance(error, UnsupportedFormat)
    assert error.file == "the/file.json"
    assert error.hint


@every_model
@pytest.mark.parametrize("name", ["other", "", None, 1], ids=repr)
def test_unknown_format_is_unsupported(model: type[WireModel], fields: dict[str, Any], name: object):
    assert isinstance(refusal(model, fields | {"format": name}), UnsupportedFormat)


@every_model
@pytest.mark.parametrize("key", ["format", "format_version"])
def test_object_that_does_not_say_what_it_is_is_unsupported(model: type[WireModel], fields: dict[str, Any], key: str):
    assert isinstance(refusal(model, bent(fields, key, ...)), UnsupportedFormat)


@every_model
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"1", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000, b'{"format": NaN}'],
    ids=lambda data: repr(data[:8]),
)
def test_bytes_that_are_no_json_object_are_corrupt(model: type[WireModel], fields: dict[str, Any], data: bytes):
    del fields
    with pytest.raises(FormatError) as caught:
        model.from_json(data, file="the/file.json")
    assert caught.value.file == "the/file.json"


@every_model
def test_object_cut_off_anywhere_is_refused(model: type[WireModel], fields: dict[str, Any]):
    data = parse(model, fields).to_json().rstrip()
    for length in range(0, len(data), 7):
        with pytest.raises(FormatError):
            model.from_json(data[:length], file="f")


@every_model
def test_object_is_immutable(model: type[WireModel], fields: dict[str, Any]):
    with pytest.raises(ValueError, match="frozen"):
        parse(model, fields).run_id = "x"


@settings(max_examples=50)
@given(st.data())
def test_any_value_in_any_field_never_crashes(data: st.DataObject):
    model, fields = data.draw(st.sampled_from(list(MODELS.values())))
    key = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
        | st.lists(st.integers() | st.text(max_size=3), max_size=3) | st.dictionaries(st.text(max_size=3), st.none())
    )  # fmt: skip
    try:
        parse(model, fields | {key: value})
    except FormatError as error:
        str(error).encode()


BAD_TEXT = [None, 1, True, [], {}, ""]
BAD_DIGESTS = [*BAD_TEXT, "0" * 15, "0" * 17, "G" * 16, "A" * 16, "0" * 16 + "\n", "\u0661" * 16, "-" + "0" * 15]
BAD_COUNTS = [None, -1, 2**63, True, False, 1.0, "1", [], 1e30]


@pytest.mark.parametrize("value", BAD_DIGESTS, ids=repr)
@pytest.mark.parametrize("field", ["base_state_digest", "state_digest"])
def test_version_with_a_bad_digest_is_corrupt(field: str, value: object):
    assert field in str(refusal(VersionRecord, bent(VERSION, field, value)))


@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("field", ["version", "base_version", "metadata_bytes", "payload_bytes", "changed_elements"])
def test_version_with_a_bad_number_is_corrupt(field: str, value: object):
    assert field in str(refusal(VersionRecord, bent(VERSION, field, value)))


@pytest.mark.parametrize(
    "folder",
    [
        "",
        ".",
        "..",
        "/etc",
        "deltas",
        "deltas/",
        "deltas/00000007",
        "deltas/00000007-",
        "deltas/00000007-0123456",
        "deltas/00000007-012345678",
        "deltas/00000007-0123456G",
        "deltas/00000008-01234567",
        "deltas/7-01234567",
        "deltas/../00000007-01234567",
        "deltas/00000007-01234567/..",
        "deltas/00000007-01234567/",
        "deltas/00000007-01234567\n",
        "/deltas/00000007-01234567",
        "../deltas/00000007-01234567",
        "x/deltas/00000007-01234567",
        "deltas//00000007-01234567",
        "deltas\\00000007-01234567",
        "deltas/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667-01234567",
    ],
    ids=repr,
)
def test_version_whose_folder_escapes_or_is_anothers_is_corrupt(folder: str):
    error = refusal(VersionRecord, bent(VERSION, "folder", folder))
    assert isinstance(error, CorruptFile)
    assert "is not a folder of version 7" in str(error)


def test_version_0_is_never_published():
    fields = bent(bent(VERSION, "version", 0), "folder", "deltas/00000000-01234567")
    assert isinstance(refusal(VersionRecord, fields), CorruptFile)


@pytest.mark.parametrize("base_version", [7, 8])
def test_version_that_does_not_follow_its_base_is_corrupt(base_version: int):
    assert "is not before version 7" in str(refusal(VersionRecord, bent(VERSION, "base_version", base_version)))


@pytest.mark.parametrize("value", ["anchor", "", None])
def test_version_of_another_kind_is_refused(value: object):
    refusal(VersionRecord, bent(VERSION, "kind", value))


@pytest.mark.parametrize("model", [RunInfo, VersionRecord, DeltaMetadata])
@pytest.mark.parametrize(
    "value",
    [*BAD_TEXT, "x", RUN["run_id"].upper(), RUN["run_id"] + "\n", RUN["run_id"][:-1], "{" + RUN["run_id"] + "}"],
)
def test_bad_run_id_is_corrupt(model: type[WireModel], value: object):
    fields = {RunInfo: RUN, VersionRecord: VERSION, DeltaMetadata: METADATA}[model]
    assert "run_id" in str(refusal(model, bent(fields, "run_id", value)))


@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("field", ["tensors.0.shape.0", "base.num_tensors", "base.total_elements"])
def test_run_with_a_bad_number_is_corrupt(field: str, value: object):
    assert isinstance(refusal(RunInfo, bent(RUN, field, value)), CorruptFile)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base.num_tensors", 3),
        ("base.total_elements", 11),
        ("tensors.1.name", "a"),
        ("tensors.1", ...),
        ("tensors.0.shape.0", 5),
    ],
)
def test_run_whose_table_does_not_fit_its_counts_is_corrupt(field: str, value: object):
    with pytest.raises(CorruptFile, match="does not fit its counts"):
        parse(RunInfo, bent(RUN, field, value))


@pytest.mark.parametrize("name", ["", "x" * 4097, None, 3])
def test_run_with_a_bad_tensor_name_is_corrupt(name: object):
    assert isinstance(refusal(RunInfo, bent(RUN, "tensors.0.name", name)), CorruptFile)


def test_run_with_an_unknown_element_type_is_unsupported():
    assert isinstance(refusal(RunInfo, bent(RUN, "tensors.0.dtype", "F4")), UnsupportedFormat)


@pytest.mark.parametrize("shape", [[2**62, 2], [2**62] * 300, [2**32, 2**32]], ids=["2", "300", "2**64"])
def test_run_with_a_tensor_past_63_bits_is_beyond_the_limit(shape: list[int]):
    assert isinstance(refusal(RunInfo, bent(RUN, "tensors.0.shape", shape)), LimitExceeded)


def test_run_with_another_digest_algorithm_is_unsupported():
    assert isinstance(refusal(RunInfo, bent(RUN, "digest_algorithm", "summix65")), UnsupportedFormat)


def test_run_specs_are_the_table_in_order():
    assert [str(spec) for spec in parse(RunInfo, RUN).specs().values()] == ["BF16[4]", "F32[2,3]"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tensors.0.name", "c", "tensors and layer_names differ"),
        ("tensors.0.shape", [5], "tensors and layer_shapes differ"),
        ("tensors.0.changed", 2, "changed_elements is not the sum"),
        ("changed_elements", 4, "changed_elements is not the sum"),
        ("tensors.1.file", 1, "a file that is not listed"),
        ("files", [], "a file that is not listed"),
        ("layer_names", ["a", "a"], "twice"),
        ("layer_names", ["a"], "layer_names"),
        ("layer_shapes", [[4]], "layer_shapes"),
        ("base_version", 7, "is not before version 7"),
        ("files.0.xxh3_128", "a" * 31, "xxh3_128"),
        ("files.0.bytes", -1, "bytes"),
        ("files.0.name", "x" * 201, "name"),
        ("tensors.0.old_digest", "x", "old_digest"),
        ("timings.diff_s", -1.0, "diff_s"),
        ("timestamp", "now", "timestamp"),
        ("metrics", {"reward": "high"}, "metrics"),
        ("version", -1, "version"),
        ("version", 100_000_000, "version"),
    ],
)
def test_metadata_that_contradicts_itself_is_corrupt(field: str, value: object, message: str):
    error = refusal(DeltaMetadata, bent(METADATA, field, value))
    assert isinstance(error, CorruptFile)
    assert message in str(error)


@pytest.mark.parametrize(("base_version", "version"), [(8, 7), (7, 0), (0, 7)])
def test_metadata_of_an_update_may_go_back_and_over_versions(base_version: int, version: int):
    fields = bent(bent(METADATA, "base_version", base_version), "version", version)
    parsed = parse(DeltaMetadata, fields)
    assert (parsed.base_version, parsed.version) == (base_version, version)


def test_metadata_of_version_2_with_two_files_is_corrupt():
    files = [METADATA["files"][0], METADATA["files"][0] | {"name": "other.safetensors"}]
    assert "exactly one file" in str(refusal(DeltaMetadata, bent(METADATA, "files", files)))


def entry(**fields: object) -> TensorEntry:
    data = as_json(METADATA["tensors"][0] | fields)
    return TensorEntry.from_json(data, file="f")


def test_tensor_that_shares_no_block_says_nothing_of_blocks():
    assert "block" not in json.loads(entry().to_json())


def test_tensor_that_shares_a_block_names_it():
    assert json.loads(entry(block=0).to_json())["block"] == 0
    assert parse(DeltaMetadata, bent(METADATA, "tensors.1.block", 0)).tensors[1].block == 0


@pytest.mark.parametrize("value", [value for value in BAD_COUNTS if value is not None], ids=repr)
def test_metadata_with_a_bad_block_is_corrupt(value: object):
    assert "block" in str(refusal(DeltaMetadata, bent(METADATA, "tensors.0.block", value)))


def test_tensor_without_an_old_digest_is_read_and_written_with_null():
    assert json.loads(entry(old_digest=None).to_json())["old_digest"] is None


def test_tensor_whose_old_digest_is_missing_is_corrupt():
    assert "old_digest" in str(refusal(DeltaMetadata, bent(METADATA, "tensors.0.old_digest", ...)))


@pytest.mark.parametrize("digest", [None, "", "x" * 16, "4" * 15, "4" * 17, "A" * 16], ids=repr)
def test_metadata_with_a_bad_new_digest_is_corrupt(digest: object):
    assert "new_digest" in str(refusal(DeltaMetadata, bent(METADATA, "tensors.0.new_digest", digest)))


@pytest.mark.parametrize(
    ("old", "new", "move"), [("3" * 16, "4" * 16, int("1" * 16, 16)), (None, "4" * 16, int("4" * 16, 16))]
)
def test_tensor_moves_the_digest_from_old_to_new(old: str | None, new: str, move: int):
    assert entry(old_digest=old, new_digest=new).moves_digest % 2**64 == move


def test_tensor_that_moves_the_digest_down_wraps():
    assert entry(old_digest="f" * 16, new_digest="0" * 16).moves_digest % 2**64 == 1


@pytest.mark.parametrize(
    ("encodings", "expected"),
    [((), False), (("raw", "packed", "bitmap", "dense"), False), (("raw", "difference"), True),
     (("raw_difference",), True)],
)  # fmt: skip
def test_run_has_differences_if_an_encoding_of_it_is_one(encodings: tuple[str, ...], expected: bool):
    assert parse(RunInfo, RUN | {"encodings": encodings}).has_differences is expected


def test_run_with_an_unknown_encoding_does_not_know_whether_it_has_differences():
    with pytest.raises(UnsupportedFormat, match="unknown encoding"):
        _ = parse(RunInfo, RUN | {"encodings": ["raw", "zip"]}).has_differences


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_metadata_with_a_number_that_is_not_finite_is_corrupt(number: bytes):
    data = as_json(METADATA).replace(b"1767323045.25", number)
    with pytest.raises(CorruptFile, match=r"timestamp|json"):
        DeltaMetadata.from_json(data, file="f")


def test_metadata_with_a_run_id_is_ours():
    assert isinstance(parse_metadata(as_json(METADATA), file="f"), DeltaMetadata)


def test_metadata_without_a_run_id_is_openrls():
    assert isinstance(parse_metadata(as_json(bent(METADATA, "run_id", ...)), file="f"), OpenRLMetadata)


def test_metadata_of_ours_with_an_unknown_field_is_not_taken_for_openrls():
    with pytest.raises(CorruptFile, match="surprise"):
        parse_metadata(as_json(METADATA | {"surprise": 1}), file="f")


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"nul", b"\xff", b"[" * 100_000], ids=lambda data: repr(data[:4]))
def test_parse_json_of_anything_but_an_object_is_corrupt(data: bytes):
    with pytest.raises(CorruptFile) as caught:
        parse_json(data, file="the/file.json")
    assert caught.value.file == "the/file.json"


@pytest.mark.parametrize("encoding", ["packed", "difference", "raw_difference"])
def test_version_2_holds_nothing_that_openrl_cannot_read(encoding: str) -> None:
    tensors = [entry | {"encoding": encoding} for entry in METADATA["tensors"]]
    parse_metadata(json.dumps(METADATA | {"format_version": 3, "tensors": tensors}).encode(), file="f")
    with pytest.raises(CorruptFile, match="the encoding raw"):
        parse_metadata(json.dumps(METADATA | {"tensors": tensors}).encode(), file="f")
