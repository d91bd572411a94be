"""The steps around the products of experts, and whole layers: beside the same steps in torch, and transformers'.

    python -m bench.bench_moe_layer                                    every case, results printed
    python -m bench.bench_moe_layer --filter 'experts.*qwen3'          cases whose name matches
    python -m bench.bench_moe_layer --save                             and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_moe_layer --list                             the names of the cases

A case's name is op.direction.shape.dtype.variant, like experts.bwd.qwen3-30b-8192.bfloat16.random; the shape is a model
of bench_moe and the number of tokens. For permute, combine and swiglu the copy moves the same bytes. ``route`` is the
routing of fp32 logits and the plan. ``experts`` takes logits, routes, and runs the layer; its backward finds the
gradients of x and of both weights, of which that of x is checked. torch has the steps that transformers has: sort,
gather, torch's grouped products, silu and product, weights, the inverse order, a sum. ``transformers`` is its own
function, where it is installed. Layers are of 8192 tokens, of qwen3-30b also of fewer. Errors are against fp64 on 64
tokens, or rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import forward_backward, harness
from bench.bench_moe import MODELS, SKEW
from bench.forward_backward import Calls
from cute_kernels import moe
from jit_cache import command

ROWS = ("permute", "combine", "swiglu")
CHECKED = 64
ROUTED = ("qwen3-30b", "gpt-oss-120b", "deepseek-v3-256")  # with the sizes of these routers
ROUTERS = {"qwen3-30b": (128, 8), "gpt-oss-120b": (128, 4), "deepseek-v3-256": (256, 8)}


@dataclass(frozen=True)
class Step:
    """One step, or the layer, of so many tokens."""

    op: str
    model: str
    tokens: int
    variant: str = "random"

    @property
    def directions(self) -> tuple[str, ...]:
        return ("fwd", "bwd") if self.op in ("swiglu", "experts") else ("fwd",)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(experts, k, H, I)"""
        return (*ROUTERS[self.model], 8, 8) if self.op == "route" else MODELS[self.model]

    def case(self, direction: str) -> harness.Case:
        experts, k, hidden, width = self.sizes
        tokens, rows = self.tokens, self.tokens * k
        products = 6 * rows * hidden * width
        weights = 6 * min(experts, rows) * hidden * width
        moved = {
            "permute": 2 * (tokens + rows) * hidden,
            "combine": 2 * (tokens + rows) * hidden,
            "swiglu": 2 * rows * width * (3 if direction == "fwd" else 5),
            "route": 4 * tokens * (experts + 4 * k),
            "experts": (1 if direction == "fwd" else 2) * weights + 4 * tokens * hidden,
        }[self.op]
        return harness.Case(
            family="moe",
            op=self.op,
            direction=direction,
            shape=f"{self.model}-{self.tokens}",
            dtype="bfloat16",
            variant=self.variant,
            bytes=moved,
            flops=products * (1 if direction == "fwd" else 2) if self.op == "experts" else moved,
            goal=0.85 if self.op in ROWS else None,
        )


def steps(quick: bool = False) -> list[Step]:
    """Every case."""
    if quick:
        return [Step(op, "qwen3-30b", 8192) for op in (*ROWS, "route", "experts")]
    models = "qwen3-30b", "gpt-oss-120b", "deepseek-v3"
    found = [Step(op, model, tokens) for op in ROWS for model in models for tokens in (128, 2048, 8192)]
    found += [Step("route", model, tokens) for model in ROUTED for tokens in (1, 128, 8192)]
    found += [Step("experts", model, 8192) for model in MODELS]
    found += [Step("experts", "qwen3-30b", 8192, "skew")]
    return found + [Step("experts", "qwen3-30b", tokens) for tokens in (1, 8, 32, 128, 2048)]


@dataclass(frozen=True)
class Inputs:
    """x (T, H), logits (T, E), the weights, dy (T, H); of the steps alone rows (R, H) and z (R, 2 I), with dh."""

    x: Tensor
    logits: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor
    rows: Tensor
    z: Tensor
    dh: Tensor


def make_inputs(step: Step, device: str = "cuda") -> Inputs:
    experts, k, hidden, width = step.sizes
    generator = torch.Generator(device).manual_seed(harness.seed(step.case("fwd").name))

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    whole, n = step.op == "experts", step.tokens * k
    sizes = (experts, width, hidden) if whole else (0, 0, 0)
    popularity = SKEW[step.variant] * randn(experts, dtype=torch.float32)
    return Inputs(
        randn(step.tokens, hidden).requires_grad_(whole),
        randn(step.tokens, experts, dtype=torch.float32) + popularity,
        (randn(sizes[0], 2 * sizes[1], sizes[2]) * hidden**-0.5).requires_grad_(whole),
        (randn(sizes[0], sizes[2], sizes[1]) * width**-0.5).requires_grad_(whole),
        randn(step.tokens, hidden),
        randn(n if step.op == "combine" else 0, hidden),
        randn(n if step.op == "swiglu" else 0, 2 * width).requires_grad_(),
        randn(n if step.op == "swiglu" else 0, width),
    )


def places(size: int, device: torch.device) -> Tensor:
    """The indices of the rows that are compared."""
    return torch.linspace(0, size - 1, min(CHECKED, size), device=device).long()


def fp64_truth(step: Step, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """direction -> output's name -> some rows of it."""
    k, device = step.sizes[1], inputs.x.device
    here = places(step.tokens, device)
    if step.op == "route":
        return {"fwd": {"weights": moe.route(inputs.logits[here].double(), k, backend="reference").weights}}
    if step.op == "swiglu":
        z = inputs.z.detach()[places(len(inputs.z), device)].double().requires_grad_()
        h = moe.swiglu(z, backend="reference")
        (dz,) = torch.autograd.grad(h, z, inputs.dh[places(len(inputs.dh), device)].double())
        return {"fwd": {"h": h.detach()}, "bwd": {"dz": dz}}
    routing = moe.route(inputs.logits, k)
    plan = moe.plan(routing.indices, step.sizes[0])
    if step.op == "permute":
        rows = places(len(plan.slots), device)
        return {"fwd": {"rows": inputs.x[plan.slots[rows].long() // k].double()}}
    if step.op == "combine":
        terms = inputs.rows[plan.positions[here].long()].double() * routing.weights[here].double()[:, :, None]
        return {"fwd": {"y": terms.sum(1)}}
    x = inputs.x.detach()[here].double().requires_grad_()
    some = moe.Routing(routing.indices[here], routing.weights[here].double())
    wide = [t.detach().double() for t in (inputs.gate_up, inputs.down)]
    y = moe.experts(x, some, *wide, backend="reference")
    (dx,) = torch.autograd.grad(y, x, inputs.dy[here].double())
    return {"fwd": {"y": y.detach()}, "bwd": {"dx": dx}}


def _calls(step: Step, inputs: Inputs, function: Callable[..., Tensor]) -> Calls:
    """The forward and backward calls of a step; the layer's backward computes all gradients and returns the first."""
    if step.op == "swiglu":
        return forward_backward.autograd_calls(function, (inputs.z,), (inputs.dh,))
    if step.op != "experts":
        return forward_backward.autograd_calls(function, (), ())
    leaves = inputs.x, inputs.gate_up, inputs.down
    forward, make_backward = forward_backward.autograd_calls(function, leaves, (inputs.dy,))

    def make() -> harness.Call:
        call = make_backward()
        return lambda: call()[:1]

    return forward, make


def _cute_kernels(step: Step, inputs: Inputs) -> Calls:
    experts, k, *_ = step.sizes
    routing = moe.route(inputs.logits, k)
    plan = moe.plan(routing.indices, experts)

    def route() -> Tensor:
        found = moe.route(inputs.logits, k)
        moe.plan(found.indices, experts, align=16)
        return found.weights

    functions: dict[str, Callable[..., Tensor]] = {
        "permute": lambda: moe.permute(inputs.x.detach(), plan),
        "combine": lambda: moe.combine(inputs.rows, plan, routing.weights),
        "swiglu": moe.swiglu,
        "route": route,
        "experts": lambda x, gate_up, down: moe.experts(x, moe.route(inputs.logits, k), gate_up, down),
    }
    return _calls(step, inputs, functions[step.op])


def _chosen(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Experts, ascending, and weights, as models have them."""
    weights, indices = logits.softmax(1).topk(k, 1)
    weights = weights / weights.sum(1, keepdim=True)
    indices, order = indices.sort(1)
    return indices, weights.gather(1, order)


def _order(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(slots in the order of experts, the groups' ends)."""
    found, order = indices.flatten().sort(stable=True)
    bounds = torch.arange(1, experts + 1, device=found.device, dtype=found.dtype)
    return order, torch.searchsorted(found, bounds).int()


def _torch_layer(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, k: int) -> Tensor:
    indices, weights = _chosen(logits, k)
    order, ends = _order(indices, len(gate_up))
    z = torch._grouped_mm(x[order // k], gate_up.mT, offs=ends)
    g, u = z.chunk(2, 1)
    y = torch._grouped_mm(F.silu(g) * u, down.mT, offs=ends) * weights.flatten()[order, None]
    return y[order.argsort()].view(len(x), k, -1).sum(1).to(x.dtype)


def _torch(step: Step, inputs: Inputs) -> Calls:
    experts, k, *_ = step.sizes
    indices, weights = _chosen(inputs.logits, k)
    order, _ = _order(indices, experts)
    back = order.argsort()

    def route() -> Tensor:
        indices, weights = _chosen(inputs.logits, k)
        order, ends = _order(indices, experts)
        return weights

    def swiglu(z: Tensor) -> Tensor:
        g, u = z.chunk(2, 1)
        return F.silu(g) * u

    def combine() -> Tensor:
        rows = inputs.rows * weights.flatten()[order, None]
        return rows[back].view(step.tokens, k, -1).sum(1).to(inputs.rows.dtype)

    functions: dict[str, Callable[..., Tensor]] = {
        "permute": lambda: inputs.x.detach()[order // k],
        "combine": combine,
        "swiglu": swiglu,
        "route": route,
        "experts": lambda x, gate_up, down: _torch_layer(x, inputs.logits, gate_up, down, k),
    }
    return _calls(step, inputs, functions[step.op])


def _transformers(step: Step, inputs: Inputs) -> Calls | None:
    if step.op != "experts":
        return None
    from transformers.integrations.moe import grouped_mm_experts_forward

    k = step.sizes[1]

    def apply_gate(z: Tensor) -> Tensor:
        g, u = z.chunk(2, -1)
        return F.silu(g) * u

    def layer(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        module = SimpleNamespace(
            num_experts=len(gate_up), gate_up_proj=gate_up, down_proj=down, has_gate=True, has_bias=False
        )
        module.is_transposed, module._apply_gate = False, apply_gate
        return grouped_mm_experts_forward(module, x, *_chosen(inputs.logits, k))

    return _calls(step, inputs, layer)


PROVIDERS: dict[str, Callable[[Step, Inputs], Calls | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "transformers": _transformers,
}
PACKAGES = {"transformers": ("transformers",)}


def measure_step(
    step: Step, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(step, device.name)
    calls = {provider: functools.partial(PROVIDERS[provider], step, inputs) for provider in providers}
    truth = fp64_truth(step, inputs)
    return forward_backward.measure(
        step, directions, calls, truth, device, sample=lambda t: t[places(len(t), t.device)], **options
    )


def run(cases: Sequence[Step], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    device = functools.partial(harness.CudaDevice, host_batches=1, calls_per_batch=5)  # as in bench_moe
    return forward_backward.run(cases, measure_step, providers, device, **{"packages": PACKAGES, **settings})


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(steps(quick))

    options = harness.parse(
        "moe_layer", __doc__.splitlines()[0], "qwen3-30b, 8192 tokens", tuple(PROVIDERS), PROVIDERS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(steps(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_moe_layer", main))
