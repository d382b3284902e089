"""What a base may be called, and that it means one folder, whoever asks and from wherever."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.users import as_nobody, open_folder
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.base_folder import find_base, is_folder, reading
from vllm_delta_snapshot.errors import CorruptFile, ObjectNotFound, StoreError


@pytest.mark.parametrize("given", ["base", "./base", "sub/../base", "~/base", Path("base"), Path("~/base")])
def test_base_by_whatever_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | Path):
    (tmp_path / "base").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = find_base(given)
    assert found.is_absolute()
    assert found.samefile(tmp_path / "base")
    assert "~" not in str(found)


def test_links_stay(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert find_base(tmp_path / "link") == tmp_path / "link"


def test_checkpoint_opened_by_a_relative_path_says_an_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_checkpoint(tmp_path / "base", tiny_tensors())
    monkeypatch.chdir(tmp_path)
    assert Checkpoint("base").folder == tmp_path / "base"


def test_file_is_no_checkpoint_and_its_folder_is_named(tmp_path: Path):
    path = write_checkpoint(tmp_path / "base", tiny_tensors()) / "model.safetensors"
    with pytest.raises(ObjectNotFound, match="a file, not a folder") as caught:
        find_base(path)
    assert caught.value.file == str(path)
    assert str(tmp_path / "base") in str(caught.value.hint)


def test_path_through_a_file_is_not_found(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ObjectNotFound, match="no such checkpoint folder"):
        find_base(tmp_path / "file" / "base")


def test_link_to_nothing_is_not_found_and_says_to_where(tmp_path: Path):
    (tmp_path / "base").symlink_to("/models/gone")
    with pytest.raises(ObjectNotFound, match="a link to /models/gone, which is not there"):
        find_base(tmp_path / "base")


def test_link_in_a_circle_is_not_found(tmp_path: Path):
    (tmp_path / "base").symlink_to("base")
    with pytest.raises(ObjectNotFound, match="link to base"):
        find_base(tmp_path / "base")


@pytest.mark.parametrize("given", ["", "~no-such-user-here/base", "ba\0se", "x" * 5000])
def test_text_that_is_no_path_is_a_typed_error(given: str):
    with pytest.raises(ObjectNotFound, match="Give a local folder"):
        find_base(given)


def test_empty_text_is_not_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_checkpoint(tmp_path, tiny_tensors())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ObjectNotFound, match="no checkpoint was named"):
        Checkpoint("")


@pytest.mark.parametrize("given", ["s3://bucket/base", "file:///models/base", "hf://org/model"])
def test_address_is_no_base(given: str):
    with pytest.raises(ObjectNotFound, match="a local folder") as caught:
        find_base(given)
    assert caught.value.file == given


@pytest.mark.parametrize("closed", ["the folder", "above it", "the index", "a shard"])
def test_checkpoint_that_may_not_be_read_is_a_typed_error_that_says_what(closed: str):
    with open_folder() as folder:
        base = write_checkpoint(folder / "above" / "base", tiny_tensors(), shards=2)
        place = {
            "the folder": base,
            "above it": base.parent,
            "the index": base / "model.safetensors.index.json",
            "a shard": base / "model-00002-of-00002.safetensors",
        }[closed]
        for path in base.iterdir():
            path.chmod(0o644)
        place.chmod(0)
        with as_nobody(), pytest.raises(StoreError, match="may not be read") as caught:
            Checkpoint(base)
        place.chmod(0o700)
    assert not isinstance(caught.value, ObjectNotFound)
    assert str(caught.value.file).startswith(str(place))
    assert "the right to read it" in str(caught.value.hint)


def test_whether_there_is_a_folder_is_known_or_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert is_folder(tmp_path)
    assert not any(map(is_folder, (tmp_path / "none", tmp_path / "file", tmp_path / "file" / "below")))
    with open_folder() as folder:
        (folder / "closed" / "base").mkdir(parents=True)
        (folder / "closed").chmod(0)
        with as_nobody(), pytest.raises(StoreError, match="may not be read"):
            is_folder(folder / "closed" / "base")


@pytest.mark.parametrize(
    ("number", "kind", "what"),
    [
        (errno.ENOENT, ObjectNotFound, "is not there"),
        (errno.ELOOP, ObjectNotFound, "is not there"),
        (errno.EIO, StoreError, "cannot be read"),
        (errno.ESTALE, StoreError, "cannot be read"),
        (errno.EMFILE, StoreError, "cannot be read"),
    ],
)
def test_what_the_system_says_is_typed(number: int, kind: type[StoreError], what: str):
    with pytest.raises(kind, match=what) as caught, reading("/models/base"):
        raise OSError(number, "said")
    assert type(caught.value) is kind
    assert (caught.value.file, caught.value.found) == ("/models/base", "said")


def test_our_own_errors_pass():
    for error in (ObjectNotFound("a"), CorruptFile("b"), StoreError("c")):
        with pytest.raises(type(error)) as caught, reading("/models/base"):
            raise error
        assert caught.value is error
