"""A run's output: a line of JSON a step, a plot of the losses, a progress bar."""

from __future__ import annotations

import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

from jit_cache.files import append_whole, write_whole

Line = dict[str, Any]


class Log:
    """The file of one JSON object a step; each is there as soon as its step is done."""

    def __init__(self, path: Path, steps: int) -> None:
        """Keeps the lines of the first ``steps`` steps: a run goes on from its checkpoint, which may be older.

        A run that starts anew keeps the log of one that left no checkpoint under another name.
        """
        if steps == 0 and path.is_file():
            path.rename(_free(path))
        self.lines = [line for line in read(path) if line["step"] <= steps]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(map(_text, self.lines)).encode())
        self._path = path

    def add(self, line: Line) -> None:
        """Raises OSError; the file then ends with the line before."""
        self.lines.append(line)
        append_whole(self._path, _text(line).encode())


def read(path: Path) -> list[Line]:
    """The whole lines of a log; [] if there is none.

    Raises:
        ValueError: a line is not a log's.
    """
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            try:
                found.append(json.loads(line))
            except ValueError as error:  # no JSON, or no UTF-8
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not isinstance(found[-1], dict) or type(found[-1].get("step")) is not int:
                raise ValueError(f"{path}, line {number}: no object with a step, got {line.decode().rstrip()}")
    return found


def plot(lines: list[Line], path: Path) -> None:
    """Draws the losses over the steps, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return

    held_out = [line for line in lines if "held_out_loss" in line]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot([line["step"] for line in lines], [line["loss"] for line in lines], linewidth=0.8, label="training batch")
    axis.plot(
        [line["step"] for line in held_out], [line["held_out_loss"] for line in held_out], "o-", label="held-out text"
    )
    axis.set(xlabel="step", ylabel="loss, nats a byte")
    axis.grid(linewidth=0.3)
    axis.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_whole(path, image.getvalue())


def _free(path: Path) -> Path:
    """log.jsonl -> log-1.jsonl, or the first number that no file has."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _text(line: Line) -> str:
    """JSON has no number that is not finite: null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }
    return json.dumps(finite) + "\n"
