"""linear_log_prob, forward and backward, beside torch with all logits in memory and the bare products.

    python -m bench.bench_log_prob                                  every case, results printed
    python -m bench.bench_log_prob --filter 'fwd.4096' --reps 30    cases whose name matches
    python -m bench.bench_log_prob --save                           and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_log_prob --list                           the names of the cases

A case's name is op.direction.shape.dtype.variant, like linear_log_prob.bwd.4096x151936x4096.bfloat16.train. The shape
is tokens x vocabulary x width. Variants: train (both results have a gradient), decode (few tokens, forward alone), loss
(the mean of the negated log-probabilities, forward and backward in one call, direction "step"), loss_keeps_logits (the
same, and ours keeps the logits in bf16, as the peers do).

bare_products is no peer: cuBLAS's products alone, that of the logits forward; backward these again, and the two that
their gradients go into; of a step all four. It computes no exponential, and its logits are not counted as memory.
torch: F.linear in bf16, then log_softmax, gather and entropy in fp32. The backwards of torch and torch_compile have the
logits that the forward left, so multiply twice where we do thrice.
Peers that find all gradients of a mean loss in its forward, by three products, are not here: quack 0.6.5's fails under
this DSL, and Liger 0.8.5's asks the GPU for a number, so no graph can hold it. Ours may have another gradient for each
token, as reinforcement learning has, and takes four products, or three with the logits kept.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

import cute_kernels
from bench import forward_backward, harness
from jit_cache import command

TRAIN = ((4096, 32000, 4096), (4096, 151936, 4096), (8192, 128256, 4096))
DECODE = tuple((m, 151936, 4096) for m in (1, 16, 64, 128, 256))
OURS, TORCH, COMPILED, FLOOR = "cute_kernels", "torch", "torch_compile", "bare_products"
KEEPS = "loss_keeps_logits"
UNLISTED = ((5000, 50304, 2048), (2048, 131072, 5120), (12288, 64000, 1536))  # looked at last, tuned for by nobody
DIRECTIONS = {"train": ("fwd", "bwd"), "decode": ("fwd",), "loss": ("step",), KEEPS: ("step",)}
PRODUCTS = {"fwd": 1, "bwd": 3, "step": 4}
GOAL = 0.9  # of the bare product's speed, forward
ROWS = 512  # tokens whose logits are in memory in fp64
STD = 2.0  # of the logits


@dataclass(frozen=True)
class LogProb:
    """One size: m tokens, a vocabulary of v, x of width k."""

    m: int
    v: int
    k: int
    variant: str = "train"

    def case(self, direction: str) -> harness.Case:
        inputs = self.m * self.k + self.v * self.k
        return harness.Case(
            family="log_prob",
            op="linear_log_prob",
            direction=direction,
            shape=f"{self.m}x{self.v}x{self.k}",
            dtype="bfloat16",
            variant=self.variant,
            bytes=2 * inputs * (1 if direction == "fwd" else 2) + 8 * self.m,
            flops=2 * (PRODUCTS[direction] - (self.variant == KEEPS)) * self.m * self.v * self.k,
        )

    @property
    def cases(self) -> list[harness.Case]:
        return [self.case(direction) for direction in DIRECTIONS[self.variant]]


def log_probs(quick: bool = False) -> list[LogProb]:
    if quick:
        return [LogProb(*TRAIN[0]), LogProb(*DECODE[2], "decode")]
    shapes = {"train": TRAIN, "loss": TRAIN, KEEPS: (*TRAIN, *UNLISTED), "decode": DECODE}
    return [LogProb(*shape, variant) for variant, its in shapes.items() for shape in its]


@dataclass(frozen=True)
class Inputs:
    """x and weight require grad; g and h: the gradients of log_prob and entropy, of a loss -1 / tokens and 0."""

    x: Tensor
    weight: Tensor
    target: Tensor
    g: Tensor
    h: Tensor


def make_inputs(size: LogProb, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(harness.seed(size.case("fwd").name))

    def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(std).to(dtype)

    x = normal(size.m, size.k, dtype=torch.bfloat16).requires_grad_()
    weight = normal(size.v, size.k, std=STD * size.k**-0.5, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(size.v, (size.m,), generator=generator, device=device)
    if size.variant in ("loss", KEEPS):
        g = torch.full((size.m,), -1.0 / size.m, device=device)
        return Inputs(x, weight, target, g, torch.zeros_like(g))
    return Inputs(x, weight, target, normal(size.m), normal(size.m))


def truth(inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """The results and gradients in fp64, computed ``ROWS`` tokens at a time."""
    weight = inputs.weight.detach().double()
    values, dx, dw = [], [], torch.zeros_like(weight)
    parts = (t.detach().split(ROWS) for t in (inputs.x, inputs.target, inputs.g, inputs.h))
    for x, target, g, h in zip(*parts, strict=True):
        x, target, g, h = x.double(), target[:, None], g.double()[:, None], h.double()[:, None]
        log_p = torch.log_softmax(x @ weight.t(), 1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(1, keepdim=True)
        values.append((log_p.gather(1, target).squeeze(1), entropy.squeeze(1)))
        dz = -p * (g + h * (log_p + entropy))
        dz.scatter_add_(1, target, g)
        dx.append(dz @ weight)
        dw += dz.t() @ x
    log_prob, entropy = (torch.cat(column) for column in zip(*values, strict=True))
    gradients = {"dx": torch.cat(dx), "dw": dw}
    return {
        "fwd": {"log_prob": log_prob, "entropy": entropy},
        "bwd": gradients,
        "step": {"loss": -log_prob.mean(), **gradients},
    }


def with_logits(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """As users of torch write it."""
    log_p = torch.log_softmax(F.linear(x, weight).float(), -1)
    return log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def loss_with_logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def our_loss(x: Tensor, weight: Tensor, target: Tensor, keep_logits: bool = False) -> Tensor:
    return -cute_kernels.linear_log_prob(x, weight, target, keep_logits=keep_logits)[0].mean()


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


FUNCTIONS: Mapping[str, Callable[[], Callable]] = {
    OURS: lambda: cute_kernels.linear_log_prob,
    TORCH: lambda: with_logits,
    COMPILED: lambda: compiled(with_logits),
}
LOSSES: Mapping[str, Callable[[], Callable[..., Tensor]]] = {
    OURS: lambda: our_loss,
    TORCH: lambda: loss_with_logits,
    COMPILED: lambda: compiled(loss_with_logits),
}


def step(loss_function: Callable[..., Tensor], inputs: Inputs) -> Sequence[Tensor]:
    loss = loss_function(inputs.x, inputs.weight, inputs.target)
    return loss.detach(), *torch.autograd.grad(loss, (inputs.x, inputs.weight))


def calls(provider: str, inputs: Inputs, direction: str, variant: str) -> harness.Call:
    if direction == "step":
        loss = LOSSES[provider]()
        if provider == OURS:
            loss = functools.partial(loss, keep_logits=variant == KEEPS)
        return functools.partial(step, loss, inputs)
    function = FUNCTIONS[provider]()
    forward, make_backward = forward_backward.autograd_calls(
        lambda x, weight: function(x, weight, inputs.target), (inputs.x, inputs.weight), (inputs.g, inputs.h)
    )
    return forward if direction == "fwd" else make_backward()


def bare_products(inputs: Inputs, direction: str, variant: str) -> harness.Call:
    x, weight = inputs.x.detach(), inputs.weight.detach()
    logits = x.new_empty(x.shape[0], weight.shape[0])
    outputs = (logits,) if direction == "fwd" else (logits, torch.empty_like(x), torch.empty_like(weight))

    def call() -> Sequence[Tensor]:
        for _ in range(2 if direction == "step" and variant != KEEPS else 1):
            torch.mm(x, weight.t(), out=logits)
        if direction != "fwd":
            torch.mm(logits, weight, out=outputs[1])
            torch.mm(logits.t(), x, out=outputs[2])
        return outputs

    return call


PROVIDERS: Mapping[str, Callable[[Inputs, str, str], harness.Call]] = {
    OURS: functools.partial(calls, OURS),
    TORCH: functools.partial(calls, TORCH),
    COMPILED: functools.partial(calls, COMPILED),
    FLOOR: bare_products,
}


def measure_log_prob(
    size: LogProb, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """Both directions of one size; bare_products is not checked, since it computes less."""
    inputs = make_inputs(size, device.name)
    exact, found = truth(inputs), []
    for direction in directions:
        makers = {name: functools.partial(PROVIDERS[name], inputs, direction, size.variant) for name in providers}
        floors = {FLOOR: makers.pop(FLOOR)} if FLOOR in makers else {}
        checks = {"floors": floors, "least": {"loss": loss_rounding(size, exact)}}
        found.append(harness.measure(size.case(direction), makers, exact[direction], device, **checks, **options))
    return found


def loss_rounding(size: LogProb, exact: Mapping[str, Mapping[str, Tensor]]) -> float:
    """The relative error of a mean over tokens where each one's logit is rounded to bf16; torch's may be 0 by luck."""
    return STD * 2**-9 * (3 * size.m) ** -0.5 / float(exact["step"]["loss"].abs())


def run(cases: Sequence[LogProb], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return harness.run(
        [(size, size.cases) for size in cases],
        measure_log_prob,
        [*providers, TORCH],  # torch's error is the yardstick
        # A product that is limited by power slows what runs after it: another random order each round
        lambda: harness.CudaDevice(warm_up_seconds=0.5, shuffled=True),
        **settings,
    )


def print_table(measurements: Sequence[harness.Measurement]) -> None:
    """One row a case: times, the bare products' over ours, peak memory."""
    table = Table(box=None, pad_edge=False)
    for column in ("direction", "tokens x vocabulary x width"):
        table.add_column(column, no_wrap=True)
    for column in (*PROVIDERS, "products/ours", "goal", "ours MiB", "torch MiB", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for m in measurements:
        times = [harness.number(m.results[p].us if p in m.results else None, ".1f") for p in PROVIDERS]
        ours, bare = m.results.get(OURS), m.results.get(FLOOR)
        ratio = bare.us / ours.us if ours and bare else None
        goal = GOAL if m.case.direction == "fwd" else None
        verdict = "" if goal is None or ratio is None else " ok" if ratio >= goal else " --"
        found = [m.results.get(name) for name in (OURS, TORCH)]
        peaks = [harness.number(result and result.peak_bytes / 2**20, ".0f") for result in found]
        error = harness.number(max(ours.error.values()) if ours else None, ".1e")
        shown = harness.number(ratio, ".3f"), harness.number(goal, ".2f") + verdict
        table.add_row(m.case.direction, m.case.shape, *times, *shown, *peaks, error)
    harness.wide_console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [case.name for size in log_probs(quick) for case in size.cases]

    options = harness.parse(
        "log_prob", __doc__.splitlines()[0], "two sizes", tuple(PROVIDERS), tuple(PROVIDERS), names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(log_probs(options.quick), options.providers, **options.settings)
    print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_log_prob", main))
