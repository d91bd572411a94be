"""Fakes of layer_norm and rms_norm."""

import torch

FP32 = torch.float32


def norm_forward(static, x, residual, weight, bias, y, h, statistics, eps, num_clusters) -> None:
    spec = static["spec"]
    _check_dtypes(spec, x=x, residual=residual, weight=weight, bias=bias, y=y)
    assert (h is not None) == spec.returns_h
    assert statistics is None or statistics.dtype is FP32 and statistics.shape[1:] == x.shape[:1]
    assert (0 if statistics is None else len(statistics)) == spec.num_statistics
    assert num_clusters >= 1 and x.dim() == y.dim() == 2 and x.shape[1] == spec.n == static["config"].layout.n
    sums = x.float() if residual is None else (x.float() + residual.float()).to(residual.dtype).float()
    mu = sums.mean(-1) if spec.kind == "layer" else sums.new_zeros(len(sums))
    centred = sums - mu[:, None]
    s = torch.rsqrt(centred.square().mean(-1) + eps)
    value = centred * s[:, None]
    if weight is not None:
        value = value * (weight.float() + spec.weight_offset)
    if bias is not None:
        value = value + bias.float()
    y.copy_(value)
    if h is not None:
        h.copy_(sums)
    for target, result in zip(statistics if statistics is not None else (), (s, mu), strict=False):
        target.copy_(result)


def norm_backward(
    static, saved, dy, dh_out, weight, bias, statistics, dx, dresidual, partials, dw, db, eps, num_clusters
) -> None:
    spec = static["spec"]
    _check_dtypes(spec, saved=saved, dy=dy, dh_out=dh_out, weight=weight, bias=bias)
    _check_dtypes(spec, dx=dx, dresidual=dresidual, dw=dw, db=db)
    assert num_clusters >= 1 and saved.dim() == dy.dim() == 2
    sums = (dw is not None) + (db is not None)
    assert (partials is None) == (sums == 0)
    assert partials is None or partials.shape[:2] == (sums, num_clusters) and partials.shape[2] >= saved.shape[1]
    w = torch.ones(()) if weight is None else weight.float() + spec.weight_offset
    s, *mean = statistics[..., None]
    assert len(mean) == (spec.kind == "layer" and spec.save == "input")
    if spec.save == "output":
        centred = saved.float() - (0.0 if bias is None else bias.float())
        x_hat = centred
        if weight is not None:
            x_hat = centred / torch.where(w < 0, -1.0, 1.0) / w.abs().clamp_min(eps) * (w != 0)
        c1 = (dy.float() * centred).mean(-1, keepdim=True)
    else:
        assert bias is None
        x_hat = (saved.float() - sum(mean)) * s
        c1 = (dy.float() * w * x_hat).mean(-1, keepdim=True)
    c2 = (dy.float() * w).mean(-1, keepdim=True) if spec.kind == "layer" else 0.0
    dh = s * (dy.float() * w - c2 - x_hat * c1)
    if dh_out is not None:
        dh = dh + dh_out.float()
    for target in (dx, dresidual):
        if target is not None:
            target.copy_(dh)
    for target, result, adds in ((dw, dy.float() * x_hat, spec.accumulate_w), (db, dy.float(), spec.accumulate_b)):
        if target is not None:
            total = result.sum(0)
            target.copy_(total + target if adds else total)


def _check_dtypes(spec, **tensors) -> None:
    """A kernel gets what it was built for."""
    for name, tensor in tensors.items():
        assert getattr(spec, name) is (None if tensor is None else tensor.dtype), name
