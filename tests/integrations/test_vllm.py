"""The plugin of vLLM against stubs: what is registered and when, the bits of its attention, what it refuses."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from cute_kernels import is_installed, reduction, rms_norm
from cute_kernels.integrations import vllm as plugin
from tests.fakes import fake_kernels
from tests.integrations import vllm_stubs
from tests.integrations.vllm_cases import CASES, MIXTURES, backend, check_experts, check_steps, make_mixture

pytestmark = pytest.mark.filterwarnings("ignore:install. there is no CUDA device")
BF16 = torch.bfloat16
ROOT = Path(__file__).resolve().parents[2]


def config_of(vllm, **changed):
    """A configuration that is covered, but for what is ``changed``: option="value" in dotted words."""
    custom = sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum.CUSTOM
    options = {
        "attention_config": dict(backend=custom, backend_per_kind={}),
        "compilation_config": dict(mode=vllm_stubs.CompilationMode.NONE, cudagraph_mode=vllm_stubs.CUDAGraphMode.NONE),
        "parallel_config": dict(
            tensor_parallel_size=1, enable_expert_parallel=False, data_parallel_size=1, prefill_context_parallel_size=1
        ),
        "kernel_config": dict(linear_backend="auto", moe_backend="auto"),
        "model_config": dict(
            quantization=None,
            is_moe=True,
            hf_text_config=types.SimpleNamespace(model_type="mixtral"),
            is_hybrid=False,
            is_multimodal_model=False,
        ),
        "lora_config": None,
        "speculative_config": None,
    }
    for name, value in changed.items():
        section, _, option = name.partition("__")
        if option:
            options[section][option] = value
        else:
            options[section] = value
    return types.SimpleNamespace(
        **{k: types.SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in options.items()}
    )


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_registered_unasked(vllm, monkeypatch, value):
    monkeypatch.delenv("CUTE_KERNELS_VLLM")
    if value is not None:
        monkeypatch.setenv("CUTE_KERNELS_VLLM", value)
    plugin.register()
    assert not is_installed() and not vllm.model_executor.custom_op.op_registry_oot
    assert not vllm.v1.attention.backends.registry.AttentionBackendEnum.CUSTOM.is_overridden()
    assert f"{plugin.__name__}.layers" not in sys.modules


def test_the_package_imports_no_vllm():
    code = "import sys, cute_kernels.integrations.vllm as v; v.register(); assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, check=True)


def test_the_entry_point_is_register():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    assert section.startswith(f'cute_kernels = "{plugin.__name__}:{plugin.register.__name__}"')


def test_registers_once(vllm):
    plugin.register()
    out_of_tree = dict(vllm.model_executor.custom_op.op_registry_oot)
    plugin.register()
    assert vllm.model_executor.custom_op.op_registry_oot == out_of_tree
    names = {"RMSNorm", "GemmaRMSNorm", "SiluAndMul", "GeluAndMul", "RotaryEmbedding", "Llama3RotaryEmbedding"}
    names |= {"GateLinear", "UnquantizedFusedMoEMethod"}
    assert set(out_of_tree) == names and is_installed()
    assert backend().get_name() == "CUSTOM" and backend().forward_includes_kv_cache_update is False


def test_refuses_what_others_have_registered(vllm, monkeypatch):
    registry = vllm.v1.attention.backends.registry
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "other.Backend")
    with pytest.raises(RuntimeError, match="CUSTOM is registered already: other.Backend"):
        plugin.register()
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, plugin.BACKEND)
    monkeypatch.setitem(vllm.model_executor.custom_op.op_registry_oot, "SiluAndMul", object)
    with pytest.raises(RuntimeError, match="SiluAndMul is registered out of tree already"):
        plugin.register()
    assert set(vllm.model_executor.custom_op.op_registry_oot) == {"SiluAndMul"} and not is_installed()


def test_refuses_other_modes_and_values(vllm, monkeypatch):
    vllm.envs.VLLM_BATCH_INVARIANT = True
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT must be 0"):
        plugin.register()
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "yes")
    with pytest.raises(ValueError, match="CUTE_KERNELS_VLLM must be 0 or 1, got 'yes'"):
        plugin.register()


def test_names_the_version_it_was_written_against(vllm):
    vllm.__version__ = "0.34.0"
    with pytest.warns(UserWarning, match="written against vLLM 0.33.0, this is 0.34.0"):
        plugin.register()


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_bits_of_the_whole_sequence(vllm, generator, case):
    plugin.register()
    with fake_kernels(), torch.inference_mode():
        check_steps(case, generator)


def test_a_profiling_run_gets_zeros(vllm):
    plugin.register()
    out = torch.ones(2, 4, 64, dtype=BF16)
    impl = backend().get_impl_cls()(4, 64, 0.2, 2)
    impl.forward(None, out, out, out, torch.empty(0), None, output=out)
    assert not out.any()


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("alibi_slopes", [1.0], "alibi_slopes must be None"),
        ("kv_cache_dtype", "fp8_e4m3", "kv_cache_dtype must be of auto, float16, bfloat16, got fp8_e4m3"),
        ("attn_type", "encoder_only", "attn_type must be decoder, got encoder_only"),
        ("attn_type", "encoder_decoder", "attn_type must be decoder, got encoder_decoder"),
    ],
)
def test_attention_refuses(vllm, option, value, name):
    plugin.register()
    with pytest.raises(ValueError, match=name):
        backend().get_impl_cls()(4, 64, 0.2, 2, **{option: value})


def test_attention_refuses_in_a_step(vllm):
    plugin.register()
    impl, x = backend().get_impl_cls()(4, 64, 0.2, 2), torch.ones(1, 4, 64)
    with pytest.raises(ValueError, match="output_scale must be None"):
        impl.forward(None, x, x, x, x, None, output=x, output_scale=x)
    builder = backend().get_builder_cls()(None, [], None, torch.device("cpu"))
    with pytest.raises(ValueError, match="causal must be True, got False"):
        builder.build(0, types.SimpleNamespace(causal=False))


def test_backend_says_what_it_takes(vllm):
    plugin.register()
    found = backend()
    sizes = [d for d in range(512) if found.supports_head_size(d)]
    assert sizes == list(range(8, 257, 8))
    assert found.get_supported_kernel_block_sizes() == [16, 32, 64, vllm_stubs.MultipleOf(128)]
    majors = [m for m in range(7, 13) if found.supports_compute_capability(types.SimpleNamespace(major=m))]
    assert majors == [9]
    assert found.supports_combination(64, BF16, "bfloat16", 16) is None
    assert "kv_cache_dtype must be auto" in found.supports_combination(64, BF16, "float16", 16)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("attention_config__backend", None),
        ("attention_config__backend_per_kind", {"full_attention": "FLASH_ATTN"}),
        ("compilation_config__mode", vllm_stubs.CompilationMode.VLLM_COMPILE),
        ("compilation_config__cudagraph_mode", vllm_stubs.CUDAGraphMode.FULL),
        ("parallel_config__tensor_parallel_size", 2),
        ("kernel_config__linear_backend", "flashinfer_cutedsl"),
        ("lora_config", "a LoRA"),
        ("speculative_config", "a draft"),
        ("model_config__quantization", "fp8"),
        ("parallel_config__enable_expert_parallel", True),
        ("parallel_config__data_parallel_size", 2),
        ("parallel_config__prefill_context_parallel_size", 2),
        ("kernel_config__moe_backend", "flashinfer_trtllm"),
        ("model_config__is_hybrid", True),
        ("model_config__is_multimodal_model", True),
    ],
)
def test_a_model_that_is_not_covered_is_an_error(vllm, option, value):
    plugin.register()
    vllm.config.current = config_of(vllm)
    norms = vllm.model_executor.layers.layernorm
    make = (
        lambda: norms.RMSNorm(8),
        lambda: norms.GemmaRMSNorm(8),
        lambda: backend().get_impl_cls()(4, 64, 0.2, 2),
        lambda: make_mixture("mixtral", torch.Generator()),
        lambda: vllm.model_executor.layers.fused_moe.router.gate_linear.GateLinear(8, 8),
    )
    for build in make:
        build()
    vllm.config.current = config_of(vllm, **{option: value})
    for build in make:
        with pytest.raises(ValueError, match=rf"cute_kernels in vLLM: {option.replace('__', '.')}\b.* must be "):
            build()


def test_experts_of_a_model_that_was_not_read(vllm):
    plugin.register()
    kind = types.SimpleNamespace(model_type="minicpm")
    vllm.config.current = config_of(vllm, model_config__hf_text_config=kind)
    with pytest.raises(ValueError, match="must be of glm4_moe, gpt_oss, mixtral, qwen3_moe, got minicpm"):
        make_mixture("mixtral", torch.Generator())
    options = {"model_config__is_moe": False, "parallel_config__data_parallel_size": 2}
    vllm.config.current = config_of(vllm, model_config__hf_text_config=kind, **options)
    vllm.model_executor.layers.layernorm.RMSNorm(8)


@pytest.mark.parametrize("case", MIXTURES)
def test_experts(vllm, generator, case):
    plugin.register()
    with fake_kernels(), torch.inference_mode():
        check_experts(case, generator)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("custom_routing_function", max, "custom_routing_function must be None"),
        ("hash_indices_table", "a table", "hash_indices_table must be None"),
        ("apply_router_weight_on_input", True, "apply_router_weight_on_input must be False"),
        ("swiglu_limit", 7.0, "swiglu_limit must be None"),
        ("swiglu_alpha", 1.7, "swiglu_alpha must be None"),
        ("swiglu_beta", 1.0, "swiglu_beta must be None"),
        ("scoring_func", "sqrtsoftplus", "scoring_func must be softmax or sigmoid, got sqrtsoftplus"),
        ("e_score_correction_bias", torch.zeros(8), "scoring_func with e_score_correction_bias must be sigmoid"),
        ("routed_scaling_factor", 2.0, "routed_scaling_factor without e_score_correction_bias must be 1.0"),
    ],
)
def test_layers_of_experts_refuse(vllm, option, value, message):
    plugin.register()
    layer = vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts
    with pytest.raises(ValueError, match=message):
        layer(vllm_stubs.FusedMoEConfig(), 64, 48, **{option: value})


def test_experts_refuse(vllm):
    plugin.register()
    layer, config = vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts, vllm_stubs.FusedMoEConfig
    with pytest.raises(ValueError, match="activation must be of silu, swigluoai, got gelu"):
        layer(config(activation=vllm_stubs.MoEActivation.GELU), 64, 48)
    with pytest.raises(ValueError, match="require_decomposed_backend must be False, got True"):
        layer(config(require_decomposed_backend=True), 64, 48)
    groups = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
    with pytest.raises(ValueError, match=r"without e_score_correction_bias must be None, got \(4, 2\)"):
        layer(config(), 64, 48, **groups)
    x = torch.zeros(2, 64, dtype=BF16)
    with pytest.raises(ValueError, match="number of logits of a token must be 8, got 9"):
        layer(config(), 64, 48)(x, torch.zeros(2, 9))


def test_norms(vllm, generator):
    plugin.register()
    norms = vllm.model_executor.layers.layernorm
    x, r = torch.randn(2, 5, 2, 64, generator=generator).to(BF16)
    with fake_kernels(), torch.inference_mode():
        for layer, offset in ((norms.RMSNorm(64, 1e-5, dtype=BF16), 0.0), (norms.GemmaRMSNorm(64, 1e-5), 1.0)):
            layer.weight.copy_(torch.randn(64, generator=generator))
            options = dict(eps=1e-5, weight_offset=offset)
            assert torch.equal(layer(x), rms_norm(x, layer.weight, **options))
            y, h = rms_norm(x, layer.weight, residual=r, return_residual=True, **options)
            assert all(map(torch.equal, layer(x, r), (y, h))) and torch.equal(h, x + r)
        heads = torch.randn(5, 200, generator=generator).to(BF16)[:, :128].view(5, 2, 64)  # of qkv
        assert torch.equal(layer(heads), layer(heads.contiguous()))
        bare = norms.RMSNorm(64, has_weight=False)
        assert torch.equal(bare(x), rms_norm(x, eps=1e-6))
    with pytest.raises(ValueError, match="var_hidden_size must be None or hidden_size 64, got 32"):
        norms.RMSNorm(64, var_hidden_size=32)


def test_elementwise_layers_are_native(vllm, generator):
    plugin.register()
    layers = vllm.model_executor.layers
    x = torch.randn(3, 16, generator=generator).to(BF16)
    assert torch.equal(layers.activation.SiluAndMul()(x), torch.nn.functional.silu(x[:, :8]) * x[:, 8:])
    wanted = torch.nn.functional.gelu(x[:, :8], approximate="tanh") * x[:, 8:]
    assert torch.equal(layers.activation.GeluAndMul("tanh")(x), wanted)
    for cls in (layers.rotary_embedding.RotaryEmbedding, layers.rotary_embedding.Llama3RotaryEmbedding):
        assert cls()(1, 2) == ("native", 1, 2, None)


def test_log_probs(vllm, generator):
    plugin.register()
    logits = torch.randn(3, 100, generator=generator).to(BF16)
    ids = torch.tensor([[1, 2], [3, 4], [99, 0]], dtype=torch.int32)
    wanted = reduction.log_softmax(logits.float()).gather(-1, ids.long())
    for module in (vllm.v1.worker.gpu.sample.logprob, vllm.v1.worker.gpu.sample.prompt_logprob):
        found = module.compute_token_logprobs(logits, ids)
        assert found.dtype is torch.float32 and torch.equal(found, wanted)
