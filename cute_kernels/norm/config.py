"""Static choices of the norm kernels: pure functions of width, dtypes and architecture, never of the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels.common.row_layout import WARP_SIZE, RowLayout

SUM_COLUMNS = 32  # columns of one CTA of the kernel that adds the partial gradients; their buffer is padded to it
RING_BYTES = 200 * 1024  # of 227 KB of shared memory a CTA, leaving room for the messages of the row sums
MAX_CLUSTER = 16
MAX_STAGES = 4
MIN_WARPS = 7  # fewer do not hide the latency of a row's reduction


@dataclass(frozen=True)
class NormConfig:
    """Geometry of a kernel and how many of its CTAs an SM holds."""

    layout: RowLayout
    ctas_per_sm: int

    @property
    def rows_per_cluster(self) -> int:
        return self.layout.teams * self.layout.tile_rows

    def max_clusters(self, num_sms: int) -> int:
        """Clusters that are resident at once; SMs of a GPC that do not make up a cluster of 4 or more stay empty.

        H200, one CTA an SM: 132 CTAs in clusters of 1 and 2, 30 clusters of 4, 15 of 8, 7 of 16.
        """
        clusters = num_sms * self.ctas_per_sm // self.layout.cluster
        return max(1, clusters if self.layout.cluster <= 2 else clusters * 10 // 11)


def forward_config(
    arch: str, kind: str, n: int, itemsizes: tuple[int, ...], vec: int, aligned: bool, packed: bool
) -> NormConfig:
    """Geometry of the forward kernel; ``itemsizes`` are those of the streamed matrices (x and residual).

    Two CTAs of 8 warps an SM (up to 127 registers at 32 elements a thread), one of 16 where a row needs them: while one
    CTA waits for its row's sums the other computes. H200, bf16, us, rms_norm: 32768x1024 37.6 with two CTAs, 38.6 with
    one; 8192x4096 38.1, 39.0; 4096x8192 38.3, 39.9.
    """
    return _config(n, itemsizes, vec, aligned, packed, warps={32: 8}, wide={32: 16})


def backward_config(
    arch: str, kind: str, save: str, n: int, itemsizes: tuple[int, ...], vec: int, aligned: bool, packed: bool
) -> NormConfig:
    """Geometry of the backward kernel; ``itemsizes`` are those of saved, dy and the gradient of the returned h.

    Warps of a CTA by elements a thread: what the registers hold without spills. One column needs in fp32 x, dy, weight
    and dw (rms: 158 registers at 32 elements, 12 warps), with a mean also db (layer: 239 registers, 8 warps), and with
    a saved output the inverse of the weight (238, 255).
    H200, bf16, main kernel alone, us: 32768x1024 rms 56.6 with 12 warps, 57.7 with 8; layer 58.0 with 8 of 32 elements
    and with 16 of 16; 8192x4096 rms 56.2, layer 57.0; 4096x8192 56.7, 57.7; 2048x16384 57.9, 59.1 (cluster of 2).
    """
    heavy = kind == "layer" or save == "output"
    warps = {32: 8, 24: 8, 16: 12} if heavy else {32: 12, 24: 12, 16: 16}
    return _config(n, itemsizes, vec, aligned, packed, warps)


def _config(
    n: int,
    itemsizes: tuple[int, ...],
    vec: int,
    aligned: bool,
    packed: bool,
    warps: dict[int, int],
    wide: dict[int, int] | None = None,
) -> NormConfig:
    """``warps``: elements a thread may hold -> warps a CTA can then have, in order of preference.

    With ``wide``, an SM holds two CTAs of ``warps``, or one of ``wide`` for rows that need it.
    """
    ctas_per_sm = 1
    if wide is not None:
        if all(n > elements * count * WARP_SIZE for elements, count in warps.items()):
            warps = wide
        else:
            ctas_per_sm = 2
    if n <= WARP_SIZE * max(warps):
        layout = _narrow(n, vec, aligned, packed, warps[max(warps)])
    else:
        layout = _wide(n, vec, aligned, warps)
    return NormConfig(_with_stages(layout, itemsizes, RING_BYTES // ctas_per_sm), ctas_per_sm)


def _narrow(n: int, vec: int, aligned: bool, packed: bool, warps: int) -> RowLayout:
    """Rows of up to one warp: several rows a warp and several a thread, so that a thread has up to 32 elements."""
    vectors = -(-n // vec)
    threads = WARP_SIZE
    rows_per_thread = 1
    if aligned:
        threads = min(WARP_SIZE, 1 << (vectors - 1).bit_length())
        chunks = -(-vectors // threads)
        rows_per_thread = max(1, 32 // (chunks * vec))
    packed = packed and threads < WARP_SIZE or packed and rows_per_thread > 1
    return RowLayout(n, vec, threads, rows_per_thread, warps, 1, 1, aligned, packed)


def _wide(n: int, vec: int, aligned: bool, warps: dict[int, int]) -> RowLayout:
    """Rows of a warp and more: teams of whole warps, over the CTAs of a cluster if one CTA cannot hold the columns."""
    cluster = 1
    while cluster <= MAX_CLUSTER:
        columns = n if cluster == 1 else -(-n // (cluster * 8)) * 8
        layouts = []
        for elements, max_warps in warps.items():
            threads = -(-columns // (elements * WARP_SIZE)) * WARP_SIZE
            teams = max_warps * WARP_SIZE // threads
            if teams:
                layouts.append(RowLayout(n, vec, threads, 1, teams, 1, cluster, aligned, False))
        for layout in layouts:
            if layout.threads >= MIN_WARPS * WARP_SIZE:
                return layout
        if layouts:
            return max(layouts, key=lambda layout: layout.threads)
        cluster *= 2
    # Wider than registers can hold: read each row twice from shared memory, 16 warps of 32 elements
    return RowLayout(n, vec, 512, 1, 1, 1, MAX_CLUSTER, aligned, False, reload=True)


def _with_stages(layout: RowLayout, itemsizes: tuple[int, ...], ring_bytes: int) -> RowLayout:
    """As many stages as fit, two at least: fewer teams if need be."""
    teams = layout.teams
    slot = layout.slot_bytes(itemsizes)
    while teams > 1 and teams * slot * 2 > ring_bytes:
        teams -= 1
    stages = max(1, min(MAX_STAGES, ring_bytes // (teams * slot)))
    return replace(layout, teams=teams, stages=stages)
