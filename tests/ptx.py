"""The compiler's output for kernels, as text."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def compile_in(folder: Path, program: str) -> None:
    """Run a program that compiles kernels in a process and a cache of its own; their PTX stays in ``folder``."""
    environment = {
        **os.environ,
        "JIT_CACHE_DIR": str(folder / "cache"),
        "JIT_CACHE_BUNDLE": "",
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


INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?P<name>[a-z][\w.:]*)\s+(?P<target>[^,;]+),?(?P<sources>[^;]*);")
FP32_REGISTER = re.compile(r"%rd?\d+")  # rd: of two


def left_to_ptxas(kernel: str) -> list[str]:
    """Sums of an fp32 product that nothing else needs, without a rounding: ptxas may fuse them, or not.

    LLVM's own choices are in the PTX: ``fma.rn``. What the source names is ``mul.rn`` or ``fma.rn``.
    """
    uses = Counter(FP32_REGISTER.findall(kernel))
    found, products = [], {}
    for line in kernel.splitlines():
        if line.rstrip().endswith(":"):
            products = {}  # of another block: a loop's register holds the product of the turn before
        if match := INSTRUCTION.match(line):
            sources = FP32_REGISTER.findall(match["sources"])
            if re.fullmatch(r"(add|sub)(\.ftz)?\.f32(x2)?", match["name"]):
                found += [line.strip() for source in sources if products.get(source) and uses[source] == 2]
            for target in FP32_REGISTER.findall(match["target"]):
                products[target] = re.fullmatch(r"mul(\.ftz)?\.f32(x2)?", match["name"]) is not None
    return found
