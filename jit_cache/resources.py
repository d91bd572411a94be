"""The resources of a compiled kernel, read out of the object: registers, local memory, shared memory, threads.

An object holds each CUDA module as a cubin, an ELF file of machine CUDA (190), whose section .nv.info lists attributes
of its functions. Dynamic shared memory and block size are arguments of the launch, not in the cubin; they are taken
from the host code when it is compiled.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_EM_CUDA = 190
_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12


@dataclass(frozen=True)
class Launch:
    """Static facts of one kernel launch; None where a value is only known at run time."""

    kernel: str
    dynamic_smem_bytes: int | None
    threads: int | None


def describe(data: bytes, launches: list[Launch]) -> list[dict[str, Any]]:
    """Returns `name`, `registers`, `stack_bytes` and `static_smem_bytes` of each CUDA kernel in an object, and from its
    launch `dynamic_smem_bytes` and `threads` where they are static."""
    try:
        kernels = [kernel for cubin in _cubins(data) for kernel in _kernels(cubin)]
    except (struct.error, KeyError, IndexError, OverflowError, ValueError):
        return []  # a layout not known here must not stop a kernel
    for kernel in kernels:
        for launch in launches:
            if launch.kernel == kernel["name"]:
                known = {"dynamic_smem_bytes": launch.dynamic_smem_bytes, "threads": launch.threads}
                kernel.update({name: value for name, value in known.items() if value is not None})
    return kernels


def _cubins(data: bytes) -> Iterator[bytes]:
    start = data.find(b"\x7fELF")
    while start >= 0:
        if len(data) - start >= 64 and struct.unpack_from("<H", data, start + 18)[0] == _EM_CUDA:
            yield data[start:]  # an ELF file says itself where its parts are, so the tail may stay
        start = data.find(b"\x7fELF", start + 4)


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int


def _kernels(cubin: bytes) -> list[dict[str, Any]]:
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    symbols = _symbols(cubin, by_name)
    attributes: dict[tuple[int, str], int] = {}
    if info := by_name.get(".nv.info"):
        for attribute, payload in _attributes(cubin[info.offset : info.offset + info.size]):
            if len(payload) == 8:
                symbol, value = struct.unpack("<II", payload)
                attributes[attribute, symbols[symbol]] = value
    # Since sm_90 the size of a kernel's shared memory includes what the system reserves (ptxas does not count it).
    reserved = 1024 if ".nv.shared.reserved.0" in by_name else 0
    result = []
    for section in sections:
        if not section.name.startswith(".text."):
            continue
        name = section.name.removeprefix(".text.")
        if (_REGCOUNT, name) not in attributes:
            continue  # a device function
        shared = by_name.get(f".nv.shared.{name}")
        stack = attributes.get((_FRAME_SIZE, name), attributes.get((_MIN_STACK_SIZE, name), 0))
        result.append(
            {
                "name": name,
                "registers": attributes[_REGCOUNT, name],
                "stack_bytes": stack,
                "static_smem_bytes": shared.size - reserved if shared else 0,
            }
        )
    return result


def _sections(elf: bytes) -> list[_Section]:
    table, entry_size, count, names_index = struct.unpack_from("<Q10xHHH", elf, 40)
    headers = [struct.unpack_from("<II8x8xQQ", elf, table + entry_size * i) for i in range(count)]
    names = headers[names_index][2]
    return [_Section(_string(elf, names + name), offset, size) for name, _, offset, size in headers]


def _symbols(elf: bytes, sections: dict[str, _Section]) -> list[str]:
    table, names = sections[".symtab"], sections[".strtab"]
    offsets = range(table.offset, table.offset + table.size, 24)
    return [_string(elf, names.offset + struct.unpack_from("<I", elf, offset)[0]) for offset in offsets]


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Attributes of an .nv.info section: format, attribute, 16-bit value, which in format 4 is a payload's size."""
    position = 0
    while position + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if kind == 4:
            yield attribute, data[position : position + size]
            position += size


_FUNCTION = re.compile(r"llvm\.func ")
_CONSTANT = re.compile(r"%(\w+) = llvm\.mlir\.constant\((\d+) : i(?:32|64)\)")
_FIELD = re.compile(
    r"%(\w+) = llvm\.getelementptr %(\w+)\[0, (1, [012]|2)\] .*!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr"
)
_STORE = re.compile(r"llvm\.store %(\w+), %(\w+) : i(?:32|64), !llvm\.ptr")
_KERNEL = re.compile(r"llvm\.mlir\.addressof @kernels_(\w+) :")
_LAUNCH = re.compile(r"llvm\.call @_cudaLaunchKernelEx\(")


def launches(host_code: str) -> list[Launch]:
    """Returns the launches in the host half of a module (text of LLVM dialect), in the order of the text.

    A launch fills a cudaLaunchConfig (grid, block, dynamic shared memory, stream, ...) by stores and then calls
    _cudaLaunchKernelEx with the kernel's handle.
    """
    constants: dict[str, int] = {}
    fields: dict[str, tuple[str, str]] = {}
    configs: dict[str, dict[str, int | None]] = {}
    kernels: list[str] = []
    kernel, result = "", []
    for line in host_code.splitlines():
        if _FUNCTION.search(line):
            constants, fields, configs, kernels = {}, {}, {}, []
        elif match := _CONSTANT.search(line):
            constants[match[1]] = int(match[2])
        elif match := _FIELD.search(line):
            fields[match[1]] = match[2], match[3]
        elif (match := _STORE.search(line)) and match[2] in fields:
            config, field = fields[match[2]]
            configs.setdefault(config, {})[field] = constants.get(match[1])
        elif match := _KERNEL.search(line):
            kernel = match[1]
        elif _LAUNCH.search(line):
            kernels.append(kernel)
            if len(configs) == len(kernels):
                config_of_launch = list(configs.values())[-1]
                block = [config_of_launch.get(f"1, {axis}") for axis in range(3)]
                threads = block[0] * block[1] * block[2] if None not in block else None  # type: ignore[operator]
                result.append(Launch(kernel, config_of_launch.get("2"), threads))
    return result
