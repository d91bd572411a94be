"""generate_batch: ``generate`` by transformers' continuous batching, whose scheduler decides what a forward holds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cute_kernels.models.attention import NAME
from cute_kernels.models.choosing import Choice, Settings, check_seeds, choose, settings_of
from cute_kernels.models.families import Head, expect_frequencies, family_of, head_of, model_of
from cute_kernels.models.generation import Generation
from cute_kernels.models.paged import PAGED_NAME
from cute_kernels.models.scoring import hidden_states
from cute_kernels.models.sharding import gathered
from cute_kernels.runtime.checks import expect, fail

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

OP = "models.generate_batch"
# What a model's forward is given of transformers' batch; the rest is for its head and its logits processors
INPUTS = (
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "write_index",
    "read_index",
    "cache",
    "use_cache",
)


@torch.no_grad()
@gathered
def generate_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Tensor,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    batching: ContinuousBatchingConfig | None = None,
) -> Generation:
    """``generate`` for many prompts of other lengths, by the continuous batching of transformers, 5.17.

    Its scheduler cuts prompts into chunks, puts them into one forward with the next tokens of others, shares the blocks
    of prompts that begin alike, and takes a request's blocks away when they are full, to compute its keys again later.
    None of it changes a bit. A request ends without waiting for others.

    Where an argument is None the model's ``generation_config`` decides, as in ``generate``.

    Args:
        model: a causal language model of transformers that ``prepare`` has prepared, or peft's model of it.
            If FSDP2 shards it, all ranks have to make as many forwards.
        prompts: the tokens of each, at least one.
        seeds: (B,) int64 on the model's device: of each sequence. The noise of its token at position p is a function
            of seed and p.
        max_new_tokens: of each sequence, from 1.
        temperature: the divisor of the logits, 0 or from 1e-6 to 1e6; 0: the largest logit. 1 if nothing says more.
            ``log_prob`` has to be told, where it is not 1.
        top_k: draw of the k largest logits alone; 0: of all.
        top_p: draw of the fewest whose probabilities add up to this share, in (0, 1].
        min_p: draw of those that have at least this share of the largest probability, in [0, 1].
        eos_token_id: the token or tokens that end a sequence; none if nothing says more.
        pad_token_id: of places behind the end; the first eos_token_id if nothing says more.
        batching: transformers' settings: block_size (16, 32, 64 or a multiple of 128; 256 if nothing says more),
            num_blocks, max_batch_tokens, max_requests_per_batch, scheduler_type, allow_block_sharing, cpu_offload_space
            and others. CUDA graphs, compiled steps and asynchronous batching are left out, whatever it says.

    Returns:
        ``Generation``: tokens and log_probs as wide as the longest sequence, lengths.

    Raises:
        ImportError: transformers is not installed, or has no continuous batching.
        TypeError: no model of transformers; other dtypes; no max_new_tokens; prompts that are no integers.
        ValueError: no prompt, or one without a token; seeds of another length; a temperature, top_k, top_p or min_p out
            of range; a generation_config with beam search, penalties or forbidden words; a model that is not known, or
            not prepared; another block_size.
        MemoryError, RuntimeError: transformers': blocks that do not fit, or too few for a request. On a CPU it needs
            the psutil package to see any memory.

    Numerics:
        Tokens and log-probabilities are those of ``generate``: inside of ``batch_invariant``, on a GPU, bit by bit. It
        runs in the caller's thread, so that a block covers it. torch's random state stays as it is.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from cute_kernels import models
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
        ... )
        >>> model = models.prepare(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        >>> if torch.cuda.is_available():
        ...     prompts, seeds = [[3, 4, 5], [6, 7]], torch.tensor([1, 2], device="cuda")
        ...     tokens, log_probs, lengths = models.generate_batch(
        ...         model.to("cuda"), prompts, seeds=seeds, max_new_tokens=4, eos_token_id=[]
        ...     )
    """
    found = model_of(OP, model)
    head = head_of(OP, found)
    settings = settings_of(
        OP,
        found,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    expect_frequencies(OP, found)
    requests = [_checked(prompt) for prompt in prompts]
    expect(bool(requests), OP, "prompts", "have one at least", "none")
    check_seeds(OP, seeds, len(requests), found.device)
    with _batched(found, settings, batching) as manager:
        for i, prompt in enumerate(requests):
            manager.add_request(prompt, str(i), settings.steps, eos_token_id=settings.ends)
        processor = manager.batch_processor
        processor.model_runner._forward_process_and_sample = _Step(
            processor.inputs_and_outputs, head, settings.choice, seeds
        )
        with _on_stream(processor.inputs_and_outputs.compute_stream):
            while processor.prepare_next_batch():
                processor._generation_step(found)
                processor.update_batch()
    results = {}
    while not manager.output_router.output_queue.empty():
        output = manager.output_router.output_queue.get()
        results[int(output.request_id)] = output
    failed = [result.error for result in results.values() if result.error is not None]
    if failed or len(results) < len(requests):
        raise RuntimeError(f"{OP}: {len(results) - len(failed)} of {len(requests)} requests are done; {failed[:1]}")
    return _collected([results[i] for i in range(len(requests))], settings.pad, seeds.device)


def _checked(prompt: Sequence[int]) -> list[int]:
    tokens = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not all(isinstance(token, int) for token in tokens):
        fail(OP, "prompts", "be sequences of int", type(prompt).__name__, TypeError)
    expect(bool(tokens), OP, "prompts", "have a token each", "one without")
    return tokens


class _Step:
    """A forward of the requests in transformers' batch, and their next tokens."""

    def __init__(self, batches: Any, head: Head, choice: Choice, seeds: Tensor) -> None:
        self.batches, self.head, self.choice, self.seeds = batches, head, choice, seeds

    def __call__(self, model: Any, batch: dict[str, Any], carried: Tensor, previous: Tensor, output: Tensor) -> None:
        requests = [request for request in self.batches.requests_in_batch if request.has_new_token]
        new = [int(request.state.request_id) for request in requests]
        hidden = hidden_states(model, batch["input_ids"], **{name: batch[name] for name in INPUTS})
        if not new:
            return
        rows = batch["logits_indices"][: len(new)]
        seeds = self.seeds[torch.tensor(new, device=self.seeds.device)]
        positions = batch["position_ids"][0, rows].long() + 1
        tokens, log_p, _ = choose(self.head, hidden[0, rows], self.choice, None, seeds, positions)
        output[0, : len(new)].copy_(tokens)
        output[1, : len(new)].copy_(log_p.view(torch.int32))  # where transformers looks for bits of fp32


@contextlib.contextmanager
def _batched(model: Any, settings: Settings, batching: ContinuousBatchingConfig | None) -> Iterator[Any]:
    """transformers' manager of a model, with its processor, without its thread; then the model is what it was."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    config = ContinuousBatchingConfig(disable_nccl_graph_mixing=False) if batching is None else copy.copy(batching)
    config.return_logprobs, config.seed = True, 0  # the seed of torch's generator, which nothing draws from
    config.use_async_batching = config.use_cuda_graph = False
    config.varlen_compile_config = config.decode_compile_config = None
    config.default_compile_level = 0
    neutral = GenerationConfig(do_sample=False, max_new_tokens=settings.steps)
    training = {module: module.training for module in model.modules()}
    devices = [model.device] if model.device.type == "cuda" else []
    model.set_attn_implementation(PAGED_NAME)
    try:
        manager = ContinuousBatchingManager(model, neutral, config)
        with torch.random.fork_rng(devices), _expanded(model):
            manager.batch_processor = manager._create_batch_processor()
        yield manager
    finally:
        model.set_attn_implementation(NAME)
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def _expanded(model: Any) -> Iterator[None]:
    """Where transformers makes its cache by the sizes of latents, let it see those of the heads that they expand to.

    Keys and values have one size there, so that of the larger; the config is what it was when the model runs.
    """
    config = model.config.get_text_config()
    if not family_of(OP, model).has_latents:
        yield
        return
    before = config.head_dim, config.num_key_value_heads
    config.head_dim = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    config.num_key_value_heads = config.num_attention_heads
    try:
        yield
    finally:
        config.head_dim, config.num_key_value_heads = before


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On transformers' stream, after what the caller's has and before what comes to it."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _collected(results: list[Any], pad: int, device: torch.device) -> Generation:
    lengths = [len(result.generated_tokens) for result in results]
    tokens = torch.full((len(results), max(lengths)), pad, dtype=torch.int64)
    log_probs = torch.zeros(tokens.shape, dtype=torch.float32)
    for i, result in enumerate(results):
        tokens[i, : lengths[i]] = torch.tensor(result.generated_tokens)
        log_probs[i, : lengths[i]] = torch.tensor(result.logprobs)
    return Generation(tokens.to(device), log_probs.to(device), torch.tensor(lengths, device=device))
