"""check_invariance of modules: which one is named, which tensors have rows, parameters' gradients."""

import pytest
import torch
from torch import nn

from cute_kernels import check_invariance, linear
from tests.invariance.cases import (
    EVERY,
    ROWS,
    BackwardDependsOnRows,
    Faulty,
    RowSums,
    Scale,
    batch,
    failing,
    in_order,
    state,
)


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
