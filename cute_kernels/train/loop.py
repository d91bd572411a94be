"""A training run: its steps, and what they leave in the run's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cute_kernels.runtime.checks import expect
from cute_kernels.runtime.targets import UnsupportedDeviceError, arch_of
from cute_kernels.train import checkpoint
from cute_kernels.train.data import Text, read_text
from cute_kernels.train.distributed import World, world
from cute_kernels.train.log import Line, Log, plot
from cute_kernels.train.model import Learner
from cute_kernels.train.options import Options, flag
from jit_cache.command import progress

TEST_BATCHES = 4
FINAL_RATE = 0.1  # the learning rate at the end, of its highest

# A resumed run must have these options as before; the others may change for the rest of it
SAME = ("layers", "hidden", "heads", "hyper_connections", "experts", "experts_per_token", "balance", "z_loss")
SAME += ("dropout", "sequence", "batch", "seed")
NOT_TOLD = ("data", "checkpoint", "resume")  # to the checkpoint: where a run finds things, and the text has a digest


def train(options: Options) -> None:
    """Runs the options' steps, alone or as one of torchrun's ranks; rank 0 prints and writes.

    Raises:
        ValueError: an option does not fit the text, the GPU, the ranks, the run that is to be resumed, or one that
            goes on in the folder.
        OSError: the text cannot be read, or the folder not be read or written.
    """
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    expect(device == "cpu" or torch.cuda.is_available(), "train", "--device", "be cpu where torch sees no GPU", device)
    text = read_text(options.data, options.sequence)
    started_from = _checkpoint(options)
    facts = {name: value for name, value in vars(options).items() if name not in NOT_TOLD}
    facts |= {"text": text.digest, "device": device}
    done, changed = 0, []
    if started_from is not None:
        changed = _changed_options(started_from, facts)
        done = checkpoint.step_of(started_from)
        more = f"be more than the {done} steps of {started_from}"
        expect(done < options.steps, "train", "--steps", more, options.steps)
    with world(device) as ranks:
        fits = f"be a multiple of the {ranks.size} ranks"
        expect(options.batch % ranks.size == 0, "train", "--batch", fits, options.batch)
        _expect_kernels(ranks.device)
        expected = "be a folder in which all ranks find the same checkpoint"
        expect(ranks.same(done), "train", "--checkpoint", expected, f"step {done} on rank {ranks.rank}, not on others")
        expect(ranks.same(_fingerprint(options, text)), "train", "the options", "be the same on all ranks", "others")
        learner = Learner(options, ranks)
        with _alone(options.checkpoint, started_from, ranks):
            if started_from is not None:
                checkpoint.load(started_from, learner.model, learner.optimizer)
            console = Console(quiet=ranks.rank != 0)
            if not console.is_terminal:
                console = Console(quiet=ranks.rank != 0, width=200)
            console.print(_introduction(options, ranks, learner, text, started_from), highlight=False, markup=False)
            if changed:
                console.print(f"options changed: {', '.join(changed)}", highlight=False, markup=False)
            with _deterministic(device):
                _run(options, ranks, text, learner, done, facts, console)


def learning_rate(options: Options, step: int) -> float:
    """The rate of the step after ``step`` steps: a linear rise, then a cosine down to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    share = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * share)))


def test_loss(options: Options, ranks: World, text: Text, learner: Learner) -> float:
    """Mean cross-entropy of the held-out text, in nats a byte."""
    losses = []
    for index in range(TEST_BATCHES):
        tokens, targets = map(ranks.rows, text.test_batch(index, TEST_BATCHES, options.batch, options.sequence))
        losses.append(ranks.mean(learner.test(tokens, targets)))
    return torch.stack(losses).mean().item()


def _run(
    options: Options,
    ranks: World,
    text: Text,
    learner: Learner,
    done: int,
    facts: dict[str, Any],
    console: Console,
) -> None:
    folder = options.checkpoint
    log = Log(folder / "log.jsonl", done) if ranks.rank == 0 else None
    with progress("training", options.steps, done, quiet=ranks.rank != 0) as update:
        for step in range(done, options.steps):
            began = time.perf_counter()
            torch.manual_seed(_seed(options.seed, step, ranks.rank))  # what dropout draws from
            tokens, targets = map(ranks.rows, text.batch(options.seed, step, options.batch, options.sequence))
            rate = learning_rate(options, step)
            loss, norm = learner.step(tokens, targets, rate)
            line: Line = {"step": step + 1, "loss": ranks.mean(loss).item(), "grad_norm": norm.item(), "lr": rate}
            line["seconds"] = round(time.perf_counter() - began, 6)
            is_last = step + 1 == options.steps
            if is_last or (step + 1) % options.evaluate_every == 0:
                line["held_out_loss"] = test_loss(options, ranks, text, learner)
            if log is not None:
                log.add(line)
            update(step + 1, f"loss {line['loss']:.3f}")
            if is_last or (step + 1) % options.checkpoint_every == 0:
                checkpoint.save(folder, step + 1, learner.model, learner.optimizer, facts)
                if log is not None:
                    plot(log.lines, folder / "loss.png")
    if log is not None:
        console.print(_summary(log.lines, folder), highlight=False, markup=False)


@contextlib.contextmanager
def _alone(folder: Path, newest: Path | None, ranks: World) -> Iterator[None]:
    """Rank 0 holds the folder's lock meanwhile, where locks work; every rank raises if another run does.

    newest: the checkpoint that the run starts from; there may be another since that was looked up
    """
    with contextlib.ExitStack() as held:
        free = True
        if ranks.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # The file stays: a run that had opened one that is gone would not see the lock of the next one.
                lock = held.enter_context((folder / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
            except OSError:  # as on some network file systems; a folder that cannot be written is the log's to tell
                pass
            free = free and checkpoint.latest(folder) == newest
        expect(ranks.all(free), "train", "--checkpoint", "be a folder that no other run writes", folder)
        yield


@contextlib.contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """Torch's own operators deterministic meanwhile: on GPUs attention's backward is not by itself."""
    if device != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it would write every output twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def _expect_kernels(device: torch.device) -> None:
    if device.type == "cuda":
        index = torch.cuda.current_device()  # of this rank
        try:
            arch_of(index)
        except UnsupportedDeviceError:
            capability = "{}.{}".format(*torch.cuda.get_device_capability(index))
            expect(False, "train", "--device", "be cpu on a GPU without kernels", f"compute capability {capability}")


def _checkpoint(options: Options) -> Path | None:
    """The state that the run starts from."""
    folder = options.checkpoint
    expect(folder.is_dir() or not folder.exists(), "train", "--checkpoint", "be a folder", f"the file {folder}")
    newest = checkpoint.latest(folder)
    if options.resume:
        expect(newest is not None, "train", "--resume", "find a whole checkpoint", f"none in {folder}")
        return newest
    free = "be a folder without checkpoints, or --resume be given to go on from them"
    expect(newest is None, "train", "--checkpoint", free, newest)
    return None


def _fingerprint(options: Options, text: Text) -> int:
    """A number of 32 bits, the same for the same run: where a rank finds text and folder is its own affair."""
    own = {"data": text.digest, "checkpoint": None, "device": None}
    return int(hashlib.sha256(repr(sorted((vars(options) | own).items())).encode()).hexdigest()[:8], 16)


def _changed_options(newest: Path, facts: dict[str, Any]) -> list[str]:
    """The options that the checkpoint was written with and that are others now, like "--lr 0.01 -> 0.003".

    Raises:
        ValueError: one that must be the same is among them; the message names all of these.
    """
    saved = checkpoint.facts_of(newest)
    # An option that an earlier version did not have was as it is when nobody gives it
    before = {option.name: option.default for option in dataclasses.fields(Options) if option.name in SAME} | saved
    changed = {
        name: "--data another text" if name == "text" else f"{flag(name)} {before.get(name)} -> {value}"
        for name, value in facts.items()
        if before.get(name) != value
    }
    fixed = ", ".join(text for name, text in changed.items() if name in ("text", *SAME))
    expect(not fixed, "train", "--resume", f"go on with the options of {newest}", fixed)
    return [text for name, text in changed.items() if name in saved]


def _seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8], "little") >> 1


def _introduction(options: Options, ranks: World, learner: Learner, text: Text, started_from: Path | None) -> str:
    experts = f", {options.experts_per_token} of {options.experts} experts a token" if options.experts else ""
    residual = f"{options.hyper_connections} streams" if options.hyper_connections else "a plain residual"
    size = sum(parameter.numel() for parameter in learner.model.parameters())
    where = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "the CPU"
    unchecked = ""
    if started_from is not None and not checkpoint.has_digests(started_from):
        unchecked = f", which an earlier version wrote without {checkpoint.DIGESTS}: its files are not checked"
    return (
        f"{size:,} parameters, {options.layers} layers with {residual}{experts}, {ranks.size} x {where}; "
        f"{len(text.training):,} bytes to learn, {len(text.held_out):,} held out\n"
        + (f"goes on from {started_from}{unchecked}\n" if started_from else "")
        + f"if it is interrupted, --resume goes on from the newest checkpoint in {options.checkpoint}"
    )


def _summary(lines: list[Line], folder: Path) -> str:
    last = lines[-1]
    drawn = "loss.png" if (folder / "loss.png").is_file() else "no loss.png (pip install -e '.[train]')"
    return (
        f"step {last['step']}: {last['held_out_loss']:.3f} nats a byte on held-out text; "
        f"in {folder}: checkpoints, log.jsonl, {drawn}"
    )
