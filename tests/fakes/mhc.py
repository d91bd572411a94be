"""Fakes of the hyper-connections' kernels: plain torch in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from cute_kernels.mhc import reference
from cute_kernels.mhc.config import BIAS_CHUNK
from cute_kernels.mhc.reference.coefficients import rms
from cute_kernels.mhc.variants import Constants

BF16, FP32 = torch.bfloat16, torch.float32


def _is_dtype(wanted: torch.dtype | None, *tensors: Tensor | None) -> None:
    """A kernel gets what it was built for."""
    for t in tensors:
        assert wanted is (None if t is None else t.dtype)


def _is_matrix(t: Tensor | None, wanted: bool, width: int, align: int, dtype: torch.dtype = FP32) -> None:
    """There if it is wanted: contiguous rows, all of which start on ``align`` elements."""
    assert (t is not None) == wanted
    if t is not None:
        assert t.dtype is dtype and t.dim() == 2 and t.shape[1] == width and t.stride(1) == 1, (t.shape, t.stride())
        assert t.stride(0) % align == 0 and t.data_ptr() % (align * t.element_size()) == 0, (t.stride(), align)


def _are_streams(static: dict, s, *, of_tokens: tuple = (), of_channels: tuple = ()) -> None:
    """Matrices (M, n C) and (M, C) in the dtype and alignment that the kernel was built for."""
    for matrices, width, align in ((of_tokens, s.n * s.channels, s.access), (of_channels, s.channels, s.vec)):
        for t in matrices:
            if t is not None:
                _is_dtype(static["spec"].dtype, t)
                _is_matrix(t, True, width, align, t.dtype)


def _split(x: Tensor, n: int, order: str) -> Tensor:
    """Rows of tokens as (M, n, C) in fp32."""
    x = x.float()
    return x.unflatten(1, (n, -1)) if order == "streams" else x.unflatten(1, (-1, n)).mT


def _join(streams: Tensor, order: str) -> Tensor:
    return (streams if order == "streams" else streams.mT).flatten(1)


def aggregate_forward(static, x, pre, out, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(x,), of_channels=(out,))
    _is_matrix(pre, static["spec"].has_pre, s.n, static["spec"].pre_align)
    weights = torch.full((1, s.n), scale) if pre is None else pre
    streams = _split(x, s.n, s.order)
    out.copy_(sum(weights[:, i : i + 1] * streams[:, i] for i in range(s.n)))


def aggregate_backward(static, dout, x, pre, dx, dpre) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(x, dx), of_channels=(dout,))
    _is_matrix(pre, static["spec"].needs_dx, s.n, static["spec"].pre_align)
    _is_matrix(dpre, static["spec"].needs_dpre, s.n, 1)
    assert (dx is not None) == static["spec"].needs_dx
    if dx is not None:
        dx.copy_(_join(pre[:, :, None] * dout.float()[:, None], s.order))
    if dpre is not None:
        dpre.copy_((_split(x, s.n, s.order) * dout.float()[:, None]).sum(-1))


def expand_streams(static, h, x, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(x,), of_channels=(h,))
    x.copy_(_join((scale * h.float())[:, None].expand(-1, s.n, -1), s.order))


def _kept(static: dict, seed: Tensor | None, tokens: int, threshold: int, scale: float) -> Tensor | float:
    """Dropout multiplies the streams (M, n, C) by this."""
    s = static["layout"]
    assert (seed is not None) == static["spec"].has_dropout
    if seed is None:
        assert scale == 1.0 and threshold == 0
        return 1.0
    assert seed.shape == (1,) and seed.dtype is torch.int64
    mask = reference.dropout_mask(seed, tokens, s.n * s.channels, threshold / 2**32, seed.device)
    return _split(mask * torch.tensor(scale), s.n, s.order)


def _mixing(static: dict, res: Tensor) -> Tensor:
    """R (M, i, o)."""
    n = static["layout"].n
    _is_matrix(res, True, n * n, static["spec"].res_align)
    matrix = res.unflatten(1, (n, n))
    return matrix if static["spec"].orientation == "io" else matrix.mT


def expand_combine_forward(static, f, bias, post, x, res, seed, out, pre, layer_input, threshold, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(x, out), of_channels=(f, layer_input))
    _is_matrix(pre, static["spec"].has_pre, s.n, static["spec"].pre_align)
    _is_dtype(static["spec"].bias, bias)
    _is_matrix(post, True, s.n, static["spec"].post_align)
    update = f.float() if bias is None else f.float() + bias.float()
    added = post[:, :, None] * update[:, None] * _kept(static, seed, len(x), threshold, scale)
    out.copy_(_join(added + _mixing(static, res).mT @ _split(x, s.n, s.order), s.order))
    assert (layer_input is None) == (pre is None)
    if pre is not None:
        streams = _split(out, s.n, s.order)
        layer_input.copy_(sum(pre[:, i : i + 1] * streams[:, i] for i in range(s.n)))


def expand_combine_backward(static, dout, f, bias, post, x, res, seed, dx, df, dpost, dres, threshold, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(dout, x, dx), of_channels=(f, df))
    _is_dtype(static["spec"].bias, bias)
    _is_matrix(post, True, s.n, static["spec"].post_align)
    _is_matrix(dpost, static["spec"].needs_coefficients, s.n, 1)
    _is_matrix(dres, static["spec"].needs_coefficients, s.n**2, 1)
    assert (dx is not None) == static["spec"].needs_dx and (df is not None) == static["spec"].needs_df
    d, mixing = _split(dout, s.n, s.order), _mixing(static, res)
    dropped = d * _kept(static, seed, len(x), threshold, scale)
    update = f.float() if bias is None else f.float() + bias.float()
    if dx is not None:
        dx.copy_(_join(mixing @ d, s.order))
    if df is not None:
        df.copy_((post[:, :, None] * dropped).sum(1))
    if dpost is not None:
        dpost.copy_((update[:, None] * dropped).sum(-1))
        sums = _split(x, s.n, s.order) @ d.mT
        dres.copy_((sums if static["spec"].orientation == "io" else sums.mT).flatten(1))


def bias_gradient(static, dout, post, seed, partials, dbias, threshold, scale) -> None:
    s = static["layout"]
    _are_streams(static, s, of_tokens=(dout,))
    _is_dtype(static["spec"].dbias, dbias)
    _is_matrix(post, True, s.n, static["spec"].post_align)
    assert partials.shape[:2] == (1, -(-len(dout) // BIAS_CHUNK)) and partials.shape[2] >= s.channels
    dropped = _split(dout, s.n, s.order) * _kept(static, seed, len(dout), threshold, scale)
    _write(dbias, (post[:, :, None] * dropped).sum((0, 1)), static["spec"].accumulate)


def _write(target: Tensor | None, total: Tensor, accumulate: bool) -> None:
    if target is not None:
        assert not accumulate or target.dtype is FP32
        target.copy_(total + target if accumulate else total)


def _normalised(logits: Tensor, n: int, variant: str, iterations: int, eps: float) -> Tensor:
    matrices = logits.unflatten(1, (n, n))
    return reference.sinkhorn(matrices, iterations=iterations, variant=variant, eps=eps).flatten(1)


def sinkhorn_forward(static, logits, res) -> None:
    spec = static["spec"]
    n = spec.n
    _is_matrix(logits, True, n * n, spec.align)
    _is_matrix(res, True, n * n, min(4, n * n))
    res.copy_(_normalised(logits, n, spec.variant, spec.iterations, spec.eps))


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Autograd, also where an operator runs below it."""
    with (
        torch.enable_grad(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
    ):
        yield


def sinkhorn_backward(static, logits, dres, dlogits) -> None:
    spec = static["spec"]
    n = spec.n
    _is_matrix(logits, True, n * n, spec.align)
    _is_matrix(dres, True, n * n, spec.dres_align)
    _is_matrix(dlogits, True, n * n, min(4, n * n))
    with _recording():
        leaf = logits.detach().clone().requires_grad_()
        res = _normalised(leaf, n, spec.variant, spec.iterations, spec.eps)
    dlogits.copy_(torch.autograd.grad(res, leaf, dres)[0])


def _coefficients(
    constants: Constants,
    n: int,
    h: Tensor,
    mean_square: Tensor,
    alpha: Tensor,
    beta: Tensor,
    is_head: bool,
    has_sinkhorn: bool = False,
) -> list[Tensor]:
    """pre, post and res of one kernel's constants; of a head pre alone."""
    widths = (n,) if is_head else (n, n, n * n)
    normalised = h / rms(mean_square, constants)[:, None]
    groups = zip(alpha.float(), normalised.split(widths, -1), beta.float().split(widths), strict=True)
    values = [scale * part + shift for scale, part, shift in groups]
    values[0] = torch.sigmoid(values[0]) + constants.pre_eps
    if not is_head:
        values[1] = constants.post_mult * torch.sigmoid(values[1])
        if has_sinkhorn:
            sinkhorn = constants.sinkhorn, constants.iterations, constants.sinkhorn_eps
            values[2] = _normalised(values[2], n, *sinkhorn)
    return values


def coefficients_forward(static, partials, h, mean_square, alpha, beta, pre, post, res, num_tokens) -> None:
    spec = static["spec"]
    n, is_head, splits, columns = spec.n, spec.is_head, spec.splits, spec.columns
    assert (partials is None) == (splits == 0)
    _is_matrix(h, splits == 0 or spec.keeps_h, columns, 1)
    assert (mean_square is not None) == (h is not None)
    if partials is not None:
        assert partials.shape == (splits, columns + 1, num_tokens) and partials.is_contiguous()
        total = partials[0]
        for part in partials[1:]:
            total = total + part
        found_h, found_square = total[:-1].t(), total[-1] / spec.k
        if h is not None:
            h.copy_(found_h)
            mean_square.copy_(found_square)
    else:
        found_h, found_square = h, mean_square
    computes = spec.constants is not None
    _is_matrix(pre, computes, n, min(4, n))
    _is_matrix(post, computes and not is_head, n, min(4, n))
    _is_matrix(res, computes and not is_head, n * n, min(4, n * n))
    _is_dtype(spec.alpha, alpha)
    _is_dtype(spec.beta, beta)
    if computes:
        values = _coefficients(
            spec.constants, n, found_h.contiguous(), found_square, alpha, beta, is_head, spec.has_sinkhorn
        )
        for target, value in zip((pre, post, res), values, strict=False):
            target.copy_(value)


def coefficients_backward(
    static, h, mean_square, alpha, beta, dpre, dpost, dres, dh, dmean_square, partials, dbeta, dalpha
) -> None:
    spec = static["spec"]
    n, columns = spec.n, spec.columns
    _is_matrix(h, True, columns, spec.h_align)
    _is_matrix(dh, True, columns, 4 if columns % 4 == 0 else 1)
    given = (dpre, dpost, dres)
    aligns = spec.dpre_align, spec.dpost_align, spec.dres_align
    for t, width, align in zip(given, (n, n, n * n), aligns, strict=True):
        _is_matrix(t, align > 0, width, align)
    for name, t in (("alpha", alpha), ("beta", beta), ("dbeta", dbeta), ("dalpha", dalpha)):
        _is_dtype(getattr(spec, name), t)
    reduces = dbeta is not None or dalpha is not None
    assert not (spec.leaves_sums and reduces) and (partials is not None) == (spec.leaves_sums or reduces)
    if partials is not None:
        assert (
            partials.shape[:2] == (2, -(-len(h) // 32)) and partials.shape[2] % 32 == 0 <= partials.shape[2] - columns
        )
    with _recording():
        leaves = [t.detach().float().clone().requires_grad_() for t in (h, mean_square, alpha, beta)]
        values = _coefficients(spec.constants, n, *leaves, spec.is_head, spec.has_sinkhorn)
        pairs = [(value, t) for value, t in zip(values, given, strict=False) if t is not None]
        total = sum((value * t).sum() for value, t in pairs) + sum(0.0 * leaf.sum() for leaf in leaves)
    found = torch.autograd.grad(total, leaves)
    for target, value in zip((dh, dmean_square), found, strict=False):
        target.copy_(value)
    _write(dbeta, found[3], spec.accumulate_beta)
    _write(dalpha, found[2], spec.accumulate_alpha)
    if spec.leaves_sums:
        partials.zero_()
        for part, sums in zip(partials, (found[3], found[2]), strict=True):
            part[0, : len(sums)] = sums


def _weight(phi: Tensor, norm_weight: Tensor | None) -> Tensor:
    return phi.float() if norm_weight is None else phi.float() * norm_weight.float()


def _are_projected(static: dict, align: int, k: int, x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> None:
    _is_matrix(x, True, k, align // x.element_size() or 1, x.dtype)
    for name, t in (("x", x), ("phi", phi), ("norm_weight", norm_weight)):
        _is_dtype(getattr(static["spec"], name), t)


def projection_forward(static, x, phi, norm_weight, partials, num_ctas) -> None:
    config = static["config"]
    _are_projected(static, 16 * config.tma, config.k, x, phi, norm_weight)
    assert not config.tma or phi.data_ptr() % 16 == 0
    assert partials.shape == (config.splits, config.columns + 1, len(x)) and partials.is_contiguous()
    assert 1 <= num_ctas <= min(-(-len(x) // 128) * config.splits, 132 * config.ctas_per_sm)
    _add_parts(partials, x, _weight(phi, norm_weight), config.tile_k)


def projection_forward_sm90(static, x, phi, norm_weight, partials, num_clusters) -> None:
    config = static["config"]
    _is_matrix(x, True, config.k, 8, BF16)
    for name, t in (("phi", phi), ("norm_weight", norm_weight)):
        _is_dtype(getattr(static["spec"], name), t)
    assert phi.data_ptr() % 16 == 0
    assert partials.shape == (config.splits, config.columns + 1, len(x)) and partials.is_contiguous()
    assert 1 <= num_clusters <= min(-(-len(x) // (2 * config.tokens)) * config.splits, 66)
    _add_parts(partials, x, _weight(phi, norm_weight), 64)


def _add_parts(partials: Tensor, x: Tensor, weight: Tensor, tile_k: int) -> None:
    wide, splits = x.float(), len(partials)
    part_of_column = torch.arange(x.shape[1]) // tile_k % splits
    for split, part in enumerate(partials):
        columns = part_of_column == split
        part[:-1].copy_((wide[:, columns] @ weight[:, columns].t()).t())
        part[-1].copy_(wide[:, columns].square().sum(-1))


def pre_forward(static, x, phi, norm_weight, alpha, beta, h, mean_square, pre, layer_input, num_clusters) -> None:
    spec, config = static["spec"], static["config"]
    columns, n = config.columns, config.n
    has_layer_input = spec.constants is not None
    for name, t in (("phi", phi), ("norm_weight", norm_weight), ("alpha", alpha), ("beta", beta)):
        _is_dtype(getattr(spec, name), t)
    _is_matrix(x, True, config.k, 8, BF16)
    assert phi.data_ptr() % 16 == 0
    _is_matrix(h, spec.keeps_h, columns, 1)
    _is_matrix(pre, spec.writes_pre, n, 1)
    _is_matrix(layer_input, has_layer_input, config.channels, 8, BF16)
    assert (mean_square is not None) == spec.keeps_h
    assert 1 <= num_clusters <= min(-(-len(x) // 16), 132 // config.cluster)
    found_h, found_square = x.float() @ _weight(phi, norm_weight).t(), x.float().square().mean(-1)
    if h is not None:
        h.copy_(found_h)
        mean_square.copy_(found_square)
    if has_layer_input:
        parameters = alpha[:1], beta[:n]
        (gates,) = _coefficients(spec.constants, n, found_h[:, :n].contiguous(), found_square, *parameters, True)
        if pre is not None:
            pre.copy_(gates)
        layer_input.copy_((gates[:, :, None] * _split(x, n, config.layout)).sum(1))


_rows_per_group: dict[int, int] = {}  # of the partial sums at this address


def projection_backward(
    static, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre, dx, partials, chunks, num_ctas
) -> None:
    config = static["config"]
    assert chunks in (1, config.group)
    n, k, item = config.n, config.k, chunks * config.chunk
    align = 16 * config.tma
    _are_projected(static, align, k, x, phi, norm_weight)
    units = align // x.element_size() or 1
    has_residual_grad, has_layer_grad = static["spec"].has_residual_grad, static["spec"].has_layer_grad
    _is_matrix(dout, has_residual_grad, k, units, x.dtype)
    _is_matrix(res, has_residual_grad, n * n, 1)
    _is_matrix(dlayer, has_layer_grad, config.channels, units, x.dtype)
    _is_matrix(pre, has_layer_grad, n, 1)
    _is_matrix(dx, static["spec"].needs_dx, k, units, x.dtype)
    assert dh.is_contiguous() and dh.shape == (len(x), config.columns) and dmean_square.shape == (len(x),)
    assert (partials is not None) == static["spec"].needs_dphi
    assert 1 <= num_ctas <= min(-(-len(x) // item) * config.slices, 132)
    wide = x.float()
    if dx is not None:
        dx.copy_(_dx(static, n, config.layout, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre))
    if partials is not None:
        assert partials.shape == (config.partials(len(x), chunks), config.columns, k)
        _rows_per_group[partials.data_ptr()] = config.group // chunks
        partials.zero_()
        for index, first in enumerate(range(0, len(x), item)):
            tokens = slice(first, first + item)
            partials[index * config.parts].copy_(dh[tokens].t() @ wide[tokens])


def _dx(static, n, layout, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre) -> Tensor:
    total = dh @ _weight(phi, norm_weight) + (2.0 / x.shape[1]) * x.float() * dmean_square[:, None]
    if static["spec"].has_residual_grad:
        matrix = res.unflatten(1, (n, n))
        matrix = matrix if static["spec"].orientation == "io" else matrix.mT
        total = total + _join(matrix @ _split(dout, n, layout), layout)
    if static["spec"].has_layer_grad:
        total = total + _join(pre[:, :, None] * dlayer.float()[:, None], layout)
    return total


def projection_backward_sm90(
    static, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre, dx, partials, num_clusters
) -> None:
    config, n = static["config"], static["spec"].n
    layout = "streams" if config.runs > 1 else "channels"
    has_residual_grad, has_layer_grad = static["spec"].has_residual_grad, static["spec"].has_layer_grad
    for name, t in (("phi", phi), ("norm_weight", norm_weight)):
        _is_dtype(getattr(static["spec"], name), t)
    _is_matrix(x, True, config.k, 8, BF16)
    _is_matrix(dout, has_residual_grad, config.k, 8, BF16)
    _is_matrix(dlayer, has_layer_grad, config.k // n, 8, BF16)
    _is_matrix(dx, static["spec"].needs_dx, config.k, 8, BF16)
    _is_matrix(res, has_residual_grad, n * n, 4)
    _is_matrix(pre, has_layer_grad, n, 4)
    for t, shape in ((phi, (config.columns, config.k)), (dh, (len(x), config.columns))):
        assert t.is_contiguous() and t.shape == shape and t.data_ptr() % 16 == 0
    assert 1 <= num_clusters <= min(config.chunks(len(x)) * config.pairs, 66)
    wide = x.float()
    if dx is not None:
        dx.copy_(_dx(static, n, layout, x, phi, norm_weight, dh, dmean_square, dout, res, dlayer, pre))
    assert (partials is not None) == static["spec"].needs_dphi
    if partials is not None:
        assert partials.shape == (config.chunks(len(x)), config.columns, config.k)
        _rows_per_group[partials.data_ptr()] = 1
        for part, tokens in zip(partials, torch.arange(len(x)).split(config.chunk), strict=True):
            part.copy_(dh[tokens].t() @ wide[tokens])


def phi_gradient(static, partials, phi, norm_weight, dphi, dnorm_weight, sums, dbeta, dalpha, per_group) -> None:
    spec = static["spec"]
    assert per_group == _rows_per_group.pop(partials.data_ptr())
    for name, t in (("phi", phi), ("norm_weight", norm_weight), ("dphi", dphi), ("dnorm_weight", dnorm_weight)):
        _is_dtype(getattr(spec, name), t)
    for wanted, t, index, accumulate in (
        (spec.dbeta, dbeta, 0, spec.accumulate_beta),
        (spec.dalpha, dalpha, 1, spec.accumulate_alpha),
    ):
        _is_dtype(wanted, t)
        if t is not None:
            _write(t, sums[index].sum(0)[: len(t)], accumulate)
    total = partials.sum(0)
    _write(dphi, total if norm_weight is None else total * norm_weight.float(), spec.accumulate_phi)
    _write(dnorm_weight, (total * phi.float()).sum(0), spec.accumulate_norm_weight)
