"""Acknowledgements: the newest number holds, nothing is replaced, and a trainer can wait for them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.support.faults import FaultyStore, When
from vllm_delta_snapshot.errors import (
    CorruptFile,
    DeltaSnapshotError,
    FormatError,
    LimitExceeded,
    RunMismatch,
    StageError,
    StoreUnavailable,
    UnsupportedFormat,
)
from vllm_delta_snapshot.runs.acks import (
    Acknowledgement,
    Acknowledger,
    check_sampler,
    read_acknowledgements,
    wait_applied,
)
from vllm_delta_snapshot.store.posix import PosixStore

RUN = "0123abcd-0123-0123-0123-0123456789ab"
OTHER = "ffffffff-0123-0123-0123-0123456789ab"
hostile = pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "/a", ".a", "..", "-a", "a\n", "a b", "a\0", "\u00e4", "n" * 101, "n" * 200]
)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "run")


def numbers(store: PosixStore, sampler: str) -> list[int]:
    return [int(name.removesuffix(".json")) for name in store.list(f"acks/{sampler}")]


def acknowledge(store: PosixStore, **versions: int) -> None:
    for sampler, version in versions.items():
        Acknowledger(store, RUN, sampler).write(version, pause_s=0.0)


def versions(store: PosixStore) -> dict[str, int]:
    return {name: said.version for name, said in read_acknowledgements(store, RUN).items()}


def edit(store: PosixStore, sampler: str, number: int, content: bytes) -> Path:
    path = store.root / "acks" / sampler / f"{number:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_acknowledgement_is_read_back_as_it_was_written(store: PosixStore):
    before = time.time()
    Acknowledger(store, RUN, "node1-8000").write(7, pause_s=0.25, stage_s=1.5)
    said = read_acknowledgements(store, RUN)["node1-8000"]
    assert (said.run_id, said.sampler, said.version, said.pause_s) == (RUN, "node1-8000", 7, 0.25)
    assert said.stage_s == 1.5
    assert before <= said.applied_at <= time.time()
    assert Acknowledgement.from_json(said.to_json(), file="x") == said


def test_acknowledgement_that_says_nothing_of_staging_is_read(store: PosixStore):
    Acknowledger(store, RUN, "a").write(7, pause_s=0.25)
    fields = json.loads((store.root / "acks" / "a" / "00000001.json").read_text())
    assert fields.pop("stage_s") is None
    edit(store, "a", 2, json.dumps(fields).encode())
    assert read_acknowledgements(store, RUN)["a"].stage_s is None


def test_nothing_was_said_in_a_new_run(store: PosixStore):
    assert read_acknowledgements(store, RUN) == {}
    assert read_acknowledgements(store, RUN, ["a", "b"]) == {}


def test_every_sampler_says_its_own_and_only_those_asked_for_are_returned(store: PosixStore):
    acknowledge(store, a=3, b=5, c=0)
    assert versions(store) == {"a": 3, "b": 5, "c": 0}
    assert set(read_acknowledgements(store, RUN, ["b", "nobody"])) == {"b"}


def test_last_word_holds_also_when_it_is_an_earlier_version(store: PosixStore):
    acknowledger = Acknowledger(store, RUN, "a")
    for version in (1, 2, 9, 4):
        acknowledger.write(version, pause_s=0.0)
    assert versions(store) == {"a": 4}


def test_sampler_removes_its_older_ones_and_leaves_two(store: PosixStore):
    acknowledge(store, b=1)
    acknowledger = Acknowledger(store, RUN, "a")
    found = []
    for version in range(1, 5):
        acknowledger.write(version, pause_s=0.0)
        found.append(numbers(store, "a"))
    assert found == [[1], [1, 2], [2, 3], [3, 4]]
    assert numbers(store, "b") == [1]


def test_restarted_sampler_goes_on_after_its_last_number(store: PosixStore):
    for version in range(1, 5):
        acknowledge(store, a=version)
    assert numbers(store, "a") == [3, 4]
    assert versions(store) == {"a": 4}


def test_number_that_somebody_else_took_is_passed_over(store: PosixStore):
    first, second = Acknowledger(store, RUN, "a"), Acknowledger(store, RUN, "a")
    first.write(1, pause_s=0.0)
    second.write(2, pause_s=0.0)
    second.write(3, pause_s=0.0)
    first.write(4, pause_s=0.0)
    assert numbers(store, "a") == [3, 4]
    assert versions(store) == {"a": 4}


def test_write_whose_answer_was_lost_can_be_said_again(store: PosixStore):
    faulty = FaultyStore(store, 1, when=When.AFTER)  # the first operation lists, the second creates
    acknowledger = Acknowledger(faulty, RUN, "a")
    with pytest.raises(StoreUnavailable):
        acknowledger.write(5, pause_s=0.0)
    acknowledger.write(5, pause_s=0.0)
    assert (numbers(store, "a"), versions(store)) == ([1, 2], {"a": 5})


def test_old_one_that_cannot_be_removed_is_in_nobodys_way_and_goes_later(store: PosixStore):
    faulty = FaultyStore(store)
    acknowledger = Acknowledger(faulty, RUN, "a")
    acknowledger.write(1, pause_s=0.0)
    acknowledger.write(2, pause_s=0.0)
    faulty._at = len(faulty.log) + 2  # create, list, and then the removal
    acknowledger.write(3, pause_s=0.0)
    assert faulty.log[-1] == "delete"
    assert (numbers(store, "a"), versions(store)) == ([1, 2, 3], {"a": 3})
    acknowledger.write(4, pause_s=0.0)
    assert numbers(store, "a") == [3, 4]


def test_acknowledgement_of_another_run_is_refused_and_named(store: PosixStore):
    Acknowledger(store, OTHER, "a").write(1, pause_s=0.0)
    with pytest.raises(RunMismatch, match="another run") as caught:
        read_acknowledgements(store, RUN)
    assert caught.value.file == f"{store.uri}/acks/a"
    assert (caught.value.expected, caught.value.found) == (f"run {RUN}", f"run {OTHER}")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"format_version": 2}, UnsupportedFormat),
        ({"format": "delta_snapshot_run"}, UnsupportedFormat),
        ({"version": -1}, CorruptFile),
        ({"version": "7"}, CorruptFile),
        ({"version": 10**8}, CorruptFile),
        ({"run_id": "../x"}, CorruptFile),
        ({"more": 1}, CorruptFile),
    ],
)
def test_acknowledgement_that_says_something_else_is_refused_and_named(
    store: PosixStore, changes: dict[str, object], kind: type[DeltaSnapshotError]
):
    acknowledge(store, a=1)
    path = store.root / "acks" / "a" / "00000001.json"
    edit(store, "a", 1, json.dumps(json.loads(path.read_text()) | changes).encode())
    with pytest.raises(kind) as caught:
        read_acknowledgements(store, RUN)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_damaged_acknowledgement_is_corrupt_and_named(store: PosixStore, content: bytes):
    path = edit(store, "a", 1, content)
    with pytest.raises(CorruptFile) as caught:
        read_acknowledgements(store, RUN)
    assert caught.value.file == str(path)


def test_huge_acknowledgement_is_refused_unread(store: PosixStore):
    path = edit(store, "a", 1, b" " * (1 << 16) + b"{}")
    with pytest.raises(LimitExceeded) as caught:
        read_acknowledgements(store, RUN)
    assert caught.value.file == str(path)


def test_newer_number_heals_a_damaged_one(store: PosixStore):
    edit(store, "a", 1, b"{")
    acknowledge(store, a=3)
    assert versions(store) == {"a": 3}


def test_other_names_in_the_folder_are_ignored(store: PosixStore):
    acknowledge(store, a=1)
    for name in ("9.json", "00000009.json~", "000000009.json", "note.txt"):
        (store.root / "acks" / "a" / name).write_text("?")
    (store.root / "acks" / ".hidden").mkdir()
    (store.root / "acks" / "two words").mkdir()
    assert versions(store) == {"a": 1}


@hostile
def test_name_that_would_leave_the_folder_or_is_none_is_refused(store: PosixStore, name: str):
    for call in (
        lambda: check_sampler(name),
        lambda: Acknowledger(store, RUN, name),
        lambda: read_acknowledgements(store, RUN, [name]),
        lambda: wait_applied(store, RUN, 1, [name], timeout_s=0.0),
    ):
        with pytest.raises(FormatError, match="not a name for a sampler") as caught:
            call()
        assert caught.value.found == repr(name)
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["a", "node-1.rack_2-8000", "0", "n" * 100])
def test_plain_names_are_taken(name: str):
    assert check_sampler(name) == name


def test_wait_ends_when_the_last_sampler_has_said_it(store: PosixStore):
    looked = threading.Event()

    def samplers() -> None:
        assert looked.wait(30)
        store.create("versions/00000009.json", b"{}")
        acknowledge(store, a=7, b=9)

    thread = threading.Thread(target=samplers)
    thread.start()
    said = wait_applied(FaultyStore(store, 0, fail=looked.set), RUN, 7, ["a", "b"], timeout_s=30.0)
    thread.join()
    assert {name: of.version for name, of in said.items()} == {"a": 7, "b": 9}


def test_wait_for_nobody_or_for_what_was_said_ends_at_once(store: PosixStore):
    acknowledge(store, a=7)
    assert wait_applied(store, RUN, 7, [], timeout_s=0.0) == {}
    assert wait_applied(store, RUN, 7, iter(["a"]), timeout_s=0.0)["a"].version == 7


def test_wait_that_is_in_vain_names_those_that_lag_and_where_they_are(store: PosixStore):
    acknowledge(store, good=8, late=6)
    with pytest.raises(StageError, match="version 7 was not acknowledged in time") as caught:
        wait_applied(store, RUN, 7, ["good", "late", "silent"], timeout_s=0.0)
    assert caught.value.found == "late at version 6, nothing of silent"
    assert caught.value.file == f"{store.uri}/acks"


def test_acknowledgement_removed_between_list_and_read_is_read_again(store: PosixStore):
    acknowledge(store, a=6)

    def move_on() -> None:
        acknowledge(store, a=7)
        store.delete("acks/a/00000001.json")

    said = wait_applied(FaultyStore(store, 1, fail=move_on), RUN, 7, ["a"], timeout_s=30.0)
    assert said["a"].version == 7


def test_wait_does_not_go_on_over_what_will_not_pass(store: PosixStore):
    Acknowledger(store, OTHER, "a").write(9, pause_s=0.0)
    with pytest.raises(RunMismatch):
        wait_applied(store, RUN, 7, ["a"], timeout_s=30.0)
