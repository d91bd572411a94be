"""Experts that vLLM builds in the place of its own, and the layer that computes their router's logits.

To vLLM they are monolithic: they are given a router's logits, not the experts that a kernel of vLLM has chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from cute_kernels.integrations.vllm.covered import check_config, expect
from cute_kernels.moe import experts, route, router_logits

# ``moe.experts``' options of vLLM's activations
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {"activation": "swiglu"},
    "swigluoai": {"activation": "swiglu_oai", "interleaved": True},
}
# Attributes of vLLM's layer
ABSENT = {
    "custom_routing_function": None,
    "hash_indices_table": None,
    "apply_router_weight_on_input": False,
    "swiglu_limit": None,
    "swiglu_alpha": None,
    "swiglu_beta": None,
}


class InvariantExperts(UnquantizedFusedMoEMethod):
    """By ``moe.route`` and ``moe.experts``. Weights stay as they are loaded: (E, 2 I, H) and (E, H, I)."""

    def __init__(self, moe: Any) -> None:
        check_config()
        expect(moe.require_decomposed_backend, False, "require_decomposed_backend")
        super().__init__(moe)

    @property
    def is_monolithic(self) -> bool:
        return True

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's; the layer has its options by now, so an option that is not covered is an error here."""
        for name, wanted in ABSENT.items():
            expect(getattr(layer, name), wanted, name)
        activation = layer.activation.value
        if activation not in ACTIVATIONS:
            raise ValueError(f"cute_kernels in vLLM: activation must be of {', '.join(ACTIVATIONS)}, got {activation}")
        self.of_experts, self.of_route = ACTIVATIONS[activation], route_options(layer)
        super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """vLLM would make its own kernel here."""

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """(T, H) of x (T, H) and logits (T, E); the sum of a token's experts, without shared ones."""
        expect(router_logits.shape[1], layer.w13_weight.shape[0], "the number of logits of a token")
        bias = layer.e_score_correction_bias
        routing = route(
            router_logits.float(), layer.top_k, bias=None if bias is None else bias.float(), **self.of_route
        )
        biases = {"gate_up_bias": getattr(layer, "w13_bias", None), "down_bias": getattr(layer, "w2_bias", None)}
        return experts(x.contiguous(), routing, layer.w13_weight, layer.w2_weight, **biases, **self.of_experts)


def route_options(layer: Any) -> dict[str, Any]:
    """``moe.route``'s options of vLLM's layer.

    Raises:
        ValueError: groups that vLLM ranks by their best score, or a factor that it does not multiply weights with.
    """
    is_biased = layer.e_score_correction_bias is not None
    if is_biased:
        expect(layer.scoring_func, "sigmoid", "scoring_func with e_score_correction_bias")
    elif layer.scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"cute_kernels in vLLM: scoring_func must be softmax or sigmoid, got {layer.scoring_func}")
    groups = None
    if layer.use_grouped_topk and layer.num_expert_group > 1:
        groups = layer.num_expert_group, layer.topk_group
    if not is_biased:
        expect(groups, None, "(num_expert_group, topk_group) without e_score_correction_bias")
        expect(layer.routed_scaling_factor, 1.0, "routed_scaling_factor without e_score_correction_bias")
    options = {"score": layer.scoring_func, "groups": groups, "normalize": layer.renormalize}
    return options | {"scale": layer.routed_scaling_factor}


class InvariantGate(GateLinear):
    """By ``moe.router_logits``: one kernel for any number of tokens, where vLLM has several."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_config()
        super().__init__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        added, returned = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        logits = router_logits(x, self.weight, added).to(self.out_dtype or x.dtype)
        return (logits, returned) if self.return_bias else logits


EXPERTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    UnquantizedFusedMoEMethod: InvariantExperts,
    GateLinear: InvariantGate,
}
