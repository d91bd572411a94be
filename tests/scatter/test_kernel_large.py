"""Sums of the sizes of models, and what only a GPU has: graphs, other work beside."""

import pytest
import torch

from cute_kernels import scatter
from tests.scatter.cases import BF16, Case, make_inputs, same_bits, where_different
from tests.scatter.test_kernel import LARGE, check_contract


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_the_contract(case, generator):
    check_contract(case, generator)


def test_two_runs_beside_other_work(generator):
    case = Case(30000, 3000, 1024, "zipf")
    dy, ids = make_inputs(case, generator)
    wanted = scatter.embedding_backward(dy, ids, case.rows)
    a, side = torch.randn(2048, 2048, device="cuda", dtype=BF16), torch.cuda.Stream()
    for i in range(30):
        with torch.cuda.stream(side):
            a @ a[:, : 128 * (i % 16 + 1)]
        found = scatter.embedding_backward(dy, ids, case.rows)
        assert same_bits(found, wanted), where_different(found, wanted)


def test_a_graph_takes_new_ids(generator):
    """The launches do not depend on the ids' values."""
    case = Case(5000, 300, 64, "zipf")
    dy, ids = make_inputs(case, generator)
    index = ids.view(-1, 10)
    x = torch.zeros(500, 300, device="cuda")

    def call():
        return scatter.embedding_backward(dy, ids, case.rows), scatter.index_sum(x, index, dy[:500, :10], dim=1)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for kind in ("one", "uniform", "blocks"):
        dy2, ids2 = make_inputs(Case(5000, 300, 64, kind), generator)
        dy.copy_(dy2)
        ids.copy_(ids2)
        graph.replay()
        for a, b in zip(found, call(), strict=True):
            assert same_bits(a, b), where_different(a, b)
