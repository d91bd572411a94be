"""mbarriers at which the CTAs of a cluster arrive: what was done to shared memory before is done for who waits.

The DSL's arrivals and waits release and acquire at the scope of the CTA, at other CTAs' barriers, too. At the cluster's
they would become a membar of the GPU and an invalidation of L1. Fences restricted to shared memory are a membar of the
CTA for the one who arrives, and nothing for the one who waits (SASS of sm_90a).
"""

import cutlass.cute as cute
from cutlass import Int32

SUSPENDED_NS = 10_000_000  # at most, before a wait looks again, as in the DSL's


@cute.jit
def arrive_in_cluster(barrier: cute.Pointer, rank: Int32):
    """Arrive at the barrier of CTA ``rank``: this CTA's shared memory may then be written from there."""
    cute.arch.inline_ptx(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {$r0}, {$r1}; "
        "fence.release.sync_restrict::shared::cta.cluster; "
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote]; }",
        read_only_args=[Int32(barrier.toint()), rank],
    )


@cute.jit
def wait_in_cluster(barrier: cute.Pointer, phase: Int32):
    """Wait until a phase is over at which CTAs of the cluster have arrived, and then for their shared memory.

    The loop has the form of the DSL's: with one branch ptxas spills (sm_90a, mxfp8 in a ring with blocked scales).
    """
    cute.arch.inline_ptx(
        "{ .reg .pred over; again: "
        f"mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 over, [{{$r0}}], {{$r1}}, {SUSPENDED_NS}; "
        "@over bra end; bra again; "
        "end: fence.acquire.sync_restrict::shared::cluster.cluster; }",
        read_only_args=[Int32(barrier.toint()), phase],
    )
