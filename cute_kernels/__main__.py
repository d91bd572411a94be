"""python -m cute_kernels env | demo | check | train | bench: what a person wants first."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cute_kernels import _env
from cute_kernels.train.options import add_options
from jit_cache.store import settings

REPOSITORY = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m cute_kernels", description="Deterministic GPU kernels in the CuTe Python DSL."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("env", help="versions, driver, GPUs, kernel cache, variables: what a bug report needs")
    commands.add_parser(
        "demo",
        help="with a GPU: check and time every op; without: compile the kernels of common models, check the references",
    )
    check = commands.add_parser(
        "check",
        help="with a GPU: rows of all ops but the quantizers keep their bits whatever the batch (T1 to T6)",
    )
    check.add_argument("--only", action="append", metavar="NAME", help="like rms_norm or nn.Linear; may be repeated")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the reports there")
    train = commands.add_parser(
        "train", help="train a small language model with hyper-connections on a text file; also under torchrun"
    )
    add_options(train)
    bench = commands.add_parser("bench", help="measure on the GPU at hand (in a checkout of the repository)")
    bench.add_argument("families", nargs="*", metavar="family", help="like norm; default: every family")
    bench.add_argument("--quick", action="store_true", help="a few cases, fewer repetitions")
    bench.add_argument("--save", action="store_true", help="append the lines to bench/results/<gpu>.jsonl")
    options = parser.parse_args(arguments)
    if options.command == "env":
        return _print_env()
    try:
        settings()
    except ValueError as error:
        print(f"cute_kernels: {error}", file=sys.stderr)
        return 1
    if options.command == "demo":
        from cute_kernels import _demo

        return _demo.run()
    if options.command == "check":
        from cute_kernels import _check_ops

        return _check_ops.run(options.only, options.json)
    if options.command == "train":
        from cute_kernels.train import command

        return command.run(options)
    return _bench(options.families, options.quick, options.save)


def bench_module(family: str) -> ModuleType:
    """The repository's bench/bench_<family>.py, which is not installed with the package."""
    if not (REPOSITORY / "bench" / f"bench_{family}.py").is_file():
        raise FileNotFoundError(
            f"no bench/bench_{family}.py in {REPOSITORY}: measuring needs a checkout of the repository"
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    return importlib.import_module(f"bench.bench_{family}")


def _print_env() -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for section, values in _env.report().items():
        table.add_row(f"[bold]{section}[/]")
        for name, value in values.items():
            table.add_row(f"  {escape(name)}", escape(value))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    return 0


def _bench(families: Sequence[str], quick: bool, save: bool) -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in (REPOSITORY / "bench").glob("bench_*.py"))
    if not known:
        print(f"no benchmarks in {REPOSITORY / 'bench'}: measuring needs a checkout of the repository", file=sys.stderr)
        return 1
    if unknown := sorted(set(families) - set(known)):
        print(f"no such family: {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 1
    arguments = ["--quick"] * quick + ["--save"] * save
    # A process each: a family imports peers, and the next one's kernels are to be compiled before that.
    commands = ([sys.executable, "-m", f"bench.bench_{family}", *arguments] for family in families or known)
    return max(abs(subprocess.run(command, cwd=REPOSITORY).returncode) for command in commands)  # killed: below 0


if __name__ == "__main__":
    sys.exit(main())
