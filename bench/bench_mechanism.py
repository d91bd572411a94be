"""The host's time of what ``batch_invariant`` puts under torch's operators: of an operator, a block, a token's forward.

    python -m bench.bench_mechanism            every case, results printed
    python -m bench.bench_mechanism --save     and kept in bench/results/<gpu>.jsonl

A case's name is op.fwd.shape.dtype.variant, like mm.fwd.64x64.bfloat16.replaced. Variants: replaced; handed_back (of
integers); untouched (nothing is registered for it); block (begin and end); token (one token through a Llama of 8 layers
of 4096, as transformers writes it, without a cache). Providers: torch (nothing registered); registered (and no block:
each call of a replaced operator is handed back); cute_kernels (inside of a block); batch_invariant_ops (in that
package's mode, if it is installed; of ``block`` the mode's begin and end).

The CPU has other users: a case is measured in rounds, in each of which the providers take turns, and each provider's
least time counts. A provider's us is the host's time, too. On an H200 the first 10 of the 11 cases take 50 s.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from bench import harness
from bench.bench_transformer import host_us
from bench.whole_models import PACKAGES, THEIRS, their_mode
from cute_kernels import batch_invariant, uninstall
from jit_cache import command

ROUNDS = 5
OURS, TORCH, REGISTERED = "cute_kernels", "torch", "registered"
PROVIDERS = TORCH, REGISTERED, OURS, THEIRS
LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCABULARY = 8, 4096, 32, 8, 14336, 32000
BLOCKS = {OURS: batch_invariant, THEIRS: their_mode}
GOALS = {"untouched": 1.0, "token": 1.25}  # our time over torch's, at most


@dataclass(frozen=True)
class MechanismCase:
    """One operator, or a model, in one of the variants."""

    op: str
    variant: str

    @property
    def case(self) -> harness.Case:
        dtype = "int64" if self.variant == "handed_back" else "bfloat16"
        shape = f"{LAYERS}x{HIDDEN}" if self.variant == "token" else "64x64"
        return harness.Case("mechanism", self.op, "fwd", shape, dtype, self.variant, 0, 0)


def mechanism_cases() -> list[MechanismCase]:
    replaced = [MechanismCase(op, "replaced") for op in ("mm", "linear", "softmax", "sum", "layer_norm")]
    others = [("sum", "handed_back"), ("cumprod", "handed_back"), ("mul", "untouched"), ("t", "untouched")]
    return replaced + [MechanismCase(*other) for other in (*others, ("batch_invariant", "block"), ("llama", "token"))]


class Norm(nn.Module):
    """As transformers writes it: six operators."""

    def __init__(self, n: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n, **options))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.size = hidden // heads
        kv = kv_heads * self.size
        self.first, self.second = Norm(hidden, options), Norm(hidden, options)
        shapes = {"q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv), "o": (hidden, hidden)}
        shapes |= {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
        self.products = nn.ModuleDict({name: nn.Linear(k, n, bias=False, **options) for name, (k, n) in shapes.items()})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y, of = self.first(x), self.products
        q, k, v = (of[name](y).unflatten(-1, (-1, self.size)).transpose(1, 2) for name in "qkv")
        q, k = (t * cos + torch.cat((-t[..., self.size // 2 :], t[..., : self.size // 2]), -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + of["o"](y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + of["down"](F.silu(of["gate"](y)) * of["up"](y))


class Llama(nn.Module):
    """A Llama with random weights."""

    def __init__(self, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, device: str):
        super().__init__()
        options = {"device": device, "dtype": torch.bfloat16}
        self.embedding = nn.Embedding(vocabulary, hidden, **options)
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads, ffn, options) for _ in range(layers))
        self.norm, self.head = Norm(hidden, options), nn.Linear(hidden, vocabulary, bias=False, **options)
        self.size = hidden // heads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        frequencies = torch.arange(0, self.size, 2, device=x.device).float().mul(-9.2 / self.size).exp()
        angles = torch.arange(tokens.shape[1], device=x.device).float()[:, None] * frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def make_call(mechanism: MechanismCase, device: str) -> Callable[[], Any]:
    """The call that is measured in all states; a ``block`` calls nothing, since the state begins and ends the block."""
    if mechanism.variant == "token":
        model = Llama(LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCABULARY, device)
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return torch.no_grad()(lambda: model(token))
    if mechanism.variant == "block":
        return lambda: None
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    if mechanism.variant == "handed_back":
        x = x.long()
    calls = {
        "mm": lambda: torch.mm(x, x),
        "linear": lambda: F.linear(x, x),
        "softmax": lambda: x.softmax(-1),
        "sum": lambda: x.sum(-1),
        "layer_norm": lambda: F.layer_norm(x, (64,)),
        "cumprod": lambda: x.cumprod(0),
        "mul": lambda: x * x,
        "t": lambda: x.t(),
    }
    return calls[mechanism.op]


@contextlib.contextmanager
def state(provider: str) -> Iterator[None]:
    """Nothing registered; registered, and no block; inside of a block; in the other package's mode."""
    if provider == THEIRS:
        with their_mode():
            yield
        return
    if provider == TORCH:
        uninstall()
        yield
        return
    with batch_invariant():
        if provider == OURS:
            yield
            return
    yield


def measure_mechanism(
    mechanism: MechanismCase, providers: Sequence[str], device: harness.Device, **_: Any
) -> harness.Measurement:
    """One case: each provider's least time of the rounds. One call of a token fills the queue of launches."""
    call = make_call(mechanism, device.name)
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for provider in providers:
            timed = call
            if mechanism.variant == "block" and provider in BLOCKS:
                timed = BLOCKS[provider]()(call)
            with contextlib.nullcontext() if timed is not call else state(provider):
                device.warm_up(timed)
                found = [host_us(timed, device)] if mechanism.variant == "token" else device.host_us([timed])
                times.setdefault(provider, []).extend(found)
    results = {
        provider: harness.Result(min(found), min(found), max(found), min(found), 0, {}, {})
        for provider, found in times.items()
    }
    return harness.Measurement(mechanism.case, 0.0, results, {})


def run(cases: Sequence[MechanismCase], providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of these cases."""
    return harness.run(
        [(mechanism, [mechanism.case]) for mechanism in cases],
        lambda mechanism, directions, *rest, **options: [measure_mechanism(mechanism, *rest, **options)],
        providers,
        lambda: harness.CudaDevice(host_batches=20, calls_per_batch=20),
        packages=PACKAGES,
        **settings,
    )


def print_table(measurements: Sequence[harness.Measurement]) -> None:
    """One row a case: the host's time in each state in us, inside over torch's, and the goal of that."""
    table = Table(box=None, pad_edge=False)
    for column in ("op", "variant"):
        table.add_column(column, no_wrap=True)
    for column in (*PROVIDERS, "inside / torch", "goal"):
        table.add_column(column, justify="right", no_wrap=True)
    for m in measurements:
        hosts = [f"{m.results[name].host_us:.1f}" if name in m.results else "-" for name in PROVIDERS]
        ratio = "-"
        if OURS in m.results and TORCH in m.results:
            ratio = f"{m.results[OURS].host_us / m.results[TORCH].host_us:.2f}"
        goal = f"{GOALS[m.case.variant]:.2f}" if m.case.variant in GOALS else "-"
        table.add_row(m.case.op, m.case.variant, *hosts, ratio, goal)
    harness.wide_console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    options = harness.parse(
        "mechanism",
        __doc__.splitlines()[0],
        "the same cases",
        PROVIDERS,
        PROVIDERS,
        lambda quick: [mechanism.case.name for mechanism in mechanism_cases()],
        arguments,
    )
    if isinstance(options, int):
        return options
    measurements = run(mechanism_cases(), options.providers, **options.settings)
    print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_mechanism", main))
