"""Staged updates with and without a mirror: differences where workers have the old values, else absolute ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.hosts import Host, places_of
from tests.support.mirrors import flip_weights
from tests.support.runs import TinyRun, copy_of, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile, OutOfOrder, StageError
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.host.fetched import FetchedVersions
from vllm_delta_snapshot.host.mapping import read_lanes
from vllm_delta_snapshot.host.mirror import Mirror
from vllm_delta_snapshot.host.mirror_keeper import MirrorKeeper
from vllm_delta_snapshot.host.mirror_marker import MIRROR_NAME
from vllm_delta_snapshot.host.update_folders import UpdateFolders
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.types import TensorPatch

PAIRS = [(0, 1), (1, 4), (1, 0), (4, 1)]
pairs = pytest.mark.parametrize(("base", "version"), PAIRS)


class CountedCheckpoint(Checkpoint):
    """A checkpoint that notes which tensors are read."""

    reads: list[str]

    def bits(self, name: str) -> Bits:
        """See `Checkpoint`."""
        self.__dict__.setdefault("reads", []).append(name)
        return super().bits(name)


@dataclass
class Shelf:
    """The update folders of a host, and what they are made from."""

    host: Host
    checkpoint: CountedCheckpoint
    keeper: MirrorKeeper
    updates: UpdateFolders

    @property
    def is_mixed(self) -> bool:
        """Whether the run has versions of both kinds."""
        return "raw" in self.host.run.folder.read_run().encodings

    @classmethod
    def of(cls, host: Host, folder: Path, start: int = 0) -> Shelf:
        """Set one up, for engines that start from the checkpoint in a folder."""
        run, area = host.run, host.area
        checkpoint = CountedCheckpoint(folder)
        fetched = FetchedVersions(run.folder, area, checkpoint, start)
        keeper = MirrorKeeper(area, checkpoint, run.publisher.run_id, start)
        assert checkpoint.state_digest  # read once, and then known
        checkpoint.reads = []
        return cls(
            host, checkpoint, keeper, UpdateFolders(area, run.publisher.run_id, fetched, checkpoint, start, keeper)
        )

    def want_mirror(self, version: int | None) -> None:
        """Say that somebody needs a mirror, and have it at a version, or not at all."""
        self.host.area.write(self.host.area.mirror_target, b"0")
        if version is not None:
            for _ in range(2):
                self.keeper.keep(version, self.updates.absolute)
            assert self.keeper.at(version) is not None
        for folder in self.host.area.staged.iterdir():
            shutil.rmtree(folder)
        self.checkpoint.reads.clear()

    def stage(self, base: int, version: int) -> DeltaMetadata:
        """Stage an update, and check where it leads; afresh, as another process reads it."""
        self.updates.stage(base, version)
        return self.host.check_update(base, version)

    def files(self, base: int, version: int) -> dict[str, int]:
        """Return the files of a staged update."""
        return {p.name: p.stat().st_ino for p in self.host.area.staged_folder(base, version).iterdir()}


@pytest.fixture(scope="module", params=["difference", "auto"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of differences, or of both kinds."""
    return make_run(tmp_path_factory.mktemp("run"), versions=4, encoding=request.param)


@pytest.fixture
def host(pristine: TinyRun, tmp_path: Path) -> Iterator[Host]:
    host = Host(copy_of(pristine, tmp_path / "run"), tmp_path / "stage")
    yield host
    host.close()


@pytest.fixture
def shelf(host: Host) -> Shelf:
    return Shelf.of(host, host.run.base)


def has_differences(metadata: DeltaMetadata) -> bool:
    return any(encoding_of(entry.encoding).is_difference for entry in metadata.tensors)


@pairs
def test_update_without_a_mirror_leads_there_and_needs_no_checkpoint_for_differences(
    base: int, version: int, shelf: Shelf
) -> None:
    assert has_differences(shelf.stage(base, version)) or shelf.is_mixed
    assert shelf.checkpoint.reads == [] or (shelf.is_mixed and version < base)


def test_single_version_is_staged_as_it_was_published(shelf: Shelf) -> None:
    shelf.stage(1, 2)
    published = {path.name: path.read_bytes() for path in shelf.host.run.payload(2).parent.iterdir()}
    staged = {path.name: path.read_bytes() for path in shelf.host.area.staged_folder(1, 2).iterdir()}
    assert staged.keys() == published.keys()
    assert all(staged[name] == data for name, data in published.items() if name != "metadata.json")
    assert json.loads(staged["metadata.json"]) == json.loads(published["metadata.json"])


@pairs
@pytest.mark.parametrize("at", ["base", "version", "elsewhere", "nowhere"])
def test_update_on_a_host_with_a_mirror_is_absolute_and_leads_there_wherever_the_mirror_is(
    base: int, version: int, at: str, shelf: Shelf
) -> None:
    elsewhere = next(v for v in range(5) if v not in (base, version))
    shelf.want_mirror({"base": base, "version": version, "elsewhere": elsewhere, "nowhere": None}[at])
    metadata = shelf.stage(base, version)
    assert not has_differences(metadata)
    assert all(entry.old_digest is not None for entry in metadata.tensors)
    if version < base and shelf.is_mixed:
        return  # absolute values to be undone come from the checkpoint in any case
    # Against the values after, a merge of both kinds could not be proven.
    is_provable = version == base + 1 or not shelf.is_mixed
    assert (shelf.checkpoint.reads == []) is (at == "base" or (at == "version" and is_provable))


@pytest.mark.parametrize(("base", "version"), [(0, 1), (0, 3), (4, 1)])
@pytest.mark.parametrize("at", ["base", "version"])
def test_mirror_with_other_weights_than_it_says_is_not_used(base: int, version: int, at: str, shelf: Shelf) -> None:
    shelf.want_mirror(base if at == "base" else version)
    flip_weights(shelf.host.area.mirror)
    assert not has_differences(shelf.stage(base, version))


@pytest.mark.parametrize("name", ["model.embed.weight", "model.layers.0.attn.weight"])
@pytest.mark.parametrize("at", [0, 4])
def test_mirror_with_one_tensor_of_other_weights_is_not_used(name: str, at: int, shelf: Shelf) -> None:
    shelf.want_mirror(at)
    flip_weights(shelf.host.area.mirror, name)
    assert not has_differences(shelf.stage(0, 4))


def torn(shelf: Shelf) -> None:
    marker = shelf.host.area.mirror / MIRROR_NAME
    fields = json.loads(marker.read_text())
    marker.write_text(json.dumps(fields | {"advancing_to": {"version": 2, "state_digest": "0" * 16}}))


def of_another_run(shelf: Shelf) -> None:
    marker = shelf.host.area.mirror / MIRROR_NAME
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"run_id": "f" * 8 + "-ffff-ffff-ffff-" + "f" * 12}))


def without_a_readable_marker(shelf: Shelf) -> None:
    (shelf.host.area.mirror / MIRROR_NAME).write_text("{")


def without_its_weights(shelf: Shelf) -> None:
    next(shelf.host.area.mirror.glob("*.safetensors")).unlink()


def gone(shelf: Shelf) -> None:
    shutil.rmtree(shelf.host.area.mirror)


@pytest.mark.parametrize("harm", [torn, of_another_run, without_a_readable_marker, without_its_weights, gone])
@pytest.mark.parametrize("at", [1, 3])
def test_mirror_that_cannot_be_relied_on_is_at_no_version(harm: object, at: int, shelf: Shelf) -> None:
    shelf.want_mirror(at)
    harm(shelf)
    assert shelf.keeper.at(at) is None
    assert not has_differences(shelf.stage(1, 3))
    assert shelf.checkpoint.reads


def test_mirror_is_at_one_version_only(shelf: Shelf) -> None:
    shelf.want_mirror(2)
    found = [shelf.keeper.at(version) for version in range(5)]
    assert [version for version, mirror in enumerate(found) if mirror is not None] == [2]


@pytest.mark.parametrize(("base", "version"), [(0, 1), (0, 3), (3, 1)])
def test_update_of_differences_is_made_anew_when_a_mirror_is_first_wanted(
    base: int, version: int, shelf: Shelf
) -> None:
    assert has_differences(shelf.stage(base, version))
    shelf.host.area.write(shelf.host.area.mirror_target, b"0")
    assert not has_differences(shelf.stage(base, version))
    metadata, changes = shelf.updates.read(base, version)
    assert not has_differences(metadata)
    assert all(isinstance(change, TensorPatch) for change in changes)


def test_update_that_is_there_is_not_made_again(shelf: Shelf) -> None:
    for target in (None, b"0"):
        if target is not None:
            shelf.host.area.write(shelf.host.area.mirror_target, target)
        for base, version in ((0, 1), (0, 3), (3, 1)):
            shelf.stage(base, version)
            before = shelf.files(base, version)
            shelf.stage(base, version)
            assert shelf.files(base, version) == before


@pytest.mark.parametrize(("base", "version"), [(0, 1), (0, 3)])
def test_update_of_absolute_values_stays_when_a_mirror_is_first_wanted(base: int, version: int, tmp_path: Path) -> None:
    host = Host(make_run(tmp_path, versions=3, encoding="raw"), tmp_path / "stage")
    shelf = Shelf.of(host, host.run.base)
    shelf.stage(base, version)
    before = shelf.files(base, version)
    host.area.write(host.area.mirror_target, b"0")
    shelf.stage(base, version)
    assert shelf.files(base, version) == before
    host.close()


@pairs
def test_update_for_the_mirror_is_staged_and_absolute(base: int, version: int, shelf: Shelf) -> None:
    shelf.want_mirror(None)
    metadata, patches = shelf.updates.absolute(base, version)
    assert [patch.spec.name for patch in patches] == list(metadata.layer_names)
    shelf.host.check_update(base, version)


def test_update_for_a_mirror_that_nobody_wants_is_refused_where_it_holds_differences(shelf: Shelf) -> None:
    with pytest.raises(StageError, match="holds differences"):
        shelf.updates.absolute(0, 3)


def test_update_read_by_another_stager_is_the_same(shelf: Shelf) -> None:
    shelf.stage(0, 1)
    shelf.stage(1, 4)
    again = Shelf.of(shelf.host, shelf.host.run.base)
    for pair in ((0, 1), (1, 4)):
        (metadata, changes), (other, others) = shelf.updates.read(*pair), again.updates.read(*pair)
        assert metadata == other
        assert [c.values.tolist() for c in changes] == [c.values.tolist() for c in others]


@pytest.mark.parametrize("is_mirrored", [False, True], ids=["no mirror", "mirror"])
@pytest.mark.parametrize(("base", "version"), [(2, 3), (2, 4), (4, 2), (4, 3)])
def test_engine_of_a_later_version_gets_its_updates_too(
    is_mirrored: bool, base: int, version: int, host: Host, tmp_path: Path
) -> None:
    materialize(host.run.folder, Checkpoint(host.run.base), 2, tmp_path / "two")
    shelf = Shelf.of(host, tmp_path / "two", start=2)
    if is_mirrored:
        shelf.want_mirror(3)
    assert has_differences(shelf.stage(base, version)) is not is_mirrored
    with pytest.raises(OutOfOrder, match="before the engine's checkpoint"):
        shelf.updates.stage(4, 1)


def test_failed_update_leaves_no_folder(shelf: Shelf) -> None:
    shelf.want_mirror(None)
    file = shelf.host.run.payload(2)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptFile):
        shelf.updates.stage(0, 3)
    assert list(shelf.host.area.staged.iterdir()) == []


def test_update_is_mapped_again_when_a_mirror_is_first_wanted(host: Host) -> None:
    places = places_of(host.run)
    host.tell(0, 0, places)
    host.stager.step()
    host.check_mapped(0, 4, places)
    folder = host.area.mapped_folder(0, 4, places.id)
    assert any(lane.relative is not None for lane in read_lanes(folder)[0])
    host.area.write(host.area.mirror_target, b"0")
    host.stager.step()
    host.check_mapped(0, 4, places)
    assert all(lane.relative is None for lane in read_lanes(folder)[0])
    assert Mirror.open(host.area.mirror) is not None
