"""Every public op as threads call it: the first call of a kernel, of a size, of a process may be any thread's.

All that a call computes with is among its tensors: they may be made on the CPU and moved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

import cute_kernels
from cute_kernels import mhc, moe, reduction, scatter
from tests.mhc import cases as mhc_cases

THREADS, REPEATS = 8, 3
BF16 = torch.bfloat16
Call = tuple[Callable[..., object], tuple[Tensor, ...]]  # a function, and its tensors
Build = Callable[[torch.Generator, int], Call]


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(BF16)


def _of_tensors(function: Callable, *shapes: Callable[[int], tuple[int, ...]]) -> Build:
    """A call of random bf16 tensors of shapes that a size gives."""
    return lambda generator, size: (function, tuple(randn(generator, *shape(size)) for shape in shapes))


def _rows(size: int) -> tuple[int, int]:
    return 13, size


def _vector(size: int) -> tuple[int]:
    return (size,)


def _square(size: int) -> tuple[int, int]:
    return size, size


def _log_prob(generator: torch.Generator, size: int) -> Call:
    target = torch.randint(70, (13,), generator=generator, device=generator.device)
    return cute_kernels.linear_log_prob, (randn(generator, 13, size), randn(generator, 70, size), target)


def _sample(generator: torch.Generator, size: int) -> Call:
    seeds, positions = torch.randint(99, (2, 13), generator=generator, device=generator.device)
    logits = randn(generator, 13, size)
    return lambda x, s, p: cute_kernels.sample(x, seeds=s, positions=p, top_p=0.9), (logits, seeds, positions)


def _embedding(generator: torch.Generator, size: int) -> Call:
    ids = torch.randint(6, (13,), generator=generator, device=generator.device)
    return scatter.embedding, (ids, randn(generator, 7, size))


def _embedding_backward(generator: torch.Generator, size: int) -> Call:
    ids, dy = _embedding(generator, size)[1][0], randn(generator, 13, size)
    return lambda dy, ids: scatter.embedding_backward(dy, ids, 7), (dy, ids)


def _index_sum(generator: torch.Generator, size: int) -> Call:
    ids, x = _embedding(generator, size)[1]
    return scatter.index_sum, (x, ids, randn(generator, 13, size))


def _quantize(op: str, experts: tuple[int, ...] = ()) -> Build:
    return lambda generator, size: (getattr(cute_kernels, op), (randn(generator, *experts, 32 * size, 64),))


def _dequantize(generator: torch.Generator, size: int) -> Call:
    return cute_kernels.dequantize, tuple(cute_kernels.quantize_rowwise(randn(generator, 32 * size, 64)))


def _scales(generator: torch.Generator, size: int) -> Tensor:
    return cute_kernels.quantize_rowwise(randn(generator, 32 * size, 64))[1]


def _to_blocked(generator: torch.Generator, size: int) -> Call:
    return cute_kernels.to_blocked, (_scales(generator, size),)


def _from_blocked(generator: torch.Generator, size: int) -> Call:
    blocked = cute_kernels.to_blocked(_scales(generator, size))
    return lambda t: cute_kernels.from_blocked(t, 32 * size, 2), (blocked,)


def _connection(op: str) -> Build:
    def build(generator: torch.Generator, size: int) -> Call:
        case = mhc_cases.Case(4, size, (13,), norm_weight=True, bias=op in ("expand_combine", "hyper_connection"))
        inputs = mhc_cases.make_inputs(case, generator)
        names = [name for name in mhc_cases.OPERATIONS[op][0] if name in inputs]
        return (
            lambda *tensors: mhc_cases.call(mhc, op, case, dict(zip(names, tensors, strict=True))),
            tuple(inputs[name].detach() for name in names),
        )

    return build


def _dropout_mask(generator: torch.Generator, size: int) -> Call:
    return lambda seed: mhc.dropout_mask(seed, 13, 4 * size, 0.3, seed.device), (
        torch.tensor([5], device=generator.device),
    )


def _in_a_block(generator: torch.Generator, size: int) -> Call:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with cute_kernels.batch_invariant():
            return torch.nn.functional.linear(x, weight).softmax(-1)

    return function, (randn(generator, 13, size), randn(generator, size, size))


def _attention(generator: torch.Generator, size: int) -> Call:
    """Heads of 64 channels, the length is the size."""
    q, k, v = (randn(generator, 2, size, heads, 64) for heads in (4, 2, 2))
    return lambda *tensors: cute_kernels.attention(*tensors, causal=True, window=(size // 2, None)), (q, k, v)


def _attention_with_kv_cache(generator: torch.Generator, size: int) -> Call:
    q, k, v = (randn(generator, 2, n, heads, 64) for n, heads in ((3, 4), (size, 2), (size, 2)))
    used = torch.tensor([size, size // 2], dtype=torch.int32, device=generator.device)
    return (
        lambda q, k, v, used: cute_kernels.attention_with_kv_cache(q, k, v, cache_seqlens=used),
        (q, k, v, used),
    )


def _grouped_mm(generator: torch.Generator, size: int) -> Call:
    a, b = randn(generator, 13, size), randn(generator, 3, size, size)
    return cute_kernels.grouped_mm, (a, b, torch.tensor([5, 5, 13], dtype=torch.int32, device=generator.device))


def _logits(generator: torch.Generator) -> Tensor:
    return randn(generator, 13, 5).float()


def _of_logits(function: Callable) -> Build:
    return lambda generator, size: (function, (_logits(generator),))


def _router_logits(generator: torch.Generator, size: int) -> Call:
    return moe.router_logits, (randn(generator, 13, size), randn(generator, 5, size).float())


def _plan(generator: torch.Generator, size: int) -> Call:
    return lambda indices: moe.plan(indices, 5), (_logits(generator).argsort(1)[:, :2],)


def _plan_for(x: object) -> moe.Plan:
    """A plan of 13 tokens with 2 experts of 5 each, where x is."""
    indices = torch.arange(26, device=getattr(x, "device", None)).view(13, 2) % 5
    return moe.plan(indices, 5)


def _experts(generator: torch.Generator, size: int) -> Call:
    weights = randn(generator, 5, 2 * size, size), randn(generator, 5, size, size)
    tensors = randn(generator, 13, size), _logits(generator), *weights
    return lambda x, logits, *weights: moe.experts(x, moe.route(logits, 2), *weights), tensors


def _merge_attention(generator: torch.Generator, size: int) -> Call:
    outs = [randn(generator, 2, size, 4, 64) for _ in range(2)]
    lses = [randn(generator, 2, 4, size).float() for _ in range(2)]
    return lambda a, b, c, d: cute_kernels.merge_attention([a, b], [c, d]), (*outs, *lses)


# By public name; the sizes that they are built for are multiples of 8
OPS: dict[str, Build] = {
    "attention": _attention,
    "attention_with_kv_cache": _attention_with_kv_cache,
    "merge_attention": _merge_attention,
    "rms_norm": _of_tensors(
        lambda x, w, r: cute_kernels.rms_norm(x, w, residual=r, return_residual=True), _rows, _vector, _rows
    ),
    "layer_norm": _of_tensors(cute_kernels.layer_norm, _rows, _vector, _vector),
    "mm": _of_tensors(cute_kernels.mm, _rows, _square),
    "bmm": _of_tensors(cute_kernels.bmm, lambda size: (3, 13, size), lambda size: (3, size, size)),
    "linear": _of_tensors(lambda x, w, b: cute_kernels.linear(x, w, b, activation="gelu"), _rows, _square, _vector),
    "grouped_mm": _grouped_mm,
    "linear_log_prob": _log_prob,
    "reduction.softmax": _of_tensors(reduction.softmax, _rows),
    "reduction.log_softmax": _of_tensors(reduction.log_softmax, _rows),
    "reduction.sum": _of_tensors(lambda x: reduction.sum(x, 0), _rows),
    "reduction.mean": _of_tensors(lambda x: reduction.mean(x, 1), _rows),
    "reduction.logsumexp": _of_tensors(reduction.logsumexp, _rows),
    "reduction.cumsum": _of_tensors(reduction.cumsum, _rows),
    "reduction.norm": _of_tensors(lambda x: reduction.norm(x, dim=1), _rows),
    "reduction.norms": _of_tensors(lambda x: reduction.norms([x])[0], _rows),
    "reduction.var": _of_tensors(lambda x: reduction.var(x, 1), _rows),
    "reduction.std": _of_tensors(lambda x: reduction.std(x, 1), _rows),
    "sample": _sample,
    "moe.combine": _of_tensors(lambda rows: moe.combine(rows, _plan_for(rows)), lambda size: (26, size)),
    "moe.experts": _experts,
    "moe.load_balancing_loss": _of_logits(lambda t: moe.load_balancing_loss(t, moe.route(t, 2))),
    "moe.permute": _of_tensors(lambda x: moe.permute(x, _plan_for(x)), _rows),
    "moe.plan": _plan,
    "moe.route": _of_logits(lambda t: moe.route(t, 2)),
    "moe.router_logits": _router_logits,
    "moe.swiglu": _of_tensors(moe.swiglu, lambda size: (13, 2 * size)),
    "moe.z_loss": _of_logits(moe.z_loss),
    "scatter.embedding": _embedding,
    "scatter.embedding_backward": _embedding_backward,
    "scatter.index_sum": _index_sum,
    "quantize_rowwise": _quantize("quantize_rowwise"),
    "quantize_colwise": _quantize("quantize_colwise"),
    "quantize_dual": _quantize("quantize_dual"),
    "quantize_3d_colwise": _quantize("quantize_3d_colwise", (2,)),
    "quantize_3d_dual": _quantize("quantize_3d_dual", (2,)),
    "dequantize": _dequantize,
    "to_blocked": _to_blocked,
    "from_blocked": _from_blocked,
    **{f"mhc.{op}": _connection(op) for op in mhc_cases.OPERATIONS},
    "mhc.dropout_mask": _dropout_mask,
    "batch_invariant": _in_a_block,
}

FORWARD_ONLY = {"attention_with_kv_cache", "moe.plan"}
CALLS = [(op, autograd) for op in OPS for autograd in (False, True) if not autograd or op not in FORWARD_ONLY]


def together(work: Callable[[int], object]) -> list:
    """The results of ``work(thread)`` in each of THREADS threads, which begin at the same moment."""
    results: list = [None] * THREADS
    barrier = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        barrier.wait()
        try:
            results[thread] = work(thread)
        except BaseException as error:
            results[thread] = error

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def results_of(call: Call, autograd: bool) -> list[Tensor]:
    """The outputs of a call, and with autograd the gradients of its floating-point tensors."""
    function, tensors = call
    if not autograd:
        with torch.no_grad():
            return _listed(function(*tensors))
    tensors = tuple(t.detach().requires_grad_(t.is_floating_point() and t.itemsize > 1) for t in tensors)
    outputs = _listed(function(*tensors))
    graph = [t for t in outputs if t.requires_grad]
    leaves = [t for t in tensors if t.requires_grad]
    if not graph:
        return outputs
    # Not the gradient of a sum, which vanishes in a softmax
    incoming = [torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape).to(t.dtype) for t in graph]
    gradients = torch.autograd.grad(graph, leaves, incoming, allow_unused=True)
    return [t.detach() for t in (*outputs, *gradients) if t is not None]


def _listed(found: object) -> list[Tensor]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


def first_calls(call: Call, autograd: bool) -> None:
    """All threads make the same call REPEATS times, on streams of their own; their results have the same bits."""

    def work(thread: int) -> list[list[Tensor]]:
        if not call[1][0].is_cuda:
            return [results_of(call, autograd) for _ in range(REPEATS)]
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [results_of(call, autograd) for _ in range(REPEATS)]
            torch.cuda.current_stream().synchronize()
        return found

    found = together(work)
    wanted = results_of(call, autograd)
    for results in found:
        for result in results:
            assert_same(result, wanted)


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Bit by bit, whatever the dtype."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype and a.stride() == b.stride()
        assert torch.equal(_bytes(a), _bytes(b))


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)
