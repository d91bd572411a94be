"""Parts that the GEMM kernels share: the walk over the output's tiles, and the epilogue before a sum is stored."""

import math
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.common.gemm_config import BLOCK

# log2 of the normal distribution's Phi(-a) as a polynomial of a, by least squares weighted until the error was even:
# Phi to 2.2e-7 for a up to 5.4, in fp32 to 2.5e-6; from there on it falls to 2^-50 at 8, and to nothing at GELU_END
LOG2_PHI = (
    -0.99999982,
    -1.15111256,
    -0.45916095,
    -0.05260409,
    0.00716666132,
    -0.000166470098,
    -0.000204567288,
    5.58964675e-05,
    -7.62257559e-06,
    5.6194028e-07,
    -1.77729316e-08,
)
GELU_END = 40.0
LOG2_E = 1.4426950408889634


def tile_divisors(tiles_m, tiles_n, group: int, batched: bool = False) -> tuple:
    """Divisors for ``tile_of``, which the launch prepares: tiles of a group, and rows of tiles of the last group.

    Then, for a batch, the divisor of ``entry_and_tile``: the tiles of an entry.

    Divided by what only the kernel knows, a tile's place takes two divisions of 40 instructions in a row, before its
    first load and, since the compiler puts them off, after its last product.
    """
    last_rows = (tiles_m - 1) % group + 1
    divisors = (group * tiles_n, last_rows, *((tiles_m * tiles_n,) if batched else ()))
    return tuple(cute.fast_divmod_create_divisor_v2(d) for d in divisors)


@cute.jit
def tile_of(index: Int32, tiles_m: Int32, divisors: tuple, group: cutlass.Constexpr[int]):
    """(m, n) of a cluster's tile: ``group`` rows of tiles are walked column by column before the next ones.

    Tiles in flight then share rows of A and columns of B, which stay in L2.
    """
    in_group, rest = divmod(index, divisors[0])
    m, n = in_group * group, rest
    if const_expr(group > 1):
        n, row = divmod(rest, divisors[1])
        if m + group <= tiles_m:
            n, row = rest // group, rest % group
        m += row
    return m, n


@cute.jit
def entry_and_tile(index: Int32, divisors: tuple):
    """(entry of the batch, index of a tile within it): an entry's tiles are walked before the next one's."""
    entry, tile = Int32(0), index
    if const_expr(len(divisors) == 3):
        entry, tile = divmod(index, divisors[2])
    return entry, tile


@cute.jit
def num_tiles(tiles_m: Int32, tiles_n: Int32, d: cute.Tensor):
    """Tiles of ``d``, a matrix or a batch of some that have so many each."""
    tiles = tiles_m * tiles_n
    if const_expr(cute.rank(d) == 3):
        tiles = tiles * d.shape[2]
    return tiles


@cute.jit
def entry_of(batch: Optional[cute.Tensor], entry: Int32, divisors: tuple):
    """One entry of a batch, which its last mode counts; without a batch the tensor itself.

    A batch of one entry is that for all.
    """
    if const_expr(batch is not None and len(divisors) == 3):
        at = [None] * (cute.rank(batch) - 1)
        batch = batch[(*at, cutlass.min(entry, cute.size(batch, mode=[len(at)]) - 1))]
    return batch


@cute.jit
def is_read_once(operand: cute.Tensor, tiles: Int32, d: cute.Tensor):
    """Whether no two tiles of ``d`` need the same of an operand; ``tiles``: those of an entry that do."""
    once = tiles == 1
    if const_expr(cute.rank(d) == 3):
        once = once & (operand.shape[2] == d.shape[2])
    return once


@cute.jit
def shift_of(tile: Int32, size: cutlass.Constexpr[int], end: Int32, multiple: cutlass.Constexpr[int]):
    """How far the ``tile``-th tile of this size moves (0 or negative) to end within the matrix, or to begin there.

    ``multiple``: of it, a power of two; fewer rows or columns than that may lie beyond the end.
    """
    shift = cutlass.max(cutlass.min(end - (tile + 1) * size, 0), -tile * size)
    return (shift + (multiple - 1)) & -multiple


@cute.jit
def shifted(tensor: Optional[cute.Tensor], shift: tuple) -> Optional[cute.Tensor]:
    """What lies ``shift`` (0 or negative, of each mode) further in gmem, up to the same end."""
    if const_expr(tensor is not None):
        shape = tuple(size - by for size, by in zip(tensor.shape, shift, strict=True))
        layout = cute.make_layout(shape, stride=tensor.stride)
        tensor = cute.make_tensor(tensor.iterator + cute.crd2idx(shift, tensor.layout), layout)
    return tensor


@cute.jit
def shifted_rows(tiles: cute.Tensor, operand: cute.Tensor, shift: Int32) -> cute.Tensor:
    """The tiles of an operand (rows, K), or of a batch's entry, as TMA copies them, ``shift`` rows further on."""
    k = (0, 0) if isinstance(cute.shape(operand, mode=[1]), tuple) else 0
    entry = [0] * (cute.rank(operand) - 2)
    from_there = cute.domain_offset((shift, k, *entry), cute.make_tensor(tiles.iterator, operand.layout))
    return cute.make_tensor(from_there.iterator, tiles.layout)


@cute.jit
def transpose(matrix: cute.Tensor):
    """The same elements, rows and columns exchanged."""
    rest = list(range(2, cute.rank(matrix)))
    return cute.make_tensor(matrix.iterator, cute.select(matrix.layout, mode=[1, 0, *rest]))


@cute.jit
def by_blocks(operand: cute.Tensor) -> cute.Tensor:
    """An operand (rows, K), or a batch (rows, K, L), as (rows, (BLOCK, K / BLOCK)): one copy takes many blocks."""
    rows, k, *batch = operand.shape
    of_rows, of_k, *of_batch = operand.stride
    shape, strides = (rows, (BLOCK, k // BLOCK), *batch), (of_rows, (of_k, BLOCK * of_k), *of_batch)
    return cute.make_tensor(operand.iterator, cute.make_layout(shape, stride=strides))


@cute.jit
def batch_last(batch: cute.Tensor):
    """A batch's entries (L, rows, columns) as (rows, columns, L); a matrix as it is."""
    if const_expr(cute.rank(batch) == 3):
        batch = cute.make_tensor(batch.iterator, cute.select(batch.layout, mode=[1, 2, 0]))
    return batch


@cute.jit
def activate(z: cute.TensorSSA, activation: cutlass.Constexpr[Optional[str]]):
    """relu, silu or gelu (exact) of fp32 values. All at once: one after the other they take seconds to compile."""
    if const_expr(activation == "relu"):
        y = cute.where((z > 0.0) | (z != z), z, 0.0)  # a NaN stays one
    elif const_expr(activation == "silu"):
        sigmoid = cute.make_rmem_tensor(z.shape, Float32)
        sigmoid.store(1.0 + cute.math.exp2(z * -LOG2_E, fastmath=True))
        for i in cutlass.range_constexpr(cute.size(sigmoid)):
            sigmoid[i] = cute.arch.rcp_approx(sigmoid[i])
        y = z * sigmoid.load()
    elif const_expr(activation == "gelu"):
        # z Phi(z) = max(z, 0) - |z| Phi(-|z|), which keeps its relative accuracy where 1 + erf(z / sqrt(2)) cancels
        size, half = cute.math.absf(z), 0.5 * z
        size = cute.where(size < GELU_END, size, GELU_END)
        log2_phi = cute.full_like(z, LOG2_PHI[-1])
        for coefficient in LOG2_PHI[-2::-1]:
            log2_phi = cute.math.fma(log2_phi, size, cute.full_like(z, coefficient))
        positive = half + cute.math.absf(half)  # of -infinity NaN, as torch has it; a zero is +0
        y = cute.math.fma(-size, cute.math.exp2(log2_phi, fastmath=True), positive)
    else:
        y = z
    return y


@cute.jit
def add_bias(
    sums: cute.Tensor, coordinates: cute.Tensor, bias: cute.Tensor, first: Int32, mode: cutlass.Constexpr[int]
):
    """Add ``bias`` to a fragment; ``coordinates`` within the tile, whose bias begins at ``first`` along ``mode``.

    Beyond the end the last element is loaded: what it is added to is not stored.
    """
    for i in cutlass.range_constexpr(cute.size(sums)):
        index = cutlass.min(first + coordinates[i][mode], bias.shape[0] - 1)
        sums[i] = sums[i] + bias[index].to(Float32)


@cute.jit
def load_sums(
    sums: cute.Tensor,
    coordinates: cute.Tensor,
    d: cute.Tensor,
    first_m: Int32,
    first_n: Int32,
    in_flight: cutlass.Constexpr[int] = 64,
):
    """Start a fragment of accumulators from ``d`` (fp32), so many loads of a thread at once: each has an address.

    Beyond the end the last element is loaded: what it starts is not stored.
    """
    step = const_expr(math.gcd(cute.size(sums), in_flight))
    rest = const_expr(cute.size(sums) - step)
    for first in cutlass.range(0, cute.size(sums), step, unroll=1):
        # Registers have no index at run time: the sums move down, so that each ends where it belongs
        for i in cutlass.range_constexpr(rest):
            sums[i] = sums[i + step]
        for i in cutlass.range_constexpr(step):
            m = cutlass.min(first_m + coordinates[first + i][0], d.shape[0] - 1)
            n = cutlass.min(first_n + coordinates[first + i][1], d.shape[1] - 1)
            sums[rest + i] = d[m, n]


@cute.jit
def store_sums(
    sums: cute.Tensor,
    coordinates: cute.Tensor,
    d: cute.Tensor,
    z: Optional[cute.Tensor],
    first_m: Int32,
    first_n: Int32,
    activation: cutlass.Constexpr[Optional[str]],
    tile_rows: cutlass.Constexpr[Optional[int]] = None,
):
    """Store a fragment straight from registers, element by element, inside the matrices; z: before the activation.

    ``tile_rows``: where the fragment has more than the tile.
    """
    activated = cute.make_rmem_tensor(sums.shape, Float32)
    activated.store(activate(sums.load(), activation))
    # By columns, each of all instructions: its address is not kept for the next one, which would spill
    instruction = const_expr(cute.size(sums, mode=[0]))
    instructions = const_expr(cute.size(sums) // instruction)
    for place in cutlass.range_constexpr(cute.size(sums)):
        i = const_expr(place // instructions + place % instructions * instruction)
        m, n = first_m + coordinates[i][0], first_n + coordinates[i][1]
        inside = m < d.shape[0] and n < d.shape[1]
        if const_expr(tile_rows is not None):
            inside = inside and coordinates[i][0] < tile_rows
        if inside:
            if const_expr(z is not None):
                z[m, n] = sums[i].to(z.element_type)
            d[m, n] = activated[i].to(d.element_type)
