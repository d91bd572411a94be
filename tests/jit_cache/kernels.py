"""The smallest kernels that go all the way. Each compilation appends a byte to the file that COMPILES names, if any."""

import enum
import os
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from jit_cache import Program, compiled


class Mode(enum.Enum):
    PLAIN = "plain"
    FAST = "fast"


@dataclass(frozen=True)
class Config:
    threads: int = 64
    scale: float = 1.0
    mode: Mode = Mode.PLAIN
    tile: tuple = (1, 2)


class Add:
    """out = x + y, one thread an element."""

    def __init__(self, config):
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, stream):
        threads = self.config.threads
        grid = [cute.ceil_div(x.shape[0], threads), 1, 1]
        self.kernel(x, y, out).launch(grid=grid, block=[threads, 1, 1], smem=1024, stream=stream)

    @cute.kernel
    def kernel(self, x, y, out):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.config.threads + thread
        if i < x.shape[0]:
            out[i] = x[i] + y[i]


def _note():
    if "COMPILES" in os.environ:
        with open(os.environ["COMPILES"], "ab") as file:
            file.write(b".")


@compiled
def add(arch: str, dtype=cutlass.Float32, config: Config = Config()) -> Program:  # noqa: B008
    _note()
    rows = cute.sym_int()
    x, y, out = (cute.runtime.make_fake_compact_tensor(dtype, (rows,), assumed_align=16) for _ in range(3))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return Program(Add(config), x, y, out, stream)


@compiled
def broken(arch: str, n: int) -> Program:
    _note()
    raise RuntimeError("the builder is broken")


@compiled
def broken_kernel(arch: str) -> Program:
    _note()
    return Program(Add(Config()), 1, 2, 3)


@compiled
def dies(arch: str) -> Program:
    os._exit(7)


def specializations(arch):
    return [(add, (arch, dtype, Config())) for dtype in (cutlass.Float32, cutlass.BFloat16)]
