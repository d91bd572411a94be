"""Directories of compiled kernels: who may write, how a file gets in whole, how damage is noticed, what is thrown away.

Layout: `<root>/v1/<arch>/<builder>-<32 hex>` with the suffixes .o (the object), .json (its record), .lock, and .so (a
shared library, in bundles only). The .json is written last: an object without it does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import write_all
from .key import FORMAT, Key, digest, runs_here
from .record import NAME, check_record, parse

log = logging.getLogger("jit_cache")
_SUFFIXES = (".json", ".o", ".so", ".lock")  # .json first: without it the entry is gone, whatever happens to the rest
_TEMPORARY = re.compile(r"\.([^.]+)\.(?:json|o|so)\..*\.tmp")
_HOUR = 3600.0


@dataclass(frozen=True)
class Settings:
    """All environment variables of jit_cache, read once a process.

    JIT_CACHE_DIR: root of the cache; default $XDG_CACHE_HOME/jit_cache or ~/.cache/jit_cache.
    JIT_CACHE_BUNDLE: read-only directories to look in before, separated by ':'.
    JIT_CACHE_MODE: `on`, `warn` (say so when compiling) or `off` (never compile: MissingKernelError).
    JIT_CACHE_ARCH: architectures for the command line on a machine without GPU, separated by ','.
    JIT_CACHE_WORKERS: processes that prewarm; default what processors and memory allow.
    JIT_CACHE_LOG: `debug`, `info` or `warning`: log to stderr at that level.
    """

    root: Path
    bundles: tuple[Path, ...]
    mode: str
    archs: tuple[str, ...]
    workers: int
    log: str

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Settings:
        """Raises ValueError for a value outside of those above."""

        def choice(name: str, default: str, *others: str) -> str:
            value = environ.get(name, "").lower() or default
            if value not in (default, *others):
                raise ValueError(f"{name} must be {' or '.join((default or 'unset', *others))}, got {value!r}")
            return value

        def words(name: str, separator: str) -> list[str]:
            return [word.strip() for word in environ.get(name, "").split(separator) if word.strip()]

        def here(path: str) -> Path:
            return Path(os.path.expanduser(path)).absolute()  # a shell leaves a quoted ~ as it is

        home = os.path.expanduser("~")  # stays as it is for a user without home: then nothing can be stored
        default = Path(home if os.path.isabs(home) else "/", ".cache")
        if os.path.isabs(environ.get("XDG_CACHE_HOME", "")):
            default = Path(environ["XDG_CACHE_HOME"])
        workers = environ.get("JIT_CACHE_WORKERS") or "0"
        if not workers.isdecimal():
            raise ValueError(f"JIT_CACHE_WORKERS must be an integer of at least 0 (0: the default), got {workers!r}")
        return Settings(
            root=here(environ["JIT_CACHE_DIR"]) if environ.get("JIT_CACHE_DIR") else (default / "jit_cache").absolute(),
            bundles=tuple(map(here, words("JIT_CACHE_BUNDLE", os.pathsep))),
            mode=choice("JIT_CACHE_MODE", "on", "warn", "off"),
            archs=tuple(words("JIT_CACHE_ARCH", ",")),
            workers=int(workers),
            log=choice("JIT_CACHE_LOG", "", "debug", "info", "warning"),
        )


@functools.cache
def settings() -> Settings:
    """The settings of this process. Tests that change the environment call `compile.reset()`."""
    result = Settings.read()
    if result.log:
        log.setLevel(result.log.upper())
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(message)s"))
            log.addHandler(handler)
            log.propagate = False
    return result


@functools.cache
def warn_once(message: str) -> None:
    """Logged, not `warnings.warn`: under `-W error` a full disk must not become an exception."""
    log.warning("jit_cache: %s", message)


def describe(data: bytes) -> dict[str, Any]:
    """The entry of a file in a record: its size and its sha256."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


class Damaged(Exception):
    """A stored kernel that must not be used.

    Example:
        >>> from jit_cache import Damaged
        >>> issubclass(Damaged, Exception)
        True
    """


class Untrusted(OSError):
    """A directory in which others may write native code, or that is not a directory of ours."""


@dataclass(frozen=True)
class Entry:
    """One stored kernel: its name (`<arch>/<builder>-<hex>`) and JSON record."""

    store: Store
    name: str
    record: dict[str, Any]

    def read(self, suffix: str = ".o") -> bytes:
        """Returns the bytes of the object (.o) or shared library (.so).

        Raises:
            Damaged: the file is not there, or its size and sha256 are not those of the record.
        """
        try:
            data = self.store.read_file(self.name + suffix)
        except OSError as error:  # it is not there, or its directory is not ours
            raise Damaged(f"{self.store.path(self.name, suffix)}: {error.strerror}") from error
        if describe(data) != self.record["files"][suffix]:
            raise Damaged(f"{self.store.path(self.name, suffix)}: not the bytes that were stored")
        return data


class Store:
    """A root directory. `writable=False` is a bundle: it may belong to root, and is never written.

    `for_all`: what is written may be read by every user, as a bundle's directory must be; else by its owner alone.
    """

    def __init__(self, root: Path, writable: bool = True, for_all: bool = False) -> None:
        self.root = root
        self.writable = writable
        self.for_all = for_all
        self.directory_mode, self.file_mode = (0o755, 0o644) if for_all else (0o700, 0o600)
        self.base = root / f"v{FORMAT}"

    def path(self, name: str, suffix: str = "") -> Path:
        return self.base / (name + suffix)

    def unusable(self, error: OSError) -> str:
        """One message for reading and for writing, to warn once."""
        return f"cannot use {self.root}: {error.strerror or error}"

    # ---------------------------------------------------------------------------------------------------------- reading

    def find(self, key: Key) -> list[Entry]:
        """Returns the entries that serve a key: one at most of a cache, of a bundle perhaps several builds.

        Raises:
            Damaged: there is a record that cannot be used. OSError, Untrusted.
        """
        if not self.writable:
            entries = self._by_kernel.get(key.record["kernel"], ())
            return [entry for entry in entries if runs_here(entry.record["key"], key.record)]
        entry = self.entry(key.name)
        return [] if entry is None else [entry]

    def entries(self, problems: list[str] | None = None) -> Iterator[Entry]:
        """Yields all entries, by name. What is wrong with the others, or with a bundle, is appended to `problems`."""
        if problems is not None:
            problems += self._root_problems()
        for path in sorted(self.base.glob("sm_*/*.json")):
            name = f"{path.parent.name}/{path.stem}"
            if not NAME.fullmatch(name):
                continue
            try:
                entry = self.entry(name)
            except (Damaged, OSError) as error:
                if problems is not None:
                    problems.append(str(error))
                continue
            if entry is not None:
                yield entry

    def _root_problems(self) -> list[str]:
        """Why there can be no entries, if there is a reason; a cache that is not there yet is none."""
        if not self.writable:
            is_bundle = self.base.is_dir()
            return [] if is_bundle else [f"{self.root} is no bundle: it has no directory {self.base.name}"]
        try:
            self._check(self.root)
        except FileNotFoundError:
            pass
        except OSError as error:
            return [self.unusable(error)]
        return []

    @functools.cached_property
    def _by_kernel(self) -> dict[str, list[Entry]]:
        """The entries of a bundle, which does not change."""
        problems: list[str] = []
        index: dict[str, list[Entry]] = {}
        for entry in self.entries(problems):
            index.setdefault(entry.record["key"]["kernel"], []).append(entry)
        for problem in problems:
            warn_once(f"not used: {problem}")
        return index

    def entry(self, name: str) -> Entry | None:
        """Returns the entry of a name, or None if there is none or it is no name.

        Raises:
            Damaged: the record is not what was stored under this name. OSError, Untrusted.
        """
        if not NAME.fullmatch(name):
            return None
        try:
            data = self.read_file(name + ".json")
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            record = parse(data)
            if not isinstance(record, dict) or record.pop("checksum", None) != digest(record):
                raise ValueError("not the record that was stored")
            check_record(name, record)
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{self.path(name, '.json')}: {error}") from error
        return Entry(self, name, record)

    def read_file(self, name: str) -> bytes:
        """Reads a file of ours. What others own or may write is refused: it becomes native code in this process.

        Raises:
            Damaged: it is no file of ours, or cannot be read. FileNotFoundError. Untrusted: its directory is not ours.
        """
        path = self.path(name)
        self._check(path.parent)
        try:
            self._trust(path, os.stat(path, follow_symlinks=False), stat.S_ISREG)  # before a device is opened
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._trust(path, os.fstat(descriptor), stat.S_ISREG)
                with open(descriptor, "rb", closefd=False) as file:
                    return file.read()
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise
        except Untrusted as error:
            raise Damaged(error.strerror) from error
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from error

    # ---------------------------------------------------------------------------------------------------------- writing

    def write(self, name: str, record: dict[str, Any], files: Mapping[str, bytes]) -> Entry:
        """Stores a kernel's files (suffix -> bytes) and then its record, completed by their sizes, hashes and its own.

        Raises:
            OSError: nothing was stored; no temporary file is left.
        """
        directory = self.path(name).parent
        self._make(directory)
        record = {**record, "files": {suffix: describe(data) for suffix, data in files.items()}}
        text = json.dumps({**record, "checksum": digest(record)}, indent=1, sort_keys=True)
        contents = {**files, ".json": text.encode()}
        for suffix in contents:
            _make_way(self.path(name, suffix))
        write_all({self.path(name, suffix): data for suffix, data in contents.items()}, self.file_mode)
        return Entry(self, name, record)

    def touch(self, name: str) -> None:
        """Notes the use of an entry for `gc`, once an hour at most. A date in the future is corrected."""
        path = self.path(name, ".json")
        with contextlib.suppress(OSError):
            if self.writable and abs(time.time() - path.stat().st_mtime) > _HOUR:
                os.utime(path)

    # ----------------------------------------------------------------------------------------------------------- safety

    def _make(self, directory: Path) -> None:
        """Creates the root, and the format's and arch's directories in it; checks each before it makes the next."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for level in (self.root, self.base, directory):
            with contextlib.suppress(FileExistsError):
                level.mkdir(mode=self.directory_mode)
                level.chmod(self.directory_mode)  # what the umask took
            self._check(level)

    def _check(self, directory: Path) -> None:
        """Raises Untrusted unless all levels from the root down to directory are ours alone. The root may be a link."""
        for level in (self.root, self.base, directory)[: 1 + len(directory.relative_to(self.root).parts)]:
            self._trust(level, os.stat(level, follow_symlinks=level == self.root), stat.S_ISDIR)

    def _trust(self, path: Path, status: os.stat_result, right_type: Any) -> None:
        owners = (os.geteuid(),) if self.writable else (os.geteuid(), 0)
        if not right_type(status.st_mode):
            kind = "file" if right_type is stat.S_ISREG else "directory"
            raise Untrusted(errno.EPERM, f"{path} is a link or no {kind}")
        if status.st_uid not in owners:
            raise Untrusted(errno.EPERM, f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
        if status.st_mode & 0o022:
            raise Untrusted(errno.EPERM, f"{path} is writable by others: chmod go-w {path}")

    def check_file(self, path: Path) -> None:
        """Raises Untrusted unless a file in the root is a regular one that others may not write."""
        self._check(self.root)
        self._trust(path, os.stat(path, follow_symlinks=False), stat.S_ISREG)

    # ---------------------------------------------------------------------------------------------------------- locking

    @contextlib.contextmanager
    def lock(self, name: str, timeout: float = 600.0) -> Iterator[bool]:
        """Holds the inter-process lock of an entry; gives False if another one still holds it after `timeout`.

        Goes on without it where locking does not work (read-only, full, no flock) and after `timeout` seconds: two
        processes may then compile the same kernel, which is harmless.
        """
        path, descriptor, free = self.path(name, ".lock"), -1, True
        try:
            try:
                self._make(path.parent)
                if _make_way(path):
                    warn_once(f"{path} was no file of this user: replaced")
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                _held.add(descriptor)
                end = time.monotonic() + timeout
                while free and not (_try_lock(descriptor) and _is_file(descriptor, path)):
                    time.sleep(min(0.02, timeout))
                    free = time.monotonic() < end
            except OSError as error:
                log.debug("no lock for %s: %s", name, error)
            if timeout and not free:
                warn_once(f"gave up waiting for {path} after {timeout:.0f} s")
            yield free
        finally:
            if descriptor in _held:  # else a fork closed it
                _held.discard(descriptor)
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # of copies, too, that a fork in C has made
                os.close(descriptor)

    # ---------------------------------------------------------------------------------------------------------- removal

    def remove(self, name: str) -> int:
        """Removes an entry and its temporary files; returns the bytes freed. While another process holds its lock, they
        stay.

        Raises:
            Untrusted: the cache is not this user's, who can take no lock in it.
        """
        path = self.path(name)
        self._check(path.parent)
        with self.lock(name, timeout=0.0) as free:
            paths = [self.path(name, suffix) for suffix in _SUFFIXES]
            return sum(map(_unlink, [*path.parent.glob(f".{path.name}.*.tmp"), *paths])) if free else 0

    def gc(self, max_bytes: float, max_age: float) -> list[tuple[str, int]]:
        """Removes temporary files older than an hour, incomplete entries, entries not used for `max_age` seconds, then
        the least recently used ones until `max_bytes` remain.

        Returns:
            (name, bytes) of what was removed.

        Raises:
            Untrusted: the cache is not this user's.
        """
        removed: list[tuple[str, int]] = []
        now = time.time()
        used: dict[str, float] = {}
        sizes: dict[str, int] = {}
        for path, name in self._files():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                date = min(status.st_mtime, now)
                if status.st_mtime > now + _HOUR:  # by a clock that was wrong: it ages from now on
                    os.utime(path, follow_symlinks=False)
                old = now - date > _HOUR
                if path.suffix != ".tmp":
                    sizes[name] = sizes.get(name, 0) + status.st_size
                    # An entry was last used when its record was touched; a young object may be about to get its record.
                    if path.suffix == ".json" or not old:
                        used[name] = max(used.get(name, 0.0), date)
                elif old:
                    with self.lock(name, timeout=0.0) as free:
                        if free and (freed := _unlink(path)):
                            removed.append((path.name, freed))
        total = sum(sizes.values())
        for name in sorted(sizes, key=lambda name: used.get(name, 0.0)):
            if (now - used.get(name, 0.0) > max_age or total > max_bytes) and (freed := self.remove(name)):
                total -= freed
                removed.append((name, freed))
        return removed

    def clear(self, names: Collection[str] | None = None) -> list[str]:
        """Removes the entries of these names, by default all that jit_cache wrote here; returns the names of the
        kernels that are gone. Foreign files stay, and entries whose lock another process holds.

        Raises:
            Untrusted: the cache is not this user's.
        """
        files = [(path, name) for path, name in self._files() if names is None or name in names]
        for name in {name for _, name in files}:
            self.remove(name)
        for directory in (*self.base.glob("sm_*"), self.base):
            with contextlib.suppress(OSError):
                directory.rmdir()
        return [name for path, name in files if path.suffix == ".json" and not path.exists()]

    def _files(self) -> list[tuple[Path, str]]:
        """Our files with the names of their entries."""
        with contextlib.suppress(FileNotFoundError):
            self._check(self.root)
        paths = sorted(self.base.glob("sm_*/*"))
        for directory in {path.parent for path in paths}:
            self._check(directory)
        files = []
        for path in paths:
            written = _TEMPORARY.fullmatch(path.name)
            name = f"{path.parent.name}/{written[1] if written else path.stem}"
            if NAME.fullmatch(name) and (written or path.suffix in _SUFFIXES):
                files.append((path, name))
        return files


def _unlink(path: Path) -> int:
    """Removes a file or an empty directory; returns a file's size, 0 for all else and for what is gone already."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            path.unlink()
            return status.st_size
        with contextlib.suppress(OSError):  # it is not empty
            path.rmdir()
    return 0


def _make_way(path: Path) -> bool:
    """Removes what lies in the place of a file of ours and is none, such as a link or another user's file; returns
    whether there was any. A directory that is not empty is renamed, its content is somebody's.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                return False
            path.unlink()
            return True
        try:
            try:
                path.rmdir()
            except OSError:
                path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.aside"))
        except OSError as error:  # a mount point, as of a container
            text = f"{path} is a directory that cannot be moved: {error.strerror}"
            raise OSError(error.errno, text) from error
        return True
    return False


_held: set[int] = set()


def _try_lock(descriptor: int) -> bool:
    """Only EAGAIN (EWOULDBLOCK) means that another holds the lock; any other failure is an OSError for the caller."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether a descriptor is of the file that has this name now: who waited for a lock may hold one that was removed.

    If not, it is made to be of a new file.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
            return True
    other = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.dup2(other, descriptor, inheritable=False)
    os.close(other)
    return False


def close_inherited_locks() -> None:
    """In a forked child: a lock lives as long as any copy of its descriptor, so the copies must go."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()
