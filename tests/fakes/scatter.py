"""Fakes of sums by an index. They add as the kernels do, one source after the other, in fp32."""

import torch

from cute_kernels.scatter.config import SEGMENT


def _chain(total, source, order, begin, end):
    for position in order[begin:end].tolist():
        total = total + source[position].float()
    return total


def _places(spec, keys, begins, ends, out, padding_idx):
    """(row of out, begin, end) of each place that is worked on."""
    for at in range(len(begins)):
        row = at if spec.store == "write" else int(keys[at])
        begin, end = int(begins[at]), int(ends[at])
        if row == padding_idx:
            end = begin
        if spec.store == "write" or (begin == at and 0 <= row < len(out) and end > begin):
            yield row, begin, end


def segment_sums(static, source, keys, order, begins, ends, out, partials, padding_idx) -> None:
    spec = static["spec"]
    for row, begin, end in _places(spec, keys, begins, ends, out, padding_idx):
        if end - begin <= SEGMENT:
            continue
        for first in range(begin, end, SEGMENT):
            zero = torch.zeros(out.shape[1])
            start = out[row].float() if spec.store == "onto" and first == begin else zero
            slot = first // SEGMENT * 2 + (first == begin)
            partials[slot] = _chain(start, source, order, first, min(first + SEGMENT, end))


def grouped_sums(static, source, keys, order, begins, ends, partials, out, padding_idx) -> None:
    spec = static["spec"]
    assert out.shape[1] % spec.vec == 0 and len(order) == len(keys) == len(source)
    for row, begin, end in _places(spec, keys, begins, ends, out, padding_idx):
        if end - begin <= SEGMENT:
            start = out[row].float() if spec.store == "onto" else torch.zeros(out.shape[1])
            total = _chain(start, source, order, begin, end)
        else:
            total = partials[begin // SEGMENT * 2 + 1]
            for first in range(begin + SEGMENT, end, SEGMENT):
                total = total + partials[first // SEGMENT * 2]
        if spec.store == "add":
            total = out[row] + total
        out[row] = total.to(out.dtype)


def element_sums(static, source, index, out) -> None:
    total = {}
    for row, places in enumerate(index.tolist()):
        for e, column in enumerate(places):
            if 0 <= column < out.shape[1]:
                before = total.get((row, column), out[row, column].float())
                total[row, column] = before + source[row, e].float()
    for (row, column), value in total.items():
        out[row, column] = value.to(out.dtype)
