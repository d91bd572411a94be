"""The arithmetic of scales in registers, where a tile's scales lie in shared memory, and their way to memory."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16, const_expr

from cute_kernels.common.cache_hints import EVICT_LAST
from cute_kernels.mxfp8.config import ATOM, BLOCK, TILE, ScaleRule

Dtype = type[cutlass.Numeric]
MAGNITUDE = 0x7FFFFFFF


@cute.jit
def scale_of(bits: Int32, rule: cutlass.Constexpr[ScaleRule]) -> Int32:
    """The scale's byte of a block whose largest magnitude has these fp32 bits."""
    s = ((bits + rule.add) >> 23) - rule.sub
    s = Int32(0) if bits < rule.lower else s
    return Int32(255) if bits >= rule.upper else s


def largest_of_columns(rX: cute.Tensor) -> tuple[Int32, Int32]:
    """fp32 bits of the largest magnitude of each of two columns (2, 32)."""
    dtype = rX.element_type
    if dtype.width == 16:
        words = cute.recast_tensor(rX, Int32)
        return split(largest([words[i] for i in range(BLOCK)], dtype), dtype)
    low, high = (largest([rX[j, i] for i in range(BLOCK)], dtype) for j in range(2))
    return float_bits(low) & MAGNITUDE, float_bits(high) & MAGNITUDE


def largest_of_block(rX: cute.Tensor) -> Int32:
    """fp32 bits of the largest magnitude of a block."""
    dtype = rX.element_type
    words = cute.recast_tensor(rX, Int32) if dtype.width == 16 else rX
    word = largest([words[i] for i in range(cute.size(words))], dtype)
    if dtype.width == 16:
        return cutlass.max(*split(word, dtype))
    return float_bits(word) & MAGNITUDE


def largest(words: list, dtype: Dtype):
    """Largest magnitude, NaN above all; of words that hold two numbers, of each half. Its sign means nothing."""
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2", Float32: "f32"}[dtype]
    while len(words) > 1:
        words = [
            cute.arch.inline_ptx(
                f"max.NaN.xorsign.abs.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
                write_only_types=[Float32 if dtype is Float32 else Int32],
                read_only_args=[words[i], words[i + 1]],
            )
            for i in range(0, len(words), 2)
        ]
    return words[0]


def split(word: Int32, dtype: Dtype) -> tuple[Int32, Int32]:
    """fp32 bits of the magnitudes of a word's two numbers."""
    if dtype is cutlass.BFloat16:
        return (word << 16) & MAGNITUDE, word & 0x7FFF0000
    pair = cute.make_rmem_tensor((2,), dtype)
    cute.make_tensor(cute.recast_ptr(pair.iterator, dtype=Int32), cute.make_layout(1))[0] = word
    wide = cute.make_rmem_tensor((2,), Float32)
    wide.store(pair.load().to(Float32))
    return float_bits(wide[0]) & MAGNITUDE, float_bits(wide[1]) & MAGNITUDE


def float_bits(value: Float32) -> Int32:
    """The bits of an fp32 value."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def as_float(bits: Int32) -> Float32:
    """The fp32 value of these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def scaled(value: BFloat16, factor: Int32) -> Float32:
    """``value`` times a power of two or NaN, given by its fp32 bits, in one instruction on the widest pipe.

    Of the factor's two bf16 numbers the upper is the factor, the lower 0, and of the sum's the upper is -0, which keeps
    a zero's sign, the lower 0: the result is an fp32 number. The product is exact, or so small (below 2^-126) that fp8
    has 0 for it, whatever it is rounded to. The value is infinite or NaN only where the factor is NaN.
    """
    both = cute.make_rmem_tensor((2,), BFloat16)
    both[0], both[1] = value, value
    zeros = ~factor & ~MAGNITUDE  # a constant, -0 and 0, the compiler would put together for each product
    product = cute.arch.inline_ptx(
        "fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Int32],
        read_only_args=[cute.recast_tensor(both, Int32)[0], factor, zeros],
    )
    return as_float(product)


def byte_at(pointer: cute.Pointer) -> cute.Tensor:
    """The byte at a pointer, as a tensor of one element."""
    return cute.make_tensor(pointer, cute.make_layout(1))


def word_at(pointer: cute.Pointer) -> cute.Tensor:
    """The 32-bit word at a pointer to bytes that is aligned to it, as a tensor of one element."""
    return cute.make_tensor(cute.recast_ptr(pointer.align(4), dtype=Int32), cute.make_layout(1))


def put(target: cute.Tensor, value) -> None:
    """Store to a tensor of one element."""
    target[0] = value


def staged_at(kind: str, row, column, height: int = TILE):
    """Place of a tile's scale (row, column) of (``height``, 4) in shared memory, in the order in which it is written
    out.
    """
    if kind == "pairs":  # in columns, those of two tiles side by side
        return row * 8 + column
    if kind == "blocked":
        return row % 32 * (height // 8) + row // 32 * 4 + column
    return column * height + row if kind == "rows" else row * 4 + column


@cute.jit
def words_at(base: cute.Pointer, offset: Int32):
    """16 bytes of shared memory at an offset, as words; a swizzle of the pointer is not applied."""
    address = cute.make_ptr(Int32, base.toint() + offset, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(address, cute.make_layout(4))


@cute.jit
def store_together(
    count: cutlass.Constexpr[int],
    stride: cutlass.Constexpr[int],
    rank: Int32,
    together: cute.Pointer,
    together_full: cute.Pointer,
    staged: cute.Pointer,
    s: cute.Pointer,
    t: Int32,
    tr: Int32,
    tc: Int32,
    e: Int32,
    rows: Int32,
    columns: Int32,
):
    """``store_scales`` of "columns" by ``count`` CTAs of neighbouring tiles, of ranks ``stride`` apart in the cluster.

    Each gets the words of all of them for its part of the rows.
    """
    rows_each = const_expr(TILE // count)
    mine = rank // stride % count
    place = together + (t % rows_each * count + mine)
    target = rank + (t // rows_each - mine) * stride
    cute.arch.store_async_dsmem(place, word_at(staged + 4 * t)[0], together_full, target)
    cute.arch.mbarrier_wait(together_full, 0)
    row, column = tr * TILE + mine * rows_each, (tc - mine) * 4
    store_words(TILE, TILE, 4 * count, together, s, t, row, column, e, rows, columns)


@cute.jit
def store_words(
    count: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
    width: cutlass.Constexpr[int],
    words: cute.Pointer,
    s: cute.Pointer,
    t: Int32,
    row: Int32,
    column: Int32,
    e: Int32,
    rows: Int32,
    columns: Int32,
):
    """``count`` words, rows of ``width`` bytes, to (row, column) of an expert's scales, by so many ``threads``."""
    part = (words, s, t, row, column, e, rows, columns, width)
    if columns % 4 == 0:
        store_rows(Int32, count, threads, *part)
    elif columns % 2 == 0:
        store_rows(Uint16, count, threads, *part)
    else:
        store_rows(Uint8, count, threads, *part)


@cute.jit
def store_rows(
    dtype: cutlass.Constexpr,
    count: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
    words,
    s,
    t: Int32,
    row,
    column,
    e,
    rows,
    columns,
    width: cutlass.Constexpr[int],
):
    """``store_words`` as numbers of the ``dtype``."""
    size = const_expr(dtype.width // 8)
    numbers = const_expr(4 * count // size)
    step = const_expr(threads * size // width)  # rows that the threads write at once
    unsigned = const_expr(-1 if size == 4 else (1 << 8 * size) - 1)
    pieces = cute.make_tensor(cute.recast_ptr(words, dtype=dtype), cute.make_layout(numbers))
    row, column = row + t * size // width, column + t * size % width
    first = s + ((Int64(e) * rows + row) * columns + column)
    if column < columns:
        for i in cutlass.range_constexpr(numbers // threads):
            if row + i * step < rows:
                number = pieces[t + i * threads].to(Int32) & unsigned
                keep(first + Int64(i * step) * columns, number, bits=8 * size)


@cute.jit
def store_scales(
    height: cutlass.Constexpr[int], kind: cutlass.Constexpr[str], staged, s, t: Int32, tr, tc, e, rows, columns
):
    """A tile's scales: (``height`` rows, 4 columns) of a matrix (rows, columns) an expert, 4 bytes a thread."""
    word = word_at(staged + 4 * t)[0]
    if const_expr(kind == "blocked"):
        parts, words = const_expr(TILE // height), const_expr(height // 32)  # of an atom; of each 16 bytes
        atoms_r, atoms_c = cute.ceil_div(rows, TILE), cute.ceil_div(columns, 4)
        atom = (Int64(e) * atoms_r + tr // parts) * atoms_c + tc
        keep(s + (atom * ATOM + (t // words * 16 + (tr % parts * words + t % words) * 4)), word)
    elif const_expr(kind == "rows"):  # (columns, rows): neighbours along the rows
        row, column = tr * height + t % (height // 4) * 4, tc * 4 + t // (height // 4)
        if row < rows and column < columns:
            keep(s + ((Int64(e) * columns + column) * rows + row), word)
    else:
        row, column = tr * height + t, tc * 4
        if row < rows:
            offset = (Int64(e) * rows + row) * columns + column
            if columns % 4 == 0:
                keep(s + offset, word)
            elif columns % 2 == 0:
                for i in cutlass.range_constexpr(2):
                    if column + 2 * i < columns:
                        keep(s + (offset + 2 * i), word >> (16 * i), bits=16)
            else:
                for i in cutlass.range_constexpr(4):
                    if column + i < columns:
                        keep(s + (offset + i), word >> (8 * i), bits=8)


@cute.jit
def store_squares(
    transposed: cutlass.Constexpr[bool], squares, s, t: Int32, a: Int32, b: Int32, e: Int32, blocks_a, blocks_b
):
    """The scales of a tile's 16 squares, to (E, N / 32, K / 32)."""
    row, column = a * 4 + t // 4, b * 4 + t % 4
    if row < blocks_a and column < blocks_b:
        offset = (Int64(e) * blocks_a + row) * blocks_b + column
        if const_expr(transposed):
            offset = (Int64(e) * blocks_b + column) * blocks_a + row
        put(byte_at(s + offset), squares[t].to(Uint8))


def keep(target: cute.Pointer, word: Int32, bits: int = 32) -> None:
    """Store the low bits to global memory and keep the sector in L2, where other CTAs' scales complete it.

    H200, dual 32768x7168, 4 bytes a row of scales: 276.5 us without the policy, 264.3 with it.
    """
    cute.arch.inline_ptx(
        f"st.global.L2::cache_hint.b{bits} [{{$r0}}], {{$r1}}, {{$r2}};",
        read_only_args=[target.toint(), word, Int64(EVICT_LAST)],
    )
