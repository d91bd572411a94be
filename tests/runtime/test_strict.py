"""CUTE_KERNELS_STRICT_LAYOUT=1: plain torch refuses what the kernels refuse, in their words, and nothing else."""

import os
import subprocess
import sys

import pytest
import torch

import cute_kernels
from cute_kernels import layer_norm, linear, linear_log_prob, mhc, mm, nn, reduction, rms_norm
from cute_kernels.runtime import strict as strict_layout

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = "have leading dimensions that collapse to rows of one stride"


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(strict_layout, "_STRICT", True)


def scattered(*shape, dtype=BF16):
    """Two leading dimensions, which do not collapse to one."""
    outer, inner, *rest = shape
    return torch.ones(outer, inner + 1, *rest, dtype=dtype)[:, :inner]


def off_16_bytes(rows, columns, dtype=BF16):
    return torch.ones(rows, columns + 1, dtype=dtype)[:, :columns]


def out_on_an_operand():
    a = torch.ones(8, 8, dtype=BF16)
    with torch.no_grad():
        return mm(a, a, out=a)


X = 2, 3, 4, 16  # tokens (2, 3), 4 streams of 16 channels
PHI = {"phi": torch.ones(24, 64), "alpha": torch.ones(3), "beta": torch.ones(24)}
MIX = {"post": torch.ones(2, 3, 4), "res": torch.ones(2, 3, 4, 4)}
TARGET = torch.zeros(6, dtype=torch.int64)
REFUSED = {
    "linear": (lambda: linear(scattered(2, 3, 8), torch.ones(4, 8, dtype=BF16)), f"linear: x must {ROWS}"),
    "mm onto a": (out_on_an_operand, "mm: out must not share memory with a"),
    "linear_log_prob, x": (
        lambda: linear_log_prob(scattered(2, 3, 8), torch.ones(9, 8, dtype=BF16), TARGET.view(2, 3)),
        f"linear_log_prob: x must {ROWS}",
    ),
    "linear_log_prob, rows of x": (
        lambda: linear_log_prob(off_16_bytes(6, 8), torch.ones(9, 8, dtype=BF16), TARGET),
        "linear_log_prob: x must have rows that start on 16 bytes",
    ),
    "linear_log_prob, rows of weight": (
        lambda: linear_log_prob(torch.ones(6, 8, dtype=BF16), off_16_bytes(9, 8), TARGET),
        "linear_log_prob: weight must have rows that start on 16 bytes",
    ),
    "rms_norm": (lambda: rms_norm(scattered(2, 3, 8)), f"rms_norm: x must {ROWS}"),
    "layer_norm, residual": (
        lambda: layer_norm(torch.ones(2, 3, 8, dtype=BF16), residual=scattered(2, 3, 8)),
        f"layer_norm: residual must {ROWS}",
    ),
    "softmax": (lambda: reduction.softmax(scattered(2, 3, 8)), f"softmax: x must {ROWS}"),
    "log_softmax": (lambda: reduction.log_softmax(scattered(2, 3, 8)), f"log_softmax: x must {ROWS}"),
    "aggregate": (lambda: mhc.aggregate(scattered(*X), torch.ones(2, 3, 4)), f"aggregate: x must {ROWS}"),
    "aggregate, pre": (
        lambda: mhc.aggregate(torch.ones(X), scattered(2, 3, 4, dtype=FP32)),
        f"aggregate: pre must {ROWS}",
    ),
    "contract": (lambda: mhc.contract(scattered(*X)), f"contract: x must {ROWS}"),
    "expand": (lambda: mhc.expand(scattered(2, 3, 16), 4), f"expand: h must {ROWS}"),
    "projection": (lambda: mhc.projection(scattered(*X), PHI["phi"]), f"projection: x must {ROWS}"),
    "coefficients": (
        lambda: mhc.coefficients(
            scattered(2, 3, 24, dtype=FP32), torch.ones(2, 3), PHI["alpha"], PHI["beta"], 4, variant="megatron"
        ),
        f"coefficients: H must {ROWS}",
    ),
    "sinkhorn": (lambda: mhc.sinkhorn(scattered(2, 3, 4, 4, dtype=FP32)), f"sinkhorn: logits must {ROWS}"),
    "pre": (lambda: mhc.pre(scattered(*X), **PHI), f"pre: x must {ROWS}"),
    "head": (
        lambda: mhc.head(scattered(*X), torch.ones(4, 64), torch.ones(4), torch.ones(1)),
        f"head: x must {ROWS}",
    ),
    "expand_combine": (
        lambda: mhc.expand_combine(scattered(2, 3, 16), x=torch.ones(X, dtype=BF16), **MIX),
        f"expand_combine: f must {ROWS}",
    ),
    "expand_combine, res": (
        lambda: mhc.expand_combine(
            torch.ones(2, 3, 16), MIX["post"], torch.ones(X), scattered(2, 3, 4, 4, dtype=torch.float32)
        ),
        f"expand_combine: res must {ROWS}",
    ),
    "hyper_connection": (
        lambda: mhc.hyper_connection(scattered(*X), torch.sin, **PHI),
        f"hyper_connection: x must {ROWS}",
    ),
    "hyper_connection, sublayer": (
        lambda: mhc.hyper_connection(torch.ones(X, dtype=BF16), lambda h: scattered(2, 3, 16), **PHI),
        f"hyper_connection: the sublayer's output must {ROWS}",
    ),
    "quantize_rowwise": (
        lambda: cute_kernels.quantize_rowwise(off_16_bytes(32, 32)),
        "quantize_rowwise: x must start on 16 bytes and have strides of positive multiples of 8 elements",
    ),
    "quantize_colwise": (
        lambda: cute_kernels.quantize_colwise(off_16_bytes(32, 32)),
        "quantize_colwise: x must start on 16 bytes",
    ),
    "quantize_3d_dual": (
        lambda: cute_kernels.quantize_3d_dual(torch.ones(2, 32, 33)[..., :32]),
        "quantize_3d_dual: w must start on 16 bytes",
    ),
    "dequantize": (
        lambda: cute_kernels.dequantize(
            torch.zeros(1025, dtype=torch.uint8)[1:].view(32, 32).view(torch.float8_e4m3fn),
            torch.zeros(32, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        ),
        "dequantize: q must start on 16 bytes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_the_kernels_refuse(case, monkeypatch):
    call, message = REFUSED[case]
    call()
    monkeypatch.setattr(strict_layout, "_STRICT", True)
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(message) and ", got " in str(caught.value)


@pytest.mark.parametrize("op", ["mm", "bmm", "linear", "linear_log_prob"])
def test_fp64(op, strict):
    x = torch.ones(2, 8, 8, dtype=torch.float64)
    call = {
        "mm": lambda: mm(x[0], x[0]),
        "bmm": lambda: cute_kernels.bmm(x, x),
        "linear": lambda: linear(x, x[0]),
        "linear_log_prob": lambda: linear_log_prob(x[0], x[0], TARGET.new_zeros(8)),
    }[op]
    with pytest.raises(TypeError, match=f"^{op}: . must have dtype bfloat16, float16, got torch.float64$"):
        call()


def test_layouts_that_the_kernels_take(strict):
    """Gaps between rows; one row, wherever it is; nothing at all; a weight by columns."""
    gapped = torch.ones(6, 24, dtype=BF16)[:, :16].view(2, 3, 16)
    assert linear(gapped, torch.ones(4, 16, dtype=BF16)).shape == (2, 3, 4)
    assert rms_norm(gapped, residual=gapped).shape == reduction.softmax(gapped).shape == (2, 3, 16)
    assert rms_norm(scattered(0, 3, 8)).shape == reduction.softmax(scattered(0, 3, 8)).shape == (0, 3, 8)
    assert linear_log_prob(off_16_bytes(1, 8), torch.ones(8, 9, dtype=BF16).new_ones(8, 16).t()[:9], TARGET[:1])
    assert cute_kernels.quantize_dual(torch.ones(0, 33)[:, :32])[0].shape == (0, 32)
    assert mhc.expand_combine(gapped, x=torch.ones(X, dtype=BF16), **MIX).shape == X


@pytest.mark.parametrize("streams", [None, 4])
def test_a_model_trains(streams, strict):
    hc = streams and nn.HyperConnectionConfig(32, streams)
    config = nn.TransformerConfig(40, 32, 2, 2, 48, 8, hyper_connections=hc)
    model = nn.MHCTransformer(config)
    tokens = torch.arange(16).view(2, 8)
    model.loss(tokens, tokens).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_graph(strict):
    weight = torch.ones(9, 8, dtype=BF16)
    compiled = torch.compile(lambda x: linear_log_prob(rms_norm(x), weight, TARGET)[0], backend="eager", fullgraph=True)
    assert compiled(torch.ones(6, 8, dtype=BF16)).shape == (6,)


@pytest.mark.parametrize("value, expected", [("", False), ("0", False), ("1", True)])
def test_the_variable(value, expected):
    assert strict_layout.read({strict_layout.VARIABLE: value}) is expected and not strict_layout.read({})
    with pytest.raises(ValueError, match="^CUTE_KERNELS_STRICT_LAYOUT must be 0 or 1, got 'true'$"):
        strict_layout.read({strict_layout.VARIABLE: "true"})


def test_the_variable_is_read_and_reported():
    code = "from cute_kernels.cli import env\nfrom cute_kernels.runtime import strict\n"
    code += "print(strict.is_strict(), env.report()['environment'])"
    environment = os.environ | {"CUTE_KERNELS_STRICT_LAYOUT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True") and "'CUTE_KERNELS_STRICT_LAYOUT': '1'" in done.stdout
