"""Runs the PTX of a product for SM100 on the CPU: tensor memory, tcgen05.mma, multicast, stores by TMA, named barriers.

Clusters run one after the other. Products and copies are done when they are issued, so a barrier is told
of them at once: who waits too little is not found, who waits for what nobody does is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tests.ptx_products import OPERANDS, Barriers, ProductKernel, Warp, several
from tests.ptx_threads import POISON, SHARED, WARP, Memory, operand, place

LANES, COLUMNS = 128, 512
LINE = 128  # bytes of a row of a swizzled box
# Of operands a and b; registers of 16 bits hold unsigned ones
SMALL = {
    "shl.b16": "a << b & 0xFFFF", "or.b16": "a | b", "add.s16": "a + b & 0xFFFF", "sub.s16": "a - b & 0xFFFF",
    "shr.s16": "(a ^ 0x8000) - 0x8000 >> b & 0xFFFF", "mul.wide.s16": "((a ^ 0x8000) - 0x8000) * b & WORD",
    "cvt.u16.u32": "a & 0xFFFF", "cvt.s8.s32": "(a & 255 ^ 128) - 128 & 0xFFFF",
    "cvt.s16.s8": "(a & 255 ^ 128) - 128 & 0xFFFF", "min.relu.s32": "max(min(signed(a), signed(b)), 0)",
}  # fmt: skip
NOTHING = (
    "tcgen05.fence", "tcgen05.wait", "tcgen05.relinquish", "tcgen05.dealloc", "cp.async.bulk.commit",
    "cp.async.bulk.wait", "barrier.cluster.arrive",
)  # fmt: skip


class Tcgen05Kernel(ProductKernel):
    """A kernel of a PTX text."""

    def run(
        self,
        ctas: int,
        threads: int,
        parameters: Sequence[dict[int, int]],
        memory: Memory,
        copies: Mapping[int, tuple[np.ndarray, int]],
        size: int = 1,
    ) -> None:
        """``copies``: by a tensor map's parameter (matrix, or batch of some, rows of a box); results, too.

        ``size``: CTAs of a cluster.
        """
        for first in range(0, ctas, size):
            cluster: list[Cta] = []
            cluster += [Cta(np.full(SHARED, POISON, np.uint32), copies, cluster) for _ in range(size)]
            warps = []
            for rank, here in enumerate(cluster):
                given = (first + rank, ctas, parameters, memory.words, here.shared, here)
                run = [self.of_thread(t, *given) for t in range(threads)]
                warps += [NamedWarp(run[w : w + WARP], here) for w in range(0, threads, WARP)]
            in_turn(warps, threads)

    def _translate(self, line: str, depth: int) -> None:
        if line.startswith("@"):
            return super()._translate(line, depth)
        name, _, rest = line.partition(" ")
        parts = OPERANDS.findall(rest)
        if name.startswith(NOTHING):
            statements = ["pass"]
        elif parts[-1:] == ["%cluster_ctarank"]:
            statements = [f"{operand(parts[0])} = barriers.rank()"]
        elif parts[-1:] == ["%laneid"]:
            statements = [f"{operand(parts[0])} = tid % {WARP}"]
        elif name == "barrier.cluster.wait":
            statements = ["yield 'barrier', ('cluster', 0)"]
        elif name in ("cvta.to.shared::cluster.u64", "cvta.shared.u64"):
            statements = [f"{operand(parts[0])} = {operand(parts[1])}"]
        elif name.startswith("ld.param") and name.endswith(".b8"):
            number, offset = re.search(r"param_(\d+)(?:\+(\d+))?", parts[1]).groups()
            targets = enumerate(several(parts[0]))
            statements = [f"{target} = parameters[{number}][{int(offset or 0) + i}]" for i, target in targets]
        elif name.startswith("bar.sync"):
            number, count = (operand(part) for part in (*parts, "0")[:2])
            statements = [f"yield 'barrier', ({number}, {count})"]
        elif name.startswith("tcgen05.alloc"):
            statements = [f"shared[{place(parts[0])} >> 2] = 0"]
        elif name.startswith("tcgen05.commit"):
            mask = operand(parts[1]) if "multicast" in name else None
            statements = [f"for cta_ in barriers.of({mask}):", f" cta_.arrive({place(parts[0])}, 0)"]
        elif name.startswith("tcgen05.mma"):
            accumulator, a, b, kind, _, accumulates = parts
            given = ", ".join([place(accumulator), *map(operand, (a, b, kind, accumulates))])
            statements = [f"barriers.multiply({given})"]
        elif name.startswith(("tcgen05.ld.sync.aligned.32x32b", "tcgen05.st.sync.aligned.32x32b")):
            loads = name.startswith("tcgen05.ld")
            registers, at = (several(parts[0]), parts[1]) if loads else (several(parts[1]), parts[0])
            statements = [f"row_ = barriers.row({place(at)}, tid, {len(registers)})"]
            for i, register in enumerate(registers):
                statements.append(f"{register} = int(row_[{i}])" if loads else f"row_[{i}] = {register} & WORD")
        elif name.startswith("tcgen05.ld.sync.aligned.16x256b"):
            registers = several(parts[0])
            statements = [f"{', '.join(registers)} = barriers.pairs({place(parts[1])}, tid, {len(registers)})"]
        elif name.startswith("cp.async.bulk.tensor") and "multicast" in name:
            matrix, _, at = parts[1].strip("[]").partition(",")
            at = ", ".join(f"signed({value})" for value in several(at))
            given = f"{place(parts[0])}, {operand(matrix)}, ({at},), {place(parts[2])}"
            statements = [f"for cta_ in barriers.of({operand(parts[3])}):", f" cta_.copy({given})"]
        elif name.startswith("cp.async.bulk.tensor") and ".global.shared::cta" in name:
            matrix, _, at = parts[0].strip("[]").partition(",")
            at = ", ".join(f"signed({value})" for value in several(at))
            statements = [f"barriers.store({operand(matrix)}, ({at},), {place(parts[1])})"]
        elif name.startswith(("ld.shared.v2.b64", "st.global.v2.b64")):
            value, address = parts if name.startswith("ld") else parts[1::-1]
            space = "shared" if "shared" in name else "memory"
            statements = [f"at_ = {place(address)} >> 2"]
            for i, part in enumerate(several(value)):
                low, high = f"{space}[at_ + {2 * i}]", f"{space}[at_ + {2 * i + 1}]"
                if name.startswith("ld"):
                    statements.append(f"{part} = int({low}) | int({high}) << 32")
                else:
                    statements += [f"{low} = {part} & WORD", f"{high} = {part} >> 32 & WORD"]
        elif name == "mov.b64" and parts[0].startswith("{"):
            halves = enumerate(several(parts[0]))
            statements = [f"{half} = {operand(parts[1])} >> {32 * i} & WORD" for i, half in halves if half != "_"]
        elif name == "mov.b64" and parts[1].startswith("{"):
            low, high = several(parts[1])
            statements = [f"{operand(parts[0])} = ({low}) & WORD | (({high}) & WORD) << 32"]
        elif name in SMALL:
            target, *given = map(operand, parts)
            values = dict(zip("ab", given, strict=False))
            code = re.sub(r"\b[ab]\b", lambda found: values[found[0]], SMALL[name])
            statements = [f"{target} = {code}"]
        elif name == "cvt.rn.bf16x2.f32":
            high, low = (f"rounded(number({operand(part)}))" for part in parts[1:])
            statements = [f"{operand(parts[0])} = {low} | {high} << 16"]
        else:
            return super()._translate(line, depth)
        self.lines += [" " * depth + statement for statement in statements]


class Cta(Barriers):
    """The mbarriers of a CTA, its tensor memory, and what is copied and multiplied."""

    def __init__(self, shared: np.ndarray, copies: Mapping[int, tuple[np.ndarray, int]], cluster: list[Cta]) -> None:
        super().__init__(shared, copies)
        self.tensor_memory, self.cluster = np.full((LANES, COLUMNS), POISON, np.uint32), cluster

    def rank(self) -> int:
        return self.cluster.index(self)

    def of(self, mask: int | None) -> list[Cta]:
        """The CTAs of the cluster that a mask names; None: this one."""
        return [self] if mask is None else [cta for i, cta in enumerate(self.cluster) if mask >> i & 1]

    def row(self, address: int, thread: int, columns: int) -> np.ndarray:
        """A thread's columns of its warp's lanes."""
        lane, column = address >> 16, address & 0xFFFF
        assert lane == thread // WARP % 4 * WARP, "a warp reaches the lanes of its index alone"
        return self.tensor_memory[lane + thread % WARP, column : column + columns]

    def pairs(self, address: int, thread: int, number: int) -> list[int]:
        """A thread's neighbouring columns of two of 16 lanes, as after a warp-level MMA."""
        lane, column = address >> 16, address & 0xFFFF
        assert lane % WARP in (0, 16) and lane // WARP == thread // WARP % 4
        rows = self.tensor_memory[lane + thread % WARP // 4 :: 8][:2]
        first = column + thread % 4 * 2
        return [int(rows[i // 2 % 2, first + i // 4 * 8 + i % 2]) for i in range(number)]

    def multiply(self, accumulator: int, a: int, b: int, kind: int, accumulates: bool) -> None:
        """D (M, N) = A (M, 16) B (N, 16)^T, and D, of bf16."""
        m, n = (kind >> 24 & 31) << 4, (kind >> 17 & 63) << 3
        a, b = self.operand(a, m, kind >> 15 & 1), self.operand(b, n, kind >> 16 & 1)
        lane, first = accumulator >> 16, accumulator & 0xFFFF
        assert (m, lane) in ((LANES, 0), (64, 0), (64, 16))
        lanes = np.arange(LANES) if m == LANES else lane + np.arange(64) // 16 * WARP + np.arange(64) % 16
        sums = self.tensor_memory[lanes, first : first + n].view(np.float32)
        product = (a @ b.T).astype(np.float32)
        self.tensor_memory[lanes, first : first + n] = (product + sums if accumulates else product).view(np.uint32)

    def operand(self, descriptor: int, rows: int, is_along_rows: int) -> np.ndarray:
        """The operand (rows, 16) that a descriptor of shared memory swizzled by 128 bytes stands for."""
        assert descriptor >> 61 == 2, "another swizzle"
        start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        row, k = np.arange(rows)[:, None], np.arange(16)[None]
        if is_along_rows:  # atoms of 64 rows x 8 of k
            at = start + 2 * (row % 64) + row // 64 * leading + k % 8 * LINE + k // 8 * stride
        else:  # of 8 rows x 64 of k
            at = start + 2 * k + row % 8 * LINE + row // 8 * stride
        at ^= (at >> 7 & 7) << 4
        halves = self.shared.view(np.uint16)[at >> 1].astype(np.uint32)
        return (halves << 16).view(np.float32)

    def store(self, parameter: int, at: tuple[int, ...], source: int) -> None:
        """A box of rows of 128 bytes, as far as it is inside of the matrix."""
        matrix, rows = self.copies[parameter]
        column, row, *entry = at
        part = matrix[tuple(entry)].view(np.uint8)[row : row + rows]
        first = column * matrix.itemsize
        part = part[:, first : first + LINE]
        lines = self.shared[source // 4 : source // 4 + LINE // 4 * rows].view(np.uint8).reshape(rows, 8, 16)
        for i in range(len(part)):
            part[i] = lines[i, np.arange(8) ^ i % 8].reshape(-1)[: part.shape[1]]


class NamedWarp(Warp):
    """A warp that meets others at a barrier of a number."""

    def of(self, name: str, values: list) -> list:
        if name == "barrier":
            self.barrier = *values[0], None if values[0][0] == "cluster" else id(self.barriers)
        return super().of(name, values)


def in_turn(warps: list[NamedWarp], threads: int) -> None:
    while any(warp.at != "end" for warp in warps):
        if any([warp.advance() for warp in warps]):
            continue
        waiting = Counter(warp.barrier for warp in warps if warp.at == "barrier")
        counts = {at: len(warps) * WARP if at[0] == "cluster" else at[1] or threads for at in waiting}
        full = [at for at, number in waiting.items() if number * WARP == counts[at]]
        assert full, "deadlock"
        for warp in warps:
            if warp.at == "barrier" and warp.barrier in full:
                warp.at = "work"
