"""An audit of what in a model's training step could make a row depend on the batch, before and after ``prepare``.

    python examples/audit_my_model.py

Put your model, and a step of yours, in the place of this small Qwen3. On a GPU the kernels that no operator of torch
launches are looked at, too.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cute_kernels import audit, models


def main(device: str | None = None) -> tuple[dict[str, int], dict[str, int]]:
    """Operators that are refused, of the model as it was and as prepared."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    )
    model = Qwen3ForCausalLM(config).to(device, torch.bfloat16)
    ids = torch.randint(256, (2, 32), device=device)
    mask = torch.ones_like(ids)
    mask[0, :8] = 0  # a sequence that is padded left

    def step() -> None:
        model(ids, attention_mask=mask, labels=ids).loss.backward()

    def prepared_step() -> None:
        log_prob, _ = models.log_prob(model, ids, labels=ids, attention_mask=mask)
        (-log_prob.mean()).backward()

    before = audit(step, profile=device == "cuda")
    print("before:", before, sep="\n")
    models.prepare(model)
    after = audit(prepared_step, profile=device == "cuda")
    print("prepared:", after, sep="\n")
    return before.refused, after.refused


if __name__ == "__main__":
    main()
