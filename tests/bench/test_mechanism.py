"""bench_mechanism on the CPU, over fake kernels."""

import pytest
import torch

from bench import bench_mechanism, harness
from cute_kernels.invariance import installation, scopes
from tests.bench.test_harness import ENVIRONMENT, FakeDevice
from tests.fakes import fake_gpu

PROVIDERS = list(bench_mechanism.PROVIDERS)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small = dict(zip(bench_mechanism.SIZES, (1, 64, 2, 1, 64, 32), strict=True))
    monkeypatch.setattr(bench_mechanism, "SIZES", small)
    monkeypatch.setattr(bench_mechanism, "ROUNDS", 1)
    with fake_gpu():
        yield


def test_cases():
    names = [mechanism.case.name for mechanism in bench_mechanism.mechanism_cases()]
    assert len(set(names)) == len(names) == 11


@pytest.mark.parametrize("mechanism", bench_mechanism.mechanism_cases(), ids=lambda m: f"{m.op}-{m.variant}")
def test_each_case_in_each_state(mechanism, monkeypatch, capsys, their_modes):
    found, states = bench_mechanism.make_call(mechanism, "cpu"), []

    def call():
        theirs = their_modes[-1:] == ["on"]
        states.append((installation._registration is not None, scopes.deciding() is not None, theirs))
        return found()

    monkeypatch.setattr(bench_mechanism, "make_call", lambda *_, **__: call)
    measured = bench_mechanism.measure_mechanism(mechanism, PROVIDERS, FakeDevice())
    assert list(dict.fromkeys(states)) == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (False, False, True),
    ]
    providers = [p for p in PROVIDERS if p != bench_mechanism.PREPARED or mechanism.variant == "token"]
    assert measured.failures == {} and list(measured.results) == providers
    assert len(harness.lines(measured, ENVIRONMENT)) == len(providers)
    bench_mechanism.print_table([measured])
    assert mechanism.variant in capsys.readouterr().out


@pytest.mark.parametrize("prepared", [False, True], ids=["as it is", "prepared"])
def test_a_token_inside_has_no_operator_that_is_refused(prepared):
    model = bench_mechanism.make_model("cpu", prepared)
    with bench_mechanism.state(bench_mechanism.OURS), torch.no_grad():
        assert model(torch.zeros(1, 1, dtype=torch.int64)).logits.isfinite().all()
