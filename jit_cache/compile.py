"""`@compiled`: a call finds its kernel in memory, in a bundle or on disk, and compiles it only if it is nowhere.

Flow: memory -> bundles -> disk -> (JIT_CACHE_MODE=off: error) -> process lock, file lock -> disk again -> compile ->
export -> write -> load -> remember. A kernel is always launched through the loaded object, so that the first run and
all later runs are the same code.

The first launch of a function loads its GPU module. The DSL's runtime does that under a lock of its own (4.8.1: seen in
the disassembly of cuda_dialect_init_library_once), so several threads may launch a function for the first time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib
import inspect
import logging
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from . import resources
from .key import ARCH, Key, Unsupported, classes_in, differences, encode, environment, is_flat, module_name, same, stack
from .source import PROCESS_START, SourceError, look_at_loaded, source_digest
from .store import Damaged, Store, close_inherited_locks, log, settings, warn_once


class MissingKernelError(RuntimeError):
    """A kernel is not stored and JIT_CACHE_MODE=off forbids to compile it.

    Example:
        >>> from jit_cache import MissingKernelError
        >>> issubclass(MissingKernelError, RuntimeError)
        True
    """


class KernelCompileError(RuntimeError):
    """A builder or the compiler failed; the original error is its cause.

    Example:
        >>> from jit_cache import KernelCompileError
        >>> issubclass(KernelCompileError, RuntimeError)
        True
    """


class ForkedProcessError(RuntimeError):
    """A kernel must be compiled in a process that was forked while torch had CUDA in use, or a thread compiled.

    Example:
        >>> from jit_cache import ForkedProcessError
        >>> issubclass(ForkedProcessError, RuntimeError)
        True
    """


class Program:
    """The input of ``cute.compile``: a callable, whose ``__call__`` is a ``cute.jit``, and its fake arguments.

    Args:
        function: the callable.
        `*arguments`: fake tensors, symbolic integers, constants, a fake stream.
        options: more compile options, such as ``--ptxas-options '-O2'``, after ``--enable-tvm-ffi --gpu-arch <arch>``.

    Example:
        >>> from jit_cache import Program
        >>> program = Program(print, 1, 2, options="--opt-level 3")
        >>> program.arguments
        (1, 2)
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, options: str = "") -> None:
        self.function = function
        self.arguments = arguments
        self.options = options


@dataclass
class Stats:
    """Counts of this process, and seconds in sum. Hits in memory are not counted: counting costs more."""

    misses: int = 0
    compiles: int = 0
    disk_loads: int = 0
    bundle_loads: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0


def stats() -> Stats:
    """Returns a snapshot of the counts so far. "Compiles nothing" is: ``stats().compiles`` did not change.

    Returns:
        ``misses``, ``compiles``, ``disk_loads`` and ``bundle_loads`` of this process, ``compile_seconds`` and
        ``load_seconds`` in sum. Hits in memory are not counted: counting costs more.

    Example:
        >>> import jit_cache
        >>> before = jit_cache.stats().compiles
        >>> jit_cache.stats().compiles - before
        0
    """
    return dataclasses.replace(_stats)


@dataclass(frozen=True)
class Kernel:
    """A kernel found or compiled: where it came from, its record, its object's bytes, its function if it was loaded,
    why it was not stored if it was not.

    Fields of the record: `key`; `options`; `seconds` (to compile; 0 in a bundle); `created` (not in a bundle);
    `files`: {".o": {"size", "sha256"}}; `kernels`: for each CUDA kernel `name`, `registers`, `stack_bytes` (local
    memory a thread: spills, indexed arrays), `static_smem_bytes` and, for a static launch, `dynamic_smem_bytes`,
    `threads`.
    """

    origin: Literal["compiled", "disk", "bundle"]
    record: dict[str, Any]
    data: bytes
    function: Any = None
    problem: str | None = None


class Compiled:
    """A builder decorated with ``compiled``; a call returns the loaded function.

    Args:
        build: the builder, whose first parameter is ``arch``.

    Raises:
        TypeError: the builder is no function or has parameters that cannot be a key; see ``compiled``.
        ValueError: the builder is a lambda.

    Example:
        >>> from jit_cache import Compiled, Program, compiled
        >>> @compiled
        ... def scale_forward(arch: str, factor: float) -> Program:
        ...     raise NotImplementedError("imports cutlass, makes fake tensors, returns Program(kernel, *tensors)")
        >>> isinstance(scale_forward, Compiled), scale_forward.key("sm_90a", 2.0).arch
        (True, 'sm_90a')
    """

    __name__: str
    __qualname__: str

    def __init__(self, build: Callable[..., Program]) -> None:
        if not isinstance(build, types.FunctionType):
            raise TypeError(f"compiled: a builder must be a function, got {type(build).__name__}")
        functools.update_wrapper(self, build)
        self.build = build
        self._signature = inspect.signature(build)
        parameters = list(self._signature.parameters.values())
        if [parameter.name for parameter in parameters[:1]] != ["arch"]:
            raise TypeError(f"{build.__qualname__}: the first parameter of a compiled builder must be `arch`")
        if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
            raise TypeError(f"{build.__qualname__}: every parameter of a compiled builder must be positional and named")
        for name in _captured(build):
            what = f"{build.__qualname__}: `{name}`, of an enclosing function, is no key"
            raise TypeError(f"{what}: make it an argument or a name of the module")
        if not re.fullmatch(r"\w+", build.__name__):
            raise ValueError(f"{build.__qualname__}: a compiled builder must have a name: use def")
        self._line = inspect.unwrap(build).__code__.co_firstlineno
        _import_loader()
        environment()
        self._module = sys.modules[build.__module__]
        look_at_loaded()
        self.kernel = f"{module_name(self._module)}.{build.__qualname__}"
        self._memory = functools.lru_cache(maxsize=None, typed=True)(self._load)  # in C: half the time of a dict
        self._loaded: dict[str, Kernel] = {}
        self._sources: dict[frozenset[type], tuple[str | None, str]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the loaded ``tvm_ffi.Function`` of these arguments; it takes positional arguments only.

        Args:
            `*args`, `**kwargs`: the builder's arguments, arch first.

        Returns:
            The function. While calls are recorded, one that does nothing.

        Raises:
            TypeError: an argument is missing, unknown or of a type that cannot be part of a key.
            ValueError: arch is not an architecture.
            MissingKernelError: it is stored nowhere and JIT_CACHE_MODE=off.
            KernelCompileError: the builder or the compiler failed.
            ForkedProcessError: it must be compiled, but this process was forked from one with live CUDA.
        """
        if kwargs:
            args = self._bind(args, kwargs)
        if (calls := _recorded_calls.get()) is not None:
            calls.append((self, self._bind(args, {})))
            return _do_nothing
        try:
            found = self._memory(*args)
        except TypeError:  # an argument without hash: the key accepts or names it
            found = None
        function, exact = found or self._load(*args)
        # The lookup has compared the types of the arguments; `same` compares what is nested, and the sign of zero.
        if exact is None or same(exact, args):
            return function
        return self._load(*args)[0]

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by name, like a function

    def key(self, *args: Any, **kwargs: Any) -> Key:
        """Returns the identity of the kernel of these arguments.

        Args:
            `*args`, `**kwargs`: the builder's arguments, arch first.

        Returns:
            The key.

        Raises:
            TypeError: an argument is missing, unknown or of a type that cannot be part of a key.
            ValueError: arch is not an architecture.
        """
        args = self._bind(args, kwargs)
        encoded: dict[str, Any] = {}
        for name, value in zip(self._signature.parameters, args, strict=True):
            try:
                encoded[name] = encode(value)
            except Unsupported as error:
                raise TypeError(f"{self.__qualname__}: argument `{name}` must be {error}") from None
        arch = encoded.pop("arch")
        if not isinstance(arch, str):
            raise TypeError(f"{self.__qualname__}: argument `arch` must be a str such as 'sm_90a', got {args[0]!r}")
        if not ARCH.fullmatch(arch):
            raise ValueError(f"{self.__qualname__}: argument `arch` must be like 'sm_90a', got {arch!r}")
        classes = frozenset(classes_in(args))
        if classes not in self._sources:
            self._sources[classes] = self._source(classes)
        source, problem = self._sources[classes]
        record = {"kernel": self.kernel, "line": self._line, "arguments": encoded, "arch": arch, "stack": stack()}
        return Key({**record, "environment": environment(), "source": source}, problem)

    def find(self, *args: Any, **kwargs: Any) -> Kernel | None:
        """Returns the stored kernel of these arguments, or None. Compiles and loads nothing.

        Args:
            `*args`, `**kwargs`: the builder's arguments, arch first.

        Returns:
            The kernel, or None if none is stored.

        Raises:
            TypeError: an argument is missing, unknown or of a type that cannot be part of a key.
            ValueError: arch is not an architecture.
        """
        return self._find(self.key(*args, **kwargs), load=False)

    def obtain(self, *args: Any, **kwargs: Any) -> Kernel:
        """Returns the stored kernel of these arguments, or compiles and stores it. Loads nothing.

        Args:
            `*args`, `**kwargs`: the builder's arguments, arch first.

        Returns:
            The kernel.

        Raises:
            TypeError: an argument is missing, unknown or of a type that cannot be part of a key.
            ValueError: arch is not an architecture.
            MissingKernelError: it is stored nowhere and JIT_CACHE_MODE=off.
            KernelCompileError: the builder or the compiler failed.
            ForkedProcessError: it must be compiled, but this process was forked from one with live CUDA.
        """
        args = self._bind(args, kwargs)
        with _process_lock:
            return self._obtain(self.key(*args), args, load=False)

    def record(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """Returns the record of these arguments' kernel.

        Args:
            `*args`, `**kwargs`: the builder's arguments, arch first.

        Returns:
            The record (see ``Kernel``), or None if the kernel is neither loaded nor stored.

        Raises:
            TypeError: an argument is missing, unknown or of a type that cannot be part of a key.
            ValueError: arch is not an architecture.
        """
        key = self.key(*args, **kwargs)
        kernel = self._loaded.get(key.digest) or self._find(key, load=False)
        return kernel.record if kernel else None

    def explain(self, *args: Any, **kwargs: Any) -> list[str]:
        """Says how the key of these arguments differs from the nearest stored one of the same builder.

        Args:
            `*args`, `**kwargs`: the builder's arguments, arch first.

        Returns:
            Lines such as "arguments.n: wanted 1024, stored 4096"; empty if the kernel is stored.

        Raises:
            TypeError: an argument is missing, unknown or of a type that cannot be part of a key.
            ValueError: arch is not an architecture.
        """
        key = self.key(*args, **kwargs)
        if not key.storable:
            return [key.problem]
        if self._find(key, load=False):
            return []
        found: list[list[str]] = []
        for store in _stores():
            records = (entry.record["key"] for entry in store.entries())
            found += [differences(key.record, record) for record in records if record["kernel"] == self.kernel]
        # Another specialization is farther away than another version of the same one.
        near = min(
            found,
            key=lambda lines: (sum(line.startswith(("arguments", "arch:")) for line in lines), len(lines)),
            default=None,
        )
        if near is None:
            return ["nothing is stored of this builder"]
        return near or ["stored, but its files are damaged"]

    # ------------------------------------------------------------------------------------------------- finding, loading

    def _load(self, *args: Any) -> tuple[Any, tuple[Any, ...] | None]:
        """Returns the function of these arguments, and the arguments if equal ones may mean another function."""
        full = self._bind(args, {})
        key = self.key(*full)
        with _process_lock:
            if key.digest not in self._loaded:
                self._loaded[key.digest] = self._obtain(key, full, load=True)
            return self._loaded[key.digest].function, None if all(map(is_flat, args)) else args

    def _obtain(self, key: Key, args: tuple[Any, ...], load: bool) -> Kernel:
        kernel = self._find(key, load)
        if kernel is None:
            _stats.misses += 1
            self._report_miss(key, args)
            store = _stores()[-1]
            with store.lock(key.name) if key.storable else contextlib.nullcontext():
                # While this process waited for the lock, another one may have compiled it.
                kernel = self._find(key, load) or self._compile(key, args, load)
        _stats.disk_loads += kernel.origin == "disk"
        _stats.bundle_loads += kernel.origin == "bundle"
        return kernel

    def _find(self, key: Key, load: bool) -> Kernel | None:
        """Looks in the bundles, then in the cache. What is damaged, or does not load, is not there."""
        for store in _stores():
            try:
                entries = store.find(key)
            except Damaged as error:
                warn_once(f"not used: {error}")
                continue
            except OSError as error:
                warn_once(store.unusable(error))
                continue
            for entry in entries:
                try:
                    data = entry.read()
                    function = _load_object(data) if load else None
                except Damaged as error:
                    warn_once(f"not used: {error}")
                except Exception as error:  # the DSL's loader raises errors of many types
                    warn_once(f"not used: {store.path(entry.name, '.o')} does not load: {error}")
                else:
                    store.touch(entry.name)
                    return Kernel("disk" if store.writable else "bundle", entry.record, data, function)
        return None

    def _compile(self, key: Key, args: tuple[Any, ...], load: bool) -> Kernel:
        global _compiling
        if _inherited_danger:
            raise ForkedProcessError(
                f"{self._call(args)} must be compiled, but this process was forked while {_inherited_danger}. "
                "Compile it before the fork (python -m jit_cache prewarm), or start processes with spawn or forkserver"
            )
        start = time.perf_counter()
        _compiling = threading.get_ident()
        try:
            program = self.build(*args)
            if not isinstance(program, Program):
                raise TypeError(f"the builder must return a Program, got {type(program).__name__}")
            data, launches = _compile_program(program, key.arch)
            kernels = resources.describe(data, launches)
        except Exception as error:
            raise KernelCompileError(f"{self._call(args)}: {type(error).__name__}: {error}") from error
        finally:
            _compiling = 0
        seconds = time.perf_counter() - start
        _stats.compiles += 1
        _stats.compile_seconds += seconds
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        record = {"key": key.record, "options": program.options, "seconds": round(seconds, 3), "created": created}
        record |= {"kernels": kernels, "files": {".o": {"size": len(data)}}}
        problem = None
        source, changed = self._source(frozenset(classes_in(args)))
        if not key.storable:
            problem = f"{self.kernel} is not stored: {key.problem}"
        elif source != key.record["source"]:
            # The builder imported it after the key was made.
            problem = f"{self.kernel} is not stored: {changed or 'its source changed while it was compiled'}"
        elif environment.__wrapped__() != key.record["environment"]:
            problem = f"{self.kernel} is not stored: CUTE_DSL_* variables changed after the first builder was decorated"
        else:
            store = _stores()[-1]
            try:
                record = store.write(key.name, record, {".o": data}).record
            except OSError as error:
                problem = store.unusable(error)
        if problem:
            warn_once(problem)
        return Kernel("compiled", record, data, _load_object(data) if load else None, problem)

    # ------------------------------------------------------------------------------------------------------------- keys

    def _source(self, classes: frozenset[type]) -> tuple[str | None, str]:
        """The hash of the builder's module and of those that define its arguments' classes, or why there is none."""
        modules = {sys.modules[cls.__module__] for cls in classes if not cls.__module__.startswith("cutlass.")}
        try:
            return source_digest([self._module, *modules], PROCESS_START), ""
        except SourceError as error:
            return None, str(error)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs and len(args) == len(self._signature.parameters):
            return args
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__qualname__}: {error}") from None
        bound.apply_defaults()
        return bound.args

    def _report_miss(self, key: Key, args: tuple[Any, ...]) -> None:
        mode = settings().mode
        if mode == "off":
            # The nearest stored one, since a deployment that goes wrong mostly goes wrong by one field
            why = f"is looked for nowhere ({key.problem})"
            if key.storable:
                why = f"is not stored ({'; '.join(self.explain(*args))})"
            command = f"JIT_CACHE_MODE=on python -m jit_cache prewarm {self.kernel.partition('.')[0]} --arch {key.arch}"
            advice = "Start the process anew"
            if key.storable:
                advice = f"Compile it before: {command} (if it is among what that compiles), or this call in mode `on`"
            raise MissingKernelError(f"{self._call(args)} {why} and JIT_CACHE_MODE=off forbids to compile it. {advice}")
        if mode == "warn":
            log.warning("jit_cache: compiling %s", self._call(args))
        elif log.isEnabledFor(logging.INFO):
            log.info("jit_cache: compiling %s: %s", self._call(args), "; ".join(self.explain(*args)))

    def _call(self, args: tuple[Any, ...]) -> str:
        return f"{self.kernel}{format_arguments(args)}"


def compiled(build: Callable[..., Program]) -> Compiled:
    """Decorates a builder: a function of static facts that returns the ``Program`` to compile.

    Its arguments are the key, the architecture (``"sm_90a"``) first: None, bool, int, float, str, enum, tuple,
    named tuple, frozen dataclass, or a dtype of cutlass or torch. It touches no tensor and no device, and depends
    on its arguments and its source alone.

    Args:
        build: the builder.

    Returns:
        An object to call with these arguments for the loaded function; see ``Compiled``.

    Raises:
        TypeError: the first parameter is not ``arch``, or one is ``*args``, ``**kwargs``, positional-only or
            keyword-only; or the builder is no function (a method, a partial) or takes anything but a module from an
            enclosing function, which would be in no key.
        ValueError: the builder is a lambda, which has no name.

    Example:
        >>> from jit_cache import Program, compiled
        >>> @compiled
        ... def scale_forward(arch: str, factor: float) -> Program:
        ...     raise NotImplementedError("imports cutlass, makes fake tensors, returns Program(kernel, *tensors)")
        >>> scale_forward.key("sm_90a", 2.0).digest == scale_forward.key("sm_90a", 3.0).digest
        False
    """
    return Compiled(build)


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[Compiled, tuple[Any, ...]]]]:
    """Inside, builders of this thread compile and load nothing: each gives a function that does nothing.

    Yields:
        The list of their calls, (builder, arguments): all kernels of launch code that runs on tensors without memory.

    Example:
        >>> from jit_cache import Program, compiled, recording
        >>> @compiled
        ... def scale_forward(arch: str, factor: float) -> Program:
        ...     raise NotImplementedError("imports cutlass, makes fake tensors, returns Program(kernel, *tensors)")
        >>> with recording() as calls:
        ...     scale_forward("sm_90a", 2.0)()
        >>> calls == [(scale_forward, ("sm_90a", 2.0))]
        True
    """
    calls: list[tuple[Compiled, tuple[Any, ...]]] = []
    token = _recorded_calls.set(calls)
    try:
        yield calls
    finally:
        _recorded_calls.reset(token)


def _do_nothing(*args: Any) -> None:
    """The function that a builder gives while its calls are recorded."""


def _captured(build: Callable[..., Program]) -> Iterator[str]:
    """The variables of enclosing functions that a builder uses, but for modules: they may be another each time. So may
    functions and classes made there, by what they capture in turn.
    """
    cells = build.__closure__ or ()
    for name, cell in zip(build.__code__.co_freevars, cells, strict=True):
        try:
            if not isinstance(cell.cell_contents, types.ModuleType):
                yield name
        except ValueError:  # not set yet
            yield name


def format_arguments(args: tuple[Any, ...]) -> str:
    """Arguments as in a call; dtypes by their names."""
    return f"({', '.join(value.__name__ if isinstance(value, type) else repr(value) for value in args)})"


# ---------------------------------------------------------------------------------------------------- with the compiler


def _compile_program(program: Program, arch: str) -> tuple[bytes, list[resources.Launch]]:
    import cutlass.cute as cute

    options = f"--enable-tvm-ffi --gpu-arch {arch} {program.options}".strip()
    binary: Any = cute.compile(program.function, *program.arguments, options=options)
    with _memory_file() as (descriptor, path):
        binary.export_to_c(path, function_name="func")
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return data, resources.launches(str(getattr(binary, "ir_module", "")))


def _import_loader() -> None:
    """Imports what loads kernels when a module of builders, with the compiler (0.7 s), is imported: the first load then
    takes 25 ms less. Not without torch, which tvm_ffi would import (2 s), for tools that load nothing, too.
    """
    if sys.modules.get("torch"):
        with contextlib.suppress(ImportError):
            importlib.import_module("tvm_ffi")


def _load_object(data: bytes) -> Any:
    """Loads from memory: the bytes loaded are those whose hash was checked, and no disk is needed."""
    import cutlass.cute as cute

    start = time.perf_counter()
    with _memory_file() as (descriptor, path):
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)  # all of it or an error, unlike os.write
        function = cute.runtime.load_module(path, enable_tvm_ffi=True)["func"]
    _stats.load_seconds += time.perf_counter() - start
    return function


@contextlib.contextmanager
def _memory_file() -> Iterator[tuple[int, str]]:
    descriptor = os.memfd_create("jit_cache")
    try:
        yield descriptor, f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------ state of this process

_stats = Stats()
_recorded_calls: ContextVar[list[tuple[Compiled, tuple[Any, ...]]] | None] = ContextVar("recorded calls", default=None)
_process_lock = threading.RLock()  # cute.compile is not thread-safe: four threads end in internal compiler errors
_compiling = 0  # the thread that compiles
_danger = ""  # why a child forked now must not compile
_inherited_danger = ""


@functools.cache
def _stores() -> tuple[Store, ...]:
    """The bundles, then the cache."""
    return (*(Store(path, writable=False) for path in settings().bundles), Store(settings().root))


def reset() -> None:
    """Forgets the settings, what was read from the environment and which warnings were given. For tests."""
    for cached in (settings, environment, warn_once, _stores):
        cached.cache_clear()


def _before_fork() -> None:
    global _danger
    torch = sys.modules.get("torch")
    _danger = _inherited_danger
    if torch is not None and torch.cuda.is_initialized():
        _danger = "CUDA was in use"
    elif _compiling not in (0, threading.get_ident()):
        _danger = "another thread was compiling"


def _after_fork_in_child() -> None:
    global _process_lock, _compiling, _inherited_danger
    _process_lock = threading.RLock()
    _compiling = 0
    _inherited_danger = _danger
    close_inherited_locks()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
