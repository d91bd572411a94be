"""The slot and the phase of a block, without a GPU."""

import pytest

from cute_kernels.attention.kernel_rings import Rings


@pytest.mark.parametrize("stages", range(1, 13))
def test_blocks_take_slots_in_turn(stages):
    """The phase changes when the ring has been gone round."""
    ring = Rings()
    ring.stages = stages
    found = [ring.place_in_ring(count) for count in range(4 * stages)]
    assert found == [(slot, lap % 2) for lap in range(4) for slot in range(stages)]
