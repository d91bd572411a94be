"""What the compiler makes of kernels, as text."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def compile_in(folder: Path, program: str) -> None:
    """Run a program that compiles kernels in a process and a cache of its own; their PTX stays in ``folder``."""
    environment = {
        **os.environ,
        "JIT_CACHE_DIR": str(folder / "cache"),
        "JIT_CACHE_MODE": "on",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def kernels_in(folder: Path, pattern: str = "*.ptx") -> list[str]:
    """The kernels of the files of a folder."""
    return [part for path in folder.glob(pattern) for part in path.read_text().split(".entry ")[1:]]
