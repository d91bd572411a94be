"""Steps of vLLM over its paged cache, for fake kernels and for a GPU's."""

import sys
import types

import torch

from cute_kernels import attention
from tests.integrations import vllm_stubs

BF16 = torch.bfloat16
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
