"""The hyper-connections' kernels compile for both architectures without a GPU, and what came out.

No local memory, but for backwards of eight streams, whose sums are more than the registers hold; no float atomics;
products on tensor cores from operands that come by TMA.
"""

import itertools
import re

import pytest
import torch

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.mhc import prewarm
from cute_kernels.mhc.config import (
    PreSpec,
    ProjectionBackwardSpec,
    ProjectionSpec,
    pre_config,
    product_layout,
    projection_backward_config,
    projection_config,
    splits_of,
    stream_layout,
)
from cute_kernels.mhc.kernel.aggregate import AggregateBackward
from cute_kernels.mhc.kernel.expand_combine import ExpandCombineBackward
from cute_kernels.mhc.kernel.projection_cluster import ProjectionClusterForward, last_steps, row_of
from tests.marks import first_of, sample_for, sample_of_table
from tests.mhc.cases import BF16, FP16, FP32, LAYOUTS, STREAMS, Case
from tests.mhc.conftest import kernels_of
from tests.norm.test_compile import CTA_SHARED_MEMORY, check_record
from tests.ptx import compile_in, kernels_in

BUILDERS = {
    "aggregate_forward",
    "aggregate_backward",
    "expand_streams",
    "expand_combine_forward",
    "expand_combine_backward",
    "bias_gradient",
    "sinkhorn_forward",
    "sinkhorn_backward",
    "coefficients_forward",
    "coefficients_backward",
    "pre_forward",
    "projection_forward",
    "projection_forward_sm90",
    "projection_backward",
    "projection_backward_sm90",
    "phi_gradient",
}
BY_WARPGROUPS = {"projection_forward_sm90", "projection_backward_sm90"}
SPILLING_STREAMS = 8
SPILLED = 1024  # bytes a thread, at most, of the backwards of eight streams


def streams_of(builder, arguments) -> int:
    """n of a kernel's arguments; 0 where they do not tell."""
    spec = arguments[1]
    return spec.n if hasattr(spec, "n") else {3: 1, 8: 2, 24: 4, 80: 8}.get(spec.columns, 0)


def pre_spec(n: int, channels: int, columns: int, layout="streams", phi=FP32, precision="tf32") -> PreSpec:
    """H and mean square alone."""
    return PreSpec(n, channels, layout, columns, precision, phi, None, None, None, None, True, False)


def backward_spec(
    n: int, channels: int, columns: int, layout="streams", x=BF16, phi=FP32, precision="tf32", residual=True, layer=True
) -> ProjectionBackwardSpec:
    """The Spec of a projection's backward with all gradients."""
    options = "io" if residual else None, layer, True, False
    return ProjectionBackwardSpec(n, channels, layout, columns, precision, x, phi, None, True, True, *options)


def compile_and_check(jobs, arch: str) -> None:
    for builder, arguments in jobs:
        record = builder.obtain(*arguments).record
        assert record["key"]["arch"] == arch
        kernels = record["kernels"]
        spills = "backward" in builder.__name__ and builder.__name__ not in BY_WARPGROUPS
        if spills and streams_of(builder, arguments) == SPILLING_STREAMS:
            assert all(kernel["stack_bytes"] <= SPILLED for kernel in kernels), (builder.__name__, kernels)
            record = {"kernels": [{**kernel, "stack_bytes": 0} for kernel in kernels]}
        try:
            check_record(record)
        except AssertionError as error:
            raise AssertionError(f"{builder.__name__}{arguments}: {error}") from None


def jobs_of(arch: str, *calls) -> list:
    """The kernels of calls, each (op, case) or (op, case, precision)."""
    return kernels_of([(*call, *["tf32"] * (2 - len(call[1:])), True) for call in calls], arch)


PARTS = ("coefficients", "sinkhorn", "aggregate", "expand_combine", "expand")
# Each kernel with four streams in bf16; then what changes the most of each: dtypes, rows off 16 bytes, n
CALLS = {
    "parts": [(op, Case(4, 4096, norm_weight=True, bias=True, dropout_p=0.1)) for op in PARTS],
    "composites": [("hyper_connection", Case(4, 4096, norm_weight=True, bias=True)), ("head", Case(4, 4096))],
    "widest in clusters": [("pre", Case(4, 7168, layout=layout)) for layout in LAYOUTS],  # few registers left
    "many parts of K": [("projection", Case(4, 65536))],
    "fp32": [(op, Case(4, 1280, (5,), FP32, bias=True), "fp32") for op in ("projection", "hyper_connection")],
    "fp16": [
        ("hyper_connection", Case(4, 1280, (5,), FP16, BF16, "transformer_engine", bias=True, dropout_p=0.1)),
        ("hyper_connection", Case(4, 1280, (5,), FP16, FP32)),
    ],
    "off 16 bytes": [("hyper_connection", Case(4, 5129, (5,), BF16, FP32, "megatron", norm_weight=True, bias=True))],
    "one stream": [("hyper_connection", Case(1, 768, bias=True))],
    "two streams": [("hyper_connection", Case(2, 768, variant="transformer_engine", bias=True))],
    "eight streams": [("projection", Case(8, 512, norm_weight=True)), ("projection", Case(8, 4104, parameters=BF16))],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", CALLS)
def test_compiles(name, arch):
    compile_and_check(sample_for(arch, jobs_of(arch, *CALLS[name])), arch)


def eight_streams(arch: str) -> list:
    """One of each kernel, the products in "tf32"; of streams that one box holds the backward by warps."""
    calls = ("hyper_connection", Case(8, 16)), ("sinkhorn", Case(8, 768)), ("hyper_connection", Case(8, 768))
    return list({builder.__name__: (builder, arguments) for builder, arguments in jobs_of(arch, *calls)}.values())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_eight_streams_compile(arch):
    compile_and_check(eight_streams(arch), arch)


def test_every_builder_is_among_them():
    found = jobs_of("sm_90a", *[call for calls in CALLS.values() for call in calls])
    assert {builder.__name__ for builder, _ in found} == BUILDERS
    assert {streams_of(*job) for job in found} >= {1, 2, 4}
    assert BY_WARPGROUPS | {"projection_backward"} <= {builder.__name__ for builder, _ in eight_streams("sm_90a")}


def test_every_ring_has_two_slots():
    """The ring of the projection's backward has at least two slots: with one it would wait for itself."""
    dtypes = BF16, FP16, FP32
    rings = {
        projection_backward_config(
            backward_spec(n, channels, columns, layout, x, phi, precision, residual, layer)
        ).stages
        for n in STREAMS
        for channels in (8, 4096)
        for layout in LAYOUTS
        for columns in (n, n * n + 2 * n)
        for x, phi in itertools.product(dtypes, dtypes)
        for precision in ("tf32", "fp32")
        for residual, layer in itertools.product((False, True), repeat=2)
    }
    assert min(rings) == 2


def test_items_and_ctas_of_a_backward():
    """As many CTAs as there are SMs, in hardly more rounds than all SMs would need; whole slices where that costs
    little, groups of chunks where they are in no more rounds than chunks would be.
    """
    found = {}
    for tokens, channels in itertools.product((1, 512, 513, 2048, 4096, 8192, 65536), (8, 768, 4096, 5120, 7168)):
        config = projection_backward_config(backward_spec(4, channels, 24))
        for sms in (1, 78, 132, 148):
            chunks, ctas = config.schedule(tokens, sms)
            items = -(-tokens // (chunks * config.chunk)) * config.slices
            single = -(-tokens // config.chunk) * config.slices
            rounds = -(-single // sms)
            found[tokens, channels, sms] = chunks, ctas
            assert chunks in (1, config.group) and 1 <= ctas <= min(items, sms)
            assert 7 * chunks * -(-items // ctas) <= 8 * rounds
    shapes = (8192, 4096), (4096, 7168), (2048, 5120), (65536, 768)
    assert [found[(*shape, 132)] for shape in shapes] == [(4, 128), (4, 112), (1, 107), (4, 132)]


def test_warps_of_a_token():
    """As many rounds of vectors for each, two at least, together all of the token; more of them as measured."""
    found = {}
    for n, channels, layout in itertools.product(STREAMS, (8, 64, 768, 1280, 2560, 4096, 5120, 7168), LAYOUTS):
        streams = stream_layout(n, channels, layout, 2, channels)
        backwards = AggregateBackward(streams, 4), ExpandCombineBackward(product_layout(streams), "io", (4, 4))
        found[n, channels, layout] = tuple(backward.sums.warps for backward in backwards)
        for sums, vectors in ((backward.sums, backward.layout.vectors) for backward in backwards):
            rounds = -(-vectors // sums.round)
            assert rounds % sums.warps == 0 and (sums.warps == 1 or rounds >= 2 * sums.warps)
            assert sums.tokens == (4 if sums.warps == 1 else 1)
    widths = 2560, 4096, 5120, 7168
    assert [found[4, channels, "streams"] for channels in widths] == [(1, 5), (4, 4), (5, 5), (7, 4)]
    assert [found[4, channels, "channels"] for channels in widths] == [(5, 2), (8, 4), (5, 4), (7, 4)]
    assert max(max(warps) for (n, *_), warps in found.items() if n == 8) == 4


def test_clusters_hold_phi():
    """Within a CTA's registers and shared memory, three blocks in flight at least; all of K."""
    dtypes = BF16, FP32
    cases = itertools.product(STREAMS, (8, 64, 136, 768, 1280, 2560, 4096, 5120, 7168, 16384), LAYOUTS, dtypes)
    for n, channels, layout, phi in cases:
        for columns, precision in itertools.product((n, n * n + 2 * n), ("tf32", "fp32")):
            config = pre_config(pre_spec(n, channels, columns, layout, phi, precision))
            if config is None:
                continue
            for mixes, threads in ((False, 384), (True, 512)):
                products, mixing, helps = config.registers(mixes)
                assert 256 * products + 128 * (mixing + helps) <= 65536 // threads // 8 * 8 * threads
                assert config.product_registers < products <= 224 and helps >= 24 and (mixing >= 40) == mixes
            assert config.stages >= 3 and config.stages * 16 * 2 >= 8 * config.octets * (4 if phi is FP32 else 2)
            assert config.cluster * config.slice_c - channels >= 0 and config.boxes % 2 == 0
            # A slot is awaited before it is asked for again; a cluster with a block more has a piece more on its way
            assert 1 <= config.lead <= config.stages
            pieces = config.stages * config.boxes // config.piece
            assert 2 <= config.flight < pieces if config.cluster == 16 else config.flight == 0
            forward = ProjectionClusterForward(config, None)
            assert forward.pieces == (config.boxes // config.piece if config.cluster == 16 else 1)
            steps, boxes = forward.steps_by_piece(), config.boxes // forward.pieces
            assert list(itertools.chain(*steps)) == list(range(config.steps))
            assert all((2 * s + 1) // boxes <= piece for piece, some in enumerate(steps) for s in some)
    configs = [pre_config(pre_spec(4, c, 24)) for c in (768, 1280, 2560, 4096, 7168)]
    assert [config.cluster for config in configs] == [2, 4, 8, 16, 16]
    assert [(config.stages, config.lead, config.flight) for config in configs] == [
        (3, 3, 0),
        (4, 3, 0),
        (4, 4, 0),
        (5, 4, 8),
        (3, 3, 5),
    ]
    assert [config.num_clusters(10**6, 132) for config in configs] == [66, 30, 14, 7, 7]
    assert [config.num_clusters(33, 132) for config in configs] == [3] * 5
    assert pre_config(pre_spec(8, 4096, 80)) is None


def banks(bytes_of_lanes, width: int) -> set[int]:
    return {(start + byte) // 4 % 32 for start in bytes_of_lanes for byte in range(0, width, 4)}


def test_all_banks_serve_sums_and_phi():
    """A warp's stores of a column's sums, eight lanes that read a quad each, half a warp that reads pairs of phi."""
    assert sorted(row_of(lane) for lane in range(0, 32, 4)) == list(range(8))
    for n, columns in ((1, 3), (2, 8), (4, 24), (4, 4), (2, 2)):
        config = pre_config(pre_spec(n, 5120, columns))
        assert config.width % 4 == 0 and columns < config.width <= columns + 8
        stores = [4 * (config.width * (lane % 4 * 2) + row_of(lane)) for lane in range(32)]
        assert len(banks(stores, 4)) == 32
        assert len(banks([4 * config.width * token for token in range(8)], 16)) == 32
    for first in (0, 16):
        lanes = range(first, first + 16)
        assert len(banks([128 * row_of(lane) + ((lane % 4 * 8) ^ row_of(lane) * 16) for lane in lanes], 8)) == 32


@pytest.mark.parametrize("phi", [BF16, FP32])
def test_no_block_of_x_comes_where_phi_is_not_yet_taken(phi):
    """Slot after slot by what lies where: a box of phi is 128 bytes of each of its rows, a step two boxes of x wide."""
    covered = set()
    for n, channels, columns in itertools.product((1, 2, 4), (8, 768, 2560, 4096, 5120, 7168), (4, 24)):
        config = pre_config(pre_spec(n, channels, columns, phi=phi))
        slot_bytes, step_bytes = 16 * 128 * config.boxes, 8 * config.octets * 128 * (4 if phi is FP32 else 2)
        start = config.stages * slot_bytes - config.steps * step_bytes
        held = {}
        for step, byte in itertools.product(range(config.steps), range(0, step_bytes, 128)):
            held[(start + step * step_bytes + byte) // slot_bytes] = step
        assert last_steps(config, start, step_bytes) == {i: held[i] for i in sorted(held)}
        covered.add(len(held))
    assert len(covered) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", STREAMS)
def test_places_in_the_ring(n, layout):
    """A lane's elements are where the swizzle has them, in every slot, found from one place for all of their rows."""
    from cute_kernels.mhc.kernel.tile_ring import TileRing, swizzle_bits

    dtypes, precisions = (BF16, FP16, FP32), ("tf32", "fp32")
    for x, precision, more in itertools.product(dtypes, precisions, (False, True)):
        config = projection_backward_config(
            backward_spec(n, 256, n * n + 2 * n, layout, x, FP32, precision, more, more)
        )
        dtype = cutlass_dtype(x)
        ring, width, size = TileRing.__new__(TileRing), config.slice_c, dtype.width // 8
        ring.config, ring.dtype = config, dtype
        slots, groups, lanes = range(config.stages), range(config.groups), range(0, 32, 4)
        for slot, group, lane, octet, column in itertools.product(slots, groups, lanes, range(n), range(8)):
            box, inside = octet, group * 8 + column
            if config.layout == "channels":
                box, inside = divmod((group * n + octet) * 8 + column, width)
            place = slot * n * config.tile_m * width + ring.place(group, octet, column, lane)
            for row in range(lane // 4, config.tile_m, 8):
                byte = (((slot * n + box) * config.tile_m + row) * width + inside) * size
                byte ^= (byte >> 7 & (1 << swizzle_bits(config, dtype)) - 1) << 4
                assert (place + (row - lane // 4) * width) * size == byte


PARTS_OF_THE_TABLE = 4


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("part", range(PARTS_OF_THE_TABLE))
def test_the_shipped_table_compiles_without_spills(part, arch):
    compile_and_check(sample_of_table(arch, prewarm.specializations(arch))[part::PARTS_OF_THE_TABLE], arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_shipped_table_is_what_a_model_asks_for(arch):
    table = set(prewarm.specializations(arch))
    for channels in prewarm.CHANNELS:
        wanted = jobs_of(arch, ("hyper_connection", Case(4, channels)), ("pre", Case(4, channels)))
        assert set(wanted) <= table
    found = {job[1][1].has_pre for job in table if job[0].__name__ == "expand_combine_forward"}
    assert found == {False, True}  # of recompute


@pytest.mark.parametrize("align", [1, 8, 40, 128, 1280])
def test_parts_of_k(align):
    """All of K in a power of two of parts: none empty, none of more than 4096 columns, as few as that."""
    for k in range(align, 70000, 37 * align):
        config = projection_config(ProjectionSpec(24, k, BF16, FP32, None, "tf32", align % 8 == 0))
        parts = [len(range(s, config.tiles, config.splits)) for s in range(config.splits)]
        assert config.splits & (config.splits - 1) == 0 and config.splits < 2 * -(-k // 4096)
        assert 0 <= config.tiles * config.tile_k - k < config.tile_k
        assert min(parts) > 0 and max(parts) * config.tile_k <= 4096
    assert [splits_of(4 * c) for c in (768, 1280, 2560, 4096, 5120, 7168)] == [1, 2, 4, 4, 8, 8]


def test_shared_memory_fits_a_cta():
    """The widest configurations, which the table does not hold, fit the shared memory of a CTA."""
    calls = [("projection", Case(n, 4096, (5,), dtype), p) for n in (4,) for dtype in (FP32, BF16) for p in ("fp32",)]
    for builder, arguments in jobs_of("sm_90a", *calls):
        for kernel in builder.obtain(*arguments).record["kernels"]:
            assert kernel["static_smem_bytes"] + kernel.get("dynamic_smem_bytes", 0) <= CTA_SHARED_MEMORY, kernel


# Operands come by TMA, are multiplied by warp-level MMA from ldmatrix, and no sum is left to the order of atomics
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", first_of(["sm_90a", "sm_100a"]))
def test_instructions(arch, tmp_path):
    program = f"""
from tests.mhc.test_compile import jobs_of
from tests.mhc.cases import Case
calls = [("hyper_connection", Case(4, 1280, bias=True)), ("contract", Case(4, 1280)), ("sinkhorn", Case(4, 1280))]
for builder, arguments in {{job[0].__name__: job for job in jobs_of({arch!r}, *calls)}}.values():
    assert builder.obtain(*arguments).origin == "compiled"
"""
    compile_in(tmp_path, program)
    kernels = kernels_in(tmp_path)
    assert len(kernels) >= len(BUILDERS - BY_WARPGROUPS)
    products = [kernel for kernel in kernels if "mma.sync" in kernel]
    assert len(products) == 2  # pre_forward, projection_backward
    for kernel in products:
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in kernel
        assert "cp.async.bulk.tensor" in kernel and "ldmatrix.sync.aligned" in kernel
        assert not re.search(r"mma\S*\.(tf32|f16\.f16\.f16|e4m3|e5m2)", kernel)
    for kernel in kernels:
        assert not re.search(r"\b(atom|red)\.", kernel)
        assert "cp.reduce" not in kernel and ".local" not in kernel


BOUNDS = """
import torch
from cute_kernels.mhc.config import AggregateBackwardSpec, ExpandCombineBackwardSpec, ExpandCombineSpec, layout_of
from cute_kernels.mhc.kernel.aggregate import aggregate_backward
from cute_kernels.mhc.kernel.expand_combine import expand_combine_backward, expand_combine_forward

def obtain(builder, spec):  # of each kernel other channels: files are named by the first matrices alone
    builder.obtain("sm_90a", spec, layout_of(spec))

for n, channels, dropout, has_pre in (4, 256, 0, 0), (4, 320, 0, 1), (4, 384, 1, 0), (8, 448, 0, 0):
    streams = n, channels, "channels", torch.bfloat16, 8, None
    obtain(expand_combine_forward, ExpandCombineSpec(*streams, bool(dropout), bool(has_pre), "io", 4, 4, 4))
for n, channels, dropout, needs_dx in (4, 256, 0, 0), (4, 320, 0, 1), (4, 384, 1, 0), (2, 448, 0, 1):
    needs = bool(needs_dx), True, True
    streams = n, channels, "channels", torch.bfloat16, 8, None
    obtain(expand_combine_backward, ExpandCombineBackwardSpec(*streams, bool(dropout), *needs, "io", 2, 2))
obtain(aggregate_backward, AggregateBackwardSpec(4, 512, "channels", torch.bfloat16, 8, True, True, 4))
"""


@pytest.mark.exhaustive
def test_bounds_of_launches(tmp_path):
    """Where that is faster ptxas may use all registers; CTAs are small where a thread has many."""
    compile_in(tmp_path, BOUNDS)
    found = set()
    for kernel in kernels_in(tmp_path):
        bounds = dict(re.findall(r"\.(reqntid|minnctapersm) (\d+)", kernel))
        (name,) = [
            name for name in ("ExpandCombineForward", "ExpandCombineBackward", "AggregateBackward") if name in kernel
        ]
        width = int(re.search(r"o(\d+)i64", kernel)[1])
        found.add((name, width, int(bounds["reqntid"]), bounds.get("minnctapersm")))
    # Kernel, numbers of a row of its first matrix, threads, CTAs an SM at least
    assert found == {
        ("ExpandCombineForward", 256, 256, "1"),
        ("ExpandCombineForward", 320, 128, None),  # with the next layer's input
        ("ExpandCombineForward", 384, 256, None),  # with dropout
        ("ExpandCombineForward", 448, 128, None),  # of eight streams
        ("ExpandCombineBackward", 4 * 256, 128, "1"),
        ("ExpandCombineBackward", 4 * 320, 128, None),  # with dx
        ("ExpandCombineBackward", 4 * 384, 128, None),  # with dropout
        ("ExpandCombineBackward", 2 * 448, 128, "1"),
        ("AggregateBackward", 512, 128, "1"),
    }


HEAD = """
from cute_kernels.mhc.config import pre_config
from cute_kernels.mhc.kernel.projection_cluster import pre_forward
from tests.mhc.test_compile import pre_spec
spec = pre_spec(4, 256, 4)
pre_forward.obtain("sm_90a", spec, pre_config(spec))
"""


@pytest.mark.exhaustive
def test_both_adding_warps_end_a_turn(tmp_path):
    """With fewer than eight columns one of them sends nothing: the cluster's messages do not wait for it."""
    compile_in(tmp_path, HEAD)
    (kernel,) = kernels_in(tmp_path)
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", kernel))
    counts = [constants.get(name) for name in re.findall(r"mbarrier\.init\S*\s+\[\S+\], (\S+);", kernel)]
    stages = pre_config(pre_spec(4, 256, 4)).stages
    assert counts.count("2") == stages
    messages = set(re.findall(r"mbarrier\.arrive\.expect_tx\S* \S+, \[(\S+)\]", kernel))
    assert len(messages & set(re.findall(r"mbarrier\.arrive\.shared\S* \S+, \[(\S+)\]", kernel))) == 1


WITH_THE_REST = [("pre", "streams", "io"), ("pre", "channels", "io")]  # of what else reaches x
WITH_THE_REST += [("hyper_connection", layout, order) for layout in LAYOUTS for order in ("io", "oi")]


@pytest.mark.parametrize(
    "parameters, norm_weight, needs_dphi", first_of([(FP32, False, True), (BF16, True, True), (FP32, True, False)])
)
@pytest.mark.parametrize("op, layout, order", first_of(WITH_THE_REST))
def test_backward_by_warpgroups_compiles(op, layout, order, parameters, norm_weight, needs_dphi):
    case = Case(8, 512, parameters=parameters, layout=layout, res_orientation=order, norm_weight=norm_weight)
    (job,) = [job for job in jobs_of("sm_90a", (op, case)) if job[0].__name__ == "projection_backward_sm90"]
    builder, (arch, spec, config) = job
    assert spec.needs_dphi
    compile_and_check([(builder, (arch, spec._replace(needs_dphi=needs_dphi), config))], arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op, boxes", [("projection", 10), ("hyper_connection", 12)])  # dH's; and R's
def test_instructions_of_warpgroups(op, boxes, tmp_path):
    """With eight streams both operands come from shared memory; phi, dH and R come for two CTAs at once.

    For the projection alone a warpgroup computes 128 columns of dx, half of the slice; with the rest 128 are all of it.
    """
    program = f"""
from tests.mhc.test_compile import jobs_of
from tests.mhc.cases import Case
jobs = {{job[0].__name__: job for job in jobs_of("sm_90a", ({op!r}, Case(8, 512)))}}
for name in ("projection_forward_sm90", "projection_backward_sm90"):
    builder, arguments = jobs[name]
    assert builder.obtain(*arguments).origin == "compiled"
"""
    compile_in(tmp_path, program)
    kernels = kernels_in(tmp_path)
    assert len(kernels) == 2
    shapes = [set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)\.f32\.bf16\.bf16", k)) for k in kernels]
    assert sorted(shapes, key=len) == [{"m64n160k16"}, {"m64n128k16", "m64n80k16"}]
    (backward,) = [kernel for kernel in kernels if "m64n80k16" in kernel]
    copies = len(re.findall(r"cp\.async\.bulk\.tensor\S*multicast::cluster", backward))
    assert copies > 0 and copies % boxes == 0  # the compiler may write one several times
    for kernel in kernels:
        assert "multicast::cluster" in kernel and "cp.async.bulk.tensor.2d.shared::cluster.global" in kernel
        assert "mma.sync" not in kernel and ".local" not in kernel and not re.search(r"\b(atom|red)\.", kernel)


def test_these_tests_need_no_gpu():
    assert not torch.cuda.is_initialized()
