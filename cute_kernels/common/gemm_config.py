"""Geometry of the kernels that multiply matrices, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_MEMORY = 226 * 1024  # of a CTA, less what the barriers take
BLOCK = 64  # of K: as much of a row as lies together in swizzled shared memory, and as a copy takes of it
STORE_STAGES = 2  # parts of a tile that are on their way out by TMA


@dataclass(frozen=True)
class GemmConfig:
    """Geometry of a kernel.

    Attributes:
        tile: (M, N, K) of a CTA. On SM90 each consumer warpgroup multiplies 64 rows of it, or with ping_pong all. Fewer
            rows than 64 give more SMs a tile; an instruction's others are whatever lies behind them.
        cluster: CTAs along M and N that share tiles of B and A by multicast.
        stages: tiles of A and B in flight.
        group: clusters along M that are walked before the next ones along N, so that their B tiles stay in L2.
        ping_pong: SM90: two consumer warpgroups take whole tiles in turn, so that one multiplies while the other
            stores its sums, or loads what the next ones start from.
        overlapping: SM90: a tile that would end beyond the matrix begins earlier, where it has that many rows or
            columns, and some of its neighbour's are computed and stored twice, with the same bits. TMA takes five times
            as long for a row beyond the end as for one that is read.
        transposed_store: SM90: results that leave transposed do so by TMA, too; it takes room beside the ring.
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    group: int
    ping_pong: bool = False
    overlapping: bool = False
    transposed_store: bool = False

    @property
    def turns(self) -> int:
        """Tiles of a CTA that are at work at once: consumer warpgroups take them in turn."""
        return 2 if self.ping_pong else 1

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the tiles in flight."""
        return self.stages * (self.tile[0] + self.tile[1]) * self.tile[2] * 2

    def multi_block_tma(self, arch: str, majors: tuple[str | None, str | None], k: int) -> bool:
        """Whether one copy loads several blocks of a tile of an operand along k: a row must not end within one."""
        return arch == "sm_90a" and "k" in majors and self.tile[2] > BLOCK and k % BLOCK == 0

    def stores_by_tma(self, arch: str, transposed: bool) -> bool:
        """Whether aligned results leave by TMA: where they lie as the tile does, and there is room for them.

        Of tiles of 64 rows on SM90 alone. H200, us, straight from registers: 256x1024x4096 12.9, by TMA 12.5;
        64x4096x4096 18.1, 17.5; 128x1024x4096 11.7, 11.4.
        """
        if transposed and not self.transposed_store or self.tile[0] < 64 or self.tile[1] % 16:
            return False
        parts = STORE_STAGES * self.tile[0] * 64
        return self.tile[0] == 128 or arch.startswith("sm_9") and self.ring_bytes + parts <= SHARED_MEMORY
