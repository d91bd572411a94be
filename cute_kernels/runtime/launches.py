"""The one cache of kernels between a call and its launch: Spec -> what launches it.

A Spec is a NamedTuple of all that a kernel is specialised on, in ``config.py`` of its family: the launch makes one of
its tensors, the builder takes the same one, and ``prewarm.py`` lists them. (A NamedTuple of 12 fields is made in 0.5 us
and hashed in 0.1; a frozen dataclass takes 2.3 and 0.3. CPU.)
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from cute_kernels.runtime.targets import Target, target_of

MAX_ENTRIES = 4096  # of a cache; at so many all are forgotten, those of old batches' sizes, too

S = TypeVar("S", bound=Hashable)
E = TypeVar("E")
_caches: weakref.WeakValueDictionary[int, bounded] = weakref.WeakValueDictionary()


class LaunchCache(Generic[S, E]):
    """Entries by Spec and device: each launches a kernel. An entry is whole when it is stored, so threads need no
    lock: two that make the same one at once store equal ones.

    Args:
        make: (target, spec) -> entry: picks the config, compiles or loads the kernel.
    """

    def __init__(self, make: Callable[[Target, S], E]) -> None:
        self._make = make
        self._entries: dict[tuple[int, S], E] = bounded()

    def get(self, device_index: int, spec: S) -> E:
        """The entry of this Spec, made at its first call.

        Raises:
            UnsupportedDeviceError: a GPU without kernels.
        """
        entry = self._entries.get((device_index, spec))
        if entry is None:
            _import_compiler()
            entry = self._entries[device_index, spec] = self._make(target_of(device_index), _plain(spec))
        return entry


_importing = threading.Lock()


def _import_compiler() -> None:
    """Import the CuTe DSL, by one thread at a time. Its modules import each other in a circle: threads that begin at
    different ones at once find modules that are not whole.
    """
    with _importing:
        importlib.import_module("cutlass")


def _plain(value: Any) -> Any:
    """A Spec whose strings are no members of a StrEnum: these would be other keys of a kernel."""
    if isinstance(value, str):
        return str.__str__(value)
    if not isinstance(value, tuple):
        return value
    values = map(_plain, value)
    return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)


class bounded(dict):
    """A dict of at most MAX_ENTRIES, which ``forget`` empties: for what an entry keeps by the number of rows, too."""

    def __init__(self) -> None:
        super().__init__()
        _caches[id(self)] = self

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= MAX_ENTRIES and key not in self:
            self.clear()
        super().__setitem__(key, value)


def forget() -> None:
    """Forget all entries: another call makes each anew."""
    for cache in list(_caches.values()):
        cache.clear()


def load(builder: Callable[..., Any], *arguments: Any) -> Callable[..., None]:
    """The kernel that a builder makes of these arguments. Every entry gets its kernels here; tests put fakes in place.

    Call it as ``launches.load``.
    """
    return builder(*arguments)


observers: dict[int, list] = {}  # by id: two that have seen nothing yet are equal


@contextmanager
def observed() -> Iterator[list[tuple[Any, tuple[int, ...], int]]]:
    """The (launch, shape, device) of what is launched inside, in order, a launch as ``observe`` was given it."""
    seen: list = []
    observers[id(seen)] = seen
    try:
        yield seen
    finally:
        del observers[id(seen)]


def observe(launch: Any, shape: tuple[int, ...], device_index: int) -> None:
    """Tell ``observed`` of a launch that has ``contract`` and ``name``."""
    for seen in list(observers.values()):
        seen.append((launch, shape, device_index))
