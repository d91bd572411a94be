"""A training step of whole models: this library's kernels, or torch's with cuDNN or flash; eager and compiled.

    python -m bench.bench_training_step                         every case, results printed
    python -m bench.bench_training_step --filter llama --save   and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_training_step --list                  the names of the cases

A case's name is training_step.fwd_bwd.<layers>x<tokens>x<channels>.bfloat16.<model>. The models: mhc, which is
``nn.MHCTransformer`` with a plain residual; llama, transformers' Llama with 32 heads on 8, its attention implementation
"cute_kernels" or "sdpa"; qwen3_moe, with 128 experts of 768 channels, 8 of a token, whose experts are ``moe.experts``
or transformers' own by torch's ``grouped_mm``. A step is forward and backward of one sequence, without the optimizer.
All but attention and experts is the same. ``torch`` attends by cuDNN, ``torch_flash`` by torch's flash kernels.
``batch_invariant`` is the whole model under the promise: inside of ``batch_invariant("strict")``, and models of
transformers prepared by ``models.prepare``, which replaces their norms, too. ``compiled`` is the same by
``torch.compile`` with the backend "cute_kernels", ``torch_compile`` is ``torch`` by Inductor. ``batch_invariant_ops``
is llama in that package's mode, if it is installed; torch then attends by products and a softmax. It is timed apart, in
turn with all others together. peak is what a step holds at once beside the parameters. The error is the loss's,
relative to that of torch's products and softmax on the same parameters.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import bench_transformer, harness
from bench.bench_transformer import eager
from bench.whole_models import PACKAGES, THEIRS, measured, random_model
from cute_kernels import batch_invariant, moe
from cute_kernels.invariance import compiled
from cute_kernels.models import prepare, register_transformers
from cute_kernels.nn.attention import Attention
from jit_cache import command

SIZE, QUICK_SIZE = (8, 4096, 4096), (2, 4096, 4096)  # layers, tokens, channels
HEADS, PAIRS, FEED_FORWARD, VOCABULARY = 32, 8, 11008, 1024
WORST_LOSS = 1e-3  # relative; as bench_transformer has it
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH = 128, 8, 768
EXPERTS_SIZE, QUICK_EXPERTS_SIZE = (4, 8192, 2048), (1, 8192, 2048)
STRICT, COMPILED = "batch_invariant", "compiled"
PROVIDERS = {
    "cute_kernels": None,
    STRICT: None,
    COMPILED: None,
    "torch": SDPBackend.CUDNN_ATTENTION,
    "torch_flash": SDPBackend.FLASH_ATTENTION,
    "torch_compile": SDPBackend.CUDNN_ATTENTION,
    THEIRS: SDPBackend.MATH,
}
COMPILERS: dict[str, Any] = {COMPILED: compiled.backend, "torch_compile": "inductor"}
TRUTH = SDPBackend.MATH


@dataclass(frozen=True)
class Step:
    """A step of one sequence."""

    model: str  # "mhc", "llama" or "qwen3_moe"
    layers: int
    tokens: int
    channels: int
    directions: tuple[str, ...] = ("fwd_bwd",)

    def case(self, direction: str = "fwd_bwd") -> harness.Case:
        of_keys = self.channels if self.model == "mhc" else self.channels // HEADS * PAIRS
        rest = self.channels * (2 * self.channels + 2 * of_keys)
        mlp = all_mlps = 3 * self.channels * FEED_FORWARD
        if self.model == "qwen3_moe":
            expert = 3 * self.channels * EXPERT_WIDTH
            mlp, all_mlps = EXPERTS_PER_TOKEN * expert, EXPERTS * expert
        head = VOCABULARY * self.channels
        weights, all_weights = (self.layers * (rest + n) + head for n in (mlp, all_mlps))  # of a token; read
        attention = 2 * self.layers * self.tokens**2 * self.channels
        return harness.Case(
            family="training_step",
            op="training_step",
            direction=direction,
            shape=f"{self.layers}x{self.tokens}x{self.channels}",
            dtype="bfloat16",
            variant=self.model,
            bytes=3 * 2 * all_weights,
            flops=3 * (2 * self.tokens * weights + attention),
        )


def steps(quick: bool = False) -> list[Step]:
    dense, experts = (QUICK_SIZE, QUICK_EXPERTS_SIZE) if quick else (SIZE, EXPERTS_SIZE)
    return [Step("mhc", *dense), Step("llama", *dense), Step("qwen3_moe", *experts)]


@contextlib.contextmanager
def attending(backend: SDPBackend | None) -> Iterator[None]:
    """By torch's kernels; None: by this library's."""
    with contextlib.ExitStack() as stack:
        if backend is not None:
            stack.enter_context(mock.patch.object(Attention, "_takes_torchs", lambda self, q: True))
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
    model = random_model(make_config(step, "cute_kernels" if backend is None else "sdpa"), device)
    if strict:
        prepare(model)
    elif backend is None and step.model == "qwen3_moe":
        model.set_experts_implementation("cute_kernels")

    def loss() -> Tensor:
        logits = model(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return model, loss


def make_config(step: Step, attention: str) -> Any:
    from transformers import LlamaConfig, Qwen3MoeConfig

    register_transformers()
    moe.register_with_transformers()
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=step.channels,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=step.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=PAIRS,
        head_dim=step.channels // HEADS,
        max_position_embeddings=step.tokens,
        use_cache=False,
        attn_implementation=attention,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    if step.model == "llama":
        return LlamaConfig(**sizes)
    experts = dict(num_experts=EXPERTS, num_experts_per_tok=EXPERTS_PER_TOKEN, moe_intermediate_size=EXPERT_WIDTH)
    return Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)


def make_call(step: Step, device: str, provider: str) -> tuple[torch.nn.Module, harness.Call]:
    """Forward and backward; returns the loss."""
    backend, strict = PROVIDERS[provider], provider == STRICT
    model, loss_of = make_loss(step, device, backend, provider in (STRICT, COMPILED))
    if provider in COMPILERS:
        loss_of = torch.compile(loss_of, backend=COMPILERS[provider])

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
    if step.model != "llama":  # of experts and of our own operators batch_invariant_ops knows nothing
        providers = [provider for provider in providers if provider != THEIRS]
    wanted = true_loss(step, device.name)

    def make(provider: str) -> tuple[harness.Call, Callable[[], None]]:
        model, call = make_call(step, device.name, provider)
        return call, lambda: model.zero_grad(set_to_none=True)  # the gradients count

    def error_of(call: harness.Call) -> dict[str, float]:
        return {"loss": ((call()[0] - wanted).abs() / wanted).item()}

    return measured(step.case(), providers, make, eager, error_of, WORST_LOSS, device, repetitions, breakdown)


def measure_steps(
    case: Step, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    return [measure_step(case, providers, device, **options)]


def run(cases: Sequence[Step], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    selected = [(case, [case.case()]) for case in cases]
    device = functools.partial(harness.CudaDevice, shuffled=True)
    return harness.run(selected, measure_steps, providers, device, packages=PACKAGES, **settings)


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
