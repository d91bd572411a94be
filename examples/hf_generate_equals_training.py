"""A model of transformers generates with the bits of one forward: its own generate, and models.generate.

    python examples/hf_generate_equals_training.py

A small Llama with random weights. On a GPU both counts are 0; on a CPU, where plain torch computes, they need not be.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cute_kernels import batch_invariant, models

VOCABULARY, NEW = 512, 24
LENGTHS = (3, 40, 17, 1)


def main(device: str | None = None) -> tuple[int, int]:
    """Logits of transformers' generate, and log-probabilities of models.generate, that are not those of one forward."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    model = models.prepare(LlamaForCausalLM(config).to(device, torch.bfloat16).eval())
    # Prompts of other lengths, padded left
    width = max(LENGTHS)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in LENGTHS], device=device)
    prompts = torch.randint(2, VOCABULARY, mask.shape, device=device)

    with torch.no_grad(), batch_invariant("strict"):
        theirs = model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        seeds = torch.arange(len(LENGTHS), device=device)
        ours = models.generate(model, prompts, seeds=seeds, attention_mask=mask, max_new_tokens=NEW, temperature=0.8)
        of_logits = of_log_probs = 0
        for i, length in enumerate(LENGTHS):
            sequence = theirs.sequences[i : i + 1, width - length :]
            forward = model(sequence, use_cache=False).logits[0, length - 1 : -1]
            generated = torch.stack([step[i] for step in theirs.logits]).to(forward.dtype)
            of_logits += (forward != generated).sum().item()
            sequence = torch.cat([prompts[i, width - length :], ours.tokens[i]])[None]
            scored, _ = models.log_prob(model, sequence, labels=sequence, temperature=0.8)
            of_log_probs += (scored[0, length:] != ours.log_probs[i]).sum().item()
    print(f"transformers' generate and one forward: {of_logits} logits differ")
    print(f"models.generate and models.log_prob: {of_log_probs} of {ours.log_probs.numel()} log-probabilities differ")
    return of_logits, of_log_probs


if __name__ == "__main__":
    main()
