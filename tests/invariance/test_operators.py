"""The table of what becomes of each operator of torch."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import declare_invariant
from cute_kernels.invariance import aten, operators
from cute_kernels.invariance.operators import adds_up, treatment_of

OPS = torch.ops.aten


@pytest.fixture(scope="module")
def table():
    return operators.treatments()


def test_each_overload_has_one_class(table):
    """And what belongs to it."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    assert {op.name() for op in table} == names and len(table) == len(names)
    for op, treatment in table.items():
        assert (treatment.function is not None) == (treatment.kind == "replaced"), op
        assert not treatment.unless or treatment.kind == "refused", op


def test_what_adds_up_is_not_exact(table):
    """By its tag or its name."""
    maxima = "all|amax|amin|aminmax|any|argmax|argmin|max|min|median|mode|nanmedian|count_nonzero|equal"
    adding = r"_?(foreach_)?(sum|mean|prod|[a-z]*mm|[a-z]*mv|.*dot|.*conv.*|.*norm(_backward)?|var|std|cum(sum|prod))_?"
    for op, treatment in table.items():
        name = op._schema.name.removeprefix("aten::")
        tagged = any("reduction" in str(tag) for tag in op.tags) and not re.fullmatch(maxima, name.removesuffix("_"))
        if treatment.kind == "exact":
            assert not tagged and not re.fullmatch(adding, name), op


def test_names_are_those_of_operators():
    """A name that is misspelt would let nothing through, and replace nothing."""
    overloads = operators.overloads("aten")
    assert {f"{op._schema.name.removeprefix('aten::')}.{op._overloadname}" for op in overloads} >= set(
        aten.REPLACEMENTS
    )
    names = {op._schema.name.removeprefix("aten::") for op in overloads}
    assert names | {name.removesuffix("_") for name in names} >= operators.EXACT


def test_all_forms_of_what_is_replaced(table):
    """In place, and with ``out``, one tensor or several."""
    for op in (OPS.mm.out, OPS.mm.dtype_out, OPS.addmm_, OPS.sum.IntList_out, OPS.mean.out, OPS.cumsum_.default):
        op = op if isinstance(op, torch._ops.OpOverload) else op.default
        assert treatment_of(op).kind == "replaced", op
    several = (OPS.sort.values, OPS.topk.values, OPS.var_mean.correction_out, OPS.nll_loss_forward.output)
    several += (OPS.nll_loss2d_forward.output, OPS.mse_loss.out, OPS.huber_loss.out, OPS.trace.out, OPS.nansum.out)
    assert all(treatment_of(op).kind == "replaced" for op in several)
    missing = [
        op
        for op, treatment in table.items()
        if treatment.kind != "replaced"
        and f"{op._schema.name.removeprefix('aten::').removesuffix('_')}.default" in aten.REPLACEMENTS
    ]
    # Their arguments are those of no form that is replaced
    assert {str(op) for op in missing} <= {
        "aten._flash_attention_forward.quantized",
        "aten._grouped_mm.out",
        "aten._scaled_dot_product_flash_attention.quantized",
        "aten.mean.names_dim",
        "aten.mean.names_out",
        "aten.sum.DimnameList_out",
        "aten.sum.dim_DimnameList",
        "aten.cumsum.dimname",
        "aten.cumsum.dimname_out",
        "aten.cumsum_.dimname",
        "aten.index_add.dimname",
        "aten.logsumexp.names",
        "aten.logsumexp.names_out",
        "aten.scatter_add.dimname",
        "aten.sort.dimname",
        "aten.sort.dimname_stable",
        "aten.sort.dimname_values",
        "aten.sort.dimname_values_stable",
    }


def test_results_are_written(monkeypatch):
    """With the dtype and the shape of ``out``; where dtypes differ torch is asked."""
    monkeypatch.setitem(aten.REPLACEMENTS, "var_mean.correction", lambda x, dim, correction: (x + 1, x + correction))
    treatment_of.cache_clear()
    function = treatment_of(OPS.var_mean.correction_out).function
    x, outs = torch.ones(3), [torch.empty(0), torch.zeros(3)]
    found = function(x, 0, correction=5, out0=outs[0], out1=outs[1])
    assert found[0] is outs[0] and outs[0].tolist() == [2, 2, 2] and outs[1].tolist() == [6, 6, 6]
    outs[1] = outs[1].double()
    assert function(x, 0, correction=5, out0=outs[0], out1=outs[1]) is NotImplemented
    monkeypatch.undo()
    treatment_of.cache_clear()


def test_arguments_that_make_an_operator_add_up():
    x, index = torch.ones(3), torch.zeros(3, dtype=torch.long)
    for op, args, kwargs, adds in (
        (OPS.bincount.default, (index,), {}, False),
        (OPS.bincount.default, (index, x), {}, True),
        (OPS.bincount.default, (index,), {"weights": x}, True),
        (OPS._index_put_impl.default, (x, [index], x), {}, False),
        (OPS._index_put_impl.default, (x, [index], x, True), {}, True),
        (OPS.scatter.value_reduce, (x, 0, index, 2.0), {"reduce": "add"}, True),
        (OPS.prod.default, (x,), {}, True),
    ):
        treatment = treatment_of(op)
        assert treatment.kind == "refused" and adds_up(treatment, op, args, kwargs) == adds, op


# fmt: off
MODELS_CALL = [
    "clone", "copy_", "masked_fill", "masked_fill_", "index", "expand", "lerp_", "nan_to_num", "clamp", "isnan", "eq",
    "where", "cat", "stack", "mul_", "add_", "rsqrt", "pow", "_foreach_add_", "_foreach_mul_", "_foreach_lerp_",
    "_foreach_addcdiv_", "_foreach_sqrt", "_fused_adamw_", "sigmoid", "gelu", "silu", "tanh", "tril_", "triu_", "cos",
    "sin", "detach", "alias", "view", "_unsafe_view", "select", "slice", "transpose", "permute", "_to_copy", "zeros",
    "empty", "arange", "full_like", "embedding", "gather", "bernoulli_", "normal_", "uniform_", "nonzero", "argmax",
    "amax", "fill_", "zero_", "_local_scalar_dense", "equal", "roll", "flip", "repeat", "logical_not", "bitwise_not",
    "remainder", "floor_divide", "log1p", "softplus", "view_as_complex", "lift_fresh_copy", "index_copy_",
    "masked_scatter", "resize_", "set_", "nll_loss_backward", "threshold_backward", "silu_backward", "gelu_backward",
    "tanh_backward", "sigmoid_backward", "erfinv_", "exponential_", "native_dropout_backward", "addcmul_", "isin",
    "histc", "_foreach_copy_", "split.Tensor", "unbind", "record_stream", "_fused_sdp_choice", "as_strided",
    "scalar_tensor", "new_zeros", "diagonal", "slice_backward", "select_backward",
]
# fmt: on


@pytest.mark.parametrize("name", MODELS_CALL)
def test_what_models_call_runs_as_it_is(name):
    packet, _, overload = name.partition(".")
    ops = [op for op in operators.overloads_of(packet) if not overload or op._overloadname == overload]
    assert ops and {treatment_of(op).kind for op in ops} == {"exact"}


def test_reasons():
    for op, words in (
        (OPS.multinomial.default, "use cute_kernels.sample"),
        (OPS.convolution.default, "state-space models"),
        (OPS.native_dropout.default, "set p to 0"),
        (OPS.linalg_solve_triangular.default, "linear attention"),
        (OPS._cudnn_attention_forward.default, "use cute_kernels.attention"),
        (OPS._fft_c2c.default, "Fourier"),
    ):
        assert words in treatment_of(op).reason
    assert not treatment_of(OPS._trilinear.default).reason


def test_operators_of_others():
    library = torch.library.Library("of_a_test", "DEF")
    library.define("rotate(Tensor x) -> Tensor")
    library.define("flip(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    rotate, flip = torch.ops.of_a_test.rotate.default, torch.ops.of_a_test.flip.default
    try:
        assert treatment_of(flip).kind == "exact" and "declare_invariant" in treatment_of(rotate).reason
        for op in (rotate, torch.ops.of_a_test.rotate, "of_a_test::rotate", "of_a_test::rotate.default"):
            declare_invariant(op)
            assert treatment_of(rotate).kind == "exact"
            operators._declared.clear()
            treatment_of.cache_clear()
            assert treatment_of(rotate).kind == "refused"
    finally:
        library._destroy()
        treatment_of.cache_clear()
    with pytest.raises(TypeError, match=r"declare_invariant: op must be an operator or its name, got 3"):
        declare_invariant(3)
    with pytest.raises(ValueError, match="op must have a name like library::name, got 'rotate'"):
        declare_invariant("rotate")
    with pytest.raises(ValueError, match="not be an operator of torch's own, got 'aten::prod'"):
        declare_invariant(OPS.prod)


def test_compiled_graphs_hold_prims():
    prims = torch.ops.prims
    assert treatment_of(prims.sum.default).kind == treatment_of(prims.var.default).kind == "refused"
    assert treatment_of(prims.convert_element_type.default).kind == treatment_of(prims.amax.default).kind == "exact"


class Refused(TorchDispatchMode):
    """Notes the operators that would not run as they are."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        treatment = treatment_of(func)
        exact = treatment.kind == "refused" and not adds_up(treatment, func, args, kwargs or {})
        if treatment.kind != "exact" and not exact:
            self.names.add(str(func))
        return func(*args, **kwargs or {})


# fmt: off
ACTIVATIONS = (
    "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus", "logsigmoid", "sigmoid",
    "tanh", "hardtanh", "hardsigmoid", "hardswish", "softshrink", "hardshrink", "tanhshrink", "softsign", "threshold",
    "glu", "prelu",
)
# fmt: on


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_run_as_they_are(name):
    x = torch.randn(4, 8, requires_grad=True)
    options = {"threshold": 0.1, "value": 0.0} if name == "threshold" else {}
    options |= {"weight": torch.full((1,), 0.2)} if name == "prelu" else {}
    with Refused() as refused:
        y = getattr(F, name)(x, **options)
        y.backward(torch.ones_like(y))
    assert not refused.names


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.complex(x, x).real + torch.polar(x.abs(), x).imag,
        lambda x: x.index_copy(0, torch.tensor([1, 0]), x[:2]),
        lambda x: torch.narrow_copy(x, 0, 1, 2) + torch.rot90(x, 2)[1:3],
        lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.view(1, 4, 2, 4), 2), 2),
        lambda x: torch.diag_embed(x).diagonal(dim1=1, dim2=2),
    ],
)
def test_what_moves_data_runs_as_it_is(call):
    x = torch.randn(4, 8, requires_grad=True)
    with Refused() as refused:
        y = call(x)
        y.backward(torch.ones_like(y))
    assert not refused.names


def test_what_adds_up_is_refused():
    x = torch.randn(4, 8)
    with Refused() as refused:
        x.sum(), x @ x.T, x.cumprod(0)
    assert refused.names == {"aten.sum.default", "aten.mm.default", "aten.cumprod.default"}
