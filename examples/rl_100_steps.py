"""GRPO on a synthetic task: the trainer's log-probabilities are the roll-out's, bit by bit, at every step.

    python examples/rl_100_steps.py

A tiny Qwen3 learns to repeat the last token of its prompt. Each step rolls out four samples of each prompt, in batches
of other sizes and in another order than the trainer's one batch. On a GPU no log-probability differs, so no importance
weight corrects anything; on a CPU, where plain torch computes, some may.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cute_kernels import batch_invariant, models

VOCABULARY, PROMPTS, SAMPLES, NEW = 64, 4, 4, 8
LONGEST = 12  # tokens of a prompt


def main(steps: int = 100, device: str | None = None) -> int:
    """Returns how many log-probabilities of roll-outs differ from the trainer's."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = models.prepare(Qwen3ForCausalLM(config).to(device, torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    mismatches = 0
    for step in range(steps):
        with batch_invariant("strict"):
            rows = torch.randint(VOCABULARY, (PROMPTS, LONGEST), generator=generator).repeat_interleave(SAMPLES, 0)
            lengths = torch.randint(1, LONGEST + 1, (PROMPTS,), generator=generator).repeat_interleave(SAMPLES)
            tokens, log_probs = roll_out(model, rows.to(device), lengths.to(device), step, generator)
            scored, rewards = update(model, optimizer, rows.to(device), lengths.to(device), tokens, log_probs)
        mismatches += (scored != log_probs).sum().item()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: reward {rewards.mean().item():.3f}, mismatches so far: {mismatches}")
    print(f"mismatches: {mismatches}")
    return mismatches


def roll_out(model, rows, lengths, step, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities (sequences, NEW), generated in another order, in batches of other sizes."""
    count = len(rows)
    tokens = torch.empty(count, NEW, dtype=torch.int64, device=rows.device)
    log_probs = torch.empty(count, NEW, device=rows.device)
    seeds = step * count + torch.arange(count, device=rows.device)  # of each sequence of the run
    order = torch.randperm(count, generator=generator).to(rows.device)
    while len(order):
        size = int(torch.randint(1, 8, (), generator=generator))
        some, order = order[:size], order[size:]
        mask = torch.arange(LONGEST, device=rows.device) < lengths[some, None]
        found = models.generate(model, rows[some], seeds=seeds[some], attention_mask=mask, max_new_tokens=NEW)
        tokens[some], log_probs[some] = found.tokens, found.log_probs
    return tokens, log_probs


def update(model, optimizer, rows, lengths, tokens, log_probs) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of GRPO on all sequences at once; the trainer's log-probabilities and the rewards."""
    ids = torch.nn.functional.pad(rows, (0, NEW))
    new = lengths[:, None] + torch.arange(NEW, device=rows.device)
    ids.scatter_(1, new, tokens)
    mask = torch.arange(ids.shape[1], device=rows.device) < lengths[:, None] + NEW
    labels = torch.where(mask, ids, -100)
    scored = models.log_prob(model, ids, labels, attention_mask=mask)[0].gather(1, new)

    last = rows.gather(1, lengths[:, None] - 1)
    rewards = (tokens == last).float().mean(1)
    groups = rewards.view(PROMPTS, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    ratios = (scored - log_probs).exp()  # 1, since nothing differs
    loss = -(ratios * advantages[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return scored.detach(), rewards


if __name__ == "__main__":
    main()
