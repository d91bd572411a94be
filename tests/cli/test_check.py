"""The command check: what it says with and without a GPU, and when it fails."""

import json

import pytest
import torch
from torch import nn

from cute_kernels.cli import check
from cute_kernels.cli import main as cli
from tests.invariance.cases import (
    Faulty,
    RowSums,
    row_sums,
    squares,
)


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
