"""Static choices of the mhc kernels: pure functions of streams, channels and dtypes, never of the number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StreamLayout:
    """How a thread takes part in a token: ``vec`` channels of each of ``n`` streams.

    ``order``: "streams" (stream after stream in memory) or "channels" (channel after channel). ``access``: elements of
    x that one load moves. ``unroll``: vectors whose loads a thread has in flight. ``threads``: of a CTA whose warps
    have nothing to do with each other.
    """

    n: int
    channels: int
    order: str
    vec: int
    access: int
    unroll: int
    threads: int = 256

    @property
    def vectors(self) -> int:
        """Vectors of a token."""
        return self.channels // self.vec


def stream_layout(n: int, channels: int, order: str, itemsize: int, alignment: int) -> StreamLayout:
    """``alignment``: elements on a multiple of which all rows of all matrices start.

    16 bytes of every stream a thread, with 8 streams 8 (their 72 sums of products fill the registers); in the order of
    channels 16 bytes in all, so that neighbouring threads read neighbouring units, and as many of them as streams.
    H200, 4096x8x4096, share of the same-bytes copy, 4 units and 8: expand_combine fwd 0.880, 0.966; aggregate bwd
    0.921, 0.953. CTAs of 256 threads and of 128, whose many registers are free sooner: expand_combine fwd, order of
    streams, 156.2 us, 146.4.
    """
    widest, threads = 16 // itemsize, 128 if n == 8 else 256
    if n == 1 or order == "streams":
        vec = math.gcd(widest if n < 8 else widest // 2, channels, alignment)
        return StreamLayout(n, channels, "streams", vec, vec, 1, threads)
    vec = math.gcd(max(1, widest // n), channels, alignment)
    return StreamLayout(n, channels, "channels", vec, math.gcd(widest, vec * n, alignment), n, threads)


def product_layout(layout: StreamLayout) -> StreamLayout:
    """Of the backward of expand_combine, whose sums leave fewer registers: 4096x8x4096 with 8 units 272 us, 4 263."""
    return replace(layout, unroll=min(4, layout.unroll))


@dataclass(frozen=True)
class ProjectionConfig:
    """How the products of tokens with phi are computed.

    ``columns``: N; ``k``: n C; ``splits``: parts of K that are added by themselves; ``tile_k``: columns of x that come
    at once, ``stages`` tiles in flight, ``ctas_per_sm`` times; ``warps_k``: warps that share a token's columns;
    ``x_terms``, ``phi_terms``: bf16 numbers whose sum stands for an element; products of term a and term b are taken
    where a + b < ``order``. ``tma``: rows start and end on 16 bytes.
    """

    columns: int
    k: int
    splits: int
    tile_k: int
    stages: int
    ctas_per_sm: int
    warps_k: int
    x_terms: int
    phi_terms: int
    order: int
    tma: bool

    @property
    def padded_columns(self) -> int:
        """Columns in whole tiles of the tensor cores."""
        return -(-self.columns // 8) * 8

    @property
    def tiles(self) -> int:
        """Of K; every ``splits``-th is one part's."""
        return -(-self.k // self.tile_k)

    def grid(self, num_tokens: int, num_sms: int) -> int:
        """CTAs: one for each block of tokens and part of K, as many as fit."""
        return min(-(-num_tokens // PROJECTION_TOKENS) * self.splits, num_sms * self.ctas_per_sm)


PROJECTION_TOKENS = 128  # of a CTA whose warps multiply
MAX_WARP_COLUMNS = 32  # whose sums for 64 tokens a warp's registers hold
SLICE = 4096
BIAS_CHUNK = 64  # tokens whose gradients of the bias are added first
TERMS = {"bfloat16": 1, "float16": 2, "float32": 3}  # of 8 bits that an element needs to be exact
SHARED_MEMORY = 227 * 1024  # of a CTA
MAX_STAGES = 8


def splits_of(k: int) -> int:
    """Parts of K, of up to SLICE columns each: a power of two as tokens come in, so that all CTAs have the same to do.

    H200, projection, share of the same-bytes copy, for parts of 4096 and a rest: 16384x4x1280 0.59 -> 0.70, 8192x4x2560
    0.63 -> 0.72, 2048x4x5120 0.53 -> 0.62; twice as many parts: 4096x4x4096 0.69 -> 0.71, 4096x4x7168 0.78 -> 0.67.
    """
    return 1 << (-(-k // SLICE) - 1).bit_length()


def projection_config(columns: int, k: int, x: str, phi: str, precision: str, tma: bool) -> ProjectionConfig:
    """``x``, ``phi``: names of the dtypes. "tf32" takes products to 2^-16 of the largest, "fp32" to 2^-24.

    H200, 8192x4x4096, share of the same-bytes copy: two CTAs of two stages of 128 columns 0.84, of four of 64 0.82,
    three CTAs of two of 64 0.80.
    """
    order = 2 if precision == "tf32" else 3
    light = columns <= MAX_WARP_COLUMNS and x == "bfloat16"
    return ProjectionConfig(
        columns=columns,
        k=k,
        splits=splits_of(k),
        tile_k=128 if light else 32 if x == "float32" else 64,
        stages=2 if light else 3,
        ctas_per_sm=2,
        warps_k=2 if light else 1,
        x_terms=min(TERMS[x], order),
        phi_terms=min(TERMS[phi], order),
        order=order,
        tma=tma,
    )


TILE_K = 64  # columns of x that come at once where warpgroups multiply


@dataclass(frozen=True)
class WarpgroupProjectionConfig:
    """How warpgroups compute the products of bf16 tokens with many rows of phi (kernel/projection_sm90.py).

    ``columns``: N; ``k``: n C; ``splits``: as in ProjectionConfig; ``tokens`` of a CTA; ``stages`` tiles in flight;
    ``phi_terms``: bf16 numbers whose sum stands for an element of phi.
    """

    columns: int
    k: int
    splits: int
    tokens: int
    stages: int
    phi_terms: int

    @property
    def padded_columns(self) -> int:
        """Columns in whole octets."""
        return -(-self.columns // 8) * 8

    @property
    def term_rows(self) -> int:
        """Rows that the terms of phi fill."""
        return self.padded_columns * self.phi_terms

    @property
    def instruction_rows(self) -> int:
        """Of these, that one instruction multiplies: all, where its sums fit the 128 registers of a thread of 512.

        240 would need 146, says ptxas, whatever `setmaxnreg` adds later.
        """
        return self.term_rows if self.term_rows <= 160 else self.padded_columns

    @property
    def tiles(self) -> int:
        """Of K; every ``splits``-th is one part's."""
        return -(-self.k // TILE_K)

    def grid(self, num_tokens: int, num_sms: int) -> int:
        """Pairs of CTAs: one for each two blocks of tokens and part of K, as many as fit."""
        return min(-(-num_tokens // (2 * self.tokens)) * self.splits, max(1, num_sms // 2))


def warpgroup_projection_config(columns: int, k: int, phi: str, precision: str) -> WarpgroupProjectionConfig:
    """``phi``, ``precision``: as in ``projection_config``. A thread has up to 160 sums."""
    phi_terms = min(TERMS[phi], 2 if precision == "tf32" else 3)
    config = WarpgroupProjectionConfig(columns, k, splits_of(k), 0, 0, phi_terms)
    tokens = 256 if config.term_rows <= 160 else 128
    tile = 2 * TILE_K * (tokens + config.term_rows)
    return replace(config, tokens=tokens, stages=min(MAX_STAGES, (SHARED_MEMORY - 2048) // tile))


BLOCK_TOKENS = 16  # that a cluster has at once


@dataclass(frozen=True)
class PreConfig:
    """How clusters compute H and the layer input of bf16 streams (kernel/pre.py).

    ``columns``: N; ``cluster`` CTAs share a token, each with ``slice_c`` channels of each of ``n`` streams of
    ``channels``, in memory in the order ``layout``; ``stages`` blocks of tokens have a place; where nothing is mixed
    ``lead`` at most are loaded beyond the last whose H is known, and ``flight`` pieces of them at most are on their way
    at once (0: any number), one more in clusters that have a block more than others; ``phi_terms``: bf16 numbers whose
    sum stands for an element of phi.
    """

    n: int
    channels: int
    layout: str
    columns: int
    cluster: int
    slice_c: int
    stages: int
    flight: int
    lead: int
    phi_terms: int

    @property
    def k(self) -> int:
        """Elements of a token."""
        return self.n * self.channels

    @property
    def owned(self) -> int:
        """Tokens of a block whose coefficients a CTA computes."""
        return BLOCK_TOKENS // self.cluster

    @property
    def boxes(self) -> int:
        """Of 64 columns, that a CTA has of a token."""
        return self.n * self.slice_c // 64

    @property
    def piece(self) -> int:
        """Boxes that are asked for together: a stream's, or 512 bytes of a token.

        Neighbours within 512 bytes asked for at other times presumably cost DRAM more. H200, projection, 2048x4x5120,
        us, boxes a piece: streams 5 (a stream's) 29.0, 4 30.8, 4 and 6 31.1; channels 4 28.5, 5 28.9, 4 and 6 30.2.
        """
        return self.boxes // self.n if self.layout == "streams" else math.gcd(self.boxes, 4)

    @property
    def steps(self) -> int:
        """Of 16 columns, that each of eight warps multiplies."""
        return self.boxes // 2

    @property
    def width(self) -> int:
        """Numbers of a token's sums, H and mean square, in shared memory: an odd number of quads, to use all banks."""
        return -(-(self.columns + 1) // 4) // 2 * 8 + 4

    @property
    def octets(self) -> int:
        """Of rows of phi."""
        return -(-self.columns // 8)

    @property
    def row_tiles(self) -> int:
        """Of 16 rows, that the terms of phi fill."""
        return -(-self.octets * self.phi_terms // 2)

    @property
    def product_registers(self) -> int:
        """Of a thread that multiplies: terms of phi, and sums."""
        return self.row_tiles * (4 * self.steps + 8)

    def registers(self, mixes: bool) -> tuple[int, int, int]:
        """Of a thread that multiplies, that makes the layer input, that helps.

        Together at most what a CTA of 512 threads, or of 384 that mixes nothing, starts with: 128 or 168 a thread.
        H200, pre, 4096x4x7168, us: 224, 40, 24 102.1, 216, 48, 32 91.5.
        """
        products = max(128, min(216, self.product_registers + 40))
        if not mixes:
            return products, 0, min(104, 504 - 2 * products)
        helps = 56 if products <= 208 else 32
        return products, min(144, (512 - 2 * products - helps) // 8 * 8), helps

    def num_clusters(self, num_tokens: int, num_sms: int) -> int:
        """No more than are resident at once: SMs of a GPC that do not make up a cluster stay empty.

        H200, one CTA an SM: 66 clusters of 2, 30 of 4, 15 of 8, 7 of 16 are; of 8 this asks for 14, which are as fast.
        """
        clusters = num_sms // self.cluster
        resident = max(1, clusters if self.cluster <= 2 else clusters * 10 // 11)
        return min(-(-num_tokens // BLOCK_TOKENS), resident)


MAX_PRODUCT_REGISTERS = 192
MAX_PRE_COLUMNS = 1792  # of a CTA: three blocks in flight fill its shared memory


def pre_config(n: int, channels: int, layout: str, columns: int, phi: str, precision: str) -> PreConfig | None:
    """The smallest cluster whose registers hold phi; None where 16 CTAs are not enough: too wide, or eight streams.

    ``phi``: name of the dtype that holds phi times norm_weight. Clusters of 16 load more slowly: loads of x alone take
    77.5 us at 8192x4x4096 (H200), by the same 112 CTAs without clusters 71.5.

    ``lead``: 112 KB of x on their way, 128 in clusters of more than four: more keep the cluster's slowest waiting for
    the memory. H200, projection, us: 16384x4x1280, in clusters of 4, with 2, 3, 4 blocks of 40 KB 60.3, 50.9, 51.3;
    2048x4x5120, of 16, with 3, 4 of 40 KB 31.3, 30.2; 8192x4x4096, of 16, with 3, 4, 5 of 32 KB 83.2, 74.6, 76.6.

    ``flight``: 64 KB that have not arrived, in clusters of 16. 2048x4x5120, 4 to 7 of 10 KB: 30.5, 29.4, 29.0, 29.3;
    order of channels, 6 to 8 of 8 KB: 29.0, 28.6, 28.7; smaller clusters are 1 % slower so (8192x4x2560, by blocks,
    48.9 -> 49.3).
    """
    phi_terms = min(TERMS[phi], 2 if precision == "tf32" else 3)
    unit = max(64, 128 // n)  # whole boxes of each stream, an even number of them
    for cluster in (2, 4, 8, 16):
        slice_c = -(-channels // (cluster * unit)) * unit
        config = PreConfig(n, channels, "streams" if n == 1 else layout, columns, cluster, slice_c, 0, 0, 0, phi_terms)
        fits = config.product_registers <= MAX_PRODUCT_REGISTERS and n * slice_c <= MAX_PRE_COLUMNS
        if fits and n * config.owned <= 32:  # a lane has one gate
            sums = 2 * 8 * BLOCK_TOKENS * 4 * config.width
            stage = BLOCK_TOKENS * (config.boxes * 128 + 4 * (config.width + n))
            stages = min(MAX_STAGES, (SHARED_MEMORY - sums - 4096) // stage)
            phi_bytes = 8 * config.octets * (2 if phi == "bfloat16" else 4)  # a column, as it comes through the ring
            block = BLOCK_TOKENS * config.boxes * 128
            lead = min(stages, -(-(112 if cluster <= 4 else 128) * 1024 // block))
            piece = block * config.piece // config.boxes
            flight = max(2, round(64 * 1024 / piece)) if cluster == 16 else 0
            config = replace(config, stages=stages, flight=flight, lead=lead)
            return config if phi_bytes <= 2 * BLOCK_TOKENS * stages else None
    return None


def coefficient_threads(splits: int) -> int:
    """Of a CTA for 32 tokens: the more parts of K there are to add, the more threads ask for them; 0: there is H.

    H200, 128 -> 512: of 8 parts projection.2048x4x5120 42.0 -> 36.9 us, of H coefficients_sinkhorn.8192 10.5 -> 8.4,
    but of one part layer.65536x4x768 459 -> 466, of two layer.16384x4x1280 200 -> 202.
    """
    return 128 * min(4, splits or 4)


@dataclass(frozen=True)
class ProjectionBackwardConfig:
    """How the gradients of the streams and of phi are computed.

    ``columns``: N. A CTA owns ``slice_c`` channels of each of ``n`` streams of ``channels``, in memory in the order
    ``layout``, and walks over tokens ``tile_m`` at a time, ``stages`` tiles in flight. dphi is summed over chunks of
    ``chunk`` tokens, then over ``group`` chunks, then over groups. ``parts`` warps share their columns, each with one
    term of dH. A warp that adds up has ``sum_groups`` times the columns of one that computes dx. ``x_terms``,
    ``phi_terms``, ``order``, ``tma``: as in ProjectionConfig; dH has ``order`` terms.
    """

    columns: int
    n: int
    channels: int
    layout: str
    slice_c: int
    tile_m: int
    chunk: int
    group: int
    stages: int
    parts: int
    sum_groups: int
    x_terms: int
    phi_terms: int
    order: int
    tma: bool

    @property
    def k(self) -> int:
        """Elements of a token."""
        return self.n * self.channels

    @property
    def slices(self) -> int:
        """How many CTAs share a token."""
        return -(-self.channels // self.slice_c)

    @property
    def groups(self) -> int:
        """Warps that have columns of their own: eight channels of every stream."""
        return self.slice_c // 8

    @property
    def warps(self) -> int:
        """Of a CTA, that compute dx."""
        return self.groups * self.parts

    @property
    def sum_warps(self) -> int:
        """Of a CTA, that add up the gradient of phi."""
        return self.warps // self.sum_groups

    @property
    def padded_columns(self) -> int:
        """Columns in whole octets."""
        return -(-self.columns // 8) * 8

    @property
    def terms_columns(self) -> int:
        """Columns of all terms of dH, in whole steps of the tensor cores."""
        return -(-self.order * self.padded_columns // 16) * 16

    def block_rows(self, b: int) -> int:
        """Rows that term b of phi takes: once for each term of dH that it is multiplied with."""
        return -(-(self.order - b) * self.padded_columns // 16) * 16

    @property
    def phi_rows(self) -> int:
        """Rows of all terms of phi."""
        return sum(self.block_rows(b) for b in range(self.phi_terms))

    @property
    def scratch(self) -> int:
        """Bytes of shared memory for the sums of a group of chunks so far."""
        return 4 * self.padded_columns * self.n * self.slice_c if self.group > 1 else 0

    def schedule(self, num_tokens: int, num_sms: int) -> tuple[int, int]:
        """(chunks of an item, CTAs): items of a whole group where that takes no longer."""
        found = []
        for chunks in (self.group, 1):
            items = -(-num_tokens // (chunks * self.chunk)) * self.slices
            ctas = self._num_ctas(items, num_sms)
            found.append((-(-items // ctas) * chunks, chunks, ctas))
        groups, single = found
        return groups[1:] if groups[0] <= single[0] else single[1:]

    def _num_ctas(self, items: int, num_sms: int) -> int:
        """As few as need no more rounds, so that most end together; or those that keep their slices, and so phi, even
        if one round in eight is for that.

        H200, 4096x4x7168: 112 CTAs 128.5 us, 128 139; a layer's backward 419, 430.
        """
        rounds, whole = -(-items // num_sms), num_sms // self.slices * self.slices
        if whole and -(-items // whole) - rounds <= rounds // 7:
            return min(items, whole)
        return -(-items // rounds)

    def partials(self, num_tokens: int, chunks: int) -> int:
        """Partial sums of the gradient of phi, of items of so many chunks."""
        return -(-num_tokens // (chunks * self.chunk)) * self.parts


MAX_BOX = 64  # columns of x that one copy of the projection's backward brings
TILE_TOKENS = 64  # that come at once where warpgroups compute the backward
SLICE_CHANNELS = 16  # of each stream, that a CTA owns there if it adds what reaches x by other ways than the projection


@dataclass(frozen=True)
class WarpgroupBackwardConfig:
    """How warpgroups compute dx and the sums of dphi (kernel/projection_backward_sm90.py).

    ``columns``: N; ``k``: n C. A CTA owns ``slice_k`` columns of x, as many of each of ``runs`` equal parts of K, with
    phi in ``phi_terms`` terms, and adds ``chunk`` tokens; in flight are ``stages`` tiles of dH and R, which a pair of
    CTAs shares, and ``x_stages`` of x, dout and dlayer. ``sharers``: warpgroups that share a tile's dx; one: they take
    turns.
    """

    columns: int
    k: int
    slice_k: int
    runs: int
    chunk: int
    phi_terms: int
    stages: int
    x_stages: int
    sharers: int

    @property
    def run(self) -> int:
        """Columns of a slice that follow each other."""
        return self.slice_k // self.runs

    @property
    def box(self) -> int:
        """Columns of x that a copy brings: 128 bytes of each token, or a run."""
        return min(MAX_BOX, self.run)

    @property
    def boxes(self) -> int:
        """Of a tile."""
        return self.slice_k // self.box

    @property
    def pairs(self) -> int:
        """Of CTAs, that share a token."""
        return -(-self.k // self.runs // (2 * self.run))

    def chunks(self, num_tokens: int) -> int:
        """Partial sums of a column."""
        return -(-num_tokens // self.chunk)

    def grid(self, num_tokens: int, num_sms: int) -> int:
        """Pairs of CTAs: as few as need no more rounds."""
        items = self.chunks(num_tokens) * self.pairs
        return -(-items // -(-items // max(1, num_sms // 2)))


def warpgroup_backward_config(
    n: int, k: int, layout: str, columns: int, phi: str, combines: bool, gathers: bool
) -> WarpgroupBackwardConfig:
    """``phi``, ``combines``, ``gathers``: as in ``projection_backward_config``. Products as in precision "tf32".

    What else reaches x needs all streams of a channel: with it a slice has SLICE_CHANNELS of each.
    """
    phi_terms, stages = min(TERMS[phi], 2), 2
    mixes = combines or gathers
    slice_k = SLICE_CHANNELS * n if mixes else 256
    fixed = 2 * phi_terms * columns * slice_k + stages * 4 * TILE_TOKENS * (columns + combines * n * n) + 2048
    tile = 2 * TILE_TOKENS * (slice_k * (1 + combines) + SLICE_CHANNELS * gathers)
    return WarpgroupBackwardConfig(
        columns=columns,
        k=k,
        slice_k=slice_k,
        runs=n if mixes and layout == "streams" else 1,
        chunk=1024,
        phi_terms=phi_terms,
        stages=stages,
        x_stages=min(MAX_STAGES, (SHARED_MEMORY - fixed) // tile),
        sharers=1 if mixes else 2,
    )


CHUNK = 512  # tokens
GROUP = 4  # chunks


def projection_backward_config(
    n: int,
    channels: int,
    layout: str,
    columns: int,
    x: str,
    phi: str,
    precision: str,
    tma: bool,
    combines: bool,
    gathers: bool,
) -> ProjectionBackwardConfig:
    """``combines``: dout and R are there, too; ``gathers``: dlayer and pre are.

    128 bytes of a stream's row a CTA; of "fp32" products half, since three terms of dH fill the registers; of 8 streams
    less, since the terms of phi fill the shared memory. With dout of four streams tiles of 16 tokens, beside whose ring
    a group's sums fit.

    H200, dx and partials with dout, 64 channels, 32: 8192x4x4096 228 us, 239; 2048x4x5120 89, 88. A layer's backward,
    8192x4x4096, with tiles of 16 tokens 460 us, of 32, three of them in flight, 482; projection, tiles of 32, 147, of
    16 160. Tiles of 32 in flight, 5, 8: projection 4096x4x7168 136, 128; 8192x4x2560 112, 109; 8192x4x4096 146, 153.
    """
    order = 2 if precision == "tf32" else 3
    wide = columns > MAX_WARP_COLUMNS
    slice_c = (16 if order == 2 else 8) if wide else (32 if x == "float32" or order == 3 else 64)
    parts = order if wide else 1
    config = ProjectionBackwardConfig(
        columns=columns,
        n=n,
        channels=channels,
        layout="streams" if n == 1 else layout,
        slice_c=slice_c,
        tile_m=16 * parts if wide else 16 if combines and n == 4 else 32,
        chunk=CHUNK if parts < 3 else 480,
        group=1 if wide else GROUP,
        stages=0,
        parts=parts,
        sum_groups=slice_c // 32 if not wide else 1,
        x_terms=min(TERMS[x], order),
        phi_terms=min(TERMS[phi], order),
        order=order,
        tma=tma,
    )
    itemsize = 4 if x == "float32" else 2
    boxes = n * (1 + combines) + gathers
    numbers = 1 + combines * (n * n + 4) + gathers * n  # of a token, fp32: its factor of x, R, pre
    tile = config.tile_m * (slice_c * itemsize * boxes + 2 * (config.terms_columns + 8) + 4 * numbers)
    fixed = 2 * config.phi_rows * (n * slice_c + 8) + config.scratch + 4096
    return replace(config, stages=min(MAX_STAGES, (SHARED_MEMORY - fixed) // tile))
