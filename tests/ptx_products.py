"""Runs a product's PTX on the CPU: TMA, mbarriers, ldmatrix, mma, pairs of bf16, beside what ``ptx_threads`` knows.

A warp runs until it waits for an mbarrier, or meets its CTA; then another does. Copies are done when they are issued.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tests import ptx_threads
from tests.ptx_threads import POISON, SHARED, WARP, Kernel, Memory, collective, operand, place

# The loop around a wait
WAIT = re.compile(r"\{[^{}]*LAB_WAIT:\s*mbarrier\.try_wait\.\S+ P1, (\[\S+\]), (%r\d+), \d+;.*?DONE:\s*\}", re.DOTALL)
OPERANDS = re.compile(r"\{[^}]*\}|\[(?:[^][{}]|\{[^}]*\})*\]|[^,\s]+")
NOTHING = ("prefetch", "fence", "griddepcontrol")
SIGNED = {"s8": (3, 0x80), "s16": (2, 0x8000)}  # of a part of a word: bytes that it may begin at, its sign
UNSIGNED = {"u8": (3, 0xFF), "b8": (3, 0xFF), "u16": (2, 0xFFFF), "b16": (2, 0xFFFF)}
# Of a result r and operands a, b, c
STATEMENTS = {
    "prmt.b32": "r = prmt(a, b, c)", "mul.bf16x2": "r = in_pairs(np.multiply, a, b)", "mad.lo.s64": "r = a * b + c",
    "fma.rn.bf16x2": "r = in_pairs(lambda x, y, z: x * y + z, a, b, c)", "mul.lo.s64": "r = a * b",
    "mul.wide.u16": "r = a * b", "cvt.rn.bf16.f32": "r = rounded(number(a))", "selp.b64": "r = a if c else b",
    "div.s32": "r = int(signed(a) / signed(b)) & WORD", "cvt.s64.s32": "r = signed(a)", "cvta.param.u64": "r = a",
}  # fmt: skip


class ProductKernel(Kernel):
    """A kernel of a PTX text; ``copies``: by a tensor map's parameter (matrix of 16-bit elements, rows of a box)."""

    def __init__(self, text: str) -> None:
        text = WAIT.sub(r"mbarrier.wait \1, \2;", text)
        text = re.sub(r"mma\.sync[^;]*;", lambda found: " ".join(found[0].split()), text)
        super().__init__(re.sub(r"kernel_cutlass\w*?(_param_\d+)?\b", r"kernel_cutlass_kernel\1", text))
        self.lines[0] = "def thread(tid, cta, ctas, parameters, memory, shared, barriers):"
        names = {**vars(ptx_threads), **globals()}
        exec("\n".join(self.lines), names)
        self.of_thread = names["thread"]

    def run(
        self,
        ctas: int,
        threads: int,
        parameters: Sequence[dict[int, int]],
        memory: Memory,
        copies: Mapping[int, tuple[np.ndarray, int]],
    ) -> None:
        """``parameters``: as of ``launch``."""
        for cta in range(ctas):
            shared = np.full(SHARED, POISON, np.uint32)
            barriers = Barriers(shared, copies)
            run = [self.of_thread(t, cta, ctas, parameters, memory.words, shared, barriers) for t in range(threads)]
            in_turn([Warp(run[w : w + WARP], barriers) for w in range(0, threads, WARP)])

    def _translate(self, line: str, depth: int) -> None:
        if line.startswith("@"):
            return super()._translate(line, depth)
        name, _, rest = line.partition(" ")
        kind, parts = name.rpartition(".")[2], OPERANDS.findall(rest)
        if name.startswith(NOTHING):
            statements = ["pass"]
        elif name == "elect.sync":
            statements = [f"{operand(parts[0].split('|')[1])} = tid % 32 == 0"]
        elif name.startswith("mbarrier.init"):
            statements = [f"barriers.init({place(parts[0])}, {operand(parts[1])})"]
        elif name.startswith("mbarrier.arrive"):
            statements = [f"barriers.arrive({place(parts[1])}, {operand(parts[2]) if 'expect_tx' in name else 0})"]
        elif name == "mbarrier.wait":
            statements = [f"yield 'wait', ({place(parts[0])}, {operand(parts[1])})"]
        elif name.startswith("cp.async.bulk.tensor"):
            matrix, _, at = parts[1].strip("[]").partition(",")
            at = ", ".join(f"signed({value})" for value in several(at))
            statements = [f"barriers.copy({place(parts[0])}, {operand(matrix)}, ({at},), {place(parts[2])})"]
        elif name.startswith("ldmatrix"):
            targets = several(parts[0])
            statements = [f"{', '.join(targets)} = yield 'ldmatrix', ({len(targets)}, {place(parts[1])})"]
        elif name.startswith("mma.sync"):
            target, *sources = (", ".join(several(part)) for part in parts)
            statements = [f"{target} = yield 'mma', ({', '.join(sources)})"]
        elif name == "mov.b64" and "_param_" in rest:
            statements = [f"{operand(parts[0])} = {rest.rpartition('_')[2]}"]
        elif name.startswith("ld.") and kind in SIGNED | UNSIGNED:
            begins, sign = SIGNED.get(kind, UNSIGNED.get(kind))
            space, mask = "shared" if "shared" in name else "memory", 2 * sign - 1 if kind in SIGNED else sign
            loaded = f"(int({space}[at_ >> 2]) >> 8 * (at_ & {begins}) & {mask})"
            loaded = f"({loaded} ^ {sign}) - {sign} & WORD" if kind in SIGNED else loaded
            statements = [f"at_ = {place(parts[1])}", f"{operand(parts[0])} = {loaded}"]
        elif name == "st.global.b16":
            kept = "int(memory[at_ >> 2]) & ~(0xFFFF << 8 * (at_ & 2)) & WORD"
            statements = [
                f"at_ = {place(parts[0])}",
                f"memory[at_ >> 2] = {kept} | {operand(parts[1])} << 8 * (at_ & 2)",
            ]
        elif name in STATEMENTS:
            given = dict(zip("rabc", (f"({operand(part)})" for part in parts), strict=False))
            given["r"] = operand(parts[0])
            statements = [re.sub(r"\b[rabc]\b", lambda found: given[found[0]], STATEMENTS[name])]
        else:
            return super()._translate(line, depth)
        self.lines += [" " * depth + statement for statement in statements]


def several(text: str) -> list[str]:
    return [operand(part) for part in text.strip(" {}").split(",")]


class Barriers:
    """The mbarriers of a CTA, and the copies that they are told of."""

    def __init__(self, shared: np.ndarray, copies: Mapping[int, tuple[np.ndarray, int]]) -> None:
        self.shared, self.copies, self.states = shared, copies, {}

    def init(self, address: int, count: int) -> None:
        self.states[address] = {"count": count, "missing": count, "bytes": 0, "phase": 0}

    def arrive(self, address: int, expected: int) -> None:
        state = self.states[address]
        assert state["missing"] > 0, "more threads arrive than are counted"
        state["missing"] -= 1
        self.complete(address, expected)

    def complete(self, address: int, expected: int) -> None:
        state = self.states[address]
        state["bytes"] += expected
        if not state["missing"] and not state["bytes"]:
            state["missing"], state["phase"] = state["count"], 1 - state["phase"]

    def is_over(self, address: int, parity: int) -> bool:
        return self.states[address]["phase"] != parity & 1

    def copy(self, target: int, parameter: int, at: tuple[int, ...], barrier: int) -> None:
        """A box of rows of 128 bytes, swizzled; zeros beyond the matrix."""
        assert target % 1024 == 0, "a swizzled box begins at a multiple of 1024 bytes"
        matrix, rows = self.copies[parameter]
        k, row, *entry = at
        part = matrix[tuple(entry)][row : row + rows, k : k + 64]
        box = np.zeros((rows, 64), np.uint16)
        box[: part.shape[0], : part.shape[1]] = part
        lines = self.shared[target // 4 : target // 4 + 32 * rows].view(np.uint16).reshape(rows, 8, 8)
        for i in range(rows):
            lines[i, np.arange(8) ^ i % 8] = box[i].reshape(8, 8)
        self.complete(barrier, -box.nbytes)


class Warp:
    """Threads that run to a wait, to their CTA's barrier, or to the end."""

    def __init__(self, threads: list[Iterator], barriers: Barriers) -> None:
        self.threads, self.barriers = threads, barriers
        self.answers: list = [None] * WARP
        self.waits: list = []
        self.at = "work"

    def advance(self) -> bool:
        """Whether there was anything to do."""
        if self.at != "work" or not all(self.barriers.is_over(*wait) for wait in self.waits):
            return False
        self.waits = []
        while self.at == "work" and not self.waits:
            asked = []
            for thread, answer in zip(self.threads, self.answers, strict=True):
                try:
                    asked.append(thread.send(answer))
                except StopIteration:
                    asked.append(("end", None))
            assert len({name for name, _ in asked}) == 1, "threads of a warp do not meet"
            self.answers = self.of(asked[0][0], [values for _, values in asked])
        return True

    def of(self, name: str, values: list) -> list:
        """The values that each thread gets."""
        if name in ("end", "barrier"):
            self.at = name
        elif name == "wait":
            self.waits = [] if all(self.barriers.is_over(*wait) for wait in values) else values
        elif name == "ldmatrix":
            words = self.barriers.shared
            rows = [[values[8 * i + lane // 4][1] // 4 for i in range(values[0][0])] for lane in range(WARP)]
            return [tuple(int(words[row + lane % 4]) for row in rows[lane]) for lane in range(WARP)]
        elif name == "mma":
            return multiplied(np.array(values, np.uint32))
        else:
            return collective(name, values)
        return [None] * WARP


def in_turn(warps: list[Warp]) -> None:
    while any(warp.at != "end" for warp in warps):
        if not any([warp.advance() for warp in warps]):
            assert any(warp.at == "barrier" for warp in warps) and all(warp.at != "work" for warp in warps), "deadlock"
            for warp in warps:
                warp.at = "work" if warp.at == "barrier" else "end"


def multiplied(words: np.ndarray) -> list[tuple[int, ...]]:
    """c + a b of m16n8k16: words (32, 10) of a's four registers, b's two, c's four; one rounding."""
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    halves, places = halves_of(words[:, :6]), [(lane // 4, lane % 4 * 2) for lane in range(WARP)]
    sums = words[:, 6:].copy().view(np.float32)
    for lane, (row, pair) in enumerate(places):
        for i in range(4):
            a[row + i % 2 * 8, pair + i // 2 * 8 : pair + i // 2 * 8 + 2] = halves[lane, i]
        for i in range(2):
            b[pair + 8 * i : pair + 8 * i + 2, row] = halves[lane, 4 + i]
            c[row + 8 * i, pair : pair + 2] = sums[lane, 2 * i : 2 * i + 2]
    d = (c + a @ b).astype(np.float32).view(np.uint32)
    return [tuple(int(d[row + i // 2 * 8, pair + i % 2]) for i in range(4)) for row, pair in places]


def halves_of(words: np.ndarray) -> np.ndarray:
    """Pairs of bf16 as fp32, (..., 2)."""
    return np.stack([words << 16, words & 0xFFFF0000], -1).astype(np.uint32).view(np.float32)


def in_pairs(function, *words: int) -> int:
    """A function of both bf16 numbers of each word, rounded."""
    values = halves_of(np.array(words, np.uint32)).astype(np.float64)
    low, high = (rounded(function(*values[:, i])) for i in range(2))
    return low | high << 16


def rounded(value: float) -> int:
    """The bits of the nearest bf16 number; ``value`` is one that fp32 holds."""
    bits = int(np.float32(value).view(np.uint32))
    if np.isnan(value):
        return 0x7FFF
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF


def prmt(a: int, b: int, selector: int) -> int:
    """Bytes of a and b; those that are chosen with 8 added are copies of their sign."""
    given = (a & ptx_threads.WORD | (b & ptx_threads.WORD) << 32).to_bytes(8, "little")
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes(255 * (given[n & 7] >> 7) if n & 8 else given[n & 7] for n in chosen), "little")
