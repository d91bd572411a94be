"""A step of reinforcement learning of a Qwen3, a roll-out and an update by GRPO: this library's, and plain torch's.

    python -m bench.bench_rl_step             results printed
    python -m bench.bench_rl_step --save      and kept in bench/results/<gpu>.jsonl
    python -m bench.bench_rl_step --list      the names of the cases

A case's name is rl_step.<direction>.<sequences>x<prompt>x<new>.bfloat16.qwen3; directions are rollout, update and step,
which is one of each. The model has 14 layers of the shape of Qwen3 1.7B and its vocabulary. A roll-out draws new tokens
behind prompts, with their log-probabilities; an update scores them, with entropies, and makes a step of AdamW. All
prompts are equally long, so that plain torch needs no mask for them.

``cute_kernels`` is ``models.generate``, its steps from a CUDA graph that each roll-out captures, and
``models.log_prob``, inside of ``batch_invariant("strict")``. ``torch`` is transformers' model with "sdpa", over a
StaticCache, its steps from a graph that is captured once for all roll-outs; an update has logits of the new tokens
alone. ``batch_invariant_ops`` is ``torch`` in that package's mode, if it is installed, with attention by products and a
softmax. Errors: ``differ``, the share of log-probabilities that the update has with other bits, of which ours may have
none; ``nats``, the rms of these differences.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bench import harness
from bench.bench_transformer import eager, host_us
from bench.whole_models import PACKAGES, THEIRS, mode_of, random_model, time_groups
from cute_kernels import batch_invariant, models, uninstall
from cute_kernels.models.decoding import capture
from jit_cache import command

LAYERS, HIDDEN, HEADS, PAIRS, HEAD, FFN, VOCABULARY = 14, 2048, 16, 8, 128, 6144, 151936
PROMPTS, SAMPLES, PROMPT, NEW = 4, 8, 128, 128  # prompts, sequences of each, tokens of a prompt, tokens behind it
LEARNING_RATE = 1e-4
OURS, TORCH = "cute_kernels", "torch"
PROVIDERS = OURS, TORCH, THEIRS
DIRECTIONS = "rollout", "update", "step"
GOALS = {TORCH: 1.15, THEIRS: 0.6}  # our step over theirs, at most
WORST = 0.1  # nats
REPETITIONS, QUICK_REPETITIONS = 8, 4


@dataclass(frozen=True)
class Step:
    """All sequences of a step."""

    directions: tuple[str, ...] = DIRECTIONS

    def case(self, direction: str) -> harness.Case:
        of_layer = HIDDEN * HEAD * (2 * HEADS + 2 * PAIRS) + 3 * HIDDEN * FFN
        sequences, length = PROMPTS * SAMPLES, PROMPT + NEW
        layers = sequences * length * LAYERS * (2 * of_layer + 2 * length * HEADS * HEAD)
        rollout = layers + 2 * sequences * NEW * HIDDEN * VOCABULARY
        flops = {"rollout": rollout, "update": 3 * rollout, "step": 4 * rollout}[direction]
        shape = f"{sequences}x{PROMPT}x{NEW}"
        return harness.Case("rl_step", "rl_step", direction, shape, "bfloat16", "qwen3", 0, flops)


def make_config() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=PAIRS,
        head_dim=HEAD,
        max_position_embeddings=PROMPT + NEW,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


class Learner:
    """A model and its optimizer; ``roll_out`` leaves tokens and log-probabilities, which ``update`` takes."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator(device).manual_seed(harness.seed("rl_step"))
        rows = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=generator, device=device)
        self.prompts = rows.repeat_interleave(SAMPLES, 0)
        self.model = random_model(make_config(), device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.tokens = torch.zeros(len(self.prompts), NEW, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(len(self.prompts), NEW, device=device)

    def inside(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def draw(self) -> None:
        """New tokens and their log-probabilities."""
        raise NotImplementedError

    def score(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (sequences, NEW) of the tokens behind the prompts."""
        raise NotImplementedError

    def roll_out(self) -> tuple[Tensor]:
        with self.inside(), torch.no_grad():
            self.draw()
        return (self.log_probs,)

    def update(self) -> tuple[Tensor]:
        """Returns the log-probabilities that it has."""
        with self.inside():
            scored, _ = self.score(torch.cat([self.prompts, self.tokens], 1))
            rewards = (self.tokens % 2 == 0).float().mean(1)
            groups = rewards.view(PROMPTS, SAMPLES)
            advantages = (groups - groups.mean(1, keepdim=True)).flatten()
            ratios = (scored - self.log_probs).exp()
            loss = -(ratios * advantages[:, None]).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return (scored.detach(),)

    def step(self) -> tuple[Tensor]:
        self.roll_out()
        return self.update()


class Ours(Learner):
    """Bit for bit the same log-probabilities in both parts."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        models.prepare(self.model)
        self.seeds = torch.arange(len(self.prompts), device=device)

    def inside(self) -> AbstractContextManager[Any]:
        return batch_invariant("strict")

    def draw(self) -> None:
        found = models.generate(
            self.model, self.prompts, seeds=self.seeds, max_new_tokens=NEW, temperature=1.0, eos_token_id=[], graph=True
        )
        self.tokens.copy_(found.tokens)
        self.log_probs.copy_(found.log_probs)

    def score(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        labels = ids.index_fill(1, torch.arange(PROMPT, device=ids.device), -100)
        log_p, entropy = models.log_prob(self.model, ids, labels)
        return log_p[:, PROMPT:], entropy[:, PROMPT:]


class Plain(Learner):
    """transformers and torch, as they are used without this library."""

    def __init__(self, device: str) -> None:
        from transformers import StaticCache

        super().__init__(device)
        self.cache = StaticCache(self.model.config, PROMPT + NEW)
        self.last = self.prompts.new_zeros(len(self.prompts), 1)
        self.last_log_p = self.log_probs.new_zeros(len(self.prompts))
        self.positions = torch.zeros_like(self.last)
        self.replay: Callable[[], Any] | None = None

    def draw(self) -> None:
        self.cache.reset()
        self.positions.fill_(PROMPT)
        options = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        self.choose(self.model(self.prompts, **options).logits)
        for i in range(NEW):
            self.tokens[:, i], self.log_probs[:, i] = self.last[:, 0], self.last_log_p
            if i + 1 == NEW:
                return
            if self.replay is None and i == 1:  # the first step has run whatever runs once
                self.replay = capture(self.decode)
            (self.replay or self.decode)()

    def decode(self) -> None:
        options = {"position_ids": self.positions, "past_key_values": self.cache, "use_cache": True}
        self.choose(self.model(self.last, **options).logits)
        self.positions += 1

    def choose(self, logits: Tensor) -> None:
        """By the largest probability over exponential noise, for which the host need not wait."""
        log_p = logits[:, -1].float().log_softmax(-1)
        noise = torch.empty_like(log_p).exponential_()
        self.last.copy_((log_p.exp() / noise).argmax(-1, keepdim=True))
        self.last_log_p.copy_(log_p.gather(1, self.last)[:, 0])

    def score(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids, use_cache=False, logits_to_keep=NEW + 1).logits[:, :-1]
        log_p = logits.float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(2, ids[:, PROMPT:, None])[..., 0], entropy


LEARNERS = {OURS: Ours, TORCH: Plain, THEIRS: Plain}


def mode(provider: str) -> AbstractContextManager[None]:
    """Plain torch has no kernel of ours under its operators: the host takes part in a step's time."""
    if provider == TORCH:
        uninstall()
    return mode_of(provider)


def errors_of(learner: Learner) -> dict[str, float]:
    (rolled,) = learner.roll_out()
    difference = learner.update()[0] - rolled
    return {"differ": (difference != 0).float().mean().item(), "nats": difference.square().mean().sqrt().item()}


def measure_step(
    step: Step, directions: Sequence[str], providers: Sequence[str], device: harness.Device, **options: Any
) -> list[harness.Measurement]:
    """All providers in turn; one whose two parts disagree is a failure."""
    learners: dict[str, Learner] = {}
    found: dict[str, list[tuple[Any, ...]]] = {}
    failures: dict[str, str] = {}
    for provider in providers:
        try:
            with mode(provider):
                learner = LEARNERS[provider](device.name)
                device.warm_up(learner.step)
                errors = errors_of(learner)
                if (provider == OURS and errors["differ"]) or not errors["nats"] <= WORST:  # NaN, too
                    failures[provider] = f"wrong result: {errors}"
                    continue
                calls = [getattr(learner, name) for name in ("roll_out", "update", "step")]
                found[provider] = [(device.peak_bytes(call), host_us(call, device), errors) for call in calls]
                learners[provider] = learner
        except Exception as exception:  # one that does not take the case
            failures[provider] = harness.describe(exception)
    groups = [
        (functools.partial(mode, provider), [eager(learner.roll_out), eager(learner.update)])
        for provider, learner in learners.items()
    ]
    times = dict(zip(learners, time_groups(groups, options["repetitions"], device), strict=True))
    measurements = []
    for direction in directions:
        results = {}
        for provider, (rollout, update) in times.items():
            both = [a + b for a, b in zip(rollout, update, strict=True)]
            samples = {"rollout": rollout, "update": update, "step": both}[direction]
            peak, host, errors = found[provider][DIRECTIONS.index(direction)]
            results[provider] = harness.Result(
                us=statistics.median(samples),
                us_min=min(samples),
                us_max=max(samples),
                host_us=host,
                peak_bytes=peak,
                error=errors,
                kernels={},
            )
        measurements.append(harness.Measurement(step.case(direction), 0.0, results, failures))
    return measurements


def run(providers: Sequence[str], **settings: Any) -> list[harness.Measurement]:
    """`harness.run` of the one step."""
    step = Step()
    return harness.run(
        [(step, [step.case(direction) for direction in step.directions])],
        measure_step,
        providers,
        harness.CudaDevice,
        packages=PACKAGES,
        **settings,
    )


def print_table(measurements: Sequence[harness.Measurement]) -> None:
    """A row a direction: times in ms, ours over the others', the goals of a step, log-probabilities that differ."""
    table = Table(box=None, pad_edge=False)
    table.add_column("direction", no_wrap=True)
    peers = [provider for provider in PROVIDERS if provider != OURS]
    columns = [f"{name} ms" for name in PROVIDERS] + [f"ours / {name}" for name in peers]
    for column in (*columns, *(f"{name} differ" for name in PROVIDERS), "peak GiB, ours", "torch"):
        table.add_column(column, justify="right", no_wrap=True)
    for m in measurements:
        cells = [harness.number(m.results[p].us / 1e3 if p in m.results else None, ".1f") for p in PROVIDERS]
        for peer in peers:
            ratio = m.results[OURS].us / m.results[peer].us if {OURS, peer} <= m.results.keys() else None
            goal = ""
            if ratio is not None and m.case.direction == "step":
                goal = f" <= {GOALS[peer]:.2f} {'ok' if ratio <= GOALS[peer] else '--'}"
            cells.append(harness.number(ratio, ".3f") + goal)
        cells += [harness.number(m.results[p].error["differ"] if p in m.results else None, ".1%") for p in PROVIDERS]
        peaks = [m.results[p].peak_bytes / 2**30 if p in m.results else None for p in (OURS, TORCH)]
        table.add_row(m.case.direction, *cells, *(harness.number(peak, ".1f") for peak in peaks))
    harness.wide_console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    def names(quick: bool) -> list[str]:
        return [Step().case(direction).name for direction in DIRECTIONS]

    what = __doc__.splitlines()[0]
    options = harness.parse("rl_step", what, "the same case", PROVIDERS, PROVIDERS, names, arguments)
    if isinstance(options, int):
        return options
    options.settings["repetitions"] = options.reps or (QUICK_REPETITIONS if options.quick else REPETITIONS)
    measurements = run(options.providers, **options.settings)
    print_table(measurements)
    return harness.exit_status(measurements)


if __name__ == "__main__":
    sys.exit(command.run("bench_rl_step", main))
