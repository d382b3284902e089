"""Verified reads of a run's small objects."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.faults import FaultyStore
from tests.support.runs import TinyRun, copy_of, edit_metadata, edit_record, make_run
from vllm_delta_snapshot.errors import (
    BrokenChain,
    CorruptFile,
    FormatError,
    ObjectNotFound,
    RunMismatch,
    StoreUnavailable,
    UnsupportedFormat,
)
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

OTHER_RUN = "ffffffff-ffff-ffff-ffff-ffffffffffff"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 2)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def test_run_is_read_with_its_table_of_tensors(pristine: TinyRun):
    assert pristine.specs == {name: spec for name, spec in pristine.specs.items() if spec.name == name}
    assert pristine.folder.read_run().run_id == pristine.publisher.run_id


def test_run_is_read_from_the_store_once(pristine: TinyRun):
    store = FaultyStore(PosixStore(pristine.sync_dir))
    folder = RunFolder(store)
    assert folder.read_run() is folder.read_run()
    assert store.log == ["read"]


def test_missing_run_is_not_found_with_a_way_out(tmp_path: Path):
    with pytest.raises(ObjectNotFound, match="no run here") as caught:
        RunFolder(PosixStore(tmp_path / "none")).read_run()
    assert caught.value.file == f"{tmp_path}/none/run.json"
    assert caught.value.hint


def test_missing_run_has_no_versions(tmp_path: Path):
    assert RunFolder(PosixStore(tmp_path / "none")).versions() == []


def test_versions_are_ascending_and_only_records(run: TinyRun):
    for name in ("00000010.json", "00000003.json.part", "notes.txt", "3.json", "LATEST"):
        (run.sync_dir / "versions" / name).write_text("")
    assert run.folder.versions() == [1, 2, 10]


def test_version_that_does_not_exist_is_a_broken_chain(run: TinyRun):
    with pytest.raises(BrokenChain, match="version 7 does not exist") as caught:
        run.folder.read_version(7)
    assert caught.value.file == f"{run.sync_dir}/versions/00000007.json"


def test_version_of_another_run_is_a_run_mismatch(run: TinyRun):
    edit_record(run, 1, run_id=OTHER_RUN)
    with pytest.raises(RunMismatch, match=OTHER_RUN) as caught:
        run.folder.read_version(1)
    assert caught.value.file == f"{run.sync_dir}/versions/00000001.json"


def test_version_under_another_number_is_corrupt(run: TinyRun):
    versions = run.sync_dir / "versions"
    shutil.copyfile(versions / "00000001.json", versions / "00000003.json")
    with pytest.raises(CorruptFile, match="of another version"):
        run.folder.read_version(3)


def test_version_whose_folder_escapes_is_corrupt(run: TinyRun):
    edit_record(run, 1, folder="deltas/../../../etc")
    with pytest.raises(CorruptFile, match="is not a folder of version 1"):
        run.folder.read_version(1)


def test_version_of_a_newer_format_is_unsupported(run: TinyRun):
    edit_record(run, 1, format_version=2)
    with pytest.raises(UnsupportedFormat):
        run.folder.read_version(1)


def test_version_record_that_is_huge_is_refused_unread(run: TinyRun):
    (run.sync_dir / "versions" / "00000001.json").write_bytes(b" " * (1 << 17))
    with pytest.raises(FormatError, match="too large"):
        run.folder.read_version(1)


def test_version_record_cut_off_anywhere_is_refused(run: TinyRun):
    path = run.sync_dir / "versions" / "00000001.json"
    data = path.read_bytes().rstrip()
    for length in range(0, len(data), 11):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFile):
            run.folder.read_version(1)


def test_metadata_with_any_byte_flipped_is_corrupt(run: TinyRun):
    record = run.record(1)
    path = run.sync_dir / record.folder / "metadata.json"
    data = path.read_bytes()
    folder, where = run.folder, f"{run.sync_dir}/{record.folder}/metadata.json"
    folder.read_metadata(record)
    with path.open("r+b") as file:
        for place in range(len(data)):
            file.seek(place)
            file.write(bytes([data[place] ^ (1 << (place % 8))]))
            file.flush()
            with pytest.raises(CorruptFile, match="changed after it was published") as caught:
                folder.read_metadata(record)
            assert caught.value.file == where
            file.seek(place)
            file.write(data[place : place + 1])
            file.flush()
    folder.read_metadata(record)


@pytest.mark.parametrize("length", [0, 1, -1])
def test_metadata_that_is_cut_off_is_corrupt(run: TinyRun, length: int):
    path = run.sync_dir / run.record(1).folder / "metadata.json"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptFile, match="changed after it was published"):
        run.metadata(1)


def test_metadata_that_grew_is_refused(run: TinyRun):
    with (run.sync_dir / run.record(1).folder / "metadata.json").open("ab") as file:
        file.write(b"\n")
    with pytest.raises(FormatError):
        run.metadata(1)


def test_metadata_that_is_missing_is_corrupt(run: TinyRun):
    (run.sync_dir / run.record(1).folder / "metadata.json").unlink()
    with pytest.raises(CorruptFile, match="committed but its metadata is missing"):
        run.metadata(1)


def test_metadata_of_another_run_is_a_run_mismatch(run: TinyRun):
    edit_metadata(run, 1, run_id=OTHER_RUN)
    with pytest.raises(RunMismatch):
        run.metadata(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": 2, "base_version": 1},
        {"publication_id": "0" * 32},
        {"base_state_digest": "0" * 16},
        {"state_digest": "0" * 16},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_metadata_that_contradicts_its_record_is_corrupt(run: TinyRun, changes: dict[str, object]):
    edit_metadata(run, 1, **changes)
    with pytest.raises(CorruptFile, match="is not what the record says"):
        run.metadata(1)


@pytest.mark.parametrize("name", ["../delta.safetensors", "/etc/passwd", "a/b", "..", ".x", ""])
def test_metadata_whose_file_escapes_is_corrupt(run: TinyRun, name: str):
    files = json.loads((run.sync_dir / run.record(1).folder / "metadata.json").read_text())["files"]
    edit_metadata(run, 1, files=[files[0] | {"name": name}])
    with pytest.raises(CorruptFile, match="unsafe file name"):
        run.metadata(1)


def test_metadata_of_openrl_in_a_run_is_corrupt(tmp_path: Path):
    run = make_run(tmp_path, 1, encoding="raw")
    record = run.record(1)
    path = run.sync_dir / record.folder / "metadata.json"
    fields = json.loads(path.read_text())
    del fields["run_id"]
    path.write_text(json.dumps(fields))
    edit_metadata(run, 1)
    with pytest.raises(CorruptFile, match="OpenRL"):
        run.metadata(1)


def test_store_that_is_down_says_try_again(pristine: TinyRun):
    with pytest.raises(StoreUnavailable):
        RunFolder(FaultyStore(PosixStore(pristine.sync_dir), 0)).read_run()


def test_run_that_could_not_be_read_is_read_again(pristine: TinyRun):
    folder = RunFolder(FaultyStore(PosixStore(pristine.sync_dir), 0))
    with pytest.raises(StoreUnavailable):
        folder.read_run()
    assert folder.read_run().run_id == pristine.publisher.run_id


def test_encoding_that_the_run_did_not_name_is_corrupt(run: TinyRun):
    used = {entry.encoding for entry in run.metadata(1).tensors}
    fields = json.loads((run.sync_dir / "run.json").read_text())
    fields["encodings"] = [name for name in fields["encodings"] if name not in used]
    (run.sync_dir / "run.json").write_text(json.dumps(fields))
    with pytest.raises(CorruptFile, match="an encoding that the run does not use"):
        run.metadata(1)
