"""GRPO on a synthetic task: the trainer's log-probabilities and entropies are the roll-out's, bit by bit, at each step.

    python examples/rl_100_steps.py                      a tiny Qwen3
    python examples/rl_100_steps.py --model qwen3_moe    one with experts
    python examples/rl_100_steps.py --by graph           its steps of decoding replayed from CUDA graphs
    python examples/rl_100_steps.py --by chunks          its prompts in chunks, by continuous batching
    python examples/rl_100_steps.py --twice              a second run, whose weights are compared with the first one's

Tokens are rewarded that repeat the last one of the prompt. Each step rolls out four samples of each prompt, in batches
of five and one and in another order than the trainer's one batch. On a GPU nothing differs, so no importance weight
corrects anything; on a CPU, where plain torch computes, something may. At the end the same is counted of transformers'
own ``generate`` and forward on torch's kernels, where log-probabilities do differ.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, Qwen3Config, Qwen3MoeConfig

from cute_kernels import batch_invariant, models

VOCABULARY, PROMPTS, SAMPLES, NEW = 64, 4, 4, 8
LONGEST = 12  # tokens of a prompt
CHUNK = 7  # tokens of a forward, where prompts come in chunks
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


def main(
    steps: int = 100, device: str | None = None, model: str = "qwen3", by: str = "batches", twice: bool = False
) -> int:
    """Returns how many log-probabilities and entropies of roll-outs, and weights of a second run, differ."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    mismatches, trained = train(steps, device, model, by)
    print(f"mismatches: {mismatches}")
    if twice:
        more, again = train(steps, device, model, by)
        weights = sum((a != b).sum().item() for a, b in zip(trained.parameters(), again.parameters(), strict=True))
        print(f"mismatches of a second run: {more}, weights that differ from the first one's: {weights}")
        mismatches += more + weights
    differing, count = control(device, model)
    print(f"of transformers on torch's kernels {differing} of {count} log-probabilities differ")
    return mismatches


def train(steps: int, device: str, name: str = "qwen3", by: str = "batches"):
    """(How many numbers differ, the model after the last step)."""
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
            tokens, *rolled = roll_out(model, rows, lengths, step, generator, by)
            scored, rewards = update(model, optimizer, rows, lengths, tokens, rolled[0])
        mismatches += sum((a != b).sum().item() for a, b in zip(rolled, scored, strict=True))
        if step % 10 == 0 or step == steps - 1:
            seconds = time.perf_counter() - start
            print(f"step {step}, {seconds:.1f} s: reward {rewards.mean().item():.3f}, mismatches so far: {mismatches}")
    return mismatches, model


def roll_out(model, rows, lengths, step, generator, by) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, log-probabilities and entropies (sequences, NEW), in another order, in batches of other sizes."""
    count = len(rows)
    tokens = torch.empty(count, NEW, dtype=torch.int64, device=rows.device)
    log_probs, entropies = torch.empty(2, count, NEW, device=rows.device)
    seeds = step * count + torch.arange(count, device=rows.device)  # of each sequence of the run
    order = torch.randperm(count, generator=generator).to(rows.device)
    for some in order.split(BATCHES):
        options = {"seeds": seeds[some], "max_new_tokens": NEW}
        if by == "chunks":
            prompts = [row[:n].tolist() for row, n in zip(rows[some], lengths[some], strict=True)]
            batching = ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=CHUNK)
            found = models.generate_batch(model, prompts, batching=batching, **options)
        else:
            mask = torch.arange(LONGEST, device=rows.device) < lengths[some, None]
            found = models.generate(model, rows[some], attention_mask=mask, graph=by == "graph", **options)
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


@torch.no_grad()
def control(device: str, name: str = "qwen3") -> tuple[int, int]:
    """(How many log-probabilities of transformers' own roll-outs differ from those of one forward, of how many)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="sdpa")
    model = model.to(device, torch.bfloat16).eval()
    rows = torch.randint(VOCABULARY, (PROMPTS, LONGEST)).repeat_interleave(SAMPLES, 0).to(device)
    sequences, rolled = [], []
    for some in rows.split(BATCHES):
        options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        found = model.generate(some, output_logits=True, return_dict_in_generate=True, **options)
        sequences.append(found.sequences)
        rolled.append(torch.stack(found.logits, 1))
    ids = torch.cat(sequences)
    scored = model(ids, use_cache=False).logits[:, LONGEST - 1 : -1]
    a, b = (logits.float().log_softmax(-1).gather(2, ids[:, LONGEST:, None]) for logits in (torch.cat(rolled), scored))
    return (a != b).sum().item(), a.numel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=CONFIGS, default="qwen3")
    parser.add_argument("--by", choices=("batches", "graph", "chunks"), default="batches")
    parser.add_argument("--twice", action="store_true")
    arguments = parser.parse_args()
    main(model=arguments.model, by=arguments.by, twice=arguments.twice)
