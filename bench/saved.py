"""The saved lines: reading them, the last run of each case, ours beside the others.

A line is what `harness.lines` makes; bench/results/<gpu>.jsonl holds one a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
OURS = "cute_kernels"
NAMES = {  # providers, in the order of the columns
    "cute_kernels": "cute_kernels",
    "torch": "torch",
    "torch_compile": "torch.compile",
    "cublas": "cuBLAS",
    "deep_gemm": "DeepGEMM",
    "quack": "quack",
    "liger": "Liger",
    "transformer_engine": "TransformerEngine",
    "batch_invariant_triton": "Triton",
    "transformers": "transformers",
    "bare_products": "bare products",
    "equal_bmm": "bmm of equal groups",
    "dense": "one weight",
    "bf16": "ours, bf16 weights",
    "read": "reading alone",
    "read_floor": "reading alone",
    "flash_attn_4": "flash-attn-4",
    "flash_attn_4_deterministic": "flash-attn-4, deterministic",
    "torch_flash": "torch, flash",
    "torch_flex": "torch, flex_attention",
    "one_split": "ours, without splits",
}
FLOORS = ("bare_products", "read_floor")  # compute less than the op: no peers
LABELS = {  # variants and dtypes in the table's first column
    "bfloat16": "",
    "float16": "fp16",
    "float32": "fp32",
    "plain": "",
    "prefill": "",
    "streams": "streams-major",
    "channels": "channel-major",
}
OPS = (  # in the order of the rows; the others after them
    *("rms_norm", "layer_norm", "mm", "linear", "bmm", "softmax", "log_softmax", "sum"),
    *("experts", "grouped_mm", "route", "permute", "combine", "swiglu"),
    *("layer", "pre", "projection", "aggregate", "expand_combine", "coefficients_sinkhorn"),
    *("quantize_rowwise", "quantize_colwise", "quantize_dual", "quantize_3d_colwise", "quantize_3d_dual"),
)
CASE_FIELDS = ("op", "direction", "dtype", "variant", "shape")


def read_lines(path: Path) -> list[Line]:
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        try:
            if text.strip():
                lines.append(json.loads(text))
        except json.JSONDecodeError as error:  # of a run that was stopped as it wrote, say
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {text[:60]!r}") from error
    return lines


def newest(lines: Iterable[Line]) -> list[Line]:
    """The lines of the run that measured ours last for each case (if none did, of the last run), in table order.

    The lines of a run have one date and commit. Ours has "before", if older runs measured other peers: peer -> its
    time over ours in the last of them; of a training step "n0_us", if its run measured n0.
    """
    cases: dict[tuple, dict[tuple, dict[str, Line]]] = {}  # case -> date and commit of a run -> provider -> line
    n0_us: dict[tuple, float] = {}  # date and commit of a run, shape -> time
    for line in lines:
        run = line["date"], line["commit"]
        cases.setdefault((line["family"], *_case(line)), {}).setdefault(run, {})[line["provider"]] = line
        if line["variant"] == "n0":
            n0_us[(*run, line["shape"])] = line["us"]
    shown: list[Line] = []
    for runs in cases.values():
        with_ours = [found for _, found in sorted(runs.items()) if OURS in found]
        last = with_ours[-1] if with_ours else runs[max(runs)]
        before = {
            name: line["us"] / found[OURS]["us"]
            for found in with_ours
            for name, line in found.items()
            if name not in last
        }
        if before:
            last[OURS] = last[OURS] | {"before": before}
        for line in last.values():
            run = line["date"], line["commit"], line["shape"]
            shown.append(line | {"n0_us": n0_us[run]} if run in n0_us else line)
    return sorted(shown, key=_table_order)


def _case(line: Line) -> tuple[str, ...]:
    return tuple(line[field] for field in CASE_FIELDS)


def _table_order(line: Line) -> tuple[Any, ...]:
    """Forward before backward, plain bf16 cases first, shapes by model, by what a row has, by the number of rows."""
    model, _, sizes = line["shape"].rpartition("-")
    rows, *features = map(int, re.findall(r"\d+", sizes))  # a chunk of a prompt: 512q1x32768
    special = line["variant"] not in ("plain", "prefill") or line["dtype"] != "bfloat16"
    direction = line["direction"] != "fwd", line["direction"]
    kind = special, line["variant"], line["dtype"]
    return _place(line["op"], OPS), direction, kind, model, features, rows, column(line["provider"])


def column(provider: str) -> tuple[int, str]:
    return _place(provider, tuple(NAMES))


def _place(name: str, order: Sequence[str]) -> tuple[int, str]:
    """The known names in their order, then the others by name."""
    return order.index(name) if name in order else len(order), name


@dataclass(frozen=True)
class Compared:
    """One case of ours; ratios: provider -> its time over ours, earlier: those of another run of both."""

    line: Line
    ratios: Mapping[str, float]
    peaks: Mapping[str, int]

    @property
    def group(self) -> str:
        """The op, the direction and whatever is special."""
        special = (LABELS.get(self.line[field], self.line[field]) for field in ("variant", "dtype"))
        return ", ".join([f"{self.line['op']} {self.line['direction']}", *filter(None, special)])

    @property
    def share(self) -> float:
        return self.line["copy_us"] / self.line["us"]

    def best_peer(self, among: Iterable[str]) -> str | None:
        return min((name for name in among if name in self.ratios), key=self.ratios.__getitem__, default=None)


def compared(lines: Sequence[Line]) -> list[Compared]:
    """The cases that ours was measured in, in the order of the lines."""
    cases: dict[tuple, dict[str, Line]] = {}
    for line in lines:
        cases.setdefault(_case(line), {})[line["provider"]] = line
    return [
        Compared(
            ours,
            {name: line["us"] / ours["us"] for name, line in found.items() if name != OURS} | ours.get("before", {}),
            {name: line["peak_bytes"] for name, line in found.items() if name not in FLOORS},
        )
        for found in cases.values()
        if (ours := found.get(OURS))
    ]
