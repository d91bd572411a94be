"""A step of decoding of a Llama, replayed from a CUDA graph: this library's, plain torch's; eager and compiled.

    python -m bench.bench_decode_step                     every case, results printed
    python -m bench.bench_decode_step --filter '[.]16x'   cases whose name matches
    python -m bench.bench_decode_step --save              and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_decode_step --list              the names of the cases

A case's name is decode_step.fwd.<batch>x<context>.bfloat16.llama: a token of each sequence behind as many keys, through
8 layers of the shape of 8B and its output layer. ``cute_kernels`` is a model that ``models.prepare`` has prepared, over
a ``PagedCache``, inside of ``batch_invariant("strict")``; ``compiled`` is the same by ``torch.compile`` with the
backend "cute_kernels". ``torch`` is transformers' own with one call of torch's attention a layer, over keys of just
that length: it needs no mask. ``torch_compile`` is ``torch`` by Inductor, ``batch_invariant_ops`` is ``torch`` in that
package's mode, if it is installed, with attention by products and a softmax. Parameters and keys are the same.
The error is that of the logits against torch's. Bytes are those of parameters and keys.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness
from bench.whole_models import PACKAGES, THEIRS, measured, random_model
from cute_kernels import batch_invariant, models
from cute_kernels.invariance import compiled
from jit_cache import command

LAYERS, HIDDEN, HEADS, PAIRS, FFN, VOCABULARY = 8, 4096, 32, 8, 14336, 128256
CONTEXT, BATCHES = 4096, (1, 16, 128)
PAGE_SIZE = 128
WORST = 0.05  # relative rms of logits, both rounded layer by layer
OURS, COMPILED, TORCH, TORCH_COMPILE = "cute_kernels", "compiled", "torch", "torch_compile"
PROVIDERS = OURS, COMPILED, TORCH, TORCH_COMPILE, THEIRS
BACKENDS: dict[str, Any] = {COMPILED: compiled.backend, TORCH_COMPILE: "inductor"}
PLAIN, IN_GROUPS = "one_call_without_a_mask", "heads_in_groups"  # among transformers' implementations of attention


@dataclass(frozen=True)
class Step:
    """A token of each sequence; ``context``: its keys, the new one among them."""

    batch: int
    context: int = CONTEXT
    directions: tuple[str, ...] = ("fwd",)

    def case(self, direction: str = "fwd") -> harness.Case:
        head = HIDDEN // HEADS
        weights = LAYERS * HIDDEN * (2 * HIDDEN + 2 * head * PAIRS + 3 * FFN) + VOCABULARY * HIDDEN
        keys = 2 * LAYERS * self.batch * self.context * PAIRS * head
        return harness.Case(
            family="decode_step",
            op="decode_step",
            direction=direction,
            shape=f"{self.batch}x{self.context}",
            dtype="bfloat16",
            variant="llama",
            bytes=2 * (weights + keys),
            flops=2 * self.batch * weights + 2 * keys * HEADS // PAIRS,
            goal=1.1,
        )


def steps(quick: bool = False) -> list[Step]:
    return [Step(batch) for batch in (BATCHES[1:2] if quick else BATCHES)]


def attend(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """Attention of one token a sequence, which sees all keys; heads of queries share those of keys."""
    out = F.scaled_dot_product_attention(q, k, v, scale=options["scaling"], enable_gqa=True)
    return out.transpose(1, 2), None


def attend_in_groups(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """The same, heads that share keys as queries of one head: products and a softmax would repeat the keys."""
    out = F.scaled_dot_product_attention(q.squeeze(2).unflatten(1, (k.shape[1], -1)), k, v, scale=options["scaling"])
    return out.flatten(1, 2).unsqueeze(1), None


def make_model(device: str) -> Any:
    """A Llama with random weights, the same for all; it attends by ``attend``."""
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig

    for name, function in ((PLAIN, attend), (IN_GROUPS, attend_in_groups)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda *arguments, **options: None)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=PAIRS,
        max_position_embeddings=2 * CONTEXT,
        attn_implementation=PLAIN,
        tie_word_embeddings=False,
    )
    return random_model(config, device).eval()


def make_keys(step: Step, device: str, layer: int) -> tuple[Tensor, Tensor]:
    """(B, heads of keys, context, D) of a layer, twice."""
    generator = torch.Generator(device).manual_seed(layer)
    shape = step.batch, PAIRS, step.context, HIDDEN // HEADS
    options = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    return torch.randn(shape, **options), torch.randn(shape, **options)


def full_cache(step: Step, device: str) -> Any:
    """A cache of transformers whose last place the new token takes, in each call."""
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin

    class Full(CacheLayerMixin):
        is_sliding = False

        def __init__(self, layer: int) -> None:
            super().__init__()
            self.keys, self.values = make_keys(step, device, layer)
            self.is_initialized = True

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            pass

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return step.context, 0

        def get_seq_length(self) -> int:
            return step.context - 1

        def get_max_length(self) -> int:
            return step.context

    return Cache(layers=[Full(layer) for layer in range(LAYERS)])


def paged_cache(step: Step, model: Any, device: str) -> models.PagedCache:
    """The same keys in pages."""
    cache = models.PagedCache(model.config, step.batch * (step.context // PAGE_SIZE), PAGE_SIZE)
    for i, layer in enumerate(cache.layers):
        keys, values = make_keys(step, device, i)
        layer.lazy_initialization(keys, values)
        for pages, given in ((layer.keys, keys), (layer.values, values)):
            pages.unflatten(0, (-1, step.batch)).copy_(given.unflatten(2, (-1, PAGE_SIZE)).permute(2, 0, 3, 1, 4))
    return cache


class Shared:
    """Models and their keys, of which there is not room for one of each provider; made when asked for."""

    def __init__(self, step: Step, device: str) -> None:
        self.step, self.device = step, device

    @functools.cached_property
    def plain(self) -> tuple[Any, Any]:
        return make_model(self.device), full_cache(self.step, self.device)

    @functools.cached_property
    def in_groups(self) -> tuple[Any, Any]:
        """``plain`` by ``attend_in_groups``: the same parameters, the same keys."""
        model, cache = self.plain
        model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        model.set_attn_implementation(IN_GROUPS)
        return model, cache

    @functools.cached_property
    def prepared(self) -> tuple[Any, models.PagedCache]:
        model = models.prepare(make_model(self.device))
        cache = paged_cache(self.step, model, self.device)
        cache.fill()
        return model, cache


def make_call(shared: Shared, provider: str) -> Callable[[], tuple[Tensor]]:
    """A step, which returns the logits."""
    step, device = shared.step, shared.device
    generator = torch.Generator(device).manual_seed(harness.seed("decode_step"))
    tokens = torch.randint(VOCABULARY, (step.batch, 1), generator=generator, device=device)
    positions = torch.full((step.batch, 1), step.context - 1, device=device)
    ours = provider in (OURS, COMPILED)
    model, cache = shared.prepared if ours else shared.in_groups if provider == THEIRS else shared.plain
    if provider in BACKENDS:
        model = torch.compile(model, backend=BACKENDS[provider])

    @torch.no_grad()
    def call() -> tuple[Tensor]:
        with batch_invariant("strict") if provider == OURS else contextlib.nullcontext():
            if ours:
                for layer in cache.layers:
                    layer.lengths.fill_(step.context - 1)
            options = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
            return (model(input_ids=tokens, **options).logits,)

    return call


def measure_step(
    step: Step, providers: Sequence[str], device: harness.Device, *, repetitions: int, breakdown: bool
) -> harness.Measurement:
    """All providers in turn; one whose logits are wrong is a failure."""
    torch._dynamo.reset()  # or sizes of the case before become symbols
    shared = Shared(step, device.name)
    wanted: list[Tensor] = []  # torch's logits

    def error_of(call: harness.Call) -> dict[str, float]:
        logits = call()[0].float()
        wanted.append(logits)
        return {"logits": ((logits - wanted[0]).square().mean() / wanted[0].square().mean()).sqrt().item()}

    return measured(
        step.case(),
        sorted(providers, key=lambda provider: provider != TORCH),  # torch first
        lambda provider: (make_call(shared, provider), lambda: None),
        device.capture,
        error_of,
        WORST,
        device,
        repetitions,
        breakdown,
    )


def run(cases: Sequence[Step], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return harness.run(
        [(step, [step.case()]) for step in cases],
        lambda step, directions, *rest, **options: [measure_step(step, *rest, **options)],
        providers,
        functools.partial(harness.CudaDevice, shuffled=True),
        packages=PACKAGES,
        **settings,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [step.case().name for step in steps(quick)]

    what = __doc__.splitlines()[0]
    options = harness.parse("decode_step", what, "a batch of 16", PROVIDERS, PROVIDERS, names, arguments)
    if isinstance(options, int):
        return options
    measurements = run(steps(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_decode_step", main))
