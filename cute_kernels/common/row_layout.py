"""How rows are dealt out to threads: the geometry shared by the row-wise kernels (no GPU code, no heavy import)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

WARP_SIZE = 32
SUM_COLUMNS = 32  # columns of one CTA of SumRows; the buffer of partial rows is padded to it
SUM_CTAS = 8  # an SM holds, of SumRows with 32 threads a column
FEW_BATCH = 16  # partial rows that one thread has in flight, where it adds all rows of its columns
H200_SMS = 132
RING_BYTES = 200 * 1024  # of the 227 KB of shared memory of an SM, leaving room for the messages of the row sums
MAX_CLUSTER = 16
BULK_ALIGNMENT = 16  # of bulk copies, of their addresses and sizes
STAGED_COLUMNS = 512  # of a row that moves element by element, from which on it is written through shared memory
MIN_WARPS = 7  # fewer do not hide the latency of a row's reduction
MIN_FILL = 0.9  # of a row's elements over those that its threads could hold
MANY_CTAS = 48  # an SM, from which on a kernel that only streams rows does not stay resident


class Access(NamedTuple):
    """How the elements of matrices of rows can move.

    Attributes:
        vec: consecutive elements that move together (1, 2, 4 or 8), of all matrices.
        aligned: all rows start and end on 16 bytes.
        packed: and lie back to back.
    """

    vec: int
    aligned: bool
    packed: bool


@dataclass(frozen=True)
class RowLayout:
    """Static geometry of a kernel in which *teams* of threads walk over the rows of a matrix.

    A team owns one tile of rows at a time and never waits for another team: it has its own ring of shared-memory
    stages and, when it is wider than a warp, its own named barrier. A row may be cut over the CTAs of a cluster.

    Thread ``t`` of a row holds the elements ``(chunk * threads_per_row + t) * vec + v`` of its CTA's columns.

    Attributes:
        n: columns of the matrix.
        vec: consecutive elements a thread moves at once (1, 2, 4 or 8); divides ``n`` and every row stride.
        threads_per_row: threads of one CTA that share a row; a power of two below a warp, else a multiple of a warp.
        rows_per_thread: rows a thread holds at once (1 unless rows are shorter than a warp's natural share).
        teams: teams per CTA.
        stages: tiles in flight per team.
        cluster: CTAs that share a row.
        aligned: every row of every streamed tensor starts and ends on 16 bytes.
        packed: rows of all streamed tensors follow each other without a gap, so a tile is one contiguous block.
        reload: read a row twice from shared memory rather than hold it in registers across its reduction.
        staged: rows are written through shared memory (RowStore).
    """

    n: int
    vec: int
    threads_per_row: int
    rows_per_thread: int
    teams: int
    stages: int
    cluster: int
    aligned: bool
    packed: bool
    reload: bool = False
    staged: bool = False

    @property
    def team_threads(self) -> int:
        return max(self.threads_per_row, WARP_SIZE)

    @property
    def warps_per_team(self) -> int:
        return self.team_threads // WARP_SIZE

    @property
    def threads(self) -> int:
        return self.teams * self.team_threads

    @property
    def rows_per_pass(self) -> int:
        """Rows that lie side by side in a team."""
        return self.team_threads // self.threads_per_row

    @property
    def tile_rows(self) -> int:
        return self.rows_per_pass * self.rows_per_thread

    @property
    def columns_per_cta(self) -> int:
        """Columns of a CTA but for the last one of a cluster, which has what is left."""
        return -(-self.n // (self.cluster * 8)) * 8 if self.cluster > 1 else self.n

    @property
    def chunks(self) -> int:
        return -(-self.columns_per_cta // (self.threads_per_row * self.vec))

    @property
    def whole_chunks(self) -> int:
        """Chunks in which no thread of any CTA has a column beyond the row's end."""
        last_columns = self.n - (self.cluster - 1) * self.columns_per_cta  # the fewest that a CTA has
        return min(self.chunks, last_columns // (self.threads_per_row * self.vec))

    @property
    def full(self) -> bool:
        """No thread ever has a column beyond the row's end."""
        return self.whole_chunks == self.chunks

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first, number) of the chunks that are handled at once: one; of rows off 16 bytes, whole ones of 8 elements.

        Each is traced by itself: chunk by chunk, rms_norm's backward of 769 columns takes 2.0 s to compile, so 1.3 s.
        """
        step = 1 if self.aligned else 8 // self.vec
        whole = [(k, min(step, self.whole_chunks - k)) for k in range(0, self.whole_chunks, step)]
        return whole + [(k, 1) for k in range(self.whole_chunks, self.chunks)]

    def pitch(self, itemsize: int) -> int:
        """Elements from one row of a shared-memory tile to the next."""
        if self.packed:
            return self.n
        row_bytes = -(-self.columns_per_cta * itemsize // 16) * 16
        return (row_bytes + (0 if self.aligned else 16)) // itemsize

    def slot_bytes(self, itemsizes: tuple[int, ...]) -> int:
        """Bytes of shared memory of one stage of one team."""
        return sum(self.tile_rows * self.pitch(size) * size for size in itemsizes)

    def staged_bytes(self, written: tuple[int, ...]) -> int:
        """Bytes of shared memory of one team through which rows are written; ``written``: sizes of their elements."""
        return self.slot_bytes(written) if self.staged else 0


@dataclass(frozen=True)
class RowConfig:
    """Geometry of a kernel, and how many of its CTAs an SM holds."""

    layout: RowLayout
    ctas_per_sm: int

    @property
    def rows_per_cluster(self) -> int:
        """Rows that a cluster holds at once."""
        return self.layout.teams * self.layout.tile_rows

    def max_clusters(self, num_sms: int) -> int:
        """Clusters that are resident at once; SMs of a GPC that do not make up a cluster of 4 or more stay empty.

        H200, one CTA an SM: 132 CTAs in clusters of 1 and 2, 30 clusters of 4, 15 of 8, 7 of 16; of 8 this gives 14.
        """
        clusters = num_sms * self.ctas_per_sm // self.layout.cluster
        return max(1, clusters if self.layout.cluster <= 2 else clusters * 10 // 11)

    def persistent_clusters(self, num_sms: int, many_ctas: float = MANY_CTAS) -> float:
        """Clusters of rows up to which a kernel launches at most ``max_clusters`` that walk over them.

        Many short rows are better left to the hardware's scheduler, which keeps the addresses in flight close together;
        resident teams drift apart. H200, bf16, us, resident and not: layer 262144x1024 288, 264; 131072x2048 276, 261;
        32768x1024 38.1, 37.6; 16384x1024 21.2, 21.6; rms 262144x1024 272, 260; 32768x1024 36.4, 37.1. Rows of several
        warps lose by it, as each CTA loads weight and bias: layer 5461x6144 40, 54. A ring of one stage has nothing in
        flight for the next tile.
        """
        if self.layout.threads_per_row > WARP_SIZE:
            return math.inf
        return 0 if self.layout.stages == 1 else many_ctas * num_sms


def adds_alone(columns: int, sums: int, most_rows: int) -> bool:
    """Whether a thread of SumRows adds all partial rows of its columns; ``most_rows``: how many there may be.

    With 32 threads a column the CTAs of many columns come in waves; alone, a thread makes a trip to L2 for every
    FEW_BATCH rows. A wave takes longer than a trip: at 5 rows of 262,144 columns a second output, 7.8 waves, costs
    13.4 us (H200, layer_norm's backward 32.1 us, rms_norm's 18.7).
    """
    waves = -(-(columns // SUM_COLUMNS * sums) // (SUM_CTAS * H200_SMS))
    return waves > -(-most_rows // FEW_BATCH)


def clusters_for(n: int, columns: int) -> int:
    """Smallest cluster (a power of two) whose CTAs have at most so many columns each, if there is one."""
    return min(MAX_CLUSTER, 1 << (-(-n // columns) - 1).bit_length())


def row_layout(n: int, vec: int, aligned: bool, packed: bool, cluster: int, warps: dict[int, int]) -> RowLayout:
    """Geometry of one stage; ``warps``: elements a thread may hold -> warps a CTA can have, the preferred first."""
    elements = max(warps)
    if n <= WARP_SIZE * elements:
        return _narrow(n, vec, aligned, packed, elements, warps[elements])
    return _wide(n, vec, aligned, cluster, warps)


def _narrow(n: int, vec: int, aligned: bool, packed: bool, elements: int, warps: int) -> RowLayout:
    """Rows of up to one warp: several rows a warp and several a thread, so that a thread has up to ``elements``."""
    vectors = -(-n // vec)
    threads = WARP_SIZE
    rows_per_thread = 1
    if aligned:
        threads = min(WARP_SIZE, 1 << (vectors - 1).bit_length())
        chunks = -(-vectors // threads)
        rows_per_thread = max(1, elements // (chunks * vec))
        if not packed:
            rows_per_thread = min(rows_per_thread, threads)  # a lane requests a row: a tile has 32 at most
    packed = packed and threads < WARP_SIZE or packed and rows_per_thread > 1
    return RowLayout(n, vec, threads, rows_per_thread, warps, 1, 1, aligned, packed)


def _wide(n: int, vec: int, aligned: bool, cluster: int, warps: dict[int, int]) -> RowLayout:
    """Rows of a warp and more: teams of whole warps, over the CTAs of a cluster."""
    while cluster <= MAX_CLUSTER:
        columns = n if cluster == 1 else -(-n // (cluster * 8)) * 8
        layouts = []
        for elements, max_warps in warps.items():
            threads = -(-columns // (elements * WARP_SIZE)) * WARP_SIZE
            teams = max_warps * WARP_SIZE // threads
            if teams:
                layouts.append(
                    (columns / (threads * elements), RowLayout(n, vec, threads, 1, teams, 1, cluster, aligned, False))
                )
        for fill, layout in layouts:
            if fill >= MIN_FILL and layout.threads >= min(MIN_WARPS, min(warps.values())) * WARP_SIZE:
                return layout
        if layouts:
            return max(layouts, key=lambda candidate: candidate[0] * candidate[1].threads)[1]
        cluster *= 2
    # Wider than registers can hold: read each row twice from shared memory, 16 warps of 32 elements
    return RowLayout(n, vec, 512, 1, 1, 1, MAX_CLUSTER, aligned, False, reload=True)


def with_stages(
    layout: RowLayout, itemsizes: tuple[int, ...], ring_bytes: int, max_stages: int, written: tuple[int, ...] = ()
) -> RowLayout:
    """As many stages as fit: at least two, with fewer teams if need be; one where a single row leaves no room.

    Rows that move element by element are staged where two stages fit beside what is ``written``: sizes of elements.
    """
    teams = layout.teams
    slot = layout.slot_bytes(itemsizes)
    least = slot * min(2, max_stages)
    by_element = layout.vec == 1 and layout.n >= STAGED_COLUMNS
    layout = replace(layout, staged=by_element and 0 < layout.slot_bytes(written) <= ring_bytes - least)
    staged = layout.staged_bytes(written)
    while teams > 1 and teams * (least + staged) > ring_bytes:
        teams -= 1
    stages = max(1, min(max_stages, (ring_bytes - teams * staged) // (teams * slot)))
    return replace(layout, teams=teams, stages=stages)


def inner_units(address, num_bytes):
    """Address and bytes of the 16-byte units within a row's bytes; none if not above 0. Of integers on both sides."""
    first = (address + (BULK_ALIGNMENT - 1)) & ~(BULK_ALIGNMENT - 1)
    return first, ((address + num_bytes) & ~(BULK_ALIGNMENT - 1)) - first


def edge_elements(address, num_columns, itemsize: int, lane) -> list:
    """(element, whether ``lane`` writes it) of a row before and behind its ``inner_units``."""
    first, num_bytes = inner_units(address, num_columns * itemsize)
    back = num_columns - 1 - lane
    behind = address + back * itemsize
    return [
        (lane, (lane < num_columns) & (address + lane * itemsize < first)),
        (back, (back >= 0) & (behind >= first) & (behind >= first + num_bytes)),
    ]
