"""The examples with models run on the CPU, small, over plain torch in place of the kernels: nothing differs."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from tests.fakes import fake_gpu  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples"


def main_of(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rl(monkeypatch):
    example = main_of("rl_100_steps")
    for size in ("NEW", "PROMPTS", "SAMPLES"):
        monkeypatch.setattr(example, size, 2)
    return example


def test_rl(rl, capsys):
    with fake_gpu():
        assert rl.main(2, device="cpu", twice=True) == 0
    printed = capsys.readouterr().out
    assert "mismatches: 0" in printed and "weights that differ from the first one's: 0" in printed
    assert "of 8 log-probabilities differ" in printed


def test_rl_counts_what_differs(rl, monkeypatch):
    """The same in both runs: what they print, and the weights."""
    models = [torch.nn.Linear(3, 2, bias=False) for _ in range(2)]
    runs = iter(zip((10, 20), models, strict=True))
    monkeypatch.setattr(rl, "train", lambda *_: next(runs))
    monkeypatch.setattr(rl, "control", lambda *_: (1, 2))
    assert rl.main(device="cpu", twice=True) == 36


def test_rl_in_chunks(rl, monkeypatch):
    from transformers.generation.continuous_batching import cache

    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: ("cpu", 2**32, 0, 0))  # or none is seen
    with fake_gpu():
        assert rl.main(1, device="cpu", by="chunks") == 0


def test_lora(monkeypatch, capsys):
    pytest.importorskip("peft")
    example = main_of("lora")
    monkeypatch.setattr(example, "NEW", 2)
    with fake_gpu():
        assert example.main(2, device="cpu") == 0
    assert "mismatches: 0" in capsys.readouterr().out


def test_audit():
    before, after = main_of("audit_my_model").main(device="cpu")
    assert any("attention" in name for name in before) and not after


def test_generate(monkeypatch):
    example = main_of("hf_generate_equals_training")
    monkeypatch.setattr(example, "NEW", 3)
    with fake_gpu():
        assert example.main(device="cpu") == (0, 0)


@pytest.mark.exhaustive  # Inductor compiles for some ten seconds
@pytest.mark.filterwarnings("ignore:batch_invariant. there is no CUDA device")
def test_compiled(monkeypatch):
    example = main_of("compile_training")
    monkeypatch.setattr(example, "STEPS", 1)
    assert example.main() == (0, 0)
