"""``python -m cute_kernels bench``: the repository's benchmarks, which are not installed with the package."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from jit_cache.command import Outcome, UsageError

REPOSITORY = Path(__file__).resolve().parents[2]


def run(families: Sequence[str], quick: bool, save: bool) -> Outcome:
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


def bench_module(family: str) -> ModuleType:
    """The repository's bench/bench_<family>.py, which is not installed with the package."""
    if not (REPOSITORY / "bench" / f"bench_{family}.py").is_file():
        raise FileNotFoundError(
            f"no bench/bench_{family}.py in {REPOSITORY}: measuring needs a checkout of the repository"
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    return importlib.import_module(f"bench.bench_{family}")
