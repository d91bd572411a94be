"""The examples with models run on the CPU, small, over plain torch in place of the kernels: nothing differs."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.0")

from tests.fakes import fake_gpu  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples"


def main_of(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["rl_100_steps", "lora"])
def test_training(name, monkeypatch, capsys):
    if name == "lora":
        pytest.importorskip("peft")
    example = main_of(name)
    monkeypatch.setattr(example, "NEW", 2)
    if name == "rl_100_steps":
        for size in ("PROMPTS", "SAMPLES"):
            monkeypatch.setattr(example, size, 2)
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
