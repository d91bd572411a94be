"""Models that FSDP2 shards, and what ranks with batches of their own must find: the bits of models that it does not."""

import contextlib
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cute_kernels import install, models, uninstall
from tests.fakes import fake_gpu
from tests.invariance.ordered_cases import added
from tests.models.cases import make_prepared, padded, prompts
from tests.runtime.bits import assert_same_bits

OPTIONS = {"max_new_tokens": 3, "eos_token_id": []}


def make(name, device, sharded, dtype=torch.bfloat16, **policy):
    model = make_prepared(name, device, dtype).train()
    if name == "gemma2":
        model.lm_head.weight = model.model.embed_tokens.weight
    if sharded:
        mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
        whole = MixedPrecisionPolicy(**policy)
        of_part = MixedPrecisionPolicy(param_dtype=whole.param_dtype)
        head = model.lm_head
        parts = [*model.model.layers, *([] if head.weight is model.model.embed_tokens.weight else [head])]
        for part in parts:
            fully_shard(part, mesh=mesh, mp_policy=of_part)
        fully_shard(model, mesh=mesh, mp_policy=whole)
    return model


def scored(model, ids, present):
    """Log-probabilities, entropies and each parameter's gradient."""
    results = models.log_prob(model, ids, ids, attention_mask=present)
    (results[0] + 0.1 * results[1]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return results, {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def compare(rank, ranks, backend, path, on_gpu):
    """On one rank."""
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=ranks)
    try:
        with contextlib.nullcontext() if on_gpu else fake_gpu():
            install("strict", collectives="ordered")
            for name in ("llama", "gemma2"):  # a head of its own; the embedding, with a softcap
                check_a_step(name, rank, ranks, device)
    finally:
        uninstall()
        dist.destroy_process_group()
    os._exit(0)  # a thread of gloo can abort the process while the interpreter ends: see cute_kernels/cli/train.py


def check_a_step(name, rank, ranks, device):
    """Each rank's scores and roll-outs are those of one GPU; gradients are the ranks' own, added from rank 0 on."""
    everyones = [padded(prompts((9, 30 + r), seed=r, device=device), left=True) for r in range(ranks)]
    ids, present = everyones[rank]
    options = {**OPTIONS, "seeds": torch.tensor([5, 6], device=device), "attention_mask": present}
    sharded = make(name, device, True)
    results, gradients = scored(sharded, ids, present)
    found = models.generate(sharded, ids, **options)
    own = []
    for batch in everyones:
        whole = make(name, device, False)
        own.append(scored(whole, *batch))
    for a, b in zip(results, own[rank][0], strict=True):
        assert_same_bits(a.detach(), b.detach())
    for key, gradient in gradients.items():
        assert_same_bits(gradient, added([of_rank[key] for _, of_rank in own], is_mean=True))
    wanted = models.generate(whole, ids, **options)
    assert torch.equal(found.tokens, wanted.tokens)
    assert_same_bits(found.log_probs, wanted.log_probs)


def start(ranks, backend, path, on_gpu):
    torch.multiprocessing.spawn(compare, (ranks, backend, path, on_gpu), nprocs=ranks)
