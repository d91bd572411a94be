"""The hash of a kernel's own source: the module that defines it and what that imports, found without running it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import symtable
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .key import SCRIPT, digest, module_name

IMPORTED, BEFORE = time.time(), frozenset(sys.modules)  # what is loaded beside these was read since then

_NOT_FOLLOWED = sys.stdlib_module_names | {"cutlass", "jit_cache", "numpy", "torch", "tvm_ffi"}

# Every import statement, and in strings what looks like one: a file too many in the hash does no harm. The norm kernels
# and what these import are hashed in 1.2 ms; with a search through all of the text, not the lines that have the word
# alone, in 3.1. Parsing, and walking the trees, took 31 ms.
_GAP = r"(?:[ \t\f]|\\\n)*"
_MODULE = rf"\w+(?:{_GAP}\.{_GAP}\w+)*"
_ALIAS = rf"(?:{_GAP}\bas\b{_GAP}\w+)?"
_NAMES = rf"\*|\((?:[^)#]|#.*\n)*\)|\w+{_ALIAS}(?:{_GAP},{_GAP}\w+{_ALIAS})*"
_IMPORT = re.compile(
    r"[ \t\f]*(?:"
    rf"from\b{_GAP}((?:\.{_GAP})*)({_MODULE})?{_GAP}\bimport\b{_GAP}({_NAMES})"
    rf"|import\b{_GAP}({_MODULE}{_ALIAS}(?:{_GAP},{_GAP}{_MODULE}{_ALIAS})*))"
)
_BREAK = re.compile(r"[\n:;]")

_INSTALLED = {"site-packages", "dist-packages"}
_SECOND = 10**9
_IMPORT_NS = 30 * _SECOND  # from reading a module to its builders, at most: it imports torch and cutlass before
_AHEAD_NS = 60 * _SECOND  # a file server's clock may be ahead by this much; a later date comes from a wrong clock


class SourceError(Exception):
    """A source that must not be hashed, and why: it cannot be read, or the running code may not be what it says."""


Stamp = tuple[int, int, int]  # when a file was changed and modified, its size: another after every change


@dataclass(frozen=True)
class _Look:
    """A file when this process first looked at it: its stamp, the time then, whether its module was loaded."""

    stamp: Stamp
    at_ns: int
    loaded: bool


_looks: dict[str, _Look] = {}  # by path
_looked_at: set[str] = set()  # names of modules


def look_at_loaded() -> None:
    """Looks at the sources of the modules that are loaded, but for those that no hash includes."""
    for name in set(sys.modules) - _looked_at:
        _looked_at.add(name)
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.endswith(".py") and _top(name) not in _NOT_FOLLOWED:
            with contextlib.suppress(OSError):
                _first_look(Path(file), _stamp(Path(file)), loaded=True)


def _first_look(path: Path, stamp: Stamp, loaded: bool) -> _Look:
    return _looks.setdefault(str(path), _Look(stamp, time.time_ns(), loaded))


def _stamp(path: Path) -> Stamp:
    status = path.stat()  # without the inode: some network file systems give a file another one after a while
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size


def source_digest(modules: Sequence[ModuleType], began: float) -> str:
    """Returns the sha256 over the sources of `modules` and of what they import, also inside functions.

    Followed are imports of
    - modules of the same top-level package, or for a script or lone module, of its directory and, but for what is
      installed there, those below;
    - modules of other packages that mention cutlass, such as the device-side helpers of a kernel library.
    `from package import module` counts package/__init__.py only if the module's name occurs in it, so that a package's
    table of contents does not tie all its kernels together; `import package.module` only if the text takes more of it.

    Raises:
        SourceError: a source cannot be read, or changed (its content, name, links or mode) so late that the running
            code may not be what the file says: an object stored under the file's hash would be wrong for the next
            process.

    A process looks at what is loaded whenever a builder is decorated, and at the rest when it first hashes it. After
    that look no file may change, whatever the clock says. What was not loaded then will be read as it was. The rest was
    read at some time before the look, so the date of its last change decides:
    - A change before the process `began` is not too late, nor is, of what was not loaded before this package, one
      before that (an `exec`, as at a container's start, leaves a process as old as the shell was).
    - The builder's module, the first, may change until 30 s before the look: Python reads a module, then runs what it
      imports. A script may not.
    - A date in the future, by more than a minute, tells of a clock that was wrong, and not of a change since then.
    The date is the inode's (ctime), which only the kernel sets: `touch -d` and `cp -p` choose the other (mtime).
    """
    hashes: dict[str, str] = {}
    for module in modules:
        own_name, file = module_name(module), getattr(module, "__file__", None)
        if file is None:
            raise SourceError(f"{own_name} has no source file")
        alone = "." not in own_name and not file.endswith("__init__.py")
        pending = [(own_name, Path(file), own_name)]
        while pending:
            name, path, importer = pending.pop()
            if name in hashes:
                continue
            try:
                stamp = _stamp(path)
                hashed, device_code, imports = _scan(name, path, stamp)
                own = _top(name) == _top(importer) or (alone and _beside(path, Path(file)))
                if not own and not device_code:
                    continue
                look = _first_look(path, stamp, name == own_name or name in sys.modules)
                is_script = name == own_name and module.__name__ in SCRIPT
                limit = _SECOND * (began if is_script or name in BEFORE else max(began, IMPORTED))
                if name == module_name(modules[0]) and not is_script:
                    limit = max(limit, look.at_ns - _IMPORT_NS)
                changed = stamp[0]
                if stamp != look.stamp or (look.loaded and limit < changed <= look.at_ns + _AHEAD_NS):
                    date = datetime.datetime.fromtimestamp(changed / _SECOND).isoformat(" ", "seconds")
                    change = f"changed (content, name, links or mode) at {date}"
                    raise SourceError(f"{path} {change}, during or after its import")
                hashes[name] = hashed
                pending += [(target, place, name) for source in imports for target, place in _resolve(*source)]
            except (OSError, SyntaxError, ValueError) as error:
                raise SourceError(f"{path} cannot be read: {error}") from error
    return digest(hashes)


def _beside(path: Path, script: Path) -> bool:
    """Whether a source lies in the directory of a script, or below and is not installed there."""
    path, directory = path.resolve(), script.resolve().parent
    return path.parent == directory or (path.is_relative_to(directory) and _INSTALLED.isdisjoint(path.parts))


def _process_start() -> float:
    """When this process began, in seconds since the epoch; 0 where the kernel does not say.

    A forked process runs what its parents have read, and began when the first of them did. They have its command line;
    one that has ended (of a daemon), or has given itself another title, is not found.
    The kernel rounds down, to 10 ms. This rounds up, so that what was saved just before is older; Python takes as long
    until it reads a script.
    """
    process, began, command = "self", 0.0, None
    try:
        while True:
            line = Path(f"/proc/{process}/cmdline").read_bytes()
            if command not in (None, line):
                return began
            _, parent, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - (int(fields[17]) + 1) / os.sysconf("SC_CLK_TCK")
            process, began, command = parent, time.time() - age, line
    except (OSError, ValueError, IndexError):  # no such process, above the first of a container, or no /proc
        return began


PROCESS_START = _process_start()  # now: a forked child, which runs what its parent has read, must inherit it


@functools.cache
def _scan(name: str, path: Path, stamp: Stamp) -> tuple[str, bool, tuple[tuple[str, str | None], ...]]:
    """Hash of a file, whether it mentions cutlass, and its imports as (module, name or None).

    Raises SyntaxError for what is no Python; a module that was imported from the file is.
    """
    data = path.read_bytes()
    text = importlib.util.decode_source(data)
    if getattr(sys.modules.get(name), "__file__", None) != str(path):
        symtable.symtable(text, str(path), "exec")
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    return hashlib.sha256(data).hexdigest(), b"cutlass" in data, tuple(_imports(text, package))


def _imports(text: str, package: list[str]) -> Iterator[tuple[str, str | None]]:
    """The imports in the source of a module in `package`, as (module, name or None)."""
    statements = (_IMPORT.match(text, start) for start in _starts(text))
    bound: dict[str, str] = {}  # by a name of the text, which module that may be
    known: set[str] = set()
    for dots, source, names, modules in (found.groups("") for found in statements if found):
        for module, alias in _names(modules):
            yield module, None
            known.add(module)
            bound[alias or _top(module)] = module if alias else _top(module)
        base = package[: len(package) + 1 - dots.count(".")] if dots else []
        origin = ".".join([*base, *(module for module, _ in _names(source))])
        known.add(origin)
        for name, alias in _names(names):
            yield origin, name
            bound[alias or name] = f"{origin}.{name}"
    # Other names that the text takes of a package, such as a.b.c after `import a` or `from . import a`, may be modules.
    for name, module in bound.items():
        if _top(module) not in _NOT_FOLLOWED and _is_package(module):
            for chain in set(re.findall(rf"(?<![\w.]){re.escape(name)}((?:\.\w+)+)", text)):
                owner = module
                for part in chain[1:].split("."):
                    if not any(f"{other}.".startswith(f"{owner}.{part}.") for other in known):
                        yield owner, part
                    owner = f"{owner}.{part}"


def _starts(text: str) -> Iterator[int]:
    """Where an import statement may begin: in lines that have the word, and those that go on in one of them."""
    done, at = 0, text.find("import")
    while at >= 0:
        start = text.rfind("\n", done, at) + 1 or done
        while start > done and text.endswith("\\\n", done, start):
            start = text.rfind("\n", done, start - 1) + 1 or done
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield start
        yield from (found.end() for found in _BREAK.finditer(text, start, end))
        done, at = end + 1, text.find("import", end)


def _names(items: str) -> list[tuple[str, str]]:
    """The names in an import list such as `(a as b, c.d,)`, each with its alias or "" where it has none."""
    words = (item.split() for item in re.sub(r"#.*|[()\\]", " ", items).split(",")) if items else ()
    cut = ((word, word.index("as") if "as" in word else len(word)) for word in words if word)
    return [("".join(word[:end]), "".join(word[end + 1 :])) for word, end in cut]


def _resolve(module: str, name: str | None) -> Iterator[tuple[str, Path]]:
    """The source files behind `import module` or `from module import name`."""
    if not module or _top(module) in _NOT_FOLLOWED:
        return
    path = module_file(module)
    submodule = module_file(f"{module}.{name}") if name else None
    if name and submodule:
        yield f"{module}.{name}", submodule
    if path and not (name and submodule and not _mentions(importlib.util.decode_source(path.read_bytes()), name)):
        yield module, path


def _mentions(text: str, name: str) -> bool:
    """Whether a word occurs in a text; the first question is the cheaper one."""
    return name in text and re.search(rf"\b{name}\b", text) is not None


def module_file(module: str) -> Path | None:
    """The source file of a module."""
    spec = _locate(module)
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _is_package(module: str) -> bool:
    return getattr(_locate(module), "submodule_search_locations", None) is not None


@functools.cache
def _locate(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module is. Imports nothing."""
    package = name.rpartition(".")[0]
    try:
        if not package:
            return importlib.util.find_spec(name)
        parent = _locate(package)
        return parent and importlib.machinery.PathFinder.find_spec(name, parent.submodule_search_locations or [])
    except (ImportError, ValueError):
        return None


def _top(name: str) -> str:
    return name.partition(".")[0]
