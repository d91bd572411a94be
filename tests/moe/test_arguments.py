"""Bad arguments of the experts' functions raise the same, on the CPU, cold, and after a good call."""

import pytest
import torch

from cute_kernels import moe
from tests.fakes import fake_kernels

BF16 = torch.bfloat16
LOGITS, INDICES = torch.zeros(6, 8), torch.zeros(6, 2, dtype=torch.int32)
X, Z = torch.zeros(6, 16, dtype=BF16), torch.zeros(6, 32, dtype=BF16)
PLAN = moe.plan(INDICES, 8)
ROWS, WEIGHTS = torch.zeros(12, 16, dtype=BF16), torch.zeros(6, 2)
ROUTING = moe.Routing(INDICES, WEIGHTS)
UP, DOWN = torch.zeros(8, 16, 16, dtype=BF16), torch.zeros(8, 16, 8, dtype=BF16)
BAD = [
    (lambda: moe.route([1.0], 2), TypeError, "route: logits must be a torch.Tensor, got list"),
    (lambda: moe.route(LOGITS.bfloat16(), 2), TypeError, "route: logits must have dtype float32"),
    (lambda: moe.route(LOGITS[0], 2), ValueError, r"route: logits must have shape \(T, E\) with E from 1 to 1024"),
    (lambda: moe.route(torch.zeros(2, 1025), 2), ValueError, "route: logits must have shape"),
    (lambda: moe.route(LOGITS, 9), ValueError, "route: k must be from 1 to 8, got 9"),
    (lambda: moe.route(torch.zeros(2, 64), 33), ValueError, "route: k must be from 1 to 32, got 33"),
    (lambda: moe.route(LOGITS, 2.0), TypeError, "route: k must be an int"),
    (lambda: moe.route(LOGITS[:1].expand(2**30, 8), 2), ValueError, "route: logits must have tokens of at most"),
    (lambda: moe.route(LOGITS, 2, score="relu"), ValueError, "route: score must be one of"),
    (lambda: moe.route(LOGITS, 2, bias=LOGITS[0]), ValueError, "route: bias must be None but for sigmoid scores"),
    (
        lambda: moe.route(LOGITS, 2, score="sigmoid", bias=LOGITS[:, 0]),
        ValueError,
        r"route: bias must have shape \(8,\)",
    ),
    (lambda: moe.route(LOGITS, 2, groups=(3, 1)), ValueError, "route: groups must be of at most 32 groups that divide"),
    (lambda: moe.route(LOGITS, 3, groups=(4, 1)), ValueError, "route: groups must leave at least k = 3 experts"),
    (lambda: moe.route(LOGITS, 3, groups=4), TypeError, "route: groups must be None or a pair"),
    (lambda: moe.route(LOGITS, 2, indices=INDICES.float()), TypeError, "route: indices must have dtype int32, int64"),
    (lambda: moe.route(LOGITS, 2, indices=INDICES[:3]), ValueError, r"route: indices must have shape \(6, 2\)"),
    (lambda: moe.route(LOGITS, 2, scale="1"), TypeError, "route: scale must be a float"),
    (lambda: moe.router_logits(X, UP), ValueError, r"router_logits: weight must have shape \(E, H\)"),
    (lambda: moe.router_logits(X, X.half()), TypeError, "router_logits: weight must have dtype bfloat16, float32"),
    (lambda: moe.router_logits(X, X, X[0]), ValueError, r"router_logits: bias must have shape \(6,\)"),
    (lambda: moe.z_loss(X), TypeError, "z_loss: logits must have dtype float32"),
    (lambda: moe.load_balancing_loss(LOGITS[:3], ROUTING), ValueError, "load_balancing_loss: routing.indices must"),
    (
        lambda: moe.load_balancing_loss(LOGITS, ROUTING, mask=LOGITS[:, 0]),
        TypeError,
        "load_balancing_loss: mask must have dtype bool",
    ),
    (lambda: moe.plan(INDICES.float(), 8), TypeError, "plan: indices must have dtype int32, int64"),
    (lambda: moe.plan(INDICES[0], 8), ValueError, "plan: indices must have shape"),
    (lambda: moe.plan(INDICES, 1025), ValueError, "plan: num_experts must be from 1 to 1024"),
    (lambda: moe.plan(INDICES, 8, align=0), ValueError, "plan: align must be from 1 to 1024"),
    (lambda: moe.plan(INDICES, 8, segments=LOGITS[0]), TypeError, "plan: segments must have dtype int32, int64"),
    (lambda: moe.plan(INDICES, 8, segments=INDICES), ValueError, "plan: segments must be a list of ends on cpu"),
    (lambda: moe.plan(INDICES, 8, segments=INDICES[:, 0]), ValueError, "plan: align must be a multiple of 16 with"),
    (lambda: moe.permute(X[:3], PLAN), ValueError, r"permute: x must have shape \(6, columns\)"),
    (lambda: moe.permute(X.long(), PLAN), TypeError, "permute: x must have dtype"),
    (lambda: moe.combine(ROWS[:3], PLAN), ValueError, r"combine: rows must have shape \(12, columns\)"),
    (lambda: moe.combine(ROWS, PLAN, WEIGHTS[:3]), ValueError, r"combine: weights must have shape \(6, 2\)"),
    (lambda: moe.combine(ROWS, PLAN, WEIGHTS.to(BF16)), TypeError, "combine: weights must have dtype float32"),
    (lambda: moe.swiglu(Z[:, :31]), ValueError, r"swiglu: z must have shape \(R, 2 I\)"),
    (lambda: moe.swiglu(Z, limit=-1.0), ValueError, "swiglu: limit must be None or positive"),
    (lambda: moe.experts(X[0], ROUTING, UP, DOWN), ValueError, r"experts: x must have shape \(T, H\)"),
    (lambda: moe.experts(X, ROUTING, UP.half(), DOWN), TypeError, "experts: gate_up must have dtype torch.bfloat16"),
    (lambda: moe.experts(X, ROUTING, UP[0], DOWN), ValueError, "experts: gate_up must be a batch of matrices"),
    (lambda: moe.experts(X, ROUTING, UP[:, :8], DOWN), ValueError, r"experts: gate_up must have shape \(8, 16, 16\)"),
    (lambda: moe.experts(X, ROUTING, UP, DOWN[:3]), ValueError, r"experts: down must have shape \(8, 16, 8\)"),
    (lambda: moe.experts(X[:3], ROUTING, UP, DOWN), ValueError, "experts: routing must be of 3 tokens"),
    (lambda: moe.experts(X, ROUTING, UP, DOWN, activation="relu"), ValueError, "experts: activation must be one of"),
    (
        lambda: moe.experts(X, ROUTING, UP, DOWN, activation="geglu", limit=1.0),
        ValueError,
        "experts: limit must be None",
    ),
    (lambda: moe.experts(X, ROUTING, UP, DOWN, activation="silu"), ValueError, r"gate_up must have shape \(8, 8, 16\)"),
    (
        lambda: moe.experts(X, ROUTING, UP, DOWN, activation="silu", interleaved=True),
        ValueError,
        "experts: interleaved must be False with silu",
    ),
    (lambda: moe.experts(X, ROUTING, UP, DOWN, down_bias=X), ValueError, r"down_bias must have shape \(8, 16\)"),
    (lambda: moe.experts(X, ROUTING, UP, DOWN, gate_up_bias=X.float()), TypeError, "gate_up_bias must have dtype"),
    (lambda: moe.experts(X, ROUTING, UP, DOWN, backend="gpu"), ValueError, "experts: backend must be None or"),
]
# Arguments that plain torch takes
OF_KERNELS = [
    (lambda: moe.permute(X[:, :15], PLAN), ValueError, "permute: x must have columns that are a multiple of 8, got 15"),
    (lambda: moe.combine(ROWS.t().contiguous().t(), PLAN), ValueError, "combine: rows must have a contiguous last"),
    (lambda: moe.swiglu(Z[:, 2:18]), ValueError, "swiglu: z must start on 16 bytes"),
    (
        lambda: moe.swiglu(Z[:, :24]),
        ValueError,
        "z's halves must have columns that are a multiple of 8, got 12",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_on_the_cpu(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("ends", [[4, 2, 6], [2, 4], [-1, 6]], ids=str)
def test_segments_ascend_in_plain_torch(ends):
    with pytest.raises(ValueError, match="plan: segments must ascend to the number of tokens, 6, got"):
        moe.plan(INDICES, 8, align=16, segments=torch.tensor(ends))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("call", "error", "message"), [*BAD, *OF_KERNELS])
def test_in_the_kernels_path(call, error, message, warm):
    with fake_kernels():
        if warm:
            moe.experts(X, moe.route(LOGITS, 2), UP, DOWN)
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(("call", "error", "message"), OF_KERNELS)
def test_plain_torch_takes_what_the_kernels_do_not(call, error, message):
    call()
