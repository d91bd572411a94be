"""A training step of whole models by what attends: this library's attention, or torch's with cuDNN or flash.

    python -m bench.bench_training_step                         every case, results printed
    python -m bench.bench_training_step --filter llama --save   and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_training_step --list                  the names of the cases

A case's name is training_step.fwd_bwd.<layers>x<tokens>x<channels>.bfloat16.<model>. The models: mhc, which is
``nn.MHCTransformer`` with a plain residual; llama, transformers' Llama with 32 heads on 8, its attention implementation
"cute_kernels" or "sdpa". A step is forward and backward of one sequence, without the optimizer. All but attention is
the same. ``torch`` attends by cuDNN, ``torch_flash`` by torch's flash kernels. ``batch_invariant`` is the whole model
under the promise: inside of ``batch_invariant("strict")``, and llama prepared by ``models.prepare``, which replaces its
norms, too. peak is what a step holds at once beside the parameters. The error is the loss's, relative to that of
torch's products and softmax on the same parameters.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import bench_transformer, harness
from bench.bench_transformer import eager, host_us
from cute_kernels import batch_invariant
from cute_kernels.models import prepare, register_transformers
from cute_kernels.nn.attention import Attention
from jit_cache import command

SIZE, QUICK_SIZE = (8, 4096, 4096), (2, 4096, 4096)  # layers, tokens, channels
HEADS, PAIRS, FEED_FORWARD, VOCABULARY = 32, 8, 11008, 1024
WORST_LOSS = 1e-3  # relative; as bench_transformer has it
STRICT = "batch_invariant"
PROVIDERS = {
    "cute_kernels": None,
    STRICT: None,
    "torch": SDPBackend.CUDNN_ATTENTION,
    "torch_flash": SDPBackend.FLASH_ATTENTION,
}
TRUTH = SDPBackend.MATH


@dataclass(frozen=True)
class Step:
    """A step of one sequence."""

    model: str  # "mhc" or "llama"
    layers: int
    tokens: int
    channels: int
    directions: tuple[str, ...] = ("fwd_bwd",)

    def case(self, direction: str = "fwd_bwd") -> harness.Case:
        of_keys = self.channels if self.model == "mhc" else self.channels // HEADS * PAIRS
        weights = self.layers * self.channels * (2 * self.channels + 2 * of_keys + 3 * FEED_FORWARD)
        weights += VOCABULARY * self.channels
        attention = 2 * self.layers * self.tokens**2 * self.channels
        return harness.Case(
            family="training_step",
            op="training_step",
            direction=direction,
            shape=f"{self.layers}x{self.tokens}x{self.channels}",
            dtype="bfloat16",
            variant=self.model,
            bytes=3 * 2 * weights,
            flops=3 * (2 * self.tokens * weights + attention),
        )


def steps(quick: bool = False) -> list[Step]:
    return [Step(model, *(QUICK_SIZE if quick else SIZE)) for model in ("mhc", "llama")]


@contextlib.contextmanager
def attending(backend: SDPBackend | None) -> Iterator[None]:
    """By torch's kernels; None: by this library's."""
    with contextlib.ExitStack() as stack:
        if backend is not None:
            stack.enter_context(mock.patch.object(Attention, "_has_kernel", lambda self, q: False))
            stack.enter_context(sdpa_kernel(backend))
        yield


def make_loss(
    step: Step, device: str, backend: SDPBackend | None, strict: bool = False
) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    """(A model, what its loss is): the same parameters and tokens for all."""
    generator = torch.Generator(device).manual_seed(harness.seed("training_step"))
    tokens, targets = torch.randint(VOCABULARY, (2, 1, step.tokens), generator=generator, device=device)
    torch.manual_seed(0)
    if step.model == "mhc":
        plain = bench_transformer.Step(step.layers, step.tokens, step.channels, streams=0)
        model = bench_transformer.make_model(plain, device)
        return model, lambda: model.loss(tokens, targets)
    from transformers import LlamaConfig, LlamaForCausalLM

    if backend is None:
        register_transformers()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=step.channels,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=step.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=PAIRS,
        max_position_embeddings=step.tokens,
        use_cache=False,
        attn_implementation="cute_kernels" if backend is None else "sdpa",
    )
    with torch.device(device):
        llama = LlamaForCausalLM(config).to(torch.bfloat16)
    if strict:
        prepare(llama)

    def loss() -> Tensor:
        logits = llama(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return llama, loss


def make_call(step: Step, device: str, provider: str) -> tuple[torch.nn.Module, harness.Call]:
    """Forward and backward; returns the loss."""
    backend, strict = PROVIDERS[provider], provider == STRICT
    model, loss_of = make_loss(step, device, backend, strict)

    def call() -> tuple[Tensor]:
        with attending(backend), batch_invariant("strict") if strict else contextlib.nullcontext():
            model.zero_grad(set_to_none=True)
            loss = loss_of()
            loss.backward()
        return (loss.detach(),)

    return model, call


def true_loss(step: Step, device: str) -> Tensor:
    with torch.no_grad(), attending(TRUTH):
        return make_loss(step, device, TRUTH)[1]()


def measure_step(
    step: Step, providers: Sequence[str], device: harness.Device, *, repetitions: int, breakdown: bool
) -> harness.Measurement:
    """All providers in turn, eagerly; one whose loss is wrong is a failure."""
    wanted, found, failures = true_loss(step, device.name), {}, {}
    for provider in providers:
        try:
            model, call = make_call(step, device.name, provider)
            device.warm_up(call)
            error = ((call()[0] - wanted).abs() / wanted).item()
            if not error <= WORST_LOSS:  # NaN, too
                failures[provider] = f"wrong result: loss {error:.1e} > {WORST_LOSS:.1e}"
                continue
            model.zero_grad(set_to_none=True)  # the gradients count
            found[provider] = eager(call), device.peak_bytes(call), host_us(call, device), error
        except Exception as exception:  # a backend that does not take the case
            failures[provider] = harness.describe(exception)
    *times, copies = device.time_us(
        [call for call, *_ in found.values()] + [device.copy(step.case().bytes)], repetitions
    )
    results = {}
    for (provider, (call, peak, host, error)), samples in zip(found.items(), times, strict=True):
        kernels, launches = harness.profiled(call.call, device, provider, failures) if breakdown else ({}, 0)
        results[provider] = harness.Result(
            us=statistics.median(samples),
            us_min=min(samples),
            us_max=max(samples),
            host_us=host,
            peak_bytes=peak,
            error={"loss": error},
            kernels=kernels,
            launches=launches,
        )
    return harness.Measurement(step.case(), statistics.median(copies), results, failures)


def measure_steps(
    case: Step, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    return [measure_step(case, providers, device, **options)]


def run(cases: Sequence[Step], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    selected = [(case, [case.case()]) for case in cases]
    device = functools.partial(harness.CudaDevice, shuffled=True)
    return harness.run(selected, measure_steps, providers, device, **settings)


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [step.case().name for step in steps(quick)]

    what, which = __doc__.splitlines()[0], tuple(PROVIDERS)
    options = harness.parse("training_step", what, "two layers", which, which, names, arguments)
    if isinstance(options, int):
        return options
    measurements = run(steps(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    for measurement in measurements:
        for provider, result in measurement.results.items():
            print(f"{measurement.case.variant} {provider}: peak {result.peak_bytes / 2**20:.0f} MiB")
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_training_step", main))
