"""Models of the transformers package on ``experts``, by its reference: as their plain implementation."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from tests.moe.transformers_cases import CONFIGS, make_model, tokens  # noqa: E402


def run(model):
    """Logits, and gradients of all parameters."""
    ids = tokens(2, 17)
    found = model(ids, labels=ids)
    found.loss.backward()
    return found.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_as_transformers_own(name):
    """In fp64, where the order of a sum does not show."""
    results = [
        run(make_model(name, experts, dtype=torch.float64, attention="eager")) for experts in ("cute_kernels", "eager")
    ]
    torch.testing.assert_close(*[logits for logits, _ in results], atol=1e-6, rtol=1e-6)
    assert results[0][1].keys() == results[1][1].keys()
    for key, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][key], atol=1e-6, rtol=1e-5, msg=key)


class Experts(torch.nn.Module):
    """Experts with a gate of their own, or without one."""

    has_bias, is_transposed = False, False

    def __init__(self, has_gate):
        super().__init__()
        self.has_gate, self.act_fn = has_gate, torch.nn.ReLU()
        torch.manual_seed(0)
        shape = (4, 2 * 6 if has_gate else 6, 8)
        self.register_parameter("gate_up_proj" if has_gate else "up_proj", torch.nn.Parameter(torch.randn(shape)))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 8, 6))

    def _apply_gate(self, z):
        g, u = z.chunk(2, 1)
        return g.tanh() + u


@pytest.mark.parametrize("has_gate", [True, False])
def test_gates_of_their_own_and_slots_of_other_ranks(has_gate):
    from cute_kernels.moe.transformers import forward

    module, x = Experts(has_gate), torch.randn(5, 8)
    indices, weights = torch.tensor([[0, 3], [4, 1], [2, 2], [4, 4], [3, 0]]), torch.rand(5, 2)
    weights[indices == 4] = 0.0
    first = module.gate_up_proj if has_gate else module.up_proj
    wanted = torch.zeros(5, 8)
    for t in range(5):
        for e, weight in zip(indices[t].tolist(), weights[t], strict=True):
            if e < 4:
                z = (first[e] @ x[t])[None]
                h = module._apply_gate(z) if has_gate else module.act_fn(z)
                wanted[t] += weight * (module.down_proj[e] @ h[0])
    torch.testing.assert_close(forward(module, x, indices, weights), wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_graph_has_the_same_activation(name):
    from cute_kernels.moe.transformers import _activation

    (module, *_) = (m for m in make_model(name, "cute_kernels").modules() if hasattr(m, "_apply_gate"))
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def traced(module, x):
        return x + 1, _activation(module)

    assert traced(module, torch.ones(1))[1] == _activation(module)
    assert isinstance(_activation(module), str)
