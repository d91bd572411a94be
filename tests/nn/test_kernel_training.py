"""The model on the kernels: against the references, recompute, offload, CUDA graphs, torch.compile, memory."""

from dataclasses import replace

import pytest
import torch

from cute_kernels import batch_invariant, check_invariance
from cute_kernels.nn import CapturedStep, LayerNorm, Linear, MHCTransformer, ResidualOffload, RMSNorm
from cute_kernels.nn.offload import _side_stream
from tests.nn.cases import (
    BF16,
    FP32,
    assert_same_bits,
    gradients,
    make_config,
    make_model,
    make_tokens,
    relative_errors,
    with_connections,
)

SIZES = {"hidden": 256, "layers": 4, "length": 128, "vocab": 512}
PLAIN = make_config(**SIZES)
DROPOUT = make_config(**SIZES, dropout_p=0.1)
ONE_STREAM = make_config(**SIZES, streams=None, dropout_p=0.1)
LARGE = make_config(hidden=1024, layers=8, length=1024, vocab=512)
RECOMPUTE = {"recompute": True, "recompute_layers": 2}
CONFIGS = [PLAIN, DROPOUT, ONE_STREAM, LARGE]
CONFIGS += [with_connections(config, **RECOMPUTE) for config in (DROPOUT, LARGE)]


def run(config, dtype=BF16):
    return gradients(make_model(config, "cuda", dtype), *make_tokens(config, device="cuda"))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("config", [PLAIN, replace(ONE_STREAM, dropout_p=0.0)], ids=["four", "one"])
def test_gradients_are_the_references(config, dtype):
    """Apart by what bf16 activations round: some 1e-2 of a gradient's norm through eight sublayers, or, where a
    gradient is left of terms of both signs, at most twice what it moves by with the last bit that bf16 has of the
    embedding, in the worst of four draws.
    """
    ours, tokens = run(config, dtype), make_tokens(config, device="cuda")
    model = make_model(replace(config, backend="reference"), "cuda", dtype)
    wanted = gradients(model, *tokens)
    weight, generator, moves = model.embedding.weight, torch.Generator().manual_seed(3), []
    exact = weight.detach().clone()
    for _ in range(4):
        noise = torch.rand(weight.shape, generator=generator).cuda() - 0.5
        with torch.no_grad():
            weight.copy_(exact.float() * (1 + 2**-7 * noise))
        moves.append(relative_errors(gradients(model, *tokens), wanted))
    torch.testing.assert_close(ours["loss"], wanted["loss"], rtol=2e-3, atol=0)
    errors = relative_errors(ours, wanted)
    bounds = {name: max(0.1, *(2 * move[name] for move in moves)) for name in errors}
    assert all(errors[name] < bounds[name] for name in errors), (errors, bounds)


def test_a_model_that_is_assigned_from_the_meta_device():
    """Its table is there before the first call, which may be captured: a capture cannot copy from the host."""
    model, (tokens, _) = make_model(PLAIN, "cuda"), make_tokens(PLAIN, device="cuda")
    with torch.device("meta"):
        made = MHCTransformer(PLAIN, dtype=BF16)
    made.load_state_dict(model.state_dict(), assign=True)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        wanted = model(tokens)
        with torch.cuda.graph(graph):
            found = made(tokens)
    graph.replay()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("config", [DROPOUT, ONE_STREAM], ids=["four", "one"])
def test_run_to_run(config):
    assert_same_bits(run(config), run(config))


@pytest.mark.slow
@pytest.mark.sm90
@pytest.mark.parametrize("streams", [4, None], ids=["four", "one"])
def test_sequences_do_not_know_their_batch(streams):
    """Outputs of all modules and their gradients, strictly: no operator of torch's may add in an order of its own.

    More keys than a block of attention has; on the CPU over fakes: test_transformer.py.
    """
    config = make_config(hidden=256, layers=2, length=200, vocab=512, streams=streams)
    tokens, _ = make_tokens(config, batch=6, device="cuda")
    with batch_invariant("strict"):
        report = check_invariance(make_model(config, "cuda"), tokens)
    report.raise_if_failed()


@pytest.mark.parametrize("layers", [1, 3, "optimal"])
def test_recompute_changes_no_bit(layers):
    """Kernels write in place what was discarded; blocks of one layer, of uneven numbers, of the best."""
    assert_same_bits(run(DROPOUT), run(with_connections(DROPOUT, recompute=True, recompute_layers=layers)))


def test_recompute_on_the_references():
    """Checkpoints, with the GPU's random numbers restored: another mask would change everything.

    Bits are the kernels' promise: torch's sums on a GPU choose their order by layouts.
    """
    config = replace(DROPOUT, backend="reference")
    wanted, found = run(config), run(with_connections(config, **RECOMPUTE))
    errors = relative_errors(found, wanted)
    assert torch.equal(found["loss"], wanted["loss"]) and max(errors.values()) < 0.02, errors


@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["alone", "recompute"])
def test_offload_changes_no_bit(recompute):
    config = with_connections(DROPOUT, offload=True, **recompute)
    wanted = run(DROPOUT)
    for _ in range(2):  # the second takes the first's pinned memory
        assert_same_bits(wanted, run(config))


def test_a_residual_whose_backward_does_not_come():
    """The last sublayer's weight alone is asked for, and begins to bring it back: what has its memory next keeps its
    own values.
    """
    size, weight = 2**20, torch.ones((), device="cuda", requires_grad=True)

    def others_have_its_memory(cycles):
        offload = ResidualOffload()
        first = 3 * torch.ones(size, device="cuda", requires_grad=True)
        second = 2 * first
        offload.keep(first, second)
        third = weight * second
        offload.keep(second, third)
        assert first.untyped_storage().nbytes() == 0
        with torch.cuda.stream(_side_stream(0)):
            torch.cuda._sleep(cycles)
        torch.autograd.grad(third.sum(), weight)
        address = first.data_ptr()
        del offload, first, second, third
        others = [torch.zeros(size, device="cuda") for _ in range(8)]
        on_its_way = not _side_stream(0).query()
        torch.cuda.synchronize()
        assert address in [t.data_ptr() for t in others] and not any(t.any() for t in others)
        return on_its_way

    others_have_its_memory(0)  # what is loaded and allocated at a first call waits for the GPU
    assert others_have_its_memory(10**9)


def peak(config):
    """Bytes of activations at the peak of a training step."""
    model, batch = make_model(config, "cuda"), make_tokens(config, device="cuda")
    gradients(model, *batch)
    torch.cuda.synchronize()
    for parameter in model.parameters():
        parameter.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(model, *batch)
    return torch.cuda.max_memory_allocated() - before


def test_memory():
    """Peaks fall by what is discarded or moved, in units of M * C numbers.

    A layer keeps two residuals (n each), two layer inputs and two norms' outputs. Recompute in blocks of L_r keeps a
    residual a block, and makes one block's 2 n + 4 a layer at a time; offload keeps the residuals of two sublayers.
    """
    n, layers, block = 4, LARGE.num_layers, 2
    unit = 2 * LARGE.max_sequence_length * LARGE.hidden_size * 2
    plain = peak(LARGE)
    recompute = peak(with_connections(LARGE, recompute=True, recompute_layers=block))
    offload = peak(with_connections(LARGE, offload=True))
    both = peak(with_connections(LARGE, recompute=True, recompute_layers=block, offload=True))
    assert plain - recompute > 0.9 * unit * ((2 * n + 4) * (layers - block) - n * layers // block)
    assert plain - offload > 0.9 * unit * n * (2 * layers - 4)
    assert both < recompute


def test_the_loss_holds_no_logits():
    """Memory of its backward's parts and the weight's gradient alone, whatever else the model has."""
    config = make_config(hidden=256, layers=1, length=4096, vocab=2**17)
    logits = 4 * 2 * config.max_sequence_length * config.vocab_size
    assert peak(config) < logits / 4


def make_step(model, optimizer):
    def step(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    "config",
    [DROPOUT, with_connections(DROPOUT, **RECOMPUTE), ONE_STREAM],
    ids=["four", "recompute", "one"],
)
def test_a_captured_step_has_the_bits_of_an_eager_one(config):
    batches = [make_tokens(config, device="cuda", seed=seed) for seed in range(4)]
    results = []
    for captures in (False, True):
        model = make_model(config, "cuda", FP32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

        step = make_step(model, optimizer)
        torch.manual_seed(3)
        call = CapturedStep(step, batches[0], model, optimizer) if captures else step
        losses = [call(*batch).clone() for batch in batches]
        results.append({"losses": torch.stack(losses), **dict(model.named_parameters())})
    assert_same_bits(*results)
    assert results[0]["losses"][-1] != results[0]["losses"][0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_captured_step_on_the_second_device():
    """While the first is the current one, and has captured before."""
    losses = []
    for device in ("cuda:0", "cuda:1"):
        model, batch = make_model(PLAIN, device), make_tokens(PLAIN, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = CapturedStep(make_step(model, optimizer), batch, model, optimizer)
        losses.append(torch.stack([captured(*batch).clone() for _ in range(3)]).cpu())
    assert torch.equal(*losses) and losses[0][2] < losses[0][0]


def test_torchs_own_capture_of_a_module():
    """make_graphed_callables: forward and backward as graphs of their own, in place of the module."""

    def module():
        torch.manual_seed(0)
        layers = RMSNorm(256), Linear(256, 512, activation="gelu"), LayerNorm(512)
        return torch.nn.Sequential(*layers).to("cuda", BF16)

    sample = torch.zeros(64, 256, device="cuda", dtype=BF16, requires_grad=True)
    results = []
    for call in (module(), torch.cuda.make_graphed_callables(module(), (sample,))):
        torch.manual_seed(1)
        for _ in range(2):
            x = torch.randn(64, 256, device="cuda").to(BF16).requires_grad_()
            y = call(x)
            y.backward(torch.randn_like(y))
            found = {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in call.named_parameters()}}
            results.append({name: t.clone() for name, t in found.items()})  # the next replay writes into these
            call.zero_grad(set_to_none=True)
    eager, captured = results[:2], results[2:]
    for wanted, found in zip(eager, captured, strict=True):
        assert_same_bits(wanted, found)


def test_offload_cannot_be_captured():
    model = make_model(with_connections(DROPOUT, offload=True), "cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, targets = make_tokens(DROPOUT, device="cuda")
    with pytest.raises(RuntimeError, match="ResidualOffload: cannot run in a CUDA graph's capture; set offload=False"):
        CapturedStep(model.loss, (tokens, targets), model, optimizer)


@pytest.mark.parametrize("config", [DROPOUT, ONE_STREAM], ids=["four", "one"])
def test_compile(config):
    """As one graph; Inductor sums and rounds the rest of the model in its own way."""
    config = replace(config, num_layers=1, dropout_p=0.0)
    wanted = run(config)
    model = make_model(config, "cuda")
    tokens, targets = make_tokens(config, device="cuda")
    torch.compile(model, fullgraph=True)(tokens, targets).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    errors = relative_errors(found, {name: wanted[name] for name in found})
    assert max(errors.values()) < 0.1, errors
