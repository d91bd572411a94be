"""Makes bench/results/README.md and its plots from the saved lines.

    python -m bench.report

Of each GPU and case the lines of one run are shown, the last that measured ours; of a peer that was not measured then,
beside the speeds of an op, its time over ours in the last run of both. The same lines give the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from bench import bench_host, bench_log_prob, bench_mhc
from bench.bench_gemm import FLOOR, YARDSTICK, summarize
from bench.harness import RESULTS
from jit_cache.files import write_whole

Line = dict[str, Any]
OURS = "cute_kernels"
PROVIDER_STYLES = {  # provider -> colour, marker; also the order of columns
    "cute_kernels": ("#1b7837", "o"),
    "torch": ("#999999", "s"),
    "torch_compile": ("#e08214", "^"),
    "cublas": ("#999999", "s"),
    "quack": ("#2166ac", "v"),
    "liger": ("#8073ac", "D"),
    "transformer_engine": ("#2166ac", "v"),
    "batch_invariant_triton": ("#e08214", "^"),
    "read_floor": ("#b2182b", "_"),
    "bare_products": ("#b2182b", "_"),
}
OTHER_STYLE = ("#000000", "x")
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
    """Of each case the lines of the run that measured ours last (if none did, of the last run), in table order.

    The lines of a run have one date and commit. Ours has "before", if older runs measured other peers: peer -> (its
    time over ours in the last of them, its commit); of a training step "n0_us", if its run measured n0.
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
            name: (line["us"] / found[OURS]["us"], line["commit"])
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


def report(results: Path) -> str:
    """The text of README.md for the `*.jsonl` files in `results`; writes the plots beside them."""
    parts = [
        "# Results\n",
        "Made by `python -m bench.report`; how it was measured: [`../NOTES.md`](../NOTES.md). Rounded to the nearest.",
        "Device times in µs: cold L2, CUDA-graph replay, median. `copy` is an elementwise copy kernel that moves the",
        "bytes that the op must move at least, timed in the same run; `copy/ours` is the share of its speed that we",
        "reach. `error` is the worst relative rms of our outputs against fp64, `host` the time of one call on the",
        "caller's thread, `peak` the device memory of one call in MiB, `kernels` the times of our kernels, L2 warm.",
        "`before`: peers that an older run alone measured, their time over ours in it.\n",
    ]
    for path in sorted(results.glob("*.jsonl")):
        lines = newest(read_lines(path))
        for family in dict.fromkeys(line["family"] for line in lines):
            of_family = [line for line in lines if line["family"] == family]
            last = max(of_family, key=lambda line: line["date"])
            commits = ", ".join(f"`{commit}`" for commit in sorted({line["commit"] for line in of_family}))
            parts.append(
                f"## {family} on {last['gpu']}\n\nCommit {commits}, {last['date'][:10]}, "
                f"driver {last['driver']}, torch {last['torch']}, DSL {last['dsl']}.\n"
            )
            section = SECTIONS.get(family, COPY_SECTION)
            parts += [part for part in [section.introduction(of_family)] if part]
            plot = results / f"{path.stem}-{family}"
            if draw(of_family, plot, f"{family} on {last['gpu']}", section):
                parts.append(f"![{family}: {section.measure}]({plot.name}.svg)\n")
            for op, direction in dict.fromkeys((line["op"], line["direction"]) for line in of_family):
                parts.append(f"### {op} {direction}\n")
                parts.append(
                    section.table([line for line in of_family if (line["op"], line["direction"]) == (op, direction)])
                )
    return "\n".join(parts)


def table(lines: Sequence[Line]) -> str:
    """A Markdown table of one op and direction; one row a case, one column a provider."""
    peers = [provider for provider in _providers(lines) if provider != OURS]
    head = [
        "shape",
        "dtype",
        "variant",
        "ours",
        "copy",
        "copy/ours",
        *peers,
        "best peer/ours",
        "error",
        "host",
        "peak",
        "kernels",
        *_before_head(lines),
    ]
    words = 1 + len(_before_head(lines))
    rows = [head, ["---"] * 3 + ["---:"] * (len(head) - 3 - words) + ["---"] * words]
    for case in dict.fromkeys(_case(line) for line in lines):
        by_provider = {line["provider"]: line for line in lines if _case(line) == case}
        ours = by_provider.get(OURS)
        peer_us = [by_provider[peer]["us"] for peer in peers if peer in by_provider]
        any_line = ours or next(iter(by_provider.values()))
        rows.append(
            [
                any_line["shape"],
                any_line["dtype"],
                any_line["variant"],
                f"**{ours['us']:.1f}**" if ours else "–",
                f"{any_line['copy_us']:.1f}",
                f"{ours['copy_us'] / ours['us']:.2f}" if ours else "–",
                *(f"{by_provider[peer]['us']:.1f}" if peer in by_provider else "–" for peer in peers),
                f"{min(peer_us) / ours['us']:.2f}" if ours and peer_us else "–",
                f"{max(ours['error'].values()):.1e}" if ours else "–",
                f"{ours['host_us']:.1f}" if ours else "–",
                f"{ours['peak_bytes'] / 2**20:.1f}" if ours else "–",
                " + ".join(f"{us:.1f}" for us in ours["kernels"].values()) if ours else "–",
                *(_before(ours) for _ in _before_head(lines)),
            ]
        )
    return _markdown(rows)


def gemm_introduction(lines: Sequence[Line]) -> str:
    """What the columns are, and the ratios to cuBLAS by direction and variant."""
    rows = [["", "variant", "cases", "geometric mean", "least", "ours/floor", "goals"], ["---"] * 7]
    times = []
    for case in dict.fromkeys(_case(line) for line in lines):
        us = {line["provider"]: line["us"] for line in lines if _case(line) == case}
        _, direction, _, variant, shape = case
        times.append((direction, variant, shape, us))
    for s in summarize(times):
        floor = "–" if s.floor is None else f"{s.floor:.3f} ({s.floor_shape})"
        least = f"{s.least:.3f} ({s.least_shape})"
        rows.append([s.direction, s.variant, str(s.cases), f"{s.mean:.3f}", least, floor, s.verdict])
    return (
        "Shapes are MxNxK of the forward, y (M, N) = x (M, K) weight (N, K)^T; dA = dy weight, dB = dy^T x.\n"
        "Of `bmm` LxMxNxK. `cublas` is `torch.mm`, or `torch.bmm`; `cublas/ours` above 1: ours is faster.\n"
        "`read_floor` only reads the weights. Errors are taken on 64 rows and 64 columns.\n\n" + _markdown(rows)
    )


def gemm_table(lines: Sequence[Line]) -> str:
    """A Markdown table of one op and direction; one row a case, one column a provider."""
    peers = [provider for provider in _providers(lines) if provider not in (OURS, FLOOR)]
    floors = [FLOOR] if any(line["provider"] == FLOOR for line in lines) else []
    ratios = ["cublas/ours", "best peer/ours", *["ours/floor"] * len(floors)]
    head = ["shape", "variant", "ours", "TFLOP/s", *peers, *floors, *ratios, "error", "host", *_before_head(lines)]
    words = len(_before_head(lines))
    rows = [head, ["---"] * 2 + ["---:"] * (len(head) - 2 - words) + ["---"] * words]
    for case in dict.fromkeys(_case(line) for line in lines):
        by_provider = {line["provider"]: line for line in lines if _case(line) == case}
        us = {provider: line["us"] for provider, line in by_provider.items()}
        ours = by_provider.get(OURS)
        peer_us = [us[peer] for peer in peers if peer in us]
        any_line = next(iter(by_provider.values()))
        found = [
            f"{us[YARDSTICK] / ours['us']:.3f}" if ours and YARDSTICK in us else "–",
            f"{min(peer_us) / ours['us']:.3f}" if ours and peer_us else "–",
            *(f"{ours['us'] / us[FLOOR]:.3f}" if ours and FLOOR in us else "–" for _ in floors),
        ]
        rows.append(
            [
                any_line["shape"],
                any_line["variant"],
                f"**{ours['us']:.1f}**" if ours else "–",
                f"{1e-6 * ours['flops'] / ours['us']:.0f}" if ours else "–",
                *(f"{us[name]:.1f}" if name in us else "–" for name in (*peers, *floors)),
                *found,
                f"{max(ours['error'].values()):.1e}" if ours else "–",
                f"{ours['host_us']:.1f}" if ours else "–",
                *(_before(ours) for _ in _before_head(lines)),
            ]
        )
    return _markdown(rows)


def mhc_introduction(lines: Sequence[Line]) -> str:
    """What the columns are, and our share of the copy's speed by op, direction, streams and layout."""
    rows = [["", "", "n", "variant", "cases", "geometric mean", "least", "goals"], ["---"] * 8]
    fields = ("op", "direction", "variant", "shape", "us", "copy_us")
    for s in bench_mhc.summarize(
        # older lines have no launches, but the names of the kernels
        (*(line[name] for name in fields), line.get("launches", len(line["kernels"])))
        for line in lines
        if line["provider"] == OURS
    ):
        least = f"{s.least:.3f} ({s.least_shape})"
        rows.append([s.op, s.direction, str(s.n), s.variant, str(s.cases), f"{s.mean:.3f}", least, s.verdict])
    return (
        "Shapes are MxnxC, tokens x streams x channels; the variant is the layout of the residual. Parameters are\n"
        "fp32, fp32 products tf32. `layer` is `pre` and `expand_combine` around a sublayer that takes no time, and\n"
        "`decode` is `pre` of few tokens; `coefficients_sinkhorn` has a time as its goal. Below: `copy/ours`.\n\n"
        + _markdown(rows)
    )


# part of a training step -> what the name of each of its kernels contains; the first that fits
STEP_PARTS = {
    "products": ("cute_kernelsgemm",),
    "hyper-connections": ("cute_kernelsmhc",),
    "norms, sums": ("cute_kernelsnorm", "cute_kernelscommon"),
    "attention": ("sdpa", "cudnn::fusion"),
    "copies from and to the host": ("Memcpy",),
    "torch's other kernels": ("",),
}


def transformer_introduction(lines: Sequence[Line]) -> str:
    """What the columns are."""
    return (
        "`step` is forward and backward of layers x tokens x channels, replayed from a graph (with offload: eagerly);\n"
        "n0: a plain residual, n4: four streams; recompute in blocks of one layer or of the best length. Peak is what\n"
        "a step holds beside the parameters. Copies from and to the host run beside the kernels. `curve` is 300 steps\n"
        "of the train command on layers x tokens x channels; the distance is the largest from torch's losses, each\n"
        "averaged over 10 steps; torch_reordered gets the rows of each batch in the other order.\n"
    )


def transformer_table(lines: Sequence[Line]) -> str:
    """A Markdown table of the training steps, or of the loss curves; one row a line, its parts in ms."""
    if lines[0]["op"] == "curve":
        rows = [
            ["shape", "variant", "losses of", "ms a step", "distance, nats", "last loss"],
            ["---"] * 3 + ["---:"] * 3,
        ]
        for line in lines:
            found = [f"{line['us'] / 1e3:.2f}", f"{line['error']['distance']:.1e}", f"{line['losses'][-1]:.3f}"]
            rows.append([line["shape"], line["variant"], line["provider"], *found])
        return _markdown(rows)
    head = ["shape", "variant", "ms", "over n0", "tokens/s", "TFLOP/s", "peak", "host ms", "loss's error", *STEP_PARTS]
    rows = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for line in lines:
        us, shape = line["us"], line["shape"]
        parts = dict.fromkeys(STEP_PARTS, 0.0)
        for name, kernel_us in line["kernels"].items():
            parts[next(part for part, words in STEP_PARTS.items() if any(word in name for word in words))] += kernel_us
        rows.append(
            [
                shape,
                line["variant"],
                f"**{us / 1e3:.3f}**",
                f"{us / line['n0_us']:.4f}" if "n0_us" in line else "–",
                f"{1e6 * int(shape.split('x')[1]) / us:.0f}",
                f"{1e-6 * line['flops'] / us:.0f}",
                f"{line['peak_bytes'] / 2**20:.0f}",
                f"{line['host_us'] / 1e3:.1f}",
                f"{line['error']['loss']:.1e}",
                *(f"{part_us / 1e3:.2f}" if part_us else "–" for part_us in parts.values()),
            ]
        )
    return _markdown(rows)


# What is drawn of a family: panel's title -> shape -> provider -> value.
Panels = dict[str, dict[str, dict[str, float]]]


def copy_panels(lines: Sequence[Line]) -> Panels:
    """A panel an op and direction, plain bf16 cases: the share of the same-bytes copy's speed."""
    panels: Panels = {}
    for line in lines:
        if line["variant"] == "plain" and line["dtype"] == "bfloat16":
            shapes = panels.setdefault(f"{line['op']} {line['direction']}", {})
            shapes.setdefault(line["shape"], {})[line["provider"]] = line["copy_us"] / line["us"]
    return panels


def gemm_panels(lines: Sequence[Line]) -> Panels:
    """A panel a direction and variant of mm: cuBLAS's time over each provider's."""
    cublas = {_case(line): line["us"] for line in lines if line["provider"] == YARDSTICK}
    panels: Panels = {}
    for line in lines:
        if line["op"] == "mm" and _case(line) in cublas:
            shapes = panels.setdefault(f"mm {line['direction']} {line['variant']}", {})
            shapes.setdefault(line["shape"], {})[line["provider"]] = cublas[_case(line)] / line["us"]
    return panels


def mhc_panels(lines: Sequence[Line]) -> Panels:
    """A panel an op and direction, all layouts in it: the share of the same-bytes copy's speed."""
    panels: Panels = {}
    for line in lines:
        if line["op"] in (*bench_mhc.OPS, "layer"):
            shapes = panels.setdefault(f"{line['op']} {line['direction']}", {})
            shape = f"{line['shape']} {line['variant']}"
            shapes.setdefault(shape, {})[line["provider"]] = line["copy_us"] / line["us"]
    return panels


def host_table(lines: Sequence[Line]) -> str:
    """The host's time of each provider, and the goal."""
    rows = [
        ["shape", "variant", *bench_host.PROVIDERS, "goal"],
        ["---"] * 2 + ["---:"] * (len(bench_host.PROVIDERS) + 1),
    ]
    for case in dict.fromkeys(_case(line) for line in lines):
        host_us = {line["provider"]: line["host_us"] for line in lines if _case(line) == case}
        line = next(line for line in lines if _case(line) == case)
        times = [f"{host_us[name]:.1f}" if name in host_us else "–" for name in bench_host.PROVIDERS]
        rows.append([line["shape"], line["variant"], *times, f"{bench_host.GOALS[line['variant']]:.0f}"])
    return _markdown(rows)


def log_prob_table(lines: Sequence[Line]) -> str:
    """Each provider's time and peak memory, and the bare products' time over ours."""
    providers, floor = _providers(lines), bench_log_prob.FLOOR
    peaks = [name for name in providers if name != floor]
    head = ["shape", "variant", *providers, f"{floor}/ours", "error", *(f"peak, {name}" for name in peaks)]
    rows = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for case in dict.fromkeys(_case(line) for line in lines):
        found = {line["provider"]: line for line in lines if _case(line) == case}
        line, ours = next(iter(found.values())), found.get(OURS)
        row = [line["shape"], line["variant"]]
        row += [f"{found[name]['us']:.1f}" if name in found else "–" for name in providers]
        row.append(f"{found[floor]['us'] / ours['us']:.3f}" if ours and floor in found else "–")
        row.append(f"{max(ours['error'].values()):.1e}" if ours else "–")
        row += [f"{found[name]['peak_bytes'] / 2**20:.0f}" if name in found else "–" for name in peaks]
        rows.append(row)
    return _markdown(rows)


def log_prob_introduction(lines: Sequence[Line]) -> str:
    return (
        "Shapes are tokens x vocabulary x width. `bare_products` are cuBLAS's alone: of the logits forward; backward\n"
        "these again, and the two that their gradients go into; all four of a step, a mean loss with its gradients.\n"
        "The logits of torch and torch.compile are in memory, and their backwards find them there. `peak`: MiB of one\n"
        "call.\n"
    )


def host_introduction(lines: Sequence[Line]) -> str:
    return (
        "µs of the caller's thread, median of 2500 calls. `launch_floor` allocates the outputs and launches a kernel\n"
        "that does nothing; in training it saves the tensors for a backward.\n"
    )


@dataclass(frozen=True)
class Section:
    """How a family is shown.

    measure, title, unit: what the plot's values are, in its alternative text, above it and beside its axes
    top: where the axes end; None: above the largest value
    introduction: text before the plot
    """

    table: Callable[[Sequence[Line]], str]
    panels: Callable[[Sequence[Line]], Panels]
    measure: str
    title: str
    unit: str
    top: float | None = None
    introduction: Callable[[Sequence[Line]], str] = lambda lines: ""


COPY_SECTION = Section(
    table,
    copy_panels,
    measure="share of the same-bytes copy's speed",
    title="speed as a share of a copy of the same bytes (1.0 = dotted line)",
    unit="share of copy's speed",
    top=1.15,
)
SECTIONS = {
    "gemm": Section(
        gemm_table,
        gemm_panels,
        measure="speed in units of cuBLAS's",
        title="speed in units of cuBLAS's (1.0 = dotted line)",
        unit="cuBLAS's time / time",
        introduction=gemm_introduction,
    ),
    "host": dataclasses.replace(
        COPY_SECTION, table=host_table, panels=lambda lines: {}, introduction=host_introduction
    ),
    "log_prob": dataclasses.replace(
        COPY_SECTION, table=log_prob_table, panels=lambda lines: {}, introduction=log_prob_introduction
    ),
    "mhc": dataclasses.replace(COPY_SECTION, panels=mhc_panels, introduction=mhc_introduction),
    "transformer": dataclasses.replace(
        COPY_SECTION, table=transformer_table, panels=lambda lines: {}, introduction=transformer_introduction
    ),
}
MANY_SHAPES = 40  # from here on their names are set upright and small


def draw(lines: Sequence[Line], path: Path, title: str, section: Section = COPY_SECTION) -> bool:
    """Writes path.svg and path.png: the section's panels one below the other, values over the shapes."""
    panels = section.panels(lines)
    if not panels:
        return False
    style = {
        "svg.hashsalt": "cute_kernels",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(11, 3.1 * len(panels)), squeeze=False, layout="constrained"
        )
        for axis, (name, shapes) in zip(axes[:, 0], panels.items(), strict=True):
            positions = {shape: position for position, shape in enumerate(shapes)}
            for provider in _ordered({provider for values in shapes.values() for provider in values}):
                values = {shape: found[provider] for shape, found in shapes.items() if provider in found}
                colour, marker = PROVIDER_STYLES.get(provider, OTHER_STYLE)
                axis.plot(
                    [positions[shape] for shape in values],
                    list(values.values()),
                    color=colour,
                    marker=marker,
                    markersize=6 if provider == OURS else 4,
                    linewidth=1.8 if provider == OURS else 0.8,
                    label=provider,
                    zorder=3 if provider == OURS else 2,
                )
            axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
            if len(shapes) < MANY_SHAPES:
                axis.set_xticks(range(len(shapes)), shapes, rotation=40, ha="right")
            else:
                axis.set_xticks(range(len(shapes)), shapes, rotation=90, fontsize=6)
            axis.set_ylim(0, section.top or 1.05 * max(max(values.values()) for values in shapes.values()))
            axis.grid(axis="y", linewidth=0.3)
            axis.set_title(name, loc="left", fontweight="bold")
            axis.set_ylabel(section.unit)
        handles, labels = max(
            (axis.get_legend_handles_labels() for axis in axes[:, 0]), key=lambda found: len(found[1])
        )
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(f"{title}: {section.title}", x=0.01, ha="left", fontsize=10)
        for suffix, dpi, metadata in ((".svg", "figure", {"Date": None}), (".png", 90, {"Software": None})):
            image = io.BytesIO()
            figure.savefig(image, format=suffix[1:], dpi=dpi, metadata=metadata)
            write_whole(path.with_suffix(suffix), image.getvalue())
        plt.close(figure)
    return True


def _before_head(lines: Iterable[Line]) -> list[str]:
    """The title of the column of peers that older commits measured, if there are any."""
    return ["before"] if any(line.get("before") for line in lines) else []


def _before(ours: Line | None) -> str:
    """Those peers of a case: time over ours, and the commit."""
    found = ours.get("before", {}) if ours else {}
    return ", ".join(f"{name} {found[name][0]:.2f} ({found[name][1]})" for name in _ordered(set(found))) or "–"


def _providers(lines: Iterable[Line]) -> list[str]:
    return _ordered({line["provider"] for line in lines})


def _ordered(providers: set[str]) -> list[str]:
    return [name for name in PROVIDER_STYLES if name in providers] + sorted(providers - set(PROVIDER_STYLES))


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _case(line: Line) -> tuple[str, ...]:
    return tuple(line[field] for field in CASE_FIELDS)


def _table_order(line: Line) -> tuple[Any, ...]:
    """Plain bf16 cases first, large before small (by powers of two of the bytes), narrow before wide."""
    sizes = tuple(int(size) for size in line["shape"].split("x"))
    special = line["variant"] != "plain" or line["dtype"] != "bfloat16"
    return (
        line["family"],
        line["op"],
        line["direction"] != "fwd",
        line["direction"],
        special,
        line["variant"],
        line["dtype"],
        -round(math.log2(line["bytes"])),
        sizes[::-1],
        line["provider"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder with the *.jsonl files; default: %(default)s"
    )
    results = parser.parse_args(arguments).results
    readme = results / "README.md"
    write_whole(readme, report(results).encode())
    print(readme)


if __name__ == "__main__":
    main()
