"""sample of vocabularies, and in a graph."""

import pytest
import torch

from cute_kernels import sample
from tests.sampling.cases import BF16, FP16, FP32, Case, make_inputs
from tests.sampling.test_kernel import FILTERS, check


@pytest.mark.parametrize("options", [FILTERS[i] for i in (0, 4, 5, 6, 9, 11)], ids=str)
@pytest.mark.parametrize(
    ("columns", "dtype", "kind"),
    [
        (151936, BF16, "model"),
        (128256, FP32, "flat"),
        (262144, BF16, "ties"),
        (262144, FP32, "holes"),
        (50257, FP16, "model"),
    ],
    ids=str,
)
def test_vocabularies(columns, dtype, kind, options, generator):
    check(Case(5, columns, dtype, kind, options), generator)


def test_a_large_batch(generator):
    check(Case(64, 151936, BF16, "model", FILTERS[6]), generator, "cuda")
    check(Case(300, 151936, FP32, "flat"), generator, "cuda")


def test_a_graph_takes_new_positions(generator):
    inputs = make_inputs(Case(64, 32000, BF16, "model", FILTERS[-1]), generator)
    sample(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sample(**inputs)
    for _ in range(3):
        inputs["positions"] += 1
        graph.replay()
        assert torch.equal(found, sample(**inputs))
