"""Packed sequences, used keys and given memory on a GPU: the bits of dense batches, whatever lies beside them."""

import math

import pytest
import torch
from torch import Tensor

from cute_kernels import attention
from cute_kernels.attention.config import FORWARD_CONFIGS, UNBOUNDED, ForwardSpec, window_bounds
from cute_kernels.attention.launch.forward import ForwardLaunch
from cute_kernels.runtime.targets import target_of
from tests.attention.cases import BF16, HEAD_SIZES, SPLIT, Case, Inputs, make_inputs, make_packed
from tests.attention.on_gpu import HOPPER, assert_same, forward_job, run
from tests.precompiled import precompile

pytestmark = HOPPER
HEADS = pytest.mark.parametrize("head_size", HEAD_SIZES)
MASKS = pytest.mark.parametrize("mask", [{"causal": True}, {}, {"window": (150, 20)}], ids=str)
LENGTHS_Q = (300, 0, 1, 129, 64, SPLIT + 70, 17, 500)
LENGTHS_K = (300, 40, 0, SPLIT + 200, 1, SPLIT + 70, 16, 450)


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    dense, packed = (), (True, True)
    used = (False, False, True), (True, False, True), (True, True, True)
    masks = (True, False), (False, False), (False, True)  # causal, window
    jobs = [
        forward_job(ForwardSpec(BF16, d, causal, d, window, False, False, *packing))
        for d in HEAD_SIZES
        for causal, window in masks
        for packing in (dense, packed, *(() if window else used))
    ]
    in_registers = FORWARD_CONFIGS[128, 128][-1]
    jobs += [forward_job(packed_spec(128, causal, window), in_registers) for causal, window in masks]
    precompile(jobs)


def packed_spec(head_size: int, causal: bool, window: bool) -> ForwardSpec:
    return ForwardSpec(BF16, head_size, causal, head_size, window, packed_q=True, packed_k=True)


def by_sequence(tensors: Inputs, lengths: dict, mask: dict, used: Tensor | None = None):
    """(first row, results) of each sequence as a dense batch of one."""
    starts_q, starts_k = lengths["cu_seqlens_q"].tolist(), lengths["cu_seqlens_k"].tolist()
    for i in range(len(starts_q) - 1):
        keys = slice(starts_k[i], starts_k[i + 1] if used is None else starts_k[i] + int(used[i]))
        one = Inputs(tensors.q[None, starts_q[i] : starts_q[i + 1]], *(t[None, keys] for t in tensors[1:]))
        yield starts_q[i], run(one, **mask)


def assert_sequences(found: tuple[Tensor, Tensor], tensors: Inputs, lengths: dict, mask: dict, used=None) -> None:
    out, lse = found
    for first, (of_one, lse_of_one) in by_sequence(tensors, lengths, mask, used):
        rows = slice(first, first + of_one.shape[1])
        assert_same((out[rows], lse[:, rows]), (of_one[0], lse_of_one[0]))


@HEADS
@MASKS
def test_sequences_are_dense_ones(mask, head_size, generator):
    """T2, T3, T6. Rows that are no sequence's are 0."""
    case = Case(1, 1, 1, 4, 2, head_size)
    tensors, lengths = make_packed(case, LENGTHS_Q, LENGTHS_K, generator)
    found = run(tensors, **mask, **lengths)
    assert_sequences(found, tensors, lengths, mask)
    longer = Inputs(*(torch.cat([t, torch.full_like(t[:70], math.nan)]) for t in tensors))
    out, lse = run(longer, **mask, **lengths)
    assert_same((out[:-70], lse[:, :-70]), found)
    assert (out[-70:] == 0).all() and (lse[:, -70:] == -math.inf).all()
    more = {**lengths, "max_seqlen_q": 3000, "max_seqlen_k": 5000}
    assert_same(run(tensors, **mask, **more), found)


@MASKS
def test_queries_in_registers(mask, generator):
    """The last config of 128 channels, which no call of packed sequences takes, has the bits of the one they take."""
    tensors, lengths = make_packed(Case(1, 1, 1, 4, 2, 128), LENGTHS_Q, LENGTHS_K, generator)
    wanted = run(tensors, **mask, **lengths)
    found = torch.full_like(wanted[0], math.nan), torch.full_like(wanted[1], math.nan)
    left, right = window_bounds(mask.get("causal", False), mask.get("window"))
    spec = packed_spec(128, "causal" in mask, left != UNBOUNDED)
    launch = ForwardLaunch.of(target_of(0), spec, FORWARD_CONFIGS[128, 128][-1])
    starts = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
    launch.run(*tensors, *found, 128**-0.5, left, right, 0.0, None, *starts, lengths["max_seqlen_q"])
    assert_same(found, wanted)


@HEADS
@MASKS
def test_neighbours(mask, head_size, generator):
    """T3: NaN and infinity in every other sequence."""
    tensors, lengths = make_packed(Case(1, 1, 1, 4, 2, head_size), LENGTHS_Q, LENGTHS_K, generator)
    wanted = run(tensors, **mask, **lengths)
    starts = [lengths["cu_seqlens_q"].tolist(), *[lengths["cu_seqlens_k"].tolist()] * 2]
    for kept in (0, 3, 4, 5, 6):
        for value in (math.nan, math.inf):
            changed = Inputs(*(t.clone() for t in tensors))
            for t, of in zip(changed, starts, strict=True):
                t[: of[kept]] = value
                t[of[kept + 1] :] = value
            found = run(changed, **mask, **lengths)
            rows = slice(starts[0][kept], starts[0][kept + 1])
            assert_same((found[0][rows], found[1][:, rows]), (wanted[0][rows], wanted[1][:, rows]))


@HEADS
@pytest.mark.parametrize("mask", [{"causal": True}, {}], ids=str)
def test_used_keys(mask, head_size, generator):
    """T4: padding of any amount and content, of dense and packed keys, dense and packed queries."""
    used = (70, 0, 1, 129, 64, SPLIT + 70, 17, 500)
    seqused_k = torch.tensor(used, dtype=torch.int32, device="cuda")
    for value in (0.0, math.nan, math.inf):
        inputs = make_inputs(Case(8, 200, SPLIT + 300, 4, 2, head_size), generator)
        for i, n in enumerate(used):
            inputs.k[i, n:], inputs.v[i, n:] = value, value
        found = run(inputs, **mask, seqused_k=seqused_k)
        for i, n in enumerate(used):
            one = run(Inputs(inputs.q[i : i + 1], *(t[i : i + 1, :n] for t in inputs[1:])), **mask)
            assert_same(tuple(t[i : i + 1] for t in found), one)
        starts = torch.arange(9, dtype=torch.int32, device="cuda") * 200
        packed_q = Inputs(inputs.q.flatten(0, 1), *inputs[1:])
        lengths = {"cu_seqlens_q": starts, "max_seqlen_q": 200, "seqused_k": seqused_k}
        out, lse = run(packed_q, **mask, **lengths)
        assert_same((out.view(inputs.q.shape), lse.view(4, 8, 200).transpose(0, 1)), found)
        packed = Inputs(*(t.flatten(0, 1) for t in inputs))
        starts_k = torch.arange(9, dtype=torch.int32, device="cuda") * inputs.k.shape[1]
        out, lse = run(packed, **mask, **lengths, cu_seqlens_k=starts_k, max_seqlen_k=inputs.k.shape[1])
        assert_same((out.view(inputs.q.shape), lse.view(4, 8, 200).transpose(0, 1)), found)


@HEADS
def test_many_sequences(head_size, generator):
    """More than the lanes of a warp, short and empty ones among them."""
    sizes = torch.randint(0, 90, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    tensors, lengths = make_packed(Case(1, 1, 1, 2, 1, head_size), tuple(sizes), tuple(sizes), generator)
    assert_sequences(run(tensors, causal=True, **lengths), tensors, lengths, {"causal": True})


def test_graph_replay_with_other_lengths(generator):
    """The grid is of the host's numbers, the work of the device's."""
    tensors, lengths = make_packed(Case(1, 1, 1, 4, 2, 128), (700, 300, 24), (700, 300, 24), generator)
    lengths |= {"max_seqlen_q": 1024, "max_seqlen_k": 1024}
    mask = {"causal": True}
    run(tensors, **mask, **lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(tensors, **mask, **lengths)
    for sizes in ((700, 300, 24), (1, 1023, 0), (0, 0, 1000), (341, 341, 342)):
        starts = torch.tensor([0, *sizes]).cumsum(0).int()
        lengths["cu_seqlens_q"].copy_(starts)
        lengths["cu_seqlens_k"].copy_(starts)
        graph.replay()
        torch.cuda.synchronize()
        assert_sequences(found, tensors, lengths, mask)
        assert (found[0][sum(sizes) :] == 0).all()


@HEADS
def test_into_given_memory(head_size, generator):
    """Dense and packed, with strides; nothing beside it is written."""
    inputs = make_inputs(Case(2, 200, 200, 4, 2, head_size), generator)
    wanted = run(inputs, True)
    memory = torch.full((2, 210, 6, head_size + 8), 7.0, dtype=BF16, device="cuda")
    target = memory[:, 5:205, 1:5, :head_size]
    found = run(inputs, True, out=target)
    assert found[0] is target
    assert_same(found, wanted)
    target.fill_(7.0)
    assert (memory == 7).all()
    tensors, lengths = make_packed(Case(1, 1, 1, 4, 2, head_size), (70, 0, 130), (70, 3, 130), generator)
    wanted = run(tensors, True, **lengths)
    target = memory[0, 5:205, 1:5, :head_size]
    assert_same(run(tensors, True, **lengths, out=target), wanted)
    target.fill_(7.0)
    assert (memory == 7).all()


def test_compiled(generator):
    tensors, lengths = make_packed(Case(1, 1, 1, 4, 2, 64), (70, 0, 130), (70, 3, 130), generator)
    function = torch.compile(lambda *t: attention(*t, causal=True, **lengths, return_lse=True), fullgraph=True)
    assert_same(function(*tensors), run(tensors, True, **lengths))
