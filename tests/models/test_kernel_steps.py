"""A training step of each family inside of ``batch_invariant("strict")``: nothing is uncovered, no bit depends on luck.

Also of models that nobody has prepared: their attention is products and a softmax, or torch's without a mask.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from cute_kernels import batch_invariant, models  # noqa: E402
from tests.models.cases import FAMILIES, make_model, make_prepared, padded, prompts  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

pytestmark = pytest.mark.sm90
LENGTHS = (9, 300, 17)
# With a window transformers gives torch's attention a mask
WINDOWS = "mistral", "gemma2", "gemma3", "gpt_oss"
BALANCED = "mixtral", "qwen3_moe", "gpt_oss"  # their loss may have a part that balances experts
FEW = "llama", "gpt2", "gpt_oss"  # the others differ in norms, biases, rotary embeddings and routers


def families(names):
    return [pytest.param(n, marks=[] if n in FEW else pytest.mark.exhaustive) for n in names]


@pytest.fixture
def path_of_the_kernels():
    """On the CPU fake kernels: before a block begins."""


@pytest.fixture(autouse=True)
def strict(path_of_the_kernels):
    with batch_invariant("strict"):
        yield


def loss_of(model, name, prepared):
    """That of transformers, padded left where ``attention`` may; of a prepared model log-probabilities, too."""
    ids, present = padded(prompts(LENGTHS, device=model.device), left=True)
    options = {"output_router_logits": True} if name in BALANCED else {}
    labels = torch.where(present > 0, ids, -100)
    mask = present if prepared else None
    loss = model(ids, attention_mask=mask, labels=labels, use_cache=False, **options).loss
    if prepared:
        log_prob, entropy = models.log_prob(model, ids, labels, attention_mask=mask)
        loss = loss - log_prob.mean() - 0.01 * entropy.mean()
    return loss


def trained(name, device, implementation, reentrant=None):
    """{parameter: (gradient, value behind it)} of a step of AdamW. ``implementation`` None: prepared."""
    prepared = implementation is None
    if prepared:
        model = make_prepared(name, device)
    else:
        model = make_model(name, device, torch.bfloat16, implementation, FAMILIES)
    model.train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = [p.detach().clone() for p in model.parameters()]
    loss_of(model, name, prepared).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    changed = [not torch.equal(p, before) for p, before in zip(model.parameters(), start, strict=True)]
    assert sum(changed) > 0.9 * len(changed)
    return {key: (p.grad, p.detach()) for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", families(FAMILIES))
def test_a_step(name, device):
    """Twice, and with both kinds of checkpoints: the same gradients and weights."""
    wanted = trained(name, device, None)
    # With the reentrant kind the router logits, which transformers puts aside, have no gradient
    for reentrant in (None, False) if name in BALANCED else (None, False, True):
        other = trained(name, device, None, reentrant)
        assert other.keys() == wanted.keys()
        for key, pair in wanted.items():
            for a, b in zip(other[key], pair, strict=True):
                assert_same_bits(a, b)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", families(FAMILIES))
def test_a_step_of_a_model_as_it_is(name, implementation, device):
    if implementation == "sdpa" and name in WINDOWS:
        pytest.skip("attention has a mask there")
    wanted = trained(name, device, implementation)
    checkpointed = trained(name, device, implementation, False)
    for key, pair in wanted.items():
        for a, b in zip(checkpointed[key], pair, strict=True):
            assert_same_bits(a, b)


def gradients_of_tokens(model, ids, labels, **options):
    """(B, S, C), of the embedded tokens, where each token's log-probability and entropy count alike."""
    kept = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, y: (kept.append(y), y)[1])
    log_prob, entropy = models.log_prob(model, ids, labels, temperature=0.7, **options)
    hook.remove()
    (gradient,) = torch.autograd.grad((log_prob + 0.1 * entropy).sum(), kept)
    return gradient


@pytest.mark.parametrize("name", families(FAMILIES))
def test_gradients_of_tokens_do_not_know_the_batch(name, device):
    """They are those of micro-batches of one sequence, if padded left or right, in another order, packed."""
    model, rows = make_prepared(name, device).train(), prompts(LENGTHS, device=device)
    wanted = [gradients_of_tokens(model, row[None], row[None])[0] for row in rows]
    assert all(gradient.any(1).sum() == len(gradient) - 1 for gradient in wanted)  # the last one is before no label
    for left, order in ((True, (0, 1, 2)), (False, (2, 0, 1))):
        ids, present = padded([rows[i] for i in order], left)
        labels = torch.where(present > 0, ids, -100)
        labels[torch.arange(len(rows)), present.argmax(1)] = -100  # the row before it is padding
        found = gradients_of_tokens(model, ids, labels, attention_mask=present)
        for i, of_row, here in zip(order, found, present, strict=True):
            assert_same_bits(of_row[here > 0], wanted[i])
    ids = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])[None]
    found = gradients_of_tokens(model, ids, torch.where(positions > 0, ids, -100), position_ids=positions)
    assert_same_bits(found[0], torch.cat(wanted))


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "SGD"])
def test_other_optimizers(name, device):
    """AdamW's step is in the tests above; Muon takes matrices alone, and multiplies them."""
    weights = []
    for _ in range(2):
        model = make_prepared("llama", device).train()
        parameters = [p for p in model.parameters() if p.dim() == 2]
        optimizer = getattr(torch.optim, name)(parameters, lr=1e-2)
        before = [p.detach().clone() for p in parameters]
        loss_of(model, "llama", True).backward()
        optimizer.step()
        assert not any(torch.equal(p, start) for p, start in zip(parameters, before, strict=True))
        weights.append(parameters)
    for a, b in zip(*weights, strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_autocast(device):
    """Parameters in fp32: a row does not know its batch, a roll-out has its log-probabilities, gradients are fp32."""
    model = make_prepared("llama", device, torch.float32).train()
    rows = prompts(LENGTHS, device=device)

    def score(ids, labels, **options):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return models.log_prob(model, ids, labels, **options)

    ids, present = padded(rows, left=False)
    labels = torch.where(present > 0, ids, -100)
    found = score(ids, labels, attention_mask=present)
    for i, row in enumerate(rows):
        for of_batch, alone in zip(found, score(row[None], row[None]), strict=True):
            assert_same_bits(of_batch[i, : len(row)], alone[0])
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        seeds, options = torch.arange(len(rows), device=device), {"max_new_tokens": 3, "eos_token_id": []}
        rolled = models.generate(model, ids, seeds=seeds, attention_mask=present, **options)
    for row, tokens, log_probs in zip(rows, rolled.tokens, rolled.log_probs, strict=True):
        whole = torch.cat([row, tokens])[None]
        assert_same_bits(score(whole, whole)[0][0, len(row) :].detach(), log_probs)
    (found[0] + found[1]).sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.any() for p in model.parameters())


class Adapter(torch.nn.Module):
    """LoRA of a linear layer, as peft adds it."""

    def __init__(self, base, rank=8):
        super().__init__()
        options = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, rank, **options)
        self.up = torch.nn.Linear(rank, base.out_features, **options)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


def test_adapters(device):
    """Rows through LoRA and their gradients do not know the batch, a roll-out has the bits of training."""
    model = make_prepared("llama", device).train().requires_grad_(False)
    for layer in model.model.layers:
        for parent, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "down_proj")):
            setattr(parent, name, Adapter(getattr(parent, name)))
    rows = prompts(LENGTHS, device=device)
    model.get_input_embeddings().requires_grad_()  # gradients_of_tokens wants those
    wanted = [gradients_of_tokens(model, row[None], row[None])[0] for row in rows]
    ids, present = padded(rows, left=False)
    labels = torch.where(present > 0, ids, -100)
    found = gradients_of_tokens(model, ids, labels, attention_mask=present)
    for gradient, here, alone in zip(found, present, wanted, strict=True):
        assert_same_bits(gradient[here > 0], alone)
    seeds, options = torch.arange(len(rows), device=device), {"max_new_tokens": 3, "eos_token_id": []}
    rolled = models.generate(model, ids, seeds=seeds, attention_mask=present, **options)
    for row, tokens, log_probs in zip(rows, rolled.tokens, rolled.log_probs, strict=True):
        whole = torch.cat([row, tokens])[None]
        assert_same_bits(models.log_prob(model, whole, whole)[0][0, len(row) :].detach(), log_probs)
    steps = []
    trained = [
        p for module in model.modules() if isinstance(module, Adapter) for p in (module.down.weight, module.up.weight)
    ]
    for _ in range(2):
        log_prob, entropy = models.log_prob(model, ids, labels, attention_mask=present)
        steps.append(torch.autograd.grad((log_prob + 0.1 * entropy).sum(), trained))
    for a, b in zip(*steps, strict=True):
        assert a.any()
        assert_same_bits(a, b)
