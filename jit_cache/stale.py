"""Which stored kernels no call of today finds, because their source or the installed wheels are others now."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from .key import stack, stack_serves
from .source import PROCESS_START, SourceError, module_file, source_digest
from .store import Entry


def stale_fields(entry: Entry) -> list[str] | None:
    """Returns the fields of the key that are others now, `stack` or `source`; [] if a call may find the kernel.

    None: the stack is the same, and its builder's module, or that of an argument's class, is not found from here.
    Imports nothing: a module of builders may be a script.
    """
    key = entry.record["key"]
    same = key["stack"] == stack() if entry.store.writable else stack_serves(key["stack"], stack())
    fields = [] if same else ["stack"]
    source = _source_now((key["kernel"], *sorted(set(_classes(key["arguments"])))))
    if source is None:
        return fields or None
    return fields if source == key["source"] else [*fields, "source"]


@functools.cache
def _source_now(names: tuple[str, ...]) -> str | None:
    """The hash of the source of a builder and of its arguments' classes; None if one is not found."""
    modules = [module for module in map(_module, names) if module]
    if len(modules) < len(names):
        return None
    try:
        return source_digest(modules, PROCESS_START)
    except SourceError:  # it is being edited: what was stored is of the text before
        return ""


def _module(name: str) -> types.ModuleType | None:
    """A module that is not imported, by the name of a function or class in it."""
    while name := name.rpartition(".")[0]:
        if file := module_file(name):
            module = types.ModuleType(name)
            module.__file__ = str(file)
            return module
    return None


def _classes(value: Any) -> Iterator[str]:
    """The dataclasses and enums in encoded arguments. The compiler's own are in no hash."""
    if isinstance(value, list):
        for item in value:
            yield from _classes(item)
    elif isinstance(value, dict):
        name = value.get("dataclass") or value.get("enum")
        if isinstance(name, str) and not name.startswith("cutlass."):
            yield name
        for item in value.values():
            yield from _classes(item)
