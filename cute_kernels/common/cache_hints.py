"""L2 eviction priorities: what is read once makes room first, so that what was written stays for who reads it.

A line that a kernel wrote goes to DRAM when another takes its place in L2. Loads of priority evict_first take each
other's places instead; then a stream of reads does not wait for the writes of the kernels before it. H200, L2 full of
zeros just written, us: 256x12288x4096 42.0 -> 38.7 with the weights that way; loads alone of 8192x4x4096 76.6 -> 74.0,
and 68.5 both ways where L2 held nothing written. Kernels that write much are slower if all their reads are (layer_norm
backward, 8192x4096, 58.3 -> 62.1), and faster if the last of them are (57.4; expand_combine 8192x4x2560 98.2 -> 93.2):
at their end L2 holds more of their results.

What the next kernel reads again is written with evict_last: the partial sums of the projection's backward, where those
of the first tokens had left L2 by its end (2048x4x5120 60.1 -> 58.1 us, 8192x4x2560 106.6 -> 102.6).
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr

EVICT_NORMAL = 0x1000000000000000  # as if there were no policy
EVICT_FIRST = 0x12F0000000000000  # these two as createpolicy makes them
EVICT_LAST = 0x14F0000000000000
LAST_BYTES = 16 << 20  # at the end of an input, or of the results, for which a kernel changes its policy


@cute.jit
def evict_first_if(condition: cutlass.Boolean) -> Int64:
    """The policy of a load: evict_first where ``condition`` holds."""
    policy = Int64(EVICT_NORMAL)
    if condition:
        policy = Int64(EVICT_FIRST)
    return policy


@cute.jit
def load_vector(source: cute.Pointer, target: cute.Tensor, policy: Optional[Int64]):
    """Fill registers from where ``source`` points, of up to 16 bytes; with a policy if there is one."""
    source = cute.make_tensor(source, cute.make_layout(cute.size(target)))
    if const_expr(policy is None):
        cute.autovec_copy(source, target)
    else:
        bits = const_expr(cute.size(target) * target.element_type.width)
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), target.element_type, num_bits_per_copy=bits)
        cute.copy(atom, source, target, cache_policy=policy)


@cute.jit
def store_vector(source: cute.Tensor, target: cute.Pointer, policy: Int64):
    """Store registers, up to 16 bytes, to where ``target`` points, with a policy."""
    bits = const_expr(cute.size(source) * source.element_type.width)
    atom = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), source.element_type, num_bits_per_copy=bits)
    cute.copy(atom, source, cute.make_tensor(target, cute.make_layout(cute.size(source))), cache_policy=policy)
