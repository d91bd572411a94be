"""LoRA by peft: adapters train, and the roll-out's log-probabilities are the trainer's, bit by bit.

    python examples/lora.py

Its dropout must be 0: it is drawn by place in the batch, and ``models.prepare`` refuses it.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from cute_kernels import batch_invariant, models

VOCABULARY, NEW = 128, 8


def main(steps: int = 20, device: str | None = None) -> int:
    """Returns how many log-probabilities of a roll-out after training differ from the trainer's."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    adapters = LoraConfig(r=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model = get_peft_model(LlamaForCausalLM(config), adapters).to(device, torch.bfloat16)
    models.prepare(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(VOCABULARY, (4, 16), device=device)
    with batch_invariant("strict"):
        for step in range(steps):
            log_prob, _ = models.log_prob(model, ids, labels=ids)
            loss = -log_prob.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0 or step == steps - 1:
                print(f"step {step}: loss {loss.item():.3f}")
        prompts, seeds = ids[:, :6], torch.arange(4, device=device)
        found = models.generate(model, prompts, seeds=seeds, max_new_tokens=NEW)
        whole = torch.cat([prompts, found.tokens], 1)
        scored, _ = models.log_prob(model, whole, labels=whole)
    mismatches = (scored[:, 6:] != found.log_probs).sum().item()
    print(f"mismatches: {mismatches}")
    return mismatches


if __name__ == "__main__":
    main()
