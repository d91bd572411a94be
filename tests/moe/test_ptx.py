"""The compiler's output for integer kernels of experts, run on the CPU: plans, routes, permute, bit by bit."""

import numpy as np
import pytest
import torch

from cute_kernels import moe
from cute_kernels.moe.config import PLAN_THREADS, WARP, WARPS, plan_blocks
from tests.moe.cases import ROUTERS, ties
from tests.ptx import compile_in
from tests.ptx_threads import POISON, Kernel, Memory

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of divisions by 0
]
EXPERTS, K = 40, 4  # of plans and rows
CHOSEN = [ROUTERS[1], ROUTERS[5], ROUTERS[6]]


def spec_of(router) -> str:
    """The RouteSpec of its kernel."""
    groups, score = router.groups or (1, 1), "chosen" if router.score == "softmax" else router.score
    parts = router.experts, router.k, score, router.biased, *groups, score != "chosen"
    return f"RouteSpec{parts}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the PTX of all kernels."""
    program = f"""
import torch
from cute_kernels.moe.config import GatherSpec, PlanSpec, RouteSpec
from cute_kernels.moe.kernel.plan import plan
from cute_kernels.moe.kernel.route import route
from cute_kernels.moe.kernel.rows import gather
for has_table in (False, True):
    plan("sm_90a", PlanSpec({EXPERTS}, 16, has_table))
for spec in ({", ".join(map(spec_of, CHOSEN))}):
    route("sm_90a", spec)
gather("sm_90a", GatherSpec(torch.bfloat16, {K}))
"""
    found = tmp_path_factory.mktemp("ptx")
    compile_in(found, program)
    return found


def text_of(folder, pattern: str, without: str = "nothing") -> str:
    (path,) = [path for path in folder.glob(pattern) if without not in path.name]
    return path.read_text()


def int32(*shape: int) -> np.ndarray:
    return np.full(shape, POISON, np.uint32).view(np.int32)


@pytest.mark.parametrize("has_table", [False, True])
def test_plan(has_table, folder, generator):
    """Random, skewed and equal experts; empty slots; one turn of a warp's lanes and more."""
    text = text_of(folder, "*planPlan*.ptx", "_None_") if has_table else text_of(folder, "*planPlan*_None_*.ptx")
    kernel = Kernel(text)
    count = Kernel(text, "kernel_cutlass_count") if has_table else None
    cases = [(5000, (3, 64))] if has_table else [(9, None), (2048, None)]
    for slots, blocks in cases:
        number, of_warp = blocks or plan_blocks(slots)
        assert (number > 1) == has_table
        random = torch.randint(-1, EXPERTS + 1, (slots,), generator=generator)
        skewed = (EXPERTS * torch.rand(slots, generator=generator) ** 4).int()
        for indices in (random.int(), skewed, torch.full_like(skewed, EXPERTS - 1)):
            wanted = moe.plan(indices[:, None], EXPERTS, align=16)
            memory = Memory()
            given, _ = memory.array(indices.numpy())
            table, _ = memory.array(int32(number, EXPERTS))
            (offs, found_offs), (places, found_slots), (rows, positions), (counts, found_counts) = (
                memory.array(int32(t.numel())) for t in wanted
            )
            listed = [{0: given, 8: slots}] + [{0: table, 8: number}] * has_table
            if has_table:
                count.launch(number, PLAN_THREADS, [*listed, {0: places, 8: len(found_slots)}, {0: of_warp}], memory)
            listed += [{0: offs}, {0: places, 8: len(found_slots)}, {0: rows, 8: slots}, {0: counts}, {0: of_warp}]
            kernel.launch(number, PLAN_THREADS, listed, memory)
            for name, found in zip(wanted._fields, (found_offs, found_slots, positions, found_counts), strict=True):
                assert np.array_equal(found, getattr(wanted, name).flatten().numpy()), name


@pytest.mark.parametrize("router", CHOSEN, ids=str)
def test_route(router, folder, generator):
    """Experts bit by bit, of ties, too, of which more reach the bound than a warp has lanes; NaN."""
    experts, k, options = router.experts, router.k, router.options(generator)
    kernel = Kernel(text_of(folder, f"*routeRoute*_{experts}_i64_*.ptx"))
    tokens = 11
    normal = torch.randn(tokens, experts, generator=generator)
    with_nan = normal.clone()
    with_nan[::3, -1] = float("nan")
    for logits in (normal, with_nan, ties(tokens, experts, generator), torch.zeros(tokens, experts)):
        wanted = moe.route(logits, k, **options)
        memory = Memory()
        table, _ = memory.array(logits.numpy())
        bias = [{0: memory.array(options["bias"].numpy())[0]}] if router.biased else []
        (indices, found), (weights, found_weights) = (memory.array(int32(tokens, k)) for _ in range(2))
        numbers = [{0: int(np.float32(value).view(np.uint32))} for value in (router.eps, router.scale)]
        outputs = [{0: indices, 8: tokens}, {0: weights, 8: tokens}]
        listed = [{0: table, 8: tokens, 16: experts}, *bias, *outputs, *numbers]
        kernel.launch(-(-tokens // WARPS), WARPS * WARP, listed, memory)
        assert np.array_equal(found, wanted.indices.numpy())
        torch.testing.assert_close(torch.from_numpy(found_weights.view(np.float32)), wanted.weights, equal_nan=True)


def test_permute(folder, generator):
    """Each row of a token's slots, zeros elsewhere, nothing beside; rows shorter and longer than a CTA's loads."""
    kernel = Kernel(text_of(folder, "*rowsGather*.ptx"))
    for tokens, hidden, experts, align in ((5, 24, 9, 1), (40, 1032, 16, 16), (9, 8, 3, 16), (3, 8200, 3, 1)):
        plan = moe.plan(torch.randint(-1, experts + 1, (tokens, K), generator=generator), experts, align=align)
        x = torch.randint(-(2**15), 2**15, (tokens, hidden), generator=generator).to(torch.int16)
        memory, rows = Memory(), len(plan.slots)
        source, _ = memory.array(x.numpy())
        slots, _ = memory.array(plan.slots.numpy())
        positions, _ = memory.array(plan.positions.numpy())
        target, found = memory.array(int32(rows, hidden // 2))
        matrices = [{0: at, 8: size, 12: hidden, 16: hidden} for at, size in ((source, tokens), (target, rows))]
        listed = [matrices[0], {0: slots, 8: rows}, {0: positions, 8: tokens}, matrices[1]]
        kernel.launch(max(tokens, -(-rows // WARPS)), WARPS * WARP, listed, memory)
        wanted = torch.where((plan.slots >= 0)[:, None], x[plan.slots.clamp(min=0) // K], 0)
        assert np.array_equal(found.view(np.int16).reshape(rows, hidden), wanted.numpy())
        assert (memory.words[memory.end - 64 :] == POISON).all()
