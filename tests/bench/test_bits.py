"""bench_bits on the CPU: which bits are compared, the lines, the exit status."""

import pytest
import torch

from bench import bench_bits, harness, saved
from bench.bench_bits import BATCHES, CASES, OURS, TORCH, Bits
from tests.bench.test_harness import ENVIRONMENT

SMALL = [Bits("linear", (8, 16)), Bits("rms_norm", (16,))]


@pytest.fixture(autouse=True)
def providers(monkeypatch):
    """Ours does not look at the batch; torch's fake flips the last bit of half a row from 16 rows on."""

    def row_by_row(case):
        return lambda x, weight: torch.ones(len(x), 8, dtype=torch.bfloat16)

    def by_batch(case):
        def function(x, weight):
            y = torch.ones(len(x), 8, dtype=torch.bfloat16)
            y.view(torch.int16)[:, ::2] += len(x) >= 16
            return y

        return function

    monkeypatch.setitem(bench_bits.PROVIDERS, OURS, row_by_row)
    monkeypatch.setitem(bench_bits.PROVIDERS, TORCH, by_batch)
    monkeypatch.setattr(harness, "environment", lambda commit: {**ENVIRONMENT, "commit": commit})


def test_cases():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in SMALL:
        x, weight = bench_bits.make_inputs(case, "cpu")
        assert x.shape == (BATCHES[-1], 16) and weight.shape == case.sizes
        assert torch.equal(x, bench_bits.make_inputs(case, "cpu")[0])
        for provider in (bench_bits.ours, bench_bits.torchs):
            assert provider(case)(x, weight).shape == (BATCHES[-1], case.sizes[0])


def test_lines(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = bench_bits.run(SMALL, [OURS, TORCH], "cpu", pattern="linear", commit="abc", outputs=[path])
    assert saved.read_lines(path) == lines
    ours, torchs = lines
    assert (ours["family"], ours["shape"], ours["commit"]) == ("bits", "1024x8x16", "abc")
    assert ours["differing"] == dict.fromkeys(map(str, BATCHES), 0.0)
    assert torchs["differing"] == {str(batch): 0.5 if batch >= 16 else 0.0 for batch in BATCHES}


def test_exit_status(monkeypatch):
    lines = bench_bits.run(SMALL, [OURS, TORCH], "cpu")
    assert bench_bits.exit_status(lines) == 0 and bench_bits.exit_status([]) == 1
    monkeypatch.setitem(bench_bits.PROVIDERS, OURS, bench_bits.PROVIDERS[TORCH])
    assert bench_bits.exit_status(bench_bits.run(SMALL, [OURS], "cpu")) == 1


def test_list(capsys):
    assert bench_bits.main(["--list", "--filter", "norm"]) == 0
    assert capsys.readouterr().out.split() == ["rms_norm.fwd.1024x4096.bfloat16.plain"]
