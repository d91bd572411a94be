"""Experts that are spread over ranks: rows travel to their experts and back, and no sum is made on the way."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.moe.checks import check_activation, check_experts, check_layout
from cute_kernels.moe.config import OAI
from cute_kernels.moe.op.experts import experts, rows_of_experts
from cute_kernels.moe.op.gate import NO_BIAS, Bias, Gate
from cute_kernels.moe.op.rows import combine, combined, gathered, permute, plan
from cute_kernels.moe.reference import Plan, Routing, as_int32
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_rows
from cute_kernels.runtime.checks import HALVES, Backend, expect
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float


class ExpertParallel:
    """``experts`` of tokens and weights that are spread over the ranks of a group.

    Each rank calls it with its own tokens, of any number, also none, and with the weights of its own experts: of E
    together rank r has those from ``r E / n`` on. The same tensors of all ranks require a gradient.

    Args:
        group: of torch.distributed; None: all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialized.

    Numerics:
        Rows are sent as they are, and a token's are added where it is, in ascending expert. So results and the
        gradients of x and of the routing's weights have the bits that one process finds for the same tokens. Gradients
        of the experts' weights sum over the tokens of all ranks, rank after rank: they have the bits of one process
        with the ranks' tokens one behind the other; by ranks, of one whose ``segments`` are the ranks' tokens.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cute_kernels import moe
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, logits = torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 4)
        >>> gate_up, down = torch.ones(4, 32, 8, dtype=torch.bfloat16), torch.ones(4, 8, 16, dtype=torch.bfloat16)
        >>> moe.ExpertParallel()(x, moe.route(logits, 2), gate_up, down).shape
        torch.Size([3, 8])
        >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: Tensor,
        down: Tensor,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        transposed: bool = False,
        interleaved: bool = False,
        activation: str = "swiglu",
        limit: float | None = None,
        alpha: float | None = None,
        align: int = 16,
        by_ranks: bool = False,
        backend: Backend | None = None,
    ) -> Tensor:
        """The experts' sum of each token of this rank. All ranks call it; the host waits for the numbers of rows.

        Args:
            x: (T, H) of this rank.
            routing: of its tokens, with indices in [0, E).
            gate_up, down: (E / n, 2 I, H) and (E / n, H, I) of its experts.
            gate_up_bias, down_bias: (E / n, 2 I) and (E / n, H) of its experts, as of ``experts``; all ranks have the
                same of them. Each rank gets all of down_bias, which it adds to its tokens' rows.
            transposed, interleaved, activation, limit, alpha, align: as of ``experts``; an activation by name.
            by_ranks: the tokens of each rank are a segment, as ``segments`` are of ``experts``.
            backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

        Returns:
            (T, H) of x's dtype.

        Raises:
            TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        """
        limit, alpha = (None if value is None else as_float(value) for value in (limit, alpha))
        here, (indices, weights) = gate_up.shape[0], routing
        rows = plan(indices, here * self.ranks, backend=backend)
        sent, counts = self._exchange_counts(rows.counts.view(self.ranks, here))
        received = counts.sum(1).tolist()
        travel = sum(sent), sent, received, self.group
        # The expert, among these, of each row that comes; rows of a rank after those of the rank before
        local = torch.arange(here, device=x.device).repeat(self.ranks).repeat_interleave(counts.flatten())[:, None]
        segments = counts.sum(1).cumsum(0) if by_ranks else None
        biases = gate_up_bias, down_bias
        if uses_reference("experts", x, backend):
            options = {"transposed": transposed, "interleaved": interleaved, "activation": activation}
            options |= {"limit": limit, "alpha": alpha, "align": align, "segments": segments}
            options |= {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
            at_experts = _exchanged(permute(x, rows, backend=backend), *travel)
            ones = torch.ones(local.shape, dtype=weights.dtype, device=x.device)
            found = experts(at_experts, Routing(local, ones), gate_up, down, **options, backend=backend)
            at_home = _exchanged(found, sum(received), received, sent, self.group)
            at_home = F.pad(at_home, (0, 0, 0, rows.slots.shape[0] - sum(sent)))
            return combine(at_home, rows, weights, backend=backend)
        expect(isinstance(activation, str), "experts", "activation", "be a name", activation)
        check_activation(activation, interleaved, limit, alpha)
        if activation == "swiglu_oai":
            limit, alpha = (given or usual for given, usual in zip((limit, alpha), OAI, strict=True))
        gate = Gate(activation.removesuffix("_oai"), bool(interleaved), limit, alpha)
        check_layout("experts", "x", x)
        at_experts = _exchanged(permute(x, rows), *travel)
        slots = rows.slots[: sum(sent)].long()
        of_rows = _exchanged(weights.reshape(-1)[slots, None], *travel)
        options = *biases, transposed, activation, align, segments
        check_experts(at_experts, local, of_rows, gate_up, down, *options, (None, None), HALVES)
        for name, bias in zip(("gate_up_bias", "down_bias"), biases, strict=True):
            if bias is not None:
                check_layout("experts", name, bias)
        local = local.to(torch.int32)
        found = rows_of_experts(at_experts, of_rows, local, gate_up, down, *biases, segments, transposed, gate, align)
        at_home = _exchanged(found, sum(received), received, sent, self.group)
        of_all = NO_BIAS
        if down_bias is not None:
            of_all = Bias(as_int32(indices).contiguous(), self._of_all_ranks(down_bias))
        if differentiates(at_home):
            return apply(_CombineFunction, at_home, weights.detach(), *of_all, *rows)
        return combined(mode_of(at_home), at_home, rows, weights, *of_all)

    def _of_all_ranks(self, bias: Tensor) -> Tensor:
        """(E, H) of all experts, from this rank's."""
        bias = bias.detach().contiguous()
        found = bias.new_empty(self.ranks * bias.shape[0], bias.shape[1])
        dist.all_gather(list(_bytes(found).chunk(self.ranks)), _bytes(bias), group=self.group)
        return found

    def _exchange_counts(self, counts: Tensor) -> tuple[list[int], Tensor]:
        """Rows that go to each rank; (ranks, experts here) of those that come, from counts (ranks, experts there)."""
        found = torch.empty_like(counts)
        dist.all_to_all_single(found, counts.contiguous(), group=self.group)
        return counts.sum(1).tolist(), found


def _exchanged(
    rows: Tensor, count: int, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """The first ``count`` rows, to the ranks in order; rows that came from the ranks, in order."""
    return _ExchangeFunction.apply(rows[:count], sent, received, group)


def _bytes(rows: Tensor) -> Tensor:
    """Contiguous rows as bytes, which every backend takes; of a single column the stride may be any number."""
    count, columns = rows.shape
    return rows.view(count * columns).view(torch.uint8).view(count, columns * rows.itemsize)


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.travel = received, sent, group
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(_bytes(found), _bytes(rows.contiguous()), received, sent, group=group)
        return found

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        return _ExchangeFunction.apply(gradient, *ctx.travel), None, None, None


class _CombineFunction(torch.autograd.Function):
    """The weighted sum, of rows with a bias; what goes back are rows without weights, as ``rows_of_experts`` wants."""

    @staticmethod
    def forward(ctx, rows, weights, experts, bias, *plan):
        ctx.save_for_backward(*plan)
        ctx.count = rows.shape[0]
        return combined(mode_of(rows, weights), rows, Plan(*plan), weights, experts, bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        mode = mode_of(dy)
        rows = gathered(mode, gradient_rows(dy, mode.eager), Plan(*ctx.saved_tensors))
        return rows[: ctx.count], *[None] * 7
