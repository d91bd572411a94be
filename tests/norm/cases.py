"""Shared by the tests of layer_norm and rms_norm: cases, inputs, fp64 oracle, error bounds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels import layer_norm, rms_norm
from tests.fakes import fake_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = ("rms", "layer")
OPS = {"rms": rms_norm, "layer": layer_norm}
EPS = 1e-5


# Cases and inputs


@dataclass(frozen=True)
class Case:
    """One call of a norm; ``weight``, ``bias`` and ``residual`` are dtypes, None where there is none.

    ``rows`` None: as many as make up a number of elements that the test chooses.
    """

    kind: str
    n: int
    dtype: torch.dtype = BF16
    weight: torch.dtype | None = BF16
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    out: torch.dtype | None = None
    save: str = "input"
    weight_offset: float = 0.0
    dh: bool = False  # a gradient arrives at the returned h, too
    rows: int | None = None
    gap: int = 0  # elements between the rows of x, residual, dy and dh
    offset: int = 0  # elements from a 16-byte boundary to their first row

    def __str__(self) -> str:
        words = [self.kind, str(self.n), name_of(self.dtype)]
        for word in ("weight", "bias", "residual", "out"):
            dtype = getattr(self, word)
            if dtype is not None:
                words.append(f"{word}_{name_of(dtype)}")
        words += ["save_output"] * (self.save == "output") + ["zero_centred"] * (self.weight_offset != 0.0)
        words += ["dh"] * self.dh + [f"gap_{self.gap}"] * (self.gap > 0) + [f"offset_{self.offset}"] * (self.offset > 0)
        return "-".join(words)

    @property
    def options(self) -> dict:
        """Keyword arguments of the call that are not tensors."""
        return {
            "eps": EPS,
            "weight_offset": self.weight_offset,
            "save": self.save,
            "out_dtype": self.out,
            "return_residual": self.residual is not None,
        }


def name_of(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


def seeded_generator(name: str, device: str) -> torch.Generator:
    """A generator whose seed depends on a test's name alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.Generator(device).manual_seed(seed)


@dataclass
class Inputs:
    """Tensors of a call; None where there is none. The first four require grad."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    dy: Tensor | None = None
    dh: Tensor | None = None


def make_inputs(case: Case, generator: torch.Generator, elements: int = 0, mean: float = 0.0) -> Inputs:
    """Random inputs of about ``elements`` elements, an odd number of rows; weights near 1 (near 0 with an offset)."""

    def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=generator.device)
        return values.mul_(scale).add_(shift).to(dtype)

    def matrix(dtype: torch.dtype, shift: float = 0.0) -> Tensor:
        values = randn(rows, case.n, dtype=dtype, shift=shift)
        return strided(values, case.gap, case.offset) if case.gap or case.offset else values

    rows = case.rows or max(1, elements // case.n) | 1
    x = matrix(case.dtype, mean)
    weight = bias = residual = dh = None
    if case.weight is not None:
        near = {"scale": 0.02} if case.weight_offset else {"scale": 0.2, "shift": 1.0}
        weight = randn(case.n, dtype=case.weight, **near).requires_grad_()
    if case.bias is not None:
        bias = randn(case.n, dtype=case.bias, scale=0.1).requires_grad_()
    if case.residual is not None:
        residual = matrix(case.residual).requires_grad_()
    dy = matrix(case.out or case.dtype)
    if case.dh:
        dh = matrix(case.residual)
    return Inputs(x.requires_grad_(), weight, bias, residual, dy, dh)


def strided(matrix: Tensor, gap: int, offset: int = 0) -> Tensor:
    """A copy with ``gap`` elements between its rows, ``offset`` before the first: NaN, which nobody may use."""
    rows, n = matrix.shape
    memory = torch.full((rows * (n + gap) + offset,), float("nan"), dtype=matrix.dtype, device=matrix.device)
    return memory.as_strided((rows, n), (n + gap, 1), offset).copy_(matrix)


def call(norm: Callable, case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """y, h of ``norm(kind, x, weight, bias, **options)``."""
    result = norm(case.kind, inputs.x, inputs.weight, inputs.bias, residual=inputs.residual, **case.options)
    return dict(zip(("y", "h"), result if case.residual is not None else (result,), strict=False))


def call_and_differentiate(norm: Callable, case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """y and, where the case has them, h, dx, dresidual, dw, db."""
    outputs = call(norm, case, inputs)
    return {
        **{name: value.detach() for name, value in outputs.items()},
        **gradients(outputs, inputs),
    }


def gradients(outputs: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """Gradients of those inputs that require grad, by autograd."""
    roots, incoming = [outputs["y"]], [inputs.dy]
    if inputs.dh is not None and outputs["h"].requires_grad:  # not where weight or bias alone are trained
        roots.append(outputs["h"])
        incoming.append(inputs.dh)
    named = {"dx": inputs.x, "dresidual": inputs.residual, "dw": inputs.weight, "db": inputs.bias}
    wanted = {name: leaf for name, leaf in named.items() if leaf is not None and leaf.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(roots, list(wanted.values()), incoming), strict=True))


def public_norm(kind: str, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **options):
    """``rms_norm`` or ``layer_norm``, by its kind."""
    return OPS[kind](x, weight, bias=bias, **options)


# The oracle and the bounds


@dataclass(frozen=True)
class Exact:
    """A result in fp64, and the size of the terms it is made of: an fp32 computation errs by a few 2^-24 of that."""

    value: Tensor
    terms: Tensor
    margin: Tensor | float = 0.0  # what a rounded saved output adds to the error


def oracle(case: Case, inputs: Inputs) -> dict[str, Exact]:
    """The specification in fp64, with the backward written out; h in its own dtype."""
    x, weight, bias, residual, dy, dh = (
        None if t is None else t.detach()
        for t in (inputs.x, inputs.weight, inputs.bias, inputs.residual, inputs.dy, inputs.dh)
    )
    stored = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
    h = stored.double()
    dy = dy.double()
    w = torch.ones((), dtype=torch.float64, device=x.device)
    if weight is not None:
        w = weight.double() + case.weight_offset
    mean = h.mean(-1, keepdim=True) if case.kind == "layer" else h.new_zeros(())
    centred = h - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    x_hat = centred * rstd
    y = x_hat * w if bias is None else x_hat * w + bias.double()
    g = dy * w
    c1 = (g * x_hat).mean(-1, keepdim=True)
    c2 = g.mean(-1, keepdim=True) if case.kind == "layer" else g.new_zeros(())
    dx = rstd * (g - c2 - x_hat * c1)

    x_terms = x_hat.abs()
    if case.kind == "layer":
        x_terms = x_terms + rstd * h.abs().mean(-1, keepdim=True)  # what the mean is a sum of
    y_terms = x_terms * w.abs() if bias is None else x_terms * w.abs() + bias.double().abs()
    c1_terms = (g.abs() * x_terms).mean(-1, keepdim=True)
    dx_terms = rstd * (g.abs() + x_terms * c1_terms)
    if case.kind == "layer":
        dx_terms = dx_terms + rstd * g.abs().mean(-1, keepdim=True)
    dx_margin = dw_margin = 0.0
    if case.save == "output":
        # The saved output is rounded once more, and carries the forward's own error
        y_error = 0.5 * torch.finfo(case.out or case.dtype).eps * y.abs() + 4 * torch.finfo(FP32).eps * y_terms
        # |w| counts as eps at least: of smaller ones x_hat is lost, and is 0 where w is
        x_error = y_error / w.abs().clamp_min(EPS) * (w != 0) + x_hat.abs() * (w.abs() < EPS)
        dx_margin = rstd * (x_error * c1.abs() + x_terms * (dy.abs() * y_error).mean(-1, keepdim=True))
        dw_margin = (dy.abs() * x_error).sum(0)
    if dh is not None:
        dx, dx_terms = dx + dh.double(), dx_terms + dh.double().abs()
    exact = {"y": Exact(y, y_terms), "dx": Exact(dx, dx_terms, dx_margin)}
    if residual is not None:
        exact["h"] = Exact(h, h.abs())
        exact["dresidual"] = exact["dx"]
    if weight is not None:
        exact["dw"] = Exact((dy * x_hat).sum(0), (dy.abs() * x_terms).sum(0), dw_margin)
    if bias is not None:
        exact["db"] = Exact(dy.sum(0), dy.abs().sum(0))
    return exact


def torch_results(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """torch's own op on fp32 copies of the inputs; the results rounded to the dtypes that ours have."""
    x, weight, bias, residual = (
        None if t is None else t.detach().float() for t in (inputs.x, inputs.weight, inputs.bias, inputs.residual)
    )
    leaves = Inputs(
        x if residual is None else (x + residual).to(case.residual).float(),
        torch.ones_like(x[0]) if weight is None else weight + case.weight_offset,
        bias,
        dy=inputs.dy.float(),
    )
    for leaf in (leaves.x, leaves.weight, leaves.bias):
        if leaf is not None:
            leaf.requires_grad_()
    if case.kind == "rms":
        y = F.rms_norm(leaves.x, (case.n,), leaves.weight, EPS)
        y = y if bias is None else y + leaves.bias
    else:
        y = F.layer_norm(leaves.x, (case.n,), leaves.weight, leaves.bias, EPS)
    found = {"y": y.detach().to(case.out or case.dtype), **gradients({"y": y}, leaves)}
    if inputs.dh is not None:
        found["dx"] = found["dx"] + inputs.dh.float()
    if residual is not None:
        found["h"] = leaves.x.detach().to(case.residual)
        found["dresidual"] = found["dx"].to(case.residual)
    found["dx"] = found["dx"].to(case.dtype)
    found["dw"] = found["dw"].to(case.weight or FP32)
    if bias is not None:
        found["db"] = found["db"].to(case.bias)
    return found


FP32_ROUNDINGS = 16  # roundings of 2^-23 of its terms that an fp32 result may be off by
BF16_GATE = 1.8e-3  # relative rms of a result that is right but for one rounding to bf16 is 1.67e-3


def relative_rms(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|, root mean square over all elements."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def check(found: dict[str, Tensor], exact: dict[str, Exact], peer: dict[str, Tensor] | None = None) -> None:
    """Fails if an element of ``found`` is off by more than one rounding to its dtype and 16 of fp32.

    With ``peer`` (torch's results) also if the root mean square of the error is more than twice the peer's.
    """
    for name, result in found.items():
        value, terms, margin = exact[name].value, exact[name].terms, exact[name].margin
        assert result.shape == value.shape, f"{name} has shape {tuple(result.shape)}, not {tuple(value.shape)}"
        info = torch.finfo(result.dtype)
        fp32_eps = torch.finfo(FP32).eps
        error = (result.double() - value).abs()
        half_unit = 0.5 * info.eps * value.abs().clamp_min(info.smallest_normal)  # subnormal numbers have one unit
        bound = half_unit + FP32_ROUNDINGS * fp32_eps * terms + margin
        ratio = (error / bound).nan_to_num(nan=float("inf"))
        worst = ratio.argmax().item()
        assert ratio.max() <= 1.0, (
            f"{name}: element {worst} of {tuple(value.shape)} is {result.flatten()[worst]}, not "
            f"{value.flatten()[worst]}: {ratio.max():.2f} times the bound; {(ratio > 1.0).sum()} elements are beyond it"
        )
        if peer is not None:
            theirs = (peer[name].double() - value).norm()
            allowed = 2 * theirs + 4 * fp32_eps * terms.norm()
            assert error.norm() <= allowed, f"{name}: rms error {error.norm():.3e}, torch's is {theirs:.3e}"


def check_gates(case: Case, found: dict[str, Tensor], exact: dict[str, Exact]) -> None:
    """The relative rms that the specification allows, for results of enough elements to have one."""
    saved_eps = torch.finfo(case.out or case.dtype).eps
    for name, result in found.items():
        if result.numel() < 4096 or case.n < 64:
            continue
        scale = torch.finfo(result.dtype).eps / torch.finfo(BF16).eps
        gate = max(BF16_GATE * scale, 1e-5 if name in ("dw", "db") else 1e-6)
        if case.save == "output" and name == "dw":
            # x_hat comes from the rounded y; with a bias of a tenth of the weight its rounding error is little larger
            gate = max(gate, 1.9e-3 * saved_eps / torch.finfo(BF16).eps)
            if result.dtype is not FP32:
                gate = (gate**2 + (BF16_GATE * scale) ** 2) ** 0.5
        if case.save == "output" and name in ("dx", "dresidual"):
            gate = max(gate, 2e-3 * saved_eps / torch.finfo(BF16).eps * case.n**-0.5)
        error = relative_rms(result, exact[name].value)
        assert error <= gate, f"{name}: relative rms error {error:.3e}, allowed {gate:.3e}"


def kernels_of(cases: list[Case], arch: str, rows: int = 2) -> list[tuple]:
    """(builder, arguments) of all kernels that the cases' forward and backward need; no GPU is needed to find them."""
    with fake_kernels(arch) as jobs:
        for case in cases:
            inputs = make_inputs(case, seeded_generator("kernels", "cpu"), elements=rows * case.n)
            call_and_differentiate(public_norm, case, inputs)
    return jobs
