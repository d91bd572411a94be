"""The commands and their options; each command runs in a file of its name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cute_kernels.cli import bench, env
from cute_kernels.train.options import add_options
from cute_kernels.version import __version__
from jit_cache import command
from jit_cache.command import Outcome


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
    show = commands.add_parser("env", help="versions, driver, GPUs, kernel cache, variables: what a bug report needs")
    command.add_json(show, "{section: {name: value}}")
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
    measure = commands.add_parser("bench", help="measure on the GPU at hand (in a checkout of the repository)")
    measure.add_argument("families", nargs="*", metavar="family", help="like norm; default: every family")
    measure.add_argument("--quick", action="store_true", help="a few cases, fewer repetitions")
    measure.add_argument("--save", action="store_true", help="append the lines to bench/results/<gpu>.jsonl")
    command.add_json(measure, "a list of the lines that were measured, as --save appends them")
    return parser


def _report(options: argparse.Namespace) -> Outcome:
    if options.command == "env":  # shows wrong settings: they may be what the bug report is about
        return env.run()
    command.check_settings()
    if options.command == "demo":
        from cute_kernels.cli import demo

        return demo.run()
    if options.command == "check":
        from cute_kernels.cli import check

        return check.run(options.only)
    return bench.run(options.families, options.quick, options.save)


def _train(options: argparse.Namespace) -> int:
    command.check_settings()
    from cute_kernels.cli import train

    return train.run(options)
