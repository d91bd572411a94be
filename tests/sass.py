"""Instructions of warpgroup products in the machine code of SM90 kernels."""

import struct
from collections.abc import Iterator

from jit_cache.compile import Kernel
from jit_cache.resources import _cubins, _sections

# The low bits of an instruction's first word are the operation: 0x9f0 is HGMMA with both operands in shared memory,
# 0xdf0 with the first one in registers. These bits of the second word say what a product signals: 7 is nothing
IS_PRODUCT, PRODUCT = 0x1FF, 0x1F0
SIGNAL_AT, SIGNALS, NONE = 20, 0xF, 7
# WARPGROUP.DEPBAR, a wait for products, of which so many may be left; MUFU.EX2, an exponential
IS_WAIT, WAIT = 1 << 47 | 0xFFF, 1 << 47 | 0x9C5
LEFT_AT, LEFT = 8, 0xFF
IS_MUFU, MUFU, FUNCTION_AT, FUNCTIONS, EX2 = 0xFFF, 0x308, 10, 7, 2


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


def exponentials_beside_products(kernel: Kernel) -> list[int]:
    """How many there are, in the code, between each wait that leaves a product and the next one that leaves none."""
    found, count = [], None
    for instructions in instructions_of(kernel):
        for first, second in instructions:
            if first & IS_WAIT == WAIT:
                if second >> LEFT_AT & LEFT:
                    count = 0
                elif count is not None:
                    found.append(count)
                    count = None
            elif count is not None and first & IS_MUFU == MUFU and second >> FUNCTION_AT & FUNCTIONS == EX2:
                count += 1
    return found
