"""Runs of ``python -m cute_kernels train`` in processes of their own, what they leave, and what must hold of ranks."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from cute_kernels.cli import main as cli
from cute_kernels.train import checkpoint, log

ROOT = Path(__file__).resolve().parents[2]
MODULE = ("-m", "cute_kernels", "train")
TIMES = ("seconds",)  # what differs between equal runs
PATIENCE = 120.0  # seconds after which a run hangs


def arguments(folder: Path, **options: object) -> list[str]:
    """The command line of these options; of True the flag alone."""
    found = ["--checkpoint", str(folder)]
    for name, value in options.items():
        found += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return found


def start(command: list[str], ranks: int = 0) -> subprocess.Popen:
    """The train command in a process, or under torchrun in as many as ranks; one thread each, output to one pipe."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher = [*launcher, "--nproc-per-node", str(ranks)] if ranks else []
    return subprocess.Popen(
        [sys.executable, *launcher, *MODULE, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    """Wait for the process, which must end well, and return what it printed."""
    with stopped_on_error(process):
        text, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, text
        return text


@contextlib.contextmanager
def stopped_on_error(process: subprocess.Popen) -> Iterator[None]:
    """A process that is given up is asked to end: torchrun then ends its ranks, which would keep their GPUs."""
    try:
        yield
    except BaseException:
        if process.poll() is None:
            process.terminate()
            process.communicate()
        raise


def kill_after(process: subprocess.Popen, folder: Path, steps: int, rank: int | None = None) -> str:
    """Kills the process, or one of torchrun's ranks, when that many steps are in the log; returns what was printed."""
    deadline = time.monotonic() + PATIENCE
    with stopped_on_error(process):
        while len(log.read(folder / "log.jsonl")) < steps:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"{steps} steps were not made in {PATIENCE} s"
            time.sleep(0.02)
        os.kill(process.pid if rank is None else _rank(process.pid, rank), signal.SIGKILL)
        return process.communicate(timeout=PATIENCE)[0]


def numbers(folder: Path) -> list[dict]:
    """The log's lines without times."""
    return [
        {name: value for name, value in line.items() if name not in TIMES} for line in log.read(folder / "log.jsonl")
    ]


# Properties of two ranks, on the CPU and on GPUs. A run makes 16 steps, with checkpoints after 6 and 12.

RANKS_OPTIONS = {"steps": 16, "checkpoint_every": 6, "evaluate_every": 6}


def start_ranks(folder: Path, ranks: int, **options: object) -> subprocess.Popen:
    return start(arguments(folder, **{**RANKS_OPTIONS, **options}), ranks)


def run_alone(folder: Path, **options: object) -> None:
    """Runs in this process."""
    assert cli.main(["train", *arguments(folder, **{**RANKS_OPTIONS, **options})]) == 0


def check_resumes_elsewhere(wrote: Path, folder: Path, ranks: int, bound: float, **options: object) -> None:
    """The run in ``wrote`` goes on from step 12 on that many ranks, with 0 in this process.

    Its losses stay within the bound of the run's own.
    """
    shutil.copytree(wrote, folder, ignore=shutil.ignore_patterns("step-00000016"))
    assert checkpoint.step_of(checkpoint.latest(folder)) == 12
    if ranks:
        finish(start_ranks(folder, ranks, resume=True, **options))
    else:
        run_alone(folder, resume=True, **options)
    assert numbers(folder)[:12] == numbers(wrote)[:12]
    assert_close(folder, wrote, bound)


def check_killed_rank(whole: Path, folder: Path, **options: object) -> None:
    """One of two ranks is killed: torchrun says which; resumed, the run has the bits of the whole one."""
    process = start_ranks(folder, 2, **options)
    text = kill_after(process, folder, steps=7, rank=1)
    assert process.returncode != 0
    # Torchrun's summary; its root cause is rank 0 where that misses its peer before torchrun looks.
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 (?s:.*?)SIGKILL", text), text
    assert f"if it is interrupted, --resume goes on from the newest checkpoint in {folder}" in text
    assert 6 <= checkpoint.step_of(checkpoint.latest(folder)) < 16
    finish(start_ranks(folder, 2, resume=True, **options))
    assert numbers(folder) == numbers(whole)


def assert_close(found: Path, expected: Path, bound: float) -> None:
    for name in ("loss", "held_out_loss"):
        values = [[line[name] for line in numbers(folder) if name in line] for folder in (found, expected)]
        torch.testing.assert_close(*map(torch.tensor, values), rtol=0, atol=bound)


def _rank(torchrun: int, rank: int) -> int:
    """The process of a rank."""
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"torchrun has no rank {rank}")
