"""CuTe kernels of sums by an index, for SM90 and SM100.

The sources of a place are known by their ascending positions: ``order``, a stable sort of ``keys``. A place with more
than SEGMENT sources is cut into segments of so many, each summed by itself; a second kernel adds their sums, ascending,
and sums all other places. A column of a sum is one chain of additions in one thread: no atomics, no tree.

Profile: ncu --clock-control none -k regex:Sums python -m bench.bench_scatter --filter index_sum.fwd
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.common.cache_hints import load_vector
from cute_kernels.common.convert import to_fp32
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.scatter.config import SEGMENT, THREADS, ElementsSpec, RowsSpec
from jit_cache import Program, compiled

BATCH = 8  # rows in flight of a chain
CTAS_PER_SM = 4  # with 64 registers a thread a batch is in flight; with 32, which the compiler takes for 8, a row is


class SumsOfRows:
    """The base of both kernels: a thread has ``vec`` columns; ``lanes`` threads share a place."""

    def __init__(self, spec: RowsSpec):
        self.vec, self.lanes, self.groups = spec.vec, spec.lanes, spec.groups
        self.store_kind = spec.store
        self.dense = spec.store == "write"  # places are a table's rows, else positions among the sorted keys
        self.places = THREADS // spec.lanes  # of a CTA at a time

    @cute.jit
    def tiles(self, out: cute.Tensor) -> Int32:
        """CTAs that share a row."""
        return cute.ceil_div(out.shape[1], self.lanes * self.vec)

    @cute.jit
    def coordinates(self, out: cute.Tensor):
        """(first place of the CTA's threads, this thread's place among them, its column)."""
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        tiles = self.tiles(out)
        column = (bidx % tiles * self.lanes + tidx % self.lanes) * self.vec
        return bidx // tiles, tidx // self.lanes, column

    @cute.jit
    def load(self, matrix: cute.Tensor, row, column: Int32):
        """This thread's columns of a row, in fp32."""
        loaded = cute.make_rmem_tensor((self.vec,), matrix.element_type)
        load_vector(self.pointer(matrix, row, column), loaded, None)
        return to_fp32(loaded.load())

    @cute.jit
    def store(self, value, matrix: cute.Tensor, row, column: Int32):
        stored = cute.make_rmem_tensor((self.vec,), matrix.element_type)
        stored.store(value.to(matrix.element_type))
        target = cute.make_tensor(self.pointer(matrix, row, column), cute.make_layout(self.vec))
        cute.autovec_copy(stored, target)

    def pointer(self, matrix: cute.Tensor, row, column):
        """64 bits: a row may lie beyond 2^31 elements."""
        pointer = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
        return pointer.align(min(self.vec * matrix.element_type.width // 8, 16))

    @cute.jit
    def add_sources(
        self, total: cute.Tensor, source: cute.Tensor, order: cute.Tensor, begin: Int32, end: Int32, column: Int32
    ):
        """Add rows ``order[begin:end]``, ascending: BATCH at a time, then what is left by powers of two.

        Loads that are under no condition of their own are issued together.
        """
        left = (end - begin) % BATCH
        for first in cutlass.range(begin, end - left, BATCH):
            self.add_batch(total, source, order, first, column, BATCH)
        for bit in cutlass.range_constexpr(BATCH.bit_length() - 2, -1, -1):
            size = const_expr(1 << bit)
            if left & size:
                self.add_batch(total, source, order, end - left % (2 * size), column, size)

    @cute.jit
    def add_batch(
        self,
        total: cute.Tensor,
        source: cute.Tensor,
        order: cute.Tensor,
        first: Int32,
        column: Int32,
        size: cutlass.Constexpr[int],
    ):
        """Add ``size`` rows, all of which are in flight at once."""
        loaded = cute.make_rmem_tensor((self.vec, size), source.element_type)
        rows = [order[first + b] for b in range(size)]
        for b in cutlass.range_constexpr(size):
            load_vector(self.pointer(source, rows[b], column), loaded[None, b], None)
        for b in cutlass.range_constexpr(size):
            total.store(total.load() + to_fp32(loaded[None, b].load()))


class SegmentSums(SumsOfRows):
    """Sums of the segments of places with more than SEGMENT sources.

    Of SEGMENT consecutive positions among the sorted keys at most two begin such a segment: one that is not the first
    of its place, then one that is. Each has its row of ``partials``: 2 b and 2 b + 1 of block b.
    """

    @cute.jit
    def __call__(
        self,
        source: cute.Tensor,
        keys: cute.Tensor,
        order: cute.Tensor,
        begins: cute.Tensor,
        ends: cute.Tensor,
        out: cute.Tensor,
        partials: cute.Tensor,
        padding_idx: Int64,
        stream,
    ):
        self.kernel(source, keys, order, begins, ends, out, partials, padding_idx).launch(
            grid=[self.tiles(out) * cute.ceil_div(partials.shape[0], self.places), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=0,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        source: cute.Tensor,
        keys: cute.Tensor,
        order: cute.Tensor,
        begins: cute.Tensor,
        ends: cute.Tensor,
        out: cute.Tensor,
        partials: cute.Tensor,
        padding_idx: Int64,
    ):
        cta, place, column = self.coordinates(out)
        slot = cta * self.places + place
        cute.arch.griddepcontrol_wait()
        if (slot < partials.shape[0]) & (column < out.shape[1]):
            block = slot // 2 * SEGMENT
            is_first = slot % 2 == 1
            position = block
            if is_first:
                position = cutlass.min(block + SEGMENT, keys.shape[0]) - 1
            key = Int64(keys[position])
            if is_place(key, out, padding_idx):
                at = Int32(key) if const_expr(self.dense) else position
                begin, end = begins[at], ends[at]
                first = begin
                if not is_first:
                    first = begin + cute.ceil_div(block - begin, SEGMENT) * SEGMENT
                within = (first >= block) & (first < block + SEGMENT) & (first < end)
                if within & (end - begin > SEGMENT) & (is_first == (first == begin)):
                    total = cute.make_rmem_tensor((self.vec,), Float32)
                    total.fill(0.0)
                    if const_expr(self.store_kind == "onto"):
                        if is_first:
                            total.store(self.load(out, key, column))
                    self.add_sources(total, source, order, first, cutlass.min(first + SEGMENT, end), column)
                    self.store(total.load(), partials, slot, column)


class GroupedSums(SumsOfRows):
    """out's rows of the sources whose keys name them. The first position of a key among the sorted ones does its work,
    or where all of out is written, each of out's rows does its own.
    """

    @cute.jit
    def __call__(
        self,
        source: cute.Tensor,
        keys: cute.Tensor,
        order: cute.Tensor,
        begins: cute.Tensor,
        ends: cute.Tensor,
        partials: cute.Tensor,
        out: cute.Tensor,
        padding_idx: Int64,
        stream,
    ):
        places = out.shape[0] if const_expr(self.dense) else keys.shape[0]
        self.kernel(source, keys, order, begins, ends, partials, out, padding_idx).launch(
            grid=[self.tiles(out) * cute.ceil_div(places, self.places * self.groups), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=0,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        source: cute.Tensor,
        keys: cute.Tensor,
        order: cute.Tensor,
        begins: cute.Tensor,
        ends: cute.Tensor,
        partials: cute.Tensor,
        out: cute.Tensor,
        padding_idx: Int64,
    ):
        cta, place, column = self.coordinates(out)
        places = out.shape[0] if const_expr(self.dense) else keys.shape[0]
        step = cute.ceil_div(places, self.places * self.groups) * self.places
        here = cta * self.places + place
        cute.arch.griddepcontrol_wait()
        begin, end = bounds_at(begins, ends, here, places)
        for g in cutlass.range(self.groups, unroll=1):
            at = here + g * step
            next_begin, next_end = bounds_at(begins, ends, at + step, places)  # in flight while rows are summed
            if (at < places) & (column < out.shape[1]):
                if const_expr(self.dense):
                    if Int64(at) == padding_idx:
                        end = begin
                    self.sum_of_place(source, order, partials, out, at, begin, end, column)
                else:
                    key = Int64(keys[at])
                    if (begin == at) & is_place(key, out, padding_idx):
                        self.sum_of_place(source, order, partials, out, key, begin, end, column)
            begin, end = next_begin, next_end

    @cute.jit
    def sum_of_place(
        self,
        source: cute.Tensor,
        order: cute.Tensor,
        partials: cute.Tensor,
        out: cute.Tensor,
        row,
        begin: Int32,
        end: Int32,
        column: Int32,
    ):
        total = cute.make_rmem_tensor((self.vec,), Float32)
        total.fill(0.0)
        if end - begin <= SEGMENT:
            if const_expr(self.store_kind == "onto"):
                total.store(self.load(out, row, column))
            self.add_sources(total, source, order, begin, end, column)
        else:
            total.store(self.load(partials, begin // SEGMENT * 2 + 1, column))
            for first in cutlass.range(begin + SEGMENT, end, SEGMENT):
                total.store(total.load() + self.load(partials, first // SEGMENT * 2, column))
        value = total.load()
        if const_expr(self.store_kind == "add"):
            value = self.load(out, row, column) + value
        self.store(value, out, row, column)


@cute.jit
def bounds_at(begins: cute.Tensor, ends: cute.Tensor, place: Int32, places: Int32):
    """Where the sources of a place begin and end in their order; nowhere, of one beyond the last."""
    begin, end = Int32(0), Int32(0)
    if place < places:
        begin, end = begins[place], ends[place]
    return begin, end


@cute.jit
def is_place(key: Int64, out: cute.Tensor, padding_idx: Int64) -> Boolean:
    """Whether a key names a row that is summed."""
    return (key >= 0) & (key < out.shape[0]) & (key != padding_idx)


class ElementSums:
    """out[row, index[row, e]] and what else of the row's few elements goes there, ascending; a thread an element.

    The first of several with one index adds them all.
    """

    @cute.jit
    def __call__(self, source: cute.Tensor, index: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(source, index, out).launch(
            grid=[cute.ceil_div(index.shape[0] * index.shape[1], THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, source: cute.Tensor, index: cute.Tensor, out: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        at = bidx * THREADS + tidx
        few = index.shape[1]
        row, e = at // few, at % few
        cute.arch.griddepcontrol_wait()
        if row < index.shape[0]:
            column = index[row, e]
            is_first = (column >= 0) & (column < out.shape[1])
            for before in cutlass.range(e):
                if index[row, before] == column:
                    is_first = Boolean(False)
            if is_first:
                pointer = out.iterator + (Int64(row) * out.stride[0] + column)
                target = cute.make_tensor(pointer, cute.make_layout(1))
                total = target[0].to(Float32)
                for other in cutlass.range(e, few):
                    if index[row, other] == column:
                        total = total + source[row, other].to(Float32)
                target[0] = total.to(out.element_type)


def _matrix(dtype, rows, columns, vec: int):
    stride = (cute.sym_int64(divisibility=vec), 1)
    return cute.runtime.make_fake_tensor(dtype, (rows, columns), stride, assumed_align=min(vec * dtype.width // 8, 16))


def _arguments(spec: RowsSpec) -> dict:
    source, out, keys = map(cutlass_dtype, (spec.source, spec.out, spec.keys))
    number, rows, places, slots = (cute.sym_int() for _ in range(4))
    columns = cute.sym_int(divisibility=spec.vec)
    return {
        "source": _matrix(source, number, columns, spec.vec),
        "keys": symbolic_vector(keys, number),
        "order": symbolic_vector(Int64, number),
        "begins": symbolic_vector(Int32, places),
        "ends": symbolic_vector(Int32, places),
        "out": _matrix(out, rows, columns, spec.vec),
        "partials": _matrix(Float32, slots, columns, spec.vec),
        "padding_idx": Int64(-1),
        "stream": cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    }


@compiled
def segment_sums(arch: str, spec: RowsSpec) -> Program:
    """Sums of segments of places with many sources, into ``partials``."""
    names = "source", "keys", "order", "begins", "ends", "out", "partials", "padding_idx", "stream"
    arguments = _arguments(spec)
    return Program(SegmentSums(spec), *(arguments[name] for name in names))


@compiled
def grouped_sums(arch: str, spec: RowsSpec) -> Program:
    """Sums of rows by their keys; ``begins`` and ``ends`` are of out's rows, or of the positions of sorted keys."""
    names = "source", "keys", "order", "begins", "ends", "partials", "out", "padding_idx", "stream"
    arguments = _arguments(spec)
    return Program(GroupedSums(spec), *(arguments[name] for name in names))


@compiled
def element_sums(arch: str, spec: ElementsSpec) -> Program:
    """Sums of few elements of each row, along the row, onto out's."""
    rows, few = cute.sym_int(), cute.sym_int()
    source, out = cutlass_dtype(spec.source), cutlass_dtype(spec.out)
    return Program(
        ElementSums(),
        cute.runtime.make_fake_tensor(source, (rows, few), (cute.sym_int64(), cute.sym_int64())),
        cute.runtime.make_fake_tensor(Int64, (rows, few), (cute.sym_int64(), cute.sym_int64())),
        cute.runtime.make_fake_tensor(out, (rows, cute.sym_int()), (cute.sym_int64(), 1)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
