"""Parts that our command lines share: exit statuses, Ctrl-C, --json, --version, progress."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .files import naming, write_whole
from .store import settings

EXIT_STATUS = (
    "Exit status: 0 done; 1 what was asked for failed or is missing; 2 wrong usage: an unknown name, or a value that "
    "an option or a variable does not take; 130 interrupted (Ctrl-C)."
)
SECONDS_BETWEEN_LINES = 5.0  # of progress, where there is no terminal

Outcome = tuple[int, Any]  # the exit status, and what --json tells
Update = Callable[[int, str], None]  # the number done, a note such as the loss


class UsageError(ValueError):
    """The command line or a variable of the environment is wrong: exit status 2."""


def run(program: str, command: Callable[[], int], expected: tuple[type[Exception], ...] = (OSError,)) -> int:
    """Runs a command that returns its exit status. An error is one line on the standard error.

    expected: the errors of a command that failed; any other one is a bug, which has a traceback
    """
    try:
        try:
            status = command()
            with naming("standard output"):
                sys.stdout.flush()
            return status
        except BrokenPipeError:  # of `| head`
            _discard_output()
            return 0
        except UsageError as error:
            return _end(f"{program}: {error}", 2)
        except expected as error:
            return _end(f"{program}: {error}", 1)
    except KeyboardInterrupt:
        return _end(f"{program}: interrupted", 130)


def check_settings() -> None:
    """Raises UsageError if a JIT_CACHE_* variable has a wrong value."""
    try:
        settings()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _end(message: str, status: int) -> int:
    print(message, file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # it was the error, and would be again at exit
        _discard_output()
    return status


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_version(parser: argparse.ArgumentParser, version: str) -> None:
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")


# ----------------------------------------------------------------------------------------------------------------- JSON


def add_json(parser: argparse.ArgumentParser, shape: str) -> None:
    parser.add_argument(
        "--json", metavar="FILE", help=f"also write the report as JSON; -: to stdout, and nothing else: {shape}"
    )


def reported(command: Callable[[], Outcome], json_file: str | None) -> int:
    """Runs a command, writes its report where --json says; returns its exit status.

    Raises:
        UsageError: json_file is a directory, or in none. It is raised before the command runs.
        OSError: the report could not be written.
    """
    if json_file is None:
        return command()[0]
    if json_file == "-":
        with _no_output():
            status, found = command()
        with naming("standard output"):
            print(_text(found))
        return status
    path = Path(json_file)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--json must be a file in a directory that is there, got {json_file}")
    status, found = command()
    write_whole(path, (_text(found) + "\n").encode())
    return status


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Drops what is printed. Other processes and C code print to the standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _text(found: Any) -> str:
    return json.dumps(_finite(found), indent=1)


def _finite(value: Any) -> Any:
    """JSON has no number that is not finite: null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------------------- progress


@contextlib.contextmanager
def progress(title: str, total: int, done: int = 0, quiet: bool = False) -> Iterator[Update]:
    """Shows on the standard error how far a command is: a bar on a terminal, else a line every few seconds."""
    if quiet:
        yield lambda done, note: None
    elif sys.stderr.isatty():
        with _bar(title, total, done) as update:
            yield update
    else:
        yield _lines(title, total)


@contextlib.contextmanager
def _bar(title: str, total: int, done: int) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Output to a terminal comes above the bar; output to a file is left alone.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(title, total=total, completed=done, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _lines(title: str, total: int) -> Update:
    began = last = time.monotonic()

    def update(done: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            parts = [f"{title} {done} of {total}", *filter(None, [note]), f"{now - began:.0f} s"]
            print(", ".join(parts), file=sys.stderr, flush=True)

    return update
