"""Keys in a run's folder, and the names that are refused."""

import pytest

from vllm_delta_snapshot.errors import CorruptFile, LimitExceeded
from vllm_delta_snapshot.format import layout


def test_version_keys_sort_like_numbers():
    keys = [layout.version_key(version) for version in (1, 9, 10, 99, 12345, 99_999_999)]
    assert keys == sorted(keys)


@pytest.mark.parametrize("version", [-1, 100_000_000, 2**63])
def test_version_key_out_of_range_is_beyond_the_limit(version: int):
    with pytest.raises(LimitExceeded):
        layout.version_key(version)


@pytest.mark.parametrize("version", [0, 1, 99_999_999])
def test_version_of_key_reads_what_version_key_wrote(version: int):
    assert layout.version_of_key(layout.version_key(version).split("/")[1]) == version


@pytest.mark.parametrize(
    "name",
    ["1.json", "000000001.json", "00000001.jso", "00000001.json.tmp", ".tmp-1", "00000001.json\n", "-0000001.json",
     "0000000x.json", "00000001_json", "\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.json"],
)  # fmt: skip
def test_version_of_key_of_another_name_is_none(name: str):
    assert layout.version_of_key(name) is None


def test_delta_folder_is_recognised_as_of_its_version():
    folder = layout.delta_folder(42, "3f9a1c2e" + "0" * 24)
    assert folder == "deltas/00000042-3f9a1c2e"
    assert layout.version_of_delta(folder) == 42
    assert layout.version_of_anchor(folder) is None


def test_folders_of_anchors_and_merged_deltas_are_recognised():
    anchor, merged = layout.anchor_folder(42, "3f9a1c2e" * 4), layout.merged_folder(40, 42, "3f9a1c2e" * 4)
    assert (anchor, merged) == ("anchors/00000042-3f9a1c2e", "merged/00000040-00000042-3f9a1c2e")
    assert (layout.version_of_anchor(anchor), layout.step_of_merged(merged)) == (42, (40, 42))
    assert (layout.version_of_delta(anchor), layout.step_of_merged(anchor)) == (None, None)
    assert layout.merged_of_key("00000040-00000042.json") == (40, 42)
    assert layout.merged_of_key("00000040-00000042-3f9a1c2e") is None


@pytest.mark.parametrize(
    ("number", "name"),
    [(None, "delta.safetensors"), (0, "delta-00001.safetensors"), (9, "delta-00010.safetensors"),
     (123_455, "delta-123456.safetensors")],
)  # fmt: skip
def test_payload_files_are_numbered_from_1_unless_there_is_one(number: int | None, name: str):
    assert layout.check_file_name(layout.delta_file_name(number)) == name


@pytest.mark.parametrize("name", ["delta.safetensors", "delta-00001-of-00004.safetensors", "_x", "A" * 200, "0"])
def test_plain_file_name_is_accepted(name: str):
    assert layout.check_file_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "-rf", "a/b", "/a", "a/", "../a", "a\\b", "a b", "a\n", "a\0b", "é", "A" * 201, "~a"],
    ids=repr,
)
def test_unsafe_file_name_is_corrupt(name: str):
    with pytest.raises(CorruptFile, match="unsafe file name"):
        layout.check_file_name(name)
