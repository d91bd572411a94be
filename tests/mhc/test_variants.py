"""The presets: each system's hyper-connection written out once more, number by number, against pre + expand_combine."""

import dataclasses

import pytest
import torch

from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import num_coefficients
from cute_kernels.mhc.variants import VARIANTS, Variant, variant_of
from tests.mhc.cases import FP64, PRESETS, SINKHORNS, STREAMS, sublayer

C = 8


# The systems, one token at a time. x, phi, alpha, beta as that system stores them; beta and alpha by group are views.


def transformer_engine(x, phi, alpha, beta, bias):
    """x (C, n), phi (N, nC) with n fastest, beta (1, N)."""
    c, n = x.shape
    flat = x.reshape(c * n)
    rms = torch.sqrt(sum(v * v for v in flat) / (n * c) + torch.finfo(torch.float32).eps)
    H = [(flat * row).sum() for row in phi]
    pre = [torch.sigmoid(alpha[0] * H[i] / rms + beta[0, i]) for i in range(n)]
    post = [2 * torch.sigmoid(alpha[1] * H[n + i] / rms + beta[0, n + i]) for i in range(n)]
    logits = [[alpha[2] * H[(2 + i) * n + j] / rms + beta[0, (2 + i) * n + j] for j in range(n)] for i in range(n)]
    f, g = [torch.zeros((), dtype=FP64)] * n, [torch.zeros((), dtype=FP64)] * n
    for _ in range(20):
        f = [-torch.log(sum(torch.exp(logits[i][j] + g[j]) for j in range(n))) for i in range(n)]
        g = [-torch.log(sum(torch.exp(logits[i][j] + f[i]) for i in range(n))) for j in range(n)]
    h_res = [[torch.exp(f[i] + logits[i][j] + g[j]) for j in range(n)] for i in range(n)]
    layer_output = sublayer(sum(x[:, i] * pre[i] for i in range(n)))
    columns = [(layer_output + bias) * post[j] + sum(x[:, i] * h_res[i][j] for i in range(n)) for j in range(n)]
    return torch.stack(columns, 1)


def megatron(x, weight, alpha_pre, alpha_post, alpha_res, bias_h, bias):
    """Megatron-LM main: x (n * C,), mapping_proj.weight (N, nC)."""
    n = x.numel() // C
    r = 1 / (torch.sqrt(sum(v * v for v in x)) / (n * C) ** 0.5 + 1e-6)
    proj = [(x * row).sum() for row in weight]
    h = [r * p * a for p, a in zip(proj, [alpha_pre] * n + [alpha_post] * n + [alpha_res] * n * n, strict=True)]
    h = [value + b for value, b in zip(h, bias_h, strict=True)]
    h_pre = [torch.sigmoid(v) for v in h[:n]]
    h_post = [2 * torch.sigmoid(v) for v in h[n : 2 * n]]
    p = [h[2 * n + i * n : 2 * n + (i + 1) * n] for i in range(n)]
    p = [[torch.exp(v - max(row)) for v in row] for row in p]
    least = torch.tensor(1e-6, dtype=FP64)
    for _ in range(20):
        p = [[v / torch.maximum(sum(row), least) for v in row] for row in p]
        sums = [torch.maximum(sum(row[j] for row in p), least) for j in range(n)]
        p = [[row[j] / sums[j] for j in range(n)] for row in p]
    streams = [x[i * C : (i + 1) * C] for i in range(n)]
    layer_output = sublayer(sum(h_pre[i] * streams[i] for i in range(n)))
    mixed = [sum(p[o][i] * streams[i] for i in range(n)) for o in range(n)]  # H_res @ residual
    return torch.cat([mixed[o] + h_post[o] * layer_output + h_post[o] * bias for o in range(n)])


def softmax_sinkhorn(rows, repeat, eps):
    """Softmax of each row plus eps, then columns, then repeat - 1 times rows and columns."""
    n = len(rows)
    exps = [[torch.exp(v - max(row)) for v in row] for row in rows]
    m = [[v / sum(row) + eps for v in row] for row in exps]
    for step in range(repeat):
        if step > 0:
            m = [[v / (sum(row) + eps) for v in row] for row in m]
        sums = [sum(row[j] for row in m) + eps for j in range(n)]
        m = [[row[j] / sums[j] for j in range(n)] for row in m]
    return m


def megatron_dev(x, weight, alpha_pre, alpha_post, alpha_res, bias_h, bias):
    """Megatron-LM dev: as main, but the eps of DeepSeek and H_res^T @ residual."""
    n = x.numel() // C
    r = torch.sqrt(sum(v * v for v in x)) / (n * C) ** 0.5
    proj = [(x * row).sum() / (r + 1e-6) for row in weight]
    h_pre = [torch.sigmoid(alpha_pre * proj[i] + bias_h[i]) + 1e-6 for i in range(n)]
    h_post = [2 * torch.sigmoid(alpha_post * proj[n + i] + bias_h[n + i]) for i in range(n)]
    logits = [[alpha_res * proj[k] + bias_h[k] for k in range((2 + i) * n, (3 + i) * n)] for i in range(n)]
    h_res = softmax_sinkhorn(logits, 20, 1e-6)
    streams = [x[i * C : (i + 1) * C] for i in range(n)]
    layer_output = sublayer(sum(h_pre[i] * streams[i] for i in range(n)))
    return torch.cat(
        [sum(h_res[i][o] * streams[i] for i in range(n)) + h_post[o] * (layer_output + bias) for o in range(n)]
    )


def tilekernels(residual, fn, mhc_scale, mhc_base):
    """TileKernels: residual (n, H), fn (N, nH); norm_eps, pre_eps and sinkhorn_eps 1e-6, post_mult 1, repeat 10."""
    n, _ = residual.shape
    flat = residual.reshape(-1)
    sqrsum = sum(v * v for v in flat)
    mixes = [(flat * row).sum() * torch.rsqrt(sqrsum / flat.numel() + 1e-6) for row in fn]
    pre_mix = [torch.sigmoid(mixes[i] * mhc_scale[0] + mhc_base[i]) + 1e-6 for i in range(n)]
    post_mix = [1.0 * torch.sigmoid(mixes[n + i] * mhc_scale[1] + mhc_base[n + i]) for i in range(n)]
    res = [[mixes[2 * n + m * n + k] * mhc_scale[2] + mhc_base[2 * n + m * n + k] for k in range(n)] for m in range(n)]
    comb_mix = softmax_sinkhorn(res, 10, 1e-6)
    layer_output = sublayer(sum(pre_mix[m] * residual[m] for m in range(n)))
    rows = [layer_output * post_mix[k] + sum(comb_mix[m][k] * residual[m] for m in range(n)) for k in range(n)]
    return torch.stack(rows)


def deepseek_v4(x, hc_fn, hc_scale, hc_base):
    """DeepSeek-V4's reference: x (n, dim), hc_fn (N, n * dim); hc_eps and norm_eps 1e-6, 20 iterations."""
    n, _ = x.shape
    eps = 1e-6
    flat = x.reshape(-1)
    mixes = (hc_fn @ flat) * torch.rsqrt(flat.square().mean() + eps)
    pre = torch.sigmoid(mixes[:n] * hc_scale[0] + hc_base[:n]) + eps
    post = 2 * torch.sigmoid(mixes[n : 2 * n] * hc_scale[1] + hc_base[n : 2 * n])
    comb = (mixes[2 * n :] * hc_scale[2] + hc_base[2 * n :]).view(n, n)
    comb = comb.softmax(-1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(20 - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    y = sublayer((pre[:, None] * x).sum(0))
    return torch.stack([post[o] * y + sum(comb[i, o] * x[i] for i in range(n)) for o in range(n)])


def liger(x, phi, b, alpha_pre, alpha_post, alpha_res):
    """Liger-Kernel: x (n, C), phi (nC, N)."""
    n, _ = x.shape
    flat = x.reshape(-1)
    invr = torch.rsqrt(sum(v * v for v in flat) / flat.numel() + 1e-6)
    mix = [(flat * phi[:, k]).sum() * invr for k in range(phi.shape[1])]
    h_pre = [torch.sigmoid(alpha_pre * mix[i] + b[i]) + 0.0 for i in range(n)]
    h_post = [2.0 * torch.sigmoid(alpha_post * mix[n + i] + b[n + i]) for i in range(n)]
    rows = [[alpha_res * mix[2 * n + o * n + i] + b[2 * n + o * n + i] for i in range(n)] for o in range(n)]
    h_res = softmax_sinkhorn(rows, 20, 1e-6)
    f_out = sublayer(sum(h_pre[i] * x[i] for i in range(n)))
    return torch.stack([sum(h_res[o][i] * x[i] for i in range(n)) + h_post[o] * f_out for o in range(n)])


def as_the_system_does(name, x, phi, alpha, beta, bias):
    """(tokens, n, C), or (tokens, C, n) of TransformerEngine, from the system's own function; bias: 0 where none."""
    if name == "transformer_engine":
        return torch.stack([transformer_engine(token, phi, alpha, beta[None], bias) for token in x])
    if name in ("megatron", "megatron_dev"):
        function = megatron if name == "megatron" else megatron_dev
        return torch.stack([function(token.reshape(-1), phi, *alpha, beta, bias).view(token.shape) for token in x])
    if name == "liger":
        return torch.stack([liger(token, phi.t(), beta, *alpha) for token in x])
    function = {"tilekernels": tilekernels, "deepseek_v4": deepseek_v4}[name]
    return torch.stack([function(token, phi, alpha, beta) for token in x])


HAVE_BIAS = ("transformer_engine", "megatron", "megatron_dev")


def make_leaves(name, n, generator):
    """x, phi, alpha, beta, bias on which everything shows: a small token, and a matrix near a triangular one.

    Its last column is almost 0, so that the eps of the sums count; the rest converges slowly.
    """

    def randn(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator, dtype=FP64) * scale

    shape = (3, n, C) if VARIANTS[name].layout == "streams" else (3, C, n)
    x = randn(*shape)
    x[1] *= 1e-3
    beta = randn(num_coefficients(n), scale=0.3)
    logits = beta[2 * n :].view(n, n)
    logits[:, -1] -= 30.0
    logits[torch.ones(n, n).triu(1).bool()] -= 12.0
    leaves = [x, randn(num_coefficients(n), n * C, scale=(n * C) ** -0.5), randn(3) + 1.0, beta]
    leaves += [randn(C)] * (name in HAVE_BIAS)
    return [leaf.requires_grad_() for leaf in leaves]


def ours(variant, x, phi, alpha, beta, bias=None):
    variant = variant_of("test", variant)
    layer_input, post, res = reference.pre(x, phi, alpha, beta, variant=variant, compute_dtype=FP64)
    choice = {"layout": variant.layout, "res_orientation": variant.res_orientation, "compute_dtype": FP64}
    return reference.expand_combine(sublayer(layer_input), post, x, res, bias=bias, **choice)


@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_the_system(name, n, generator):
    """Values and gradients, in fp64."""
    leaves = make_leaves(name, n, generator)
    found = ours(name, *leaves)
    bias = leaves[4] if name in HAVE_BIAS else torch.zeros(C, dtype=FP64)
    wanted = as_the_system_does(name, *leaves[:4], bias)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    upstream = torch.randn(found.shape, generator=generator, dtype=FP64)
    pairs = zip(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream), strict=True
    )
    for one, two in pairs:
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8 * max(1.0, two.abs().max().item()))


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_of_a_preset_shows(name, generator):
    """On the data of the test above: with any field changed it would fail."""
    leaves = [leaf.detach() for leaf in make_leaves(name, 4, generator)]
    preset = VARIANTS[name]
    right = ours(name, *leaves)
    changes = [
        {"rms_eps": preset.rms_eps * 2},
        {"rms_eps_placement": "inside" if preset.rms_eps_placement == "outside" else "outside"},
        {"pre_eps": preset.pre_eps + 1e-6},
        {"post_mult": preset.post_mult + 1.0},
        {"iterations": preset.iterations - 1},
        {"res_orientation": "oi" if preset.res_orientation == "io" else "io"},
    ]
    changes += [{"sinkhorn_eps": preset.sinkhorn_eps * 2}] * (preset.sinkhorn != "log")
    changes += [{"sinkhorn": other, "sinkhorn_eps": 1e-6} for other in SINKHORNS if other != preset.sinkhorn]
    for change in changes:
        wrong = ours(dataclasses.replace(preset, **change), *leaves)
        assert (wrong - right).abs().max() > 1e-8, change


def test_presets_are_constants():
    assert PRESETS == ("deepseek_v4", "transformer_engine", "megatron", "megatron_dev", "tilekernels", "liger")
    assert VARIANTS["transformer_engine"].rms_eps == torch.finfo(torch.float32).eps
    assert len(set(VARIANTS.values())) == len(VARIANTS)
    hash(VARIANTS["liger"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        VARIANTS["liger"].pre_eps = 1.0


def test_variant_of():
    own = dataclasses.replace(VARIANTS["liger"], iterations=3)
    assert variant_of("pre", own) is own and variant_of("pre", "liger") is VARIANTS["liger"]
    with pytest.raises(TypeError) as caught:
        variant_of("pre", 3)
    assert str(caught.value) == "pre: variant must be a name or a Variant, got int"
    with pytest.raises(ValueError) as caught:
        variant_of("head", "deepseek")
    assert str(caught.value) == f"head: variant must be one of {PRESETS}, got 'deepseek'"


BAD_FIELDS = [
    ({"rms_eps": 0.0}, "rms_eps must be a positive float, got 0.0"),
    ({"rms_eps": True}, "rms_eps must be a positive float, got True"),
    ({"rms_eps": float("inf")}, "rms_eps must be a positive float, got inf"),
    ({"rms_eps": float("nan")}, "rms_eps must be a positive float, got nan"),
    ({"rms_eps_placement": "in"}, "rms_eps_placement must be one of ('inside', 'outside'), got 'in'"),
    ({"pre_eps": -1e-6}, "pre_eps must be a non-negative float, got -1e-06"),
    ({"pre_eps": "0"}, "pre_eps must be a non-negative float, got '0'"),
    ({"post_mult": 0.0}, "post_mult must be a positive float, got 0.0"),
    ({"post_mult": None}, "post_mult must be a positive float, got None"),
    ({"sinkhorn": "exp"}, "sinkhorn must be one of ('log', 'softmax_eps', 'exp_clamp'), got 'exp'"),
    ({"sinkhorn_eps": -1.0}, "sinkhorn_eps must be a float between 0 and 1, got -1.0"),
    ({"sinkhorn_eps": 0.0}, "sinkhorn_eps must be a float between 0 and 1, got 0.0"),
    ({"sinkhorn_eps": 1.0}, "sinkhorn_eps must be a float between 0 and 1, got 1.0"),
    ({"sinkhorn_eps": 0}, "sinkhorn_eps must be a float between 0 and 1, got 0.0"),
    ({"sinkhorn": "log", "sinkhorn_eps": -0.5}, "sinkhorn_eps must be a float between 0 and 1, got -0.5"),
    ({"iterations": 0}, "iterations must be an int from 1 to 100, got 0"),
    ({"iterations": 101}, "iterations must be an int from 1 to 100, got 101"),
    ({"iterations": 20.0}, "iterations must be an int from 1 to 100, got 20.0"),
    ({"iterations": True}, "iterations must be an int from 1 to 100, got True"),
    ({"res_orientation": "ii"}, "res_orientation must be one of ('io', 'oi'), got 'ii'"),
    ({"layout": "rows"}, "layout must be one of ('streams', 'channels'), got 'rows'"),
]


@pytest.mark.parametrize("change, message", BAD_FIELDS, ids=[message.replace(" ", "_") for _, message in BAD_FIELDS])
def test_bad_field(change, message):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(VARIANTS["deepseek_v4"], **change)
    assert str(caught.value) == f"Variant: {message}"


def test_bounds_of_fields():
    fields = dataclasses.asdict(VARIANTS["deepseek_v4"])
    for iterations in (1, 100):
        assert Variant(**fields | {"iterations": iterations}).iterations == iterations
    assert Variant(**fields | {"sinkhorn": "log", "sinkhorn_eps": 0.0, "pre_eps": 0.0}).pre_eps == 0.0
