"""Fetch: only whole and right files appear under their names."""

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import snapshot_of
from tests.support.faults import FaultyStore, When
from tests.support.runs import TinyRun, copy_of, edit_metadata, make_run
from vllm_delta_snapshot.errors import CorruptFile, StageError, StoreUnavailable
from vllm_delta_snapshot.runs.fetch import fetch
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.store.posix import PosixStore


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 1, max_file_bytes=40)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def bring(run: TinyRun, local: Path, store: Store | None = None) -> list[Path]:
    return fetch(store or PosixStore(run.sync_dir), run.record(1), run.metadata(1), local)


def last_file(run: TinyRun) -> Path:
    return run.sync_dir / run.record(1).folder / run.metadata(1).files[-1].name


def test_fetched_files_are_those_of_the_store(run: TinyRun, local: Path):
    paths = bring(run, local)
    assert len(paths) > 1
    assert [p.name for p in paths] == [entry.name for entry in run.metadata(1).files]
    assert [p.read_bytes() for p in paths] == [
        (run.sync_dir / run.record(1).folder / p.name).read_bytes() for p in paths
    ]


def test_fetch_leaves_nothing_else_behind(run: TinyRun, local: Path):
    names = sorted(path.name for path in bring(run, local))
    assert sorted(snapshot_of(local)) == names


def test_fetch_of_an_empty_file_makes_it(run: TinyRun, local: Path):
    last_file(run).write_bytes(b"")
    files = json.loads((last_file(run).parent / "metadata.json").read_text())["files"]
    files[-1] |= {"bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
    edit_metadata(run, 1, files=files)
    assert bring(run, local)[-1].read_bytes() == b""


@pytest.mark.parametrize("place", [0, 8, 100, -1])
def test_file_with_a_flipped_byte_is_corrupt_and_named(run: TinyRun, local: Path, place: int):
    path = last_file(run)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match="wrong checksum") as caught:
        bring(run, local)
    assert caught.value.file == str(path)


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b""], ids=["cut", "grown", "empty"]
)
def test_file_of_another_size_is_corrupt_and_named(run: TinyRun, local: Path, change):
    path = last_file(run)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CorruptFile, match="wrong size") as caught:
        bring(run, local)
    assert caught.value.file == str(path)


class Shrinking(FaultyStore):
    """A store whose objects are shorter than it says."""

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        return 0 if offset else super().read_range(key, offset, into[:10])


def test_file_that_ends_early_while_it_is_read_is_corrupt(run: TinyRun, local: Path):
    with pytest.raises(CorruptFile, match="cut off"):
        bring(run, local, Shrinking(PosixStore(run.sync_dir)))


def test_file_that_is_missing_is_corrupt_and_named(run: TinyRun, local: Path):
    path = last_file(run)
    path.unlink()
    with pytest.raises(CorruptFile, match="version 1 is committed but a file is missing") as caught:
        bring(run, local)
    assert caught.value.file == str(path)


def test_file_that_is_wrong_does_not_appear_under_its_name(run: TinyRun, local: Path):
    path = last_file(run)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CorruptFile):
        bring(run, local)
    assert path.name not in snapshot_of(local)
    assert all(not name.endswith(".part") for name in snapshot_of(local))


@pytest.mark.parametrize("when", list(When))
def test_store_that_fails_at_any_operation_leaves_no_wrong_file(run: TinyRun, tmp_path: Path, when: When):
    counting = FaultyStore(PosixStore(run.sync_dir))
    good = {path.name: path.read_bytes() for path in bring(run, tmp_path / "good", counting)}
    for at in range(len(counting.log)):
        local = tmp_path / f"local-{at}"
        with pytest.raises(StoreUnavailable):
            bring(run, local, FaultyStore(PosixStore(run.sync_dir), at, when=when))
        found = snapshot_of(local)
        assert found == {name: data for name, data in good.items() if name in found}
        bring(run, local)
        assert snapshot_of(local) == good


def test_intact_local_copies_are_kept_and_not_read_again(run: TinyRun, local: Path):
    paths = bring(run, local)
    before = [path.stat().st_ino for path in paths]
    store = FaultyStore(PosixStore(run.sync_dir))
    bring(run, local, store)
    assert store.log == []
    assert [path.stat().st_ino for path in paths] == before


@pytest.mark.parametrize("damage", [b"", b"x" * 10, None], ids=["empty", "short", "flipped"])
def test_damaged_local_copy_is_fetched_again(run: TinyRun, local: Path, damage: bytes | None):
    first, *_ = bring(run, local)
    good = first.read_bytes()
    first.write_bytes(good[:-1] + bytes([good[-1] ^ 1]) if damage is None else damage)
    bring(run, local)
    assert first.read_bytes() == good


def test_local_folder_that_is_a_file_is_a_stage_error(run: TinyRun, local: Path):
    local.write_bytes(b"")
    with pytest.raises(StageError) as caught:
        bring(run, local)
    assert caught.value.file == str(local)


def test_local_name_that_is_taken_by_a_folder_is_a_stage_error(run: TinyRun, local: Path):
    (local / run.metadata(1).files[0].name).mkdir(parents=True)
    with pytest.raises(StageError):
        bring(run, local)
