"""Static choices of the norm kernels: pure functions of width, dtypes and architecture, never of the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.common.row_layout import (
    MANY_CTAS,
    RING_BYTES,
    WARP_SIZE,
    Access,
    RowConfig,
    clusters_for,
    row_layout,
    with_stages,
)

if TYPE_CHECKING:
    import torch

MAX_STAGES = 4


class NormForwardSpec(NamedTuple):
    """The forward of rows of ``n`` columns. A dtype is None where there is no such tensor.

    Attributes:
        kind: "rms" or "layer".
        weight_offset: added to the weight in fp32.
        returns_h: whether x + residual is stored.
        num_statistics: what is stored of each row: nothing, rstd, or rstd and mean.
        columns_aligned: weight and bias begin on 16 bytes.
        access: of x and residual.
    """

    kind: str
    n: int
    x: torch.dtype
    residual: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    y: torch.dtype
    weight_offset: float
    returns_h: bool
    num_statistics: int
    columns_aligned: bool
    access: Access

    @property
    def streams(self) -> tuple[torch.dtype, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    @property
    def written(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the matrices that the kernel writes."""
        return (self.y, self.residual) if self.returns_h and self.residual is not None else (self.y,)


class NormBackwardSpec(NamedTuple):
    """The backward of rows of ``n`` columns. A dtype is None where there is no such tensor.

    Attributes:
        kind: "rms" or "layer".
        save: what the forward saved, "input" or "output".
        dh_out: of the gradient of the h that the forward returned.
        weight_offset: added to the weight in fp32.
        accumulate_w, accumulate_b: whether dw and db are added to.
        columns_aligned: weight and bias begin on 16 bytes.
        access: of saved, dy and dh_out.
    """

    kind: str
    save: str
    n: int
    saved: torch.dtype
    dy: torch.dtype
    dh_out: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    dx: torch.dtype | None
    dresidual: torch.dtype | None
    dw: torch.dtype | None
    db: torch.dtype | None
    weight_offset: float
    accumulate_w: bool
    accumulate_b: bool
    columns_aligned: bool
    access: Access

    @property
    def streams(self) -> tuple[torch.dtype, ...]:
        return (self.saved, self.dy) if self.dh_out is None else (self.saved, self.dy, self.dh_out)

    @property
    def written(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the matrices that the kernel writes."""
        return tuple(dtype for dtype in (self.dx, self.dresidual) if dtype is not None)

    @property
    def num_sums(self) -> int:
        """How many of dw and db there are."""
        return (self.dw is not None) + (self.db is not None)


@dataclass(frozen=True)
class NormConfig(RowConfig):
    """Also whether its CTAs keep weight and bias in shared memory, and whether a team sums its next row ahead."""

    shares_columns: bool = False
    ahead: bool = False


def many_ctas(kind: str, n: int) -> int:
    """From how many CTAs an SM on the forward does not stay resident (RowConfig.persistent_clusters)."""
    return MANY_CTAS // 2 if kind == "layer" and n <= 1024 else MANY_CTAS


def forward_config(arch: str, spec: NormForwardSpec) -> NormConfig:
    """Geometry of the forward kernel.

    A thread holds as much of a row as its registers allow without spills, since weight and bias are in shared memory:
    few warps then meet at a barrier, which several CTAs, or teams of one, hide from each other.
    H200, bf16, us, share of the same-bytes copy: layer 8192x4096 38.3, 0.958 (32 elements a thread with weight and
    bias in registers 40.0, 0.928); 16384x2048 38.0, 0.976 (39.6, 0.934); 2048x16384 39.7, 0.932 (42.1, 0.881);
    512x16384 14.3, 0.937 (16.4, 0.823); 2048x8192 22.2, 0.964 (22.8, 0.956); 32768x1024 38.4, 0.964 (39.0, 0.944).
    Others at the same widths: 16384 of 128 elements 39.5, of 32 41.4; 4096 of 32 38.9; 5120 of 64 39.6, of 48 39.0;
    rms 1000000x64 of 16 in 8 CTAs of 4 warps 66.4, 4 of 8 67.9; layer 1000000x64 of 16 in 12 of 4 67.9, of 32 in 3 of
    8 68.5; 32768x1024 with a residual, 8 warps 71.7, 4 69.8.
    Rows that move element by element have 32 elements a thread and as many warps an SM as do not spill, in up to 15
    teams: one reads or writes while another waits for its sums. Measured: bench/experiments/norm.md.
    """
    kind, n, (vec, aligned, _) = spec.kind, spec.n, spec.access
    itemsizes = tuple(dtype.itemsize for dtype in spec.streams)
    stages = 3
    most = 64 if aligned else 32  # elements a thread; one by one from shared memory, 64 would spill 48 bytes
    if n <= 512:
        # A CTA has one tile (persistent_clusters)
        few = len(itemsizes) == 1 and (kind == "rms" or n <= 64)
        warps, ctas_per_sm = ({16: 4}, 8 if kind == "rms" else 12) if few else ({32: 8}, 3)
        stages = 1 if aligned else 2
    elif n <= 1024:
        wide = itemsizes != (2,) or (vec == 1 and kind == "layer")  # in registers
        warps, ctas_per_sm = ({32: 4}, 6) if wide else ({32: 8}, 4)
    elif vec == 1:
        warps, ctas_per_sm = {32: 30 if kind == "rms" else 24}, 1
    elif n <= 4096:
        warps, ctas_per_sm = {most: 4}, 4
    elif n <= 5120:
        warps, ctas_per_sm = {48: 4}, 3
    elif n <= 12288 or 16384 < n <= 131072:
        warps, ctas_per_sm = {most: 8}, 2
    else:
        warps, ctas_per_sm = {most: 16}, 1
    cluster = 1 if n <= 16384 else clusters_for(n, 4096)
    if vec == 1 and n <= 16384:
        cluster = clusters_for(n, 8192)
    column_bytes = sum(dtype.itemsize for dtype in (spec.weight, spec.bias) if dtype is not None)
    return _config(spec, cluster, warps, ctas_per_sm, stages, column_bytes)


def backward_config(arch: str, spec: NormBackwardSpec) -> NormConfig:
    """Geometry of the backward kernel.

    Warps of a CTA by elements a thread: what the registers hold without spills. A column needs x, dy, weight and dw in
    fp32 (rms: 158 registers at 32 elements, 12 warps), with a mean also db (layer: 230 registers, 8 warps; 125 at 16
    elements, 16 warps), with a saved output the inverse of the weight (254, 8 warps).
    A CTA gets about 4096 columns: the partial gradients then have few rows, and several rows are in flight beside the
    one whose sums cross the cluster. Two CTAs of four warps: while one begins or ends, or waits for its cluster, the
    other has the memory.
    H200, bf16, us: layer 7168 columns 60.0, one CTA of 8 warps 64.9; 5120 61.5, 64.4; 2048 58.4, 16 warps of 16
    elements 59.3; but 4096 58.2, one of 8 warps 57.8; 8192 of 1024 columns a CTA 58.5, of 4096 59.2; 16384 of 2048
    58.9, 60.0. rms 12288 57.7, 59.4; 8192 57.5, one of 12 warps 59.0; 6144 57.2, 58.9; but 5120 58.4, 58.1; 1024 with
    11 warps 56.7, with 12 57.7; 16384 in clusters of 8 with 8 warps 57.8, with 12 58.6, of 4 58.9.
    """
    kind, save, n = spec.kind, spec.save, spec.n
    itemsizes = tuple(dtype.itemsize for dtype in spec.streams)
    warps, ctas_per_sm = {32: 8, 24: 8, 16: 12}, 1
    columns = 4096
    if save == "input" and (5120 < n <= 12288 if kind == "rms" else n <= 2048 or 4096 < n <= 16384):
        warps, ctas_per_sm = {32: 4, 24: 4, 16: 8}, 2
        columns = 1024 if n == 8192 else 2048 if 8192 < n <= 16384 else 4096
    elif save == "input" and kind == "layer":
        warps = {32: 8, 24: 8, 16: 16}
    elif save == "input" and n <= 8192:
        # With a third stream 32 elements need more than the 168 registers of 12 warps (8 bytes spilled at 6144)
        most = 11 if 512 < n <= 1024 else 12
        warps = {32: most, 24: 12, 16: 16} if len(itemsizes) == 2 else {24: 12, 16: 16, 32: 8}
    elif kind == "rms" and 8192 < n <= 16384:
        columns = 2048
    if spec.access.vec == 1 and save == "input" and len(itemsizes) == 2:
        # A row's phases take some 1.3 us whatever its width: more rows in flight. Beyond, few rows want one team
        if kind == "rms" and 8192 < n <= 65536:
            warps, ctas_per_sm, columns = {32: 12}, 1, 4096
        elif kind == "layer" and 8192 < n <= 16384:
            warps, ctas_per_sm, columns = {16: 16}, 1, 4096
    config = _config(spec, clusters_for(n, columns), warps, ctas_per_sm)
    if spec.access.vec == 1 and save == "input" and len(itemsizes) == 2 and n > 16384:
        return _read_twice(spec, config)
    return config


def _read_twice(spec: NormBackwardSpec, config: NormConfig) -> NormConfig:
    """Geometry of wide odd rows that a team reads again after their sums, where ``config`` has few rows at once.

    Between its two passes such a row takes no registers: they hold dw, db and weight of as many teams as have two
    stages each: one for the row whose messages are on their way, while the next row loads into the other. 16 warps
    have registers for 32 elements a thread, 12 for 38, 8 for 76 (with 72, at 147001 columns, a thread spills 8 to 32
    bytes). Most teams come first, then fewest warps: a row's waits grow with its warps. Where no two teams fit, 16
    warps share a row and sum the next one before they wait for the messages of this one; two teams and more take
    longer that way.
    H200, bf16, us, layer: 2671x50257 224, with 16 warps 235, 319 held by two teams; 4194x32003 210, 12 warps 218, 226;
    2192x61229 219, 3 teams 233, 259; 1748x76801 220, 432; 1342x100001 231, 12 warps 249, 414; 1118x120001 223, 285;
    885x151643 267, one that sums ahead 312. rms: 1748x76801 216, 326; 885x151643 220, 231; but three teams that hold
    their rows take as long: 2192x61229 216, 217.
    """
    layout, fewest = config.layout, 3 if spec.kind == "rms" else 4
    for teams, warps, most in ((4, 12, 34), (4, 16, 32), (3, 12, 38), (2, 8, 76)):
        elements = -(-layout.columns_per_cta // (warps // teams * WARP_SIZE))
        if layout.teams < min(teams, fewest) and elements <= most:
            found = _config(spec, layout.cluster, {elements: warps}, ctas_per_sm=1)
            if found.layout.teams == teams:
                return replace(found, layout=replace(found.layout, reload=True))
    if 131072 < layout.n <= 196608:  # more columns would spill
        return replace(config, layout=replace(layout, reload=True), ahead=layout.stages > 1)
    return config


def _config(
    spec: NormForwardSpec | NormBackwardSpec,
    cluster: int,
    warps: dict[int, int],
    ctas_per_sm: int,
    max_stages: int = MAX_STAGES,
    column_bytes: int = 0,
) -> NormConfig:
    """``warps``: as in ``row_layout``.

    ``column_bytes``: of what is kept in shared memory beside the ring, where a stage of the ring is left room.
    """
    layout = row_layout(spec.n, *spec.access, cluster, warps)
    itemsizes, written = (tuple(dtype.itemsize for dtype in of) for of in (spec.streams, spec.written))
    ring_bytes = RING_BYTES // ctas_per_sm
    columns = column_bytes * layout.chunks * layout.threads_per_row * layout.vec
    shares_columns = 0 < columns <= ring_bytes - layout.slot_bytes(itemsizes)
    layout = with_stages(layout, itemsizes, ring_bytes - columns * shares_columns, max_stages, written)
    return NormConfig(layout, ctas_per_sm, shares_columns)
