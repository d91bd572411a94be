"""Files that are whole or as they were before, whatever fails, and errors that name them."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path


def write_whole(path: str | Path, data: bytes) -> None:
    """Writes a file that a user asked for, or replaces it: after an error the old one is still there.

    A link stays a link, and a file that is replaced passes on its permissions. A pipe or a device is written as it is.

    Raises:
        OSError: the file could not be written; the error names it.
    """
    target = Path(os.path.realpath(path))
    with naming(path):
        try:
            status = target.stat()
        except FileNotFoundError:
            write_all({target: data})
            return
        if stat.S_ISREG(status.st_mode):
            write_all({target: data}, stat.S_IMODE(status.st_mode))
        else:
            target.write_bytes(data)


def append_whole(path: str | Path, data: bytes) -> None:
    """Appends to a file: all of the data, or nothing.

    Raises:
        OSError: nothing was appended; the error names the file.
    """
    with naming(path), open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


def write_all(files: Mapping[Path, bytes], mode: int | None = None) -> None:
    """Writes files of one directory under temporary names; renames them in this order when all are on the disk.

    mode: their permissions; None: what the umask leaves
    """
    with contextlib.ExitStack() as leftovers:
        written = []
        for path, data in files.items():
            with naming(path):
                temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
                leftovers.callback(temporary.unlink, missing_ok=True)
                with open(descriptor, "wb") as file:
                    if mode is not None:
                        os.fchmod(descriptor, mode)  # what the umask took
                    file.write(data)
                    file.flush()
                    os.fsync(descriptor)
                written.append((temporary, path))
        for temporary, path in written:
            with naming(path):
                os.replace(temporary, path)
    for directory in {path.parent for path in files}:
        _synchronise(directory)


def _synchronise(directory: Path) -> None:
    """Puts the names in a directory on the disk: they should survive a crash, and other NFS clients should see them."""
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Makes errors of the system name this file: those of a write name none, others a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
