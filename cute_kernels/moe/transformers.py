"""``experts`` in models of the transformers package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.moe.checks import Activation
from cute_kernels.moe.op import Routing, experts
from cute_kernels.runtime.checks import expect

NAME = "cute_kernels"
# By act_fn's class
GATED = {"SiLUActivation": "swiglu", "SiLU": "swiglu", "GELUActivation": "geglu"}
UNGATED = {"SiLUActivation": "silu", "SiLU": "silu"}


def register_with_transformers(name: str = NAME) -> None:
    """Make ``experts`` known to transformers, version 5, as an implementation of experts.

    Then ``from_pretrained(..., experts_implementation="cute_kernels")``, or ``model.set_experts_implementation`` later
    on, has each layer's experts call it. Known are experts with and without gate, with biases, transposed, interleaved
    as those of gpt-oss. Gates and activations of a kind of its own are called on the product's rows, and so is an
    activation that ``experts`` lacks. An index of num_experts, as of slots that another rank has, is an empty slot.
    Routers stay transformers': ``batch_invariant`` covers them. Calling it again changes nothing.

    Args:
        name: what the implementation is called.

    Raises:
        ImportError: transformers is not installed, or has no ``ExpertsInterface``.

    Numerics:
        Those of ``experts``: weights of slots in fp32, sums of a token's experts in ascending order, one rounding. On a
        GPU the parameters are bf16 or fp16, and so are gradients of theirs; activations are cast to their dtype.

    Example:
        >>> from importlib.util import find_spec
        >>> from cute_kernels import moe
        >>> if find_spec("transformers"):
        ...     moe.register_with_transformers()
        ...     # model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="cute_kernels")
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(name, forward)


def forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """(T, H) of hidden_states (T, H), and experts and weights (T, k), as transformers calls it.

    Raises:
        ValueError: there is a norm behind the experts.
    """
    good = not getattr(module, "has_post_expert_norm", False)
    expect(good, NAME, "has_post_expert_norm", "be False: no kernel has it", not good)
    part = "gate_up_proj" if module.has_gate else "up_proj"
    gate_up, down = getattr(module, part), module.down_proj
    options: dict[str, Any] = {"transposed": module.is_transposed, "activation": _activation(module)}
    if options["activation"] == "swiglu_oai":
        options |= {"interleaved": True, "limit": module.limit, "alpha": module.alpha}
    if module.has_bias:
        options |= {"gate_up_bias": getattr(module, f"{part}_bias"), "down_bias": module.down_proj_bias}
    x = hidden_states.reshape(-1, hidden_states.shape[-1]).to(gate_up.dtype)
    routing = Routing(top_k_index, top_k_weights.to(torch.promote_types(x.dtype, torch.float32)))
    return experts(x, routing, gate_up, down, **options).view_as(hidden_states).to(hidden_states.dtype)


def _activation(module: nn.Module) -> Activation:
    """The name of the module's activation in ``experts``, or the module's own function where it has no name there."""
    from transformers.integrations.moe import _default_apply_gate  # act_fn(gate) * up, of halves
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    if not module.has_gate:
        return UNGATED.get(type(module.act_fn).__name__, module.act_fn)
    gate = type(module)._apply_gate  # not by its __qualname__, which in Dynamo (torch 2.13) equals no text
    if gate is GptOssExperts._apply_gate:
        return "swiglu_oai"
    if gate is _default_apply_gate:
        return GATED.get(type(module.act_fn).__name__, module._apply_gate)
    return module._apply_gate
