"""The figures of docs/performance.md, as SVG.

Text stays text. The background is transparent, and every colour is legible on white and on black pages alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 760
BAR = 16  # height
INK, GREEN, ORANGE, GREY = "#768390", "#2da44e", "#d4772c", "#8b949e"
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Drawing:
    """An SVG under construction; coordinates are pixels from the top left corner."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self.text(0, 18, title, size=17, bold=True)
        self.text(0, 38, subtitle)

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", size: int = 13, bold: bool = False, colour=INK
    ) -> None:
        style = f'text-anchor="{anchor}" font-size="{size}"' + ' font-weight="bold"' * bold
        words = escape(words, quote=False)
        self._parts.append(f'<text x="{x:.0f}" y="{y:.0f}" {style} fill="{colour}">{words}</text>')

    def bar(self, x: float, y: float, width: float, colour: str) -> None:
        """A bar of at least a pixel whose upper left corner is (x, y)."""
        size = f'width="{max(width, 1):.1f}" height="{BAR}"'
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="2" fill="{colour}"/>')

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1, opacity: float = 1) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f'stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"'
        self._parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')

    def svg(self, height: float) -> str:
        box = f'viewBox="-8 0 {WIDTH + 16} {height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" font-family="{FONT}">'
        return "\n".join([head, f"<title>{escape(self._title)}</title>", *self._parts, "</svg>", ""])


def bits(gpu: str, cases: Mapping[str, Mapping[str, Mapping[int, float]]]) -> str:
    """A panel for each case with a change; case -> provider -> batch size -> share of a row's outputs that change."""
    drawing = Drawing(
        "The same row in a larger batch: how many of its outputs change",
        f"Share of a bf16 row's outputs whose bits differ from those in a batch of one row; {gpu}",
    )
    found = [shares for providers in cases.values() for shares in providers.values()]
    top = math.ceil(200 * max(0.005, *(max(shares.values()) for shares in found))) / 200
    changing = {
        case: providers for case, providers in cases.items() if any(any(s.values()) for s in providers.values())
    }
    last = max(max(shares) for shares in found)
    width, height, columns = 300, 110, 2

    def place(batch: float, share: float) -> tuple[float, float]:
        return left + width * math.log2(batch) / math.log2(last), bottom - height * share / top

    for number, (case, providers) in enumerate(changing.items()):
        left, bottom = 40 + 405 * (number % columns), 220 + 210 * (number // columns)
        drawing.text(left, bottom - height - 34, case, bold=True)
        for share in (0, top / 2, top):
            drawing.line([place(1, share), place(last, share)], INK, opacity=0.35)
            drawing.text(left - 6, place(1, share)[1] + 4, f"{100 * share:.2g}%", "end", 11)
        for exponent in range(0, 1 + int(math.log2(last)), 2):
            drawing.text(place(2**exponent, 0)[0], bottom + 18, str(2**exponent), "middle", 11)
        drawing.text(left + width / 2, bottom + 36, "rows in the batch", "middle", 11)
        for provider, shares in sorted(providers.items(), reverse=True):
            is_ours = provider == "cute_kernels"
            colour = GREEN if is_ours else ORANGE
            drawing.line([place(*point) for point in sorted(shares.items())], colour, 2.5)
            most = max(shares.values())
            label = f"{provider}: up to {100 * most:.2g}%" if most else f"{provider}: 0%"
            edge = (left + width, "end") if is_ours else (left, "start")
            drawing.text(edge[0], bottom - height - 14, label, edge[1], bold=True, colour=colour)
    end = 270 + 210 * ((len(changing) - 1) // columns)
    if still := [case for case in cases if case not in changing]:
        drawing.text(0, end + 4, f"No bit of either changes at these sizes: {', '.join(still)}", size=11)
        end += 16
    return drawing.svg(end)


def peers(gpu: str, families: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
    """Bars from 1, on a logarithmic axis; family -> (its peers, direction -> time of the fastest peer over ours)."""
    drawing = Drawing(
        "Time of the fastest peer over ours",
        f"Geometric mean over the shapes of a family, beside the fastest peer of each shape; {gpu}",
    )
    ratios = [ratio for _, directions in families.values() for ratio in directions.values()]
    least, most = min(0.8, *ratios), max(2.0, *ratios)
    left, right = 370, WIDTH - 60

    def place(ratio: float) -> float:
        return left + (right - left) * math.log(ratio / least) / math.log(most / least)

    y = 88.0
    drawing.text(place(1) - 8, y - 18, "peer faster", "end", colour=ORANGE)
    drawing.text(place(1) + 8, y - 18, "we are faster", colour=GREEN)
    for family, (names, directions) in families.items():
        drawing.text(0, y + 13, family, bold=True)
        drawing.text(0, y + 30, names, size=11)
        for direction, ratio in directions.items():
            drawing.text(left - 72, y + 13, direction, "end", 12)
            start, end = sorted((place(1), place(ratio)))
            drawing.bar(start, y, end - start, GREEN if ratio >= 1 else ORANGE)
            label = f"{math.floor(100 * ratio) / 100:.2f}×"
            if ratio >= 1:
                drawing.text(end + 6, y + 13, label, bold=True)
            else:
                drawing.text(start - 6, y + 13, label, "end", bold=True)
            y += BAR + 4
        y += 18 + (BAR + 4) * (2 - len(directions))
    drawing.line([(place(1), 76), (place(1), y - 12)], INK)
    return drawing.svg(y)


def log_prob(gpu: str, shape: str, cases: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """Two columns of bars; case -> provider -> (peak memory in GiB, time in ms)."""
    drawing = Drawing("linear_log_prob keeps no logits in memory", f"{shape}, bf16; {gpu}")
    columns = ((150, "peak memory of a call, GiB", "{:.2f}"), (480, "time, ms", "{:.1f}"))
    most = [max(values) for values in zip(*(v for found in cases.values() for v in found.values()), strict=True)]
    width, y = 210, 66.0
    for left, unit, _ in columns:
        drawing.text(left, y, unit)
    for case, found in cases.items():
        drawing.text(0, y + 30, case, bold=True)
        y += 40
        for provider, values in found.items():
            is_ours = provider == "cute_kernels"
            colour = GREEN if is_ours else ORANGE if provider == "torch.compile" else GREY
            drawing.text(140, y + 13, provider, "end", bold=is_ours)
            for (left, _, form), value, largest in zip(columns, values, most, strict=True):
                length = width * value / largest
                drawing.bar(left, y, length, colour)
                drawing.text(left + length + 6, y + 13, form.format(value), bold=True)
            y += BAR + 5
    return drawing.svg(y + 10)
