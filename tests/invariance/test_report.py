"""The report of check_invariance: its table and its JSON."""

import dataclasses
import json
import types

import pytest
import torch
from torch import Tensor, nn

from cute_kernels import check_invariance
from cute_kernels.invariance.checker import ON_CPU, TRANSFORMS, Difference, Result
from tests.invariance.cases import (
    EVERY,
    ROWS,
    Faulty,
    RowSums,
    Scale,
    batch,
    in_order,
    squares,
)


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
