"""A model whose kernels ``prewarm --config`` has compiled trains and generates in mode off."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.17")

from tests.models.cases import FAMILIES  # noqa: E402

pytestmark = pytest.mark.sm90
ROOT = Path(__file__).resolve().parents[2]


def train_and_generate(name: str) -> None:
    """Prompts and batches of several sizes, padded and packed."""
    import torch
    from transformers import ContinuousBatchingConfig

    from cute_kernels import batch_invariant, models
    from tests.models.cases import make_prepared, padded, prompts

    model = make_prepared(name, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for lengths in ((5, 1), (300, 17, 130), (700,), (40,) * 9):
        rows = prompts(lengths, device="cuda")
        ids, present = padded(rows, left=True)
        with batch_invariant("strict"):
            for options in ({"attention_mask": present}, {}):
                log_prob, entropy = models.log_prob(model, ids, ids, **options)
                (log_prob + entropy).backward(torch.ones_like(log_prob))
            model(ids, attention_mask=present, labels=ids, use_cache=False).loss.backward()
            positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])[None]
            log_prob, _ = models.log_prob(model, torch.cat(rows)[None], torch.cat(rows)[None], position_ids=positions)
            log_prob.backward(torch.ones_like(log_prob))
            optimizer.step()
            optimizer.zero_grad()
            seeds = torch.arange(len(rows), device="cuda")
            for options in ({"top_k": 5}, {"top_p": 0.9}, {"graph": True}, {"speculate": 3}, {"cache": "static"}):
                models.generate(
                    model, ids, seeds=seeds, attention_mask=present, max_new_tokens=5, eos_token_id=[], **options
                )
            batching = ContinuousBatchingConfig(block_size=256, num_blocks=32, max_batch_tokens=256)
            models.generate_batch(
                model,
                [row.tolist() for row in rows],
                seeds=seeds,
                max_new_tokens=5,
                eos_token_id=[],
                batching=batching,
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v3, heads of 192 and 128"])
def test_a_model_runs_without_compiling(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name]().to_dict()))
    environment = {**os.environ, "JIT_CACHE_DIR": str(tmp_path / "cache")}
    prewarm = [sys.executable, "-m", "jit_cache", "prewarm", "cute_kernels", "--arch", "sm_90a"]
    prewarm += ["--config", str(tmp_path / "config.json")]
    done = subprocess.run(prewarm, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    program = f"""
from jit_cache import stats
from tests.models.test_kernel_prewarm import train_and_generate
train_and_generate({name!r})
assert stats().disk_loads and not stats().compiles
"""
    environment["JIT_CACHE_MODE"] = "off"
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
