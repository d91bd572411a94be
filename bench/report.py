"""Makes docs/performance.md and its figures from the saved lines.

    python -m bench.report

For each GPU and case the last run that measured ours is shown. A peer that another run measured beside ours is shown by
its time over ours in that run. The same lines give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import figures
from bench.harness import REPOSITORY, RESULTS
from bench.saved import FLOORS, NAMES, OURS, Compared, Line, column, compared, newest, read_lines
from jit_cache.files import write_whole

DOCS = REPOSITORY / "docs"


# Numbers


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio(value: float) -> str:
    """Rounded down: three decimals below 2, else two."""
    digits = 3 if value < 2 else 2
    return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first two columns are words."""
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


# Tables


def speed_table(section: Section, lines: Sequence[Line]) -> str:
    """Our times, the share of the copy's speed, the others' times over ours; then where a peer is faster."""
    cases = compared(lines)
    others = sorted({name for case in cases for name in case.ratios}, key=column)
    peaks = sorted({name for case in cases for name in case.peaks}, key=column) if section.has_peaks else []
    head = ["op", "shape", "ours, µs", *["share of the copy"] * section.has_copy]
    head += [NAMES.get(name, name) for name in others]
    head += [f"peak, {'ours' if name == OURS else NAMES.get(name, name)}, MiB" for name in peaks]
    rows = []
    for name, group in _groups(cases).items():
        shown = [case for case in group if len(group) <= 4 or case.line["shape"] in section.shapes]
        for case in shown:
            rows.append([name, case.line["shape"], f"**{case.line['us']:.1f}**"])
            rows[-1] += [ratio(case.share)] * section.has_copy
            rows[-1] += [_ratio_cell(case, other) for other in others]
            rows[-1] += [f"{case.peaks[peak] / 2**20:.0f}" if peak in case.peaks else "–" for peak in peaks]
        if len(shown) < len(group):
            rows.append([name, f"mean of {len(group)} (least)", ""])
            rows[-1] += [_mean_cell([case.share for case in group])] * section.has_copy
            rows[-1] += [_mean_cell([case.ratios[other] for case in group if other in case.ratios]) for other in others]
            rows[-1] += [""] * len(peaks)
    earlier = ["\\* measured in an earlier run of both.\n"] * any("before" in case.line for case in cases)
    return "\n".join([markdown(head, _without_repeats(rows)), *earlier, faster_peers(section, cases)])


def faster_peers(section: Section, cases: Sequence[Compared]) -> str:
    """Where the fastest peer is faster than ours, and by how much less time it takes, rounded up."""
    peers, found = section.peers(cases), []
    for name, group in _groups(cases).items():
        places = []
        for case in group:
            peer = case.best_peer(peers)
            if peer and case.ratios[peer] < 1:
                percent = math.ceil(1000 * (1 - case.ratios[peer])) / 10
                places.append(f"{case.line['shape']} ({NAMES.get(peer, peer)}, {percent:.1f} %)")
        if places:
            found.append(f"- {name}: {', '.join(places)}\n")
    return "A peer is faster:\n\n" + "".join(found) if found else "A peer is faster: nowhere.\n"


def _groups(cases: Iterable[Compared]) -> dict[str, list[Compared]]:
    groups: dict[str, list[Compared]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return groups


def _ratio_cell(case: Compared, other: str) -> str:
    if other not in case.ratios:
        return "–"
    return ratio(case.ratios[other]) + "\\*" * (other in case.line.get("before", {}))


def _mean_cell(values: Sequence[float]) -> str:
    return f"{ratio(geometric_mean(values))} ({ratio(min(values))})" if values else "–"


def _without_repeats(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows; the first cell is empty where it repeats the one above."""
    above = ["", *(row[0] for row in rows)]
    return [[row[0] if row[0] != last else "", *row[1:]] for row, last in zip(rows, above, strict=False)]


def host_table(section: Section, lines: Sequence[Line]) -> str:
    """The host's time of each provider, without and with autograd."""
    columns = [(variant, name) for variant in ("inference", "training") for name in (OURS, "torch", "launch_floor")]
    names = {OURS: "ours", "torch": "torch", "launch_floor": "floor"}
    times: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for line in lines:
        times.setdefault((line["op"], line["shape"]), {})[line["variant"], line["provider"]] = line["host_us"]
    rows = [
        [*key, *(f"{found[column]:.1f}" if column in found else "–" for column in columns)]
        for key, found in times.items()
    ]
    return markdown(["op", "shape", *(f"{variant}, {names[name]}" for variant, name in columns)], rows)


# part of a training step -> what the name of each of its kernels contains; the first that fits
STEP_PARTS = {
    "products": ("cute_kernelsgemm",),
    "hyper-connections": ("cute_kernelsmhc",),
    "norms, sums": ("cute_kernelsnorm", "cute_kernelscommon"),
    "attention": ("sdpa", "cudnn::fusion"),
    "copies to and from the host": ("Memcpy",),
    "torch's other kernels": ("",),
}


def step_table(section: Section, lines: Sequence[Line]) -> str:
    """The training steps with the time of their parts, in ms; then the losses of whole runs beside torch's."""
    head = ["shape", "variant", "ms", "over n0", "peak, MiB", *STEP_PARTS]
    rows = []
    for line in lines:
        if line["op"] != "step":
            continue
        parts = dict.fromkeys(STEP_PARTS, 0.0)
        for name, us in line["kernels"].items():
            parts[next(part for part, words in STEP_PARTS.items() if any(word in name for word in words))] += us
        over = f"{line['us'] / line['n0_us']:.3f}" if "n0_us" in line else "–"
        rows.append([line["shape"], line["variant"], f"**{line['us'] / 1e3:.2f}**", over])
        rows[-1] += [f"{line['peak_bytes'] / 2**20:.0f}", *(f"{us / 1e3:.1f}" if us else "–" for us in parts.values())]

    def nats(line: Line) -> str:
        return f"{math.ceil(1000 * line['error']['distance']) / 1000:.3f}"

    curves = {line["provider"]: line for line in lines if line["op"] == "curve"}
    sentence = [
        f"Losses of `train`, {len(ours['losses'])} steps of {ours['shape']}, averaged over 10 steps: ours stay within "
        f"{nats(ours)} nats of torch's; torch's with the rows of each batch in another order stay "
        f"within {nats(reordered)}.\n"
        for ours, reordered in [(curves.get(OURS), curves.get("torch_reordered"))]
        if ours and reordered
    ]
    return "\n".join([markdown(head, _without_repeats(rows)), *sentence])


def bits_table(section: Section, lines: Sequence[Line]) -> str:
    """The largest share of a row's outputs whose bits change, and in how many batch sizes any does."""
    providers = sorted({line["provider"] for line in lines}, key=column)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        shares = line["differing"].values()
        cell = f"{100 * max(shares):.1f} % ({sum(map(bool, shares))} of {len(shares)})"
        found.setdefault((line["op"], line["shape"]), {})[line["provider"]] = cell
    rows = [[*case, *(cells.get(name, "–") for name in providers)] for case, cells in found.items()]
    return markdown(["op", "shape", *(NAMES.get(name, name) for name in providers)], rows)


# Families


@dataclass(frozen=True)
class Section:
    """How a family is shown.

    measured: what the shapes and the columns are
    shapes: of a group of more than four cases only these are shown, and the geometric mean of all
    has_copy, has_peaks: whether the table has our share of the copy's speed, and the peak memory
    not_peers: providers that nobody would use
    note: what else a reader must know, without a number of ours
    table: makes the table and what belongs to it
    """

    title: str
    measured: str
    shapes: tuple[str, ...] = ()
    has_copy: bool = True
    has_peaks: bool = False
    not_peers: tuple[str, ...] = ()
    note: str = ""
    table: Callable[[Section, Sequence[Line]], str] = speed_table

    def peers(self, cases: Iterable[Compared]) -> list[str]:
        found = {name for case in cases for name in case.ratios}
        return sorted(found - {*FLOORS, *self.not_peers}, key=column)


SECTIONS = {
    "bits": Section(
        "Bits of a row in other batches",
        "The first row of every batch is the same. Shown is the largest share of its outputs whose bits differ from "
        "those in a batch of one row, and in how many batch sizes any bit differs; the shape is that of the largest "
        "batch, rows x N x K of a linear layer.",
        table=bits_table,
    ),
    "norm": Section(
        "Norms",
        "Shapes are rows x width; a backward computes every gradient. Odd rows do not start on 16 bytes, few are wide.",
        shapes=("32768x1024", "8192x4096", "4096x4096", "2048x4096", "2048x16384", "2671x50257", "5x262144"),
    ),
    "gemm": Section(
        "Matrix products",
        "Shapes are MxNxK of the forward, y (M, N) = x (M, K) weight (N, K)^T, and LxMxNxK of `bmm`; dA = dy weight, "
        "dB = dy^T x. The variant decode has few rows, tokens 17 to 512, accumulate adds to an fp32 `main_grad`.",
        shapes=(
            *("4096x4096x4096", "4096x12288x4096", "4096x14336x4096", "4096x4096x14336", "8192x8192x8192"),
            *("1x4096x4096", "64x4096x4096", "256x4096x4096", "1x1024x4096"),
        ),
        has_copy=False,
        note="quack is tuned for each shape. Triton is a persistent batch-invariant kernel with one fixed tile, "
        "written here. Reading alone is no product: it reads the weights. With bias_gelu our gelu is "
        "exact, cuBLASLt's is approximate. A training step at the GPU's power limit does not gain what a product alone "
        "gains.",
    ),
    "reduction": Section(
        "Reductions",
        "Shapes are rows x columns; sums are of rows, of columns or of all, to fp32. Odd rows do not start on 16 "
        "bytes, few are wide.",
        shapes=("8192x4096", "4096x32000", "1024x151936", "2671x50257", "5x262144"),
        note="Liger refuses rows of more than 65,536 columns. quack's softmax of the longest bf16 rows returns NaN and "
        "is not shown there.",
    ),
    "scatter": Section(
        "Sums by an index",
        "Shapes are tokens x rows of the table x columns; of index_sum rows x columns x elements of a row.",
        note="Ids are uniform, or row r of the table comes about as often as 1 / (r + 1).",
    ),
    "sampling": Section(
        "Sampling",
        "Shapes are rows x columns of the logits. The copy moves what reading them moves.",
        note="torch is softmax and multinomial, behind filters as transformers has them; argmax where greedy.",
    ),
    "log_prob": Section(
        "Log-probabilities without logits",
        "Shapes are tokens x vocabulary x width. The variants: train and decode return log-probability and entropy, "
        "loss is a mean loss with its gradients in one call, loss_keeps_logits the same with ``keep_logits``. The peak "
        "is that of one call beside its inputs.",
        shapes=("1x151936x4096", "64x151936x4096", "256x151936x4096"),
        has_copy=False,
        has_peaks=True,
        note="Bare products are cuBLAS's alone: one for the logits; in a backward that one again and two for the "
        "gradients. torch and torch.compile keep the logits in memory, so their backward multiplies twice where ours "
        "multiplies three times, unless it keeps them, too.",
    ),
    "attention": Section(
        "Attention",
        "Shapes are batch x length x heads x heads of keys and values x head size.",
        has_copy=False,
        not_peers=("one_split",),
        note="torch is SDPA with its cuDNN backend, for windows and packed sequences its flex_attention; flash is SDPA "
        "with torch's own kernels. flash-attn-4 is 4.0.0b36. Ours without splits has other bits than the contract: it "
        "says what the splits cost. Reading alone reads the keys and values.",
    ),
    "moe": Section(
        "Experts",
        "Products of all experts of a layer have shapes of model, part, rows x experts x N x K; dA = dy weight, dW "
        "sums over each expert's rows, dW_into onto fp32. Other shapes are model and tokens. Groups are random "
        "(experts' popularity, as logits, has a deviation of 0.3), skew (0.7) or equal; decode has few rows, mxfp8 "
        "as few, of weights in mxfp8.",
        shapes=(
            "qwen3-30b-up-65536x128x1536x2048",
            "gpt-oss-120b-up-32768x128x5760x2880",
            "mixtral-8x7b-up-16384x8x28672x4096",
            "qwen3-30b-up-64x128x1536x2048",
            "gpt-oss-120b-up-32x128x5760x2880",
            "mixtral-8x7b-up-64x8x28672x4096",
            "qwen3-30b-8",
            "qwen3-30b-8192",
            "deepseek-v3-256-8192",
        ),
        not_peers=("equal_bmm", "dense", "bf16", "read"),
        note="torch is its grouped_mm, in a layer what transformers does around it in torch's operators; transformers "
        "is its own function. Three columns compute no result and say what groups cost: our bmm of as many rows in "
        "equal groups (of few tokens: of the experts that have rows), torch.mm of as many rows with one weight, a "
        "maximum over the weights of experts that have rows. With weights in mxfp8 torch, and ours in a column of its "
        "own, multiply with the dequantized ones.",
    ),
    "mhc": Section(
        "Hyper-connections",
        "Shapes are tokens x streams x channels. A layer is `pre` and `expand_combine` around a sublayer that takes no "
        "time; decode is `pre` of few tokens. The copy moves the tensors that have channels: the streams, the "
        "sublayer's input and output.",
        shapes=("8192x4x4096", "4096x4x7168"),
        not_peers=("torch",),
        note="torch is our reference, run eagerly: no peer. TransformerEngine's kernels have four streams and the "
        "channel-major layout.",
    ),
    "mxfp8": Section(
        "Block-scaled fp8",
        "Shapes are rows x columns, or experts x rows x columns. The variant blocked is a layout of the scales, square "
        "has a scale for 32 x 32 elements; rows and columns are where the blocks of `dequantize` lie.",
        shapes=("32768x7168", "8192x2048", "131072x7168", "1x8192x5120", "8x8192x5120", "8x7168x2048"),
        note="The results are the reference's bytes. torchao's kernels need SM100.",
    ),
    "host": Section(
        "Host time",
        "µs of the caller's thread for one call, without gradients (inference) and with autograd (training). The floor "
        "allocates the outputs and launches an empty kernel.",
        note="A host's CPU changes by the minute: compare within a row.",
        table=host_table,
    ),
    "decode_step": Section(
        "A step of decoding",
        "A token of each sequence through 8 layers of a Llama of 8B and its output layer, replayed from a CUDA graph. "
        "Shapes are sequences x keys of each. Ours runs inside of `batch_invariant`, over pages.",
        has_copy=False,
        has_peaks=True,
        not_peers=("compiled",),
        note="torch is transformers' model with one call of torch's attention a layer, without a mask; "
        "batch_invariant_ops is that model in that package's mode, with attention by products and a softmax. compiled "
        "is ours by `torch.compile`.",
    ),
    "rl_step": Section(
        "A step of reinforcement learning",
        "A roll-out of a Qwen3, 14 layers of the shape of 1.7B, and an update by GRPO. Shapes are sequences x a "
        "prompt's tokens x new tokens. Ours runs inside of `batch_invariant`, and the update has the roll-out's "
        "log-probabilities, bit by bit.",
        has_copy=False,
        has_peaks=True,
        note="torch is transformers' model over a static cache, its steps of decoding from a CUDA graph, as ours are; "
        "batch_invariant_ops is that in that package's mode, with attention by products and a softmax.",
    ),
    "mechanism": Section(
        "What batch_invariant costs the host",
        "µs of the caller's thread: of an operator, a block, a token through a Llama of 8 layers. torch has nothing "
        "registered; registered has the kernels under torch's operators, and no block.",
        has_copy=False,
        not_peers=("registered",),
    ),
    "training_step": Section(
        "A training step of whole models",
        "Forward and backward of one sequence; shapes are layers x tokens x channels. Ours attends by `attention`; "
        "batch_invariant is the whole model under the promise, compiled that by `torch.compile`; torch attends by "
        "cuDNN (flash: by its own kernels), and has transformers' experts; batch_invariant_ops is torch in that "
        "package's mode, which attends by products and a softmax.",
        has_copy=False,
        has_peaks=True,
        not_peers=("batch_invariant", "compiled"),
    ),
    "transformer": Section(
        "A training step",
        "Forward and backward of layers x tokens x channels, replayed from a CUDA graph; with offload the step runs "
        "eagerly. n0 has a plain residual, n4 four streams. Recompute works in blocks of one layer or of the best "
        "length (optimal). The peak does not count the parameters. The parts, in ms, come from eager calls; copies run "
        "beside the kernels.",
        note="The GPU's power limit sets the clocks of a step.",
        table=step_table,
    ),
}


# The page

PAGE_HEAD = """# Performance

<!-- Made by `make report` from bench/results/*.jsonl. Do not edit. -->

{figures}
Times are device times of all kernels of a call: L2 is cold, the call is replayed from a CUDA graph, all providers take
turns, the median counts. A column named after another provider holds its time over ours: above 1 we are faster. The
share of the copy is the time of an elementwise copy of the bytes that the op must move, over ours. Ratios are rounded
down; by how much a peer is faster is rounded up. Means are geometric. `bench/README.md` says how a number is made;
`bench/results` has every line.
"""
FIGURES = {
    "bits": "Share of a row's outputs whose bits change with the batch size",
    "peers": "Time of the fastest peer over ours, by family",
    "log_prob": "Memory and time of linear_log_prob",
}


def pages(results: Path) -> dict[str, str]:
    """Path below docs/ -> its text, from the `*.jsonl` files in `results`."""
    by_gpu = [newest(read_lines(path)) for path in sorted(results.glob("*.jsonl"))]
    drawn = draw(by_gpu)
    shown = "\n".join(f"![{FIGURES[name]}](figures/{name}.svg)\n" for name in drawn)
    parts = [PAGE_HEAD.format(figures=shown)]
    for family, section in SECTIONS.items():
        of_gpus = [[line for line in lines if line["family"] == family] for lines in by_gpu]
        if any(of_gpus):
            parts.append(f"## {section.title}\n\n{section.measured}\n")
        for lines in filter(None, of_gpus):
            parts += [f"{about(lines)}\n", section.table(section, lines)]
        if any(of_gpus) and section.note:
            parts.append(f"{section.note}\n")
    return {"performance.md": "\n".join(parts)} | {f"figures/{name}.svg": svg for name, svg in drawn.items()}


def about(lines: Sequence[Line]) -> str:
    """Where, with which versions, when and at which commits the lines were measured."""
    last = max(lines, key=lambda line: line["date"])
    dates, commits = (sorted({line[field][:10] for line in lines}) for field in ("date", "commit"))
    versions = f"driver {last['driver']}, torch {last['torch']}, DSL {last['dsl']}"
    return f"{last['gpu']}, {versions}; {', '.join(dates)}; commits {', '.join(commits)}."


# Figures


def draw(by_gpu: Iterable[Sequence[Line]]) -> dict[str, str]:
    """Name -> SVG, each of the GPU that has most lines for it; nothing of a figure without lines."""
    drawn = {}
    for name, families, make in (
        ("bits", ("bits",), draw_bits),
        ("peers", tuple(SECTIONS), draw_peers),
        ("log_prob", ("log_prob",), draw_log_prob),
    ):
        lines = max(([line for line in lines if line["family"] in families] for lines in by_gpu), key=len, default=[])
        if svg := lines and make(lines):
            drawn[name] = svg
    return drawn


def draw_bits(lines: Sequence[Line]) -> str:
    cases: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines:
        _, *sizes = line["shape"].split("x")
        found = cases.setdefault(f"{line['op']} {' → '.join(reversed(sizes))}", {})
        found[line["provider"]] = {int(batch): share for batch, share in line["differing"].items()}
    quiet_last = sorted(cases, key=lambda case: not any(any(shares.values()) for shares in cases[case].values()))
    return figures.bits(lines[0]["gpu"], {case: cases[case] for case in quiet_last})


FORWARD = ("fwd", "prefill", "append", "decode")
# bar group -> its family, and which of its lines
BAR_GROUPS: dict[str, tuple[str, Callable[[Line], bool]]] = {
    "Norms": ("norm", lambda line: True),
    "Matrix products": ("gemm", lambda line: line["variant"] not in ("decode", "tokens")),
    "… of up to 512 rows": ("gemm", lambda line: line["variant"] in ("decode", "tokens")),
    "Reductions": ("reduction", lambda line: True),
    "Log-probabilities": ("log_prob", lambda line: "loss" not in line["variant"]),
    "Attention": ("attention", lambda line: line["op"] == "attention"),
    "… over a cache": ("attention", lambda line: line["op"] == "attention_with_kv_cache"),
    "Products of experts": ("moe", lambda line: line["op"] == "grouped_mm"),
    "Layers of experts": ("moe", lambda line: line["op"] == "experts"),
    "Hyper-connections": ("mhc", lambda line: line["op"] == "layer"),
    "Block-scaled fp8": ("mxfp8", lambda line: True),
}


def draw_peers(lines: Sequence[Line]) -> str:
    bars = {}
    for title, (family, belongs) in BAR_GROUPS.items():
        cases = compared([line for line in lines if line["family"] == family and belongs(line)])
        peers = SECTIONS[family].peers(cases)
        best: dict[str, list[float]] = {}
        for case in cases:
            if peer := case.best_peer(peers):
                direction = "forward" if case.line["direction"] in FORWARD else "backward"
                best.setdefault(direction, []).append(case.ratios[peer])
        if best:
            names = ", ".join(dict.fromkeys(NAMES.get(peer, peer).partition(",")[0] for peer in peers))
            bars[title] = names, {direction: geometric_mean(ratios) for direction, ratios in best.items()}
    return figures.peers(lines[0]["gpu"], bars) if bars else ""


LOG_PROB_SHAPE = "4096x151936x4096"
LOG_PROB_CASES = {
    ("fwd", "train"): "Forward: log-probability and entropy",
    ("step", "loss"): "A mean loss and its gradients",
    ("step", "loss_keeps_logits"): "The same, logits kept",
}


def draw_log_prob(lines: Sequence[Line]) -> str:
    cases: dict[str, dict[str, tuple[float, float]]] = {}
    for line in lines:
        title = LOG_PROB_CASES.get((line["direction"], line["variant"]))
        if title and line["shape"] == LOG_PROB_SHAPE and line["provider"] not in FLOORS:
            cases.setdefault(title, {})[NAMES[line["provider"]]] = line["peak_bytes"] / 2**30, line["us"] / 1e3
    tokens, vocabulary, width = LOG_PROB_SHAPE.split("x")
    shape = f"{tokens} tokens, vocabulary {vocabulary}, width {width}"
    return figures.log_prob(lines[0]["gpu"], shape, cases) if cases else ""


def main(results: Path = RESULTS, docs: Path = DOCS) -> None:
    for name, text in pages(results).items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
        print(path)


if __name__ == "__main__":
    main()
