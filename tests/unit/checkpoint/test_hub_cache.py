"""A Hub id is found in the local cache, at the revision that was asked for, or it is said how to download it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.hub import COMMIT, cached, list_files
from tests.support.users import as_nobody, open_folder
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.base_folder import find_base
from vllm_delta_snapshot.checkpoint.hub_cache import HubId
from vllm_delta_snapshot.errors import ObjectNotFound, StoreError

OTHER = "f" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the Hub's cache is, which this process would use; the working folder has no folder of that name."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(cache: Path, seed: int = 0, commit: str = COMMIT, refs: tuple[str, ...] = ("main",), shards: int = 1) -> Path:
    folder = write_checkpoint(cache.parent / f"files {commit} {shards}", tiny_tensors(seed), shards=shards)
    return cached(cache, folder, commit=commit, refs=refs)


@pytest.mark.parametrize("shards", [1, 3])
def test_hub_id_is_the_snapshot_of_main(cache: Path, tmp_path: Path, shards: int):
    snapshot = put(cache, shards=shards)
    checkpoint = Checkpoint("org/model")
    assert checkpoint.folder == snapshot
    assert checkpoint.state_digest == Checkpoint(write_checkpoint(tmp_path / "same", tiny_tensors())).state_digest


def test_revision_is_a_branch_a_tag_or_a_commit(cache: Path):
    main, other = put(cache), put(cache, 1, OTHER, ("v2", "main-2"))
    assert main != other
    assert find_base("org/model@main") == find_base(f"org/model@{COMMIT}") == find_base("org/model") == main
    assert find_base("org/model@v2") == find_base(f"org/model@{OTHER}") == other
    assert find_base("org/model", revision="v2") == other
    assert find_base("org/model@main", revision="v2") == main


def test_cache_may_be_elsewhere(cache: Path, tmp_path: Path):
    snapshot = put(tmp_path / "there")
    assert find_base("org/model", cache_dir=str(tmp_path / "there")) == snapshot
    with pytest.raises(ObjectNotFound):
        find_base("org/model")


def test_folder_of_that_name_goes_first(cache: Path, tmp_path: Path):
    put(cache)
    Path("org/model").mkdir(parents=True)
    assert find_base("org/model") == tmp_path / "empty" / "org" / "model"


def test_path_is_never_a_hub_id(cache: Path):
    put(cache)
    for given in (Path("org/model"), "./org/model", "org/model/"):
        with pytest.raises(ObjectNotFound, match="no such checkpoint folder"):
            find_base(given)


@pytest.mark.parametrize(
    ("given", "options", "command"),
    [
        ("org/model", {}, "hf download org/model"),
        ("gpt2", {}, "hf download gpt2"),
        ("org/model@v2", {}, "hf download org/model --revision v2"),
        ("org/model", {"cache_dir": "/a b"}, "hf download org/model --cache-dir '/a b'"),
    ],
)
def test_what_is_not_there_says_how_to_download_it(cache: Path, given: str, options: dict[str, str], command: str):
    with pytest.raises(ObjectNotFound, match=f"nor is the model {given} in the local Hub cache") as caught:
        find_base(given, **options)
    assert str(caught.value.hint).endswith(f": {command}")
    assert "no snapshot of it in" in str(caught.value.found)
    assert caught.value.file == str(Path(given).absolute())


def test_revision_that_is_not_there_says_which_are(cache: Path):
    put(cache)
    put(cache, 1, OTHER, ())
    with pytest.raises(ObjectNotFound) as caught:
        find_base("org/model@v9")
    assert str(caught.value.found).endswith(f": org/model@{COMMIT}, org/model@{OTHER}")


def test_reference_to_a_snapshot_that_was_deleted_is_not_found(cache: Path):
    put(cache).rename(cache / "gone")
    with pytest.raises(ObjectNotFound, match="hf download org/model"):
        find_base("org/model")


@pytest.mark.parametrize("given", ["a--b/c", "org/model.git", "org/.model", "a/b/c", "x" * 97, "org/model@../../x"])
def test_text_that_can_be_no_hub_id_is_a_typed_error(cache: Path, given: str):
    with pytest.raises(ObjectNotFound, match="no such checkpoint folder") as caught:
        find_base(given)
    assert "Give a local folder" in str(caught.value.hint)


def test_engines_that_leave_the_readme_on_the_hub_have_a_whole_checkpoint(cache: Path):
    snapshot = put(cache)
    list_files(snapshot, ["README.md", "model.safetensors", "original/model.safetensors", "consolidated.safetensors"])
    assert find_base("org/model") == snapshot


def test_download_that_was_cut_off_is_not_whole(cache: Path):
    snapshot = put(cache)
    list_files(snapshot, ["model.safetensors", "more.safetensors"])
    with pytest.raises(ObjectNotFound, match=r"more\.safetensors") as caught:
        Checkpoint("org/model")
    assert str(caught.value.hint).endswith("hf download org/model")


def test_files_that_the_index_does_not_name_may_be_missing_and_others_may_not(cache: Path):
    snapshot = put(cache, shards=2)
    list_files(snapshot, [*(path.name for path in snapshot.iterdir()), "model.fp32.safetensors"])
    assert Checkpoint("org/model").folder == snapshot
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ObjectNotFound, match="model-00002-of-00002") as caught:
        Checkpoint("org/model")
    assert f"hf download org/model --revision {COMMIT}" in str(caught.value.hint)


def test_blob_that_was_deleted_is_a_missing_file(cache: Path):
    snapshot = put(cache)
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(ObjectNotFound, match="Download the rest"):
        Checkpoint("org/model")


def test_cache_that_may_not_be_read_is_a_typed_error(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub._snapshot_download  # noqa: F401 - nobody may not be able to import it

    with open_folder() as folder:
        monkeypatch.chdir(folder)
        snapshot = cached(folder / "cache", write_checkpoint(folder / "files", tiny_tensors()))
        (snapshot.parents[1] / "refs" / "main").chmod(0)
        with as_nobody(), pytest.raises(StoreError, match="may not be read") as caught:
            find_base("org/model", cache_dir=str(folder / "cache"))
    assert not isinstance(caught.value, ObjectNotFound)


def test_without_huggingface_hub_the_error_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ObjectNotFound, match="without huggingface_hub") as caught:
        find_base("org/model")
    assert "pip install huggingface_hub, then hf download org/model" in str(caught.value.hint)


def test_snapshot_says_of_what_it_is():
    folder = Path("/cache/hub/models--org--a-model")
    assert HubId.of_snapshot(folder / "snapshots" / COMMIT) == HubId("org/a-model", COMMIT)
    assert HubId.of_snapshot(folder) == HubId.of_snapshot(folder / "blobs") == HubId("org/a-model")
    assert HubId.of_snapshot(Path("/cache/hub/models--gpt2/snapshots/main")) == HubId("gpt2", "main")
    assert HubId.of_snapshot(Path("/models/base")) is None


def test_engine_finds_its_checkpoint_in_the_same_way(cache: Path, tmp_path: Path):
    compat = pytest.importorskip("vllm_delta_snapshot.engine.compat")
    main, other = put(cache), put(cache, 1, OTHER, ("v2",))
    there = put(tmp_path / "there")

    def found(model: str, given: str | None, revision: str | None = None, cache_dir: Path | None = None) -> Path:
        load = SimpleNamespace(download_dir=None if cache_dir is None else str(cache_dir))
        folder = compat.checkpoint_folder(SimpleNamespace(model=model, revision=revision), load, given)
        assert isinstance(folder, Path)
        return folder

    assert found("org/model", None) == main
    assert found("org/model", None, "v2") == found("org/model", "org/model", "v2") == other
    assert found("org/model", None, None, tmp_path / "there") == there
    # What the user names is not the model that the engine's own options are about.
    assert found(str(tmp_path), "org/model", "v2", tmp_path / "there") == main
    assert found("org/model", str(there)) == there
    with pytest.raises(ObjectNotFound, match="the checkpoint of this engine is not a local folder") as caught:
        found("org/other", None, "v2")
    assert "hf download org/other --revision v2" in str(caught.value.hint)
    assert '{"checkpoint": "/path"}' in str(caught.value.hint)
