"""How rows are dealt out to threads: the geometry shared by the row-wise kernels (no GPU code, no heavy import)."""

from __future__ import annotations

from dataclasses import dataclass

WARP_SIZE = 32
SUM_COLUMNS = 32  # columns of one CTA of SumRows; the buffer of partial rows is padded to it


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
