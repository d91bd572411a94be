"""The shape of a kernel's record, checked once for all that reads one: from an archive or from beside an object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .key import digest

NAME = re.compile(r"sm_\d+[af]?/\w+-[0-9a-f]{32}")
_DEPTH = 64  # of lists and objects in each other: what prints or writes them nests up to three calls for each


def parse(text: bytes) -> Any:
    """Returns what a JSON text says. Raises ValueError for what is none, and for what is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def check_record(name: Any, record: Any) -> None:
    """Raises ValueError unless `record` has all that is read of it and is of the kernel of this name.

    Fields that are not listed here may be there.
    """
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ValueError(f"{_short(name)} is no name of a kernel, such as sm_90a/builder-<32 hex>")
    if not _is_shallow(record, _DEPTH):
        raise ValueError(f"{name}: the record must be nested {_DEPTH} times at most")
    _check(record, name, {"key": _DICT, "files": _DICT, "kernels": _LIST})
    key, files = record["key"], record["files"]
    fields = {"kernel": _TEXT, "arch": _TEXT, "arguments": _DICT, "stack": _DICT, "environment": _STRINGS}
    _check(key, f"{name}: key", {**fields, "source": _TEXT})
    _check(key["stack"], f"{name}: key.stack", {"format": _COUNT, "machine": _TEXT, "dsl": _STRINGS})
    for argument, value in key["arguments"].items():
        if not (argument.isidentifier() and _is_argument(value)):
            raise ValueError(f"{name}: key.arguments[{argument!r}] must be an encoded argument, got {_short(value)}")
    if not {".o"} <= files.keys() <= {".o", ".so"}:
        raise ValueError(f"{name}: files must be .o and perhaps .so, got {_short(sorted(files))}")
    for suffix, file in files.items():
        _check(file, f"{name}: files.{suffix}", {"size": _COUNT, "sha256": _TEXT})
    for index, kernel in enumerate(record["kernels"]):
        place = f"{name}: kernels[{index}]"
        _check(kernel, place, {"name": _TEXT, "registers": _COUNT, "stack_bytes": _COUNT, "static_smem_bytes": _COUNT})
        _check({"dynamic_smem_bytes": 0, **kernel}, place, {"dynamic_smem_bytes": _COUNT})
    try:
        digest(record)
    except ValueError as error:  # NaN, infinity
        raise ValueError(f"{name}: the record must be JSON, {error}") from None
    arch, _, rest = name.partition("/")
    if key["arch"] != arch or digest(key)[:32] != rest.rpartition("-")[2]:
        raise ValueError(f"{name}: the record is of another kernel")


Kind = tuple[str, Callable[[Any], bool]]
_DICT: Kind = "an object", lambda value: isinstance(value, dict)
_LIST: Kind = "a list", lambda value: isinstance(value, list)
_TEXT: Kind = "a string of printable characters", lambda value: isinstance(value, str) and value.isprintable()
_COUNT: Kind = "an integer from 0 to 2^63 - 1", lambda value: type(value) is int and 0 <= value < 2**63
_STRINGS: Kind = (
    "an object of strings",
    lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
)


def _check(value: Any, place: str, fields: Mapping[str, Kind]) -> None:
    """Raises ValueError unless `value` is an object with these fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object, got {_short(value)}")
    for field, (expected, is_right) in fields.items():
        if field not in value:
            raise ValueError(f"{place} has no `{field}`")
        if not is_right(value[field]):
            raise ValueError(f"{place}: {field} must be {expected}, got {_short(value[field])}")


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in items)


def _is_argument(value: Any) -> bool:
    """Whether a value is what `key.encode` returns."""
    if value is None or type(value) in (bool, int, str):
        return True
    if isinstance(value, list):
        return all(map(_is_argument, value))
    if not isinstance(value, dict):
        return False
    if value.keys() == {"dataclass", "fields"}:
        named, items = value["dataclass"], value["fields"]
        return (
            _TEXT[1](named)
            and isinstance(items, dict)
            and all(map(str.isidentifier, items))
            and all(map(_is_argument, items.values()))
        )
    if value.keys() == {"enum", "member", "value"}:
        return _TEXT[1](value["enum"]) and _TEXT[1](value["member"]) and _is_argument(value["value"])
    return value.keys() in ({"float"}, {"dtype"}) and all(map(_TEXT[1], value.values()))


def _short(value: Any) -> str:
    """A value in a message of one line; only the kind of what may be large."""
    return repr(value)[:80] if isinstance(value, (str, bool, type(None))) else type(value).__name__
