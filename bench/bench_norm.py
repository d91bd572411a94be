"""rms_norm and layer_norm, forward and backward, beside torch, torch.compile, quack and Liger.

    python -m bench.bench_norm                                            every case, results printed
    python -m bench.bench_norm --filter 'rms_norm.bwd.*8192' --reps 30    cases whose name matches
    python -m bench.bench_norm --save                                     and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_norm --list                                     the names of the cases

A case's name is op.direction.shape.dtype.variant, like rms_norm.bwd.8192x4096.bfloat16.plain. Variants: plain;
residual (residual added, the sum returned); save_output (backward from y instead of x, ours only: the peers run plain);
inference (no gradient wanted); odd (plain, rows that do not start on 16 bytes); few (plain, few and wide rows).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cute_kernels
from bench import forward_backward, harness
from bench.forward_backward import Calls
from cute_kernels.norm import reference
from jit_cache import command

LARGE = ((32768, 1024), (16384, 2048), (8192, 4096), (4096, 8192), (2048, 16384))
MIDDLE = ((16384, 1024), (8192, 2048), (4096, 4096), (2048, 8192), (1024, 16384))
SMALL = ((8192, 1024), (4096, 2048), (2048, 4096), (1024, 8192), (512, 16384))
GOALS = {  # share of the same-bytes copy's speed, all kernels of the call included
    "fwd": dict.fromkeys(LARGE, 0.97) | dict.fromkeys(MIDDLE, 0.95) | dict.fromkeys(SMALL, 0.92),
    "bwd": dict.fromkeys(LARGE, 0.90) | dict.fromkeys(MIDDLE, 0.82) | dict.fromkeys(SMALL, 0.75),
}
OTHER_WIDTHS = (769, 1536, 2880, 3072, 5120, 6144, 7168, 12288, 32768, 131072)
OTHER_WIDTH_ELEMENTS = 1 << 25
HEAD_SIZES = ((1_000_000, 64), (1_000_000, 128))
ODD_GOAL = 0.85  # in both directions
# Looked at last: the last three of FEW_SHAPES, of ODD_SHAPES 2235 and 10007
ODD_SHAPES = ((134085, 1001), (4194, 32003), (2671, 50257), (885, 151643), (2354, 57001), (1342, 100001))
ODD_SHAPES += ((60001, 2235), (13411, 10007), (2192, 61229))
FEW_SHAPES = ((5, 262144), (1, 131072), (32, 65536), (64, 262144), (16, 32768), (3, 200704), (24, 98304), (50, 40960))
VARIANT_SHAPE = (8192, 4096)
QUICK_SHAPES = ((8192, 4096), (4096, 4096), (2048, 4096))

OPS = ("rms_norm", "layer_norm")
DIRECTIONS = ("fwd", "bwd")
EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}
FLOPS_PER_ELEMENT = {
    ("rms_norm", "fwd"): 4,
    ("rms_norm", "bwd"): 9,
    ("layer_norm", "fwd"): 7,
    ("layer_norm", "bwd"): 13,
}


@dataclass(frozen=True)
class Norm:
    """One op at one size. layer_norm has a bias, rms_norm has none; weights are of the dtype of x."""

    op: str
    rows: int
    cols: int
    dtype: torch.dtype = torch.bfloat16
    variant: str = "plain"

    @property
    def has_bias(self) -> bool:
        return self.op == "layer_norm"

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.cols}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def directions(self) -> tuple[str, ...]:
        return ("fwd",) if self.variant == "inference" else DIRECTIONS

    def case(self, direction: str) -> harness.Case:
        return harness.Case(
            family="norm",
            op=self.op,
            direction=direction,
            shape=self.shape,
            dtype=self.dtype_name,
            variant=self.variant,
            bytes=minimal_bytes(self, direction),
            flops=FLOPS_PER_ELEMENT[self.op, direction] * self.rows * self.cols,
            goal=self.goal(direction),
        )

    def goal(self, direction: str) -> float | None:
        if self.variant == "odd":
            return ODD_GOAL
        is_plain = self.dtype is torch.bfloat16 and self.variant == "plain"
        return GOALS[direction].get((self.rows, self.cols)) if is_plain else None


def minimal_bytes(norm: Norm, direction: str) -> int:
    """The least that must pass through device memory: each input read once, each output and saved tensor written once.

    Forward: x, y (x, residual, their sum and y). Backward: the saved tensor, dy, dx (and the gradient of the returned
    sum); dx is the residual's gradient as well. Besides, per row the saved statistics (rstd; layer_norm's mean unless y
    is saved), per column the parameters and, backward, their gradients.
    """
    size = norm.dtype.itemsize
    streams = {"fwd": 2, "bwd": 3}[direction]
    if norm.variant == "residual":
        streams += {"fwd": 2, "bwd": 1}[direction]
    save_output = norm.variant == "save_output"
    statistics = 0 if norm.variant == "inference" else 2 if norm.op == "layer_norm" and not save_output else 1
    per_column = 1 + norm.has_bias
    if direction == "bwd":
        per_column += 1 + (norm.has_bias and save_output)
    return streams * norm.rows * norm.cols * size + 4 * norm.rows * statistics + per_column * norm.cols * size


def norms(quick: bool = False) -> list[Norm]:
    """Every case, the shapes with a goal first."""
    shapes = QUICK_SHAPES if quick else (*LARGE, *MIDDLE, *SMALL)
    cases = [Norm(op, *shape) for op in OPS for shape in shapes]
    if quick:
        return cases
    others = [(OTHER_WIDTH_ELEMENTS // cols, cols) for cols in OTHER_WIDTHS]
    cases += [Norm(op, *shape) for op in OPS for shape in (*others, *HEAD_SIZES)]
    kinds = {"odd": ODD_SHAPES, "few": FEW_SHAPES}
    cases += [Norm(op, *shape, variant=kind) for kind, its in kinds.items() for op in OPS for shape in its]
    for op in OPS:
        cases += [Norm(op, *VARIANT_SHAPE, variant=variant) for variant in ("residual", "save_output", "inference")]
        cases.append(Norm(op, *VARIANT_SHAPE, dtype=torch.float32))
    return cases


@dataclass(frozen=True)
class Inputs:
    """The inputs of an op's call.

    tensors: x, weight, bias (layer_norm), residual (variant residual), in this order
    grad_outputs: the gradients of y and, if it is returned, of the sum
    """

    tensors: dict[str, Tensor]
    grad_outputs: tuple[Tensor, ...]

    def as_float32(self) -> Inputs:
        tensors = {name: tensor.detach().float().requires_grad_() for name, tensor in self.tensors.items()}
        return Inputs(tensors, tuple(grad.float() for grad in self.grad_outputs))


def make_inputs(norm: Norm, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(
        harness.seed(f"{norm.op}.{norm.shape}.{norm.dtype_name}.{norm.variant}")
    )

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(std).add_(mean).to(norm.dtype)

    full = (norm.rows, norm.cols)
    tensors = {"x": normal(*full), "weight": normal(norm.cols, mean=1.0, std=0.1)}
    if norm.has_bias:
        tensors["bias"] = normal(norm.cols, std=0.1)
    if norm.variant == "residual":
        tensors["residual"] = normal(*full)
    if norm.variant != "inference":
        tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    return Inputs(tensors, tuple(normal(*full) for _ in range(2 if norm.variant == "residual" else 1)))


def fp64_truth(norm: Norm, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """direction -> output's name -> the reference's result, computed in fp64 and rounded to fp32 at its end."""
    exact = inputs.as_float32()
    function = functools.partial(public_function(norm, reference), compute_dtype=torch.float64)
    outputs = _as_tuple(function(**exact.tensors))
    truth = {"fwd": {name: output.detach().double() for name, output in zip(("y", "sum"), outputs, strict=False)}}
    if "bwd" in norm.directions:
        grads = torch.autograd.grad(outputs, list(exact.tensors.values()), exact.grad_outputs)
        names = {"x": "dx", "weight": "dw", "bias": "db", "residual": "dresidual"}
        truth["bwd"] = {names[name]: grad.double() for name, grad in zip(exact.tensors, grads, strict=True)}
    return truth


def public_function(norm: Norm, module: object) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """The op of `cute_kernels` or of its reference with the case's options, called with the inputs by name."""
    options: dict[str, object] = {"eps": EPS[norm.op]}
    if norm.variant == "residual":
        options["return_residual"] = True
    if norm.variant == "save_output":
        options["save"] = "output"
    return functools.partial(getattr(module, norm.op), **options)


# Providers: each takes a case and its inputs and gives the forward call and a factory of the backward call, or None
# if it has no such op.


def _cute_kernels(norm: Norm, inputs: Inputs) -> Calls:
    function = public_function(norm, cute_kernels)
    if norm.variant == "residual":
        return _autograd_calls(lambda *tensors: function(*tensors[:-1], residual=tensors[-1]), inputs)
    return _autograd_calls(function, inputs)


def _torch_function(norm: Norm) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    shape, eps = (norm.cols,), EPS[norm.op]
    if norm.op == "rms_norm":
        if norm.variant == "residual":

            def add_rms_norm(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
                total = x + residual
                return F.rms_norm(total, shape, weight, eps), total

            return add_rms_norm
        return lambda x, weight: F.rms_norm(x, shape, weight, eps)
    if norm.variant == "residual":

        def add_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = x + residual
            return F.layer_norm(total, shape, weight, bias, eps), total

        return add_layer_norm
    return lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps)


def _torch(norm: Norm, inputs: Inputs) -> Calls:
    return _autograd_calls(_torch_function(norm), inputs)


def _torch_compile(norm: Norm, inputs: Inputs) -> Calls:
    # Every case is a program of its own with static sizes: nothing of the last case is left, so no recompilation
    # limit is ever reached (fullgraph makes it an error, not a fall-back to eager). Donated buffers forbid
    # retain_graph, which measuring a backward alone needs.
    from torch._functorch import config

    config.donated_buffer = False
    torch._dynamo.reset()
    return _autograd_calls(torch.compile(_torch_function(norm), dynamic=False, fullgraph=True), inputs)


def _quack(norm: Norm, inputs: Inputs) -> Calls | None:
    import quack

    eps = EPS[norm.op]
    if norm.op == "rms_norm":
        if norm.variant == "residual":
            return _autograd_calls(
                lambda x, weight, residual: quack.rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True), inputs
            )
        return _autograd_calls(lambda x, weight: quack.rmsnorm(x, weight, eps=eps), inputs)
    if norm.variant == "residual":
        return None
    # quack's layer_norm is a pair of functions without autograd and wants fp32 parameters: they are cast here,
    # outside of what is timed.
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    x = inputs.tensors["x"].detach()
    weight, bias = (inputs.tensors[name].detach().float() for name in ("weight", "bias"))
    saves = norm.variant != "inference"

    def forward() -> Sequence[Tensor]:
        outputs = layernorm_fwd(x, weight, bias, eps=eps, return_rstd=saves, return_mean=saves)
        return _as_tuple(outputs)[:1]

    def make_backward() -> harness.Call:
        _, rstd, mean = layernorm_fwd(x, weight, bias, eps=eps, return_rstd=True, return_mean=True)
        return lambda: layernorm_bwd(x, weight, inputs.grad_outputs[0], rstd, mean)

    return forward, make_backward


def _liger(norm: Norm, inputs: Inputs) -> Calls | None:
    eps = EPS[norm.op]
    # in_place=False: by default dx overwrites dy, which is wrong where dy has another reader, and would let repeated
    # calls measure other data.
    if norm.op == "rms_norm":
        if norm.variant == "residual":
            from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

            return _autograd_calls(
                lambda x, weight, residual: LigerFusedAddRMSNormFunction.apply(
                    x, residual, weight, eps, 0.0, "llama", False
                ),
                inputs,
            )
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return _autograd_calls(
            lambda x, weight: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False), inputs
        )
    if norm.variant == "residual":
        return None
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return _autograd_calls(lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, eps), inputs)


PROVIDERS: dict[str, Callable[[Norm, Inputs], Calls | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "torch_compile": _torch_compile,
    "quack": _quack,
    "liger": _liger,
}
PACKAGES = {"quack": ("quack",), "liger": ("liger_kernel",)}  # what a provider imports, where it is not torch


def compile_own_kernels(cases: Iterable[Norm], device: harness.Device) -> None:
    few = (dataclasses.replace(norm, rows=min(norm.rows, 128)) for norm in cases)
    forward_backward.compile_kernels(lambda norm: _cute_kernels(norm, make_inputs(norm, device.name)), few, device)


def measure_norm(
    norm: Norm, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(norm, device.name)
    calls = {provider: functools.partial(PROVIDERS[provider], norm, inputs) for provider in providers}
    return forward_backward.measure(norm, directions, calls, fp64_truth(norm, inputs), device, **options)


def run(cases: Sequence[Norm], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return forward_backward.run(
        cases, measure_norm, providers, packages=PACKAGES, compile_own_kernels=compile_own_kernels, **settings
    )


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(norms(quick))

    options = harness.parse(
        "norm", __doc__.splitlines()[0], "three shapes an op", tuple(PROVIDERS), PROVIDERS, names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(norms(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    return harness.exit_status(measurements)


def _autograd_calls(function: Callable[..., Tensor | Sequence[Tensor]], inputs: Inputs) -> Calls:
    return forward_backward.autograd_calls(function, list(inputs.tensors.values()), inputs.grad_outputs)


def _as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


if __name__ == "__main__":
    sys.exit(command.run("bench_norm", main))
