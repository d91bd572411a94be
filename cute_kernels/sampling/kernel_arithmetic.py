"""The arithmetic of sampling, word for word that of ``reference.py``: fp32 products and sums of one rounding each.

No logarithm and no exponential of the hardware: its last bits differ between architectures, and no CPU has them.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Uint64
from cutlass.cute.math import RoundingMode
from cutlass.cutlass_dsl import select_

from cute_kernels.sampling.config import (
    BELOW_ONE,
    EXP,
    LN2,
    LN2_HIGH,
    LN2_LOW,
    LOG,
    LOG2_E,
    SQRT_HALF,
    TOP_P_BITS,
    WEIGHT_BITS,
)

NEAREST = RoundingMode.NEAREST_EVEN
DOWN = RoundingMode.DOWN
LEAST_NOISE = -2.82  # of all words
WEIGHTLESS = -28.0  # a weight at this distance is below 1, and rounded down to 0
# Buckets of counts: the upper 16 bits of an fp32 number, from 2^-20 to 255; those beyond are with the outermost ones
COUNTS = 2 * 28 * 128
NEAR_ZERO, OUTERMOST = 107 << 23, 255.0
WHOLE = 1.5 * 2.0**23  # added to a number below 2^22, and rounded down: its floor is in the low bits


def add(a, b) -> Float32:
    return cute.math.add(Float32(a), Float32(b), rounding=NEAREST)


def add_down(a, b) -> Float32:
    """Rounded down."""
    return cute.math.add(Float32(a), Float32(b), rounding=DOWN)


def multiply(a, b) -> Float32:
    return cute.math.mul(Float32(a), Float32(b), rounding=NEAREST)


def choose(condition: Boolean, a, b):
    """``a`` where the condition holds, else ``b``, of one type."""
    return type(a)(select_(condition, a, b))


def reciprocal(x: Float32) -> Float32:
    """1 / x, to 1e-6 of it, of a normal number above 0 whose reciprocal is one, too."""
    guess = number_of(Int32(0x7EF311C3) - bits_of(x))  # to 13 %
    for _ in range(4):
        guess = multiply(guess, add(2.0, -multiply(x, guess)))
    return guess


def bits_of(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def number_of(bits: Int32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def gumbel(word: Uint32) -> Float32:
    """-log(-log(1 - v)) of v = (word + 1/2) 2^-32."""
    v = cute.arch.fmin(add(multiply(word.to(Float32), 2.0**-32), 2.0**-33), Float32(BELOW_ONE))
    n, f = split(add(1.0, -v))
    f = choose(n == 0, -v, f)  # 1 - v was rounded
    n, f = split(-log(n, f))
    return -log(n, f)


def split(x: Float32):
    """(n, f) of x = 2^n (1 + f), where 1 + f is from sqrt(1/2) to sqrt(2)."""
    bits = bits_of(x)
    n = (bits - SQRT_HALF) >> 23
    return n, add(number_of(bits - (n << 23)), -1.0)


def log(n: Int32, f: Float32) -> Float32:
    square = multiply(f, f)
    tail = add(multiply(polynomial(LOG, f), multiply(square, f)), multiply(square, -0.5))
    return add(add(tail, f), multiply(n.to(Float32), LN2))


def polynomial(coefficients: tuple, x: Float32) -> Float32:
    total = Float32(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = add(multiply(total, x), c)
    return total


def weight(distance: Float32) -> Uint64:
    """exp(distance) as a multiple of 2^-40, rounded down; distances are at most 0."""
    distance = cute.arch.fmax(distance, Float32(-64.0))
    n = cute.math.floor(add(multiply(distance, LOG2_E), 0.5))
    r = add(add(distance, multiply(n, -LN2_HIGH)), multiply(n, -LN2_LOW))
    power = add(add(multiply(polynomial(EXP, r), multiply(r, r)), r), 1.0)
    mantissa, shift = Uint64(multiply(power, 2.0**24).to(Int32)), n.to(Int32) + (WEIGHT_BITS - 24)
    left = mantissa << Uint64(choose(shift >= 0, shift, Int32(0)))
    return choose(shift >= 0, left, mantissa >> Uint64(choose(shift < 0, -shift, Int32(0))))


def fast_weight(distance: Float32) -> Uint64:
    """``weight``, in fewer instructions; NaN weighs nothing."""
    distance = cute.arch.fmax(distance, Float32(2 * WEIGHTLESS))
    whole = add_down(add(multiply(distance, LOG2_E), 0.5), WHOLE + WEIGHT_BITS)
    n = add(whole, -(WHOLE + WEIGHT_BITS))
    r = add(add(distance, multiply(n, -LN2_HIGH)), multiply(n, -LN2_LOW))
    power = add(add(multiply(polynomial(EXP, r), multiply(r, r)), r), 1.0)
    return number_of(bits_of(power) + (bits_of(whole) << 23)).to(Uint64)


def bucket_of(x: Float32) -> Int32:
    """The bucket of counts that a number is in, the last one that of the largest; NaN is in the first."""
    bits = bits_of(cute.arch.fmin(cute.arch.fmax(x, Float32(-OUTERMOST)), Float32(OUTERMOST)))
    magnitude = (cutlass.max(bits & 0x7FFFFFFF, NEAR_ZERO) - NEAR_ZERO) >> 16
    return (magnitude ^ (bits >> 31)) + COUNTS // 2


def is_edge(bucket: Int32) -> Int32:
    """1 where a bucket has numbers that differ in their upper 16 bits, or there is no such bucket."""
    magnitude = magnitude_of(bucket)
    return choose((magnitude <= 0) | (magnitude >= COUNTS // 2 - 1), Int32(1), Int32(0))


def magnitude_of(bucket: Int32) -> Int32:
    beyond = bucket - COUNTS // 2
    return beyond ^ (beyond >> 31)


def lower_end(bucket: Int32, has_whole_values: bool) -> Float32:
    """No number in the bucket, or one above, is less. Whole values have no bits but the upper 16."""
    magnitude, is_negative = magnitude_of(bucket), bucket < COUNTS // 2
    from_zero = number_of((magnitude << 16) + NEAR_ZERO)
    beyond = from_zero if has_whole_values else number_of(((magnitude + 1) << 16) + NEAR_ZERO)
    positive = choose(magnitude == 0, Float32(0.0), from_zero)
    negative = choose(magnitude >= COUNTS // 2 - 1, Float32(-math.inf), -beyond)
    return choose(is_negative, negative, positive)


def upper_end(bucket: Int32) -> Float32:
    """No whole value in the bucket is larger."""
    magnitude, is_negative = magnitude_of(bucket), bucket < COUNTS // 2
    from_zero = number_of((magnitude << 16) + NEAR_ZERO)
    positive = choose(magnitude >= COUNTS // 2 - 1, Float32(math.inf), from_zero)
    return choose(is_negative, choose(magnitude == 0, Float32(0.0), -from_zero), positive)


def least_mass(total: Uint64, top_p: Uint64) -> Uint64:
    """The mass of integers that is at least top_p, a multiple of 2^-24, of the total; at least 1."""
    low = total & Uint64((1 << TOP_P_BITS) - 1)
    mass = (total >> Uint64(TOP_P_BITS)) * top_p + (low * top_p >> Uint64(TOP_P_BITS))
    return choose(mass > Uint64(0), mass, Uint64(1))


def order_bits(x: Float32) -> Uint32:
    """An integer that grows as x does; x is not -0."""
    bits = bits_of(x)
    return Uint32(bits ^ ((bits >> 31) | Int32(-(2**31))))


def largest_noise(word: Uint32) -> Float32:
    """No gumbel of this word, or of a larger one, is larger: -log(1 - v) is at least v, v at least 2^-(zeros + 1)."""
    return multiply((cute.arch.clz(word).to(Int32) + 1).to(Float32), 0.6935)


def least_noise(word: Uint32) -> Float32:
    """No gumbel of this word, or of a smaller one, is smaller: v is less than 2^-zeros."""
    zeros = cute.arch.clz(word).to(Int32)
    return choose(zeros > 0, add(multiply(zeros.to(Float32), 0.693), -0.33), Float32(LEAST_NOISE))
