"""What every store adapter must do.

Subclass `StoreContract` in a test module and give it a fixture `store`: an empty, real store that `open_store` can
open again by its ``uri``, from another process too.
"""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_delta_snapshot.errors import LimitExceeded, ObjectExists, ObjectNotFound, StoreError
from vllm_delta_snapshot.store import Store, open_store

ROOT = Path(__file__).parents[2]
BYTES = bytes(range(256))
ESCAPES = ["..", ".", "/", "/etc/passwd", "../x", "a/../x", "a/../../x", "a//b", "a/", "/a", "a/./b", "a\0b", ""]


def get(store: Store, key: str) -> bytes:
    return store.read(key, max_bytes=1 << 20)


class StoreContract:
    def test_created_object_is_read_back(self, store: Store):
        store.create("folder/x.json", BYTES)
        assert get(store, "folder/x.json") == BYTES

    def test_created_object_is_seen_by_another_client(self, store: Store):
        other = open_store(store.uri)
        assert other.list("folder") == []
        store.create("folder/x.json", BYTES)
        assert other.list("folder") == ["x.json"]
        assert get(other, "folder/x.json") == BYTES

    def test_create_of_an_empty_object_is_read_back(self, store: Store):
        store.create("x", b"")
        assert get(store, "x") == b""

    def test_create_over_an_object_is_refused_and_changes_nothing(self, store: Store):
        store.create("x", b"first")
        with pytest.raises(ObjectExists) as caught:
            store.create("x", b"second")
        assert get(store, "x") == b"first"
        assert caught.value.file
        assert caught.value.file.endswith("x")

    def test_create_over_a_large_object_is_refused_and_changes_nothing(self, store: Store):
        store.put("x", [memoryview(b"first")])
        with pytest.raises(ObjectExists):
            store.create("x", b"second")
        assert get(store, "x") == b"first"

    def test_create_after_delete_succeeds(self, store: Store):
        store.create("x", b"first")
        store.delete("x")
        store.create("x", b"second")
        assert get(store, "x") == b"second"

    def test_threads_that_create_the_same_objects_have_one_winner_each(self, store: Store):
        writers, count = 6, 8
        barrier = threading.Barrier(writers)

        def race(writer: int) -> set[int]:
            won = set()
            for number in range(count):
                barrier.wait()
                try:
                    store.create(f"race/{number}", b"%d" % writer)
                except ObjectExists:
                    continue
                won.add(number)
            return won

        with ThreadPoolExecutor(writers) as pool:
            won = list(pool.map(race, range(writers)))
        winner_of = {number: writer for writer, numbers in enumerate(won) for number in numbers}
        assert sum(map(len, won)) == len(winner_of) == count
        assert {n: get(store, f"race/{n}") for n in range(count)} == {n: b"%d" % w for n, w in winner_of.items()}

    def test_processes_that_create_the_same_objects_have_one_winner_each(self, store: Store):
        count = 20
        command = [sys.executable, "-m", "tests.support.race", store.uri]
        racers = {
            name: subprocess.Popen(
                [*command, name, str(count)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for name in ("a", "b", "c")
        }
        for racer in racers.values():
            assert racer.stdout.readline() == "ready\n"
        for racer in racers.values():
            racer.stdin.write("go\n")
            racer.stdin.flush()
        won = {name: racer.communicate(timeout=60)[0].split() for name, racer in racers.items()}
        assert [racer.returncode for racer in racers.values()] == [0, 0, 0]
        winner_of = {number: name for name, numbers in won.items() for number in numbers}
        assert sum(map(len, won.values())) == len(winner_of) == count
        assert {n: get(store, f"race/{n}") for n in winner_of} == {n: w.encode() for n, w in winner_of.items()}

    def test_reader_during_create_sees_no_object_or_the_whole_of_it(self, store: Store):
        reader = open_store(store.uri)
        data = bytes(200_000)
        done = threading.Event()
        seen: list[int] = []

        def watch() -> None:
            last_look = False
            while not last_look:
                last_look = done.is_set()
                seen.extend(len(get(reader, f"big/{name}")) for name in reader.list("big"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        for number in range(6):
            store.create(f"big/{number}", data)
        done.set()
        watcher.join()
        assert set(seen) == {len(data)}

    def test_put_object_is_read_back(self, store: Store):
        assert store.put("a/b/c", [memoryview(BYTES), memoryview(b""), memoryview(BYTES[:3])]) == 259
        assert get(store, "a/b/c") == BYTES + BYTES[:3]

    def test_put_of_no_chunks_makes_an_empty_object(self, store: Store):
        assert store.put("x", []) == 0
        assert store.size("x") == 0

    def test_put_takes_a_generator(self, store: Store):
        assert store.put("x", (memoryview(bytes([i])) for i in range(5))) == 5
        assert get(store, "x") == bytes(range(5))

    def test_put_over_an_object_is_refused_and_changes_nothing(self, store: Store):
        store.put("x", [memoryview(b"first")])
        with pytest.raises(ObjectExists):
            store.put("x", [memoryview(b"second")])
        assert get(store, "x") == b"first"

    def test_put_over_a_created_object_is_refused_and_changes_nothing(self, store: Store):
        store.create("x", b"first")
        with pytest.raises(ObjectExists):
            store.put("x", [memoryview(b"second")])
        assert get(store, "x") == b"first"

    def test_read_at_the_limit_returns_the_object(self, store: Store):
        store.create("x", BYTES)
        assert store.read("x", max_bytes=256) == BYTES

    def test_read_past_the_limit_is_refused(self, store: Store):
        store.create("x", BYTES)
        with pytest.raises(LimitExceeded):
            store.read("x", max_bytes=255)

    def test_size_is_that_of_the_object(self, store: Store):
        store.put("x", [memoryview(BYTES)] * 3)
        assert store.size("x") == 768

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [
            pytest.param(0, 256, BYTES, id="all"),
            pytest.param(10, 5, BYTES[10:15], id="middle"),
            pytest.param(250, 100, BYTES[250:], id="over the end"),
            pytest.param(256, 10, b"", id="at the end"),
            pytest.param(10_000, 10, b"", id="past the end"),
            pytest.param(10, 0, b"", id="nothing"),
        ],
    )
    def test_read_range_fills_what_there_is(self, store: Store, offset: int, length: int, expected: bytes):
        store.put("x", [memoryview(BYTES)])
        into = bytearray(b"?" * length)
        count = store.read_range("x", offset, memoryview(into))
        assert (count, bytes(into)) == (len(expected), expected + b"?" * (length - len(expected)))

    def test_read_range_from_several_threads_gives_each_its_own(self, store: Store):
        store.put("x", [memoryview(BYTES * 100)])

        def one(start: int) -> bool:
            into = bytearray(1000)
            store.read_range("x", start, memoryview(into))
            return bytes(into) == (BYTES * 100)[start : start + 1000]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(one, range(0, 20_000, 500)))

    @pytest.mark.parametrize("key", ["none", "no/such/folder"])
    def test_missing_object_is_not_found_by_any_reading_verb(self, store: Store, key: str):
        for verb in (
            lambda: store.read(key, max_bytes=10),
            lambda: store.size(key),
            lambda: store.read_range(key, 0, memoryview(bytearray(4))),
        ):
            with pytest.raises(ObjectNotFound):
                verb()

    def test_list_of_a_missing_folder_is_empty(self, store: Store):
        assert store.list("none") == []

    def test_list_is_sorted_and_only_of_that_folder(self, store: Store):
        for key in ("f/b", "f/a", "f/C", "ff/x", "g/f/x", "f.json"):
            store.create(key, b"")
        assert store.list("f") == ["C", "a", "b"]

    def test_list_of_the_root_has_its_objects(self, store: Store):
        store.create("run.json", b"")
        assert "run.json" in store.list("")

    def test_list_after_delete_has_the_name_no_more(self, store: Store):
        store.create("f/a", b"")
        store.create("f/b", b"")
        store.delete("f/a")
        assert store.list("f") == ["b"]

    @pytest.mark.parametrize("key", ["none", "no/such/folder"])
    def test_delete_of_a_missing_object_does_nothing(self, store: Store, key: str):
        store.delete(key)
        assert store.list("") == []

    def test_deleted_object_is_not_found(self, store: Store):
        store.create("x", b"")
        store.delete("x")
        with pytest.raises(ObjectNotFound):
            store.size("x")

    @pytest.mark.parametrize("key", ESCAPES, ids=repr)
    def test_key_that_leaves_the_store_is_refused_by_every_verb(self, store: Store, key: str):
        for verb in (
            lambda: store.create(key, b"x"),
            lambda: store.put(key, [memoryview(b"x")]),
            lambda: store.read(key, max_bytes=10),
            lambda: store.size(key),
            lambda: store.read_range(key, 0, memoryview(bytearray(4))),
            lambda: store.delete(key),
        ):
            with pytest.raises(StoreError) as caught:
                verb()
            assert not isinstance(caught.value, (ObjectNotFound, ObjectExists))

    @pytest.mark.parametrize("folder", [key for key in ESCAPES if key], ids=repr)
    def test_list_of_a_folder_outside_is_refused(self, store: Store, folder: str):
        with pytest.raises(StoreError):
            store.list(folder)

    def test_check_exclusive_create_passes_and_leaves_nothing(self, store: Store):
        store.check_exclusive_create()
        assert store.list("") == []

    def test_errors_name_the_object(self, store: Store):
        with pytest.raises(ObjectNotFound) as caught:
            store.size("versions/00000001.json")
        assert caught.value.file == f"{store.uri}/versions/00000001.json"
