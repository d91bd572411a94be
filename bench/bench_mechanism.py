"""The host's time of what ``batch_invariant`` puts under torch's operators: of an operator, a block, a token's forward.

    python -m bench.bench_mechanism            every case, results printed
    python -m bench.bench_mechanism --save     and kept in bench/results/<gpu>.jsonl

A case's name is op.fwd.shape.dtype.variant, like mm.fwd.64x64.bfloat16.replaced. Variants: replaced; handed_back (of
integers); untouched (nothing is registered for it); block (begin and end); token (one token through transformers' Llama
of 8 layers of 4096, without a cache). Providers: torch (nothing registered); registered (and no block: each call of a
replaced operator is handed back); cute_kernels (inside of a block); prepared (the same of a model that
``models.prepare`` has prepared); batch_invariant_ops (in that package's mode, if it is installed; of ``block`` the
mode's begin and end).

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
from torch import nn

from bench import harness
from bench.bench_transformer import host_us
from bench.whole_models import PACKAGES, THEIRS, random_model, their_mode
from cute_kernels import batch_invariant, models, uninstall
from jit_cache import command

ROUNDS = 5
OURS, TORCH, REGISTERED, PREPARED = "cute_kernels", "torch", "registered", "prepared"
PROVIDERS = TORCH, REGISTERED, OURS, PREPARED, THEIRS
SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
}
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
        shape = "{num_hidden_layers}x{hidden_size}".format(**SIZES) if self.variant == "token" else "64x64"
        return harness.Case("mechanism", self.op, "fwd", shape, dtype, self.variant, 0, 0)


def mechanism_cases() -> list[MechanismCase]:
    replaced = [MechanismCase(op, "replaced") for op in ("mm", "linear", "softmax", "sum", "layer_norm")]
    others = [("sum", "handed_back"), ("cumprod", "handed_back"), ("mul", "untouched"), ("t", "untouched")]
    return replaced + [MechanismCase(*other) for other in (*others, ("batch_invariant", "block"), ("llama", "token"))]


def make_model(device: str, prepared: bool) -> nn.Module:
    """transformers' Llama with random parameters, the same ones for both."""
    from transformers import LlamaConfig

    model = random_model(LlamaConfig(**SIZES, use_cache=False, attn_implementation="sdpa"), device)
    return models.prepare(model) if prepared else model


def make_call(mechanism: MechanismCase, device: str, prepared: bool = False) -> Callable[[], Any]:
    """The call that is measured in all states; a ``block`` calls nothing, since the state begins and ends the block."""
    if mechanism.variant == "token":
        model = make_model(device, prepared)
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return torch.no_grad()(lambda: model(input_ids=token))
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
        if provider in (OURS, PREPARED):
            yield
            return
    yield


def measure_mechanism(
    mechanism: MechanismCase, providers: Sequence[str], device: harness.Device, **_: Any
) -> harness.Measurement:
    """One case: each provider's least time of the rounds. One call of a token fills the queue of launches."""
    if mechanism.variant != "token":
        providers = [provider for provider in providers if provider != PREPARED]
    call = make_call(mechanism, device.name)
    calls = dict.fromkeys(providers, call)
    if PREPARED in calls:
        calls[PREPARED] = make_call(mechanism, device.name, prepared=True)
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for provider in providers:
            timed, inside = calls[provider], state(provider)
            if mechanism.variant == "block" and provider in BLOCKS:
                timed, inside = BLOCKS[provider]()(call), contextlib.nullcontext()
            with inside:
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
