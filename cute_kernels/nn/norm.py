"""RMSNorm and LayerNorm: drop-ins for torch.nn's, over one last dimension, with a fused residual and main_grad."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Integral
from typing import overload

import torch
from torch import Tensor, nn

from cute_kernels.nn._whole import expect_whole
from cute_kernels.nn.recompute import RecomputeManager, expect_manager
from cute_kernels.norm import layer_norm, rms_norm
from cute_kernels.norm.functional import Save, check_options, rms_norm_again
from cute_kernels.runtime.checks import Backend, expect, expect_backend
from cute_kernels.runtime.operators import uses_reference
from cute_kernels.runtime.real import as_float


class _Norm(nn.Module):
    function: Callable[..., Tensor | tuple[Tensor, Tensor]]

    def __init__(
        self, normalized_shape, eps, elementwise_affine, bias, device, dtype, weight_offset, save, out_dtype, backend
    ) -> None:
        super().__init__()
        sizes = normalized_shape if isinstance(normalized_shape, (tuple, list)) else [normalized_shape]
        good = len(sizes) == 1 and isinstance(sizes[0], Integral) and type(sizes[0]) is not bool and sizes[0] > 0
        expect(good, type(self).__name__, "normalized_shape", "be one positive size", repr(normalized_shape))
        self.normalized_shape = (int(sizes[0]),)
        self.eps = as_float(eps)
        self.elementwise_affine = elementwise_affine
        self.weight_offset = as_float(weight_offset)
        check_options(type(self).__name__, self.eps, self.weight_offset, save, out_dtype)
        expect_backend(type(self).__name__, backend)
        self.save = save
        self.out_dtype = out_dtype
        self.backend = backend
        for name, present in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            make = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)) if present else None
            self.register_parameter(name, make)
        self.reset_parameters()

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x, or with a residual x + residual.

        Args:
            x: (..., C) bf16, fp16 or fp32.
            residual: (..., C) in x's dtype or fp32; None: none.

        Returns:
            y of x's shape (..., C); with a residual (y, x + residual).
        """
        weight, bias = self.weight, self.bias
        expect_whole(type(self).__name__, weight, bias)
        self.expect_width(x)
        return self.function(
            x,
            weight,
            bias=bias,
            residual=residual,
            eps=self.eps,
            weight_offset=self.weight_offset,
            save=self.save,
            out_dtype=self.out_dtype,
            return_residual=residual is not None,
            backend=self.backend,
        )

    def reset_parameters(self) -> None:
        """weight + weight_offset = 1, bias = 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def expect_width(self, x: Tensor) -> None:
        """Raise ValueError for an x of other columns: the module knows that x is wrong, and not its weight."""
        if isinstance(x, Tensor) and x.shape[-1:] != self.normalized_shape:
            expected = f"have {self.normalized_shape[0]} columns, as normalized_shape says"
            expect(False, type(self).__name__, "x", expected, f"shape {tuple(x.shape)}")

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        if isinstance(self, LayerNorm):
            text += f", bias={self.bias is not None}"
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        if self.save != "input":
            text += f", save={self.save!r}"
        if self.out_dtype is not None:
            text += f", out_dtype={self.out_dtype}"
        return text


class RMSNorm(_Norm):
    """``torch.nn.RMSNorm`` over the last dimension, on ``cute_kernels.rms_norm``.

    If ``weight.main_grad`` (fp32) exists, the backward adds to it and leaves ``weight.grad`` None; a tensor hook on
    such a weight is an error.

    Args:
        normalized_shape: C, or (C,).
        eps: added to the mean square; 1e-6 if None (torch: the dtype's machine epsilon).
        elementwise_affine: learn a weight (C,).
        device, dtype: of the weight.
        weight_offset: added to the weight in fp32, a real number (1.0 for zero-centred weights).
        save: the tensor that the backward keeps: "input", or "output" (y, which a following linear layer keeps anyway;
            not with a residual).
        out_dtype: dtype of y: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Raises:
        TypeError, ValueError: a ``normalized_shape`` that is not one positive size; ``forward``: a bad argument, of the
            constructor, too.
        NotImplementedError: ``forward``: parameters that are DTensors.
        UnsupportedDeviceError: ``forward``: a GPU without kernels.

    Numerics:
        fp32 arithmetic and statistics; a row of y and of dx has the same bits whatever the number of rows and its place
        among them. The parameters' gradients are reproducible run to run. See ``docs/numerics.md``.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, equation 4.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import RMSNorm
        >>> norm = RMSNorm(64, dtype=torch.bfloat16)
        >>> x = torch.ones(3, 64, dtype=torch.bfloat16)
        >>> y, h = norm(x, residual=x)
        >>> y.shape, h[0, 0].item()
        (torch.Size([3, 64]), 2.0)
    """

    function = staticmethod(rms_norm)

    def __init__(
        self,
        normalized_shape: int | tuple[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        save: Save = "input",
        out_dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        eps = 1e-6 if eps is None else eps
        super().__init__(
            normalized_shape, eps, elementwise_affine, False, device, dtype, weight_offset, save, out_dtype, backend
        )

    def recomputed(self, x: Tensor, recompute: RecomputeManager) -> Tensor:
        """y, discarded at the end of the manager's block and made again from x; kept where the module has hooks.

        Args:
            x: (..., C) bf16, fp16 or fp32.
            recompute: the manager of the block.

        Returns:
            y of x's shape.

        Raises:
            TypeError, ValueError: a bad argument.
            RuntimeError: the manager's block has ended.
        """
        expect_manager("RMSNorm", recompute)
        if self._forward_pre_hooks or self._forward_hooks or self._backward_pre_hooks or self._backward_hooks:
            return self(x)  # which calls them; what they make of y is not made again
        if uses_reference("RMSNorm", x, self.backend):
            expect_whole("RMSNorm", self.weight)
            self.expect_width(x)
            options = {"eps": self.eps, "weight_offset": self.weight_offset}
            options |= {"save": self.save, "out_dtype": self.out_dtype}
            function = functools.partial(rms_norm, backend=self.backend, **options)
            return recompute.checkpoint(function, x, self.weight)
        y = self(x)
        weight, rows = self.weight, x.detach()
        options = as_float(self.eps), as_float(self.weight_offset)

        def refill(out: Tensor) -> None:
            rms_norm_again(rows, weight, *options, out)

        recompute.discard((y,), refill, {"RMSNorm: x": rows, "RMSNorm: weight": weight})
        return y


class LayerNorm(_Norm):
    """``torch.nn.LayerNorm`` over the last dimension, on ``cute_kernels.layer_norm``.

    Where ``weight.main_grad`` or ``bias.main_grad`` (fp32) exists, the backward adds to it and leaves ``.grad`` None; a
    tensor hook on such a parameter is an error.

    Args:
        normalized_shape: C, or (C,).
        eps: added to the variance.
        elementwise_affine: learn a weight (C,) and, unless ``bias`` is False, a bias (C,).
        bias: learn a bias.
        device, dtype: of the parameters.
        weight_offset: added to the weight in fp32, a real number (1.0 for zero-centred weights).
        save: the tensor that the backward keeps: "input", or "output" (y, which a following linear layer keeps anyway;
            not with a residual).
        out_dtype: dtype of y: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Raises:
        TypeError, ValueError: a ``normalized_shape`` that is not one positive size; ``forward``: a bad argument, of the
            constructor, too.
        NotImplementedError: ``forward``: parameters that are DTensors.
        UnsupportedDeviceError: ``forward``: a GPU without kernels.

    Numerics:
        fp32 arithmetic and statistics; a row of y and of dx has the same bits whatever the number of rows and its place
        among them. The parameters' gradients are reproducible run to run. See ``docs/numerics.md``.

    Source:
        Ba, Kiros and Hinton, Layer Normalization, 2016, equation 4.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import LayerNorm
        >>> LayerNorm(2)(torch.tensor([[1.0, 3.0]])).round(decimals=3).tolist()
        [[-1.0, 1.0]]
    """

    function = staticmethod(layer_norm)

    def __init__(
        self,
        normalized_shape: int | tuple[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        save: Save = "input",
        out_dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device, dtype, weight_offset, save, out_dtype, backend
        )
