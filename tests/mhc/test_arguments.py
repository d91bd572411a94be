"""Bad input to the hyper-connections: the error's type, and a message with op, argument, expected and got.

Twice: by the references, and as CUDA tensors meet it, with plain torch in place of the kernels.
"""

import dataclasses
import re

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import check_contract, check_expand
from cute_kernels.mhc.variants import VARIANTS
from cute_kernels.runtime.operators import is_eager
from tests.fakes import fake_kernels
from tests.fakes.entry import Wrapped
from tests.mhc.cases import BF16, FP16, FP32, FP64, PRESETS

TOKENS, N, C = 3, 4, 16
K, COLUMNS = N * C, 24


@pytest.fixture(params=["reference", "kernels"])
def library(request):
    if request.param == "reference":
        yield reference
    else:
        with fake_kernels():
            yield mhc


def zeros(*shape, dtype=FP32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def gapped(*shape, dtype=FP32):
    """Every second element of a last dimension twice as long."""
    return zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def without_strides(*shape, dtype=FP32):
    """Asked for its strides, a tensor of this layout raises RuntimeError."""
    t = zeros(*shape, dtype=dtype)
    return t.to_sparse_csr() if len(shape) > 1 else t.to_sparse()


def good(op: str) -> dict:
    """Arguments that the op takes."""
    x, vector = zeros(TOKENS, N, C, dtype=BF16), zeros(TOKENS, C, dtype=BF16)
    weights, matrix = zeros(TOKENS, N), zeros(TOKENS, N, N)
    parameters = {"phi": zeros(COLUMNS, K), "alpha": zeros(3), "beta": zeros(COLUMNS), "norm_weight": zeros(K)}
    return {
        "projection": {"x": x, "phi": parameters["phi"], "norm_weight": zeros(K)},
        "coefficients": {
            "H": zeros(TOKENS, COLUMNS),
            "mean_square": zeros(TOKENS),
            "alpha": zeros(3),
            "beta": zeros(COLUMNS),
            "n": N,
            "variant": "liger",
        },
        "sinkhorn": {"logits": matrix},
        "aggregate": {"x": x, "pre": weights},
        "expand_combine": {"f": vector, "post": weights, "x": x, "res": matrix, "bias": zeros(C)},
        "expand": {"h": vector, "n": N},
        "contract": {"x": x},
        "head": {"x": x, "fn": zeros(N, K), "base": zeros(N), "scale": zeros(1), "norm_weight": zeros(K)},
        "pre": {"x": x, **parameters},
        "hyper_connection": {"x": x, "sublayer": torch.tanh, **parameters, "bias": zeros(C)},
    }[op]


FLOATS = "bfloat16, float16, float32"
CSR = "must have layout torch.strided, got torch.sparse_csr"
RESIDUAL = "(..., n, C) with n one of (1, 2, 4, 8) and C >= 8"
WITH_X = ("projection", "aggregate", "expand_combine", "contract", "head", "pre", "hyper_connection")
X_ERRORS = [
    (TypeError, {"x": 1.0}, "x must be a torch.Tensor, got float"),
    (TypeError, {"x": without_strides(TOKENS, N, C, dtype=BF16)}, f"x {CSR}"),
    (TypeError, {"x": zeros(TOKENS, N, C, dtype=FP64)}, f"x must have dtype {FLOATS}, got torch.float64"),
    (TypeError, {"x": zeros(TOKENS, N, C, dtype=torch.int64)}, f"x must have dtype {FLOATS}, got torch.int64"),
    (ValueError, {"x": zeros(C)}, f"x must have shape {RESIDUAL}, got (16,)"),
    (ValueError, {"x": zeros(())}, f"x must have shape {RESIDUAL}, got ()"),
    (ValueError, {"x": zeros(TOKENS, 3, C)}, f"x must have shape {RESIDUAL}, got (3, 3, 16)"),
    (ValueError, {"x": zeros(TOKENS, 16, C)}, f"x must have shape {RESIDUAL}, got (3, 16, 16)"),
    (ValueError, {"x": zeros(TOKENS, N, 7)}, f"x must have shape {RESIDUAL}, got (3, 4, 7)"),
    (
        ValueError,
        {"layout": "channels"},
        f"x must have shape {RESIDUAL.replace('n, C', 'C, n')}, got (3, 4, 16)",
    ),
    (
        ValueError,
        {"x": gapped(TOKENS, N, C)},
        "x must have contiguous last two dimensions, got shape (3, 4, 16), strides (128, 32, 2)",
    ),
    (
        ValueError,
        {"x": zeros(TOKENS, N, 2 * C)[..., :C]},
        "x must have contiguous last two dimensions, got shape (3, 4, 16), strides (128, 32, 1)",
    ),
    (
        ValueError,
        {"x": zeros(TOKENS, C, N).mT},
        "x must have contiguous last two dimensions, got shape (3, 4, 16), strides (64, 1, 4)",
    ),
    (ValueError, {"layout": "rows"}, "layout must be one of ('streams', 'channels'), got 'rows'"),
    (ValueError, {"layout": 0}, "layout must be one of ('streams', 'channels'), got 0"),
]


def parameter_errors(name: str, *shape: int, because: str = "") -> list[tuple]:
    text, layout = str(shape), "sparse_csr" if len(shape) > 1 else "sparse_coo"
    wrong = (shape[0] + 1, *shape[1:])
    strides = gapped(*shape).stride()
    if len(shape) == 1 and shape[0] == 1:
        contiguity = []  # a single element is contiguous
    else:
        contiguity = [(ValueError, {name: gapped(*shape)}, f"{name} must be contiguous, got strides {strides}")]
    return [
        (TypeError, {name: [0.0]}, f"{name} must be a torch.Tensor, got list"),
        (TypeError, {name: without_strides(*shape)}, f"{name} must have layout torch.strided, got torch.{layout}"),
        (TypeError, {name: zeros(*shape, dtype=FP16)}, f"{name} must have dtype float32, bfloat16, got torch.float16"),
        (TypeError, {name: zeros(*shape, dtype=FP64)}, f"{name} must have dtype float32, bfloat16, got torch.float64"),
        (ValueError, {name: zeros(*wrong)}, f"{name} must have shape {text}{because}, got {wrong}"),
        (ValueError, {name: zeros(1, *shape)}, f"{name} must have shape {text}{because}, got {(1, *shape)}"),
        (ValueError, {name: zeros(*shape, device="meta")}, f"{name} must be on cpu, got meta"),
        *contiguity,
    ]


def coefficient_errors(name: str, *shape: int, contiguity: str) -> list[tuple]:
    wrong = (*shape[:-1], shape[-1] + 1)
    return [
        (TypeError, {name: 0.0}, f"{name} must be a torch.Tensor, got float"),
        (TypeError, {name: without_strides(*shape)}, f"{name} {CSR}"),
        (TypeError, {name: zeros(*shape, dtype=BF16)}, f"{name} must have dtype float32, got torch.bfloat16"),
        (TypeError, {name: zeros(*shape, dtype=FP64)}, f"{name} must have dtype float32, got torch.float64"),
        (ValueError, {name: zeros(*wrong)}, f"{name} must have shape {shape}, got {wrong}"),
        (ValueError, {name: zeros(*shape[1:])}, f"{name} must have shape {shape}, got {shape[1:]}"),
        (ValueError, {name: zeros(*shape, device="meta")}, f"{name} must be on cpu, got meta"),
        (ValueError, {name: gapped(*shape)}, f"{name} must {contiguity}"),
    ]


ROWS = "have a contiguous last dimension, got stride 2"
MATRIX = "have contiguous last two dimensions, got shape (3, 4, 4), strides (32, 8, 2)"
PRECISION = [
    (ValueError, {"precision": "bf16"}, "precision must be one of ('tf32', 'fp32'), got 'bf16'"),
    (ValueError, {"precision": None}, "precision must be one of ('tf32', 'fp32'), got None"),
]
VARIANT = [
    (ValueError, {"variant": "deepseek"}, f"variant must be one of {PRESETS}, got 'deepseek'"),
    (TypeError, {"variant": None}, "variant must be a name or a Variant, got NoneType"),
    (TypeError, {"variant": 4}, "variant must be a name or a Variant, got int"),
]
BETWEEN = "eps must be a float between 0 and 1"
OF_X = ", as x has 4 streams of 16 channels"
PHI = f"phi must have shape (24, 64) or (4, 64){OF_X}"
COMBINE = [
    *parameter_errors("bias", C),
    (ValueError, {"dropout_p": 1.0, "seed": 1}, "dropout_p must be a float in [0, 1), got 1.0"),
    (ValueError, {"dropout_p": -0.1, "seed": 1}, "dropout_p must be a float in [0, 1), got -0.1"),
    (ValueError, {"dropout_p": float("nan"), "seed": 1}, "dropout_p must be a float in [0, 1), got nan"),
    (ValueError, {"dropout_p": "0", "seed": 1}, "dropout_p must be a float in [0, 1), got '0'"),
    (ValueError, {"dropout_p": None}, "dropout_p must be a float in [0, 1), got None"),
    (ValueError, {"dropout_p": False}, "dropout_p must be a float in [0, 1), got False"),
    (TypeError, {"seed": 1.0}, "seed must be an int64 tensor or an int, got float"),
    (TypeError, {"seed": True}, "seed must be an int64 tensor or an int, got bool"),
    (TypeError, {"seed": zeros(1, dtype=torch.int32)}, "seed must have dtype int64, got torch.int32"),
    (
        TypeError,
        {"seed": zeros(1, dtype=torch.int64).to_sparse()},
        "seed must have layout torch.strided, got torch.sparse_coo",
    ),
    (ValueError, {"seed": zeros(2, dtype=torch.int64)}, "seed must have one element, got shape (2,)"),
    (ValueError, {"seed": zeros(1, dtype=torch.int64, device="meta")}, "seed must be on cpu, got meta"),
    (ValueError, {"seed": 2**63}, "seed must fit in 64 bits, signed, got 9223372036854775808"),
    (ValueError, {"seed": -(2**63) - 1}, "seed must fit in 64 bits, signed, got -9223372036854775809"),
    (ValueError, {"res_orientation": "ii"}, "res_orientation must be one of ('io', 'oi'), got 'ii'"),
    (ValueError, {"res_orientation": 1}, "res_orientation must be one of ('io', 'oi'), got 1"),
]
OUTPUT = "the sublayer's output"
ITERATIONS = "iterations must be an int from 1 to 100"
SQUARE = "logits must have shape (..., n, n) with n one of (1, 2, 4, 8)"
NUMBERS = "n must be one of (1, 2, 4, 8)"
PRE = [
    *parameter_errors("phi", COLUMNS, K, because=OF_X),
    *parameter_errors("alpha", 3),
    *parameter_errors("beta", COLUMNS),
    *parameter_errors("norm_weight", K),
    *PRECISION,
    *VARIANT,
]
ERRORS = {
    "projection": [
        (TypeError, {"phi": None}, "phi must be a torch.Tensor, got NoneType"),
        (TypeError, {"phi": zeros(COLUMNS, K, dtype=FP16)}, "phi must have dtype float32, bfloat16, got torch.float16"),
        (ValueError, {"phi": zeros(25, K)}, f"{PHI}, got (25, 64)"),
        (ValueError, {"phi": zeros(COLUMNS, K + 1)}, f"{PHI}, got (24, 65)"),
        (ValueError, {"phi": zeros(K)}, f"{PHI}, got (64,)"),
        (ValueError, {"phi": zeros(COLUMNS, N, C)}, f"{PHI}, got (24, 4, 16)"),
        (ValueError, {"phi": zeros(COLUMNS, K, device="meta")}, "phi must be on cpu, got meta"),
        (ValueError, {"phi": zeros(K, COLUMNS).t()}, "phi must be contiguous, got strides (1, 24)"),
        *parameter_errors("norm_weight", K),
        *PRECISION,
    ],
    "coefficients": [
        (TypeError, {"H": None}, "H must be a torch.Tensor, got NoneType"),
        (TypeError, {"H": without_strides(TOKENS, COLUMNS)}, f"H {CSR}"),
        (TypeError, {"H": zeros(TOKENS, COLUMNS, dtype=BF16)}, "H must have dtype float32, got torch.bfloat16"),
        (ValueError, {"H": zeros(TOKENS, 32)}, "H must have shape (..., 24), got (3, 32)"),
        (ValueError, {"H": zeros(())}, "H must have shape (..., 24), got ()"),
        (ValueError, {"H": gapped(TOKENS, COLUMNS)}, f"H must {ROWS}"),
        (ValueError, {"n": 8}, "H must have shape (..., 80), got (3, 24)"),
        (ValueError, {"n": 3}, f"{NUMBERS}, got 3"),
        (ValueError, {"n": 4.0}, f"{NUMBERS}, got 4.0"),
        (ValueError, {"n": True}, f"{NUMBERS}, got True"),
        (TypeError, {"mean_square": 1.0}, "mean_square must be a torch.Tensor, got float"),
        (TypeError, {"mean_square": zeros(3, dtype=BF16)}, "mean_square must have dtype float32, got torch.bfloat16"),
        (ValueError, {"mean_square": zeros(3, 1)}, "mean_square must have shape (3,), got (3, 1)"),
        (ValueError, {"mean_square": zeros(3, device="meta")}, "mean_square must be on cpu, got meta"),
        (ValueError, {"mean_square": gapped(3)}, "mean_square must be contiguous, got strides (2,)"),
        *parameter_errors("alpha", 3),
        *parameter_errors("beta", COLUMNS),
        *VARIANT,
    ],
    "sinkhorn": [
        (TypeError, {"logits": [[1.0]]}, "logits must be a torch.Tensor, got list"),
        (TypeError, {"logits": without_strides(3, 4, 4)}, f"logits {CSR}"),
        (TypeError, {"logits": zeros(3, 4, 4, dtype=BF16)}, "logits must have dtype float32, got torch.bfloat16"),
        (ValueError, {"logits": zeros(3, 4, 2)}, f"{SQUARE}, got (3, 4, 2)"),
        (ValueError, {"logits": zeros(3, 3, 3)}, f"{SQUARE}, got (3, 3, 3)"),
        (ValueError, {"logits": zeros(4)}, f"{SQUARE}, got (4,)"),
        (ValueError, {"logits": gapped(3, 4, 4)}, f"logits must {MATRIX}"),
        (ValueError, {"iterations": 0}, f"{ITERATIONS}, got 0"),
        (ValueError, {"iterations": 101}, f"{ITERATIONS}, got 101"),
        (ValueError, {"iterations": 2.0}, f"{ITERATIONS}, got 2.0"),
        (ValueError, {"iterations": True}, f"{ITERATIONS}, got True"),
        (ValueError, {"variant": "exp"}, "variant must be one of ('log', 'softmax_eps', 'exp_clamp'), got 'exp'"),
        (ValueError, {"eps": -1.0}, f"{BETWEEN}, got -1.0"),
        (ValueError, {"eps": 1}, f"{BETWEEN}, got 1.0"),
        (ValueError, {"eps": True}, f"{BETWEEN}, got True"),
        (ValueError, {"eps": torch.tensor(0.5)}, f"{BETWEEN}, got tensor(0.5000)"),
        (ValueError, {"eps": 1.0}, f"{BETWEEN}, got 1.0"),
        (ValueError, {"eps": float("nan")}, f"{BETWEEN}, got nan"),
        (ValueError, {"eps": 0.0, "variant": "softmax_eps"}, f"{BETWEEN}, got 0.0"),
        (ValueError, {"eps": 0.0, "variant": "exp_clamp"}, f"{BETWEEN}, got 0.0"),
        (
            ValueError,
            {"eps": 2.0**-127, "variant": "exp_clamp"},
            f"eps must be a normal number in fp32, got {2.0**-127}",
        ),
        (ValueError, {"eps": 1e-60, "variant": "softmax_eps"}, "eps must be a normal number in fp32, got 1e-60"),
    ],
    "aggregate": coefficient_errors("pre", TOKENS, N, contiguity=ROWS),
    "expand_combine": [
        *coefficient_errors("post", TOKENS, N, contiguity=ROWS),
        *coefficient_errors("res", TOKENS, N, N, contiguity=MATRIX),
        (TypeError, {"f": None}, "f must be a torch.Tensor, got NoneType"),
        (TypeError, {"f": zeros(TOKENS, C)}, "f must have dtype torch.bfloat16, got torch.float32"),
        (ValueError, {"f": zeros(TOKENS, K, dtype=BF16)}, "f must have shape (3, 16), got (3, 64)"),
        (ValueError, {"f": zeros(TOKENS, C, dtype=BF16, device="meta")}, "f must be on cpu, got meta"),
        (ValueError, {"f": gapped(TOKENS, C, dtype=BF16)}, f"f must {ROWS}"),
        *COMBINE,
    ],
    "expand": [
        (TypeError, {"h": 1.0}, "h must be a torch.Tensor, got float"),
        (TypeError, {"h": without_strides(3, C)}, f"h {CSR}"),
        (TypeError, {"h": zeros(3, C, dtype=FP64)}, f"h must have dtype {FLOATS}, got torch.float64"),
        (ValueError, {"h": zeros(())}, "h must have shape (..., C) with C >= 8, got ()"),
        (ValueError, {"h": zeros(3, 7)}, "h must have shape (..., C) with C >= 8, got (3, 7)"),
        (ValueError, {"h": gapped(3, C)}, f"h must {ROWS}"),
        (ValueError, {"n": 3}, f"{NUMBERS}, got 3"),
        (ValueError, {"n": True}, f"{NUMBERS}, got True"),
        (ValueError, {"n": None}, f"{NUMBERS}, got None"),
        (ValueError, {"layout": "rows"}, "layout must be one of ('streams', 'channels'), got 'rows'"),
    ],
    "contract": [],
    "head": [
        *parameter_errors("fn", N, K, because=OF_X),
        *parameter_errors("base", N),
        *parameter_errors("scale", 1),
        *parameter_errors("norm_weight", K),
        *PRECISION,
        *VARIANT,
    ],
    "pre": PRE,
    "hyper_connection": [
        *PRE,
        *COMBINE,
        (TypeError, {"sublayer": None}, "sublayer must be callable, got NoneType"),
        (TypeError, {"sublayer": lambda t: None}, f"{OUTPUT} must be a torch.Tensor, got NoneType"),
        (TypeError, {"sublayer": torch.Tensor.float}, f"{OUTPUT} must have dtype torch.bfloat16, got torch.float32"),
        (ValueError, {"sublayer": lambda t: t[:, :-1]}, f"{OUTPUT} must have shape (3, 16), got (3, 15)"),
        (ValueError, {"sublayer": lambda t: torch.cat([t, t], -1)[:, ::2]}, f"{OUTPUT} must {ROWS}"),
    ],
}
for name in WITH_X:
    ERRORS[name] = X_ERRORS + ERRORS[name]
CASES = [(op, *row) for op, rows in ERRORS.items() for row in rows]


def shortened(text: str) -> str:
    expected, _, got = text.partition(", got ")
    return re.sub(r"[^\w]+", "-", f"{expected} not {got}")


@pytest.mark.parametrize(
    "op, error, change, message", CASES, ids=[f"{op}-{shortened(message)}" for op, _, _, message in CASES]
)
def test_bad_argument(library, op, error, change, message):
    function = getattr(library, op)
    for _ in range(2):
        with pytest.raises(error) as caught:
            function(**good(op) | change)
        assert str(caught.value) == f"{op}: {message}"
        function(**good(op))  # after which the bad call is still one


def test_tokens_that_32_bits_do_not_count():
    """Neither kernels nor phi's gradient could address them."""

    def check(channels):
        check_contract(torch.empty(1, 8, channels, device="meta"), "streams")
        check_expand(torch.empty(1, channels, device="meta"), 8, "streams")

    check(3355443)
    with pytest.raises(ValueError, match="contract: x must have at most 3355443 channels with 8 streams, got 3355444"):
        check(3355444)
    with pytest.raises(ValueError, match="expand: h must have at most 3355443 channels with 8 streams, got 3355444"):
        check_expand(torch.empty(1, 3355444, device="meta"), 8, "streams")


@pytest.mark.parametrize(
    "change", [{"res_orientation": "zz"}, {"bias": zeros(C - 1)}, {"bias": 1.0}, {"dropout_p": 1.0}], ids=str
)
def test_a_sublayer_is_not_called_in_vain(library, change):
    calls = []
    with pytest.raises((TypeError, ValueError)):
        library.hyper_connection(**good("hyper_connection") | {"sublayer": calls.append} | change)
    assert not calls


@pytest.mark.parametrize("op, name", [("head", "fn"), ("pre", "phi"), ("hyper_connection", "alpha"), ("pre", "beta")])
def test_a_bad_main_grad_is_of_the_op_that_was_called(library, op, name):
    arguments = good(op)
    arguments[name] = arguments[name].clone().requires_grad_()
    arguments[name].main_grad = zeros(1)
    out = getattr(library, op)(**arguments)
    out = out if isinstance(out, torch.Tensor) else sum(t.float().sum() for t in out)
    with pytest.raises(ValueError, match=rf"^{op}: {name}\.main_grad must be contiguous float32 of shape"):
        out.sum().backward(retain_graph=True)
    arguments[name].main_grad = 5
    with pytest.raises(TypeError, match=rf"^{op}: {name}\.main_grad must be a torch.Tensor, got int$"):
        out.sum().backward()


@pytest.mark.parametrize(
    "error, change, message",
    [
        (TypeError, {"seed": 1.9}, "seed must be an int64 tensor or an int, got float"),
        (TypeError, {"seed": None}, "seed must be an int64 tensor or an int, got None"),
        (TypeError, {"seed": torch.ones(1)}, "seed must have dtype int64, got torch.float32"),
        (ValueError, {"seed": torch.ones(2, dtype=torch.int64)}, "seed must have one element, got shape (2,)"),
        (ValueError, {"seed": 2**63}, f"seed must fit in 64 bits, signed, got {2**63}"),
        (ValueError, {"dropout_p": 2.0}, "dropout_p must be a float in [0, 1), got 2.0"),
        (ValueError, {"dropout_p": float("nan")}, "dropout_p must be a float in [0, 1), got nan"),
        (ValueError, {"K": -1}, "K must be a size, got -1"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_mask(error, change, message):
    arguments = {"seed": 1, "num_tokens": 2, "K": 8, "dropout_p": 0.5, "device": "cpu"} | change
    with pytest.raises(error) as caught:
        reference.dropout_mask(**arguments)
    assert str(caught.value) == f"dropout_mask: {message}"


@pytest.mark.parametrize("op", ERRORS)
def test_good_arguments(library, op):
    """The arguments that every other test here changes are accepted as they are."""
    getattr(library, op)(**good(op))


@pytest.mark.parametrize("op", ERRORS)
def test_options_are_keywords(library, op):
    arguments = list(good(op).values())[: -1 if op == "coefficients" else None]
    required = {"projection": 2, "expand_combine": 4, "head": 4, "pre": 4, "hyper_connection": 5}
    positional = arguments[: required.get(op, len(arguments))]
    with pytest.raises(TypeError, match="positional argument"):
        getattr(library, op)(*positional, "streams")


def test_strided_inputs_that_are_accepted(library):
    """Tokens of one stride, each one piece of memory: slices of a packed tensor need no copy."""
    packed = zeros(TOKENS, 2 * K, dtype=BF16)
    coefficients = zeros(TOKENS, 32)
    x = packed[:, :K].unflatten(1, (N, C))
    pre, post, res = coefficients[:, :4], coefficients[:, 4:8], coefficients[:, 8:24].unflatten(1, (N, N))
    f = packed[:, K : K + C]
    library.aggregate(x, pre)
    library.expand_combine(f, post, x, res)
    library.sinkhorn(res)
    library.coefficients(coefficients[:, :24], zeros(TOKENS), zeros(3), zeros(24), 4, variant="liger")
    library.expand(f, 4)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("parameters", [BF16, FP32])
def test_dtypes_that_are_accepted(library, parameters, dtype, n):
    def ones(*shape):
        return torch.ones(*shape, dtype=parameters)

    x, columns = torch.ones(2, n, 8, dtype=dtype), n * n + 2 * n
    options = {"norm_weight": ones(8 * n), "bias": ones(8), "dropout_p": 0.5, "seed": torch.tensor(3)}
    out = library.hyper_connection(x, torch.tanh, ones(columns, 8 * n), ones(3), ones(columns), **options)
    assert out.dtype is dtype and out.shape == x.shape
    assert library.head(x, ones(n, 8 * n), ones(n), ones(1)).dtype is dtype


def test_fp64_is_taken_with_fp64_alone():
    """Tensors beside x, too."""
    for op in ERRORS:
        arguments = {
            name: value.double() if isinstance(value, torch.Tensor) else value for name, value in good(op).items()
        }
        with pytest.raises(TypeError, match=r"must have dtype .*, got torch\.float64$"):
            getattr(reference, op)(**arguments)
        getattr(reference, op)(**arguments, compute_dtype=FP64)
        getattr(reference, op)(**good(op), compute_dtype=FP64)


def test_log_has_no_eps(library):
    library.sinkhorn(zeros(2, 4, 4), variant="log", eps=0.0)


@pytest.mark.parametrize(
    "field, least, expected", [("rms_eps", 2.0**-150, "positive"), ("sinkhorn_eps", 2.0**-127, "a normal number")]
)
def test_an_eps_that_is_0_in_fp32(field, least, expected):
    preset = VARIANTS["megatron"]
    for value in (1e-60, least):
        with pytest.raises(ValueError) as caught:
            dataclasses.replace(preset, **{field: value})
        assert str(caught.value) == f"Variant: {field} must be {expected} in fp32, got {value}"
    dataclasses.replace(preset, **{field: 2 * least})
    dataclasses.replace(preset, sinkhorn="log", sinkhorn_eps=1e-60)


@pytest.mark.parametrize("count", [1, 4, 10])
def test_every_tensor_must_be_plain(count):
    """One of a subclass, wherever it stands among what an operator takes, and none may be given to a kernel."""
    tensors = [zeros(2), None, torch.nn.Parameter(zeros(2)), *[zeros(2)] * 7][:count]
    assert is_eager(*tensors)
    for position in range(count):
        assert not is_eager(*tensors[:position], Wrapped(zeros(2)), *tensors[position + 1 :])
