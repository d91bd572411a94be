"""Where the bytes of a row go that leaves through shared memory: each once, and nothing beyond them.

``inner_units`` and ``edge_elements`` are what the kernels compute with; here they get Python's integers.
"""

import pytest

from cute_kernels.common.row_layout import BULK_ALIGNMENT, WARP_SIZE, RowLayout, edge_elements, inner_units, with_stages

WIDTHS = [*range(1, 70), 512, 1001, 2235, 3142, 12565, 18956]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_each_element_is_written_once(itemsize):
    for shift in range(0, BULK_ALIGNMENT, itemsize):
        address = 4096 + shift
        for n in WIDTHS:
            first, num_bytes = inner_units(address, n * itemsize)
            written = [0] * n
            if num_bytes > 0:
                assert first % BULK_ALIGNMENT == num_bytes % BULK_ALIGNMENT == 0
                # The tile begins where the row's first unit does: source and target have the same place in it
                assert first - address // BULK_ALIGNMENT * BULK_ALIGNMENT in (0, BULK_ALIGNMENT)
                for byte in range(first - address, first - address + num_bytes, itemsize):
                    written[byte // itemsize] += 1
            for lane in range(WARP_SIZE):
                for element, inside in edge_elements(address, n, itemsize, lane):
                    if inside:
                        written[element] += 1
            assert written == [1] * n, (shift, n)


@pytest.mark.parametrize("written, staged", [((2,), True), ((), False), ((2, 4), True)])
def test_a_staged_row_fits_its_tile(written, staged):
    """Also where it begins 2 bytes before the next unit; the ring keeps two stages."""
    for n in (512, 1001, 2235, 10007):
        layout = RowLayout(n, 1, 32, 1, 8, 1, 1, False, False)
        budget = 250_000
        layout = with_stages(layout, (2,), budget, 3, written)
        assert layout.staged == staged and layout.stages >= 2
        assert layout.teams * (layout.stages * layout.slot_bytes((2,)) + layout.staged_bytes(written)) <= budget
        for itemsize in written:
            pitch = layout.pitch(itemsize) * itemsize
            assert pitch % BULK_ALIGNMENT == 0 and pitch >= BULK_ALIGNMENT - itemsize + n * itemsize


@pytest.mark.parametrize(
    "n, vec, budget", [(511, 1, 100_000), (1002, 2, 100_000), (10007, 1, 50_000)], ids=["short", "pairs", "no_room"]
)
def test_rows_that_are_not_staged(n, vec, budget):
    layout = RowLayout(n, vec, 32, 1, 8, 1, 1, False, False)
    assert not with_stages(layout, (2,), budget, 3, (2,)).staged
