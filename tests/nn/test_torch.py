"""The model under torch.compile, CUDA graphs, and several processes' tools: what runs, and what is refused."""

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch

from cute_kernels.nn import (
    CapturedStep,
    HyperConnection,
    HyperConnectionConfig,
    LayerNorm,
    LearnedHead,
    Linear,
    MHCTransformer,
    RecomputeManager,
    RMSNorm,
    TransformerBlock,
    TransformerLayer,
    graph,
    transformer,
)
from tests.fakes import fake_gpu, fake_kernels
from tests.marks import first_of
from tests.nn.cases import (
    BF16,
    FP32,
    assert_same_bits,
    gradients,
    make_config,
    make_model,
    make_tokens,
    with_connections,
)


def run(config, dtype=BF16):
    return gradients(make_model(config, dtype=dtype), *make_tokens(config))


@pytest.mark.parametrize("streams", first_of([None, 4]))
def test_compile(streams):
    config = make_config(streams=streams, layers=2)
    wanted = run(config)
    model = make_model(config)
    torch._dynamo.reset()
    forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    tokens, targets = make_tokens(config)
    assert torch.equal(forward(tokens), model(tokens))
    with mock.patch.object(model, "loss", torch.compile(model.loss, fullgraph=True, backend="aot_eager")):
        assert_same_bits(wanted, gradients(model, tokens, targets))


@pytest.mark.parametrize("dynamic", first_of([None, True]))
def test_compile_of_several_layers(dynamic):
    """Their sizes, streams and layouts become symbols of one graph, or of one each."""
    torch._dynamo.reset()

    def run(connection, x):
        f, mix = connection(x)
        return connection.combine(f, x, mix)

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=dynamic)
    for hidden, streams, variant in ((16, 4, "deepseek_v4"), (24, 4, "transformer_engine"), (16, 2, "megatron")):
        connection = HyperConnection(HyperConnectionConfig(hidden, streams, variant=variant))
        shape = (3, hidden, streams) if connection.variant.layout == "channels" else (3, streams, hidden)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(compiled(connection, x), run(connection, x))


def test_compile_with_recompute():
    config = with_connections(make_config(layers=1), recompute=True)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fullgraph needs recompute=False and offload=False"):
        torch.compile(make_model(config), fullgraph=True, backend="aot_eager")(make_tokens(config)[0])


@pytest.mark.parametrize("part", ["block", "layers"])
@pytest.mark.parametrize("kernels", [False, True], ids=["references", "kernels"])
def test_compile_around_recompute(kernels, part):
    """A module with a manager runs in eager mode."""
    config = with_connections(make_config(layers=1), recompute=True)
    traced = []

    class Manager(RecomputeManager):
        def end_block(self, hook_tensor):
            traced.append(torch.compiler.is_compiling())
            super().end_block(hook_tensor)

    with fake_kernels() if kernels else contextlib.nullcontext():
        wanted = run(config)
        model = make_model(config)
        torch._dynamo.reset()
        for module in [model.block] if part == "block" else model.layers:
            module.forward = torch.compile(module.forward, backend="aot_eager")
        with mock.patch.object(transformer, "RecomputeManager", Manager):
            assert_same_bits(wanted, gradients(model, *make_tokens(config)))
    assert traced == [False]


def test_export_with_recompute():
    config = with_connections(make_config(layers=1), recompute=True)
    model, (tokens, _) = make_model(config), make_tokens(config)
    with pytest.raises(RuntimeError, match="TransformerBlock.forward: torch.export needs recompute=False and offload="):
        torch.export.export(model, (tokens,))
    with torch.no_grad():
        assert torch.equal(torch.export.export(model, (tokens,)).module()(tokens), model(tokens))


def test_a_captured_step_is_of_gpus():
    model = make_model(make_config())
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    tokens, _ = make_tokens(make_config())
    with pytest.raises(ValueError, match="CapturedStep: inputs must be on a GPU, got cpu"):
        CapturedStep(model, (tokens,), model, optimizer)
    with pytest.raises(TypeError, match="CapturedStep: inputs must be a tuple of tensors, got Tensor"):
        CapturedStep(model, tokens, model, optimizer)
    with (
        fake_gpu(),
        pytest.raises(ValueError, match="be made with capturable=True, got AdamW without"),
    ):
        CapturedStep(model, (tokens,), model, torch.optim.AdamW(model.parameters()))
    decaying = torch.optim.Adagrad(model.parameters(), lr_decay=0.1)
    with fake_gpu(), pytest.raises(ValueError, match="optimizer must have no lr_decay, got lr_decay of 0.1"):
        CapturedStep(model, (tokens,), model, decaying)
    with fake_gpu(), pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, got NoneType"):
        CapturedStep(model, (tokens,), model, None)
    with pytest.raises(TypeError, match="CapturedStep: step must be callable, got NoneType"):
        CapturedStep(None, (tokens,), model, optimizer)
    with pytest.raises(TypeError, match="CapturedStep: model must be a torch.nn.Module, got function"):
        CapturedStep(model, (tokens,), run, optimizer)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("NAdam", {"capturable": True}),
        ("ASGD", {"capturable": True}),
        ("Rprop", {"capturable": True}),
        ("Adafactor", {}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ],
)
def test_a_captured_step_of_a_state_that_is_not_zeros(kind, options):
    """The warm-up's value is put back as zeros."""
    model = torch.nn.Linear(4, 4)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    expected = f"optimizer must have a state that begins as zeros, and no dampening, got {kind}"
    with fake_gpu(), pytest.raises(ValueError, match=f"CapturedStep: {expected}"):
        CapturedStep(model, (torch.ones(4),), model, optimizer)


def test_a_warm_up_leaves_no_gradient():
    """Also for parameters that are not the optimizer's: no step takes their gradients away."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[0].parameters())
    model[1].bias.grad = torch.full((4,), 3.0)
    with mock.patch("torch.cuda.get_rng_state"), mock.patch("torch.cuda.set_rng_state"):
        before = graph._State(model, optimizer, torch.device("cuda"))
        model(torch.ones(2, 4)).sum().backward()
        before.restore(model, optimizer)
    assert not model[1].weight.grad.any() and torch.equal(model[1].bias.grad, torch.full((4,), 3.0))


def test_bad_tokens():
    config = make_config()
    model, (tokens, _) = make_model(config), make_tokens(config)
    with pytest.raises(NotImplementedError, match="got torch.bfloat16: stages of a pipeline"):
        model(torch.ones(2, 16, 32, dtype=BF16))
    with pytest.raises(TypeError, match="MHCTransformer: tokens must have dtype int64, got torch.int32"):
        model(tokens.int())
    with pytest.raises(TypeError, match="tokens must be a torch.Tensor, got list"):
        model([[1]])
    for bad in (tokens[0], torch.cat((tokens, tokens), 1), tokens[:, :0]):
        with pytest.raises(ValueError, match=r"tokens must have shape \(B, S\) with S from 1 to 16, got"):
            model(bad)
    for bad, error, message in (
        (tokens.t(), ValueError, r"targets must have shape \(2, 16\), got \(16, 2\)"),
        (tokens[:1], ValueError, r"targets must have shape \(2, 16\), got \(1, 16\)"),
        (tokens.int(), TypeError, "targets must have dtype int64, got torch.int32"),
        ([[1]], TypeError, "targets must be a torch.Tensor, got list"),
    ):
        with pytest.raises(error, match=message):
            model.loss(tokens, bad)
    for longest, length in ((16, 20), (1, 2)):
        block = make_model(replace(config, max_sequence_length=longest)).block
        with pytest.raises(ValueError, match=rf"TransformerBlock: h must have S of at most {longest}, got shape"):
            block(torch.ones(2, length, 32, dtype=BF16))
    with pytest.raises(TypeError, match="^TransformerBlock: h must be a torch.Tensor, got list$"):
        model.block([1])
    for module in (MHCTransformer, TransformerBlock, TransformerLayer):
        with pytest.raises(TypeError, match=f"^{module.__name__}: config must be a TransformerConfig, got HyperConn"):
            module(config.hyper_connections)


@pytest.fixture
def one_process(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_tensor_and_sequence_parallelism_are_refused(one_process):
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

    tokens, _ = make_tokens(make_config())
    model = make_model(make_config())
    with pytest.raises(NotImplementedError):  # torch's own: no torch.nn.Linear
        parallelize_module(model.layers[0].mlp, one_process, {"up": ColwiseParallel()})
    linear = Linear(32, 32)
    linear.bias = torch.nn.Parameter(distribute_tensor(linear.bias.detach(), one_process, [Shard(0)]))
    with pytest.raises(NotImplementedError, match="^Linear: tensor and sequence parallelism are not supported yet"):
        linear(torch.ones(2, 32, dtype=BF16))
    linear = model.layers[3].mlp.up
    linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.detach(), one_process, [Shard(0)]))
    with pytest.raises(
        NotImplementedError, match="Linear: tensor and sequence parallelism are not supported yet, got a t"
    ):
        model(tokens)
    model = make_model(make_config())
    parallelize_module(model.layers[0], one_process, {"mlp_norm": SequenceParallel()})
    with pytest.raises(NotImplementedError, match="RMSNorm: tensor and sequence parallelism are not supported yet"):
        model(tokens)
    norm, x = RMSNorm(32), torch.ones(2, 32, requires_grad=True)
    norm.weight = torch.nn.Parameter(distribute_tensor(norm.weight.detach(), one_process, [Shard(0)]))
    with pytest.raises(NotImplementedError, match="RMSNorm: tensor and sequence parallelism are not supported yet"):
        norm.recomputed(x, RecomputeManager())

    connections = HyperConnectionConfig(32)
    for module, name, shape in (
        (HyperConnection(connections), "phi", (2, 3, 4, 32)),
        (LearnedHead(connections), "fn", (2, 3, 4, 32)),
        (LayerNorm(32), "bias", (2, 32)),
    ):
        part = distribute_tensor(getattr(module, name).detach(), one_process, [Shard(0)])
        setattr(module, name, torch.nn.Parameter(part))
        wanted = f"^{type(module).__name__}: tensor and sequence parallelism are not supported yet"
        with pytest.raises(NotImplementedError, match=wanted):
            module(torch.ones(shape, dtype=BF16))


def test_stages_of_a_pipeline_are_refused():
    config = make_config()
    block = make_model(config).block
    with pytest.raises(NotImplementedError, match=r"TransformerBlock: stages of a pipeline.* \(2, 16, 4, 32\)"):
        block(torch.ones(2, 16, 4, 32, dtype=BF16))
    del block.layers[2:]
    with pytest.raises(NotImplementedError, match="expected 4 layers and h .*, got 2 layers"):
        block(torch.ones(2, 16, 32, dtype=BF16))


def test_settings_that_a_captured_step_would_not_see():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), betas=(0.9, 0.95))
    captured = graph.settings(optimizer)
    group = optimizer.param_groups[0]
    group["lr"].fill_(0.2)
    group["initial_lr"] = 0.1  # a scheduler's
    graph.expect_settings(optimizer, captured)
    graph.expect_on_device(optimizer, torch.device("cpu"))
    with pytest.raises(ValueError, match="CapturedStep: the optimizer's lr must be on meta, got cpu"):
        graph.expect_on_device(optimizer, torch.device("meta"))
    for name, value in (("lr", torch.tensor(0.2)), ("betas", (0.9, 0.99)), ("weight_decay", 0.0)):
        before, group[name] = group[name], value
        with pytest.raises(ValueError, match=f"CapturedStep: the optimizer's {name} must stay as captured, got"):
            graph.expect_settings(optimizer, captured)
        group[name] = before
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    with pytest.raises(ValueError, match="CapturedStep: optimizer must have the 1 groups of the capture, got 2"):
        graph.expect_settings(optimizer, captured)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test_fully_shard_with_recompute(one_process, layers, dtype):
    """One layer a block after its weights have come back; several where they stay. In bf16 the fp32 parts first."""
    from torch.distributed.fsdp import fully_shard

    config = with_connections(make_config(), recompute=True, recompute_layers=layers)
    wanted = run(config, dtype)
    model = make_model(config, dtype=dtype)
    small = [m for m in model.modules() if isinstance(m, (HyperConnection, LearnedHead)) and dtype is BF16]
    for module in small:
        fully_shard(module, mesh=one_process, reshard_after_forward=False)
    norms = [model.layers[0].mlp_norm]  # of its own, it has hooks, which bring its weight
    for module in (*norms, model.embedding, *model.layers, model.output, model):
        fully_shard(module, mesh=one_process, reshard_after_forward=layers == 1)
    found = gradients(model, *make_tokens(config))
    assert_same_bits(wanted, {k: g if k == "loss" else g.full_tensor() for k, g in found.items()})


def test_recompute_of_weights_that_are_gone(one_process):
    """Blocks of several layers whose weights were freed after the forward."""
    from torch.distributed.fsdp import fully_shard

    config = with_connections(make_config(), recompute=True, recompute_layers=2)
    model = make_model(config, dtype=FP32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=one_process)
    with pytest.raises(RuntimeError, match="has no memory when the block is replayed. Of a parameter of fully_shard"):
        gradients(model, *make_tokens(config))
