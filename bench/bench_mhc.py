"""Hyper-connections, each op and a whole layer, forward and backward, beside torch, torch.compile, TransformerEngine.

    python -m bench.bench_mhc                                             every case, results printed
    python -m bench.bench_mhc --filter 'aggregate.*streams' --reps 30     cases whose name matches
    python -m bench.bench_mhc --save                                      and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_mhc --list                                      the names of the cases

A case's name is op.direction.shape.dtype.variant, like expand_combine.bwd.8192x4x4096.bfloat16.channels. Shapes are
MxnxC, tokens x streams x channels; the variant is the layout. The ops:
projection, aggregate, expand_combine     as in `cute_kernels.mhc`; backward: every gradient
coefficients_sinkhorn                     both, one after the other; Mxn, no layout (variant plain), fp32
layer                                     `pre` and `expand_combine`, the sublayer's output and the gradient of its
                                          input given; backward: of `hyper_connection`, gradients of x, f, parameters
decode                                    `pre` of few tokens, no gradient wanted

What differs from the other families:
- bytes are the tensors of C channels a token alone, in units of U = M * C * 2, as the goals are stated (n = 4: layer
  14 U and 28 U); decode also reads phi. coefficients_sinkhorn has only small tensors and a goal in microseconds.
- All parameters are fp32, the conventions DeepSeek-V4's in both layouts. torch is the reference, run eagerly, and
  torch.compile compiles it; their fp32 products are tf32, as ours and TransformerEngine's are.
- TransformerEngine's kernels have n = 4, the layout channels and no eps: the results differ by about 1e-5.
- What comes out of a tf32 product may be as wrong as rounding to tf32 makes it (`least_errors`): of three numbers,
  as of alpha's gradient, one provider may be right by luck.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import forward_backward, harness
from bench.forward_backward import Calls
from cute_kernels import mhc
from cute_kernels.mhc import reference
from jit_cache import command

SHAPES = ((8192, 4096), (4096, 7168), (8192, 2560), (16384, 1280), (2048, 5120), (65536, 768))  # (M, C)
OTHER_STREAMS = ((2, 8192, 4096), (8, 4096, 4096))  # (n, M, C)
COEFFICIENT_TOKENS = (8192, 4096)
CHANNEL_LAYERS = SHAPES[:2]
DECODE_TOKENS = (1, 16, 128)
DECODE_CHANNELS = 7168
LAYOUTS = ("streams", "channels")
OPS = ("projection", "aggregate", "expand_combine")
WHOLE_OPS = ("pre", "head", "expand", "contract")  # in one layout at two shapes
DIRECTIONS = ("fwd", "bwd")
VARIANT = mhc.VARIANTS["deepseek_v4"]
OUTPUTS = {
    "projection": ("H", "mean_square"),
    "aggregate": ("layer_input",),
    "expand_combine": ("out",),
    "pre": ("layer_input", "post", "res"),
    "head": ("out",),
    "expand": ("x",),
    "contract": ("h",),
    "coefficients_sinkhorn": ("pre", "post", "res"),
    "layer": ("out", "layer_input"),
    "decode": ("layer_input", "post", "res"),
}

# Our goals: the share of the same-bytes copy's speed, with four streams and with others; times in microseconds;
# kernels of one call.
GOALS = {
    ("projection", "fwd"): (0.85, None),
    ("projection", "bwd"): (0.75, None),
    ("layer", "fwd"): (0.80, None),
    ("layer", "bwd"): (0.80, None),
} | {(op, direction): (0.92, 0.85) for op in ("aggregate", "expand_combine") for direction in DIRECTIONS}
GOALS_US = {("coefficients_sinkhorn", "fwd"): ("8192x4", 15.0), ("coefficients_sinkhorn", "bwd"): ("8192x4", 25.0)}
GOAL_KERNELS = {"decode": 3}

# Relative rms errors that count as rounding: sums of many numbers in fp32, products in tf32 (eps / 4 as of the other
# dtypes), coefficients with and without eps; and how much more of alpha's gradient, three sums that nearly cancel.
FP32_ERROR, TF32_ERROR, EPS_ERROR = 2.0**-20, 2.0**-12, 2.0**-15
ALPHA_FACTOR = 8


@dataclass(frozen=True)
class Connection:
    """One op at one size."""

    op: str
    tokens: int
    channels: int
    n: int = 4
    layout: str = "streams"

    @property
    def N(self) -> int:
        return self.n * self.n + 2 * self.n

    @property
    def K(self) -> int:
        return self.n * self.channels

    @property
    def has_layout(self) -> bool:
        return self.op != "coefficients_sinkhorn"

    @property
    def shape(self) -> str:
        return f"{self.tokens}x{self.n}" + (f"x{self.channels}" if self.has_layout else "")

    @property
    def directions(self) -> tuple[str, ...]:
        return ("fwd",) if self.op == "decode" else DIRECTIONS

    def case(self, direction: str) -> harness.Case:
        return harness.Case(
            family="mhc",
            op=self.op,
            direction=direction,
            shape=self.shape,
            dtype="bfloat16" if self.has_layout else "float32",
            variant=self.layout if self.has_layout else "plain",
            bytes=minimal_bytes(self, direction),
            flops=flops(self, direction),
            goal=share_goal(self.op, direction, self.n),
        )


def share_goal(op: str, direction: str, n: int) -> float | None:
    four, other = GOALS.get((op, direction), (None, None))
    return four if n == 4 else other


def minimal_bytes(connection: Connection, direction: str) -> int:
    """The least that must pass through device memory: streams, f and layer inputs read and written once.

    What is small beside them does not count: H, coefficients, and phi but for decode (of the projection's forward phi
    and H are 2.6 % at 2048x4x5120, 4.4 % at 4096x8x4096).
    A layer reads x once before the sublayer and once after it; its backward reads dout, x and f for the gradients of
    post and res, then x and dlayer_input for that of pre, then dout, x and dlayer_input for dx; it writes df and dx.
    """
    n, tokens = connection.n, connection.tokens
    if connection.op == "coefficients_sinkhorn":
        columns = {"fwd": 2, "bwd": 3}[direction] * connection.N + {"fwd": 1, "bwd": 2}[direction]
        return 4 * columns * tokens
    units = {
        ("projection", "fwd"): n,
        ("projection", "bwd"): 2 * n,
        ("aggregate", "fwd"): n + 1,
        ("aggregate", "bwd"): 2 * n + 1,
        ("expand_combine", "fwd"): 2 * n + 1,
        ("expand_combine", "bwd"): 3 * n + 2,
        ("pre", "fwd"): n + 1,
        ("pre", "bwd"): 2 * n + 1,
        ("head", "fwd"): n + 1,
        ("head", "bwd"): 2 * n + 1,
        ("expand", "fwd"): n + 1,
        ("expand", "bwd"): n + 1,
        ("contract", "fwd"): n + 1,
        ("contract", "bwd"): n + 1,
        ("layer", "fwd"): 3 * n + 2,
        ("layer", "bwd"): 6 * n + 4,
        ("decode", "fwd"): n + 1,
    }[connection.op, direction]
    phi = 4 * connection.N * connection.K if connection.op == "decode" else 0
    return units * tokens * connection.channels * 2 + phi


def flops(connection: Connection, direction: str) -> int:
    """Multiplications and additions of all tokens; a backward computes twice as many, one product for each factor."""
    n = connection.n
    of_op = {
        "projection": 2 * connection.K * (connection.N + 1),
        "coefficients_sinkhorn": 4 * connection.N + 4 * VARIANT.iterations * n * n,
        "aggregate": 2 * connection.K,
        "expand_combine": 2 * connection.K * (n + 1),
    }
    of_op["head"] = 2 * connection.K * (n + 1) + of_op["aggregate"]
    of_op["expand"] = of_op["contract"] = connection.K
    of_op["pre"] = of_op["decode"] = of_op["projection"] + of_op["coefficients_sinkhorn"] + of_op["aggregate"]
    of_op["layer"] = of_op["decode"] + of_op["expand_combine"]
    return {"fwd": 1, "bwd": 2}[direction] * connection.tokens * of_op[connection.op]


def connections(quick: bool = False) -> list[Connection]:
    """Every case: the ops, with four streams and with others, the coefficients, the layer, decode."""
    if quick:
        return [
            *(Connection(op, *SHAPES[0]) for op in (*OPS, *WHOLE_OPS, "coefficients_sinkhorn", "layer")),
            Connection("decode", 16, DECODE_CHANNELS),
        ]
    return [
        *(Connection(op, *shape, layout=layout) for op in OPS for layout in LAYOUTS for shape in SHAPES),
        *(
            Connection(op, tokens, channels, n, layout)
            for op in OPS
            for layout in LAYOUTS
            for n, tokens, channels in OTHER_STREAMS
        ),
        *(Connection(op, *shape) for op in WHOLE_OPS for shape in SHAPES[:2]),
        *(Connection("coefficients_sinkhorn", tokens, SHAPES[0][1]) for tokens in COEFFICIENT_TOKENS),
        *(Connection("layer", *shape) for shape in SHAPES),
        *(Connection("layer", *shape, layout="channels") for shape in CHANNEL_LAYERS),
        *(
            Connection("layer", tokens, channels, n, layout)
            for layout in LAYOUTS
            for n, tokens, channels in OTHER_STREAMS
        ),
        *(Connection("decode", tokens, DECODE_CHANNELS) for tokens in DECODE_TOKENS),
    ]


@dataclass(frozen=True)
class Inputs:
    """The inputs of an op's call.

    tensors: its arguments, in order
    grad_outputs: the gradients of its outputs, in the order of OUTPUTS
    """

    tensors: dict[str, Tensor]
    grad_outputs: tuple[Tensor, ...]

    def as_float64(self) -> Inputs:
        tensors = {name: tensor.detach().double().requires_grad_() for name, tensor in self.tensors.items()}
        return Inputs(tensors, tuple(grad.double() for grad in self.grad_outputs))


def make_inputs(connection: Connection, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(
        harness.seed(f"{connection.op}.{connection.shape}.{connection.layout}")
    )

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(std).add_(mean).to(dtype)

    op, tokens, n = connection.op, connection.tokens, connection.n
    narrow = functools.partial(normal, tokens, connection.channels, dtype=torch.bfloat16)
    sides = (n, connection.channels) if connection.layout == "streams" else (connection.channels, n)
    wide = functools.partial(normal, tokens, *sides, dtype=torch.bfloat16)
    scalings = {
        "alpha": functools.partial(normal, 3, mean=1.0, std=0.1),
        "beta": functools.partial(normal, connection.N, std=0.5),
    }
    parameters = {"phi": functools.partial(normal, connection.N, connection.K, std=connection.K**-0.5), **scalings}
    arguments: dict[str, Callable[[], Tensor]]
    outputs: tuple[Callable[[], Tensor], ...]
    if op == "projection":
        arguments = {"x": wide, "phi": parameters["phi"]}
        outputs = functools.partial(normal, tokens, connection.N), functools.partial(normal, tokens)
    elif op == "aggregate":
        arguments = {"x": wide, "pre": lambda: normal(tokens, n).sigmoid_()}
        outputs = (narrow,)
    elif op == "expand_combine":
        arguments = {
            "f": narrow,
            "post": lambda: normal(tokens, n).sigmoid_().mul_(2.0),
            "x": wide,
            "res": lambda: normal(tokens, n, n).softmax(-1),
        }
        outputs = (wide,)
    elif op == "coefficients_sinkhorn":
        arguments = {
            "H": functools.partial(normal, tokens, connection.N),
            "mean_square": lambda: normal(tokens, mean=1.0, std=0.1).clamp_(min=0.25),
            **scalings,
        }
        coefficient = functools.partial(normal, tokens, n)
        outputs = coefficient, coefficient, functools.partial(normal, tokens, n, n)
    elif op == "pre":
        arguments = {"x": wide, **parameters}
        outputs = narrow, functools.partial(normal, tokens, n), functools.partial(normal, tokens, n, n)
    elif op == "head":
        arguments = {
            "x": wide,
            "fn": functools.partial(normal, n, connection.K, std=connection.K**-0.5),
            "base": functools.partial(normal, n, std=0.5),
            "scale": functools.partial(normal, 1, mean=1.0, std=0.1),
        }
        outputs = (narrow,)
    elif op == "expand":
        arguments, outputs = {"h": narrow}, (wide,)
    elif op == "contract":
        arguments, outputs = {"x": wide}, (narrow,)
    elif op == "layer":
        arguments = {"x": wide, **parameters, "f": narrow}
        outputs = wide, narrow
    else:
        arguments = {"x": wide, **parameters}
        outputs = ()
    wants_gradients = "bwd" in connection.directions
    tensors = {name: make().requires_grad_(wants_gradients) for name, make in arguments.items()}
    return Inputs(tensors, tuple(make() for make in outputs))


def fp64_truth(connection: Connection, inputs: Inputs) -> dict[str, dict[str, Tensor]]:
    """direction -> output's name -> the reference's result in fp64."""
    exact = inputs.as_float64()
    outputs = public_function(connection, reference, compute_dtype=torch.float64)(*exact.tensors.values())
    truth = {
        "fwd": {name: output.detach() for name, output in zip(OUTPUTS[connection.op], outputs, strict=True)},
    }
    if "bwd" in connection.directions:
        grads = torch.autograd.grad(outputs, list(exact.tensors.values()), exact.grad_outputs)
        truth["bwd"] = {f"d{name}": grad for name, grad in zip(exact.tensors, grads, strict=True)}
    return truth


def least_errors(connection: Connection, names: Iterable[str]) -> dict[str, float]:
    """Output's name -> the error that counts as rounding (where rounding to the output's dtype is not more)."""
    exact = ("aggregate", "expand_combine", "expand", "contract")
    least = dict.fromkeys(exact, FP32_ERROR) | {"coefficients_sinkhorn": EPS_ERROR}
    error = least.get(connection.op, TF32_ERROR)
    factors = {"dalpha": ALPHA_FACTOR, "mean_square": FP32_ERROR / error}
    return {name: error * factors.get(name, 1) for name in names}


def public_function(connection: Connection, module: object, **options: object) -> Callable[..., tuple[Tensor, ...]]:
    """The op of `cute_kernels.mhc` or of its reference, called with the inputs in their order."""
    op, layout = connection.op, {"layout": connection.layout}
    combine = functools.partial(module.expand_combine, res_orientation=VARIANT.res_orientation, **layout, **options)
    pre = functools.partial(module.pre, variant=VARIANT, **layout, **options)
    if op == "projection":
        return functools.partial(module.projection, **layout, **options)
    if op == "aggregate":
        return lambda x, pre: (module.aggregate(x, pre, **layout, **options),)
    if op == "expand_combine":
        return lambda f, post, x, res: (combine(f, post, x, res),)
    if op in ("pre", "decode"):
        return pre
    if op == "head":
        head = functools.partial(module.head, variant=VARIANT, **layout, **options)
        return lambda *tensors: (head(*tensors),)
    if op == "expand":
        return lambda h: (module.expand(h, connection.n, **layout, **options),)
    if op == "contract":
        return lambda x: (module.contract(x, **layout, **options),)
    if op == "layer":

        def layer(x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
            layer_input, post, res = pre(x, phi, alpha, beta)
            return combine(f, post, x, res), layer_input

        return layer

    def coefficients_sinkhorn(H: Tensor, mean_square: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        pre, post, logits = module.coefficients(H, mean_square, alpha, beta, connection.n, variant=VARIANT, **options)
        res = module.sinkhorn(
            logits, iterations=VARIANT.iterations, variant=VARIANT.sinkhorn, eps=VARIANT.sinkhorn_eps, **options
        )
        return pre, post, res

    return coefficients_sinkhorn


# Providers: each takes a case and its inputs and gives the forward call and a factory of the backward call, or None
# if it has no such op.


class Given(torch.autograd.Function):
    """A sublayer that takes no time: its output and its input's gradient are given."""

    @staticmethod
    def forward(ctx, layer_input, f, dlayer_input):
        ctx.save_for_backward(dlayer_input)
        return f.view_as(f)

    @staticmethod
    def backward(ctx, df):
        return ctx.saved_tensors[0], df, None


def _cute_kernels(connection: Connection, inputs: Inputs) -> Calls:
    forward, make_backward = _autograd_calls(public_function(connection, mhc), inputs)
    if connection.op != "layer":
        return forward, make_backward
    dout, dlayer_input = inputs.grad_outputs

    def layer(x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor, f: Tensor) -> Tensor:
        return mhc.hyper_connection(
            x,
            lambda layer_input: Given.apply(layer_input, f, dlayer_input),
            phi,
            alpha,
            beta,
            variant=VARIANT,
            layout=connection.layout,
        )

    _, make_backward = forward_backward.autograd_calls(layer, list(inputs.tensors.values()), (dout,))
    return forward, make_backward


def _torch_function(connection: Connection) -> Callable[..., tuple[Tensor, ...]]:
    """The reference in fp32. A layer's x becomes fp32 once, so that its gradient is rounded once."""
    function = public_function(connection, reference)
    if connection.op != "layer":
        return function

    def layer(x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.to(x.dtype) for output in function(x.float(), phi, alpha, beta, f.float()))

    return layer


def _torch(connection: Connection, inputs: Inputs) -> Calls:
    return _autograd_calls(_torch_function(connection), inputs)


def _torch_compile(connection: Connection, inputs: Inputs) -> Calls:
    # As in bench_norm: every case a program of its own with static sizes, and no donated buffers.
    from torch._functorch import config

    config.donated_buffer = False
    torch._dynamo.reset()
    return _autograd_calls(torch.compile(_torch_function(connection), dynamic=False, fullgraph=True), inputs)


TE_COLUMNS = 32  # of H, the coefficients of a token first


def _transformer_engine(connection: Connection, inputs: Inputs) -> Calls | None:
    op, n = connection.op, connection.n
    if op in WHOLE_OPS or n != 4 or (connection.has_layout and connection.layout != "channels"):
        return None
    from transformer_engine.pytorch.triton import mhc as te

    # Residuals are (s, b, C, n) there; here b = 1.
    def pre(x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return te.mhc_generate_mix_and_aggregate(x[:, None], phi, alpha, beta[None])

    def combine(f: Tensor, post: Tensor, x: Tensor, res: Tensor) -> Tensor:
        return te.mhc_fused_expand_combine(f[:, None], None, post, x[:, None], res, n)[:, 0]

    if op == "aggregate":
        return _autograd_calls(lambda x, pre: (te.mhc_fused_aggregate(x[:, None], pre[:, None], n)[:, 0],), inputs)
    if op == "expand_combine":
        return _autograd_calls(lambda f, post, x, res: (combine(f, post[:, None], x, res[:, None]),), inputs)
    if op == "decode":
        return _autograd_calls(lambda *tensors: tuple(output[:, 0] for output in pre(*tensors)), inputs)
    if op == "layer":

        def layer(x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
            layer_input, post, res = pre(x, phi, alpha, beta)
            return combine(f, post, x, res), layer_input[:, 0]

        return _autograd_calls(layer, inputs)
    # Its H has columns that nobody reads: they are left out, or filled with zeros, outside of what is timed.
    padding = (0, TE_COLUMNS - connection.N)
    if op == "projection":
        dH, dmean_square = inputs.grad_outputs
        padded = Inputs(inputs.tensors, (F.pad(dH, padding), dmean_square))
        forward, make_backward = _autograd_calls(lambda x, phi: te.mhc_fused_projection(x.flatten(1), phi), padded)
        return _first_columns(forward, connection.N), make_backward
    H = F.pad(inputs.tensors["H"].detach(), padding).requires_grad_()
    padded = Inputs({**inputs.tensors, "H": H}, inputs.grad_outputs)

    def coefficients_sinkhorn(H: Tensor, mean_square: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        pre, post, logits = te.mhc_fused_scale(H, alpha, beta[None], mean_square, n)
        res = te.mhc_fused_sinkhorn(logits.unflatten(-1, (n, n))[:, None], n, iters=VARIANT.iterations)
        return pre, post, res[:, 0]

    forward, make_backward = _autograd_calls(coefficients_sinkhorn, padded)
    return forward, lambda: _first_columns(make_backward(), connection.N)


PROVIDERS: dict[str, Callable[[Connection, Inputs], Calls | None]] = {
    "cute_kernels": _cute_kernels,
    "torch": _torch,
    "torch_compile": _torch_compile,
    "transformer_engine": _transformer_engine,
}
PACKAGES = {"transformer_engine": ("transformer_engine.pytorch.triton.mhc",)}  # what a provider imports, if not torch


def compile_own_kernels(cases: Iterable[Connection], device: harness.Device) -> None:
    few = (dataclasses.replace(connection, tokens=128) for connection in cases)
    forward_backward.compile_kernels(
        lambda connection: _cute_kernels(connection, make_inputs(connection, device.name)), few, device
    )


def measure_connection(
    connection: Connection, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """One measurement for each direction."""
    inputs = make_inputs(connection, device.name)
    calls = {provider: functools.partial(PROVIDERS[provider], connection, inputs) for provider in providers}
    truth = fp64_truth(connection, inputs)
    least = {direction: least_errors(connection, truth[direction]) for direction in directions}
    return forward_backward.measure(connection, directions, calls, truth, device, least=least, **options)


def run(cases: Sequence[Connection], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    with tf32_products():
        return forward_backward.run(
            cases, measure_connection, providers, packages=PACKAGES, compile_own_kernels=compile_own_kernels, **settings
        )


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """torch's fp32 products in tf32 meanwhile."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Summary:
    """The summary of one op, direction, number of streams and variant; share: the copy's time over ours."""

    op: str
    direction: str
    n: int
    variant: str
    cases: int
    mean: float
    least: float
    least_shape: str
    verdict: str


def summarize(found: Iterable[tuple[str, str, str, str, float, float, int]]) -> list[Summary]:
    """found: (op, direction, variant, shape, our us, the copy's us, our launches) of each case."""
    groups: dict[tuple[str, str, int, str], dict[str, tuple[float, float, int]]] = {}
    for op, direction, variant, shape, *numbers in found:
        groups.setdefault((op, direction, int(shape.split("x")[1]), variant), {})[shape] = tuple(numbers)
    summaries = []
    for (op, direction, n, variant), cases in groups.items():
        share = {shape: copy_us / us for shape, (us, copy_us, _) in cases.items()}
        least_shape = min(share, key=share.__getitem__)
        least = share[least_shape]
        goals = []
        if (goal := share_goal(op, direction, n)) is not None:
            goals.append((f"every >= {goal:.2f}", least >= goal))
        shape, most_us = GOALS_US.get((op, direction), ("", 0.0))
        if shape in cases:
            goals.append((f"{shape} <= {most_us:.0f} us", cases[shape][0] <= most_us))
        launches = max(count for _, _, count in cases.values())  # 0: not looked at
        if op in GOAL_KERNELS and launches:
            goals.append((f"kernels <= {GOAL_KERNELS[op]}", launches <= GOAL_KERNELS[op]))
        verdict = ", ".join(f"{text} {'ok' if met else '--'}" for text, met in goals) or "-"
        mean = statistics.geometric_mean(share.values())
        summaries.append(Summary(op, direction, n, variant, len(cases), mean, least, least_shape, verdict))
    return summaries


def print_summary(measurements: Sequence[harness.Measurement], console: Console | None = None) -> None:
    console = console or harness.wide_console()
    table = Table(title="copy/ours", box=None, pad_edge=False)
    for column in ("op", "dir", "n", "variant", "cases", "geometric mean", "least", "at", "goals"):
        table.add_column(column, no_wrap=True)
    for s in summarize(
        (m.case.op, m.case.direction, m.case.variant, m.case.shape, ours.us, m.copy_us, ours.launches)
        for m in measurements
        if (ours := m.results.get("cute_kernels"))
    ):
        numbers = (str(s.n), s.variant, str(s.cases), f"{s.mean:.3f}", f"{s.least:.3f}", s.least_shape, s.verdict)
        table.add_row(s.op, s.direction, *numbers)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return forward_backward.names(connections(quick))

    options = harness.parse(
        "mhc", __doc__.splitlines()[0], "one shape an op", tuple(PROVIDERS), tuple(PROVIDERS), names, arguments
    )
    if isinstance(options, int):
        return options
    measurements = run(connections(options.quick), options.providers, **options.settings)
    harness.print_table(measurements)
    print_summary(measurements)
    return harness.exit_status(measurements)


def _autograd_calls(function: Callable[..., Sequence[Tensor]], inputs: Inputs) -> Calls:
    return forward_backward.autograd_calls(function, list(inputs.tensors.values()), inputs.grad_outputs)


def _first_columns(call: harness.Call, columns: int) -> harness.Call:
    """The call with that many columns of its first output."""

    def narrowed() -> Sequence[Tensor]:
        first, *others = call()
        return first[:, :columns], *others

    return narrowed


if __name__ == "__main__":
    sys.exit(command.run("bench_mhc", main))
