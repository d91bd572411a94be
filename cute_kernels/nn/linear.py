"""Linear: a drop-in for torch.nn's, batch-invariant, with a fused activation and main_grad."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cute_kernels.gemm import linear
from cute_kernels.gemm.functional import Activation, check_epilogue
from cute_kernels.nn._whole import expect_whole
from cute_kernels.runtime.checks import FLOATS, FP64, Backend, expect, expect_backend, expect_int


class Linear(nn.Module):
    """``torch.nn.Linear`` on ``cute_kernels.linear``.

    An fp32 weight is cast to x's dtype at each call; its gradient is fp32. Where ``weight.main_grad`` or
    ``bias.main_grad`` (fp32) exists, the backward accumulates into it and leaves ``.grad`` None; a tensor hook on such
    a parameter is an error.

    Args:
        in_features, out_features: K, N.
        bias: learn a bias (N,).
        device, dtype: of the parameters.
        activation: None, "relu", "silu" or "gelu" (exact), in fp32 on the unrounded sum.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Raises:
        TypeError, ValueError: a size that is no int, or negative; ``forward``: a bad argument, of the constructor, too.
        NotImplementedError: ``forward``: parameters that are DTensors.
        UnsupportedDeviceError: ``forward``: a GPU without kernels.

    Numerics:
        The contract ``serial_k16``: one fp32 accumulator over the whole K, ascending, in steps of 16. A token's result,
        and its gradient, have the same bits whatever the other tokens and their number. See ``docs/numerics.md``.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import Linear
        >>> layer = Linear(16, 4, activation="silu")
        >>> layer(torch.ones(2, 16, dtype=torch.bfloat16)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        out_dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            expect_int("Linear", name, size)
            expect(size >= 0, "Linear", name, "be at least 0", size)
        floats = (*FLOATS, *FP64) if dtype is torch.float64 else FLOATS
        check_epilogue("Linear", out_dtype, activation, floats)
        expect_backend("Linear", backend)
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        self.out_dtype = out_dtype
        self.backend = backend
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1 / sqrt(K), as torch.nn.Linear."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, num_valid_tokens: Tensor | None = None) -> Tensor:
        """``act(x weight^T + bias)``.

        Args:
            x: (..., K) bf16 or fp16 (torch.nn's takes fp32, too).
            num_valid_tokens: int32 tensor of one element on x's device: in the parameters' gradients, tokens from this
                one on count as exact zeros.

        Returns:
            (..., N) in ``out_dtype``, or x's dtype.
        """
        weight, bias = self._weight_for(x), self.bias
        if isinstance(x, Tensor) and x.shape[-1:] != weight.shape[1:]:
            expected = f"have {weight.shape[1]} columns, as in_features says"
            expect(False, "Linear", "x", expected, f"shape {tuple(x.shape)}")
        return linear(
            x,
            weight,
            bias,
            out_dtype=self.out_dtype,
            activation=self.activation,
            num_valid_tokens=num_valid_tokens,
            backend=self.backend,
        )

    def _weight_for(self, x: Tensor) -> Tensor:
        """The weight in x's dtype; a cast one has the main_grad of what it was cast of."""
        weight = self.weight
        expect_whole("Linear", weight, self.bias)
        if weight.dtype is torch.float32 and getattr(x, "dtype", None) in (torch.bfloat16, torch.float16):
            weight = weight.to(x.dtype)
            if getattr(self.weight, "main_grad", None) is not None:
                weight.main_grad = self.weight.main_grad
        return weight

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        if self.activation is not None:
            text += f", activation={self.activation!r}"
        if self.out_dtype is not None:
            text += f", out_dtype={self.out_dtype}"
        return text
