"""The products' kernels compile without a GPU, and what came out: no spills, no atomics, no product on its own."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch

from cute_kernels import linear, mm
from cute_kernels.gemm import config as config_module
from cute_kernels.gemm import prewarm
from cute_kernels.gemm.config import (
    BLOCK,
    EPILOGUE_K,
    FEW_WEIGHTS,
    FEW_WEIGHTS_DEEP,
    MANY_WEIGHTS,
    PING_PONG,
    PREFILL,
    SOME_WEIGHTS,
    GemmConfig,
    GemmSpec,
    candidates,
    choose,
    gemm_arguments,
    in_whole_blocks,
    more_tokens,
)
from cute_kernels.gemm.config_tokens import SOME_TOKENS
from cute_kernels.gemm.launch import gemm
from tests.fakes import fake_kernels
from tests.gemm.cases import (
    BF16,
    FP16,
    FP32,
    Case,
    kernel_name,
    kernels,
    kernels_of,
    make_inputs,
    only_kernel,
    run,
)
from tests.marks import first_of, sample_of_table
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in
from tests.sass import is_serialized

SM100 = pytest.param("sm_100a", marks=[pytest.mark.slow, pytest.mark.exhaustive])


def arguments(arch: str, kernel: tuple, **changes) -> tuple:
    """The builder's arguments: bf16, both operands along k, stores by TMA where the dispatcher uses them."""
    return gemm_arguments(arch, GemmSpec(BF16, BF16)._replace(**changes), BLOCK, *kernel)


def products(arch: str) -> list[tuple]:
    """The precompiled kernels of the builder ``gemm``."""
    return [job for job in prewarm.specializations(arch) if isinstance(job[1][1], GemmSpec)]


def compile_and_check(arch: str, kernel: tuple, **changes) -> None:
    from cute_kernels.gemm.kernel import gemm

    found = gemm.obtain(*arguments(arch, kernel, **changes))
    assert found.record["key"]["arch"] == arch and len(found.record["kernels"]) == 1
    check_record(found.record)
    assert not arch.startswith("sm_9") or kernel[0] is None or not is_serialized(found)


def sampled(arch: str) -> list[tuple]:
    """The kernel for any stride, and of the others, which differ by tile, cluster and stages, half or a fourth."""
    strided, *others = kernels(arch)
    return [strided, *sample_of_table(arch, others)]


@pytest.mark.parametrize(
    "arch, kernel",
    [("sm_103a", kernels("sm_103a")[1])]
    + [param for arch in ("sm_90a", "sm_100a") for param in first_of([(arch, kernel) for kernel in sampled(arch)], 2)],
    ids=lambda value: value if isinstance(value, str) else kernel_name(value),
)
def test_every_kernel_compiles(arch, kernel):
    """What the dispatcher can choose, forward; those of sums as one over tokens into main_grad, counted."""
    compile_and_check(arch, kernel)
    if kernel not in kernels(arch, ("accumulate",)):
        return
    wgrad = {"a_major": "m", "b_major": "n"}
    sums = {"out": FP32, "accumulate": True, "has_valid_k": True}
    compile_and_check(arch, kernel, **sums, **wgrad)
    if kernel[0] is not None and kernel[0].multi_block_tma(arch, ("k", "k"), BLOCK):
        compile_and_check(arch, kernel, **sums)  # of tokens that are next to each other


# Each option with the widest tile, and the widest that a warpgroup has to itself, where registers are scarcest, the
# narrowest, and the kernel for any stride
OPTIONS = {
    "b along n": {"b_major": "n"},
    "a along m": {"a_major": "m"},
    "gelu, z and bias": {"activation": "gelu", "save_preact": True, "bias": FP32},
    "silu, fp32": {"activation": "silu", "save_preact": True, "out": FP32, "bias": BF16},
    "relu, fp16": {"activation": "relu", "dtype": FP16, "out": FP16, "bias": FP16},
    "bias": {"bias": FP32},
    "rows off 16 bytes": {"out_aligned": False},
    "rows off 16 bytes, bias": {"out_aligned": False, "bias": BF16},
    "rows off 16 bytes, gelu, z and bias": {
        "out_aligned": False,
        "activation": "gelu",
        "save_preact": True,
        "bias": FP32,
        "out": FP32,
    },
    "rows off 16 bytes, accumulated": {"out_aligned": False, "accumulate": True, "out": FP32},
}


@pytest.mark.parametrize("arch", ["sm_90a", SM100])
@pytest.mark.parametrize("option", first_of(sorted(OPTIONS, key=lambda name: name != "gelu, z and bias")))
def test_options_compile(option, arch):
    changes = OPTIONS[option]
    kind = "activate" if "activation" in changes else "accumulate" if "accumulate" in changes else None
    all_kernels = kernels(arch, (kind,)) if kind else kernels(arch)
    aligned = sorted((k for k in all_kernels if k[0] is not None), key=lambda k: (k[0].tile[0] * k[0].tile[1], k[1]))
    turns = [k for k in aligned if k[0].ping_pong][-1:]
    for kernel in (aligned[-1], *turns, aligned[0], (None, False)):
        compile_and_check(arch, kernel, **changes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("activation", "save_preact"), first_of([("silu", True), ("silu", False), ("gelu", True)]))
def test_activations_without_a_bias(activation, save_preact):
    """ptxas computes the next part's ahead of the store of this one: up to 80 bytes of spills, on SM90 alone."""
    from cute_kernels.gemm.kernel import gemm

    for config in (*PING_PONG, PREFILL[0]):
        changes = {"activation": activation, "save_preact": save_preact, "out": BF16}
        record = gemm.obtain(*arguments("sm_90a", (config, False), **changes)).record
        (found,) = record["kernels"]
        assert found["stack_bytes"] <= 80
        check_record({"kernels": [found | {"stack_bytes": 0}]})


@pytest.mark.parametrize("tile", [(256, 128, 64), (128, 72, 64)], ids=str)
def test_tiles_that_cannot_be(tile):
    from cute_kernels.common.gemm_sm90 import GemmSm90

    with pytest.raises(ValueError, match=r"^config\.tile must have "):
        GemmSm90(None, "k", "k", False, False, True, GemmConfig(tile, (1, 1), 4, 8))


def test_tiles_that_overlap_are_not_added_to():
    from cute_kernels.common.gemm_sm90 import GemmSm90

    overlapping = dataclasses.replace(PREFILL[0], overlapping=True)
    with pytest.raises(ValueError, match="^config's tiles must not overlap where"):
        GemmSm90(None, "k", "k", False, True, True, overlapping)


def test_a_ring_of_one_slot():
    """One warpgroup frees a slot when the next tile's products have begun: it would wait for itself."""
    from cute_kernels.common.gemm_sm90 import GemmSm90

    with pytest.raises(ValueError, match=r"^config\.stages must be more than 1, got 1"):
        GemmSm90(None, "k", "k", False, False, False, GemmConfig((64, 64, 64), (1, 1), 1, 1))


def test_a_call_asks_for_what_is_tested():
    """The arguments above are those of calls: forward of a layer, whatever kernel it is given."""
    jobs = kernels_of([Case(4096, 4096, 64), Case(1, 4096, 64)], "sm_90a")
    forward = [call for _, call in jobs if call[1].majors == ("k", "k")]
    wanted = {arguments("sm_90a", kernel) for kernel in kernels("sm_90a")}
    assert forward and set(forward) <= wanted


def test_what_is_done_with_the_sums_decides():
    """A layer of 4096 features and tokens: y together; in turn where it is activated, or main_grad added to."""
    x, weight = (torch.zeros(4096, 4096, dtype=BF16) for _ in range(2))
    weight.requires_grad_().main_grad = torch.zeros(4096, 4096)
    with fake_kernels("sm_90a", computes=False) as jobs:
        linear(x, weight).backward(x)
        linear(x, weight.detach(), activation="gelu")
    together, added, activated = ((spec, config) for _, (_, spec, config, *_) in jobs)
    assert not together[1].ping_pong
    assert added[0].accumulate and added[1].ping_pong
    assert activated[0].activation == "gelu" and activated[1].ping_pong


def test_no_number_of_tokens_needs_the_kernel_for_any_stride():
    """Forward, dx, dweight and dbias, where rows of the features start on 16 bytes."""
    jobs = kernels_of([Case(65, 96, 64, bias=FP32)], "sm_90a")
    assert len(jobs) == 4 and all(arguments[2] is not None for _, arguments in jobs)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_is_precompiled_is_what_calls_ask_for(arch):
    """Forward and backward of a layer, and its gradient into main_grad, by each kernel; dx is what ``mm`` is, too.

    By those of more than 256 tokens also silu, in training and not, results in fp32, and sums of linear_log_prob's dx;
    by those of 17 to 512 tokens results in fp32, too.
    """
    case = Case(256, 256, 256)
    with fake_kernels(arch, computes=False) as jobs:
        for kernel, accumulates in itertools.product(kernels(arch), (False, True)):
            if accumulates and kernel[0] is not None and kernel[0].overlapping:
                continue  # what is added to is read once
            inputs = make_inputs(case, torch.Generator())
            if accumulates:
                inputs.weight.main_grad = torch.zeros(256, 256)
            with only_kernel(*kernel):
                run(linear, case, inputs)
    with fake_kernels(arch, computes=False) as of_models:
        x, weight = torch.zeros(2, 256, 256, dtype=BF16).unbind()
        for config in more_tokens(arch):
            with only_kernel(config, False):
                linear(x, weight, out_dtype=FP32)
                for needs_gradient in (True, False):
                    linear(x.requires_grad_(needs_gradient), weight, activation="silu")
                    gemm.function(x.detach(), weight, torch.zeros(256, 256), accumulate=needs_gradient, trans_b=True)
    assert len(set(of_models)) == 5 * len(more_tokens(arch))
    with fake_kernels(arch, computes=False) as logits:
        for kernel in SOME_TOKENS if arch == "sm_90a" else ():
            with only_kernel(*kernel):
                linear(x, weight, out_dtype=FP32)
    of_models += logits
    jobs += of_models
    table = [job for job in products(arch) if not job[1][1].batched]  # batches: test_bmm.py
    assert set(of_models) <= set(table) <= set(jobs)
    assert {arguments[2] for _, arguments in table} == set(candidates(arch)) - {None}
    of_table = {arguments[2:4] for _, arguments in table}
    with fake_kernels(arch, computes=False) as jobs:
        for kernel in of_table:
            a, b = torch.zeros(2, 256, 256, dtype=BF16).unbind()
            with only_kernel(*kernel):
                mm(a, b.mT if kernel in in_whole_blocks(arch) else b)
    assert len(jobs) == len(of_table) and set(jobs) <= set(table)
    deep = [arguments[1] for _, arguments in table if arguments[2:4] in in_whole_blocks(arch)]
    assert all(spec.majors == ("k", "k") for spec in deep) and (arch == "sm_90a") == bool(deep)


@pytest.mark.parametrize("epilogue", EPILOGUE_K)
def test_who_takes_turns(epilogue):
    """Who has several tiles; and of four, where nothing but a store is hidden, they are multiplied together."""

    def ping_pong(arch, m, n, k):
        return choose(arch, m, n, k, 132, epilogue)[0].ping_pong

    assert all(ping_pong("sm_90a", *shape) for shape in ((4096, 14336, 4096), (8192, 8192, 8192), (8192, 4096, 1024)))
    for m in (4096, 8192):  # of 8192 a near tie, which the tile that needs less energy wins
        assert ping_pong("sm_90a", m, 4096, 4096) == (epilogue != "store")
    few = [(16, 4096, 4096)]
    if epilogue == "accumulate":  # else the least estimated time decides of 17 to 512 tokens
        few += [(512, 4096, 4096), (256, 32000, 4096)]
    assert not any(ping_pong("sm_90a", *shape) for shape in few)
    assert not any(ping_pong("sm_100a", m, 14336, 4096) for m in (256, 4096))
    # Its kernel hides them anyway: nothing there depends on what is done with the sums
    shapes = itertools.product((300, 1024, 4096, 8192), (1024, 4096, 12288, 14336), (64, 1024, 4096))
    assert all(choose("sm_100a", *s, 148, epilogue) == choose("sm_100a", *s, 148) for s in shapes)


def test_who_is_loaded_by_copies_of_many_blocks():
    """An operand along k, of whole blocks: what one copy loads would else be of the next row, or of none.

    Those that are tiled for it only where both operands are. More than 16 tokens get these where they add to what is
    there; else the least estimated time decides (test_tokens.py).
    """
    choose = functools.partial(config_module.choose, epilogue="accumulate")
    deep = {config for config, _ in in_whole_blocks("sm_90a")}
    for weights, table in ((1024, FEW_WEIGHTS), (4096, SOME_WEIGHTS), (12288, MANY_WEIGHTS)):
        for (tokens, usual), k in itertools.product(table.items(), (2048, 4096, 8192, 8256, 14336)):
            config = FEW_WEIGHTS_DEEP if (weights, tokens) == (1024, 8) and k > 8192 else usual
            assert choose("sm_90a", tokens, weights, k, 132) == (config, True)
            assert choose("sm_90a", weights, tokens, k, 132) == (config, False)
            assert choose("sm_90a", tokens + 1, weights, k, 132) != (config, True)
            assert config.multi_block_tma("sm_90a", ("k", "rows"), k)
            for other in (("sm_90a", ("k", "k"), k + 8), ("sm_100a", ("k", "k"), k), ("sm_90a", ("rows", "rows"), k)):
                assert not config.multi_block_tma(*other)
            others = [choose("sm_90a", tokens, weights, k + 8, 132), choose("sm_100a", tokens, weights, k, 148)]
            others.append(choose("sm_90a", tokens, weights, k, 132, along_k=False))
            assert not {config for config, _ in others} & deep
    assert choose("sm_90a", 8, 1024, 1984, 132)[0] not in deep
    with fake_kernels("sm_90a", computes=False) as jobs:
        x, weight = torch.zeros(8, 2112, dtype=BF16), torch.zeros(1024, 2112, dtype=BF16)
        mm(x, weight.mT)
        mm(x, weight.mT.contiguous())
        mm(x[:, :2104], weight.mT[:2104])
        mm(x.t().contiguous().t(), weight.mT.contiguous())
    assert [arguments[-1] for _, arguments in jobs] == [True, True, False, False]
    assert [arguments[2].tile[0] for _, arguments in jobs] == [16, 64, 64, 64]


def test_a_slot_is_free_when_its_products_are_done():
    """After a tile's first part one warpgroup frees the tile before; two free the tile itself, so its part is all."""
    from cute_kernels.common.gemm_sm90 import GemmSm90

    for tile, chunks in (((16, 8, 512), 4), ((64, 16, 256), 2), ((64, 16, 64), 1), ((128, 16, 256), 1)):
        kernel = GemmSm90(None, "k", "k", True, False, False, GemmConfig(tile, (1, 1), 5, 1))
        assert kernel.chunks == chunks and kernel.in_flight == (tile[0] < 128)


def test_what_no_copy_of_many_blocks_loads_is_an_error():
    from cute_kernels.common.gemm_sm90 import GemmSm90

    few = FEW_WEIGHTS[8]
    for majors, config in ((("m", "n"), few), (("k", "k"), dataclasses.replace(few, tile=(16, 8, 96)))):
        with pytest.raises(ValueError, match="multi_block_tma takes operands along k"):
            GemmSm90(None, *majors, True, False, False, config, multi_block_tma=True)
    with pytest.raises(ValueError, match="must hold what an instruction reads behind A's"):
        GemmSm90(None, "k", "k", True, False, False, dataclasses.replace(few, tile=(16, 8, 64), stages=4))
    with pytest.raises(ValueError, match="must have 16, 32, 64, 128 or, shared, 192 rows"):
        GemmSm90(None, "k", "k", True, False, False, dataclasses.replace(few, tile=(8, 8, 256)))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_candidates_are_distinct_and_those_that_calls_get(arch):
    found = candidates(arch)
    assert None in found and len(set(found)) == len(found) > 2
    assert {config for config, _ in kernels(arch)} == set(found)  # all that calls are given to, none that nobody gets


# Operands come by TMA, are multiplied from shared memory, and no sum is left to the order of atomics
INSTRUCTIONS = {
    "sm_90a": ("wgmma.mma_async", "cp.async.bulk.tensor"),
    "sm_100a": ("tcgen05.mma", "cp.async.bulk.tensor"),
}


def early_reads(ptx: str) -> list[str]:
    """The lines that touch a warpgroup's sums while they are added to: ptxas then waits for every product by itself."""
    busy, found = set(), []
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            busy.update(re.search(r"\{(.*?)\}", line)[1].split(", "))
        elif "wgmma.wait_group" in line and line.rstrip(" ;").endswith("0"):
            busy.clear()
        elif busy.intersection(re.findall(r"%\w+", line)):
            found.append(line)
    return found


@pytest.mark.parametrize("group", [1, 8])
def test_the_walk_over_tiles(group):
    """As compiled for this processor: groups of rows of tiles, each column by column; the last may be shorter."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    from cute_kernels.common.gemm_epilogue import tile_divisors, tile_of

    @cute.jit
    def walk(places: cute.Tensor, tiles_m: cutlass.Int32, tiles_n: cutlass.Int32):
        divisors = tile_divisors(tiles_m, tiles_n, group)
        for index in cutlass.range(tiles_m * tiles_n):
            m, n = tile_of(index, tiles_m, divisors, group)
            places[index, 0] = m
            places[index, 1] = n

    def entry(places):
        return from_dlpack(places).mark_layout_dynamic()

    function = cute.compile(walk, entry(torch.empty(4, 2, dtype=torch.int32)), cutlass.Int32(1), cutlass.Int32(1))
    for tiles_m, tiles_n in itertools.product((*range(1, 18), 131), (1, 2, 7, 37, 128)):
        places = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32)
        function(entry(places), cutlass.Int32(tiles_m), cutlass.Int32(tiles_n))
        groups = [range(first, min(first + group, tiles_m)) for first in range(0, tiles_m, group)]
        assert places.tolist() == [[m, n] for rows in groups for n in range(tiles_n) for m in rows]


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_90a", SM100])
def test_instructions(arch, tmp_path):
    program = f"""
import pathlib
import torch
from cute_kernels.gemm.config import DECODE_32
from cute_kernels.gemm.kernel import gemm
from tests.gemm.test_compile import arguments
from tests.gemm.cases import kernels
everything = sorted(kernels({arch!r}, ("accumulate",))[1:], key=lambda kernel: kernel[0].tile[0] * kernel[0].tile[1])
in_turn = [kernel for kernel in everything if kernel[0].ping_pong][-1:]
chosen = everything[0], everything[-1], *in_turn, (DECODE_32, False), (None, False)
wgrad = dict(out=torch.float32, a_major="m", b_major="n", accumulate=True, has_valid_k=True)
calls = [(kernel, {{}}) for kernel in chosen] + [(kernel, wgrad) for kernel in chosen[:-2]]
for index, (kernel, options) in enumerate(calls):
    assert gemm.obtain(*arguments({arch!r}, kernel, **options)).origin == "compiled"
    (ptx,) = pathlib.Path.cwd().glob("*.ptx")
    ptx.rename(f"{{index}}.text")  # the next one's name may be the same
"""
    compile_in(tmp_path, program)
    kernels_found = kernels_in(tmp_path, "*.text")
    assert len(kernels_found) == (8 if arch == "sm_90a" else 6)
    by_tma = [kernel for kernel in kernels_found if INSTRUCTIONS[arch][0] in kernel]
    assert len(by_tma) == len(kernels_found) - 1 and all(INSTRUCTIONS[arch][1] in kernel for kernel in by_tma)
    (other,) = [kernel for kernel in kernels_found if kernel not in by_tma]
    assert "mma.sync.aligned.m16n8k16" in other
    assert not any(early_reads(kernel) for kernel in kernels_found)
    for kernel in kernels_found:
        assert not re.search(r"\b(atom|red)\.", kernel) and ".local" not in kernel
        assert not re.search(r"mma\S*\.(tf32|f16\.f16\.f16|e4m3|e5m2)", kernel)
        assert "cp.reduce" not in kernel
        assert not re.search(
            r"\b(div|rem)\.", kernel
        )  # a tile's place takes none: before its loads it would be waited for
