"""The kernels' path of the quantizers on the CPU, over fake kernels; most tests are those of the GPU."""

from enum import StrEnum

import pytest
import torch

import cute_kernels
from tests.fakes import fake_kernels
from tests.mxfp8.test_kernel_bits import *  # noqa: F403
from tests.runtime.thread_cases import OPS, first_calls


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def test_an_option_of_a_str_enum_is_no_other_kernel(jobs):
    class Mode(StrEnum):
        FLOOR = "floor"

    x = torch.ones(32, 64)
    cute_kernels.quantize_rowwise(x, mode=Mode.FLOOR)
    cute_kernels.quantize_rowwise(x, mode="floor")
    assert len({repr(job) for job in jobs}) == 1 and type(jobs[0][1][1].mode) is str


def test_sizes_choose(jobs):
    """A matrix of few tiles and one of many take different kernels of one Spec."""
    for rows in (1024, 32768):
        cute_kernels.quantize_rowwise(torch.zeros(rows, 2048, dtype=torch.bfloat16))
    (_, (_, one, few)), (_, (_, two, many)) = jobs
    assert one == two and few != many


def test_a_graph_takes_the_road_of_eager_calls(jobs):
    torch._dynamo.reset()
    x = torch.randn(64, 96)
    found = torch.compile(cute_kernels.quantize_dual, fullgraph=True, backend="eager")(x)
    before = len(jobs)
    assert before == 1
    for one, two in zip(found, cute_kernels.quantize_dual(x), strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
    assert len(jobs) == before


@pytest.mark.parametrize("op", [op for op in OPS if "quantize" in op])
def test_first_calls_of_threads(op, generator):
    first_calls(OPS[op](generator, 40), autograd=False)
