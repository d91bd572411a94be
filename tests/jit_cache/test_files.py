"""Files that a user asked for: after an error the old one is there, no other is left, and the error names it."""

import errno
import os
import resource
import stat
import subprocess
import sys

import pytest

from jit_cache.bundle import export_bundle
from jit_cache.files import append_whole, write_whole
from jit_cache.store import Store
from tests.jit_cache.conftest import ROOT, environment
from tests.jit_cache.test_store import key, put, small_disk  # noqa: F401 - a fixture

OLD, NEW = b"old" * 100, b"new" * 10_000


@pytest.fixture
def small_files():
    """No file may be larger than 16 KB, as after `ulimit -f 16`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [write_whole, append_whole])
@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_is_too_large_leaves_all_as_it_was(tmp_path, small_files, write, there):
    path = tmp_path / "file"
    if there:
        path.write_bytes(OLD)
    with pytest.raises(OSError, match="File too large") as info:
        write(path, NEW)
    assert info.value.errno == errno.EFBIG and info.value.filename == str(path)
    assert (path.read_bytes() if path.exists() else b"") == (OLD if there else b"")
    assert set(os.listdir(tmp_path)) <= {"file"}


@pytest.mark.parametrize("write", [write_whole, append_whole])
def test_a_full_disk_leaves_all_as_it_was(small_disk, write):  # noqa: F811
    path = small_disk / "file"
    path.write_bytes(OLD)
    with pytest.raises(OSError, match="No space left") as info:
        write(path, NEW * 10)
    assert info.value.errno == errno.ENOSPC and info.value.filename == str(path)
    assert path.read_bytes() == OLD and os.listdir(small_disk) == ["file"]


def test_what_is_written(tmp_path):
    path = tmp_path / "file"
    write_whole(path, OLD)
    assert path.read_bytes() == OLD and stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    append_whole(path, NEW)
    assert path.read_bytes() == OLD + NEW
    path.chmod(0o640)
    write_whole(path, NEW)
    assert path.read_bytes() == NEW and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def umask():
    before = os.umask(0)
    os.umask(before)
    return before


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", NEW)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == NEW


def test_what_is_no_file_is_written_as_it_is(tmp_path):
    write_whole("/dev/null", NEW)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        write_whole(tmp_path, NEW)


@pytest.mark.parametrize("place", ["nowhere/file", "file/below"])
def test_a_place_that_is_none_is_named(tmp_path, place):
    (tmp_path / "file").touch()
    for write in (write_whole, append_whole):
        with pytest.raises((FileNotFoundError, NotADirectoryError)) as info:
            write(tmp_path / place, NEW)
        assert info.value.filename == str(tmp_path / place)


def test_an_archive_survives_an_export_that_fails(cache, tmp_path):
    put(Store(cache), key(1), b"x" * 100)
    digest, _ = export_bundle(tmp_path / "k.tar", Store(cache).entries())
    old = (tmp_path / "k.tar").read_bytes()
    put(Store(cache), key(2), b"x" * 100_000)
    command = f"ulimit -f 16; exec {sys.executable} -m jit_cache export {tmp_path / 'k.tar'}"
    done = subprocess.run(["bash", "-c", command], env=environment({}), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"jit_cache: [Errno 27] File too large: '{tmp_path / 'k.tar'}'\n"
    assert (tmp_path / "k.tar").read_bytes() == old and set(os.listdir(tmp_path)) == {"cache", "k.tar"}


@pytest.mark.parametrize("count", [1, 40])
def test_output_that_cannot_be_written_is_named(cache, count):
    """Less than the buffer of the standard output holds, and more."""
    for n in range(count):
        put(Store(cache), key(n))
    command = f"exec {sys.executable} -m jit_cache list --json - >/dev/full"
    done = subprocess.run(["bash", "-c", command], env=environment({}), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "jit_cache: [Errno 28] No space left on device: 'standard output'\n")
