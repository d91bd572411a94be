"""Bad arguments of attention over a cache raise the same, on the CPU, cold, and after a good call."""

import pytest
import torch

from cute_kernels import attention_with_kv_cache, merge_attention
from tests.fakes import fake_kernels

BF16, INT32 = torch.bfloat16, torch.int32
Q = torch.zeros(2, 3, 4, 64, dtype=BF16)
CACHE = torch.zeros(2, 20, 2, 64, dtype=BF16)
PAGES = torch.zeros(5, 16, 2, 64, dtype=BF16)
NEW = torch.zeros(2, 3, 2, 64, dtype=BF16)
LENS = torch.tensor([5, 7], dtype=INT32)
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=INT32)
STARTS = torch.tensor([0, 2, 3], dtype=INT32)


def call(q=Q, k_cache=CACHE, v_cache=None, **options):
    options.setdefault("cache_seqlens", LENS)
    v_cache = k_cache if v_cache is None else v_cache
    return attention_with_kv_cache(q, k_cache, v_cache, **options)


def paged(**options):
    return call(k_cache=options.pop("k_cache", PAGES), page_table=options.pop("page_table", TABLE), **options)


def packed(**options):
    return call(q=Q[0], **{"cu_seqlens_q": STARTS, "max_seqlen_q": 2, **options})


BAD = [
    (lambda: call(q=[1.0]), TypeError, "q must be a torch.Tensor, got list"),
    (lambda: call(q=Q.long()), TypeError, "q must have dtype bfloat16, float16"),
    (lambda: call(q=Q[0]), ValueError, r"q must have shape \(batch, queries, heads, head size\)"),
    (lambda: call(cu_seqlens_q=STARTS), ValueError, r"q must have shape \(all queries"),
    (lambda: call(q=Q[..., :60]), ValueError, "q must have a head size that is a multiple of 8 up to 256, got 60"),
    (lambda: call(q=Q[:1]), ValueError, "q must be of cache_seqlens' 2 sequences, got 1"),
    (lambda: call(q=Q.mT.contiguous().mT), ValueError, "q must have a contiguous last dimension"),
    (lambda: call(k_cache=CACHE.half()), TypeError, "k_cache must have q's dtype torch.bfloat16, got torch.float16"),
    (lambda: call(k_cache=CACHE[0]), ValueError, r"k_cache must have shape \(batch, keys, heads, head size\)"),
    (lambda: call(k_cache=CACHE[..., :32]), ValueError, "k_cache must have q's head size 64, got 32"),
    (lambda: call(k_cache=CACHE[:1]), ValueError, "k_cache must be of cache_seqlens' 2 sequences, got 1"),
    (lambda: call(k_cache=CACHE.repeat(1, 1, 3, 1)), ValueError, "k_cache must have heads that divide q's 4, got 6"),
    (lambda: call(v_cache=CACHE[:, :5]), ValueError, r"v_cache must have shape \(2, 20, 2, head size\)"),
    (lambda: call(cache_seqlens=[5, 7]), TypeError, "cache_seqlens must be a torch.Tensor, got list"),
    (lambda: call(cache_seqlens=LENS.long()), TypeError, "cache_seqlens must have dtype int32, got torch.int64"),
    (lambda: call(cache_seqlens=LENS[None]), ValueError, "cache_seqlens must have 1 dimension, got shape"),
    (lambda: call(cache_seqlens=LENS.repeat(2)[::2]), ValueError, "cache_seqlens must be contiguous"),
    (lambda: paged(page_table=TABLE.long()), TypeError, "page_table must have dtype int32"),
    (lambda: paged(page_table=TABLE[:1]), ValueError, "page_table must be of cache_seqlens' 2 sequences, got 1"),
    (lambda: paged(page_table=TABLE.mT.contiguous().mT), ValueError, "page_table must be contiguous"),
    (
        lambda: paged(k_cache=CACHE),
        ValueError,
        "k_cache must have a page size of 16, 32, 64 or a",
    ),
    (lambda: packed(cu_seqlens_q=STARTS.long()), TypeError, "cu_seqlens_q must have dtype int32"),
    (lambda: packed(cu_seqlens_q=STARTS[:2]), ValueError, r"cu_seqlens_q must have shape \(3,\), got \(2,\)"),
    (lambda: packed(max_seqlen_q=None), ValueError, "max_seqlen_q must be given with cu_seqlens_q"),
    (lambda: packed(max_seqlen_q=2.0), TypeError, "max_seqlen_q must be an int, got 2.0"),
    (lambda: packed(max_seqlen_q=-1), ValueError, "max_seqlen_q must be at least 0, got -1"),
    (lambda: call(max_seqlen_q=3), ValueError, "max_seqlen_q must be None without cu_seqlens_q"),
    (lambda: call(max_seqlen_k=21), ValueError, "max_seqlen_k must be at most the cache's 20, got 21"),
    (lambda: call(k=NEW), ValueError, "v must be given with k"),
    (lambda: call(v=NEW), ValueError, "k must be given with v"),
    (lambda: call(k=NEW[:, :2], v=NEW), ValueError, r"k must have shape \(2, 3, 2, 64\), got \(2, 2, 2, 64\)"),
    (lambda: call(k=NEW, v=NEW.half()), TypeError, "v must have q's dtype"),
    (lambda: call(causal=1), TypeError, "causal must be a bool, got 1"),
    (lambda: call(scale=0), ValueError, "scale must be None or a positive, finite number"),
    (lambda: call(softcap=-1), ValueError, "softcap must be 0, for none, or a positive"),
    (lambda: call(window=3), TypeError, r"window must be None or a pair \(left, right\)"),
    (lambda: call(window=(-2, 0)), ValueError, "window must hold distances of at least 0"),
    (lambda: call(sinks=torch.zeros(3)), ValueError, r"sinks must have shape \(4,\), got \(3,\)"),
    (lambda: call(out=Q.half()), TypeError, "out must have q's dtype"),
    (lambda: call(out=Q[:, :2]), ValueError, r"out must have shape \(2, 3, 4, 64\)"),
    (lambda: call(q=Q.clone().requires_grad_()), ValueError, "q must not require a gradient"),
    (lambda: call(sinks=torch.zeros(4, requires_grad=True)), ValueError, "sinks must not require a gradient"),
    (lambda: call(backend="cuda"), ValueError, "backend must be None or 'reference'"),
    (
        lambda: call(check=True, cache_seqlens=LENS + 20),
        ValueError,
        "cache_seqlens must be at most 20 with new",
    ),
    (lambda: call(check=True, max_seqlen_k=6), ValueError, "cache_seqlens must be at most 6 with new"),
    (lambda: call(check=True, cache_seqlens=-LENS), ValueError, "cache_seqlens must be at most 20"),
    (lambda: paged(check=True, page_table=TABLE + 3), ValueError, "page_table must hold pages from 0 to 4"),
    (lambda: packed(check=True, cu_seqlens_q=STARTS + 1), ValueError, "cu_seqlens_q must ascend from 0 to at most 3"),
    (
        lambda: packed(check=True, max_seqlen_q=1),
        ValueError,
        "max_seqlen_q must be at least 2, of the longest of cu_seqlens_q",
    ),
]
# Arguments that plain torch takes
OF_KERNELS = [
    (lambda: call(q=Q.float(), k_cache=CACHE.float()), TypeError, "q must have dtype bfloat16, float16, got"),
    (lambda: call(q=Q.new_zeros(Q.numel() + 1)[1:].view(Q.shape)), ValueError, "q must start on 16 bytes"),
    (lambda: call(k_cache=torch.zeros(2, 20, 2, 68, dtype=BF16)[..., :64]), ValueError, "k_cache must have strides of"),
    (lambda: call(sinks=torch.zeros(4, dtype=torch.float64)), TypeError, "sinks must have dtype"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_on_the_cpu(call, error, message):
    with pytest.raises(error, match="attention_with_kv_cache: " + message):
        call()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("bad", "error", "message"), [*BAD, *OF_KERNELS])
def test_in_the_kernels_path(bad, error, message, warm):
    with fake_kernels():
        if warm:
            for good in (call, paged, packed):
                good()
        with pytest.raises(error, match="attention_with_kv_cache: " + message):
            bad()


@pytest.mark.parametrize(("call", "error", "message"), OF_KERNELS)
def test_plain_torch_takes_what_the_kernels_do_not(call, error, message):
    call()


LSE = torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        (Q, [LSE], TypeError, "outs must be a list or tuple of tensors, got Tensor"),
        ([], [], ValueError, "outs must hold at least one tensor"),
        ([Q], [LSE, LSE], ValueError, "lses must be as many as outs, 1, got 2"),
        ([Q[0, 0]], [LSE], ValueError, r"outs\[0\] must have shape \(batch, queries, heads, head size\)"),
        ([Q, Q[:1]], [LSE, LSE], ValueError, r"outs\[1\] must have the first one's shape"),
        ([Q, Q.half()], [LSE, LSE], TypeError, r"outs\[1\] must have the first one's dtype"),
        ([Q], [LSE.half()], TypeError, r"lses\[0\] must have dtype float32"),
        ([Q], [LSE.mT], ValueError, r"lses\[0\] must have shape \(2, 4, 3\)"),
    ],
)
def test_merge(outs, lses, error, message):
    with pytest.raises(error, match="merge_attention: " + message):
        merge_attention(outs, lses)
