"""GRPO on a synthetic task: the trainer's log-probabilities and entropies are the roll-out's, bit by bit, at each step.

    python examples/rl_100_steps.py                      a tiny Qwen3
    python examples/rl_100_steps.py --model qwen3_moe    one with experts
    python examples/rl_100_steps.py --graph              its steps of decoding replayed from CUDA graphs

Tokens are rewarded that repeat the last one of the prompt. Each step rolls out four samples of each prompt, in batches
of five and one and in another order than the trainer's one batch. On a GPU nothing differs, so no importance weight
corrects anything; on a CPU, where plain torch computes, something may.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from cute_kernels import batch_invariant, models

VOCABULARY, PROMPTS, SAMPLES, NEW = 64, 4, 4, 8
LONGEST = 12  # tokens of a prompt
BATCHES = 5  # sequences of a roll-out's batches, but for the last one
SIZES = dict(
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
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2),
}


def main(steps: int = 100, device: str | None = None, model: str = "qwen3", graph: bool = False) -> int:
    """Returns how many log-probabilities and entropies of roll-outs differ from the trainer's."""
    mismatches, _ = train(steps, device, model, graph)
    print(f"mismatches: {mismatches}")
    return mismatches


def train(steps: int, device: str | None = None, name: str = "qwen3", graph: bool = False):
    """(How many numbers differ, the model after the last step)."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = models.prepare(AutoModelForCausalLM.from_config(CONFIGS[name]()).to(device, torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    mismatches, start = 0, time.perf_counter()
    for step in range(steps):
        with batch_invariant("strict"):
            rows = torch.randint(VOCABULARY, (PROMPTS, LONGEST), generator=generator).repeat_interleave(SAMPLES, 0)
            lengths = torch.randint(1, LONGEST + 1, (PROMPTS,), generator=generator).repeat_interleave(SAMPLES)
            rows, lengths = rows.to(device), lengths.to(device)
            tokens, *rolled = roll_out(model, rows, lengths, step, generator, graph)
            scored, rewards = update(model, optimizer, rows, lengths, tokens, rolled[0])
        mismatches += sum((a != b).sum().item() for a, b in zip(rolled, scored, strict=True))
        if step % 10 == 0 or step == steps - 1:
            seconds = time.perf_counter() - start
            print(f"step {step}, {seconds:.1f} s: reward {rewards.mean().item():.3f}, mismatches so far: {mismatches}")
    return mismatches, model


def roll_out(model, rows, lengths, step, generator, graph) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, log-probabilities and entropies (sequences, NEW), in another order, in batches of other sizes."""
    count = len(rows)
    tokens = torch.empty(count, NEW, dtype=torch.int64, device=rows.device)
    log_probs, entropies = torch.empty(2, count, NEW, device=rows.device)
    seeds = step * count + torch.arange(count, device=rows.device)  # of each sequence of the run
    order = torch.randperm(count, generator=generator).to(rows.device)
    for some in order.split(BATCHES):
        mask = torch.arange(LONGEST, device=rows.device) < lengths[some, None]
        options = {"seeds": seeds[some], "attention_mask": mask, "max_new_tokens": NEW, "graph": graph}
        found = models.generate(model, rows[some], **options)
        tokens[some], log_probs[some] = found.tokens, found.log_probs
        with torch.no_grad():
            entropies[some] = score(model, rows[some], lengths[some], found.tokens)[1]
    return tokens, log_probs, entropies


def score(model, rows, lengths, tokens) -> list[torch.Tensor]:
    """Log-probabilities and entropies (sequences, NEW) of tokens behind their prompts."""
    ids = torch.nn.functional.pad(rows, (0, NEW))
    new = lengths[:, None] + torch.arange(NEW, device=rows.device)
    ids = ids.scatter(1, new, tokens)
    mask = torch.arange(ids.shape[1], device=rows.device) < lengths[:, None] + NEW
    labels = torch.where(mask, ids, -100)
    return [found.gather(1, new) for found in models.log_prob(model, ids, labels, attention_mask=mask)]


def update(model, optimizer, rows, lengths, tokens, log_probs) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One step of GRPO on all sequences at once; the trainer's log-probabilities and entropies, and the rewards."""
    scored, entropies = score(model, rows, lengths, tokens)
    last = rows.gather(1, lengths[:, None] - 1)
    rewards = (tokens == last).float().mean(1)
    groups = rewards.view(PROMPTS, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    ratios = (scored - log_probs).exp()  # 1, since nothing differs
    loss = -(ratios * advantages[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [scored.detach(), entropies.detach()], rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=CONFIGS, default="qwen3")
    parser.add_argument("--graph", action="store_true")
    arguments = parser.parse_args()
    main(model=arguments.model, graph=arguments.graph)
