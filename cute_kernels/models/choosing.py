"""How the next token is chosen of a hidden state, and the log-probability that it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.gemm import linear
from cute_kernels.models.attention import NAME
from cute_kernels.models.families import Head
from cute_kernels.models.scoring import head_log_prob, in_half
from cute_kernels.runtime.checks import expect, expect_dtype, expect_int, expect_tensor
from cute_kernels.runtime.real import as_float
from cute_kernels.sampling import sample

# Of a generation_config: what changes tokens, is not done here, and its value where it is off, besides None
OFF: dict[str, object] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "remove_invalid_values": False,
    "token_healing": False,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}

Processor = Callable[[Tensor, Tensor], Tensor]


class Choice(NamedTuple):
    """How a token is chosen of logits; None: of all."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    processors: tuple[Processor, ...]


class Settings(NamedTuple):
    """New tokens of each sequence, how each is chosen, which ones end it, and what stands behind the end."""

    steps: int
    choice: Choice
    ends: list[int]
    pad: int


def settings_of(
    op: str,
    model: Any,
    *,
    max_new_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    processors: Sequence[Processor] = (),
) -> Settings:
    """The values that are given; where one is None, that of the generation_config of a model of transformers.

    Raises:
        TypeError: no max_new_tokens.
        ValueError: a model that is not prepared; beam search and other settings of OFF; no token.
    """
    configured = model.generation_config
    expect(model.config._attn_implementation == NAME, op, "model", "be prepared (models.prepare)", "another")
    for name, off in OFF.items():
        value = getattr(configured, name, None)
        expected = f"leave {name} out: it is not done here (some have a logits processor or a stop, to be given)"
        expect(value in (None, off, [], {}), op, "model's generation_config", expected, value)

    def default(name: str, given: Any, otherwise: Any = None) -> Any:
        said = getattr(configured, name, None) if given is None else given
        return otherwise if said is None else said

    steps = default("max_new_tokens", max_new_tokens)
    expect_int(op, "max_new_tokens", steps)
    expect(steps > 0, op, "max_new_tokens", "be positive", steps)
    k = default("top_k", top_k)
    choice = Choice(
        as_float(default("temperature", temperature, 1.0)),
        None if type(k) is int and k == 0 else k,  # transformers' word for "of all"
        *(default(name, given) for name, given in (("top_p", top_p), ("min_p", min_p))),
        tuple(processors),
    )
    ends = default("eos_token_id", eos_token_id, [])
    ends = [ends] if isinstance(ends, int) else list(ends)
    return Settings(steps, choice, ends, default("pad_token_id", pad_token_id, ends[0] if ends else 0))


def check_seeds(op: str, seeds: Tensor, batch: int, device: torch.device) -> None:
    expect_tensor(op, "seeds", seeds)
    expect_dtype(op, "seeds", seeds.dtype, (torch.int64,))
    good = seeds.shape == (batch,) and seeds.device == device
    expect(good, op, "seeds", f"have shape ({batch},) on {device}", f"{tuple(seeds.shape)} on {seeds.device}")


def choose(
    head: Head, hidden: Tensor, choice: Choice, ids: Tensor | None, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, their log-probabilities, the logits before processors) of rows (B, C)."""
    logits = linear(in_half(hidden), in_half(head.weight), out_dtype=torch.float32)
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    scores = logits
    for processor in choice.processors:
        scores = processor(ids, scores)
    filters = {"top_k": choice.top_k, "top_p": choice.top_p, "min_p": choice.min_p}
    token = sample(scores, seeds=seeds, positions=positions, temperature=choice.temperature, **filters)
    log_p, _ = head_log_prob(head, hidden, token, choice.temperature or 1.0)
    return token, log_p, logits
