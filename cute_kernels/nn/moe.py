"""MoE: a layer of experts behind a router, batch-invariant, with main_grad."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels import moe
from cute_kernels.mxfp8 import quantize_rowwise
from cute_kernels.nn._whole import expect_whole
from cute_kernels.runtime.autograd import first_derivative_only
from cute_kernels.runtime.checks import Backend, expect, expect_backend, expect_float, expect_int, expect_tensor
from cute_kernels.runtime.real import as_float


class MoE(nn.Module):
    """A router and ``num_experts`` gated experts of which each token has ``k``.

    ``moe.router_logits``, then ``moe.route`` and ``moe.experts``. fp32 weights of experts are cast to x's dtype at each
    call. Where ``gate_up.main_grad`` or ``down.main_grad`` (fp32) exists, the backward accumulates into it and leaves
    ``.grad`` None.

    Args:
        hidden: H, columns of x.
        width: I, of each expert.
        num_experts, k: E, and experts of a token.
        score, groups, normalize, eps, scale: as of ``moe.route``.
        selection_bias: keep a buffer ``expert_bias`` (E,) fp32, zeros, that ``route`` adds to the scores for the
            selection alone; with "sigmoid". ``update_expert_bias`` is its update.
        activation: of the experts, by its name in ``moe.experts``.
        bias: keep biases of the router and of both weights of the experts, zeros at first.
        shared: a module that every token passes; its result is added to the experts'. None: none.
        balance: coefficient of ``moe.load_balancing_loss`` of each call in training. The backward adds its gradient to
            that of whatever is differentiated, as if the loss were one of its terms; a factor of that, as of a scaled
            loss, is not applied. 0: without it.
        z_loss: coefficient of ``moe.z_loss``, likewise.
        device, dtype: of the parameters.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Attributes:
        router: (E, H). gate_up: (E, 2 I, H), of "silu" (E, I, H). down: (E, H, I).
        last_routing: ``Routing`` of the last call, detached: to be given to another one as ``indices``.

    Raises:
        TypeError, ValueError: a bad argument; ``forward``: of the functions that it calls.
        UnsupportedDeviceError: ``forward``: a GPU without kernels.

    Numerics:
        A token's result, and its gradient, have the same bits whatever the other tokens, their number and their
        experts; but for the gradients of ``balance`` and ``z_loss``, functions of the batch. Gradients of parameters
        are reproducible sums over tokens.

    Example:
        >>> import torch
        >>> from cute_kernels import nn
        >>> layer = nn.MoE(16, 32, 8, 2, dtype=torch.bfloat16)
        >>> layer(torch.ones(3, 5, 16, dtype=torch.bfloat16)).shape
        torch.Size([3, 5, 16])
    """

    expert_bias: Tensor | None
    gate_up_scale: Tensor | None
    down_scale: Tensor | None

    def __init__(
        self,
        hidden: int,
        width: int,
        num_experts: int,
        k: int,
        *,
        score: str = "softmax",
        groups: tuple[int, int] | None = None,
        normalize: bool = True,
        eps: float = 0.0,
        scale: float = 1.0,
        selection_bias: bool = False,
        activation: str = "swiglu",
        bias: bool = False,
        shared: nn.Module | None = None,
        balance: float = 0.0,
        z_loss: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden", hidden), ("width", width), ("num_experts", num_experts), ("k", k)):
            expect_int("MoE", name, size)
            expect(size > 0, "MoE", name, "be positive", size)
        expect(k <= num_experts, "MoE", "k", f"be at most num_experts = {num_experts}", k)
        expect_backend("MoE", backend)
        self.balance, self.z_loss = as_float(balance), as_float(z_loss)
        for name, value in (("balance", self.balance), ("z_loss", self.z_loss)):
            expect_float("MoE", name, value)
            expect(0.0 <= value < math.inf, "MoE", name, "be finite and not negative", value)
        self.num_experts, self.k, self.backend = num_experts, k, backend
        self.options = {"score": score, "groups": groups, "normalize": normalize, "eps": eps, "scale": scale}
        options = {"device": device, "dtype": dtype}
        self.router = nn.Parameter(torch.empty(num_experts, hidden, **options))
        columns = width if activation == "silu" else 2 * width
        self.activation = activation
        self.gate_up = nn.Parameter(torch.empty(num_experts, columns, hidden, **options))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width, **options))
        for name in ("gate_up_scale", "down_scale"):  # until quantize_experts gives them one
            self.register_buffer(name, None)
        sizes = {"router_bias": (num_experts,), "gate_up_bias": (num_experts, columns)}
        for name, shape in (sizes | {"down_bias": (num_experts, hidden)}).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **options)) if bias else None)
        self.shared = shared
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("expert_bias", bias)
        self.last_routing: moe.Routing | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1 / sqrt(columns), as torch.nn.Linear; biases are 0."""
        for weight in (self.router, self.gate_up, self.down):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
        for bias in (self.expert_bias, self.router_bias, self.gate_up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, indices: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """The experts' sum of each token.

        Args:
            x: (..., H) bf16 or fp16.
            segments: of the tokens, as in ``moe.experts``.
            indices: (tokens, k) experts that are taken instead of the router's choice, as ``last_routing.indices`` has
                them. Weights are the router's.

        Returns:
            (..., H) of x's dtype.
        """
        expect_tensor("MoE", "x", x)
        expect_whole("MoE", self.router, self.gate_up, self.down)
        hidden = self.router.shape[1]
        expect(x.shape[-1:] == (hidden,), "MoE", "x", f"have {hidden} columns, as hidden says", tuple(x.shape))
        rows = x.reshape(-1, hidden)
        logits = moe.router_logits(rows, self.router, self.router_bias, backend=self.backend)
        options = self.options if indices is None else {**self.options, "groups": None}
        bias = self.expert_bias if indices is None else None
        routing = moe.route(logits, self.k, **options, bias=bias, indices=indices, backend=self.backend)
        self.last_routing = moe.Routing(*(t.detach() for t in routing))
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        given: dict[str, Any] = {name: None if bias is None else _cast(bias, x) for name, bias in biases.items()}
        given |= {"gate_up_scale": self.gate_up_scale, "down_scale": self.down_scale}
        given |= {"activation": self.activation, "segments": segments, "backend": self.backend}
        y = moe.experts(rows, routing, _cast(self.gate_up, x), _cast(self.down, x), **given).view(x.shape)
        if self.training and len(rows) and torch.is_grad_enabled():
            if self.balance:
                y = _WithLoss.apply(y, self.balance * moe.load_balancing_loss(logits, routing, backend=self.backend))
            if self.z_loss:
                y = _WithLoss.apply(y, self.z_loss * moe.z_loss(logits, backend=self.backend))
        return y if self.shared is None else y + self.shared(x)

    def counts(self) -> Tensor:
        """(E,) int32: how many tokens of the last call each expert had.

        Raises:
            ValueError: there was no call.
        """
        expect(self.last_routing is not None, "MoE", "counts", "be asked for after a call", None)
        return moe.plan(self.last_routing.indices, self.num_experts, backend=self.backend).counts

    @torch.no_grad()
    def update_expert_bias(self, rate: float, counts: Tensor | None = None) -> None:
        """Add ``rate`` to the bias of experts that had fewer tokens than the mean, and take it from those with more.

        Args:
            rate: DeepSeek-V3 has 0.001.
            counts: (E,) integers, of several calls or ranks together. None: ``counts()``.

        Raises:
            ValueError: there is no bias, or counts of another shape.

        Source:
            Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664.
        """
        bias = self.expert_bias
        expect(bias is not None, "MoE", "expert_bias", "exist, by selection_bias=True", None)
        counts = self.counts() if counts is None else counts
        expect(counts.shape == bias.shape, "MoE", "counts", f"have shape {tuple(bias.shape)}", tuple(counts.shape))
        counts = counts.long()
        bias += as_float(rate) * (counts.sum() - self.num_experts * counts).sign()

    @torch.no_grad()
    def quantize_experts(self) -> MoE:
        """Replace the weights of the experts by mxfp8 ones, in place, for inference.

        Few tokens wait for the weights to be read: half the bytes. ``gate_up`` and ``down`` are float8_e4m3fn buffers
        then, with scales in ``gate_up_scale`` and ``down_scale``, and no parameter of the layer requires a gradient;
        ``shared`` stays as it is. x is bf16. A cast of the module to another dtype comes before, not after. A
        state_dict of such a layer is loaded into one that was quantized, too.

        Returns:
            The layer. A result has the bits of the same layer with ``dequantize`` of the weights.

        Raises:
            ValueError: hidden or width is no multiple of 32, or the weights are quantized.
        """
        expect_whole("MoE", self.router, self.gate_up, self.down)
        expect(self.gate_up_scale is None, "MoE", "gate_up", "be of numbers that are not quantized", self.gate_up.dtype)
        hidden, width = self.down.shape[1:]
        for name, size in (("hidden", hidden), ("width", width)):
            expect(size % 32 == 0, "MoE", name, "be a multiple of 32 for mxfp8 weights", size)
        for name in ("gate_up", "down"):
            weight = getattr(self, name)
            q, scale = quantize_rowwise(weight.flatten(0, 1), backend=self.backend)
            delattr(self, name)
            self.register_buffer(name, q.view(weight.shape))
            setattr(self, f"{name}_scale", scale.view(*weight.shape[:2], -1))
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False)
        return self

    def extra_repr(self) -> str:
        hidden, width = self.down.shape[1:]
        found = f"hidden={hidden}, width={width}, num_experts={self.num_experts}, k={self.k}"
        return found if self.gate_up_scale is None else f"{found}, experts=mxfp8"


class _WithLoss(torch.autograd.Function):
    """y; its backward also gives the loss the gradient 1."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.dtype = loss.dtype
        return y.view_as(y)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        return dy, torch.ones((), dtype=ctx.dtype, device=dy.device)


def _cast(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in x's dtype; a cast one has the main_grad of what it was cast of."""
    if weight.dtype is not torch.float32 or x.dtype not in (torch.bfloat16, torch.float16):
        return weight
    cast = weight.to(x.dtype)
    if getattr(weight, "main_grad", None) is not None:
        cast.main_grad = weight.main_grad  # type: ignore[attr-defined]
    return cast
