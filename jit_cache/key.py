"""The identity of a compiled kernel: a typed JSON record and its sha256.

Two calls share an object only if their records are equal, so whatever can change the machine code is in the record:
builder, arguments, architecture, compiler, host processor, the compiler's environment variables, the kernel's source.
A value that the record cannot represent exactly is refused, not approximated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

FORMAT = 1
ARCH = re.compile(r"sm_\d+[af]?")
SCRIPT = ("__main__", "__mp_main__")
_WHEEL = re.compile(r"(nvidia_cutlass_dsl[^-]*|apache_tvm_ffi)-(.+)\.dist-info")

# CUTE_DSL_* variables that only choose where things are written or what is printed. Any other one, an unknown one too,
# is in the key. CUTE_DSL_ARCH is here because --gpu-arch is always passed (byte-identical objects, measured).
_HARMLESS = """ARCH CACHE_DIR DISABLE_FILE_CACHING DUMP_DIR FILTER_STACKTRACE JIT_CACHE_MAX_ELEMS JIT_TIME_PROFILING
    KEEP LOG_LEVEL LOG_TO_CONSOLE LOG_TO_FILE NO_CACHE PRINT_AFTER_PREPROCESSOR PRINT_IR SHOW_STACKTRACE
    WARNINGS_IGNORE"""
_HARMLESS_VARIABLES = {"CUTE_DSL_" + name for name in _HARMLESS.split()}


class Unsupported(TypeError):
    """A value that cannot be part of a key."""


@dataclasses.dataclass(frozen=True)
class Key:
    """The identity of one compiled kernel.

    `record` holds kernel, line, arguments, arch, stack, environment, source. Without source (it cannot be read, or
    changed during or after its import) the kernel is compiled for this process only; `problem` says why.
    """

    record: dict[str, Any]
    problem: str = ""

    @functools.cached_property
    def digest(self) -> str:
        return digest(self.record)

    @property
    def arch(self) -> str:
        return self.record["arch"]

    @property
    def name(self) -> str:
        """File name without suffix, relative to the directory of the format: `sm_90a/softmax_forward-<32 hex>`."""
        builder = self.record["kernel"].rpartition(".")[2]
        return f"{self.arch}/{builder}-{self.digest[:32]}"

    @property
    def storable(self) -> bool:
        return self.record["source"] is not None


def module_name(module: ModuleType) -> str:
    """The name under which a module is imported, also for one that runs as a script."""
    if module.__name__ not in SCRIPT:
        return module.__name__
    spec = getattr(module, "__spec__", None)  # set by python -m
    return spec.name if spec else Path(getattr(module, "__file__", None) or "__main__").stem


def digest(record: Any) -> str:
    """sha256 of the canonical JSON text. `surrogatepass`, not `\\u` escapes: those would merge distinct strings."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# ------------------------------------------------------------------------------------------------------------ arguments


def encode(value: Any) -> Any:
    """Returns the JSON form of a builder argument. Type (1, True, 1.0) and sign (0.0, -0.0) count; all NaNs are one.

    Raises:
        Unsupported: for anything but None, bool, int, float, str, enum, tuple, named tuple, frozen dataclass and the
            dtypes of cutlass and torch; for an enum, named tuple or dataclass made in a function.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is tuple:
        return [encode(item) for item in value]
    if _is_named_tuple(value):
        fields = {name: encode(item) for name, item in zip(kind._fields, value, strict=True)}
        return {"dataclass": _class_name(kind), "fields": fields}
    if isinstance(value, enum.Enum):
        return {"enum": _class_name(kind), "member": value.name, "value": _enum_value(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not kind.__dataclass_params__.frozen:
            raise Unsupported(f"a frozen dataclass, got {kind.__qualname__}, which is not frozen")
        if _init_only(kind):
            raise Unsupported(f"a dataclass whose fields say all, got {kind.__qualname__}, which has an InitVar")
        fields = {name: encode(getattr(value, name)) for name in _field_names(value)}
        return {"dataclass": _class_name(kind), "fields": fields}
    if _is_dtype(value):
        return {"dtype": value.__name__}
    if _is_torch_dtype(value):
        return {"dtype": str(value)}
    raise Unsupported(
        "None, bool, int, float, str, an enum, a tuple, a named tuple, a frozen dataclass or a dtype, "
        f"got {kind.__name__} {value!r:.80}"
    )


def _class_name(kind: type) -> str:
    """The place of a class. One made in a function may capture its variables: two of them would be one class."""
    if "<locals>" in kind.__qualname__:
        raise Unsupported(f"of a class that is not made in a function, got {kind.__qualname__}")
    module = sys.modules.get(kind.__module__)
    return f"{kind.__module__ if module is None else module_name(module)}.{kind.__qualname__}"


def _enum_value(member: enum.Enum) -> Any:
    try:
        return encode(member.value)
    except Unsupported:
        return None  # the name identifies it within its class, whose source is hashed too


def _is_dtype(value: Any) -> bool:
    cutlass = sys.modules.get("cutlass")  # a cutlass dtype exists only if cutlass has been imported
    return cutlass is not None and isinstance(value, type) and issubclass(value, cutlass.Numeric)


def _is_torch_dtype(value: Any) -> bool:
    torch = sys.modules.get("torch")  # as for cutlass
    return torch is not None and type(value) is torch.dtype


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def same(left: Any, right: Any) -> bool:
    """Whether two accepted values that compare equal have the same encoding (1 == True and 0.0 == -0.0 do not)."""
    if left is right:
        return True
    kind = type(left)
    if kind is not type(right):
        return False
    if kind is float:
        return repr(left) == repr(right)
    if issubclass(kind, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, name), getattr(right, name)) for name in _field_names(left))
    return left == right


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]


def _init_only(kind: Any) -> bool:
    """Whether a dataclass has an InitVar, which is in no field: values that differ by it are equal."""
    pseudo = kind.__dataclass_fields__.keys() - {field.name for field in dataclasses.fields(kind)}  # ClassVars, too
    return bool(pseudo) and not pseudo.isdisjoint(inspect.signature(kind).parameters)


def is_flat(value: Any) -> bool:
    """Whether equality and type alone tell this value from any other (no float, tuple or dataclass inside)."""
    flat = value is None or type(value) in (bool, int, str) or isinstance(value, (enum.Enum, type))
    return flat or _is_torch_dtype(value)


def classes_in(value: Any) -> set[type]:
    """The dataclasses, named tuples and enums in a value: their properties and methods take part in building it."""
    if isinstance(value, tuple):
        return set().union({type(value)} if _is_named_tuple(value) else (), *map(classes_in, value))
    if isinstance(value, enum.Enum):
        return {type(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value)}.union(*(classes_in(getattr(value, name)) for name in _field_names(value)))
    return set()


# ---------------------------------------------------------------------------------------------------- compiler and host


@functools.cache
def stack() -> dict[str, Any]:
    """Returns what an object depends on besides the kernel: record format, host CPU, compiler wheels, tvm-ffi.

    Python's version is not in it (objects do not depend on it, measured). Every `nvidia-cutlass-dsl*` distribution is:
    the CUDA 12 and CUDA 13 wheels have the same version and differ only in their names.
    """
    found: dict[str, str] = {}
    for place in sys.path:  # by the directories' names: reading the metadata of all that is installed takes 25 ms
        names = []
        with contextlib.suppress(OSError):
            names = os.listdir(place or ".")
        for match in filter(None, map(_WHEEL.fullmatch, sorted(names))):
            found.setdefault(match[1].replace("_", "-"), match[2])
    tvm_ffi = found.pop("apache-tvm-ffi", None) or _version("apache-tvm-ffi")
    return {"format": FORMAT, "machine": machine(), "dsl": found, "tvm_ffi": tvm_ffi}


def _version(name: str) -> str | None:
    """The version of a distribution that is installed as something else than a wheel."""
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def flavour(dsl: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Splits the DSL's distributions into the CUDA flavour (12 or 13) and the versions with the flavour taken out."""
    found = [int(match[1]) for name in dsl if (match := re.search(r"-cu(\d{1,4})$", name))]
    return max(found, default=0), {re.sub(r"-cu\d{1,4}$", "", name): version for name, version in dsl.items()}


_X86_LEVELS = (
    ("v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    ("v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    ("v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
)


@functools.cache
def machine() -> str:
    """Returns the host processor's class, such as `x86_64-v4`.

    The host half of an object is compiled for the processor at hand (AVX in a plain launch, seen in the disassembly;
    the DSL refuses another host target together with tvm-ffi): on an older processor it can die of SIGILL.
    """
    name = platform.machine()
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            text = file.read(16384).decode("ascii", "replace")  # the first processor; all of it takes long on big hosts
    except OSError:
        return name
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    features = set(match[1].split()) if match else set()
    if name != "x86_64":
        return f"{name}-{hashlib.sha256(' '.join(sorted(features)).encode()).hexdigest()[:8]}"
    level = "v1"
    for step, needed in _X86_LEVELS:
        if not needed <= features:
            break
        level = step
    return f"{name}-{level}"


@functools.cache
def environment() -> dict[str, str]:
    """Returns the `CUTE_DSL_*` variables that may change the code, but for what is the default.

    They are what the DSL holds, which reads them when it is imported. Those that it does not list (of a DSL that has no
    such list, all) are what they are when the first builder is decorated.
    """
    found = compiler_variables(os.environ)
    if found or "cutlass" in sys.modules:
        with contextlib.suppress(ImportError, AttributeError):
            held: Any = importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl().envar
            for entry in held._ENV_VAR_SPEC:
                if isinstance(entry.source, str):  # else it follows from others
                    name, value = f"CUTE_DSL_{entry.source}", getattr(held, entry.attribute)
                    found.pop(name, None)
                    if value != (entry.default(held) if callable(entry.default) else entry.default):
                        found[name] = str(value)
    return compiler_variables(found)


def compiler_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The `CUTE_DSL_*` variables in `environ` that may change the code."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("CUTE_DSL_") and name not in _HARMLESS_VARIABLES
    }


def runs_here(built: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a bundle's object with key record `built` serves the key record `wanted`.

    All must be equal, except that an object from CUDA 12 wheels runs under CUDA 13 wheels (measured; not the other way
    round) and one for an older x86-64 level runs on a newer processor.
    """
    return (
        digest({**built, "stack": None}) == digest({**wanted, "stack": None})  # 1 == True, but not their digests
        and stack_serves(built["stack"], wanted["stack"])
    )


def stack_serves(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether what was built with the stack `old` runs with the stack `new`; see `runs_here`."""
    if {**old, "machine": None, "dsl": None} != {**new, "machine": None, "dsl": None}:
        return False
    (old_cuda, old_versions), (new_cuda, new_versions) = flavour(old["dsl"]), flavour(new["dsl"])
    if old_versions != new_versions or old_cuda > new_cuda:
        return False
    return runs_on(old["machine"], new["machine"])


def runs_on(built: str, here: str) -> bool:
    """Whether host code for one class of processors runs on another: the x86-64 levels include each other, upwards."""
    return built == here or (built.startswith("x86_64-v") and here.startswith("x86_64-v") and built < here)


def differences(wanted: Any, stored: Any, path: str = "") -> list[str]:
    """Returns a line for each field in which two key records differ: "arguments.n: wanted 1024, stored 4096"."""
    if not (isinstance(wanted, dict) and isinstance(stored, dict)):
        return [] if digest(wanted) == digest(stored) else [f"{path}: wanted {wanted}, stored {stored}"]
    names = sorted(wanted.keys() | stored.keys())
    pairs = ((name, wanted.get(name, "nothing"), stored.get(name, "nothing")) for name in names)
    return [line for name, left, right in pairs for line in differences(left, right, f"{path}.{name}".lstrip("."))]
