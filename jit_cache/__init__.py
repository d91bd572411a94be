"""Compile a CuTe kernel once, keep it, load it: a cache of native code for kernels in NVIDIA's CuTe Python DSL.

compiled, Program     decorate a builder; its call returns the loaded function
prewarm               compile many kernels ahead of time, in parallel, without a GPU
load_shared           load a kernel in a process without the compiler
recording             which kernels launch code asks for, none of them compiled
stats                 what this process compiled and loaded
`python -m jit_cache` info | list | explain | prewarm | verify | gc | clear | export | import
"""

from .bundle import BundleError, load_shared
from .compile import (
    Compiled,
    ForkedProcessError,
    KernelCompileError,
    MissingKernelError,
    Program,
    compiled,
    recording,
    stats,
)
from .prewarm import prewarm
from .store import Damaged

__all__ = [
    "BundleError",
    "Compiled",
    "Damaged",
    "ForkedProcessError",
    "KernelCompileError",
    "MissingKernelError",
    "Program",
    "compiled",
    "load_shared",
    "prewarm",
    "recording",
    "stats",
]
