"""The transformer's training step, with one residual stream and with four: time, tokens a second, memory, losses.

    python -m bench.bench_transformer                             every case, results printed
    python -m bench.bench_transformer --filter ^step --reps 10    the steps alone
    python -m bench.bench_transformer --save                      and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_transformer --list                      the names of the cases

A case's name is op.direction.shape.dtype.variant, like step.fwd_bwd.8x4096x4096.bfloat16.n4. The ops:
step     forward and backward of one sequence, bf16 parameters; layers x tokens x channels. The variants: n0, a plain
         residual; n4, four streams; with recompute in blocks of one layer, in the best ones (`optimal`), with offload
curve    300 steps of `python -m cute_kernels train` with its default sizes: the losses of our kernels, of the
         references (torch), and of the references that get a batch's rows in the other order (torch_reordered), which
         rounds the sums over tokens otherwise

What differs from the other families:
- The optimizer's step is the same for all variants and is left out, so an overhead is a little larger than of a whole
  step. All variants take turns in one run, in random order; those that offload cannot be captured and run eagerly.
- bytes are the weights, read forward and backward, and their gradients, written once; flops those of the products and
  of causal attention. A step's error is the loss's, relative to the references' on the same parameters.
- peak is what a step holds at once beside the parameters: activations and gradients.
- A curve's time is of one step with its optimizer; its error is the largest distance of its losses, averaged over 10
  steps, from torch's; the line also has the `losses`.
"""

from __future__ import annotations

import gc
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import harness
from cute_kernels.nn import HyperConnectionConfig, MHCTransformer, TransformerConfig
from cute_kernels.train import data, loop
from cute_kernels.train.distributed import World
from cute_kernels.train.model import Learner
from cute_kernels.train.options import Options
from jit_cache import command

SIZE, QUICK_SIZE = (8, 4096, 4096), (2, 4096, 4096)  # layers, tokens, channels
HEADS, FEED_FORWARD, VOCABULARY = 32, 11008, 1024
WORST_LOSS = 1e-3  # relative; attention rounds its weights: 3e-4 was seen of one layer of 32 channels (CPU)
GOAL = 1.10  # a step of n4-recompute-optimal over one of n0

CURVE = Options(steps=300, graph=True)
CURVE_PROVIDERS = ("cute_kernels", "torch", "torch_reordered")


@dataclass(frozen=True)
class Step:
    """One variant; streams 0: a plain residual."""

    layers: int
    tokens: int
    channels: int
    streams: int = 4
    recompute: int | str | None = None
    offload: bool = False

    @property
    def variant(self) -> str:
        name = f"n{self.streams}"
        if self.recompute is not None:
            name += f"-recompute-{self.recompute}"
        return name + "-offload" * self.offload

    def config(self, backend: str | None = None) -> TransformerConfig:
        connections = None
        if self.streams:
            connections = HyperConnectionConfig(
                self.channels,
                self.streams,
                recompute=self.recompute is not None,
                recompute_layers=self.recompute,
                offload=self.offload,
            )
        return TransformerConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.channels,
            num_layers=self.layers,
            num_heads=HEADS,
            ffn_hidden_size=FEED_FORWARD,
            max_sequence_length=self.tokens,
            hyper_connections=connections,
            backend=backend,
        )

    def case(self) -> harness.Case:
        weights = self.layers * self.channels * (4 * self.channels + 3 * FEED_FORWARD) + VOCABULARY * self.channels
        attention = 2 * self.layers * self.tokens**2 * self.channels
        return harness.Case(
            family="transformer",
            op="step",
            direction="fwd_bwd",
            shape=f"{self.layers}x{self.tokens}x{self.channels}",
            dtype="bfloat16",
            variant=self.variant,
            bytes=3 * 2 * weights,
            flops=3 * (2 * self.tokens * weights + attention),
        )


CURVE_CASE = harness.Case(
    family="transformer",
    op="curve",
    direction="step",
    shape=f"{CURVE.layers}x{CURVE.batch * CURVE.sequence}x{CURVE.hidden}",
    dtype="bfloat16",
    variant=f"n{CURVE.hyper_connections}",
    bytes=1,
    flops=1,
)


def steps(quick: bool = False) -> list[Step]:
    size = QUICK_SIZE if quick else SIZE
    return [
        Step(*size, streams=0),
        Step(*size),
        Step(*size, recompute=1),
        Step(*size, recompute="optimal"),
        Step(*size, offload=True),
        Step(*size, recompute="optimal", offload=True),
    ]


def make_batch(step: Step, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(harness.seed("transformer"))
    shape = (2, 1, step.tokens)
    tokens, targets = torch.randint(VOCABULARY, shape, generator=generator, device=device)
    return tokens, targets


def make_model(step: Step, device: str, backend: str | None = None) -> MHCTransformer:
    """The same parameters for all variants of as many streams."""
    torch.manual_seed(0)
    return MHCTransformer(step.config(backend), device=device, dtype=torch.bfloat16)


def reference_loss(step: Step, device: str) -> Tensor:
    with torch.no_grad():
        return make_model(step, device, "reference").loss(*make_batch(step, device))


def make_call(model: MHCTransformer, batch: tuple[Tensor, Tensor]) -> harness.Call:
    """Forward and backward; returns the loss."""

    def call() -> tuple[Tensor]:
        model.zero_grad(set_to_none=True)
        loss = model.loss(*batch)
        loss.backward()
        return (loss.detach(),)

    return call


def eager(call: harness.Call) -> harness.Captured:
    """In place of a capture: what is timed is the call, and the GPU waits for the host where that is slower."""

    def replay() -> None:
        call()

    return harness.Captured(call, replay, ())


def replayed_loss(graph: harness.Captured, device: harness.Device) -> Tensor:
    """The loss that a replay writes over NaN, or that a call without a graph returns."""
    if not graph.outputs:
        return graph.call()[0]
    graph.outputs[0].fill_(float("nan"))
    graph.replay()
    device.synchronize()
    return graph.outputs[0]


def host_us(call: harness.Call, device: harness.Device) -> float:
    """Time that the caller's thread spends in one call; the queue is empty at its start."""
    samples = []
    for _ in range(3):
        device.synchronize()
        began = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(samples)


def measure_steps(
    selected: Sequence[Step], device: harness.Device, *, repetitions: int, breakdown: bool
) -> list[harness.Measurement]:
    """All variants, in turn; one whose loss is wrong is a failure."""
    truth = {streams: reference_loss(step, device.name) for streams, step in {s.streams: s for s in selected}.items()}
    captured, found = [], []
    for step in selected:
        model = make_model(step, device.name)
        call = make_call(model, make_batch(step, device.name))
        device.warm_up(call)
        model.zero_grad(set_to_none=True)  # the gradients count
        peak = device.peak_bytes(call)
        host = host_us(call, device)
        captured.append(eager(call) if step.offload else device.capture(call))
        wanted = truth[step.streams]
        error = ((replayed_loss(captured[-1], device) - wanted).abs() / wanted).item()
        found.append((peak, host, error))
    *times, copies = device.time_us([*captured, device.copy(selected[0].case().bytes)], repetitions)
    measurements = []
    for step, graph, samples, (peak, host, error) in zip(selected, captured, times, found, strict=True):
        results, failures = {}, {}
        if error <= WORST_LOSS:  # not of NaN
            kernels, launches = harness.profiled(graph.call, device, "cute_kernels", failures) if breakdown else ({}, 0)
            results["cute_kernels"] = harness.Result(
                us=statistics.median(samples),
                us_min=min(samples),
                us_max=max(samples),
                host_us=host,
                peak_bytes=peak,
                error={"loss": error},
                kernels=kernels,
                launches=launches,
            )
        else:
            failures["cute_kernels"] = f"wrong result: loss {error:.1e} > {WORST_LOSS:.1e}"
        measurements.append(harness.Measurement(step.case(), statistics.median(copies), results, failures))
    return measurements


def curve(provider: str, options: Options, device: str) -> tuple[list[float], list[float]]:
    """(loss, microseconds) of every step."""
    text, ranks = data.read_text(None, options.sequence), World(0, 1, torch.device(device), sharded=False)
    learner = Learner(options, ranks, None if provider == "cute_kernels" else "reference")
    losses, times = [], []
    for step in range(options.steps):
        batch = text.batch(options.seed, step, options.batch, options.sequence)
        tokens, targets = (ranks.rows(rows.flip(0) if provider == "torch_reordered" else rows) for rows in batch)
        began = time.perf_counter()
        losses.append(learner.step(tokens, targets, loop.learning_rate(options, step))[0].item())
        times.append(1e6 * (time.perf_counter() - began))
    return losses, times


def measure_curves(device: str, options: Options = CURVE) -> tuple[harness.Measurement, dict[str, list[float]]]:
    """The distances between the curves, and the curves."""
    curves = {provider: curve(provider, options, device) for provider in CURVE_PROVIDERS}
    results = {
        provider: harness.Result(
            us=statistics.median(times),
            us_min=min(times),
            us_max=max(times),
            host_us=0.0,
            peak_bytes=0,
            error={"distance": distance(losses, curves["torch"][0])},
            kernels={},
        )
        for provider, (losses, times) in curves.items()
    }
    return harness.Measurement(CURVE_CASE, 0.0, results, {}), {name: losses for name, (losses, _) in curves.items()}


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest of the differences, each averaged over 10 steps."""
    return (torch.tensor(losses) - torch.tensor(others)).unflatten(0, (-1, 10)).mean(1).abs().max().item()


def run(
    cases: Sequence[Step],
    *,
    pattern: str = "",
    repetitions: int = harness.REPETITIONS,
    breakdown: bool = True,
    time_limit: float | None = None,
    commit: str | None = None,
    outputs: Sequence[Path] = (),
) -> list[harness.Measurement]:
    """Measures the cases whose name matches `pattern`; appends the lines to `outputs`.

    time_limit: seconds after which the curves are not begun
    """
    started = time.monotonic()
    console = harness.wide_console()
    environment = harness.environment(commit)
    selected = [step for step in cases if re.search(pattern, step.case().name)]
    measurements: list[harness.Measurement] = []
    lines: list[dict[str, Any]] = []
    with harness.bench_stream():
        if selected:
            device = harness.CudaDevice(shuffled=True)
            measurements = measure_steps(selected, device, repetitions=repetitions, breakdown=breakdown)
            lines = [line for found in measurements for line in harness.lines(found, environment)]
            gc.collect()
            torch.cuda.empty_cache()
        for measurement in measurements:
            harness.print_progress(measurement, console)
    if re.search(pattern, CURVE_CASE.name):
        if time_limit is not None and time.monotonic() - started > time_limit:
            console.print("time limit: the curves are left")
        else:
            found, curves = measure_curves("cuda")
            measurements.append(found)
            lines += [line | {"losses": curves[line["provider"]]} for line in harness.lines(found, environment)]
    for path in outputs:
        harness.append_lines(path, lines)
    console.print(f"{len(measurements)} measurements in {time.monotonic() - started:.0f} s", highlight=False)
    return measurements


def print_steps(measurements: Sequence[harness.Measurement], console: Console | None = None) -> None:
    """A row a variant: time, over that of n0 and of n4's goal, tokens a second, memory; then its slowest kernels."""
    console = console or harness.wide_console()
    results = {m.case.variant: (m.case, m.results["cute_kernels"]) for m in measurements if _is_step(m) and m.results}
    table = Table(title="forward and backward", box=None, pad_edge=False)
    table.add_column("variant", no_wrap=True)
    for column in ("ms", "over n0", "goal", "tokens/s", "TFLOP/s", "peak MiB", "host ms", "loss's error"):
        table.add_column(column, justify="right", no_wrap=True)
    plain = results["n0"][1].us if "n0" in results else None
    for variant, (case, ours) in results.items():
        ratio = None if plain is None else ours.us / plain
        goal = f"{GOAL:.2f} {'ok' if ratio <= GOAL else '--'}" if ratio and variant == "n4-recompute-optimal" else "-"
        table.add_row(
            variant,
            f"{ours.us / 1e3:.3f}",
            "-" if ratio is None else f"{ratio:.4f}",
            goal,
            f"{1e6 * int(case.shape.split('x')[1]) / ours.us:.0f}",
            f"{1e-6 * case.flops / ours.us:.0f}",
            f"{ours.peak_bytes / 2**20:.0f}",
            f"{ours.host_us / 1e3:.1f}",
            f"{ours.error['loss']:.1e}",
        )
    console.print(table)
    for variant in ("n0", "n4-recompute-optimal"):
        if variant in results and results[variant][1].kernels:
            console.print(f"{variant}, ms:")
            for name, us in list(results[variant][1].kernels.items())[:20]:
                console.print(f"  {us / 1e3:8.3f}  {name}", markup=False, highlight=False)


def print_curves(measurement: harness.Measurement, console: Console | None = None) -> None:
    console = console or harness.wide_console()
    for provider, result in measurement.results.items():
        far = f"{result.error['distance']:.2e} nats from torch's curve"
        console.print(f"{provider}: {far}, {result.us / 1e3:.2f} ms a step", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [*(step.case().name for step in steps(quick)), CURVE_CASE.name]

    options = harness.parse(
        "transformer",
        __doc__.splitlines()[0],
        "two layers",
        ("cute_kernels",),
        ("cute_kernels",),
        names,
        arguments,
    )
    if isinstance(options, int):
        return options
    measurements = run(steps(options.quick), **options.settings)
    print_steps(measurements)
    for measurement in measurements:
        if not _is_step(measurement):
            print_curves(measurement)
    return harness.exit_status(measurements)


def _is_step(measurement: harness.Measurement) -> bool:
    return measurement.case.op == "step"


if __name__ == "__main__":
    sys.exit(command.run("bench_transformer", main))
