"""The mirror: exact at every version, whole or plainly torn after any death, and never written under a reader."""

import errno
import fcntl
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.checkpoints import TINY_SPECS, snapshot_of, tiny_tensors, write_checkpoint
from tests.support.mirrors import (
    State,
    Step,
    digest_of,
    inverse_of,
    mirror_of,
    reopened,
    state_at,
    step_from,
)
from tests.support.mounts import make_read_only, tmpfs
from tests.support.runs import assert_same_state, make_run
from tests.support.strategies import patches_for
from tests.support.tensors import TORCH_CODES, bits_of, patch_of, random_bits, random_patch, special_bits, to_torch
from tests.support.wire import RUN_ID
from vllm_delta_snapshot.checkpoint import Checkpoint, patch_files
from vllm_delta_snapshot.errors import (
    BaseMismatch,
    CorruptFile,
    FormatError,
    MirrorBusy,
    NotStaged,
    ObjectNotFound,
    Recovery,
    StageError,
    UnsupportedFormat,
    VerifyError,
)
from vllm_delta_snapshot.host import mirror as mirror_module
from vllm_delta_snapshot.host.mirror import Mirror
from vllm_delta_snapshot.host.mirror_marker import LOCK_NAME, MIRROR_NAME
from vllm_delta_snapshot.runs.materialize import PROVENANCE_NAME, materialize
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

ROOT = Path(__file__).parents[3]
SPECS = {spec.name: spec for spec in TINY_SPECS}
OWN = {MIRROR_NAME, LOCK_NAME}
SHARED = Path("/dev/shm")
RAM = SHARED if os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > 1 << 29 else None
"""A folder in memory where there is one."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "base", tiny_tensors())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "area" / "mirror"


@pytest.fixture
def mirror(base: Path, folder: Path) -> Mirror:
    return mirror_of(base, folder)


@pytest.fixture(scope="module")
def step(base: Path) -> Step:
    return random_step(SPECS, state_at(base), 1)


def random_step(specs: dict[str, TensorSpec], before: State, version: int) -> Step:
    """Return a step that changes about a third of every tensor, to any bit patterns."""
    return step_from(specs, before, [random_patch(s, -(-s.numel // 3), version) for s in specs.values()], version)


def tensors_of(specs: dict[str, TensorSpec], state: State) -> dict[str, torch.Tensor]:
    return {name: to_torch(bits, specs[name]) for name, bits in state.items()}


def weights_in(folder: Path) -> dict[str, bytes]:
    """Return the files that are not the mirror's own notes."""
    return {name: data for name, data in snapshot_of(folder).items() if name not in OWN}


def loaded(folder: Path) -> State:
    """Return the weights as the safetensors library reads them."""
    state: State = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= {name: bits_of(tensor) for name, tensor in load_file(path).items()}
    return state


def marker_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / MIRROR_NAME).read_text())


def assert_at(folder: Path, version: int, state: State) -> None:
    """Check all that a mirror says of itself against what lies there."""
    mirror = reopened(folder)
    assert (mirror.version, mirror.is_torn, mirror.run_id) == (version, False, RUN_ID)
    assert mirror.state_digest == Checkpoint(folder).state_digest
    assert_same_state(loaded(folder), state)


def torn_by_error(mirror: Mirror, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk fail when half of the patches are written."""

    def half(checkpoint: Checkpoint, out: Path, patches: list[TensorPatch]) -> None:
        patch_files.write_patches(checkpoint, out, patches[: len(patches) // 2])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(mirror_module, "write_patches", half)
        with pytest.raises(StageError, match=os.strerror(errno.EIO)):
            step.take(mirror)


# --- create and open


def test_mirror_has_the_checkpoints_files_byte_for_byte(base: Path, folder: Path, mirror: Mirror):
    assert weights_in(folder) == snapshot_of(base)
    assert set(snapshot_of(folder)) - set(snapshot_of(base)) == OWN


def test_mirror_says_what_it_is(base: Path, folder: Path):
    mirror_of(base, folder, version=7)
    mirror = reopened(folder)
    assert (mirror.run_id, mirror.version, mirror.is_torn, mirror.advancing_to) == (RUN_ID, 7, False, None)
    assert mirror.state_digest == digest_of(SPECS, state_at(base))
    assert mirror.checkpoint.folder == folder
    marker = marker_of(folder)
    assert len(str(marker.pop("mirror_id"))) == 32
    assert marker == {
        "format": "delta_snapshot_mirror",
        "format_version": 1,
        "run_id": RUN_ID,
        "version": 7,
        "state_digest": mirror.state_digest,
        "advancing_to": None,
        "checkpoint": str(base),
    }


def test_folder_without_a_mirror_opens_as_none(base: Path, tmp_path: Path):
    assert Mirror.open(tmp_path / "nothing") is None
    assert Mirror.open(base) is None


def test_create_leaves_nothing_beside_the_mirror(folder: Path, mirror: Mirror):
    assert [path.name for path in folder.parent.iterdir()] == ["mirror"]


def test_create_does_not_touch_the_checkpoint(base: Path, folder: Path, step: Step):
    before = snapshot_of(base)
    step.take(mirror_of(base, folder))
    assert snapshot_of(base) == before


def test_checkpoint_of_symbolic_links_gives_plain_files(base: Path, folder: Path, tmp_path: Path, step: Step):
    links = tmp_path / "links"
    links.mkdir()
    for path in base.iterdir():
        (links / path.name).symlink_to(path)
    before = snapshot_of(base)
    step.take(mirror_of(links, folder))
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert snapshot_of(base) == before


def test_notes_of_ours_and_other_weights_are_not_copied(base: Path, folder: Path, tmp_path: Path):
    source = shutil.copytree(base, tmp_path / "source")
    for name in (PROVENANCE_NAME, MIRROR_NAME, LOCK_NAME, f".{MIRROR_NAME}.new", "pytorch_model.bin", "model.gguf"):
        (source / name).write_bytes(b"stale")
    mirror_of(source, folder)
    assert weights_in(folder) == snapshot_of(base)


def test_mirror_of_a_mirror_is_one_of_its_own(folder: Path, mirror: Mirror, tmp_path: Path, step: Step):
    step.take(mirror)
    other = mirror_of(folder, tmp_path / "other", version=1)
    with mirror.pin(1):
        inverse_of(SPECS, step, 0).take(other)
    assert_at(folder, 1, step.after)
    assert_at(tmp_path / "other", 0, step.before)


def test_materialize_from_a_mirror_makes_no_mirror(tmp_path: Path):
    run = make_run(tmp_path, 1)
    mirror_of(run.base, tmp_path / "mirror")
    materialize(run.folder, Checkpoint(tmp_path / "mirror"), 1, tmp_path / "out")
    assert Mirror.open(tmp_path / "out") is None
    assert_same_state(loaded(tmp_path / "out"), run.history[1])


def test_create_where_something_lies_is_refused_and_that_is_kept(base: Path, folder: Path, mirror: Mirror):
    before = snapshot_of(folder)
    with pytest.raises(StageError, match="in use"):
        mirror_of(base, folder)
    assert snapshot_of(folder.parent) == {f"mirror/{name}": data for name, data in before.items()}


def test_create_of_another_state_than_claimed_is_refused_and_leaves_nothing(base: Path, folder: Path):
    with pytest.raises(VerifyError, match="version 0"):
        Mirror.create(folder, Checkpoint(base), run_id=RUN_ID, version=0, state_digest="0" * 16)
    assert snapshot_of(folder.parent) == {}
    assert list(folder.parent.iterdir()) == []


def test_create_sweeps_what_dead_tries_left_and_nothing_else(base: Path, folder: Path):
    kept = (".mirror.short", f".other.{'0' * 32}", f".mirror.{'x' * 32}")
    for name in (f".mirror.{'0' * 32}", f".mirror.{'1' * 32}", *kept):
        (folder.parent / name).mkdir(parents=True)
    (folder.parent / f".mirror.{'0' * 32}" / "model.safetensors").write_bytes(b"half")
    mirror_of(base, folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted(["mirror", *kept])


def test_create_spares_a_try_that_lives(base: Path, folder: Path):
    living = folder.parent / f".mirror.{'0' * 32}"
    living.mkdir(parents=True)
    with mirror_module.locked(living):
        mirror_of(base, folder)
        assert living.is_dir()


@pytest.mark.parametrize("shards", [1, 3])
def test_mirror_advanced_equals_the_checkpoint_that_the_library_writes(tmp_path: Path, shards: int):
    tensors = tiny_tensors()
    base = write_checkpoint(tmp_path / "base", tensors, shards=shards)
    step = random_step(SPECS, {n: bits_of(t) for n, t in tensors.items()}, 1)
    step.take(mirror_of(base, tmp_path / "mirror"))
    expected = write_checkpoint(tmp_path / "expected", tensors_of(SPECS, step.after), shards=shards)
    assert weights_in(tmp_path / "mirror") == snapshot_of(expected)
    assert_at(tmp_path / "mirror", 1, step.after)


# --- advance


def test_every_type_takes_every_special_bit_pattern(tmp_path: Path):
    specs = {code: TensorSpec(code, (special_bits(code).size,), code) for code in TORCH_CODES}
    before = {code: special_bits(code) for code in TORCH_CODES}
    base = write_checkpoint(tmp_path / "base", tensors_of(specs, before))
    patches = [
        TensorPatch(specs[code], np.arange(before[code].size, dtype="<i4"), before[code][::-1].copy())
        for code in TORCH_CODES
    ]
    step = step_from(specs, before, patches, 1)
    mirror = mirror_of(base, tmp_path / "mirror")
    step.take(mirror)
    assert_at(tmp_path / "mirror", 1, {code: special_bits(code)[::-1] for code in TORCH_CODES})
    inverse_of(specs, step, 0).take(mirror)
    assert_at(tmp_path / "mirror", 0, before)


def test_minus_zero_and_nan_payloads_arrive_as_they_are(folder: Path, mirror: Mirror, base: Path):
    spec = SPECS["model.norm.weight"]
    patch = patch_of(spec, {0: 0x80000000, 3: 0x7F800001, 4: 0xFFC12345, 7: 0x00000001})
    step_from(SPECS, state_at(base), [patch], 1).take(mirror)
    assert mirror.bits(spec.name)[[0, 3, 4, 7]].tolist() == [0x80000000, 0x7F800001, 0xFFC12345, 0x00000001]
    assert loaded(folder)[spec.name][[0, 3, 4, 7]].tolist() == [0x80000000, 0x7F800001, 0xFFC12345, 0x00000001]


def test_scalar_and_empty_tensors_are_patched(folder: Path, mirror: Mirror, base: Path):
    scalar, void = SPECS["model.layers.0.step"], SPECS["model.layers.0.void"]
    step = step_from(SPECS, state_at(base), [patch_of(scalar, {0: 2**63 + 5}), patch_of(void, {})], 1)
    step.take(mirror)
    assert mirror.bits(scalar.name).tolist() == [2**63 + 5]
    assert mirror.bits(void.name).size == 0
    assert_at(folder, 1, step.after)


def test_version_without_changes_is_only_a_new_number(folder: Path, mirror: Mirror, base: Path):
    weights = weights_in(folder)
    step_from(SPECS, state_at(base), [], 1).take(mirror)
    assert weights_in(folder) == weights
    assert_at(folder, 1, state_at(base))


def test_views_show_what_is_written_later_and_cannot_be_written(mirror: Mirror, step: Step):
    views = {name: mirror.bits(name) for name in SPECS}
    step.take(mirror)
    assert_same_state(views, step.after)
    assert not any(view.flags.writeable for view in views.values())


def test_state_digest_of_the_mapped_checkpoint_follows(mirror: Mirror, step: Step):
    assert mirror.checkpoint.state_digest == mirror.state_digest
    step.take(mirror)
    assert mirror.checkpoint.state_digest == mirror.state_digest == step.state_digest


def test_advance_to_where_it_is_changes_nothing(folder: Path, mirror: Mirror, step: Step):
    step.take(mirror)
    before = snapshot_of(folder)
    step.take(mirror)
    assert snapshot_of(folder) == before


def test_mirror_object_of_another_process_is_brought_up_to_date(folder: Path, mirror: Mirror, step: Step):
    other = reopened(folder)
    step.take(mirror)
    assert other.version == 0
    second = random_step(SPECS, step.after, 2)
    second.take(other)
    assert_at(folder, 2, second.after)


@settings(max_examples=12)
@given(data=st.data())
def test_patches_forward_and_their_inverses_backward_give_the_base(data: st.DataObject):
    with tempfile.TemporaryDirectory(prefix="delta-snapshot-tests-", dir=RAM) as temporary:
        folder = Path(temporary)
        tensors = tiny_tensors()
        mirror = mirror_of(write_checkpoint(folder / "base", tensors), folder / "mirror")
        states = [{name: bits_of(tensor) for name, tensor in tensors.items()}]
        steps: list[Step] = []
        for version in range(1, data.draw(st.integers(1, 4)) + 1):
            chosen = data.draw(st.lists(st.sampled_from(TINY_SPECS), unique=True))
            steps.append(step_from(SPECS, states[-1], [data.draw(patches_for(spec)) for spec in chosen], version))
            states.append(steps[-1].after)
            steps[-1].take(mirror)
            assert_same_state({name: mirror.bits(name) for name in SPECS}, states[version])
        for step in reversed(steps):
            inverse_of(SPECS, step, step.version - 1).take(mirror)
            assert_same_state({name: mirror.bits(name) for name in SPECS}, states[step.version - 1])
        assert weights_in(folder / "mirror") == snapshot_of(folder / "base")


# --- old values


@pytest.mark.parametrize("name", sorted(name for name, spec in SPECS.items() if spec.numel))
def test_one_flipped_bit_under_a_patch_is_a_base_mismatch_that_names_the_tensor(
    folder: Path, mirror: Mirror, step: Step, name: str
):
    patch = next(patch for patch in step.patches if patch.spec.name == name)
    file = next(file for file in mirror.checkpoint.files if name in file.specs)
    data = bytearray(file.path.read_bytes())
    data[file.offset(name) + int(patch.positions[-1]) * patch.spec.element.itemsize] ^= 1
    file.path.write_bytes(data)
    before = snapshot_of(folder)
    with pytest.raises(BaseMismatch, match="not the ones these patches start from") as caught:
        step.take(reopened(folder))
    assert caught.value.tensor == name
    assert caught.value.expected == step.old_digests[name]
    assert "Delete the folder" in str(caught.value)
    assert snapshot_of(folder) == before


def test_missing_old_digest_is_a_base_mismatch(folder: Path, mirror: Mirror, step: Step):
    before = snapshot_of(folder)
    some = dict(list(step.old_digests.items())[1:])
    with pytest.raises(BaseMismatch) as caught:
        mirror.advance(step.patches, version=1, state_digest=step.state_digest, old_digests=some)
    assert caught.value.tensor == next(iter(step.old_digests))
    assert snapshot_of(folder) == before


def test_patches_that_lead_elsewhere_are_a_base_mismatch(folder: Path, mirror: Mirror, step: Step):
    before = snapshot_of(folder)
    with pytest.raises(BaseMismatch, match="do not lead") as caught:
        mirror.advance(step.patches, version=1, state_digest="0" * 16, old_digests=step.old_digests)
    assert (caught.value.expected, caught.value.found) == ("0" * 16, step.state_digest)
    assert snapshot_of(folder) == before


@pytest.mark.parametrize(
    "spec", [TensorSpec("unknown", (8,), "F32"), TensorSpec("model.norm.weight", (4, 2), "F32")], ids=str
)
def test_patch_of_a_tensor_that_does_not_fit_is_a_base_mismatch(folder: Path, mirror: Mirror, spec: TensorSpec):
    before = snapshot_of(folder)
    with pytest.raises(BaseMismatch, match="no such tensor") as caught:
        mirror.advance([patch_of(spec, {0: 1})], version=1, state_digest="0" * 16, old_digests={})
    assert caught.value.tensor == spec.name
    assert snapshot_of(folder) == before


# --- torn


def test_failure_half_way_leaves_it_torn_and_the_same_step_finishes_it(
    folder: Path, mirror: Mirror, step: Step, monkeypatch: pytest.MonkeyPatch
):
    torn_by_error(mirror, step, monkeypatch)
    found = reopened(folder)
    assert mirror.is_torn
    assert found.is_torn
    assert found.version == 0
    assert found.advancing_to is not None
    assert (found.advancing_to.version, found.advancing_to.state_digest) == (1, step.state_digest)
    state = loaded(folder)
    assert {name for name in SPECS if state[name].tolist() == step.before[name].tolist()} > {"model.norm.weight"}
    assert state["model.embed.weight"].tolist() == step.after["model.embed.weight"].tolist()
    step.take(found)
    assert_at(folder, 1, step.after)


@pytest.mark.parametrize("target", ["version", "state", "back"])
def test_torn_mirror_is_refused_another_target(
    folder: Path, mirror: Mirror, step: Step, monkeypatch: pytest.MonkeyPatch, target: str
):
    torn_by_error(mirror, step, monkeypatch)
    before = snapshot_of(folder)
    version, digest = {
        "version": (2, step.state_digest),
        "state": (1, "0" * 16),
        "back": (0, digest_of(SPECS, step.before)),
    }[target]
    with pytest.raises(BaseMismatch, match="torn on its way to another version") as caught:
        reopened(folder).advance(step.patches, version=version, state_digest=digest, old_digests=step.old_digests)
    assert "version 1 with state digest" in str(caught.value.expected)
    assert "Delete the folder" in str(caught.value)
    assert snapshot_of(folder) == before


def test_torn_mirror_that_comes_out_wrong_stays_torn(
    folder: Path, mirror: Mirror, step: Step, monkeypatch: pytest.MonkeyPatch
):
    torn_by_error(mirror, step, monkeypatch)
    with pytest.raises(VerifyError, match="does not come out as version 1") as caught:
        mirror.advance(step.patches[:-1], version=1, state_digest=step.state_digest, old_digests={})
    assert "Delete the folder" in str(caught.value)
    assert reopened(folder).is_torn
    step.take(mirror)
    assert_at(folder, 1, step.after)


def test_damage_far_from_the_patches_is_found_when_a_torn_mirror_is_finished(
    folder: Path, mirror: Mirror, base: Path, monkeypatch: pytest.MonkeyPatch
):
    step = step_from(SPECS, state_at(base), [patch_of(SPECS["model.norm.weight"], {0: 1})], 1)
    torn_by_error(mirror, step, monkeypatch)
    file = mirror.checkpoint.files[0]
    with file.path.open("r+b") as opened:
        opened.seek(file.offset("model.embed.weight"))
        opened.write(b"\xff\x12\x34")
    with pytest.raises(VerifyError):
        step.take(reopened(folder))


# --- readers


def test_pin_holds_back_the_writer_and_nothing_is_written(folder: Path, mirror: Mirror, step: Step):
    before = snapshot_of(folder)
    pin = reopened(folder).pin(0)
    with pytest.raises(MirrorBusy) as caught:
        step.take(mirror)
    assert caught.value.recovery is Recovery.RETRY
    assert snapshot_of(folder) == before
    pin.close()
    pin.close()
    step.take(mirror)
    assert_at(folder, 1, step.after)


def test_pins_do_not_hold_back_each_other(folder: Path, mirror: Mirror, step: Step):
    with reopened(folder).pin(0):
        with reopened(folder).pin(0):
            pass
        with pytest.raises(MirrorBusy):
            step.take(mirror)
    step.take(mirror)


def test_pin_of_an_old_object_is_of_what_lies_there_now(folder: Path, mirror: Mirror, step: Step):
    reader = reopened(folder)
    step.take(mirror)
    with reader.pin(1):
        assert reader.version == 1
        assert_same_state({name: reader.bits(name) for name in SPECS}, step.after)


@pytest.mark.parametrize("version", [0, 2])
def test_pin_of_another_version_is_not_staged_and_holds_nothing(folder: Path, mirror: Mirror, step: Step, version: int):
    step.take(mirror)
    with pytest.raises(NotStaged) as caught:
        reopened(folder).pin(version)
    assert (caught.value.expected, caught.value.found) == (f"version {version}", "version 1")
    inverse_of(SPECS, step, 0).take(mirror)


@pytest.mark.parametrize("version", [0, 1])
def test_pin_of_a_torn_mirror_is_not_staged(
    folder: Path, mirror: Mirror, step: Step, monkeypatch: pytest.MonkeyPatch, version: int
):
    torn_by_error(mirror, step, monkeypatch)
    with pytest.raises(NotStaged, match="torn on its way to version 1"):
        reopened(folder).pin(version)
    step.take(mirror)


def test_pin_while_it_is_written_is_not_staged(folder: Path, mirror: Mirror):
    with mirror_module.locked(folder), pytest.raises(NotStaged, match="being written"):
        mirror.pin(0)


def test_pin_of_a_mirror_that_was_made_anew_is_of_the_new_one(base: Path, folder: Path, mirror: Mirror, step: Step):
    step.take(mirror)
    Mirror.remove(folder)
    mirror_of(base, folder)
    with mirror.pin(0):
        assert_same_state({name: mirror.bits(name) for name in SPECS}, step.before)


def test_pin_of_a_lock_that_was_taken_away_before_it_was_had_is_not_staged(
    base: Path, folder: Path, mirror: Mirror, step: Step, monkeypatch: pytest.MonkeyPatch
):
    real = fcntl.flock

    def late(file: IO[bytes], operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        Mirror.remove(folder)
        mirror_of(base, folder)
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(NotStaged):
        mirror.pin(0)
    with mirror.pin(0), pytest.raises(MirrorBusy):
        step.take(reopened(folder))


def test_pin_of_a_mirror_that_is_gone_is_a_stage_error(folder: Path, mirror: Mirror):
    Mirror.remove(folder)
    with pytest.raises(StageError):
        mirror.pin(0)
    assert not folder.exists()


READER = """
import sys, time
from pathlib import Path
from vllm_delta_snapshot.host.mirror import Mirror
pin = Mirror.open(Path(sys.argv[1])).pin(0)
print("pinned", flush=True)
time.sleep(600)
"""


def test_reader_that_is_killed_lets_go(folder: Path, mirror: Mirror, step: Step):
    with subprocess.Popen([sys.executable, "-c", READER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"pinned\n"
            with pytest.raises(MirrorBusy):
                step.take(mirror)
        finally:
            reader.kill()
    assert reader.returncode == -signal.SIGKILL
    step.take(mirror)
    assert_at(folder, 1, step.after)


# --- damage and removal


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff\x00 garbage",
        lambda data: b"[]",
        lambda data: json.dumps(json.loads(data) | {"surprise": 1}).encode(),
        lambda data: json.dumps(json.loads(data) | {"version": -1}).encode(),
        lambda data: json.dumps(json.loads(data) | {"state_digest": "?"}).encode(),
        lambda data: json.dumps(json.loads(data) | {"advancing_to": {"version": 1}}).encode(),
    ],
    ids=["empty", "truncated", "garbage", "array", "unknown field", "version", "digest", "journal"],
)
def test_damaged_marker_is_corrupt_and_says_what_to_do(folder: Path, mirror: Mirror, damage: Callable[[bytes], bytes]):
    path = folder / MIRROR_NAME
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptFile, match="Delete the folder") as caught:
        Mirror.open(folder)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("change", [{"format_version": 2}, {"format": "other"}], ids=str)
def test_marker_of_another_format_is_unsupported(folder: Path, mirror: Mirror, change: dict[str, object]):
    (folder / MIRROR_NAME).write_text(json.dumps(marker_of(folder) | change))
    with pytest.raises(UnsupportedFormat):
        Mirror.open(folder)


def test_marker_damaged_under_an_open_mirror_stops_reader_and_writer(folder: Path, mirror: Mirror, step: Step):
    (folder / MIRROR_NAME).write_bytes(b"{")
    before = snapshot_of(folder)
    with pytest.raises(CorruptFile):
        step.take(mirror)
    with pytest.raises(CorruptFile):
        mirror.pin(0)
    assert snapshot_of(folder) == before


def test_missing_or_cut_weights_are_told_with_what_to_do(folder: Path, mirror: Mirror):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match="Delete the folder"):
        Mirror.open(folder)
    path.unlink()
    with pytest.raises(ObjectNotFound, match="Delete the folder"):
        Mirror.open(folder)


@pytest.mark.parametrize("name", [MIRROR_NAME, "model.safetensors"])
def test_damaged_mirror_can_be_removed_and_made_anew(base: Path, folder: Path, mirror: Mirror, name: str):
    (folder / name).write_bytes(b"{")
    with pytest.raises(FormatError):
        Mirror.open(folder)
    Mirror.remove(folder)
    assert list(folder.parent.iterdir()) == []
    mirror_of(base, folder)
    assert_at(folder, 0, state_at(base))


def test_remove_under_a_reader_is_busy(folder: Path, mirror: Mirror):
    with mirror.pin(0), pytest.raises(MirrorBusy):
        Mirror.remove(folder)
    assert Mirror.open(folder) is not None


def test_remove_of_another_folder_is_refused_and_of_none_is_nothing(base: Path, tmp_path: Path):
    before = snapshot_of(base)
    with pytest.raises(StageError, match="no mirror"):
        Mirror.remove(base)
    assert snapshot_of(base) == before
    Mirror.remove(tmp_path / "nothing")


# --- disks


def test_create_without_room_says_how_much_it_takes_and_leaves_nothing(base: Path, tmp_path: Path):
    num_bytes = sum(len(data) for data in snapshot_of(base).values())
    with tmpfs(tmp_path / "small", "4k") as small:
        (small / "filler").write_bytes(bytes(4096))
        with pytest.raises(StageError, match="stage_dir") as caught:
            mirror_of(base, small / "mirror")
        assert str(num_bytes) in str(caught.value)
        assert os.strerror(errno.ENOSPC) in str(caught.value)
        assert caught.value.file == str(small / "mirror")
        assert [path.name for path in small.iterdir()] == ["filler"]


def test_create_on_a_disk_that_fills_meanwhile_names_the_file_and_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with tmpfs(tmp_path / "small", "8k") as small:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
        (small / "filler").write_bytes(bytes(8192))
        (small / "filler").write_bytes(bytes(4096))
        with pytest.raises(StageError, match="stage_dir") as caught:
            mirror_of(base, small / "mirror")
        assert caught.value.file is not None
        assert Path(caught.value.file).parent.name.startswith(".mirror.")
        assert [path.name for path in small.iterdir()] == ["filler"]


SIZE_LIMITED = """
import resource, sys
from pathlib import Path
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import StageError
from vllm_delta_snapshot.host.mirror import Mirror
base, folder, digest = sys.argv[1:4]
resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
try:
    Mirror.create(Path(folder), Checkpoint(base), run_id="0" * 8 + "-0000" * 3 + "-" + "0" * 12, version=0,
                  state_digest=digest)
except StageError as error:
    print(Path(error.file).name)
"""


def test_create_past_the_limit_of_file_sizes_names_the_file_and_leaves_nothing(base: Path, folder: Path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    digest = digest_of(SPECS, state_at(base))
    command = [sys.executable, "-c", SIZE_LIMITED, str(base), str(folder), digest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "model.safetensors\n"
    assert list(folder.parent.iterdir()) == []


def test_create_where_the_folder_cannot_be_made_is_a_stage_error(base: Path, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StageError, match="stage_dir"):
        mirror_of(base, tmp_path / "file" / "mirror")
    with tmpfs(tmp_path / "small", "1m") as small:
        make_read_only(small)
        with pytest.raises(StageError, match="stage_dir") as caught:
            mirror_of(base, small / "mirror")
        assert os.strerror(errno.EROFS) in str(caught.value)


def test_advance_on_a_full_disk_needs_no_room_for_weights_and_stays_exact(base: Path, tmp_path: Path, step: Step):
    with tmpfs(tmp_path / "small", "256k") as small:
        mirror = mirror_of(base, small / "mirror")
        with pytest.raises(OSError, match="No space"):
            (small / "filler").write_bytes(bytes(1 << 20))
        with pytest.raises(StageError, match="No space"):
            step.take(mirror)
        assert_at(small / "mirror", 0, step.before)
        (small / "filler").unlink()
        step.take(mirror)
        assert_at(small / "mirror", 1, step.after)


def test_journal_is_durable_before_the_weights_and_they_before_the_marker(
    folder: Path, mirror: Mirror, step: Step, monkeypatch: pytest.MonkeyPatch
):
    log: list[str] = []
    real_sync, real_flush, real_replace = os.fsync, np.memmap.flush, Path.replace

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        log.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def flush(data: np.memmap) -> None:
        real_flush(data)
        log.append("flush")

    def replace(path: Path, target: Path) -> Path:
        log.append(f"marker torn={json.loads(path.read_text())['advancing_to'] is not None}")
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(np.memmap, "flush", flush)
    monkeypatch.setattr(Path, "replace", replace)
    step.take(mirror)
    new = f"sync .{MIRROR_NAME}.new"
    assert log == [new, "marker torn=True", "sync mirror", "flush", new, "marker torn=False", "sync mirror"]


def test_create_syncs_every_file_before_the_name_appears(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def rename(path: Path, target: Path) -> Path:
        assert {name for name in snapshot_of(path) if name != MIRROR_NAME} <= set(synced)
        assert synced[-1] == path.name
        synced.append("rename")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    mirror_of(base, folder)
    assert synced[-2:] == ["rename", folder.parent.name]


def test_copied_weights_have_no_holes(tmp_path: Path):
    base = write_checkpoint(tmp_path / "base", {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)})
    os.truncate(base / "config.json", 1 << 20)
    mirror_of(base, tmp_path / "mirror")
    for name in ("model.safetensors", "config.json"):
        status = (tmp_path / "mirror" / name).stat()
        assert status.st_blocks * 512 >= status.st_size


# --- death


@dataclass(frozen=True)
class Dead:
    """The folders that killed stagers left, by what they were at."""

    base: Path
    small: Step
    large: Step
    folders: dict[str, list[str]]


@pytest.fixture(scope="module")
def dead() -> Iterator[Dead]:
    with tempfile.TemporaryDirectory(prefix="delta-snapshot-tests-", dir=RAM) as temporary:
        work = Path(temporary)
        some = {spec.name: spec for spec in TINY_SPECS if spec.name.startswith("model.layers.0.")}
        base = write_checkpoint(work / "base", {name: tiny_tensors()[name] for name in some}, shards=2)
        wide = TensorSpec("wide", (4 << 20,), "BF16")
        bits = random_bits("BF16", wide.numel, "wide")
        large = write_checkpoint(work / "large", {"wide": to_torch(bits, wide)})
        steps = (
            random_step(some, state_at(base), 1),
            step_from({"wide": wide}, {"wide": bits}, [random_patch(wide, wide.numel // 8)], 1),
        )
        (work / "steps").write_bytes(pickle.dumps(steps))
        arguments = map(str, (base, large, work / "steps", work / "dead"))
        command = [sys.executable, "-m", "tests.support.mirror_crash", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        yield Dead(base, *steps, json.loads(done.stdout))


@pytest.mark.slow
def test_create_killed_at_any_line_leaves_nothing_or_a_whole_mirror(dead: Dead):
    outcomes = set()
    for area in map(Path, dead.folders["create"]):
        found = Mirror.open(area / "mirror")
        outcomes.add(("whole" if found else "nothing", len(list(area.iterdir()))))
        if found is None:
            assert not (area / "mirror").exists()
            mirror_of(dead.base, area / "mirror")
        assert [path.name for path in area.iterdir()] == ["mirror"]
        assert_at(area / "mirror", 0, state_at(dead.base))
    assert outcomes == {("nothing", 0), ("nothing", 1), ("whole", 1)}


def finish(folder: Path, step: Step) -> str:
    """Check what a dead writer left and finish it; return what it was."""
    found = reopened(folder)
    outcome = "torn" if found.is_torn else {0: "old", step.version: "new"}[found.version]
    for name, bits in loaded(folder).items():
        old, new = step.before[name], step.after[name]
        assert np.all({"old": bits == old, "new": bits == new, "torn": (bits == old) | (bits == new)}[outcome]), name
    step.take(found)
    ended = reopened(folder)
    assert (ended.version, ended.state_digest, ended.is_torn) == (step.version, step.state_digest, False)
    assert all(np.array_equal(bits, step.after[name]) for name, bits in loaded(folder).items())
    assert not (folder / f".{MIRROR_NAME}.new").exists()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(("what", "expected"), [("advance", {"old", "torn", "new"}), ("finish", {"torn", "new"})])
def test_advance_killed_at_any_line_is_old_torn_or_new_and_is_finished_exactly(
    dead: Dead, what: str, expected: set[str]
):
    assert {finish(Path(folder), dead.small) for folder in dead.folders[what]} == expected


@pytest.mark.slow
def test_advance_killed_at_any_moment_is_finished_exactly(dead: Dead):
    for folder in dead.folders["large"]:
        finish(Path(folder), dead.large)
