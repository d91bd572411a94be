"""Static choices of the block-scaled quantizers: how a scale follows from a block's largest magnitude, geometry."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32
TILE = 128  # a tile of TILE x TILE elements has one atom of 128 x 4 blocked scales in either orientation
ATOM = 512  # bytes of that atom
MODES = ("rceil", "floor", "ceil", "even")
FORMATS = ("e4m3", "e5m2")

_FP32_INFINITY = 0x7F800000
# Exponent of the format's largest number, bits of its mantissa
_LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15}
_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}


@dataclass(frozen=True)
class ScaleRule:
    """The scale's byte from the fp32 bits of a block's largest magnitude, in integers.

    255 from ``upper`` on, 0 below ``lower``, else ``((bits + add) >> 23) - sub``.
    """

    add: int
    sub: int
    lower: int
    upper: int = _FP32_INFINITY


def scale_rule(mode: str, fmt: str) -> ScaleRule:
    """The rule of a mode for e4m3 or e5m2 elements; tests/cpu/test_mxfp8_reference.py holds it to the definition."""
    largest = _LARGEST_EXPONENT[fmt]
    zero = largest << 23
    if mode == "floor":
        return ScaleRule(0, largest, zero)
    if mode == "ceil":
        return ScaleRule(0x7FFFFF, largest, zero + 1)
    if mode == "even":
        half = 1 << (22 - _MANTISSA_BITS[fmt])
        return ScaleRule(half, largest, ((largest + 1) << 23) - half, _FP32_INFINITY - half)
    # rceil: both formats' largest number is 1.75 * 2^largest, mantissa 0x600000. The one amax just above 2^-127 times
    # it has a product with 1 / largest, a subnormal number, that is rounded down to that power of two
    return ScaleRule(0x7FFFFF - 0x600000, largest, zero + 0x600002)


@dataclass(frozen=True)
class QuantizeConfig:
    """Geometry of the quantizer.

    Attributes:
        stages: input tiles in flight a CTA.
        ctas_per_sm: CTAs that an SM holds at once.
        warps: of a CTA.
        persistent: whether resident CTAs walk over the tiles; else a CTA a tile.
        group: tiles along the strided dimension that are walked before the next ones along the contiguous one.
    """

    stages: int
    ctas_per_sm: int
    warps: int
    persistent: bool
    group: int


def quantize_config(arch: str, itemsize: int, outputs: int) -> QuantizeConfig:
    """Geometry for inputs of ``itemsize`` bytes and one or two orientations."""
    if itemsize == 4:
        return QuantizeConfig(stages=1, ctas_per_sm=2, warps=8, persistent=False, group=1)
    return QuantizeConfig(stages=1, ctas_per_sm=4 if outputs == 1 else 3, warps=8, persistent=False, group=1)
