"""torch.nn modules over the operators."""

from cute_kernels.nn.graph import CapturedStep
from cute_kernels.nn.hyper_connection import (
    HyperConnection,
    HyperConnectionConfig,
    LearnedHead,
    optimal_recompute_layers,
)
from cute_kernels.nn.linear import Linear
from cute_kernels.nn.moe import MoE
from cute_kernels.nn.norm import LayerNorm, RMSNorm
from cute_kernels.nn.offload import ResidualOffload
from cute_kernels.nn.recompute import RecomputeManager
from cute_kernels.nn.transformer import Generated, MHCTransformer, TransformerBlock, TransformerConfig, TransformerLayer

__all__ = [
    "CapturedStep",
    "Generated",
    "HyperConnection",
    "HyperConnectionConfig",
    "LayerNorm",
    "LearnedHead",
    "Linear",
    "MHCTransformer",
    "MoE",
    "RMSNorm",
    "RecomputeManager",
    "ResidualOffload",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLayer",
    "optimal_recompute_layers",
]
