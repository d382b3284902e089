"""Every kind of object, damaged in every way, under every verb: the right bits, or a typed error that names it.

And whatever is wrong, no verb takes anything away that the run needs once the object is restored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import Outcome
from tests.support.hosts import Host
from tests.support.runs import TinyRun, copy_of, make_run
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.compact import compact
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning, prune

NEWEST = 6
OTHER = "f" * 8 + "-ffff-4fff-bfff-" + "f" * 12


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run with every kind of object: pruned up to 2, an anchor of 2, a merged delta from 2 to 4, a sampler at 5."""
    run = make_run(tmp_path_factory.mktemp("pristine"), NEWEST)
    write_anchor(run.folder, Checkpoint(run.base), 2)
    prune(run.folder, plan_pruning(run.folder, RetentionPolicy(keep_versions=4)))
    compact(run.folder, 2, 4)
    Acknowledger(run.folder.store, run.publisher.run_id, "a").write(5, pause_s=0.0)
    return run


def one(run: TinyRun, pattern: str) -> Path:
    (path,) = run.sync_dir.glob(pattern)
    return path


OBJECTS = {
    "run.json": "run.json",
    "version record": "versions/00000005.json",
    "newest record": "versions/00000006.json",
    "metadata": "deltas/00000005-*/metadata.json",
    "payload": "deltas/00000005-*/*.safetensors",
    "anchor record": "anchors/00000002.json",
    "anchor payload": "anchors/00000002-*/*.safetensors",
    "merged record": "merged/00000002-00000004.json",
    "merged payload": "merged/00000002-00000004-*/*.safetensors",
    "mark": "pruned/00000002.json",
    "acknowledgement": "acks/a/00000001.json",
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 33)


def edited(**fields: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        if path.suffix == ".json":
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        else:
            flip(path)

    return edit


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]) and None,
    "flipped": flip,
    "garbage": lambda path: path.write_bytes(b'{"format": []}') and None,
    "huge": huge,
    "foreign": edited(run_id=OTHER),
    "renumbered": edited(version=1),
}
UNNAMEABLE = {("anchor record", "missing"), ("mark", "missing")}
"""Nobody can know that these were there: the error is about what they made possible."""


def assert_named(text: str, run: TinyRun, path: Path, is_gone: bool) -> None:
    """Check that an error names the object, or or its folder."""
    names = {path.name, path.parent.name} if path.name != "metadata.json" else {path.parent.name}
    known = {str(path), str(path.parent), path.relative_to(run.sync_dir).as_posix()}
    assert is_gone or any(name in text for name in known | names), text
    assert "Traceback" not in text
    assert re.search(r"\[[A-Z]\w+\]|'kind'", text), text


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", OBJECTS)
def test_damaged_object_is_named_or_made_good_and_nothing_is_lost(
    pristine: TinyRun, kind: str, damage: str, tmp_path: Path
) -> None:
    run = copy_of(pristine, tmp_path / "run")
    path = one(run, OBJECTS[kind])
    sound, is_gone = path.read_bytes(), (kind, damage) in UNNAMEABLE
    DAMAGES[damage](path)
    before = {str(found.relative_to(run.sync_dir)) for found in run.sync_dir.rglob("*") if found.is_file()}
    for verb in (
        ("inspect", run.sync_dir),
        ("verify", run.sync_dir),
        ("verify", run.sync_dir, "--deep", "--base", run.base),
        ("materialize", run.sync_dir, tmp_path / "out", "--base", run.base),
    ):
        outcome = Outcome(*verb)
        if outcome.code:
            assert_named(outcome.stdout + outcome.stderr, run, path, is_gone)
    if (tmp_path / "out").exists():
        found = Checkpoint(tmp_path / "out").state_digest
        assert found == pristine.record(NEWEST).state_digest or (kind, damage) == ("newest record", "missing")
    host = Host(run, tmp_path / "stage")
    try:
        host.tell(0, 0)
        host.stager.step()
        if host.state.problem is not None:
            assert_named(str(host.state.problem.error), run, path, is_gone)
    except DeltaSnapshotError as error:
        assert_named(str(error), run, path, is_gone)
    finally:
        host.close()
    try:
        DeltaPublisher(pristine.trainer, sync_dir=str(run.sync_dir), base=run.base, asynchronous=False)
    except DeltaSnapshotError as error:
        assert_named(str(error), run, path, is_gone)
    if (kind, damage) == ("run.json", "missing"):
        return  # the publisher has begun a run anew here
    kept = {str(found.relative_to(run.sync_dir)) for found in run.sync_dir.rglob("*") if found.is_file()}
    # The run's trainer takes the place of one record that says it is another run's; of several it takes none.
    taken = {str(path.relative_to(run.sync_dir))} if (kind, damage) == ("newest record", "foreign") else set()
    assert before - kept <= taken
    outcome = Outcome("prune", run.sync_dir, "--keep-versions", 1, "--yes")
    if outcome.code:
        assert_named(outcome.stdout + outcome.stderr, run, path, is_gone)
    if path.parent.exists():
        path.unlink(missing_ok=True)
        path.write_bytes(sound)
        materialize(run.folder, Checkpoint(run.base), NEWEST, tmp_path / "restored")
        assert Checkpoint(tmp_path / "restored").state_digest == pristine.record(NEWEST).state_digest
