"""check_invariance finds planted faults, each by the transform that is made for it, and leaves no trace."""

import dataclasses
import functools
import json
import types

import pytest
import torch
from torch import Tensor, nn

from cute_kernels import check_invariance, linear
from cute_kernels.cli import check
from cute_kernels.cli import main as cli
from cute_kernels.invariance.checker import ON_CPU, ROW_TRANSFORMS, TRANSFORMS, Difference, Report, Result

EVERY = tuple(TRANSFORMS)
ROWS = 130  # 100 + 30 and 128 fit


def batch(rows=ROWS, width=8, seed=1) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def row_sums(x: Tensor) -> Tensor:
    """Column by column: the order cannot depend on the number of rows."""
    total = torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        total = total + column
    return total


def squares(x: Tensor) -> Tensor:
    """Exact ops alone: torch's sigmoid or exp on a CPU rounds otherwise in a tensor's tail than in vectors of it."""
    return x * x + x


def failing(report: Report) -> set[str]:
    return {result.transform for result in report.results if result.status != "ok"}


class Faulty(nn.Module):
    """Adds the mean of the batch."""

    def forward(self, x):
        return x + x.mean(0)


class RowSums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return row_sums(x * self.weight)[:, None] + x


class BackwardDependsOnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * (2 if len(dy) > 4 else 2.0000005)


class SumOfGradients(torch.autograd.Function):
    """Multiplies by the weight; how the weight's gradient is summed is the tests' to choose."""

    @staticmethod
    def forward(ctx, x, weight, sum_rows, main_grad):
        ctx.save_for_backward(x, weight)
        ctx.sum_rows, ctx.main_grad = sum_rows, main_grad
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dw = ctx.sum_rows(dy * x)
        if ctx.main_grad is not None:
            ctx.main_grad += dw
            dw = None
        return dy * weight, dw, None, None


class Scale(nn.Module):
    def __init__(self, sum_rows):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.sum_rows = sum_rows

    def forward(self, x):
        return SumOfGradients.apply(x, self.weight, self.sum_rows, getattr(self.weight, "main_grad", None))


def in_order(values: Tensor) -> Tensor:
    return row_sums(values.t())


# What passes


@pytest.mark.parametrize("function", [squares, row_sums, lambda x: (x.relu(), {"sum": row_sums(x)})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_functions_of_single_rows_pass(function, dtype):
    report = check_invariance(function, batch().to(dtype))
    assert report and report.ok and report.first_difference is None and report.notes == (ON_CPU,), str(report)
    assert {result.transform for result in report.results} == {"B0", *ROW_TRANSFORMS}
    assert "grad of input[0]" in report.tensors
    report.raise_if_failed()


def test_every_population_that_fits():
    report = check_invariance(torch.neg, batch(), transforms=("T1",))
    sizes = (1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 100, 128)
    assert [r.case for r in report.results if r.transform == "T1"] == [f"{size} of {ROWS} rows" for size in sizes]


def test_splits_of_the_origin():
    report = check_invariance(torch.neg, batch(256), transforms=("T5",))
    assert {"100 + 156", "chunks of 100", "chunks of 7"} <= {result.case for result in report.results}


@pytest.mark.parametrize("rows", [2, 3])
def test_the_smallest_samples(rows):
    report = check_invariance(row_sums, batch(rows))
    assert report and {result.transform for result in report.results} == {"B0", *ROW_TRANSFORMS}
    assert failing(check_invariance(Faulty(), batch(rows))) >= {"T1", "T3", "T4", "T5"}


def test_token_ids_stay_ids():
    """An embedding: no made-up row may be out of range; the weight's gradient is the only one."""
    module = nn.Sequential(nn.Embedding(50, 8), RowSums())
    ids = torch.randint(40, 50, (ROWS, 1), generator=torch.Generator().manual_seed(0))
    report = check_invariance(lambda i, mask: module(i[:, 0]) * mask, (ids, ids > 44))
    assert report.ok and "input[0]" not in str(report.tensors)
    report = check_invariance(nn.Sequential(nn.Embedding(50, 8), nn.ReLU()), ids[:, 0])
    assert not failing(report) and "grad of parameter 0.weight" in report.tensors


def test_integers_alone():
    report = check_invariance(torch.neg, torch.arange(20))
    assert report and report.notes == ("no output requires a gradient: gradients are not compared", ON_CPU)


def test_other_arguments_by_partial_and_several_inputs():
    weight = torch.full((8,), 3.0)
    report = check_invariance(functools.partial(torch.addcmul, value=0.5), (batch(), batch(seed=2), weight + batch()))
    assert report and report.target == "addcmul"
    assert {f"grad of input[{i}]" for i in range(3)} <= set(report.tensors)


def test_without_gradients():
    def function(x):
        assert not torch.is_grad_enabled()
        return BackwardDependsOnRows.apply(x)

    report = check_invariance(function, batch(), gradients=False)
    assert report and report.tensors == ("output",)


def test_strided_sample():
    assert check_invariance(row_sums, batch(8, ROWS).t())


# Planted faults


def test_depends_on_the_number_of_rows():
    report = check_invariance(lambda x: x * (1 if len(x) > 4 else 1.0000001), batch())
    assert not report and "T1" in failing(report) and not failing(report) & {"B0", "T2", "T3", "T6"}
    cases = {result.case for result in report.results if result.transform == "T1" and result.status == "differs"}
    assert cases == {f"{size} of {ROWS} rows" for size in (1, 2, 3, 4)}


def test_depends_on_the_position():
    report = check_invariance(lambda x: x * torch.arange(1, len(x) + 1)[:, None], batch())
    assert {"T2", "T6"} <= failing(report) and not failing(report) & {"B0", "T1", "T3"}
    found = next(result.difference for result in report.results if result.transform == "T2" and result.difference)
    assert found.index == (129, 0) and found.position == 0  # rotated by 1


def test_depends_on_the_neighbours():
    """A term that only large neighbours make visible, and that population and position do not change."""
    report = check_invariance(lambda x: x + (x.abs().amax() > 100).float(), batch())
    assert failing(report) == {"T3"}
    assert {r.case for r in report.results if r.status != "ok"} >= {"odd rows large", "odd rows inf", "row 65 large"}


def test_depends_on_the_mean():
    assert failing(check_invariance(Faulty(), batch())) >= {"T1", "T3", "T4", "T5", "T6"}


def test_nan_contaminates():
    report = check_invariance(lambda x: x + 0 * x.sum(0), batch())
    cases = {result.case for result in report.results if result.status != "ok"}
    assert all("inf" in case or "nan" in case for case in cases) and failing(report) == {"T3", "T4"}


def test_depends_on_padding_before():
    """As if the first row were always a token: rows before it move all others."""

    def function(x):
        return x + (x[0] == 0).all().float()

    assert failing(check_invariance(function, batch())) == {"T4"}


def test_depends_on_chunks():
    report = check_invariance(lambda x: x + (len(x) == 30), batch())
    assert failing(report) == {"T5"}
    assert {r.case for r in report.results if r.status != "ok"} == {"chunks of 100", "100 + 30"}
    assert report.first_difference.index == (100, 0) and report.first_difference.position == 0


def test_depends_on_a_selection():
    """On the order of two neighbours that only a reversal or a permutation changes for all rows."""
    report = check_invariance(lambda x: x + (x[:-1, 0] > x[1:, 0]).all(), batch()[batch()[:, 0].argsort()])
    assert "T6" in failing(report) and not failing(report) & {"T2", "T3", "T4"}


def test_signed_zeros_differ():
    report = check_invariance(lambda x: x * 0 if len(x) > 4 else (x * 0).abs(), batch(), gradients=False)
    found = report.first_difference
    assert failing(report) >= {"T1"} and (found.expected_bits, found.got_bits) == ("0x80000000", "0x00000000")
    assert (found.expected, found.got) == ("-0.0", "0.0") and "0x80000000 (-0.0) became" in str(report)


def test_nans_are_equal_if_their_bits_are():
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert check_invariance(lambda x: x * 0 + nans[0], batch(), gradients=False, transforms=("T1",))
    payload = check_invariance(
        lambda x: nans[(torch.zeros(len(x)) + (len(x) < 4)).long()], batch(), gradients=False, transforms=("T1",)
    )
    assert payload.first_difference.got_bits == "0x7fc00001"


@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, "0x3f80"), (torch.float64, "0x3ff0000000000000")])
def test_bits_have_the_width_of_the_dtype(dtype, bits):
    report = check_invariance(lambda x: x * 0 + len(x), torch.ones(2, 1, dtype=dtype), transforms=("T1",))
    assert report.first_difference.got_bits == bits


@pytest.mark.parametrize("dtype, bits", [(torch.float32, "0xc3010000"), (torch.float64, "0xc060200000000000")])
def test_complex_results_are_compared_by_their_parts(dtype, bits):
    sample = torch.ones(ROWS, 1, dtype=dtype)
    assert check_invariance(lambda x: torch.complex(x, x), sample)
    report = check_invariance(lambda x: torch.complex(x, x * len(x)), sample - 2, gradients=False, sizes=(129,))
    found = report.first_difference
    assert found.index == (0, 0, 1) and (found.expected, found.got) == ("-130.0", "-129.0")
    assert found.got_bits == bits


def test_the_default_device_is_the_caller_s():
    sample, module = batch(), Scale(in_order)
    wanted = check_invariance(Faulty(), sample), check_invariance(module, sample)
    with torch.device("meta"):
        assert (check_invariance(Faulty(), sample), check_invariance(module, sample)) == wanted
        assert check.Make("cpu", 4).batch(8).device.type == "cpu"


@pytest.mark.parametrize("function", [lambda x: x + torch.rand(()), nn.Dropout()], ids=["rand", "dropout"])
def test_not_deterministic(function):
    report = check_invariance(function, batch())
    assert failing(report) == {"B0"} and {result.transform for result in report.results} == {"B0"}
    assert "the function itself is not deterministic (dropout" in str(report)


def test_random_generators_are_left_alone():
    state = torch.get_rng_state()
    check_invariance(row_sums, batch())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_buffer_that_is_used_again():
    """Results of the first run are compared as they were, not as the next run left them in the same memory."""
    memory = torch.empty(1000, 8)

    def function(x):
        memory[: len(x)] = x + len(x)
        return memory[: len(x)]

    assert "T1" in failing(check_invariance(function, batch(), gradients=False))


def test_fault_in_the_backward_alone():
    report = check_invariance(BackwardDependsOnRows.apply, batch())
    assert failing(report) == {"T1", "T5"} and report.first_difference.tensor == "grad of input[0]"


def test_wrong_number_of_rows():
    """Padded to a multiple of 64 and not cut off again, but for whole batches."""

    def function(x):
        return x if len(x) > 100 else torch.cat([x, x.new_zeros(-len(x) % 64, 8)])

    report = check_invariance(function, batch(), transforms=("T1",))
    assert {result.status for result in report.results if result.case == f"3 of {ROWS} rows"} == {"error"}
    assert "output is of shape (64, 8) for 1 rows" in str(report)


@pytest.mark.parametrize(
    "function",
    [lambda x: (x, None if len(x) > 4 else x * 2), lambda x: {"y": x} if len(x) > 4 else {"y": x, "z": x * 2}],
)
def test_an_output_of_some_batches_alone(function):
    report = check_invariance(function, batch(33))
    assert not report and "is there for these 1 rows, but not for the sample" in str(report)


def test_gradients_of_some_batches_alone():
    class Second(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.rows, ctx.is_weight = len(x), len(other) != len(x)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            there = ctx.rows <= 4 or (ctx.is_weight and ctx.rows > 33)
            return dy * 2, (dy.sum(0) if ctx.is_weight else dy) if there else None

    report = check_invariance(Second.apply, (batch(33), batch(33)))
    assert failing(report) >= {"T1", "T5"} and "grad of input[1] is there for these 1 rows" in str(report)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return Second.apply(x, self.w)

    report = check_invariance(Module(), batch(33), transforms=EVERY)
    assert failing(report) == {"B1"} and "grad of parameter w: not there for all numbers of rows" in str(report)


def test_made_up_rows_are_rows_of_the_sample_in_all_its_tensors():
    low = torch.arange(33)

    def between(low, high):
        assert (low < high).all()
        return torch.stack([low, high], 1)

    assert check_invariance(between, (low, low + 5))


def test_sparse_gradients():
    ids = torch.arange(33) % 7
    assert not failing(check_invariance(nn.Embedding(50, 8, sparse=True), ids))


def test_an_output_whose_name_has_module_in_it():
    """Is held to its number of rows as any other."""
    report = check_invariance(lambda x: {"module y": x if len(x) > 4 else x[:0]}, batch(33))
    assert failing(report) >= {"T1"} and "output['module y'] is of shape (0, 8) for 1 rows" in str(report)


def test_an_exception_in_a_case():
    def function(x):
        if len(x) == 7:
            raise RuntimeError("seven [x]")
        return squares(x)

    report = check_invariance(function, batch())
    assert failing(report) == {"T1", "T5"} and "RuntimeError: seven [x]" in str(report)
    with pytest.raises(AssertionError, match=r"7 of 130 rows: RuntimeError"):
        report.raise_if_failed()


def test_needs_an_even_number_of_rows():
    report = check_invariance(lambda x: x.view(-1, 2, 8).square().view(-1, 8), batch(), transforms=("T2", "T3"))
    assert report and "fails on 129 rows" in report.notes[0]


# Modules


def test_a_table_is_no_batch_though_one_row_less_fails():
    """Whose length is by chance the sample's: another number of rows tells."""
    report = check_invariance(
        lambda x: (x.view(-1, 2, 8).square().view(-1, 8), torch.ones(ROWS)), batch(), sizes=(2, 4)
    )
    assert "output[1] of shape (130,) is not compared: dimension 0 is not the batch" in report.notes


def test_names_the_first_module():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(RowSums(), Faulty()), nn.ReLU(inplace=True))
    report = check_invariance(model, batch())
    assert report.first_difference.tensor == "module 1.1"
    assert "first in order of execution: module 1.1 at [0, 0]" in str(report)
    assert report.tensors[:5] == ("module 0", "module 1.0", "module 1.1", "module 1", "module 2")


def test_names_the_first_module_of_the_backward():
    class Back(nn.Module):
        def forward(self, x):
            return BackwardDependsOnRows.apply(x)

    report = check_invariance(nn.Sequential(nn.ReLU(), RowSums(), Back(), nn.ReLU()), batch())
    assert report.first_difference.tensor == "grad of module 2, input[0]"


def test_a_module_that_is_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = RowSums()

        def forward(self, x):
            return self.inner(x=self.inner(x))

    report = check_invariance(Twice(), batch())
    assert {"module inner", "module inner, call 2", "grad of module inner, input['x']"} <= set(report.tensors)
    assert not failing(report)


def test_tensors_without_rows_are_noted():
    class Table(nn.Module):
        """Made of as many rows as the sample, by chance."""

        def forward(self):
            return torch.arange(float(ROWS))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = Table()

        def forward(self, x):
            return {"y": x * self.table()[3], "mean": x.mean(), "name": "a"}

    report = check_invariance(Model(), batch())
    assert report and report.tensors == ("output['y']", "grad of input[0]")
    assert "module table of shape (130,) is not compared: dimension 0 is not the batch" in report.notes
    assert "output['mean'] of shape () is not compared: dimension 0 is not the batch" in report.notes
    assert "output['name'] is not compared: a str" in str(report)


def test_sums_over_rows():
    """In ascending order zero rows after them change nothing (B1); an order by the number of rows does."""
    assert check_invariance(Scale(in_order), batch(), transforms=EVERY)
    report = check_invariance(
        Scale(lambda values: in_order(values.roll(len(values) % 100, 0))), batch(), transforms=EVERY
    )
    assert failing(report) == {"B1"} and report.first_difference.tensor == "grad of parameter weight"
    assert report.first_difference.position is None
    assert check_invariance(Scale(lambda v: in_order(v.roll(len(v) % 100, 0))), batch(), transforms=("T1", "T5"))


def test_parameter_gradients_that_differ_from_run_to_run():
    """Rows are still checked: their differences have a cause of their own."""
    report = check_invariance(Scale(lambda values: in_order(values) + torch.rand(8)), batch(), transforms=EVERY)
    assert failing(report) == {"B0", "B1"} and "T6" in {result.transform for result in report.results}


def test_main_grad_of_what_a_function_reaches_is_kept():
    """As of a module: a function's parameters are not what is checked, and get nothing."""
    weight = torch.randn(16, 8, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.full((16, 8), 5.0)
    check_invariance(lambda x: linear(x, weight), batch().to(torch.bfloat16), transforms=("T1",))
    assert torch.equal(weight.main_grad, torch.full((16, 8), 5.0)) and weight.grad is None


def test_main_grad_is_checked_and_kept():
    module = Scale(lambda values: in_order(values.roll(len(values) % 100, 0)))
    module.weight.main_grad = kept = torch.full((8,), 5.0)
    report = check_invariance(module, batch(), transforms=EVERY)
    assert failing(report) == {"B1"} and report.first_difference.tensor == "grad of parameter weight"
    assert module.weight.main_grad is kept and torch.equal(kept, torch.full((8,), 5.0)) and module.weight.grad is None


def state(module):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return hooks, [m.training for m in module.modules()], tensors, [(id(p), id(p.grad)) for p in module.parameters()]


@pytest.mark.parametrize("raises", [False, True])
def test_leaves_no_trace(raises):
    class Last(nn.Module):
        def forward(self, x):
            if raises:
                raise RuntimeError("planted")
            return x

    model = nn.Sequential(nn.BatchNorm1d(8), RowSums().eval(), Last())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sample = batch().requires_grad_()
    sample.grad = torch.ones_like(sample)
    before = state(model)
    if raises:
        with pytest.raises(RuntimeError, match="planted"):
            check_invariance(model, sample)
    else:
        assert check_invariance(model, sample).first_difference.tensor == "module 0"
    after = state(model)
    assert (after[0], after[1], after[3]) == (before[0], before[1], before[3])
    assert all(torch.equal(after[2][name], tensor) for name, tensor in before[2].items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in [*model.parameters(), sample])
    assert torch.equal(sample, batch())


# The report


def test_json_round_trip(tmp_path):
    report = check_invariance(nn.Sequential(RowSums(), Faulty()), batch(seed=3), seed=7)
    report.save(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["rows"] == ROWS and found["seed"] == 7 and found["target"] == "Sequential"
    assert found["tensors"] == list(report.tensors) and found["notes"] == list(report.notes)
    results = []
    for result in found["results"]:
        if difference := result["difference"]:
            result["difference"] = Difference(**{**difference, "index": tuple(difference["index"])})
        results.append(Result(**result))
    assert tuple(results) == report.results and any(result.difference for result in results)


def test_report_is_frozen_and_empty_is_not_ok():
    report = check_invariance(torch.neg, batch(), transforms=())
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.rows = 1
    assert report.ok and not dataclasses.replace(report, results=()).ok


def test_the_same_seed_the_same_report():
    assert check_invariance(Faulty(), batch()) == check_invariance(Faulty(), batch())


def test_table_has_a_line_for_each_transform():
    text = str(check_invariance(Scale(in_order), batch(), transforms=EVERY))
    assert "Scale: invariant (130 rows)" in text
    assert [line.split()[0] for line in text.splitlines()[2:10]] == ["B0", *TRANSFORMS]


def test_a_report_of_cpu_tensors_says_what_it_does_not_show(tmp_path):
    report = check_invariance(squares, batch())
    assert "says nothing about the kernels; run the same check with CUDA tensors" in " ".join(str(report).split())
    report.save(tmp_path / "report.json")
    assert ON_CPU in json.loads((tmp_path / "report.json").read_text())["notes"]


@dataclasses.dataclass
class Output:
    logits: Tensor
    cache: object = None


def test_results_in_a_dataclass_or_a_mapping():
    report = check_invariance(lambda x: Output(squares(x)), batch())
    assert report and "output.logits" in report.tensors
    report = check_invariance(lambda x: types.MappingProxyType({"y": squares(x)}), batch())
    assert report and "output['y']" in report.tensors
    report = check_invariance(lambda x: Output(squares(x), types.SimpleNamespace()), batch())
    assert "output.cache is not compared: a SimpleNamespace" in report.notes


def test_a_main_grad_that_is_no_tensor():
    module = nn.Linear(8, 8)
    module.weight.main_grad = 5
    with pytest.raises(TypeError, match="parameter weight.main_grad must be a torch.Tensor, got int$"):
        check_invariance(module, batch())


# Arguments


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((3, torch.ones(4)), TypeError, "check_invariance: module_or_fn must be callable, got int"),
        ((torch.neg, "x"), TypeError, r"sample must be a tensor or tensors, got str"),
        ((torch.neg, ()), ValueError, "sample must have a tensor, got none"),
        ((torch.neg, (torch.ones(4), 3)), TypeError, r"sample\[1\] must be a torch.Tensor, got int"),
        ((torch.neg, torch.ones(())), ValueError, r"sample\[0\] must have dimension 0 as its batch, got a scalar"),
        ((torch.neg, torch.ones(1)), ValueError, "sample must have at least 2 rows, got 1"),
        ((torch.add, (torch.ones(4), torch.ones(5))), ValueError, r"sample\[1\] must have 4 rows, got 5"),
        ((torch.neg, torch.ones(4, dtype=torch.cfloat)), TypeError, r"sample\[0\] must be real, got torch.complex64"),
        (
            (torch.sum, torch.ones(4)),
            ValueError,
            r"return a tensor with dimension 0 as the batch, .* of such, got {'output': \(\)}",
        ),
        ((len, torch.ones(4)), ValueError, "module_or_fn must return a tensor .*, got int without a tensor$"),
        ((lambda x: {}, torch.ones(4)), ValueError, "module_or_fn must return a tensor .*, got dict without a tensor$"),
        (
            (lambda x: types.SimpleNamespace(y=x), torch.ones(4)),
            ValueError,
            "tuples, lists, mappings, dataclasses of such, got SimpleNamespace without a tensor",
        ),
        (
            (lambda x: types.MappingProxyType({"loss": x.sum()}), torch.ones(4)),
            ValueError,
            r"must return a tensor .*, got {\"output\['loss'\]\": \(\)}",
        ),
    ],
)
def test_bad_function_or_sample(arguments, error, message):
    with pytest.raises(error, match=message):
        check_invariance(*arguments)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"gradients": "no"}, TypeError, "gradients must be a bool, got str"),
        ({"transforms": "T1"}, TypeError, "transforms must be a tuple, got str"),
        ({"transforms": ("T7",)}, ValueError, "transforms must be of T1, T2, .*, B1, got 'T7'"),
        ({"transforms": [["T1"]]}, ValueError, r"transforms must be of T1, T2, .*, B1, got \['T1'\]"),
        ({"sizes": 3}, TypeError, "sizes must be a tuple, got int"),
        ({"sizes": ()}, ValueError, r"sizes must be integers from 1 to 129, got \(\)"),
        ({"sizes": (1, 130)}, ValueError, "sizes must be integers from 1 to 129"),
        ({"sizes": (1.5,)}, ValueError, "sizes must be integers"),
        ({"sizes": (True,)}, ValueError, "sizes must be integers"),
        ({"seed": None}, TypeError, "seed must be an integer, got NoneType"),
        ({"seed": True}, TypeError, "seed must be an integer, got bool"),
        ({"seed": 2**70}, ValueError, "seed must fit into 64 bits, got 1180591620717411303424"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        check_invariance(torch.neg, batch(), **options)


def test_sizes_of_the_caller():
    report = check_invariance(torch.neg, batch(), transforms=("T1", "T5"), sizes=(6, 50))
    cases = [result.case for result in report.results]
    assert f"6 of {ROWS} rows" in cases and "chunks of 50" in cases and "chunks of 7" not in cases


# The command


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(check, "_has_supported_gpu", lambda: False)


@pytest.fixture
def as_with_gpu(monkeypatch):
    """Every transform, on the CPU, on subjects of the test's own."""
    monkeypatch.setattr(check, "_has_supported_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T")
    make = check.Make
    monkeypatch.setattr(check, "Make", lambda device, rows: make("cpu", 33))

    def subjects(**functions):
        found = []
        for op, (function, invariant) in functions.items():
            found.append(check.Subject(op, "8", lambda m, f=function: (f, (m.batch(8),)), invariant=invariant))
        monkeypatch.setattr(check, "_subjects", lambda has_gpu: found)

    return subjects


def test_command_without_gpu(without_gpu, capsys, tmp_path):
    assert cli.main(["check", "--json", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    assert "only held to run-to-run determinism (B0)" in text and "torch.mm" not in text
    entries = json.loads((tmp_path / "out.json").read_text())
    modules = {"nn.RMSNorm", "nn.LayerNorm", "nn.Linear"}
    assert {entry["op"] for entry in entries} == {
        "rms_norm",
        "layer_norm",
        "mm",
        "linear",
        "bmm",
        "linear_log_prob",
        "reduction.softmax",
        "reduction.log_softmax",
        "reduction.sum",
        "reduction.mean",
        "mhc.hyper_connection",
        "attention",
        "attention_with_kv_cache",
    } | modules
    assert {result["transform"] for entry in entries for result in entry["report"]["results"]} == {"B0"}


def test_command_for_one_op(without_gpu, capsys):
    assert cli.main(["check", "--only", "nn.RMSNorm"]) == 0
    assert "layer_norm" not in capsys.readouterr().out
    assert cli.main(["check", "--only", "nothing"]) == 2
    assert "no such op here: nothing; there are: rms_norm" in capsys.readouterr().err


def test_command_with_gpu(as_with_gpu, capsys, tmp_path):
    file = tmp_path / "reports.json"
    as_with_gpu(good=(squares, True), control=(Faulty(), False))
    assert cli.main(["check", "--json", str(file)]) == 0
    assert "not invariant (expected: positive control): T1" in capsys.readouterr().out
    good, control = json.loads(file.read_text())
    assert good["ok"] and control["ok"] and len(control["report"]["results"]) == len(good["report"]["results"]) > 0

    as_with_gpu(faulty=(Faulty(), True), good=(squares, True), broken=(len, True))
    assert cli.main(["check", "--json", str(file)]) == 1
    faulty, good, broken = json.loads(file.read_text())
    assert good["ok"] and not faulty["ok"] and faulty["report"]["results"]
    assert not broken["ok"] and broken["report"] is None
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if "NOT INVARIANT: T1" in line]
    assert row.split()[-2] == str(len(faulty["report"]["results"]))
    assert "NOT INVARIANT: T1" in text and "Faulty: NOT INVARIANT (33 rows)" in text and "FAILED" in text
    assert "ValueError: check_invariance: module_or_fn must return" in text


def test_one_op_is_checked_with_the_tensors_that_it_has_among_all(as_with_gpu):
    seen = []

    def second(x):
        seen.append(x.detach().view(torch.int16).clone())  # made-up rows may be NaN
        return squares(x)

    as_with_gpu(first=(squares, True), second=(second, True))
    assert cli.main(["check"]) == 0
    calls = len(seen)
    assert cli.main(["check", "--only", "second"]) == 0 and len(seen) == 2 * calls
    assert all(torch.equal(one, two) for one, two in zip(seen[:calls], seen[calls:], strict=True))


def test_command_misses_gradients(as_with_gpu, capsys):
    """An op that does not differentiate is not one whose gradients are right."""

    class Detached(RowSums):
        def forward(self, x):
            return row_sums(x * self.weight.detach())[:, None] + x

    as_with_gpu(function=(lambda x: squares(x).detach(), True), module=(Detached(), True))
    assert cli.main(["check"]) == 1
    text = capsys.readouterr().out
    assert "NOT CHECKED, there is none: grad of input[0]" in text
    assert "NOT CHECKED, there is none: grad of parameter weight" in text


def test_command_refuses_a_file_without_directory(without_gpu, capsys, tmp_path):
    assert cli.main(["check", "--only", "[/red]"]) == 2
    for path in (tmp_path / "none" / "x.json", tmp_path):
        assert cli.main(["check", "--json", str(path)]) == 2
        assert "--json must be a file in a directory that is there, got" in capsys.readouterr().err


@pytest.mark.parametrize("control", [squares, nn.Dropout()], ids=["invariant", "not deterministic"])
def test_command_fails_if_the_control_is_not_caught(as_with_gpu, capsys, control):
    as_with_gpu(control=(control, False))
    assert cli.main(["check"]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out
