"""Geometry of the norm kernels for every width: it fits the hardware and covers each column once."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_kernels.common.row_layout import H200_SMS, RING_BYTES, WARP_SIZE, Access, adds_alone
from cute_kernels.norm import prewarm
from cute_kernels.norm.checks import MAX_COLUMNS
from cute_kernels.norm.config import (
    NormBackwardSpec,
    NormConfig,
    NormForwardSpec,
    backward_config,
    forward_config,
    many_ctas,
)
from tests.norm.cases import BF16, FP32

SM_SHARED_MEMORY = 228 * 1024
RESERVED_SHARED_MEMORY = 1024  # of each CTA, by the system
CTA_SHARED_MEMORY = 227 * 1024
SM_THREADS, CTA_THREADS = 2048, 1024
NAMED_BARRIERS = 15  # and barrier 0
MAX_CLUSTER = 16
ARCHS = st.sampled_from(["sm_90a", "sm_100a"])
KINDS = st.sampled_from(["rms", "layer"])
DTYPES = st.sampled_from([BF16, FP32])
OPTIONAL = st.sampled_from([None, BF16, FP32])


WIDTHS = st.integers(1, MAX_COLUMNS) | st.builds(
    lambda power, off: min(MAX_COLUMNS, max(1, 2**power + off)), st.integers(0, 18), st.integers(-3, 3)
)


def access(n: int, itemsizes: tuple[int, ...], unaligned: int, packed: bool) -> Access:
    """For matrices whose addresses and strides are multiples of ``unaligned`` elements (0: any)."""
    vec = 16 // max(itemsizes)
    while n % vec or (unaligned and unaligned % vec):
        vec //= 2
    aligned = not unaligned and all(n * size % 16 == 0 for size in itemsizes)
    return Access(vec, aligned, aligned and packed)


def smem_bytes(
    config: NormConfig, itemsizes: tuple[int, ...], column_bytes: int, values: int, sums: int, written: tuple[int, ...]
) -> int:
    """Shared memory of a CTA: ring and its barriers, weight and bias, messages of the row sums and theirs, the rows
    that are written through it; slack for alignment.

    At the end its place holds ``sums`` fp32 values a column (dw, db) of each team, which may be more than the ring.
    """
    layout = config.layout
    columns = layout.chunks * layout.threads_per_row * layout.vec
    ring = max(layout.stages * layout.slot_bytes(itemsizes), 4 * sums * columns) * layout.teams
    ring += layout.teams * layout.stages * 8
    warps = layout.warps_per_team * layout.cluster
    messages = 4 * values * warps * layout.teams * 2 if warps > 1 else 0
    ring += column_bytes * columns * config.shares_columns
    ring += layout.teams * layout.staged_bytes(written)
    return ring + messages + 16 * layout.teams + 128 * (len(itemsizes) + len(written) + 3)


def sizes_of(dtypes) -> tuple[int, ...]:
    return tuple(dtype.itemsize for dtype in dtypes)


def layout_bytes(config: NormConfig, itemsizes: tuple[int, ...], column_bytes: int) -> int:
    """Shared memory of an SM's CTAs, each with a tile, weight and bias."""
    layout = config.layout
    columns = column_bytes * layout.chunks * layout.threads_per_row * layout.vec
    return config.ctas_per_sm * (layout.slot_bytes(itemsizes) + columns)


def columns_of_threads(layout) -> list[int]:
    """Columns of all threads' vectors in the order of the kernels; checked to be in the row."""
    found = []
    for cta in range(layout.cluster):
        begin = cta * layout.columns_per_cta
        end = min(begin + layout.columns_per_cta, layout.n)
        for chunk in range(layout.chunks):
            for thread in range(layout.threads_per_row):
                column = begin + (chunk * layout.threads_per_row + thread) * layout.vec
                if column < end:
                    assert column + layout.vec <= end
                    found.append(column)
    return found


def check_config(
    config: NormConfig,
    n: int,
    itemsizes: tuple[int, ...],
    column_bytes: int,
    vec: int,
    values: int,
    sums: int,
    written: tuple[int, ...],
) -> None:
    layout = config.layout
    assert layout.n == n and layout.vec == vec and n % vec == 0
    assert 1 <= layout.threads <= CTA_THREADS and layout.threads % WARP_SIZE == 0
    assert config.ctas_per_sm * layout.threads <= SM_THREADS
    if layout.threads_per_row < WARP_SIZE:
        assert WARP_SIZE % layout.threads_per_row == 0
    else:
        assert layout.threads_per_row % WARP_SIZE == 0
    assert layout.rows_per_thread == 1 or layout.threads_per_row <= WARP_SIZE
    assert layout.cluster in (1, 2, 4, 8, 16) and layout.cluster <= MAX_CLUSTER
    assert layout.stages >= 1 and layout.teams >= 1
    if layout.team_threads > WARP_SIZE:
        assert layout.teams <= NAMED_BARRIERS
    assert layout.packed or layout.tile_rows <= WARP_SIZE  # a lane requests a row of a tile, or one all of it
    if not layout.aligned:
        assert layout.tile_rows == 1
    assert not layout.staged or vec == 1 and not layout.aligned
    used = smem_bytes(config, itemsizes, column_bytes, values, sums, written)
    assert used <= CTA_SHARED_MEMORY
    assert config.ctas_per_sm * (used + RESERVED_SHARED_MEMORY) <= SM_SHARED_MEMORY
    # The last CTA of a cluster has columns, and each CTA's part of an aligned row begins on 16 bytes
    assert (layout.cluster - 1) * layout.columns_per_cta < n
    if layout.cluster > 1 and layout.aligned:
        assert all(layout.columns_per_cta * size % 16 == 0 for size in itemsizes)
    assert columns_of_threads(layout) == list(range(0, n, vec))
    # Pieces are the chunks in order; what is handled without asking whether it is in the row is
    assert [first + i for first, number in layout.pieces for i in range(number)] == list(range(layout.chunks))
    assert all(number == 1 or first + number <= layout.whole_chunks for first, number in layout.pieces)
    last_columns = n - (layout.cluster - 1) * layout.columns_per_cta
    assert layout.whole_chunks * layout.threads_per_row * vec <= min(last_columns, layout.columns_per_cta)
    assert layout.full == (n == layout.cluster * layout.chunks * layout.threads_per_row * vec)
    assert config.rows_per_cluster == layout.teams * layout.tile_rows
    for num_sms in (1, 66, 132, 148):
        clusters = config.max_clusters(num_sms)
        assert clusters >= 1 and (clusters - 1) * layout.cluster < num_sms * config.ctas_per_sm
        one_tile = layout.stages == 1 and layout.threads_per_row <= WARP_SIZE
        for kind in ("rms", "layer"):
            persistent = config.persistent_clusters(num_sms, many_ctas(kind, n))
            assert persistent == 0 if one_tile else persistent > clusters
    # Each row of a tile has one lane that writes its mean and rstd, 32 rows at a time
    passes = min(layout.rows_per_thread, layout.threads_per_row)
    assert layout.rows_per_thread % passes == 0 and passes * layout.rows_per_pass <= layout.team_threads


OPTIONS = {
    "n": WIDTHS,
    "arch": ARCHS,
    "kind": KINDS,
    "unaligned": st.sampled_from([0, 0, 1, 2, 4]),
    "packed": st.booleans(),
}


def forward_spec(n: int, access: Access, kind="rms", x=BF16, residual=None, weight=BF16, bias=None) -> NormForwardSpec:
    return NormForwardSpec(kind, n, x, residual, weight, bias, x, 0.0, residual is not None, 1, True, access)


def backward_spec(n: int, access: Access, kind="rms", save="input", saved=BF16, dy=BF16, dh=None) -> NormBackwardSpec:
    gradients = saved, None, BF16, BF16
    return NormBackwardSpec(kind, save, n, saved, dy, dh, BF16, None, *gradients, 0.0, False, False, True, access)


@settings(max_examples=400, deadline=None)
@given(x=DTYPES, residual=OPTIONAL, weight=OPTIONAL, bias=OPTIONAL, **OPTIONS)
@example(
    x=FP32,
    residual=FP32,
    weight=FP32,
    bias=FP32,
    n=MAX_COLUMNS,
    arch="sm_90a",
    kind="layer",
    unaligned=0,
    packed=True,
)
@example(
    x=FP32,
    residual=FP32,
    weight=FP32,
    bias=FP32,
    n=MAX_COLUMNS - 1,
    arch="sm_90a",
    kind="layer",
    unaligned=1,
    packed=False,
)
def test_forward(x, residual, weight, bias, n, arch, kind, unaligned, packed):
    itemsizes = tuple(t.itemsize for t in (x, residual) if t is not None)
    column_bytes = sum(t.itemsize for t in (weight, bias) if t is not None)
    spec = forward_spec(n, access(n, itemsizes, unaligned, packed), kind, x, residual, weight, bias)
    config = forward_config(arch, spec)
    check_config(config, n, itemsizes, column_bytes, spec.access.vec, 2, 0, sizes_of(spec.written))
    assert config.shares_columns or not column_bytes or layout_bytes(config, itemsizes, column_bytes) > RING_BYTES


@settings(max_examples=400, deadline=None)
@given(saved=DTYPES, dy=DTYPES, dh=OPTIONAL, save=st.sampled_from(["input", "output"]), **OPTIONS)
@example(
    saved=FP32, dy=FP32, dh=FP32, save="input", n=MAX_COLUMNS, arch="sm_90a", kind="layer", unaligned=0, packed=True
)
@example(
    saved=FP32, dy=FP32, dh=FP32, save="input", n=MAX_COLUMNS - 1, arch="sm_90a", kind="layer", unaligned=1, packed=True
)
def test_backward(saved, dy, dh, save, n, arch, kind, unaligned, packed):
    dh = dh if save == "input" else None
    itemsizes = tuple(t.itemsize for t in (saved, dy, dh) if t is not None)
    spec = backward_spec(n, access(n, itemsizes, unaligned, packed), kind, save, saved, dy, dh)
    config = backward_config(arch, spec)
    check_config(config, n, itemsizes, 0, spec.access.vec, 2 if kind == "layer" else 1, 2, sizes_of(spec.written))
    assert not config.shares_columns
    # Resident however many rows there are: each cluster has a row of partial sums
    assert config.persistent_clusters(132, math.inf) == math.inf


@pytest.mark.parametrize(
    "kind, n, dtype, rows, mode",
    [
        ("layer", 16385, BF16, 4, "again"),
        ("layer", 20481, BF16, 4, "again"),
        ("layer", 32003, BF16, 4, "again"),
        ("layer", 40959, BF16, 4, "again"),
        ("layer", 50257, BF16, 4, "again"),
        ("layer", 65535, BF16, 4, "again"),
        ("layer", 65537, BF16, 3, "again"),
        ("layer", 100001, BF16, 2, "again"),
        ("layer", 155647, BF16, 2, "again"),
        ("layer", 155651, BF16, 1, "ahead"),
        ("layer", 50257, FP32, 3, "again"),
        ("layer", 65537, FP32, 2, "again"),
        ("rms", 65535, BF16, 3, "held"),
        ("rms", 65537, BF16, 3, "again"),
        ("rms", 100001, BF16, 2, "again"),
        ("rms", 155647, BF16, 2, "again"),
        ("rms", 155651, BF16, 1, "ahead"),
    ],
)
def test_several_wide_odd_rows_are_in_flight(kind, n, dtype, rows, mode):
    """Held in registers, or read again: then each has a stage for the next row, which one row alone sums ahead."""
    config = backward_config("sm_90a", backward_spec(n, Access(1, False, False), kind, saved=dtype, dy=dtype))
    layout = config.layout
    assert (layout.teams, layout.reload, config.ahead) == (rows, mode != "held", mode == "ahead")
    assert layout.stages >= 2 and layout.staged and config.ctas_per_sm == 1


@pytest.mark.parametrize("kind, sums, first", [("rms", 1, 33_800), ("layer", 2, 16_904)])
def test_a_thread_adds_all_partial_rows_where_they_are_few_and_wide(kind, sums, first):
    """From the width on whose sums of partial rows took more than one wave of CTAs; the order stays that of 32 rows."""
    for n in (1024, 4096, 8192, 16384, first - 8, first, 65536, 151_936, MAX_COLUMNS):
        config = backward_config("sm_90a", backward_spec(n, Access(8, True, True), kind))
        most_rows = config.max_clusters(H200_SMS)
        assert adds_alone(-(-n // 32) * 32, sums, most_rows) == (n >= first)
        assert n < first or most_rows <= 16 and config.max_clusters(148) <= 32


@pytest.mark.parametrize("spec", [NormForwardSpec, NormBackwardSpec])
def test_the_number_of_rows_is_not_asked_for(spec):
    """The same row must be computed in the same way in every batch."""
    assert not [name for name in spec._fields if "row" in name or "batch" in name]


@pytest.mark.parametrize("config, spec", [(forward_config, forward_spec), (backward_config, backward_spec)])
def test_configs_are_values(config, spec):
    """Equal for equal Specs, so that they are equal keys."""
    one, two = (config("sm_90a", spec(4096, Access(8, True, True))) for _ in range(2))
    assert one == two and hash(one) == hash(two)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_shipped_table_names_each_kernel_once(arch):
    table = list(prewarm.specializations(arch))
    assert len({(builder.kernel, arguments) for builder, arguments in table}) == len(table)
    assert all(arguments[0] == arch for _, arguments in table)
    assert {builder.__name__ for builder, _ in table} == {"norm_forward", "norm_backward"}
    for builder, arguments in table:
        builder.key(*arguments)  # raises for what cannot be a key
