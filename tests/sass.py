"""Instructions of warpgroup products in the machine code of SM90 kernels."""

import struct
from collections.abc import Iterator

from jit_cache.compile import Kernel
from jit_cache.resources import _cubins, _sections

# The low bits of an instruction's first word are the operation: 0x9f0 is HGMMA with both operands in shared memory,
# 0xdf0 with the first one in registers. These bits of the second word say what a product signals: 7 is nothing
IS_PRODUCT, PRODUCT = 0x1FF, 0x1F0
SIGNAL_AT, SIGNALS, NONE = 20, 0xF, 7


def instructions_of(kernel: Kernel) -> Iterator[list[tuple[int, int]]]:
    """The words of each function's instructions."""
    for cubin in _cubins(kernel.data):
        for section in _sections(cubin):
            if section.name.startswith(".text."):
                end = section.offset + section.size // 16 * 16
                yield [struct.unpack_from("<QQ", cubin, i) for i in range(section.offset, end, 16)]


def products_of(kernel: Kernel) -> list[bool]:
    """Whether each product signals that it and those before it are done: what something waits for."""
    return [
        second >> SIGNAL_AT & SIGNALS != NONE
        for instructions in instructions_of(kernel)
        for first, second in instructions
        if first & IS_PRODUCT == PRODUCT
    ]


def is_serialized(kernel: Kernel) -> bool:
    """Whether ptxas has every product waited for alone (C7510 to C7514: wgmma.mma_async instructions are serialized).

    A group of products has four or more, the last of which signals. Where ptxas serializes, each signals.
    """
    products = products_of(kernel)
    assert products, "the kernel has no products, or an instruction set that is not known here"
    return 2 * sum(products) > len(products)
