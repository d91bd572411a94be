"""Bundles: compiled kernels in one archive, for machines that must not compile.

An archive is a plain tar: manifest.json first, then the files that it lists; equal kernels give equal bytes. It is
unpacked into a directory with the layout of a cache, which JIT_CACHE_BUNDLE names, or into the cache itself. With
`shared=True` it also holds each kernel as a shared library, which `load_shared` loads without the compiler: that needs
apache-tvm-ffi and the DSL's runtime library (libcute_dsl_runtime.so) only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .files import naming, write_whole
from .key import FORMAT, differences, environment, stack, stack_serves
from .record import check_record, parse
from .store import Damaged, Entry, Store, describe

_MANIFEST = "manifest.json"
_RUNTIME = "libcute_dsl_runtime.so"

BundledKernel = tuple[str, dict[str, Any], dict[str, bytes]]  # name, record, files


class BundleError(ValueError):
    """An archive that is not the one that its digest or its manifest describes, or that cannot be made.

    Example:
        >>> from jit_cache import BundleError
        >>> issubclass(BundleError, ValueError)
        True
    """


def export_bundle(path: Path, entries: Iterable[Entry], shared: bool = False) -> tuple[str, int]:
    """Writes an archive.

    Args:
        path: the file to write.
        entries: stored kernels.
        shared: also link each kernel as a shared library; needs a C compiler (cc) and the DSL.

    Returns:
        the sha256 of the archive, which `import_bundle` asks for, and the number of kernels.

    Raises:
        BundleError: no kernels, or linking failed.
        Damaged: a stored object is not what was stored.
        OSError: the archive could not be written; one that it replaces is still there.
    """
    files: dict[str, bytes] = {}
    kernels = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        suffixes = {".o": entry.read()}
        if shared:
            suffixes[".so"] = _link(suffixes[".o"])
        files |= {entry.name + suffix: data for suffix, data in suffixes.items()}
        # Without the time of compiling, archives of the same kernels are equal.
        record = {name: value for name, value in entry.record.items() if name != "created"}
        record |= {"seconds": 0.0, "files": {suffix: describe(data) for suffix, data in suffixes.items()}}
        kernels.append({"name": entry.name, "record": record})
    if not kernels:
        raise BundleError("there is no kernel to export")
    manifest = json.dumps({"format": FORMAT, "kernels": kernels}, indent=1, sort_keys=True).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in [(_MANIFEST, manifest), *files.items()]:
            member = tarfile.TarInfo(name)  # owner, time and mode stay at constant defaults
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    write_whole(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest(), len(kernels)


def import_bundle(path: Path, wanted: str, store: Store) -> list[Entry]:
    """Unpacks an archive into a store; writes nothing unless all of it is right.

    Args:
        path: the archive.
        wanted: its sha256, as `export` printed it. Objects are native code: take the digest from where you trust it.
        store: where to; existing entries of the same name are replaced.

    Returns:
        the entries written.

    Raises:
        BundleError: another digest; a member that is no regular file, not in the manifest, or not as it says.
        OSError: the archive cannot be read or the store not be written.
    """
    return write_bundle(read_bundle(path, wanted), store)


def read_bundle(path: Path, wanted: str) -> list[BundledKernel]:
    """Reads and checks an archive; arguments and errors as of `import_bundle`."""
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != wanted.lower():
        raise BundleError(f"{path}: the digest is {found}, not {wanted}")
    try:
        return _unpack(data)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise BundleError(f"{path}: {error}") from error


def write_bundle(kernels: Iterable[BundledKernel], store: Store) -> list[Entry]:
    """Writes what `read_bundle` returned. Raises OSError."""
    entries = []
    for name, record, files in kernels:
        # Nobody removes kernels from a bundle; in a cache `clear` would take a temporary file that is not locked.
        with contextlib.nullcontext() if store.for_all else store.lock(name):
            entries.append(store.write(name, record, files))
    return entries


def misfits(kernels: Iterable[BundledKernel], as_bundle: bool) -> list[str]:
    """Says how many kernels this machine would not load, and in which fields they differ from it; a line each.

    Compiler wheels, tvm-ffi, processor and CUTE_DSL_* variables are compared; a machine without the compiler takes
    kernels of any. `as_bundle`: kernels of CUDA 12 serve CUDA 13, and those of an older processor a newer one; in a
    cache all must be equal.
    """
    counts: Counter[str] = Counter()
    for _, record, _ in kernels:
        built = {name: record["key"][name] for name in ("stack", "environment")}
        here = {"stack": {**stack(), "dsl": stack()["dsl"] or built["stack"]["dsl"]}, "environment": environment()}
        lines = differences(here, built)
        serves = as_bundle and here["environment"] == built["environment"]
        if lines and not (serves and stack_serves(built["stack"], here["stack"])):
            counts["; ".join(lines)] += 1
    return [f"{count} kernels would not be loaded here: {lines}" for lines, count in counts.items()]


def _unpack(archive_bytes: bytes) -> list[BundledKernel]:
    """Reads and checks all of an archive."""
    members: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive_bytes), mode="r:") as archive:
        for member in archive:
            # A sparse file may say that it has terabytes of zeros; a size below 0 would have tarfile read in circles.
            file = archive.extractfile(member) if member.isreg() and not member.issparse() else None
            if file is None or member.name in members or not 0 <= member.size <= len(archive_bytes):
                raise BundleError(f"{member.name!r} is no regular file, is there twice or has a wrong size")
            members[member.name] = file.read()
    if _MANIFEST not in members:
        raise BundleError(f"it has no {_MANIFEST}")
    manifest = _parse_manifest(members.pop(_MANIFEST))
    kernels: list[BundledKernel] = []
    for kernel in manifest["kernels"]:
        name, record = kernel.get("name"), kernel.get("record")
        check_record(name, record)
        suffixes = list(record["files"])
        if missing := [name + suffix for suffix in suffixes if name + suffix not in members]:
            raise BundleError(f"{missing[0]} is not there, or twice in {_MANIFEST}")
        files = {suffix: members.pop(name + suffix) for suffix in suffixes}
        if record["files"] != {suffix: describe(data) for suffix, data in files.items()}:
            raise BundleError(f"{name}: not the bytes that {_MANIFEST} says")
        kernels.append((name, record, files))
    if members:
        raise BundleError(f"{sorted(members)[0]!r} is not in {_MANIFEST}")
    return kernels


def _parse_manifest(text: bytes) -> dict[str, Any]:
    """Returns a manifest whose `kernels` is a list of objects. Raises ValueError."""
    try:
        manifest = parse(text)
    except ValueError as error:
        raise BundleError(f"{_MANIFEST}: {error}") from error
    if not isinstance(manifest, dict):
        raise BundleError(f"{_MANIFEST} must be an object, got {type(manifest).__name__}")
    if type(manifest.get("format")) is not int or manifest["format"] != FORMAT:
        raise BundleError(f"{_MANIFEST}: format must be {FORMAT}, got {manifest.get('format')!r:.80}")
    kernels = manifest.get("kernels")
    if not isinstance(kernels, list) or not kernels or not all(isinstance(kernel, dict) for kernel in kernels):
        raise BundleError(f"{_MANIFEST}: kernels must be a list of objects, one at least")
    return manifest


def load_shared(directory: str | Path, name: str) -> Any:
    """Loads a kernel from a bundle's shared library, without cutlass.

    Args:
        directory: the directory into which a bundle that was exported with ``--shared`` has been unpacked.
        name: the kernel, as ``python -m jit_cache list`` prints it: ``sm_90a/softmax_forward-<32 hex>``. It lists a
            bundle that JIT_CACHE_BUNDLE names.

    Returns:
        The same positional ``tvm_ffi.Function`` that the builder returns.

    Raises:
        FileNotFoundError: there is no bundle, no such kernel, or no shared library of it.
        OSError: there is no runtime library; others may write to the directory, to the kernel or to a runtime library
            that lies there.
        ImportError: apache-tvm-ffi is not installed.
        Damaged: the file is not the stored one, or was built for a newer processor or with other wheels.

    Example:
        >>> from pathlib import Path
        >>> from jit_cache import load_shared
        >>> directory, name = Path("bundle"), "sm_90a/softmax_forward-0123456789abcdef0123456789abcdef"
        >>> if directory.is_dir():
        ...     softmax_forward = load_shared(directory, name)
    """
    import tvm_ffi

    store = Store(Path(directory).absolute(), writable=False)
    entry = store.entry(name)
    if not store.base.is_dir():
        raise FileNotFoundError(f"{directory} is no bundle")
    if entry is None:
        raise FileNotFoundError(f"{directory} holds no kernel {name}; python -m jit_cache list prints the names")
    if ".so" not in entry.record["files"]:
        raise FileNotFoundError(f"{directory} holds no shared library of {name}: it was exported without --shared")
    entry.read(".so")
    built = entry.record["key"]["stack"]
    here = {**stack(), "dsl": stack()["dsl"] or built["dsl"]}  # the compiler need not be here
    if not stack_serves(built, here):
        raise Damaged(f"{name} was built with another stack: {'; '.join(differences(here, built))}")
    own = store.root / _RUNTIME
    if own.exists():
        store.check_file(own)
    ctypes.CDLL(str(_runtime_library([store.root])))  # the kernel's dependency on it is then met, by its soname
    return tvm_ffi.load_module(str(store.path(name, ".so"))).get_function("func")


def _link(data: bytes) -> bytes:
    """Links an object as a shared library that depends on the DSL's runtime library and libtvm_ffi by name only."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BundleError("linking shared libraries needs a C compiler (cc, gcc or clang)")
    tvm_ffi = importlib.util.find_spec("tvm_ffi")
    libraries = [_runtime_library([])]
    libraries += [
        Path(place, "lib", "libtvm_ffi.so") for place in (tvm_ffi and tvm_ffi.submodule_search_locations) or ()
    ]
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
        with naming(source):
            source.write_bytes(data)
        command = [compiler, "-shared", "-s", "-Wl,--build-id=none", "-o", str(target), str(source)]
        command += [word for library in libraries for word in (f"-L{library.parent}", f"-l:{library.name}")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = done.stderr.strip() or f"{compiler} ended with status {done.returncode}"
            raise BundleError(f"linking failed: {reason}")
        return target.read_bytes()


def _runtime_library(places: Sequence[Path]) -> Path:
    """Finds libcute_dsl_runtime.so: in `places`, in the installed DSL, else where the dynamic loader looks."""
    found = [place / _RUNTIME for place in places]
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for place in (spec and spec.submodule_search_locations) or ():
        found += sorted(Path(place).glob(f"cu*/lib/{_RUNTIME}"), reverse=True)  # the newest CUDA flavour first
    return next((path for path in found if path.is_file()), Path(_RUNTIME))
