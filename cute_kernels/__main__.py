"""python -m cute_kernels env | demo | check | train | bench: what a person wants first."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cute_kernels import __version__, _env
from cute_kernels.train.options import add_options
from jit_cache import command
from jit_cache.command import Outcome, UsageError

REPOSITORY = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status, see `jit_cache.command.EXIT_STATUS`."""
    options = _parser().parse_args(arguments)
    if options.command == "train":
        return command.run("cute_kernels", lambda: _train(options), (OSError, ValueError))
    return command.run("cute_kernels", lambda: command.reported(lambda: _report(options), options.json))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cute-kernels",
        description="Deterministic GPU kernels in the CuTe Python DSL.",
        epilog=command.EXIT_STATUS,
    )
    command.add_version(parser, __version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="versions, driver, GPUs, kernel cache, variables: what a bug report needs")
    command.add_json(env, "{section: {name: value}}")
    demo = commands.add_parser(
        "demo",
        help="with a GPU: check and time every op; without: compile the kernels of common models, check the references",
    )
    command.add_json(
        demo,
        "{ok, seconds, gpu, kernels, references, measurements, batches}; kernels as of jit-cache prewarm, references: "
        "[{op, dtype, errors, limit, limit_of_gradients, ok}], measurements: [{case, copy_us, results, failures}], "
        "batches: [{op, shape, cases, failed}]",
    )
    check = commands.add_parser(
        "check",
        help="with a GPU: rows of all ops but the quantizers keep their bits whatever the batch (T1 to T6)",
    )
    check.add_argument("--only", action="append", metavar="NAME", help="like rms_norm or nn.Linear; may be repeated")
    command.add_json(check, "a list of {op, case, result, ok, report}")
    train = commands.add_parser(
        "train", help="train a small language model with hyper-connections on a text file; also under torchrun"
    )
    add_options(train)
    bench = commands.add_parser("bench", help="measure on the GPU at hand (in a checkout of the repository)")
    bench.add_argument("families", nargs="*", metavar="family", help="like norm; default: every family")
    bench.add_argument("--quick", action="store_true", help="a few cases, fewer repetitions")
    bench.add_argument("--save", action="store_true", help="append the lines to bench/results/<gpu>.jsonl")
    command.add_json(bench, "a list of the lines that were measured, as --save appends them")
    return parser


def _report(options: argparse.Namespace) -> Outcome:
    if options.command == "env":  # shows wrong settings: they may be what the bug report is about
        return _show_env()
    command.check_settings()
    if options.command == "demo":
        from cute_kernels import _demo

        return _demo.run()
    if options.command == "check":
        from cute_kernels import _check_ops

        return _check_ops.run(options.only)
    return _bench(options.families, options.quick, options.save)


def _train(options: argparse.Namespace) -> int:
    command.check_settings()
    from cute_kernels.train import command as train

    return train.run(options)


def bench_module(family: str) -> ModuleType:
    """The repository's bench/bench_<family>.py, which is not installed with the package."""
    if not (REPOSITORY / "bench" / f"bench_{family}.py").is_file():
        raise FileNotFoundError(
            f"no bench/bench_{family}.py in {REPOSITORY}: measuring needs a checkout of the repository"
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    return importlib.import_module(f"bench.bench_{family}")


def _show_env() -> Outcome:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    found = _env.report()
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, values in found.items():
        table.add_row(f"[bold]{section}[/]")
        for name, value in values.items():
            table.add_row(f"  {escape(name)}", escape(value))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    return 0, found


def _bench(families: Sequence[str], quick: bool, save: bool) -> Outcome:
    known = sorted(path.stem.removeprefix("bench_") for path in (REPOSITORY / "bench").glob("bench_*.py"))
    if not known:
        raise FileNotFoundError(
            f"no benchmarks in {REPOSITORY / 'bench'}: measuring needs a checkout of the repository"
        )
    if unknown := sorted(set(families) - set(known)):
        raise UsageError(f"no such family: {', '.join(unknown)}; there are: {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines.jsonl")
        lines.touch()
        arguments = ["--quick"] * quick + ["--save"] * save + ["--out", str(lines)]
        # A process each: a family imports peers, and the next one's kernels are to be compiled before that.
        commands = [[sys.executable, "-m", f"bench.bench_{family}", *arguments] for family in families or known]
        failed = [subprocess.run(words, cwd=REPOSITORY).returncode != 0 for words in commands]
        found = [json.loads(line) for line in lines.read_text().splitlines()]
    return int(any(failed)), found


if __name__ == "__main__":
    sys.exit(main())
