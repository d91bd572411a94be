"""Packed sequences in the backward of attention on a GPU, other work on the SMs, graphs, a second device, many runs."""

import math
import time

import pytest
import torch

from cute_kernels import attention
from cute_kernels.attention import prewarm, reference
from tests.attention.backward_cases import SIZES, Saved, assert_same, case_of
from tests.attention.cases import BF16, Inputs, gradients_of, make_packed, rms, same_bits
from tests.attention.occupy import beside_other_work, occupy
from tests.attention.on_gpu import HOPPER
from tests.precompiled import precompile

pytestmark = HOPPER
HEADS = pytest.mark.parametrize("sizes", SIZES, ids=str)
LENGTHS = (300, 0, 65, 1, 513), (300, 7, 65, 129, 700)
OPTIONS = [{"causal": True}, {"window": (50, 0)}, {"causal": True, "softcap": 3.0}, {}]


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    precompile([*prewarm.specializations("sm_90a"), (occupy, ("sm_90a",))])


def incoming(tensors: Inputs, sizes: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*tensors.q.shape[:2], sizes[1], generator=generator, device="cuda").to(BF16)


@HEADS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sinks_of_packed_sequences(options, sizes, generator):
    """Their gradients, and those of all else, beside fp64; two runs agree to the bit."""
    tensors, places = make_packed(case_of(sizes, 1, 1, 1, 4, 2, False), *LENGTHS, generator)
    sinks, dout = torch.randn(4, generator=generator, device="cuda"), incoming(tensors, sizes, generator)

    def call(function):
        return lambda q, k, v, sinks: function(q, k, v, sinks=sinks, **options, **places)

    found = gradients_of(call(attention), (*tensors, sinks), dout)
    wide = [t.double() for t in (*tensors, sinks)]
    exact = gradients_of(call(reference.attention), wide, dout)
    for name, a, b in zip(("dq", "dk", "dv", "dsinks"), found, exact, strict=True):
        assert rms(a.double() - b) <= 0.01 * rms(b), f"{name}: {rms(a.double() - b):.3e} of {rms(b):.3e}"
    for a, b in zip(found, gradients_of(call(attention), (*tensors, sinks), dout), strict=True):
        assert same_bits(a, b)


@HEADS
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_neighbours_of_a_packed_sequence(causal, sizes, generator):
    """A sequence's gradients are those that it has alone, whatever lies before and behind it, of whatever length."""
    case = case_of(sizes, 1, 1, 1, 4, 2, causal)
    one, places = make_packed(case, (203,), (331,), generator)
    dout = incoming(one, sizes, generator)

    def call(**places):
        return lambda q, k, v: attention(q, k, v, causal=causal, **places)

    wanted = gradients_of(call(**places), one, dout)
    for before, behind in (((), (5,)), ((1,), ()), ((64, 129), (0, 700)), ((0, 0, 1000), (1,))):
        for content in (0.5, math.nan, math.inf):
            lengths_q, lengths_k = (*before, 203, *behind), (*before, 331, *behind)
            tensors, places = make_packed(case, lengths_q, lengths_k, generator)
            places["max_seqlen_q"] = places["max_seqlen_k"] = 1000
            rows, keys = (slice(sum(before), sum(before) + n) for n in (203, 331))
            of_dout = torch.full((len(tensors.q), 4, sizes[1]), content, dtype=BF16, device="cuda")
            for t, place, own in zip((*tensors, of_dout), (rows, keys, keys, rows), (*one, dout), strict=True):
                t.fill_(content)
                t[place] = own
            found = gradients_of(call(**places), tensors, of_dout)
            assert_same([t[place] for t, place in zip(found, (rows, keys, keys), strict=True)], wanted)


@HEADS
def test_a_graph_with_other_lengths(sizes, generator):
    """A replay takes lengths from where they were at the capture."""
    case = case_of(sizes, 1, 1, 1, 4, 2)
    tensors, places = make_packed(case, (300, 100, 112), (300, 100, 112), generator)
    places["max_seqlen_q"] = places["max_seqlen_k"] = 512
    dout = incoming(tensors, sizes, generator)

    def run():
        return gradients_of(lambda q, k, v: attention(q, k, v, causal=True, **places), tensors, dout)

    wanted = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for lengths in ((300, 100, 112), (1, 510, 1), (0, 0, 512), (512, 0, 0), (17, 18, 19)):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        places["cu_seqlens_q"].copy_(starts)
        places["cu_seqlens_k"].copy_(starts)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, run())
    assert not same_bits(found[0], wanted[0])


@HEADS
@pytest.mark.parametrize("pairs", [4, 1], ids="pairs{}".format)
@pytest.mark.parametrize("occupied", [0.5, 0.99], ids="{:.0%}".format)
def test_where_other_work_keeps_the_sms(occupied, pairs, sizes, generator):
    """A part of the CTAs does it all while the others wait for an SM: nobody waits for one that is not there."""
    saved = Saved(case_of(sizes, 2, 1000, 1000, 4, pairs), generator)
    wanted = saved.run()
    number = torch.cuda.get_device_properties(0).multi_processor_count
    busy, side, done = occupy("sm_90a"), torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy(torch.zeros(int(occupied * number), dtype=torch.int32, device="cuda"), 2 * 10**9)
        done.record()
    found = saved.run()
    torch.cuda.current_stream().synchronize()
    assert not done.query(), "the SMs were free again"
    assert_same(found, wanted)
    side.synchronize()


@HEADS
def test_beside_other_work(sizes, generator):
    """Other kernels come and go on some of the SMs: 200 runs, on a second stream, too."""
    saved = Saved(case_of(sizes, 2, 700, 700, 4, 2), generator)
    wanted = saved.run()
    for found in beside_other_work(lambda i: saved.run(num_sms=None if i % 3 else i % 131 + 1)):
        assert_same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@HEADS
def test_a_second_device(sizes, generator):
    saved = Saved(case_of(sizes, 2, 300, 300, 4, 2), generator)

    def run(device: str):
        inputs = [t.to(device) for t in saved.inputs]
        return gradients_of(lambda q, k, v: attention(q, k, v, causal=True), inputs, saved.dout.to(device))

    assert_same([t.to("cuda:0") for t in run("cuda:1")], run("cuda:0"))


@HEADS
def test_groups_again_and_again(sizes, generator):
    """CTAs of a group's heads wait for each other in ways that differ from run to run; warps must come together again.

    With a lane that polled alone a kernel of 64 channels hung behind 31 to 121 runs (H200).
    """
    saved = Saved(case_of(sizes, 1, 8192, 8192, 32, 8), generator)
    wanted, done = saved.run(), torch.cuda.Event()
    for _ in range(20):
        found = [saved.run() for _ in range(30)]
        done.record()
        end = time.monotonic() + 60
        while not done.query():
            assert time.monotonic() < end, "a kernel hangs"
        for gradients in found:
            assert_same(gradients, wanted)
