"""torch.compile of a prepared model on the CPU: only where sequences begin is asked outside of the layers' graph."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from cute_kernels import models  # noqa: E402
from tests.fakes import fake_gpu  # noqa: E402
from tests.models.cases import make_prepared, prompts  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

LINEARS = 2 * 7 + 1  # of two layers, and the head


@pytest.mark.parametrize("packed", [False, True])
def test_layers_are_one_graph(packed):
    """In a graph transformers cannot see that positions do not begin again, and says that a batch is packed."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes))
        return graph.forward

    model, rows = make_prepared("llama"), prompts((5, 12, 3))
    ids, inputs = torch.cat(rows)[None], {}
    if packed:
        inputs["position_ids"] = torch.cat([torch.arange(len(row)) for row in rows])[None]
    else:
        ids = ids.view(2, 10)
    with torch.no_grad():
        found = torch.compile(model, backend=backend)(ids, use_cache=False, **inputs).logits
        wanted = model(ids, use_cache=False, **inputs).logits
    assert_same_bits(found, wanted)
    if not packed:  # packed sequences have a reference that asks where they begin
        assert max(graphs) >= LINEARS - 1
    torch._dynamo.reset()


def test_layers_of_a_step_of_decoding_are_one_graph():
    """Over fake kernels, since the plain cache asks for lengths. A full cache has one graph for all steps."""
    torch._dynamo.reset()
    graphs, rows = [], torch.stack(prompts((5, 5, 5)))
    model = make_prepared("llama")

    def backend(graph, inputs):
        graphs.append(sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes))
        return graph.forward

    @torch.no_grad()
    def steps(call):
        cache = models.PagedCache(model.config, len(rows), page_size=16)
        model(rows, past_key_values=cache, use_cache=True)
        cache.fill()
        options = {"past_key_values": cache, "use_cache": True}
        return [
            call(input_ids=rows[:, i : i + 1], position_ids=torch.full((3, 1), 5 + i), **options).logits
            for i in range(3)
        ]

    with fake_gpu():
        for found, wanted in zip(steps(torch.compile(model, backend=backend)), steps(model), strict=True):
            assert_same_bits(found, wanted)
    assert sorted(graphs)[-1] >= LINEARS - 1 and sum(graphs) == LINEARS
    torch._dynamo.reset()
