"""HyperConnection and LearnedHead: modules of the hyper-connections' parameters, on ``cute_kernels.mhc``."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from cute_kernels import mhc
from cute_kernels.mhc import Variant, functional
from cute_kernels.mhc.functional import MAX_ITERATIONS, MIN_CHANNELS, STREAMS, UNDERFLOW, Precision, variant_of
from cute_kernels.nn._whole import expect_whole
from cute_kernels.nn.recompute import RecomputeManager, expect_manager
from cute_kernels.runtime.checks import Backend, expect, expect_backend, expect_float, expect_int, expect_tensor, fail
from cute_kernels.runtime.operators import same_memory, uses_reference
from cute_kernels.runtime.real import as_float

OP = "HyperConnection"
PRECISION: Precision = "tf32"


@dataclass(frozen=True)
class HyperConnectionConfig:
    """Hyper-connections of a model; frozen, and checked when it is made.

    Memory inside of the block of layers grows linearly with ``num_streams``: the residual between any two sublayers
    holds num_streams * hidden_size numbers a token. ``recompute`` keeps one of them for ``recompute_layers`` layers,
    ``offload`` moves the kept ones to the host.

    Args:
        hidden_size: C, channels of one stream, the model's hidden size; from 8.
        num_streams: n: 1, 2, 4 or 8.
        sinkhorn_iterations: 1 to 100; the variant's if None (20, in "tilekernels" 10).
        init_gating_factor: >= 0; alpha's first value.
        variant: a name of ``mhc.VARIANTS`` or a Variant.
        eps: > 0, added to a token's mean square (or its root, as the variant has it); the variant's if None.
        recompute: discard layer inputs, norm outputs and residuals in the forward, and make them again in the backward.
        recompute_layers: layers a block of recompute; None or "optimal": ``optimal_recompute_layers``.
        offload: move the residuals that are kept for the backward to pinned host memory; CUDA alone.

    Raises:
        TypeError, ValueError: a bad field; the message names it, the expected value and the given one.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.

    Example:
        >>> from cute_kernels.nn import HyperConnectionConfig
        >>> config = HyperConnectionConfig(64, num_streams=4, sinkhorn_iterations=10)
        >>> config.resolved_variant().iterations
        10
    """

    hidden_size: int
    num_streams: int = 4
    sinkhorn_iterations: int | None = None
    init_gating_factor: float = 0.01
    variant: str | Variant = "deepseek_v4"
    eps: float | None = None
    recompute: bool = False
    recompute_layers: int | Literal["optimal"] | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        name = "HyperConnectionConfig"
        expect_int(name, "hidden_size", self.hidden_size)
        expect(self.hidden_size >= MIN_CHANNELS, name, "hidden_size", f"be at least {MIN_CHANNELS}", self.hidden_size)
        expect_int(name, "num_streams", self.num_streams)
        hint = f"be one of {STREAMS} (for none: hyper_connections=None in the model's config)"
        expect(self.num_streams in STREAMS, name, "num_streams", hint, self.num_streams)
        if self.sinkhorn_iterations is not None:
            expect_int(name, "sinkhorn_iterations", self.sinkhorn_iterations)
            good = 1 <= self.sinkhorn_iterations <= MAX_ITERATIONS
            expect(good, name, "sinkhorn_iterations", f"be from 1 to {MAX_ITERATIONS}", self.sinkhorn_iterations)
        for field in ("init_gating_factor", "eps"):
            object.__setattr__(self, field, as_float(getattr(self, field)))
        expect_float(name, "init_gating_factor", self.init_gating_factor)
        good = 0.0 <= self.init_gating_factor < math.inf
        expect(good, name, "init_gating_factor", "be finite and not negative", self.init_gating_factor)
        variant_of(name, self.variant)
        if self.eps is not None:
            expect_float(name, "eps", self.eps)
            good = UNDERFLOW < self.eps < math.inf
            expect(good, name, "eps", "be finite and positive in fp32, or None", self.eps)
        for field in ("recompute", "offload"):
            value = getattr(self, field)
            expect(isinstance(value, bool), name, field, "be a bool", type(value).__name__, TypeError)
        layers = self.recompute_layers
        if layers is not None:
            expect(self.recompute, name, "recompute_layers", "be None unless recompute=True", repr(layers))
            if isinstance(layers, str):
                expect(layers == "optimal", name, "recompute_layers", "be an int, 'optimal' or None", repr(layers))
            else:
                expect_int(name, "recompute_layers", layers)
                expect(layers >= 1, name, "recompute_layers", "be at least 1", layers)

    def resolved_variant(self) -> Variant:
        """The variant with this config's iterations and eps, where it has them."""
        changes = {}
        if self.sinkhorn_iterations is not None:
            changes["iterations"] = self.sinkhorn_iterations
        if self.eps is not None:
            changes["rms_eps"] = self.eps
        return replace(variant_of("HyperConnectionConfig", self.variant), **changes)

    def layers_per_block(self, num_layers: int) -> int:
        """Layers a block of recompute in a model of ``num_layers``."""
        if isinstance(self.recompute_layers, int):
            return min(self.recompute_layers, num_layers)
        return optimal_recompute_layers(self.num_streams, num_layers)


def optimal_recompute_layers(num_streams: int, num_layers: int) -> int:
    """Layers a block of recompute for the least memory: round(sqrt(n L / (n + 2))), from 1 to L.

    The kept numbers, n C ceil(L / L_r), and the transient ones, (n + 2) C L_r,
    are together within 7 % of their least there.

    Args:
        num_streams: n, from 1.
        num_layers: L, from 1.

    Returns:
        L_r, an int from 1 to L.

    Raises:
        TypeError, ValueError: a number that is no int, or less than 1.

    Source:
        Xie et al., mHC, arXiv 2512.24880, equation 20.

    Example:
        >>> from cute_kernels.nn import optimal_recompute_layers
        >>> optimal_recompute_layers(num_streams=4, num_layers=24)
        4
    """
    for name, number in (("num_streams", num_streams), ("num_layers", num_layers)):
        expect_int("optimal_recompute_layers", name, number)
        expect(number >= 1, "optimal_recompute_layers", name, "be at least 1", number)
    return min(max(1, round(math.sqrt(num_streams * num_layers / (num_streams + 2)))), num_layers)


class Mix(NamedTuple):
    """The result of ``HyperConnection.forward`` that ``combine`` needs.

    post (..., n) and res (..., n, n) are fp32. The rest is for ``combine`` alone: ``residual``, what forward got; where
    that is an alias by which the gradient comes back to forward, to be multiplied by its res there, that res; and in
    which orientation.
    """

    post: Tensor
    res: Tensor
    residual: Tensor
    own_res: Tensor | None
    res_orientation: str


class FloatModule(nn.Module):
    """A module whose floating-point tensors keep their dtype: ``.to(dtype)``, ``.half()`` and the like only move them,
    and what ``load_state_dict(assign=True)`` puts in their place is converted.
    """

    def _apply(self, fn, recurse=True):
        def move(t):
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(move, recurse)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("assign_to_params_buffers"):
            for name, own in (*self._parameters.items(), *self._buffers.items()):
                given = state_dict.get(prefix + name)
                if own is not None and isinstance(given, Tensor) and given.is_floating_point():
                    state_dict[prefix + name] = given.to(own.dtype)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class HyperConnection(FloatModule):
    """The hyper-connection of one sublayer: ``forward`` makes its input, ``combine`` adds its output to the streams.

    Parameters, fp32 always (``.to(dtype)`` leaves them as they are): ``phi`` (n * n + 2 * n, n * C), begun as Xavier's
    uniform; ``alpha`` (3,) of pre, post and res, ``init_gating_factor``; ``beta`` (n * n + 2 * n,), zeros. The
    coefficients are fp32, too. Where a parameter has a ``main_grad`` (fp32) the backward adds to it; a tensor hook on
    such a parameter is an error.

    The residual is (..., n, C), for variants of layout "channels" (..., C, n). Its gradient is written once.

    Args:
        config: the sizes, the variant and the constants: a ``HyperConnectionConfig``.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.
        device: of the parameters.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        NotImplementedError: parameters that are DTensors.
        UnsupportedDeviceError: a GPU without kernels.
        RuntimeError: a manager whose block has ended.

    ``forward`` and ``combine`` raise the same errors.

    Numerics:
        The bits of ``mhc.pre`` and ``mhc.expand_combine``. See ``docs/numerics.md``.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, equations 14 to 19.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import HyperConnection, HyperConnectionConfig
        >>> connection = HyperConnection(HyperConnectionConfig(16, num_streams=2))
        >>> x = torch.ones(3, 2, 16)
        >>> layer_input, mix = connection(x)
        >>> connection.combine(layer_input.tanh(), x, mix).shape
        torch.Size([3, 2, 16])
    """

    def __init__(
        self, config: HyperConnectionConfig, *, backend: Backend | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        expect_config(OP, config, HyperConnectionConfig)
        expect_backend(OP, backend)
        n, k = config.num_streams, config.num_streams * config.hidden_size
        self.config = config
        self.backend = backend
        self.variant = config.resolved_variant()
        options = {"device": device, "dtype": torch.float32}
        self.phi = nn.Parameter(torch.empty((functional.num_coefficients(n), k), **options))
        self.alpha = nn.Parameter(torch.empty(3, **options))
        self.beta = nn.Parameter(torch.empty(functional.num_coefficients(n), **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """phi as Xavier's uniform, alpha ``init_gating_factor``, beta zeros."""
        nn.init.xavier_uniform_(self.phi)
        nn.init.constant_(self.alpha, self.config.init_gating_factor)
        nn.init.zeros_(self.beta)

    def forward(self, x: Tensor, recompute: RecomputeManager | None = None) -> tuple[Tensor, Mix]:
        """The sublayer's input from the residual.

        With a manager, layer_input is discarded at the end of its block. The kernels keep the coefficients; the
        references discard them, too.

        Args:
            x: (..., n, C), for variants of layout "channels" (..., C, n); bf16, fp16 or fp32.
            recompute: the manager of the block that the sublayer is in; None: nothing is discarded.

        Returns:
            (layer_input, mix): layer_input (..., C) in x's dtype is the sublayer's, mix is for ``combine``.
        """
        v, parameters = self.variant, (self.phi, self.alpha, self.beta)
        expect_whole(OP, *parameters)
        expect_manager(OP, recompute)
        expect_residual(OP, x, self.config, v)
        if uses_reference(OP, x, self.backend):
            function, arguments = functools.partial(_reference_pre, v), (x, *parameters)
            results = function(*arguments) if recompute is None else recompute.checkpoint(function, *arguments)
            layer_input, post, res = results
            return layer_input, Mix(post, res, x, None, v.res_orientation)
        layer_input, post, res, residual, is_alias = functional.before_sublayer(OP, x, *parameters, v, PRECISION)
        if not is_alias:
            return layer_input, Mix(post, res, x, None, v.res_orientation)
        if recompute is not None:
            pre, entry = functional.pre_of(layer_input), recompute.entry_of(x)
            joins = entry is not None and isinstance(entry.refill, functional.Combination)
            if joins and entry.refill.takes(pre, v.layout):
                entry.join((layer_input,))
            else:
                refill = functional.Aggregation(OP, x, pre, v.layout)
                recompute.discard((layer_input,), refill, {"HyperConnection: x": refill.x})
        return layer_input, Mix(post, res, residual, res, v.res_orientation)

    def combine(
        self,
        f: Tensor,
        x: Tensor,
        mix: Mix,
        bias: Tensor | None = None,
        dropout_p: float = 0.0,
        recompute: RecomputeManager | None = None,
    ) -> Tensor:
        """The residual after the sublayer.

        With a manager, the result is discarded at the end of its block, unless the block ends in it.

        Args:
            f: (..., C) in x's dtype, the sublayer's output.
            x: the residual that ``forward`` got.
            mix: the second result of ``forward``.
            bias: (C,) fp32 or bf16, added to f; None: 0.
            dropout_p: in [0, 1); each of the n * C elements that a token's output adds has a mask of its own.
            recompute: the manager of the block; None: nothing is discarded.

        Returns:
            The new residual, of x's shape and dtype.
        """
        if not (isinstance(x, Tensor) and isinstance(mix, Mix)):
            expect_tensor(OP, "x", x)
            expect(False, OP, "mix", "be the one that forward returned", type(mix).__name__, TypeError)
        v = self.variant
        post, res, residual, own_res, orientation = mix
        if orientation != v.res_orientation:
            fail(OP, "mix", f"have res_orientation {v.res_orientation!r}", orientation)
        if not same_memory(x, residual):
            fail(OP, "x", "be the residual that forward got", f"another, of shape {tuple(x.shape)}")
        if own_res is not None and torch.is_grad_enabled():
            good = same_memory(res, own_res) and (residual.requires_grad or is_compiling())
            expect(good, OP, "mix", "have the res and residual that forward returned", "others, or a detached one")
        dropout_p = as_float(dropout_p)
        functional.check_dropout(OP, dropout_p, None, x.device)
        expect_manager(OP, recompute)
        if uses_reference(OP, x, self.backend):
            function = functools.partial(_reference_combine, v, dropout_p)
            arguments = f, post, residual, res, bias
            return function(*arguments) if recompute is None else recompute.checkpoint(function, *arguments)
        seed = functional.draw_seed(x.device) if dropout_p > 0.0 else None
        out = functional.after_sublayer(
            OP, f, post, residual, res, bias, dropout_p, seed, v, passes_dout=own_res is not None
        )
        if recompute is not None:
            options = seed, dropout_p, v.layout, v.res_orientation
            refill = functional.Combination(OP, f, post, x, res, bias, *options)
            kept = {f"HyperConnection.combine: {name}": t for name, t in refill.matrices.items()}
            recompute.discard((out,), refill, kept)
        return out

    def extra_repr(self) -> str:
        c = self.config
        return f"hidden_size={c.hidden_size}, num_streams={c.num_streams}, variant={c.variant!r}"


class LearnedHead(FloatModule):
    """From the residual to the output of a model: ``mhc.head``.

    Parameters, fp32 always: ``fn`` (n, n * C), begun as Xavier's uniform; ``base`` (n,), zeros; and ``scale`` (1,),
    ``init_gating_factor``.

    Args:
        config: the sizes, the variant and the constants: a ``HyperConnectionConfig``.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.
        device: of the parameters.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        NotImplementedError: parameters that are DTensors.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The bits of ``mhc.head``. See ``docs/numerics.md``.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import HyperConnectionConfig, LearnedHead
        >>> head = LearnedHead(HyperConnectionConfig(16, num_streams=2))
        >>> head(torch.ones(3, 2, 16)).shape
        torch.Size([3, 16])
    """

    def __init__(
        self, config: HyperConnectionConfig, *, backend: Backend | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        expect_config("LearnedHead", config, HyperConnectionConfig)
        expect_backend("LearnedHead", backend)
        n = config.num_streams
        self.config = config
        self.backend = backend
        self.variant = config.resolved_variant()
        options = {"device": device, "dtype": torch.float32}
        self.fn = nn.Parameter(torch.empty((n, n * config.hidden_size), **options))
        self.base = nn.Parameter(torch.empty(n, **options))
        self.scale = nn.Parameter(torch.empty(1, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """fn as Xavier's uniform, base zeros, scale ``init_gating_factor``."""
        nn.init.xavier_uniform_(self.fn)
        nn.init.zeros_(self.base)
        nn.init.constant_(self.scale, self.config.init_gating_factor)

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of the streams.

        Args:
            x: the residual, (..., n, C), for variants of layout "channels" (..., C, n).

        Returns:
            (..., C) in x's dtype.
        """
        expect_whole("LearnedHead", self.fn, self.base, self.scale)
        expect_residual("LearnedHead", x, self.config, self.variant)
        return mhc.head(x, self.fn, self.base, self.scale, variant=self.variant, backend=self.backend)


def _reference_pre(variant: Variant, x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    return mhc.pre(x, phi, alpha, beta, variant=variant, precision=PRECISION, backend="reference")


def _reference_combine(variant: Variant, dropout_p: float, f, post, x, res, bias) -> Tensor:
    return mhc.expand_combine(
        f,
        post,
        x,
        res,
        bias=bias,
        dropout_p=dropout_p,
        layout=variant.layout,
        res_orientation=variant.res_orientation,
        backend="reference",
    )


def expect_residual(module: str, x: Tensor, config: HyperConnectionConfig, variant: Variant) -> None:
    """Raise ValueError unless x has the streams and channels that a module was made for."""
    token = config.num_streams, config.hidden_size
    if variant.layout == "channels":
        token = token[::-1]
    if isinstance(x, Tensor) and not is_compiling() and x.shape[-2:] != token:  # in a trace sizes become symbols
        expected = f"have shape (..., {token[0]}, {token[1]}), as the config says"
        expect(False, module, "x", expected, tuple(x.shape))


def expect_config(module: str, config: object, wanted: type) -> None:
    """Raise TypeError unless ``config`` is a ``wanted``."""
    good, got = isinstance(config, wanted), type(config).__name__
    expect(good, module, "config", f"be a {wanted.__name__}", got, TypeError)
