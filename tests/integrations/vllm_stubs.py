"""The modules, classes and signatures of vLLM 0.33.0 that the adapter touches; vLLM itself is not installed."""

from __future__ import annotations

import enum
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


def modules() -> dict[str, types.ModuleType]:
    """Fresh ones: registries are empty."""
    made = {}

    def add(name, **contents):
        made[name] = module = types.ModuleType(name)
        vars(module).update(contents)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made.get(parent) or add(parent), last, module)
        return module

    add("vllm", __version__="0.33.0")
    add("vllm.envs", VLLM_BATCH_INVARIANT=False)
    add("vllm._custom_ops", reshape_and_cache_flash=reshape_and_cache_flash)
    config = add("vllm.config", current=None)
    config.get_current_vllm_config_or_none = lambda: config.current
    add("vllm.config.compilation", CompilationMode=CompilationMode, CUDAGraphMode=CUDAGraphMode)
    add("vllm.v1.attention.backend", **{c.__name__: c for c in BACKEND})
    add("vllm.v1.attention.backends.registry", **registry())
    custom_op = custom_ops()
    add("vllm.model_executor.custom_op", **custom_op)
    layers = layer_classes(custom_op["CustomOp"])
    add("vllm.model_executor.layers.layernorm", **{n: layers[n] for n in ("RMSNorm", "GemmaRMSNorm")})
    add("vllm.model_executor.layers.activation", **{n: layers[n] for n in ("SiluAndMul", "GeluAndMul")})
    moe = "vllm.model_executor.layers.fused_moe"
    add(f"{moe}.unquantized_fused_moe_method", UnquantizedFusedMoEMethod=layers["UnquantizedFusedMoEMethod"])
    add(f"{moe}.router.gate_linear", GateLinear=layers["GateLinear"])
    add(f"{moe}.routed_experts", RoutedExperts=layers["RoutedExperts"])
    rotary = {n: layers[n] for n in ("RotaryEmbedding", "Llama3RotaryEmbedding")}
    add("vllm.model_executor.layers.rotary_embedding", **rotary)

    def compute_token_logprobs(logits, token_ids):
        raise NotImplementedError

    for name in ("logprob", "prompt_logprob"):
        add(f"vllm.v1.worker.gpu.sample.{name}", compute_token_logprobs=compute_token_logprobs)
    return made


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Slots count tokens of all pages; -1 is none; key may have more rows than there are slots."""
    size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[token]
            value_cache[slot // size, slot % size] = value[token]


class CompilationMode(enum.IntEnum):
    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


class MoEActivation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"


ROUTED = {
    "renormalize": True,
    "use_grouped_topk": False,
    "num_expert_group": None,
    "topk_group": None,
    "custom_routing_function": None,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "swiglu_limit": None,
    "swiglu_alpha": None,
    "swiglu_beta": None,
    "e_score_correction_bias": None,
    "apply_router_weight_on_input": False,
    "hash_indices_table": None,
}


@dataclass
class FusedMoEConfig:
    num_experts: int = 8
    experts_per_token: int = 3
    activation: MoEActivation = MoEActivation.SILU
    in_dtype: torch.dtype = torch.bfloat16
    has_bias: bool = False
    require_decomposed_backend: bool = False


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def __init__(self, num_heads, head_size, scale): ...

    @abstractmethod
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output): ...


BACKEND = (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)


def registry():
    overrides = {}

    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        CUSTOM = None

        def get_path(self, include_classname=True):
            return overrides.get(self, self.value)

        def get_class(self):
            module, _, name = self.get_path().rpartition(".")
            __import__(module)
            return getattr(sys.modules[module], name)

        def is_overridden(self):
            return self in overrides

    def register_backend(backend, class_path=None, is_mamba=False):
        overrides[backend] = class_path
        return lambda x: x

    return {"AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend}


def custom_ops():
    op_registry_oot = {}

    class CustomOp(nn.Module):
        def __new__(cls, *args, **kwargs):
            return super().__new__(op_registry_oot.get(cls.__name__, cls))

        def forward(self, *args, **kwargs):
            return self.forward_cuda(*args, **kwargs)

        @classmethod
        def register_oot(cls, _decorated_op_cls=None, name=None):
            name = name or cls.__name__
            assert name not in op_registry_oot, f"Duplicate op name: {name}"
            op_registry_oot[name] = _decorated_op_cls
            return _decorated_op_cls

    return {"CustomOp": CustomOp, "op_registry_oot": op_registry_oot}


def layer_classes(custom_op):
    """``forward_cuda`` is a fused kernel that is not here."""

    class RMSNorm(custom_op):
        def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None, has_weight=True, dtype=None):
            super().__init__()
            self.hidden_size = hidden_size
            self.variance_epsilon = eps
            self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
            self.has_weight = has_weight
            self.weight = torch.ones(hidden_size, dtype=dtype)
            if has_weight:
                self.weight = nn.Parameter(self.weight)

    class GemmaRMSNorm(custom_op):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(hidden_size))
            self.variance_epsilon = eps

    class SiluAndMul(custom_op):
        def __init__(self, *, compile_native=True):
            super().__init__()

        @staticmethod
        def forward_native(x):
            a, b = x.chunk(2, -1)
            return nn.functional.silu(a) * b

    class GeluAndMul(custom_op):
        def __init__(self, approximate="none"):
            super().__init__()
            self.approximate = approximate

        def forward_native(self, x):
            a, b = x.chunk(2, -1)
            return nn.functional.gelu(a, approximate=self.approximate) * b

    class RotaryEmbedding(custom_op):
        def forward_native(self, positions, query, key=None):
            return "native", positions, query, key

    class Llama3RotaryEmbedding(RotaryEmbedding):
        pass

    class GateLinear(custom_op):
        def __init__(
            self,
            input_size,
            output_size,
            bias=False,
            out_dtype=None,
            params_dtype=None,
            skip_bias_add=False,
            return_bias=True,
        ):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=params_dtype), requires_grad=False)
            self.bias = (
                nn.Parameter(torch.empty(output_size, dtype=params_dtype), requires_grad=False) if bias else None
            )
            self.out_dtype, self.skip_bias_add, self.return_bias = out_dtype, skip_bias_add, return_bias

    class UnquantizedFusedMoEMethod(custom_op):
        is_monolithic = False

        def __init__(self, moe):
            super().__init__()
            self.moe = moe

        def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype):
            shapes = {
                "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
                "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
            }
            if self.moe.has_bias:
                shapes |= {"w13_bias": shapes["w13_weight"][:2], "w2_bias": shapes["w2_weight"][:2]}
            for name, shape in shapes.items():
                parameter = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
                layer.register_parameter(name, parameter)

        def process_weights_after_loading(self, layer):
            raise NotImplementedError

    class RoutedExperts(nn.Module):
        """``forward`` is what vLLM's runner does with it."""

        def __init__(self, moe_config, hidden_size, intermediate_size, **options):
            super().__init__()
            for name, value in (ROUTED | options).items():
                setattr(self, name, value)
            self.top_k, self.activation = moe_config.experts_per_token, moe_config.activation
            self.quant_method = UnquantizedFusedMoEMethod(moe_config)
            sizes = {"hidden_size": hidden_size, "intermediate_size_per_partition": intermediate_size}
            self.quant_method.create_weights(
                layer=self, num_experts=moe_config.num_experts, params_dtype=moe_config.in_dtype, **sizes
            )

        def forward(self, x, router_logits):
            assert self.quant_method.is_monolithic
            return self.quant_method.apply_monolithic(layer=self, x=x, router_logits=router_logits, input_ids=None)

    made = RMSNorm, GemmaRMSNorm, SiluAndMul, GeluAndMul, RotaryEmbedding, Llama3RotaryEmbedding
    made += GateLinear, UnquantizedFusedMoEMethod, RoutedExperts
    return {c.__name__: c for c in made}
