"""Runs a kernel's PTX on the CPU: integers, and fp32 whose approximate functions are exact ones, rounded.

A thread is a generator. A warp's threads meet at shuffles, votes and reductions, a CTA's at its barrier, a cluster's
CTAs at theirs; clusters run one after the other. An instruction that is not known is an error.
"""

import math
import re
import struct
from collections.abc import Iterator, Sequence

import numpy as np

WARP = 32
WORD, LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
SHARED = 1 << 16  # words of a CTA
PEER_BITS = 20  # of an address in the shared memory of a cluster's CTA, whose rank is above them
POISON = 0xDEADBEEF
JUMPS = ("bra", "ret")
SPECIAL = {"%tid.x": "tid", "%ctaid.x": "cta", "%nctaid.x": "ctas", "%lanemask_lt": "((1 << tid % 32) - 1)"}
NOTHING = ("griddepcontrol", "bar.warp", "barrier.cluster.arrive")
COMPARES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neu": "!="}
COMPARES |= {"ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}
UNORDERED = ("ltu", "leu", "gtu", "geu")  # true of NaN, too
# Of operands a, b, c: of 32-bit words, of 64-bit integers, of predicates
INTEGERS = {
    "add": "a + b", "sub": "a - b", "mul.lo": "a * b", "mad.lo": "a * b + c", "neg": "-a", "abs": "abs(a)",
    "and": "a & b", "or": "a | b", "xor": "a ^ b", "not": "~a", "shl": "a << b", "shr": "a >> b", "rem": "a % b",
    "min": "min(a, b)", "max": "max(a, b)", "mul.wide": "a * b", "mul.hi": "a * b >> 32", "mov": "a", "cvt": "a",
    "popc": "a.bit_count()", "clz": "32 - a.bit_length()", "selp": "a if c else b", "div": "a // b",
}  # fmt: skip
FLOATS = {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "fma": "a * b + c", "neg": "-a", "max": "greater(a, b)",
    "div": "a / b", "min": "lesser(a, b)", "rcp": "1 / a", "ex2": "np.exp2(a)", "mov": "a", "selp": "a if c else b",
    "add.rm": "down(a, b)", "abs": "abs(a)",
}  # fmt: skip
# Of 16 bits, no result negative
HALVES = {
    "mul.hi.u16": "a * b >> 16", "mul.lo.s16": "a * b & 0xFFFF", "shr.u16": "a >> b", "and.b16": "a & b",
    "add.s16": "a + b & 0xFFFF", "mul.wide.u16": "a * b", "mov.b16": "a",
}  # fmt: skip


class Memory:
    """Words of global memory: arrays of 32-bit elements, or pairs of 16-bit ones, with poison between them."""

    def __init__(self, words: int = 1 << 20) -> None:
        self.words, self.end = np.full(words, POISON, np.uint32), 64

    def array(self, values: np.ndarray) -> tuple[int, np.ndarray]:
        """(address, a view of what is there)."""
        words = np.ascontiguousarray(values).view(np.uint32).reshape(-1)
        view, address = self.words[self.end : self.end + words.size], 4 * self.end
        view[:] = words
        self.end += -(-(words.size + 64) // 64) * 64
        return address, view.view(values.dtype).reshape(values.shape)


class Kernel:
    """A kernel of a PTX text, the ``.entry`` whose name begins with ``name``."""

    def __init__(self, text: str, name: str = "kernel_cutlass_kernel") -> None:
        entry = next(part for part in text.split(".entry ")[1:] if part.startswith(name))
        self.blocks: list[list[str]] = [[]]
        self.labels: dict[str, int] = {}
        for line in entry[entry.index("\n{") :].splitlines():
            line = line.split("//")[0].strip().rstrip(";")
            if label := re.fullmatch(r"(\$\w+):", line):
                self.blocks.append([])
                self.labels[label[1]] = len(self.blocks) - 1
            elif line and not line.startswith((".", "{", "}")):
                self.blocks[-1].append(line.replace("\t", " "))
                if re.search(r"\bbra\b", line):
                    self.blocks.append([])
        self.lines = ["def thread(tid, cta, ctas, parameters, memory, shared, peers):", " at = 0", " while True:"]
        self._search(0, len(self.blocks), 2)
        names = {
            "np": np,
            "math": math,
            "word": word,
            "number": number,
            "signed": signed,
            "greater": greater,
            "lesser": lesser,
            "down": down,
            "WORD": WORD,
            "LONG": LONG,
        }
        exec("\n".join(self.lines), names)
        self.thread = names["thread"]

    def launch(
        self, ctas: int, threads: int, parameters: Sequence[dict[int, int]], memory: Memory, cluster: int = 1
    ) -> None:
        """``parameters``: of each one its values by their offsets: of a tensor's, the address, sizes and strides."""
        for first in range(0, ctas, cluster):
            peers = [np.full(SHARED, POISON, np.uint32) for _ in range(cluster)]
            running = []
            for rank in range(cluster):
                given = first + rank, ctas, parameters, memory.words, peers[rank], peers
                run = [self.thread(t, *given) for t in range(threads)]
                running.append([run[w : w + WARP] for w in range(0, threads, WARP)])
            with np.errstate(invalid="ignore"):  # infinities
                while any(running):
                    running = [to_cluster_barrier(warps) for warps in running]

    def _search(self, low: int, high: int, depth: int) -> None:
        """Python that finds the block ``at`` among these, and runs it."""
        pad = " " * depth
        if high - low > 1:
            middle = (low + high) // 2
            for line, ends in ((f"if at < {middle}:", (low, middle)), ("else:", (middle, high))):
                self.lines.append(pad + line)
                self._search(*ends, depth + 1)
            return
        for line in self.blocks[low]:
            self._translate(line, depth)
        self.lines.append(f"{pad}at = {low + 1}")

    def _translate(self, line: str, depth: int) -> None:
        pad = " " * depth
        if found := re.fullmatch(r"@(!?)(%p\d+) +(.*)", line):
            self.lines.append(f"{pad}if {'not ' * bool(found[1])}{operand(found[2])}:")
            return self._translate(found[3], depth + 1)
        name, _, rest = line.partition(" ")
        base, *words = name.split(".")
        kind, operands = words[-1] if words else "", re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if base in JUMPS:
            statements = ["return"] if base == "ret" else [f"at = {self.labels[operands[0]]}", "continue"]
        elif name.startswith(NOTHING):
            statements = ["yield 'warp', None"] if base == "bar" else ["pass"]
        elif base == "bar" or name.startswith("barrier.cluster.wait"):
            statements = ["yield 'barrier', None" if base == "bar" else "yield 'cluster', None"]
        elif base == "mapa":
            statements = [f"{operand(operands[0])} = {operand(operands[1])} | {operand(operands[2])} << {PEER_BITS}"]
        elif base == "ld" and "shared::cluster" in words:
            at = place(operands[1])
            peer = f"peers[{at} >> {PEER_BITS}][({at} & {(1 << PEER_BITS) - 1}) >> 2]"
            statements = [f"{operand(operands[0])} = int({peer})"]
        elif name.startswith("ld.param"):
            number_, offset = re.search(r"param_(\d+)(?:\+(\d+))?", operands[1]).groups()
            step = 8 if "64" in kind else 4
            targets = enumerate(operands[0].strip("{}").split(","))
            statements = [f"{operand(t)} = parameters[{number_}][{int(offset or 0) + i * step}]" for i, t in targets]
        elif base in ("ld", "st") and "16" in kind:
            value, address = operands[:2] if base == "ld" else operands[1::-1]
            here = f"{'shared' if 'shared' in words else 'memory'}[{place(address)} >> 2]"
            shift = f"8 * ({place(address)} & 2)"
            if base == "ld":
                statements = [f"{operand(value)} = int({here}) >> {shift} & 0xFFFF"]
            else:
                statements = [f"{here} = int({here}) & ~(0xFFFF << {shift}) | ({operand(value)} & 0xFFFF) << {shift}"]
        elif base in ("ld", "st") and "64" in kind:
            value, address = operands[:2] if base == "ld" else operands[1::-1]
            statements = []
            for i, part in enumerate(value.strip("{}").split(",")):
                at = f"({place(address)} >> 2) + {2 * i}"
                low, high = (f"{'shared' if 'shared' in words else 'memory'}[{at} + {j}]" for j in (0, 1))
                if base == "ld":
                    statements += [f"{operand(part)} = int({low}) | int({high}) << 32"]
                else:
                    statements += [f"{low} = {operand(part)} & WORD", f"{high} = {operand(part)} >> 32 & WORD"]
        elif base in ("ld", "st"):
            operands = operands[:2]  # a policy may be behind
            value, address = operands if base == "ld" else operands[::-1]
            pairs = [
                (operand(part), f"{'shared' if 'shared' in words else 'memory'}[({place(address)} >> 2) + {i}]")
                for i, part in enumerate(value.strip("{}").split(","))
            ]
            statements = [f"{v} = int({p})" if base == "ld" else f"{p} = {v} & WORD" for v, p in pairs]
        elif name == "mov.b32" and operands[0].startswith("{"):
            halves = enumerate(operands[0].strip("{}").split(","))
            statements = [f"{operand(t)} = {operand(operands[1])} >> {16 * i} & 0xFFFF" for i, t in halves]
        elif name == "mov.b32" and operands[1].startswith("{"):
            low, high = map(operand, operands[1].strip("{}").split(","))
            statements = [f"{operand(operands[0])} = {low} | {high} << 16"]
        elif name == "mov.b64" and operands[0].startswith("{"):
            targets = [t.strip() for t in operands[0].strip("{}").split(",")]
            parts = (f"{operand(operands[1])} & WORD", f"{operand(operands[1])} >> 32 & WORD")
            statements = [f"{operand(t)} = {part}" for t, part in zip(targets, parts, strict=True) if t != "_"]
        elif name == "mov.b64" and operands[1].startswith("{"):
            low, high = map(operand, operands[1].strip("{}").split(","))
            statements = [f"{operand(operands[0])} = {low} | {high} << 32"]
        elif name.startswith("red.relaxed.cta.shared"):
            here = f"shared[{place(operands[0])} >> 2]"
            statements = [f"{here} = int({here}) + {operand(operands[1])} & WORD"]
        elif name in ("atom.shared.add.u32", "atom.shared.cta.add.u32"):
            here, target = f"shared[{place(operands[1])} >> 2]", operand(operands[0])
            statements = [f"{target} = int({here})", f"{here} = {target} + {operand(operands[2])} & WORD"]
        else:
            statements = [f"{operand(operands[0])} = {expression(line, base, words, kind, operands[1:])}"]
        self.lines += [pad + statement for statement in statements]


def expression(line: str, base: str, words: list[str], kind: str, operands: list[str]) -> str:
    """The result of an instruction, in Python; registers hold unsigned words, 64-bit integers or truths."""
    values = [operand(value) for value in operands]
    if base == "cvt" and words == ["f32", "bf16"]:
        return f"{values[0]} << 16"
    if base == "cvt" and words == ["rmi", "f32", "f32"]:
        return f"word(np.floor(number({values[0]})))"
    if base == "cvt" and words == ["rzi", "s32", "f32"]:
        return f"int(number({values[0]})) & WORD"
    if base == "cvt" and words == ["rzi", "u64", "f32"]:
        return f"int(number({values[0]}))"
    if base == "cvt" and words[:2] == ["rn", "f32"]:
        return f"word({reader(kind)(values[0])})"
    if base in ("shfl", "vote", "redux"):
        return f"yield '{base}.{words[0]}.{words[1]}', ({', '.join(values)},)"
    if base == "setp":
        read = reader(kind)
        is_nan = " or ".join(f"math.isnan({read(value)})" for value in values)
        if words[0] in ("nan", "num"):
            return is_nan if words[0] == "nan" else f"not ({is_nan})"
        compared = f"{read(values[0])} {COMPARES[words[0]]} {read(values[1])}"
        return f"{compared} or {is_nan}" if words[0] in UNORDERED else compared
    table = FLOATS if kind == "f32" else INTEGERS
    full = f"{base}.{words[0]}" if words and f"{base}.{words[0]}" in table else base
    code = HALVES.get(f"{full}.{kind}") if "16" in kind and base != "cvt" else table.get(full)
    if code is None:
        raise NotImplementedError(line)
    read = (lambda value: value) if kind in ("pred", "b64") or base in ("selp", "shl") else reader(kind)
    given = dict(zip("abc", values, strict=False))
    if base == "selp":
        code = re.sub(r"\b[abc]\b", lambda found: given[found[0]], code)
        return f"({code}) & {'LONG' if '64' in kind else 'WORD'}"
    code = re.sub(r"\b[abc]\b", lambda found: read(given[found[0]]), code)
    if kind == "f32":
        return f"word({code})"
    if kind == "pred":
        return f"not {values[0]}" if base == "not" else f"bool({code})"
    is_wide = "64" in kind or full == "mul.wide" or base == "cvt" and "64" in words[-2]
    return f"({code}) & LONG" if is_wide else f"({code}) & WORD"


def reader(kind: str):
    """Python that reads a register as a type."""
    if kind == "f32":
        return lambda value: f"number({value})"
    if kind == "u32":
        return lambda value: f"({value} & WORD)"  # a number may be written as a negative one
    if kind == "s64":
        return lambda value: f"signed({value}, 64)"
    return (lambda value: f"signed({value})") if kind == "s32" else (lambda value: f"({value})")


def operand(text: str) -> str:
    text = text.strip().split("|")[0]
    if text in SPECIAL:
        return SPECIAL[text]
    if text.startswith("0f"):
        return str(int(text[2:], 16))
    return "0" if text.startswith("__dynamic_shmem") else text.replace("%", "").replace("true", "True")


def place(address: str) -> str:
    base, _, offset = address.strip("[]").partition("+")
    return f"({operand(base)} + {offset or 0} & WORD)"


def to_cluster_barrier(warps: list[list[Iterator]]) -> list[list[Iterator]]:
    """Run a CTA's warps to the barrier of its cluster; those that have not ended by then."""
    while warps:
        stops = [to_barrier(warp) for warp in warps]
        warps = [warp for warp, stop in zip(warps, stops, strict=True) if stop]
        if "cluster" in stops:
            assert {*stops} == {"cluster"}, "a CTA's threads do not meet"
            break
    return warps


def to_barrier(warp: list[Iterator]) -> str:
    """Run a warp to its CTA's barrier, or its cluster's, which is returned; the empty string: to its end."""
    answers: list = [None] * WARP
    while True:
        asked = []
        for thread, answer in zip(warp, answers, strict=True):
            try:
                asked.append(thread.send(answer))
            except StopIteration:
                asked.append(None)
        if asked == [None] * WARP:
            return ""
        assert None not in asked and len({name for name, _ in asked}) == 1, "threads of a warp do not meet"
        name, values = asked[0][0], [of_thread for _, of_thread in asked]
        if name in ("barrier", "cluster"):
            return name
        answers = collective(name, values)


def collective(name: str, values: list) -> list:
    """The value that each thread of a warp gets."""
    if name == "warp":
        return [None] * WARP
    operation, _, mode = name.split(".")
    if operation == "vote":
        ballot = sum(1 << i for i, (truth, _) in enumerate(values) if truth)
        return [ballot if mode == "ballot" else ballot != 0] * WARP
    if operation == "redux":
        reduce = {"add": sum, "min": min, "max": max}[mode]
        return [reduce(signed(value) for value, _ in values) & WORD] * WARP
    sources = {"idx": lambda i, by: by, "up": lambda i, by: i - by, "bfly": lambda i, by: i ^ by}[mode]
    places = [sources(i, value[1]) for i, value in enumerate(values)]
    return [values[source if 0 <= source < WARP else i][0] for i, source in enumerate(places)]


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def number(value: int) -> np.float32:
    return np.float32(struct.unpack("<f", struct.pack("<I", value & WORD))[0])


def word(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def greater(a: np.float32, b: np.float32) -> np.float32:
    """The other one of NaN."""
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def lesser(a: np.float32, b: np.float32) -> np.float32:
    """The other one of NaN."""
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


def down(a: np.float32, b: np.float32) -> np.float32:
    """Their sum, rounded down; one is not so much smaller than the other that fp64 rounds, too."""
    exact = np.float64(a) + np.float64(b)
    total = np.float32(exact)
    return np.nextafter(total, np.float32(-np.inf)) if total > exact else total
