"""L2 eviction priorities: what is read once makes room first, so that what was written stays for who reads it.

A line that a kernel wrote goes to DRAM when another takes its place in L2. Loads of priority evict_first take each
other's places instead; then a stream of reads does not wait for the writes of the kernels before it. H200, L2 full of
zeros just written, us: 256x12288x4096 42.0 -> 38.7 with the weights that way; nothing where L2 held nothing written.
Kernels that write as much as they read are slower if all their reads are (rms_norm backward, 8192x4096, 58.3 -> 62.0),
and faster if the last of them are (58.2 -> 57.4): at their end L2 holds more of their results.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64

EVICT_NORMAL = 0x1000000000000000  # policies, as createpolicy makes them
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000
LAST_BYTES = 16 << 20  # of a kernel's results, while which are written its reads make room first


@cute.jit
def evict_first_if(condition: cutlass.Boolean) -> Int64:
    """The policy of a load: evict_first where ``condition`` holds."""
    policy = Int64(EVICT_NORMAL)
    if condition:
        policy = Int64(EVICT_FIRST)
    return policy
