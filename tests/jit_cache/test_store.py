"""Files of compiled kernels: whole or not there, private, locked, collected."""

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest

from jit_cache import store as store_module
from jit_cache.key import Key, stack
from jit_cache.store import Damaged, Settings, Store, Untrusted

DATA = b"native code" * 500
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def key(n=1, arch="sm_90a"):
    return Key(
        {
            "kernel": "package.kernel.build",
            "arguments": {"n": n},
            "arch": arch,
            "stack": stack(),
            "environment": {},
            "source": "s",
        }
    )


def put(store, key, data=DATA):
    return store.write(key.name, {"key": key.record, "kernels": []}, {".o": data})


@pytest.fixture
def store(cache):
    return Store(cache)


def files(store):
    return sorted(path.name for path in store.base.glob("*/*"))


def test_what_is_written_is_found(store):
    assert store.find(key()) == []
    put(store, key())
    assert store.find(key())[0].read() == DATA
    assert store.find(key(2)) == [] and store.find(key(arch="sm_100a")) == []
    assert [entry.name for entry in store.entries()] == [key().name]
    assert key().name.startswith("sm_90a/build-") and len(key().name) == len("sm_90a/build-") + 32


def test_directories_and_files_are_private(store):
    os.umask(0)
    try:
        put(store, key())
    finally:
        os.umask(0o022)
    for directory in (store.root, store.base, store.base / "sm_90a"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in (store.base / "sm_90a").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_store_for_all_can_be_read_by_all_whatever_the_umask(tmp_path):
    store = Store(tmp_path / "bundle", for_all=True)
    before = os.umask(0o077)
    try:
        put(store, key())
    finally:
        os.umask(before)
    for path in (store.root, *store.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("suffix", [".o", ".json"])
@pytest.mark.parametrize(
    "damage", ["empty", "half", "garbage", "nested", "flipped bit", "directory", "fifo", "link", "missing"]
)
def test_damage_is_noticed(store, suffix, damage, tmp_path):
    put(store, key())
    path = store.path(key().name, suffix)
    data = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage == "fifo":
        os.mkfifo(path, 0o600)
        signal.alarm(20)  # it must not be waited for
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage != "missing":
        middle = len(data) // 2
        changed = {"empty": b"", "half": data[:middle], "garbage": b"\x80" * 100, "nested": b"[" * 200_000}
        path.write_bytes(changed.get(damage, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]))
    if suffix == ".json" and damage == "missing":
        assert store.find(key()) == []  # no record, no kernel
        return
    with pytest.raises((Damaged, OSError)):
        store.find(key())[0].read()
    signal.alarm(0)
    put(store, key())
    assert store.find(key())[0].read() == DATA


ODD = {
    "directory": Path.mkdir,
    "full directory": lambda path: (path / "theirs").mkdir(parents=True),
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to("elsewhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "socket": lambda path: os.mknod(path, 0o600 | stat.S_IFSOCK),
    "device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 7)),  # /dev/full
    "foreign file": lambda path: (path.touch(), os.chown(path, 12345, -1)),
}


@as_root
@pytest.mark.parametrize("suffix", [".o", ".json", ".lock"])
@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_file_of_ours_is_replaced(store, suffix, odd):
    put(store, key())
    path = store.path(key().name, suffix)
    path.unlink(missing_ok=True)
    ODD[odd](path)
    signal.alarm(20)  # nothing waits for a fifo
    if suffix != ".lock":
        with pytest.raises(Damaged, match=str(path)):
            store.find(key())[0].read()
    with store.lock(key().name):
        with pytest.raises(BlockingIOError), open(store.path(key().name, ".lock"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        put(store, key())
    signal.alarm(0)
    assert store.find(key())[0].read() == DATA
    left = set(files(store)) - {store.path(key().name, suffix).name for suffix in (".o", ".json", ".lock")}
    assert len(left) == (odd == "full directory"), "somebody's files are kept"
    assert all((path.parent / name / "theirs").is_dir() for name in left)


@as_root
@pytest.mark.parametrize("suffix", [".o", ".json", ".lock"])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("how", ["gc", "clear"])
def test_what_is_no_file_of_ours_stops_no_removal(store, suffix, odd, how):
    for n in range(2):
        put(store, key(n))
    path = store.path(key(0).name, suffix)
    path.unlink(missing_ok=True)
    ODD[odd](path)
    store.gc(0, 0) if how == "gc" else store.clear()
    theirs = [name for name in files(store) if not name.endswith(".lock")]
    assert all(name.startswith(path.name) and odd == "full directory" for name in theirs)


def test_a_directory_that_cannot_be_moved_is_named(small_disk):
    """A mount point."""
    store = Store(small_disk / "cache")
    put(store, key())
    path = store.path(key().name, ".o")
    path.unlink()
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
    try:
        with pytest.raises(OSError, match=f"{path} is a directory that cannot be moved"):
            put(store, key())
        store.gc(0, 0)
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("suffix", [".o", ".json"])
@pytest.mark.parametrize("writable", [True, False])
def test_any_flipped_bit_of_the_object_or_of_the_record_is_noticed(store, suffix, writable):
    put(store, key(), DATA[:64])
    path = store.path(key().name, suffix)
    data = path.read_bytes()
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        problems: list[str] = []
        list(Store(store.root, writable).entries(problems))
        if suffix == ".json":
            assert problems and Store(store.root, False).find(key()) == []
        if writable or suffix == ".o":
            with pytest.raises(Damaged):
                Store(store.root, writable).find(key())[0].read()


@pytest.mark.parametrize("other", [key(2), key(arch="sm_100a")])
def test_the_record_must_be_of_the_key(store, other):
    put(store, key())
    put(store, other)
    for suffix in (".o", ".json"):
        shutil.copy(store.path(other.name, suffix), store.path(key().name, suffix))
    with pytest.raises(Damaged, match="of another kernel"):
        store.find(key())


@pytest.mark.parametrize("level", ["root", "base", "arch"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_directories_that_others_may_write_are_refused(store, level, mode):
    put(store, key())
    directory = {"root": store.root, "base": store.base, "arch": store.base / "sm_90a"}[level]
    directory.chmod(mode)
    with pytest.raises(Untrusted, match="writable by others: chmod go-w"):
        store.find(key())
    with pytest.raises(Untrusted):
        put(store, key(2))


@as_root
@pytest.mark.parametrize("level", ["root", "base", "arch", "file"])
def test_what_belongs_to_another_user_is_refused(store, level):
    put(store, key())
    path = {"root": store.root, "base": store.base, "arch": store.base / "sm_90a"}.get(
        level, store.path(key().name, ".o")
    )
    os.chown(path, 12345, -1)
    with pytest.raises((Untrusted, Damaged), match="belongs to user 12345"):
        store.find(key())[0].read()
    if level != "file":
        with pytest.raises(Untrusted):
            put(store, key(2))


@as_root
def test_a_bundle_may_belong_to_root(store, open_tmp):
    put(Store(open_tmp / "bundle", for_all=True), key())
    child = os.fork()
    if child == 0:  # as another user
        try:
            os.setuid(65534)
            assert Store(open_tmp / "bundle", writable=False).find(key())[0].read() == DATA
            try:
                Store(open_tmp / "bundle").find(key())
            except Untrusted:
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_root_may_be_a_link_but_nothing_below(store, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    store.root.symlink_to(tmp_path / "real")
    put(store, key())
    assert store.find(key())[0].read() == DATA
    (store.base / "sm_90a").rename(tmp_path / "moved")
    (store.base / "sm_90a").symlink_to(tmp_path / "moved")
    with pytest.raises(Untrusted, match="is a link"):
        store.find(key())
    with pytest.raises(Untrusted, match="is a link"):
        put(store, key(2))


def test_a_file_of_the_root_is_looked_at(store, tmp_path):
    put(store, key())
    file = store.root / "library.so"
    file.write_bytes(b"")
    store.check_file(file)
    file.chmod(0o666)
    with pytest.raises(Untrusted, match="writable by others"):
        store.check_file(file)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Untrusted, match="is a link"):
        store.check_file(file)


@as_root
def test_a_link_into_a_foreign_directory_is_refused(store, tmp_path):
    (tmp_path / "foreign").mkdir(mode=0o700)
    os.chown(tmp_path / "foreign", 12345, -1)
    store.root.symlink_to(tmp_path / "foreign")
    with pytest.raises(Untrusted, match="belongs to user 12345"):
        put(store, key())


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 64 KB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_leaves_nothing_behind(small_disk):
    store = Store(small_disk / "cache")
    put(store, key(1), b"x" * 20000)
    with pytest.raises(OSError) as info:
        put(store, key(2), b"x" * 60000)
    assert info.value.errno == errno.ENOSPC
    assert store.find(key(1))[0].read() == b"x" * 20000 and store.find(key(2)) == []
    assert not any(name.endswith(".tmp") for name in files(store))


@pytest.mark.parametrize("full", [1, 2])
def test_a_disk_that_is_full_before_the_last_file_changes_nothing(store, monkeypatch, full):
    put(store, key(1))
    before, real, calls = files(store), os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for n in (1, 2):
        calls.clear()
        with pytest.raises(OSError, match="No space left"):
            put(store, key(n), b"new")
        assert files(store) == before and store.find(key(1))[0].read() == DATA


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_directory_that_cannot_be_synchronised_has_what_was_stored(store, monkeypatch, code):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    put(store, key())
    assert store.find(key())[0].read() == DATA


@pytest.mark.parametrize("when", ["first replace", "second replace", "fsync"])
def test_a_writer_that_is_killed_leaves_no_entry(store, when, run):
    code = f"""
import os, signal
calls = 0
def kill(*arguments):
    global calls
    calls += 1
    if calls == {2 if when == "second replace" else 1}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
name = "{"fsync" if when == "fsync" else "replace"}"
original = getattr(os, name)
setattr(os, name, kill)
from tests.jit_cache.test_store import *
put(Store(settings().root), key())
"""
    run(code, status=-signal.SIGKILL)
    assert store.find(key()) == []
    left = [name for name in files(store) if name.endswith(".tmp")]
    assert left
    put(store, key())
    assert store.find(key())[0].read() == DATA
    store.gc(10**9, 10**9)
    assert left == [name for name in files(store) if name.endswith(".tmp")], "a young one may be in use"
    age(store, 7200)
    store.gc(10**9, 10**9)
    assert not any(name.endswith(".tmp") for name in files(store))
    assert store.find(key())[0].read() == DATA


def test_names_survive_a_crash(store, monkeypatch):
    """A rename is on the disk only after its directory has been synchronised."""
    events = []

    def note(name, what):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: (events.append(what(*args)), real(*args))[1])

    note("replace", lambda old, new: new)
    note("fsync", lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    put(store, key())
    assert store.path(key().name, ".json") in events and events[-1] == store.path(key().name).parent


def age(store, seconds, pattern="*"):
    """Makes files look as if they had last been used so long ago."""
    past = time.time() - seconds
    for path in store.base.glob(f"*/{pattern}"):
        os.utime(path, (past, past))


def test_gc_by_age_and_by_size(store):
    for n in range(4):
        put(store, key(n))
        age(store, 86400 * (10 - n), f"{key(n).name.partition('/')[2]}*")
    store.touch(key(0).name)  # used just now
    removed = store.gc(10**9, 86400 * 9.5)
    assert removed == []
    assert [name for name, _ in store.gc(10**9, 86400 * 8.5)] == [key(1).name]
    size = sum(path.stat().st_size for path in store.base.glob("*/*"))
    assert [name for name, _ in store.gc(size - 1, 10**9)] == [key(2).name]
    assert {entry.name for entry in store.entries()} == {key(0).name, key(3).name}


def test_gc_takes_objects_without_record_but_not_what_is_being_written_or_compiled(store):
    for n in range(3):
        put(store, key(n))
        store.path(key(n).name, ".json").unlink()
    age(store, 7200, f"{key(0).name.partition('/')[2]}*")
    age(store, 7200, f"{key(1).name.partition('/')[2]}*")
    with store.lock(key(1).name):
        age(store, 7200, f"{key(1).name.partition('/')[2]}*")
        store.gc(10**9, 86400)
        assert not store.path(key(0).name, ".o").exists()
        assert store.path(key(1).name, ".o").exists() and store.path(key(2).name, ".o").exists()


def test_clear_leaves_foreign_files(store):
    put(store, key())
    (store.base / "sm_90a" / "mine.txt").write_text("x")
    (store.base / "sm_90a" / "notes.tmp").write_text("x")
    assert store.clear() == [key().name]
    assert files(store) == ["mine.txt", "notes.tmp"]


def test_clear_counts_what_is_gone(store):
    put(store, key(1))
    put(store, key(2))
    with store.lock("sm_90a/alone-" + "0" * 32), store.lock(key(2).name):
        assert store.clear() == [key(1).name]
    assert [entry.name for entry in store.entries()] == [key(2).name]


@as_root
@pytest.mark.parametrize("level", ["root", "base", "arch"])
@pytest.mark.parametrize("how", ["gc", "clear", "remove"])
def test_nothing_is_removed_from_the_cache_of_another_user(store, level, how):
    """Root could, but takes no lock there: a kernel that is being written would be lost."""
    put(store, key())
    (store.base / "sm_90a" / f".{store.path(key().name).name}.o.x.tmp").write_text("x")
    age(store, 7200)
    os.chown({"root": store.root, "base": store.base, "arch": store.base / "sm_90a"}[level], 12345, -1)
    before = files(store)
    with pytest.raises(Untrusted, match="belongs to user 12345"):
        store.gc(0, 0) if how == "gc" else store.clear() if how == "clear" else store.remove(key().name)
    assert files(store) == before


def test_nothing_is_removed_through_a_link(store, tmp_path):
    put(store, key())
    (store.base / "sm_90a").rename(tmp_path / "moved")
    (store.base / "sm_90a").symlink_to(tmp_path / "moved")
    for remove in (lambda: store.gc(0, 0), store.clear):
        with pytest.raises(Untrusted, match="is a link"):
            remove()
    assert len(list((tmp_path / "moved").iterdir())) == 2


@pytest.mark.parametrize("how", ["gc", "clear"])
def test_a_temporary_file_stays_while_its_kernel_is_locked(store, how):
    put(store, key())
    temporary = store.base / "sm_90a" / f".{store.path(key().name).name}.o.x.tmp"
    temporary.write_text("x")
    age(store, 7200)
    with store.lock(key().name):
        store.gc(0, 0) if how == "gc" else store.clear()
        assert temporary.exists()
    store.gc(0, 0) if how == "gc" else store.clear()
    assert not temporary.exists()


def test_touch_writes_once_an_hour(store):
    put(store, key())
    path = store.path(key().name, ".json")
    before = path.stat().st_mtime
    store.touch(key().name)
    assert path.stat().st_mtime == before
    age(store, 7200)
    store.touch(key().name)
    assert time.time() - path.stat().st_mtime < 60


def test_dates_in_the_future_are_corrected(store):
    """Those of files that were written or used while the clock was ahead: they would never be old."""
    put(store, key(1))
    put(store, key(2))
    store.path(key(2).name, ".json").unlink()
    (store.base / "sm_90a" / f".{store.path(key(1).name).name}.o.x.tmp").write_text("x")
    age(store, -86400)
    before = files(store)
    assert store.gc(10**9, 86400) == [] and files(store) == before
    now = time.time()
    assert all(path.stat().st_mtime < now + 1 for path in store.base.glob("*/*"))
    age(store, 7200)
    assert len(store.gc(10**9, 3600)) == 3 and files(store) == []
    put(store, key(1))
    age(store, -86400)
    store.touch(key(1).name)
    assert store.path(key(1).name, ".json").stat().st_mtime < time.time() + 1


HOLD = """
with Store(settings().root).lock('sm_90a/x'):
    print("held", flush=True)
    import time; time.sleep(60)
"""


def test_a_lock_excludes_other_processes_until_its_holder_dies(store, start):
    holder = start(HOLD)
    assert holder.stdout.readline() == "held\n"
    begin = time.monotonic()
    with store.lock("sm_90a/x", timeout=0.3):
        assert time.monotonic() - begin > 0.29, "taken while it was held"
    holder.send_signal(signal.SIGKILL)
    begin = time.monotonic()
    with store.lock("sm_90a/x", timeout=60):
        assert time.monotonic() - begin < 30


def test_an_interrupted_wait_for_a_lock_leaves_no_descriptor(store):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with store.lock("sm_90a/x"):
            held = set(store_module._held)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt), store.lock("sm_90a/x", timeout=20):
                pass
            assert store_module._held == held
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("locked_before", [True, False])
def test_an_entry_is_removed_under_its_lock(store, monkeypatch, locked_before):
    put(store, key())
    if locked_before:
        with store.lock(key().name):
            pass
    real, taken = Path.unlink, []

    def unlink(path, **options):
        descriptor = os.open(store.path(key().name, ".lock"), os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert store.remove(key().name) > 0
    assert taken == []


def test_who_waited_for_a_lock_that_was_removed_takes_the_new_one(store):
    """Its descriptor is of a file without a name, which a third process would not see."""
    put(store, key())
    path = store.path(key().name, ".lock")
    path.touch(0o600)
    real, opened = os.open, []

    def late(name, *options, **more):
        descriptor = real(name, *options, **more)
        if name == path and not opened:
            opened.append(descriptor)
            store.remove(key().name)
        return descriptor

    with mock.patch.object(os, "open", late), store.lock(key().name):
        assert opened and path.exists()
        other = real(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


def test_who_removes_an_entry_holds_the_lock_that_others_see(store):
    """Between its opening the lock file and locking it, another removes both, and a third compiles."""
    put(store, key())
    path = store.path(key().name, ".lock")
    path.touch(0o600)
    third, real, opened = store.lock(key().name), os.open, []

    def late(name, *options, **more):
        descriptor = real(name, *options, **more)
        if name == path and not opened:
            opened.append(descriptor)
            store.remove(key().name)
            third.__enter__()
            put(store, key())
        return descriptor

    with mock.patch.object(os, "open", late):
        assert store.remove(key().name) == 0
    assert store.find(key())[0].read() == DATA and path.exists()
    third.__exit__(None, None, None)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO, errno.ENOSYS, errno.EPERM, errno.EINVAL])
def test_only_eagain_is_contention(store, monkeypatch, code):
    def fail(descriptor, flags):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    begin = time.monotonic()
    with store.lock("sm_90a/x", timeout=60):
        assert time.monotonic() - begin < 5
    for n in range(3):
        put(store, key(n))
        store.path(key(n).name, ".lock").touch(0o600)
    age(store, 7200, f"{key(0).name.partition('/')[2]}*")
    assert [name for name, _ in store.gc(10**9, 3600)] == [key(0).name]
    assert len(store.clear()) == 2 and not list(store.entries())


def test_a_forked_child_does_not_keep_a_lock(store, start):
    """A lock lives as long as any copy of its descriptor."""
    parent = start(
        """
import os, time
with Store(settings().root).lock("sm_90a/x"):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""
    )
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        begin = time.monotonic()
        with store.lock("sm_90a/x", timeout=20):
            assert time.monotonic() - begin < 15
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_copy_of_a_descriptor_does_not_keep_a_lock(store):
    """As a process has it that was forked in C, past Python's hooks."""
    with store.lock("sm_90a/x"):
        copy = os.dup(max(store_module._held))
    try:
        with store.lock("sm_90a/x", timeout=0.0) as free:
            assert free
    finally:
        os.close(copy)


def test_settings():
    read = Settings.read
    home = {"HOME": "/home/x"}
    assert read({**home, "JIT_CACHE_DIR": "/a"}).root.as_posix() == "/a"
    now = read({"JIT_CACHE_BUNDLE": "/a:/b:", "JIT_CACHE_ARCH": "sm_90a, sm_100a", "JIT_CACHE_WORKERS": "3"})
    assert [path.as_posix() for path in now.bundles] == ["/a", "/b"]
    assert now.archs == ("sm_90a", "sm_100a") and now.workers == 3 and now.mode == "on"
    now = read({"JIT_CACHE_DIR": "~/a", "JIT_CACHE_BUNDLE": "~/b:c"})
    assert (now.root, *now.bundles) == (Path.home() / "a", Path.home() / "b", Path.cwd() / "c")
    for wrong in ({"JIT_CACHE_MODE": "maybe"}, {"JIT_CACHE_WORKERS": "-1"}, {"JIT_CACHE_LOG": "loud"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            read(wrong)


@pytest.mark.parametrize(
    "xdg, home, root",
    [
        ("/x", "/h", "/x/jit_cache"),
        ("", "/h", "/h/.cache/jit_cache"),
        ("relative", "/h", "/h/.cache/jit_cache"),  # to be ignored, says the XDG specification
        ("", "~", "/.cache/jit_cache"),
    ],
)
def test_default_directory(monkeypatch, xdg, home, root):
    monkeypatch.setattr(os.path, "expanduser", lambda path: home)
    assert Settings.read({"XDG_CACHE_HOME": xdg}).root.as_posix() == root


def test_records_are_readable_json(store):
    put(store, key())
    record = json.loads(store.path(key().name, ".json").read_text())
    assert record["key"] == key().record and record["files"][".o"]["size"] == len(DATA)
