"""Several real processes publish one model: what is published is, bit for bit, what it is in all; and what goes wrong.

All processes are started once, by `tests.support.shard_ranks`; the tests look at what they left and saw.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support.checkpoints import write_checkpoint
from tests.support.shard_behind import ENDS
from tests.support.shard_faults import DEATHS, FAULTS, Rows
from tests.support.shard_memory import SHARD_BYTES
from tests.support.shard_ranks import ANCHORED, COPIED, EXPERTS
from tests.support.shard_unsourced import DRAFT, EMBED, HEAD
from tests.support.shards import CASES, Story
from tests.support.tensors import bits_of
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

pytestmark = pytest.mark.slow  # processes of several ranks

ROOT = Path(__file__).parents[3]
NAMES = (*CASES, EXPERTS)
WAYS = ("at once", "behind")
AT_ONCE = ("an exporter that raises", "a box of another shape")
"""Faults of the comparison, which is never left to later."""
LACKS = ("a model that lacks", "embed.weight", "head.weight")
COMMITTED = ("a commit whose answer is lost", "a baseline that stops half-way")
SURVIVED = tuple(name for name in FAULTS if name != "another trainer")


@dataclass
class Played:
    """What the processes left and saw."""

    work: Path
    seen: dict[str, Any]

    def folder(self, name: str) -> Path:
        return self.work / name.replace(" ", "-")

    def run(self, name: str) -> RunFolder:
        return RunFolder(PosixStore(self.folder(name) / "run"))

    def base(self, name: str) -> Checkpoint:
        return Checkpoint(self.folder(name) / "base")


@pytest.fixture(scope="module")
def played(ram_root: Path) -> Played:
    work = ram_root / "sharded"
    work.mkdir()
    command = [sys.executable, "-m", "tests.support.shard_ranks", str(work)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Played(work, json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", NAMES)
def test_published_chain_is_the_full_model_at_every_step(played: Played, name: str, tmp_path: Path):
    run, base = played.run(name), played.base(name)
    assert run.versions() == list(range(1, Story.STEPS + 1))
    for version in run.versions():
        materialize(run, base, version, tmp_path / str(version))
        found = Checkpoint(tmp_path / str(version))
        expected = load_file(played.folder(name) / f"expected-{version}.safetensors")
        wrong = [key for key in expected if bits_of(expected[key]).tolist() != found.bits(key).tolist()]
        assert (set(found.specs), wrong) == (set(expected), [])


@pytest.mark.parametrize("name", NAMES)
def test_every_element_is_published_by_one_rank_and_all_ranks_agree(played: Played, name: str):
    ranks = played.seen[name]
    assert sum(rank["elements"] for rank in ranks) == played.base(name).total_elements
    newest = played.run(name).read_version(Story.STEPS)
    assert {rank["digest"] for rank in ranks} == {newest.state_digest}
    assert {json.dumps(rank["reports"]) for rank in ranks} == {json.dumps(ranks[0]["reports"])}
    skipped = ranks[0]["reports"][1]
    assert skipped == [2, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_audit_proves_every_element_on_every_rank(played: Played, name: str):
    digest = played.run(name).read_version(Story.STEPS).state_digest
    for rank in played.seen[name]:
        version, elements, found = rank["audits"][0]
        assert (version, found) == (Story.STEPS, digest)
        assert elements >= played.base(name).total_elements


def test_audit_finds_copies_that_differ_and_says_so_on_every_rank(played: Played):
    for rank in played.seen[COPIED]:
        assert "ranks hold different values of what should be copies" in rank["audits"][1]
        assert "up.weight" in rank["audits"][1]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_said_between_ranks_but_point_to_point(played: Played, name: str):
    assert {operation for rank in played.seen[name] for operation in rank["operations"]} == {"send", "recv_"}


def test_a_model_that_changes_whole_moves_few_bytes_between_ranks(played: Played):
    weights = sum(spec.num_bytes for spec in played.base("large").specs.values())
    assert played.run("large").read_version(1).changed_elements == played.base("large").total_elements
    assert sum(sum(rank["bytes"]) for rank in played.seen["large"]) < weights / 50


def test_a_rank_holds_its_own_shard_and_a_bounded_buffer(played: Played):
    for rank in played.seen["memory"]:
        assert rank["changed"] > 0
        assert SHARD_BYTES < rank["peak"] < SHARD_BYTES + 16 * (1 << 20) < 2 * SHARD_BYTES


@pytest.mark.parametrize("name", ["fsdp2", "fsdp and tp", "fsdp1", "partials", EXPERTS])
def test_tensors_come_in_parts_and_are_verified_as_one(played: Played, name: str):
    run = played.run(name)
    metadata = run.read_metadata(run.read_version(1))
    assert metadata.format_version == 4
    assert len(metadata.tensors) > len(metadata.by_tensor)
    assert verify_run(run).is_ok


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_one_rank_fails_the_publication_on_all(played: Played, name: str):
    rank = FAULTS[name][0]
    for number, seen in enumerate(played.seen["faults"]["seen"]["at once"][name]):
        first = seen["outcomes"][0]
        if name == "a baseline that stops half-way":  # the version was committed: others have it
            assert first.get("version") == (None if number == rank else 2)
        else:
            assert "error" in first
            assert number == rank or f"rank {rank}" in first["message"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_behind_the_step_is_raised_on_all_ranks_by_the_next_call(played: Played, name: str):
    rank = FAULTS[name][0]
    for number, seen in enumerate(played.seen["faults"]["seen"]["behind"][name]):
        first, second = seen["outcomes"][:2]
        assert ("error" in first) == (number == rank and name in AT_ONCE)
        assert ("error" in second) == (name not in COMMITTED)
        if "error" in second and number != rank:
            assert f"rank {rank}" in second["message"]


@pytest.mark.parametrize("name", SURVIVED)
def test_what_a_fault_kept_back_the_next_publication_carries(played: Played, name: str, tmp_path: Path):
    expected = {"at once": [2, 3], "behind": [None, 2, 3]}
    if name in COMMITTED:
        expected = {"at once": [3, 4], "behind": [3, 4, 5]}
    for way, versions in expected.items():
        ranks = played.seen["faults"]["seen"][way][name]
        assert [[outcome.get("version") for outcome in seen["outcomes"][1:]] for seen in ranks] == [versions] * 3
        assert {seen["digest"] for seen in ranks} == {digest_after(3, tmp_path / way)}


@pytest.mark.parametrize("way", WAYS)
def test_another_trainer_is_a_conflict_on_all_ranks(played: Played, way: str):
    ranks = played.seen["faults"]["seen"][way]["another trainer"]
    errors = {outcome.get("error") for seen in ranks for outcome in seen["outcomes"][way == "behind" :]}
    assert errors == {"VersionConflict"}
    assert played.run(f"another trainer {way}").versions() == [1, 2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DEATHS)
def test_when_a_rank_dies_the_others_are_told_soon(played: Played, name: str, way: str):
    dead = DEATHS[name][0]
    ranks = played.seen["faults"]["seen"][way][name]
    assert ["death" in seen for seen in ranks] == [dead in (None, number) for number in range(3)]
    for seen in ranks:
        if "death" not in seen:
            errors = [outcome for outcome in seen["outcomes"] if "error" in outcome]
            assert len(errors) >= 2, "a rank that is gone stays gone"
            assert {error["error"] for error in errors} == {"RankFailed"}
            assert all(f"rank {dead}" in error["message"] for error in errors)
            assert all(outcome["seconds"] < 20 for outcome in seen["outcomes"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*SURVIVED, *DEATHS])
def test_fewer_processes_continue_the_run_exactly(played: Played, name: str, way: str, tmp_path: Path):
    after = played.seen["faults"]["resumed"][f"{name} {way}"]
    assert after["version"] == after["found"] + 1
    run, base = played.run(f"{name} {way}"), played.base(f"{name} {way}")
    assert run.versions() == list(range(1, after["version"] + 1))
    materialize(run, base, after["version"], tmp_path / "out")
    assert Checkpoint(tmp_path / "out").state_digest == after["digest"] == digest_after(4, tmp_path)


def test_fewer_processes_continue_from_an_anchor_when_the_deltas_before_it_are_gone(played: Played, tmp_path: Path):
    after = played.seen["faults"]["resumed"][ANCHORED]
    run = played.run(ANCHORED)
    newest = max(run.versions())
    assert (after["found"], after["version"]) == (newest - 1, newest)
    assert not list((played.folder(ANCHORED) / "run" / "deltas").glob("00000001-*")), "what the anchor has is gone"
    assert run.shortcuts().anchors == (newest - 2,)
    assert after["digest"] == run.read_version(newest).state_digest == digest_after(4, tmp_path)


def test_a_call_is_skipped_on_all_ranks_or_on_none_and_the_end_publishes_what_it_left(played: Played, tmp_path: Path):
    ranks = scenes(played, "calls that are merged")
    assert {tuple(seen["skipped"]) for seen in ranks} == {(False, True, True)}
    assert {(seen["version"], seen["digest"]) for seen in ranks} == {(2, digest_after(3, tmp_path))}
    assert [seen["told"] for seen in ranks] == [[1, 2], [], []], "observers are told by rank 0"


@pytest.mark.parametrize("leaver", [0, 1])
def test_when_a_block_ends_by_an_error_on_one_rank_the_others_do_not_wait(played: Played, leaver: int):
    for number, seen in enumerate(scenes(played, f"rank {leaver} leaves")):
        kind = "ValueError: a bug" if number == leaver else f"RankFailed: rank {leaver} has closed its publisher"
        assert seen["error"].startswith(kind)
        assert (seen["seconds"] < 20, seen["version"]) == (True, 1)


def test_an_optimizers_hook_publishes_on_all_ranks_and_the_saved_state_is_checked(played: Played):
    ranks = scenes(played, "a hook")
    [saved] = {json.dumps(seen["saved"]) for seen in ranks}
    assert json.loads(saved)["version"] == 2 == played.run("a hook").versions()[-1]
    assert [played.run("a hook").read_metadata(played.run("a hook").read_version(v)).step for v in (1, 2)] == [2, 4]
    assert {seen["found"] for seen in ranks} == {2}
    assert {seen["refusal"]["error"] for seen in ranks} == {"RunMismatch"}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_group_can_be_destroyed_beside_a_publisher(played: Played, how: str):
    for seen in played.seen["faults"]["ends"][how]:
        assert seen["seconds"] < 20
    assert played.run(f"ended {how}").versions() in ([[1]] if how == "closed" else [[1], []])


@pytest.mark.parametrize(("name", "embed", "head"), [("rows that lack", EMBED, HEAD), LACKS])
def test_tensors_that_no_rank_has_are_kept_and_tied_ones_follow(played: Played, name: str, embed: str, head: str):
    ranks = scenes(played, name)
    base, run = played.base(name), played.run(name)
    for number, seen in enumerate(ranks):
        kind, said = seen["refusal"]
        assert kind == "SourceError"
        assert 'unsourced=["mtp.*"]' in said, f"rank {number}"
        assert sum(seen["audits"]) == sum(ranks[0]["audits"])
    assert ranks[0]["audits"][-1] >= base.total_elements
    newest = run.newest()
    materialize(run, base, newest, played.work / f"made {name}")
    made = Checkpoint(played.work / f"made {name}")
    assert made.bits(embed).view(np.int16).tolist() == made.bits(head).view(np.int16).tolist() == ranks[0]["embed"]
    drafts = {draft: made.bits(draft) for draft in DRAFT}
    changed = {draft for draft, bits in drafts.items() if not np.array_equal(bits, base.bits(draft))}
    assert changed == ({"mtp.3.weight"} if name == "rows that lack" else set())
    assert verify_run(run).problems == []


def test_ranks_share_what_is_kept_and_refuse_together_what_would_be_wrong(played: Played):
    ranks = scenes(played, "rows that lack")
    base = played.base("rows that lack")
    held = [seen["held"][0] for seen in ranks]
    assert sum(held) == base.total_elements
    assert max(held) < base.total_elements / 2
    assert {seen["untied"][0] for seen in ranks} == {seen["trained"][0] for seen in ranks} == {"SourceError"}
    assert all("tied weights have become different" in seen["untied"][1] for seen in ranks)
    assert all("not as they are in the base checkpoint" in seen["trained"][1] for seen in ranks)
    assert all("tensor mtp.3.weight" in seen["trained"][1] for seen in ranks)


def scenes(played: Played, name: str) -> list[dict[str, Any]]:
    return [of_rank[name] for of_rank in played.seen["faults"]["scenes"]]


def test_a_single_process_continues_what_many_began_and_the_other_way_round(played: Played, tmp_path: Path):
    folder = played.folder("an upload that fails at once")
    rows = Rows()
    for number in range(1, 6):
        rows.step(number)
    single = DeltaPublisher(lambda: rows.state.items(), sync_dir=str(folder / "run"), base=folder / "base")
    single.publish().wait()
    assert single.state_digest == digest_after(5, tmp_path)
    rows.step(6)
    sharded = rows.publisher(folder)
    assert sharded.version == single.version
    sharded.publish()
    assert sharded.state_digest == digest_after(6, tmp_path / "more")


def digest_after(steps: int, scratch: Path) -> str:
    """Return the state digest of the faults' weights after some steps."""
    rows = Rows()
    for number in range(1, steps + 1):
        rows.step(number)
    return Checkpoint(write_checkpoint(scratch / "expected", rows.state)).state_digest
