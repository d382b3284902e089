"""What is special to a store in a folder: links, temporaries, durability, and the errors of file systems."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import snapshot_of
from tests.support.mounts import make_read_only, tmpfs
from vllm_delta_snapshot.errors import (
    CompatibilityError,
    ExclusiveCreateUnsupported,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.store.posix import PosixStore

Raiser = Callable[..., None]


def failing(number: int) -> Raiser:
    def fail(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "store")


def files_of(store: PosixStore) -> list[str]:
    return sorted(snapshot_of(store.root)) if store.root.exists() else []


def test_create_leaves_no_temporary(store: PosixStore):
    store.create("f/x", b"1")
    assert files_of(store) == ["f/x"]


def test_create_that_lost_leaves_no_temporary(store: PosixStore):
    store.create("f/x", b"1")
    with pytest.raises(ObjectExists):
        store.create("f/x", b"2")
    assert files_of(store) == ["f/x"]


def test_list_hides_temporaries_of_a_writer_that_died(store: PosixStore):
    store.create("f/x", b"1")
    (store.root / "f" / ".tmp-0123").write_bytes(b"half")
    assert store.list("f") == ["x"]


def test_write_makes_the_folders_it_needs(tmp_path: Path):
    store = PosixStore(tmp_path / "not" / "yet" / "there")
    store.create("a/b/x", b"1")
    assert store.list("a/b") == ["x"]


def test_reading_makes_no_folder(store: PosixStore):
    store.list("f")
    with pytest.raises(ObjectNotFound):
        store.size("f/x")
    assert not store.root.exists()


def test_home_and_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert PosixStore("~/run").uri == PosixStore("run").uri == str(tmp_path / "run")


def test_file_where_the_folder_should_be_is_a_store_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        PosixStore(tmp_path / "file").create("x", b"1")


def test_put_in_short_writes_is_whole(store: PosixStore, monkeypatch: pytest.MonkeyPatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    assert store.put("x", [memoryview(bytes(range(100)))]) == 100
    assert store.read("x", max_bytes=1000) == bytes(range(100))


def test_read_range_in_short_reads_is_whole(store: PosixStore, monkeypatch: pytest.MonkeyPatch):
    store.put("x", [memoryview(bytes(range(100)))])
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    into = bytearray(100)
    assert store.read_range("x", 0, memoryview(into)) == 100
    assert bytes(into) == bytes(range(100))


def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        log.append(f"sync {'temporary' if path.name.startswith('.tmp-') else path.name}")
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        log.append(f"link {Path(target).name}")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    return log


def test_create_syncs_the_bytes_before_the_name_and_the_name_before_it_returns(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
):
    store.create("f/first", b"")
    log = logged(monkeypatch)
    store.create("f/x", b"1")
    assert log == ["sync temporary", "link x", "sync f"]


def test_put_syncs_file_and_folder(store: PosixStore, monkeypatch: pytest.MonkeyPatch):
    log = logged(monkeypatch)
    store.put("f/g/x", [memoryview(b"1")])
    assert log == [f"sync {store.root.parent.name}", "sync store", "sync f", "sync x", "sync g"]


NO_LINKS = [errno.EPERM, errno.ENOTSUP, errno.ENOSYS]


@pytest.mark.parametrize("number", NO_LINKS, ids=os.strerror)
def test_create_without_hard_links_is_unsupported_and_leaves_nothing(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int
):
    monkeypatch.setattr(os, "link", failing(number))
    with pytest.raises(ExclusiveCreateUnsupported, match="single_writer=True"):
        store.create("x", b"1")
    assert files_of(store) == []


def test_probe_without_hard_links_is_unsupported_and_leaves_nothing(store: PosixStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    with pytest.raises(ExclusiveCreateUnsupported):
        store.check_exclusive_create()
    assert files_of(store) == []


def test_probe_of_a_store_that_overwrites_is_unsupported_and_leaves_nothing(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "link", os.replace)
    with pytest.raises(ExclusiveCreateUnsupported, match="two writers"):
        store.check_exclusive_create()
    assert files_of(store) == []


@pytest.fixture
def single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PosixStore:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    return PosixStore(tmp_path / "store", single_writer=True)


def test_single_writer_without_hard_links_creates(single: PosixStore):
    single.check_exclusive_create()
    single.create("f/x", b"1")
    assert single.read("f/x", max_bytes=10) == b"1"
    assert files_of(single) == ["f/x"]


def test_single_writer_without_hard_links_refuses_an_object_that_exists(single: PosixStore):
    single.create("f/x", b"1")
    with pytest.raises(ObjectExists):
        single.create("f/x", b"2")
    assert single.read("f/x", max_bytes=10) == b"1"


def test_create_whose_folder_cannot_be_synced_is_unknown_and_visible(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
):
    store.create("f/first", b"")
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "f":
            failing(errno.ENOSPC)()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnavailable, match="perhaps not durably"):
        store.create("f/x", b"1")
    assert store.list("f") == ["first", "x"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP], ids=os.strerror)
def test_folder_that_cannot_be_synced_at_all_is_no_error(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int
):
    store.create("f/first", b"")
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            failing(number)()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.create("f/x", b"1")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN], ids=os.strerror)
def test_failure_that_may_pass_is_unavailable(store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int):
    store.create("x", b"1")
    monkeypatch.setattr(os, "preadv", failing(number))
    with pytest.raises(StoreUnavailable) as caught:
        store.read_range("x", 0, memoryview(bytearray(1)))
    assert os.strerror(number) in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EBUSY, errno.ENFILE, errno.ENOLCK], ids=os.strerror)
def test_write_that_may_pass_is_unavailable_and_leaves_nothing(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int
):
    monkeypatch.setattr(os, "write", failing(number))
    for write in (lambda: store.put("x", [memoryview(b"1")]), lambda: store.create("y", b"1")):
        with pytest.raises(StoreUnavailable):
            write()
    assert files_of(store) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM], ids=os.strerror)
def test_denial_names_the_right_that_was_missing(store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int):
    store.create("f/x", b"1")

    def hint_of(name: str, act: Callable[[], object]) -> str:
        with monkeypatch.context() as patched:
            patched.setattr(*({"unlink": (Path, "unlink")}.get(name) or (os, name)), failing(number))
            with pytest.raises(StoreError, match="file system refused") as caught:
                act()
        assert type(caught.value) is StoreError
        return str(caught.value.hint)

    assert "right to read the file" in hint_of("open", lambda: store.read("f/x", max_bytes=1))
    assert "right to read the file" in hint_of("preadv", lambda: store.read_range("f/x", 0, memoryview(bytearray(1))))
    assert "right to list that folder" in hint_of("listdir", lambda: store.list("f"))
    assert "right to write into" in hint_of("open", lambda: store.create("f/y", b"1"))
    assert "right to write into" in hint_of("open", lambda: store.put("f/y", [memoryview(b"1")]))
    assert "deleting" in hint_of("unlink", lambda: store.delete("f/x"))


def test_name_that_is_too_long_is_told(store: PosixStore):
    with pytest.raises(StoreError, match="shorter sync_dir"):
        store.create("f" * 300, b"1")


def test_folder_that_goes_away_while_it_is_written_into_is_no_missing_object(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "open", failing(errno.ENOENT))
    with pytest.raises(StoreUnavailable, match="went away"):
        store.put("f/x", [memoryview(b"1")])


def test_put_that_fails_leaves_no_part_of_the_file(store: PosixStore):
    def chunks():
        yield memoryview(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("f/x", chunks())
    assert files_of(store) == []
    store.create("f/x", b"1")
    with pytest.raises(ObjectExists):
        store.put("f/x", [memoryview(b"2")])
    assert store.read("f/x", max_bytes=9) == b"1"


def test_temporaries_of_killed_writers_are_swept_once_they_are_old(store: PosixStore):
    store.create("versions/00000001.json", b"{}")
    (store.root / "versions" / ".tmp-0123").write_bytes(b"half")
    (store.root / ".tmp-4567").write_bytes(b"half")
    assert store.sweep(older_than_s=3600) == 0
    for name in ("versions/.tmp-0123", ".tmp-4567"):
        os.utime(store.root / name, (0, 0))
    assert store.sweep(older_than_s=3600) == 2
    assert files_of(store) == ["versions/00000001.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS], ids=os.strerror)
def test_failure_that_stays_is_a_store_error_with_a_hint(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int
):
    monkeypatch.setattr(os, "write", failing(number))
    with pytest.raises(StoreError) as caught:
        store.put("x", [memoryview(b"1")])
    assert not isinstance(caught.value, StoreUnavailable)
    assert caught.value.hint


def test_put_to_a_full_disk_is_a_store_error_with_a_hint(tmp_path: Path):
    with tmpfs(tmp_path / "small", "64k") as folder:
        store = PosixStore(folder / "run")
        with pytest.raises(StoreError, match="Free space") as caught:
            store.put("x", [memoryview(bytes(1 << 20))])
        assert os.strerror(errno.ENOSPC) in str(caught.value)


def test_create_on_a_full_disk_leaves_nothing_and_works_again_with_space(tmp_path: Path):
    with tmpfs(tmp_path / "small", "64k") as folder:
        store = PosixStore(folder / "run")
        store.create("f/first", b"1")
        filler = folder / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(1 << 20))
        with pytest.raises(StoreError, match="Free space"):
            store.create("f/x", b"1" * 10_000)
        assert files_of(store) == ["f/first"]
        filler.unlink()
        store.create("f/x", b"1" * 10_000)
        assert store.size("f/x") == 10_000


def test_read_only_file_system_is_read_and_refuses_to_be_written(tmp_path: Path):
    with tmpfs(tmp_path / "small", "64k") as folder:
        store = PosixStore(folder / "run")
        store.create("x", b"1")
        make_read_only(folder)
        assert store.read("x", max_bytes=10) == b"1"
        with pytest.raises(StoreError, match="Mount it writable"):
            store.create("y", b"1")


SIZE_LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
from vllm_delta_snapshot.errors import StoreError
from vllm_delta_snapshot.store.posix import PosixStore
store = PosixStore(sys.argv[1])
try:
    store.create("f/x", bytes(10_000))
except StoreError as error:
    print(type(error).__name__, store.list("f"))
"""


def test_create_past_the_limit_of_file_sizes_leaves_nothing(tmp_path: Path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", SIZE_LIMITED, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "StoreError []\n"
    assert snapshot_of(tmp_path) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_the_right_to_write_is_a_store_error(tmp_path: Path):
    (tmp_path / "store").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="right to write"):
        PosixStore(tmp_path / "store").create("x", b"1")


@pytest.mark.parametrize("uri", ["{path}", "file://{path}", "file://localhost{path}"])
def test_open_store_of_a_path_is_a_folder(tmp_path: Path, uri: str):
    assert open_store(uri.format(path=tmp_path)).uri == str(tmp_path)


@pytest.mark.parametrize("name", ["with space", "100%", "a?b", "a#b", "é", "a:b"])
def test_open_store_of_a_path_takes_it_as_it_is(tmp_path: Path, name: str):
    open_store(str(tmp_path / name)).create("x", b"1")
    assert (tmp_path / name / "x").read_bytes() == b"1"


def test_open_store_of_a_file_uri_undoes_its_quoting(tmp_path: Path):
    assert open_store(f"file://{tmp_path}/a%20b").uri == f"{tmp_path}/a b"


@pytest.mark.parametrize("uri", ["ftp://host/x", "file://host/x", "http://user:secret@host/x"])
def test_open_store_of_another_scheme_is_refused_without_its_secrets(uri: str):
    with pytest.raises(StoreError if "secret" in uri else CompatibilityError) as caught:
        open_store(uri)
    assert "secret" not in str(caught.value)


def test_open_store_passes_single_writer_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    open_store(str(tmp_path / "run"), single_writer=True).create("x", b"1")
    assert (tmp_path / "run" / "x").read_bytes() == b"1"
