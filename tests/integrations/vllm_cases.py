"""Steps of vLLM over its paged cache, and its layers of experts, for fake kernels and for a GPU's."""

import sys
import types

import torch

from cute_kernels import attention, linear, moe
from tests.integrations import vllm_stubs

BF16 = torch.bfloat16
# By model_type: of vLLM's configuration, of its layer, of the router's product
MIXTURES = {
    "mixtral": ({"experts_per_token": 2}, {}, {}),
    "qwen3_moe": ({}, {"renormalize": False}, {}),
    "gpt_oss": (
        {"has_bias": True, "activation": vllm_stubs.MoEActivation.SWIGLUOAI},
        {},
        {"bias": True, "return_bias": False},
    ),
    "glm4_moe": (
        {},
        {"scoring_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1},
        {"params_dtype": torch.float32, "out_dtype": torch.float32},
    ),
    "glm4_moe, groups": (
        {},
        {
            "scoring_func": "sigmoid",
            "use_grouped_topk": True,
            "num_expert_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        {"params_dtype": torch.float32, "out_dtype": torch.float32},
    ),
}
CASES = ("plain", "window", "softcap and sinks", "strided heads")


def backend():
    return sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum.CUSTOM.get_class()


def check_steps(case, generator):
    """Each row of three steps has the bits of ``attention`` of its whole sequence.

    A prompt alone; its next token beside another prompt's chunk; a token beside the chunk's rest.
    """
    heads, pairs, d, size, pages, most = 4, 2, 64, 16, 12, 4
    options = {
        "window": dict(sliding_window=20),
        "softcap and sinks": dict(logits_soft_cap=5.0, sinks=torch.randn(heads, generator=generator)),
    }.get(case, {})
    impl = backend().get_impl_cls()(heads, d, 0.2, pairs, **options)
    builder = backend().get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    layer = types.SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    order = (pages, size, pairs, 2 * d) if case == "strided heads" else (pages, pairs, size, 2 * d)
    cache = torch.full(order, torch.nan, dtype=BF16)  # what no slot was given is not read
    cache = cache.transpose(1, 2) if case == "strided heads" else cache

    lengths = (39, 50)
    q, k, v = ([torch.randn(n, h, d, generator=generator).to(BF16) for n in lengths] for h in (heads, pairs, pairs))
    tables = torch.tensor([[7, 2, 9, 0], [1, 11, 4, 6]], dtype=torch.int32)
    steps = [((0, 0), (37, 0)), ((37, 0), (38, 33)), ((38, 33), (39, 50))]
    found = [[], []]
    for before, after in steps:
        news = [b - a for a, b in zip(before, after, strict=True)]
        live = [s for s in (0, 1) if news[s]]
        tokens, padding = sum(news), 3
        rows = [torch.cat([t[s][before[s] : after[s]] for s in live]) for t in (q, k, v)]
        rows = [torch.cat((r, torch.full((padding, *r.shape[1:]), torch.nan, dtype=BF16))) for r in rows]
        places = [(s, p) for s in live for p in range(before[s], after[s])]
        slots = torch.tensor([int(tables[s, p // size]) * size + p % size for s, p in places])
        starts = torch.tensor([0, *(news[s] for s in live)]).cumsum(0).int()
        step = vllm_stubs.CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([after[s] for s in live], dtype=torch.int32),
            num_reqs=len(live),
            num_actual_tokens=tokens,
            max_query_len=max(news),
            max_seq_len=most * size + 1,  # it may be an upper bound
            block_table_tensor=tables[live],
            slot_mapping=slots,
        )
        metadata = builder.build(0, step)
        out = torch.full((tokens + padding, heads, d), 7.0, dtype=BF16)
        impl.do_kv_cache_update(layer, rows[1], rows[2], cache, slots)
        assert impl.forward(layer, *rows, cache, metadata, output=out) is out
        assert (out[tokens:] == 7.0).all()
        for s, y in zip(live, out[:tokens].split([news[s] for s in live]), strict=True):
            found[s].append(y)
    for s in (0, 1):
        whole = attention(
            *(t[s][None] for t in (q, k, v)),
            causal=True,
            window=(19, 0) if case == "window" else None,
            softcap=options.get("logits_soft_cap", 0.0),
            sinks=options.get("sinks"),
            scale=0.2,
        )
        assert torch.equal(torch.cat(found[s]), whole[0])


def make_mixture(case, generator, hidden=64, width=48):
    """(gate, layer of experts) with random weights."""
    fields, options, of_gate = MIXTURES[case]
    config = vllm_stubs.FusedMoEConfig(**fields)
    if "use_grouped_topk" in options:
        bias = torch.nn.Parameter(torch.randn(config.num_experts, generator=generator), requires_grad=False)
        options = {**options, "e_score_correction_bias": bias}
    layers = sys.modules["vllm.model_executor.layers.fused_moe"]
    gate = layers.router.gate_linear.GateLinear(hidden, config.num_experts, **{"params_dtype": BF16, **of_gate})
    layer = layers.routed_experts.RoutedExperts(config, hidden, width, **options)
    layer.quant_method.process_weights_after_loading(layer)
    for module in (gate, layer):
        for name, parameter in module.named_parameters():
            if name != "e_score_correction_bias":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
    return gate, layer


def check_experts(case, generator):
    """Near fp64's results, and each row in the batch as alone; logits and results with the bits of the library's."""
    gate, layer = make_mixture(case, generator)
    x = torch.randn(37, 64, generator=generator).to(BF16)
    returned = gate(x)
    logits = returned[0] if gate.return_bias else returned
    assert gate.return_bias is (case != "gpt_oss") and logits.dtype is (gate.out_dtype or BF16)
    assert torch.equal(logits, moe.router_logits(x, gate.weight, gate.bias).to(logits.dtype))
    if gate.out_dtype is None:
        assert torch.equal(logits, linear(x, gate.weight, gate.bias))
    found = layer(x, logits)
    assert found.dtype is BF16 and found.shape == x.shape
    of_cpu = {name: parameter.double().cpu() for name, parameter in layer.named_parameters()}
    rows = zip(x.double().cpu(), logits.double().cpu(), strict=True)
    wanted = torch.stack([_token_of_experts(layer, of_cpu, *row) for row in rows])
    torch.testing.assert_close(found.double().cpu(), wanted, atol=0.02, rtol=0.02)
    alone = [layer(x[i : i + 1], logits[i : i + 1]) for i in range(len(x))]
    assert torch.equal(found, torch.cat(alone))


def _token_of_experts(layer, weights, x, logits):
    """(H,) of one token, in fp64 on the CPU, as transformers' models compute it."""
    scores = logits.softmax(0) if layer.scoring_func == "softmax" else logits.sigmoid()
    ranked = scores
    if "e_score_correction_bias" in weights:
        groups = (scores + weights["e_score_correction_bias"]).view(layer.num_expert_group, -1)
        kept = groups.topk(2).values.sum(1).topk(layer.topk_group).indices
        ranked = torch.full_like(groups, -torch.inf).index_copy(0, kept, groups[kept]).flatten()
    chosen = ranked.topk(layer.top_k).indices
    shares = scores[chosen] / (scores[chosen].sum() if layer.renormalize else 1.0) * layer.routed_scaling_factor
    total = torch.zeros_like(x)
    for expert, share in zip(chosen.tolist(), shares, strict=True):
        z = weights["w13_weight"][expert] @ x
        if "w13_bias" in weights:
            g, u = (z + weights["w13_bias"][expert]).view(-1, 2).unbind(1)
            g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
            h, bias = (u + 1.0) * g * torch.sigmoid(1.702 * g), weights["w2_bias"][expert]
        else:
            g, u = z.chunk(2)
            h, bias = torch.nn.functional.silu(g) * u, 0.0
        total += share * (weights["w2_weight"][expert] @ h + bias)
    return total
