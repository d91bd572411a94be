"""``prewarm --config`` compiles all that the model needs: public calls on tensors of the meta device."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_kernels.nn as cnn
from cute_kernels import attention, attention_with_kv_cache, batch_invariant, layer_norm, linear_log_prob, rms_norm
from cute_kernels.attention import launch as of_attention
from cute_kernels.gemm import launch as gemm
from cute_kernels.gemm.config import EPILOGUE_K, choose
from cute_kernels.log_prob import launch as log_prob
from cute_kernels.norm import launch as norm
from cute_kernels.prewarm import Model, _rows, for_config
from cute_kernels.reduction import launch as reduction
from cute_kernels.reduction import log_softmax, softmax
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import meta_target
from jit_cache import recording
from tests.fakes import covered
from tests.marks import first_of
from tests.test_kernel_prewarm import CONFIG, train_and_decode
from tests.test_kernel_prewarm import TOKENS as TOKENS_OF_THE_GPU

BF16, FP32 = torch.bfloat16, torch.float32
OPERATORS = {
    "attention_append": of_attention.attention_append.function,
    "attention_backward": of_attention.attention_backward.function,
    "attention_decode": of_attention.attention_decode.function,
    "attention_forward": of_attention.attention_forward.function,
    "gemm": gemm.gemm.function,  # memory that meta tensors share is none
    "activation_backward": gemm.activation_backward.function,
    "log_prob_forward": log_prob.log_prob_forward.function,
    "log_prob_backward": log_prob.log_prob_backward.function,
    "norm_forward": norm.norm_forward.function,
    "norm_backward": norm.norm_backward.function,
    "softmax_forward": reduction.softmax_forward.function,
    "softmax_backward": reduction.softmax_backward.function,
    "sum_rows": reduction.sum_rows.function,
    "sum_whole": reduction.sum_whole.function,
}
NUM_SMS = {"sm_90a": (132,), "sm_100a": (148, 152)}
# Numbers of tokens: where kernels change, and any
TOKENS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 192, 200, 256, 257, 384, 385, 1000, 4096, 16385, 65536]
random.seed(0)
TOKENS += sorted(int(2 ** random.uniform(0, 18)) for _ in range(12))


@contextlib.contextmanager
def gpu(arch: str, num_sms: int) -> Iterator[list[tuple]]:
    """Within it tensors of the meta device are a GPU's; yields what the builders are asked for."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", property(lambda self: True)))
        library = stack.enter_context(torch.library._scoped_library("cute_kernels", "IMPL"))
        for name, function in OPERATORS.items():
            library.impl(name, function, "Meta", allow_override=True)
        stack.enter_context(meta_target(arch, num_sms))
        stack.enter_context(covered("Meta"))
        launches.forget()
        stack.callback(launches.forget)
        yield stack.enter_context(recording())


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def parameter(*shape: int, dtype: torch.dtype = BF16, main_grad: bool = False) -> nn.Parameter:
    p = nn.Parameter(empty(*shape, dtype=dtype))
    if main_grad:
        p.main_grad = empty(*shape, dtype=FP32)
    return p


QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN3 = {
    **QWEN2,
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "attention_bias": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
}
GEMMA3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
    },
}
OLMO2 = {**QWEN2, "model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
SIZES = {"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064, "norm_dtype": "float32"}


def fields(config: dict) -> dict[str, int]:
    """The sizes that the models below are made of, however a family calls them."""
    config = {**config, **config.get("text_config", {})}
    c = config.get("hidden_size") or config["n_embd"]
    heads = config.get("num_attention_heads") or config.get("n_head", 0)
    d = config.get("head_dim") or (c // heads if heads else 0)
    kv = config.get("num_key_value_heads", heads)
    f = config.get("intermediate_size") or 4 * c
    return {"c": c, "heads": heads, "kv": kv, "d": d, "f": f, "v": config["vocab_size"]}


def train_ours(config: dict, tokens: int, main_grad: bool) -> None:
    """A layer of our modules and functions, forward and backward, then without autograd: every place in a decoder."""
    s = fields(config)
    c, f, v, q, kv = s["c"], s["f"], s["v"], s["heads"] * s["d"], s["kv"] * s["d"]
    norm_dtype = FP32 if config.get("norm_dtype") == "float32" else BF16
    model_type = config.get("model_type", "")
    has_bias = model_type in ("qwen2", "gpt2")
    offset = 1.0 if "gemma" in model_type else 0.0

    def a_linear(x: Tensor, n: int, k: int, bias: bool = has_bias, **options) -> Tensor:
        layer = cnn.Linear(k, n, bias=bias, device="meta", dtype=BF16, **options)
        for p in layer.parameters() if main_grad else ():
            p.main_grad = empty(*p.shape, dtype=FP32)
        return layer(x)

    def a_norm(x: Tensor, residual: Tensor | None = None, n: int = c, **options) -> Tensor | tuple[Tensor, Tensor]:
        weight = parameter(n, dtype=norm_dtype, main_grad=main_grad)
        options |= {"residual": residual, "return_residual": residual is not None, "weight_offset": offset}
        if model_type == "gpt2":
            return layer_norm(x, weight, parameter(n, dtype=norm_dtype, main_grad=main_grad), **options)
        return rms_norm(x, weight, **options)

    def run(x: Tensor, stream: Tensor) -> list[Tensor]:
        results = []
        y = a_norm(x)
        if q:
            heads = a_linear(y, q, c).view(1, tokens, s["heads"], s["d"])
            if model_type == "olmo2":
                heads = a_norm(heads.flatten(2), n=q).view_as(heads)
            heads = a_norm(heads, n=s["d"])
            results += [a_linear(y, kv, c), a_linear(y, q + 2 * kv, c)]
            y = a_linear(heads.flatten(2).squeeze(0), c, q, bias=False)
        for residual in (x, stream):
            y, h = a_norm(y, residual)
            results += [h, a_norm(stream, out_dtype=BF16), a_norm(stream)]
        mlp_bias = model_type == "gpt2"
        gate = a_linear(y, f, c, bias=mlp_bias)
        if config.get("hidden_act"):
            gate = a_linear(y, f, c, bias=mlp_bias, activation=config["hidden_act"])
        results.append(a_linear(y, 2 * f, c, bias=mlp_bias))
        y, _ = a_norm(a_linear(gate * gate, c, f, bias=mlp_bias), stream)  # no gradient comes to the sum
        logits = a_linear(y, v, c, bias=False, out_dtype=FP32)
        results += [logits, a_linear(y, v, c, bias=False)]
        results += [function(logits.to(dtype)) for function in (softmax, log_softmax) for dtype in (BF16, FP32)]
        results += [softmax(results[-1].to(BF16), out_dtype=FP32)]
        target = torch.empty(tokens, dtype=torch.int64, device="meta")
        both = linear_log_prob(y, parameter(v, c, main_grad=main_grad), target)
        return [*results, *both]

    def inputs() -> tuple[Tensor, Tensor]:
        return empty(tokens, c).requires_grad_(), empty(tokens, c, dtype=FP32).requires_grad_()

    results = run(*inputs())
    torch.autograd.backward([sum(r.float().sum() for r in results[:-1])])
    torch.autograd.backward([sum(r.float().sum() for r in run(*inputs()))])
    with torch.no_grad():
        run(*inputs())
        rms = a_norm(empty(tokens, c), empty(tokens, c))
        assert len(rms) == 2


class Conv1D(nn.Module):
    """transformers' own: (K, N) weights."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight, self.bias = parameter(k, n), parameter(n)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], self.weight.shape[1])


def train_torch(config: dict, batch: int, length: int, attends: bool, reduction: str) -> None:
    """A layer of torch's modules, as transformers writes it; in ``batch_invariant``."""
    s = fields(config)
    c, f, v, d = s["c"], s["f"], s["v"], s["d"]
    model_type = config.get("model_type", "")
    norm_dtype = FP32 if config.get("norm_dtype") == "float32" else BF16
    q, kv = s["heads"] * d, s["kv"] * d

    def a_linear(n: int, k: int, bias: bool) -> nn.Module:
        return Conv1D(n, k) if model_type == "gpt2" else nn.Linear(k, n, bias=bias, device="meta", dtype=BF16)

    def a_norm(x: Tensor, n: int = c) -> list[Tensor]:
        weight = parameter(n, dtype=norm_dtype)
        if model_type == "gpt2":
            return [F.layer_norm(x, (n,), weight, parameter(n, dtype=norm_dtype), 1e-5)]
        wide = x.float()
        written_out = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return [written_out.to(x.dtype), F.rms_norm(x, (n,), weight.to(x.dtype), 1e-6)]

    def run(x: Tensor) -> list[Tensor]:
        results = a_norm(x)
        y, has_bias, mlp_bias = results[0], model_type in ("qwen2", "gpt2"), model_type == "gpt2"
        if q:
            query, key, value = (a_linear(n, c, has_bias)(y).view(batch, length, -1, d) for n in (q, kv, kv))
            query = a_norm(query, d)[0]
            if attends:
                query, key, value = (t.transpose(1, 2) for t in (query, key, value))
                key, value = (t.repeat_interleave(s["heads"] // s["kv"], 1) for t in (key, value))
                scores = query @ key.transpose(2, 3)
                p = F.softmax(scores, -1, dtype=FP32).to(BF16)
                with sdpa_kernel(SDPBackend.MATH):
                    results.append(F.scaled_dot_product_attention(query, key, value))
                    if not torch.is_grad_enabled():
                        results.append(F.scaled_dot_product_attention(query[:, :, -1:], key, value))
                query = (p @ value).transpose(1, 2)
            y = a_linear(c, q, False)(query.reshape(batch, length, q))
        y = a_norm(x + y)[0]
        gate = F.silu(a_linear(f, c, mlp_bias)(y)) * a_linear(f, c, mlp_bias)(y)
        y = a_norm(x + a_linear(c, f, mlp_bias)(gate))[0]
        logits = F.linear(y, parameter(v, c))
        target = torch.empty(batch * length, dtype=torch.int64, device="meta")
        loss = F.cross_entropy(logits.float().view(-1, v), target, reduction=reduction)
        return [*results, loss, logits.softmax(-1), logits.float().softmax(-1), logits.log_softmax(-1)]

    x = empty(batch, length, c).requires_grad_()
    with batch_invariant():
        results = run(x)
        torch.autograd.backward(results, [torch.empty_like(r) for r in results])
        with torch.no_grad():
            run(x)


def missing(config: dict, arch: str, run: Callable[[], None]) -> list[str]:
    table = set(for_config(config, arch))
    found: dict = {}
    for num_sms in NUM_SMS[arch]:
        with gpu(arch, num_sms) as jobs:
            run()
        found |= dict.fromkeys(jobs)
    assert found
    return [f"{builder.__name__}{arguments}" for builder, arguments in found if (builder, arguments) not in table]


CONFIGS = {"qwen2": QWEN2, "qwen3": QWEN3, "gemma3": GEMMA3, "olmo2": OLMO2, "gpt2": GPT2, "sizes": SIZES}
CONFIGS["fp32_norms"] = {**QWEN2, "norm_dtype": "float32"}


QUICK = [("qwen2", "sm_90a"), ("gemma3", "sm_90a"), ("gpt2", "sm_90a"), ("qwen2", "sm_100a")]
EVERY = [*((name, "sm_90a") for name in CONFIGS), ("gpt2", "sm_100a")]
CASES = first_of(list(dict.fromkeys(QUICK + EVERY)), len(QUICK))


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_training_and_decode_of_our_modules(name, arch):
    def run():
        for tokens in TOKENS:
            for main_grad in (False, True):
                train_ours(CONFIGS[name], tokens, main_grad)

    assert not missing(CONFIGS[name], arch, run)


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_training_and_decode_of_torch_in_batch_invariant(name, arch):
    def run():
        for tokens in TOKENS:
            train_torch(CONFIGS[name], 1, tokens, False, "none")

    assert not missing(CONFIGS[name], arch, run)


@pytest.mark.parametrize("arch", NUM_SMS)
def test_attention_and_losses_of_the_named_lengths(arch):
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    lengths = [100, 512]
    config = {**QWEN3, "lengths": lengths}

    def run():
        for length in lengths:
            for batch in (1, 3):
                train_torch(config, batch, length, True, "mean")

    assert not missing(config, arch, run)
    assert missing(QWEN3, arch, run)


@pytest.mark.parametrize("arch", NUM_SMS)
def test_the_model_of_the_gpu_test(arch):
    """The GPU tests in mode off, and more numbers of tokens."""
    assert not missing(CONFIG, arch, lambda: train_and_decode("meta", [*TOKENS_OF_THE_GPU, *TOKENS[:-4]], arch))


@pytest.mark.parametrize("head_size", [pytest.param(64, marks=pytest.mark.exhaustive), 128, 80])
def test_attention_as_models_call_it(head_size):
    """Dense, packed, of a cache's used keys and over a cache; with and without a window."""
    window = {**QWEN3, "head_dim": head_size, "sliding_window": 128, "attn_logit_softcapping": 30.0}

    def run(windows=(None, (127, None)), softcap=30.0):
        used, starts = (torch.empty(n, dtype=torch.int32, device="meta") for n in (2, 3))
        for bounds, n in itertools.product(windows, (9, 5000)):
            lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": n, "max_seqlen_k": n}
            q, k = empty(2, n, 16, head_size), empty(2, n, 8, head_size)
            options = {"window": bounds, "softcap": softcap}
            attention(q, k, k, causal=True, **options)
            attention(q, k, k, causal=True, seqused_k=used, **options)
            attention(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), causal=True, **lengths, **options)
            attention_with_kv_cache(q, k, k, cache_seqlens=used, **options)
            attention(q.requires_grad_(), k, k, causal=True, **options).sum().backward()

    assert not missing(window, "sm_90a", run)
    plain = {**QWEN3, "head_dim": head_size, "sliding_window": 128, "use_sliding_window": False}
    assert not missing(plain, "sm_90a", lambda: run((None,), 0.0)) and missing(plain, "sm_90a", run)


def test_fp32_parameters_under_autocast():
    """Biases are fp32 in our modules, and in the activations' dtype in torch's."""
    of_bf16, of_fp32 = (set(for_config({**QWEN2, "torch_dtype": name}, "sm_90a")) for name in ("bfloat16", "float32"))
    gemms = {job for job in of_bf16 if job[0].__name__ == "gemm"}
    assert gemms < {job for job in of_fp32 if job[0].__name__ == "gemm"}


def test_rows_meet_every_choice():
    """The kernels of a weight's products forward and backward, for any number of tokens up to some millions."""
    random.seed(1)
    for n, k in ((512, 3584), (3584, 18944)):
        for arch, num_sms in (("sm_90a", 132), ("sm_100a", 148)):

            def choices(m, n=n, k=k, arch=arch, num_sms=num_sms):
                products = [(m, n, k), (m, k, n), (n, k, m), (n, 1, m)]
                return tuple(
                    choose(arch, *mnk, num_sms, e, 1, a) for mnk in products for e in EPILOGUE_K for a in (True, False)
                )

            met = [choices(m) for m in _rows(choices, (n, k), num_sms)]
            met_of_each = [set(of_one) for of_one in zip(*met, strict=True)]
            for _ in range(300):
                found = choices(int(2 ** random.uniform(0, 22)))
                assert all(one in every for one, every in zip(found, met_of_each, strict=True))


def test_what_a_config_says():
    """The names of each family, and what follows from its model_type."""
    assert Model.of(SIZES) == Model(3584, 18944, vocab_size=152064, norm_dtype=FP32)
    assert Model.of({"hidden_size": 64}) == Model(64)
    qwen2 = Model.of(QWEN2)
    assert (qwen2.head_dim, qwen2.attention_bias, qwen2.mlp_bias, qwen2.activation) == (128, True, False, "silu")
    assert not Model.of(QWEN3).attention_bias and Model.of(QWEN3).widths == {128}
    gemma3 = Model.of(GEMMA3)
    assert (gemma3.hidden_size, gemma3.head_dim, gemma3.weight_offset, gemma3.activation) == (2560, 256, 1.0, None)
    assert Model.of(OLMO2).widths == {128, 4 * 128}  # all heads together are as wide as the model
    gpt2 = Model.of(GPT2)
    assert (gpt2.intermediate_size, gpt2.norm, gpt2.has_conv1d, gpt2.mlp_bias) == (3072, "layer", True, True)
    assert gpt2.num_key_value_heads == 12
    master = Model.of({**QWEN2, "torch_dtype": "float32"})
    assert (master.dtype, master.parameter_dtype, master.norm_dtype) == (BF16, FP32, FP32)
    half = Model.of({**QWEN2, "torch_dtype": None, "dtype": "torch.float16"})
    assert (half.dtype, half.norm_dtype) == (torch.float16, torch.float16)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_size": None}, "config.hidden_size must be a positive integer, got None"),
        ({"hidden_size": 64.0}, "config.hidden_size must be a positive integer, got 64.0"),
        ({"vocab_size": True}, "config.vocab_size must be a positive integer, got True"),
        ({"norm_dtype": "fp32"}, "config.norm_dtype must be of bfloat16, float16, float32, got 'fp32'"),
        ({"lengths": 4096}, "config.lengths must be a list of positive integers, got 4096"),
        ({"num_experts": 64}, "config.num_experts_per_tok must be from 1 to 64, got 0"),
        (
            {"num_experts": 64, "num_experts_per_tok": 2, "intermediate_size": None},
            "config.moe_intermediate_size must be there with experts",
        ),
        ({"is_encoder_decoder": True}, "config must be of a decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_config_is_named(fields, problem):
    with pytest.raises(ValueError, match=problem):
        for_config({**QWEN2, **fields}, "sm_90a")


def test_an_architecture_without_kernels():
    with pytest.raises(ValueError, match="arch must be 'sm_90a'"):
        for_config(QWEN2, "sm_120a")


def test_parts_that_have_no_kernel_are_left_out():
    """A vocabulary beyond softmax's rows, a width that linear_log_prob refuses."""
    names = {builder.__name__ for builder, _ in for_config({"hidden_size": 60, "vocab_size": 262208}, "sm_90a")}
    assert names == {
        "gemm",
        "norm_forward",
        "norm_backward",
        "row_sums",
        "whole_sums",
        "column_sums",
        "segment_sums",
        "grouped_sums",
    }


def test_other_targets_and_real_devices_are_left_alone():
    """Whatever was listed before, and outside nothing is recorded or planned."""
    one = set(for_config(SIZES, "sm_90a"))
    assert {arguments[0] for _, arguments in for_config(SIZES, "sm_100a")} == {"sm_100a"}
    assert set(for_config(SIZES, "sm_90a")) == one
