"""A model whose kernels were compiled from its config alone trains, prefills and decodes in mode off."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import batch_invariant
from cute_kernels.nn import MHCTransformer, TransformerConfig
from cute_kernels.runtime.targets import arch_of

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-06,
}
EXPERTS = {**CONFIG, "num_experts": 8, "num_experts_per_tok": 2}
TOKENS = [1, 5, 33, 300, 1000]


def train_and_decode(device: str, numbers_of_tokens: Iterable[int], arch: str, num_experts: int | None = None) -> None:
    """Our modules, and a layer of torch's in ``batch_invariant``. Only Hopper has all kernels of attention."""
    config = TransformerConfig(
        vocab_size=CONFIG["vocab_size"],
        hidden_size=CONFIG["hidden_size"],
        num_layers=1,
        num_heads=CONFIG["num_attention_heads"],
        num_kv_heads=CONFIG["num_key_value_heads"],
        ffn_hidden_size=CONFIG["intermediate_size"],
        max_sequence_length=2**18,
        hyper_connections=None,
        num_experts=num_experts,
        attention_backend=None if arch == "sm_90a" else "torch",
    )
    model = MHCTransformer(config, device=device, dtype=torch.bfloat16)
    linear = torch.nn.Linear(512, 1024, bias=False, device=device, dtype=torch.bfloat16)
    for tokens in numbers_of_tokens:
        text = torch.ones(1, tokens, dtype=torch.int64, device=device)
        model.loss(text, text).backward()
        for name, parameter in model.named_parameters():
            if not name.startswith("embedding"):  # which torch differentiates
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        model.loss(text, text).backward()
        for parameter in model.parameters():
            parameter.__dict__.pop("main_grad", None)
        with torch.no_grad():
            model(text)
        if arch == "sm_90a":
            model.generate(text, 2)
        x = torch.ones(1, tokens, 512, dtype=torch.bfloat16, device=device, requires_grad=True)
        with batch_invariant():
            y = linear(F.rms_norm(x, (512,), linear.weight[0], 1e-6))
            torch.autograd.backward(y, torch.ones_like(y))


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_a_model_runs_without_compiling(config, tmp_path):
    num_experts = config.get("num_experts")
    if num_experts and arch_of(0) != "sm_90a":
        pytest.skip("experts have kernels for Hopper")
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "JIT_CACHE_DIR": str(tmp_path / "cache")}
    prewarm = [sys.executable, "-m", "jit_cache", "prewarm", "cute_kernels", "--arch", arch_of(0)]
    prewarm += ["--config", str(tmp_path / "config.json")]
    for options in ([], ["--check"]):
        done = subprocess.run([*prewarm, *options], env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    program = f"""
from jit_cache import stats
from cute_kernels.runtime.targets import arch_of
from tests.test_kernel_prewarm import TOKENS, train_and_decode
train_and_decode("cuda", TOKENS, arch_of(0), {num_experts})
assert stats().disk_loads and not stats().compiles
"""
    environment["JIT_CACHE_MODE"] = "off"
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
