"""MHCTransformer on the references, and on the path of the kernels (fakes)."""

import contextlib
import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from cute_kernels import UnsupportedDeviceError, batch_invariant, check_invariance, mhc
from cute_kernels.nn import MHCTransformer, RecomputeManager, ResidualOffload, transformer
from tests.fakes import fake_gpu, fake_kernels
from tests.gemm import cases as gemm_cases
from tests.log_prob import cases as log_prob_cases
from tests.marks import first_of
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


def run(config, dtype=BF16):
    return gradients(make_model(config, dtype=dtype), *make_tokens(config))


@pytest.fixture(params=[False, True], ids=["references", "kernels"])
def path(request):
    """The references, or all above the kernels with plain torch in their place."""
    if request.param:
        with fake_kernels():
            yield
    else:
        yield


@pytest.mark.parametrize("streams", [None, 4])
def test_a_model_from_the_meta_device(streams):
    """The table of the rotary embedding, which no state_dict has, is made anew."""
    config = make_config(streams=streams)
    model, (tokens, _) = make_model(config), make_tokens(config)
    for move in (
        lambda made: made.to_empty(device="cpu").load_state_dict(model.state_dict()),
        lambda made: made.to(BF16).to_empty(device="cpu").load_state_dict(model.state_dict()),
        lambda made: (made.load_state_dict(model.state_dict(), assign=True), made.to("cpu")),
        lambda made: (made.load_state_dict(model.state_dict(), assign=True), made.to("cpu", BF16)),
    ):
        with torch.device("meta"):
            made = MHCTransformer(config, dtype=BF16)
        assert made.to(BF16).block.rotary.cos.is_meta and made.to("meta").block.rotary.cos.is_meta
        move(made)
        assert torch.equal(made(tokens), model(tokens))
    assert made.block.rotary.cos.dtype is FP32 and "cos" not in "".join(made.state_dict())


@pytest.mark.parametrize("load", ["whole", "by modules", "by hand", "inference mode"])
@pytest.mark.parametrize("streams", [None, 4])
def test_a_model_that_is_assigned_from_the_meta_device(streams, load):
    """Nothing moves it: its table is made when the model is loaded or first called."""
    config = make_config(streams=streams)
    model, (tokens, targets) = make_model(config), make_tokens(config)
    with torch.device("meta"):
        made = MHCTransformer(config, dtype=BF16)
    if load == "whole":
        made.load_state_dict(model.state_dict(), assign=True)
        assert not made.block.rotary.cos.is_meta and not made.block.rotary.sin.is_meta
    elif load == "inference mode":
        with torch.inference_mode():
            made.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        assert not made.block.rotary.cos.is_inference()
        return
    else:
        for own, part in zip(made.modules(), model.modules(), strict=True):
            if load == "by hand":
                for key, parameter in part.named_parameters(recurse=False):
                    setattr(own, key, torch.nn.Parameter(parameter.detach().clone()))
            elif not list(part.children()):
                own.load_state_dict(part.state_dict(), assign=True)
        assert made.block.rotary.cos.is_meta
    with torch.inference_mode():
        assert torch.equal(made(tokens), model(tokens))
    assert_same_bits(gradients(made, tokens, targets), gradients(model, tokens, targets))
    copied = copy.deepcopy(made).to(torch.float16).to(BF16)
    assert copied.block.rotary.cos.dtype is FP32 and torch.equal(copied.block.rotary.cos, model.block.rotary.cos)
    assert list(made.state_dict()) == list(model.state_dict())


def test_an_assigned_model_is_compiled():
    torch._dynamo.reset()
    config = make_config(streams=None)
    model, (tokens, _) = make_model(config), make_tokens(config)
    with torch.device("meta"):
        made = MHCTransformer(config, dtype=BF16)
    made.load_state_dict(model.state_dict(), assign=True)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=2e-2, atol=2e-2)


def test_an_emptied_model_has_its_table():
    model = make_model(make_config())
    cos, rotary = model.block.rotary.cos, model.block.rotary
    assert rotary.to(BF16).cos is cos
    with mock.patch.object(torch, "empty_like", lambda t, device: torch.full(t.shape, 7.0, dtype=t.dtype)):
        model.to_empty(device="cpu")
    assert rotary.cos is not cos and torch.equal(rotary.cos, cos) and rotary.sin.abs().max() <= 1


def test_the_table_is_fp32_whatever_the_default_is():
    torch.set_default_dtype(BF16)
    try:
        model = MHCTransformer(make_config())
    finally:
        torch.set_default_dtype(FP32)
    assert all(buffer.dtype is FP32 for buffer in model.buffers())


def test_an_eps_that_is_an_int():
    config = replace(make_config(layers=1), norm_eps=1)
    assert_same_bits(run(config), run(replace(config, norm_eps=1.0)))


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_autocast_of_either_dtype(streams, dtype):
    config = make_config(streams=streams)
    model, (tokens, targets) = make_model(config), make_tokens(config)
    with torch.autocast("cpu", dtype):
        loss = model.loss(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, model.loss(tokens, targets), rtol=1e-2, atol=1e-2)


# The loss


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_loss_of_the_head(dtype, path):
    """Against the mean of fp64 log-probabilities, within the bounds of linear_log_prob; gradients, too."""
    config = make_config(vocab=200)
    head, case = make_model(config, dtype=dtype).output, log_prob_cases.Case(32, 200, 32, entropy=False)
    inputs = log_prob_cases.make_inputs(case, torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.weight.copy_(inputs.weight)
    count = (inputs.target != -100).sum()
    inputs.g = torch.full(inputs.g.shape, -1.0, dtype=torch.float64) / count
    exact = log_prob_cases.oracle(case, inputs)
    x = inputs.x.detach().unflatten(0, (2, 16)).requires_grad_()
    loss = head(x, inputs.target.view(2, 16))
    loss.backward()
    error = (loss.detach().double() + exact.values["log_prob"].sum() / count).abs()
    assert loss.dtype is FP32 and error <= exact.bounds["log_prob"].sum() / count + 8 * gemm_cases.FP32_EPS * loss.abs()
    gemm_cases.check({"dx": x.grad, "dw": head.weight.grad.to(BF16)}, exact.gradients)


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize("hidden", [32, 28], ids=["log_prob", "logits"])
def test_the_loss_is_the_cross_entropy_of_the_logits(streams, hidden, path):
    """Gradients, too, which round otherwise. Rows of 56 bytes are none that linear_log_prob reads."""
    config = make_config(hidden=hidden, heads=2, streams=streams)
    model, (tokens, targets) = make_model(config), make_tokens(config)
    targets[:, 3::5] = -100

    def of_logits(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    found = gradients(model, tokens, targets)
    exact = F.cross_entropy(model(tokens).flatten(0, 1).double(), targets.flatten())
    torch.testing.assert_close(found["loss"].double(), exact, rtol=1e-6, atol=0)
    with mock.patch.object(model, "loss", of_logits):
        errors = relative_errors(found, gradients(model, tokens, targets))
    assert max(errors.values()) < 0.05, errors


@pytest.mark.parametrize("hidden", [32, 28], ids=["log_prob", "logits"])
def test_a_loss_of_no_target(hidden, path):
    """NaN, as torch's, and no gradient; the same where a target is no token."""
    config = make_config(hidden=hidden, heads=2, layers=1)
    tokens, targets = make_tokens(config)
    found = gradients(make_model(config), tokens, torch.full_like(targets, -100))
    assert found.pop("loss").isnan() and not any(g.any() for g in found.values())
    targets[0, 3] = config.vocab_size
    found = gradients(make_model(config), tokens, targets)
    assert found.pop("loss").isnan() and all(g.isfinite().all() for g in found.values())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_loss_adds_to_main_grad(dtype, path):
    config = make_config(layers=1)
    batch, model = make_tokens(config), make_model(config, dtype=dtype)
    wanted = gradients(model, *batch)["output.weight"]
    weight = model.output.weight
    weight.grad, weight.main_grad = None, torch.zeros(weight.shape)
    for _ in range(2):
        model.loss(*batch).backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 2.0 * wanted.float(), rtol=2**-7, atol=1e-6)


def test_training_makes_no_logits():
    """Neither a product in fp32 nor torch's cross-entropy."""
    config = make_config()
    with fake_kernels() as jobs, mock.patch.object(F, "cross_entropy", side_effect=AssertionError):
        run(config)
    products = [args[1] for job, args in jobs if job.__name__ == "gemm"]
    assert products and {spec.out for spec in products} == {BF16}
    assert {job.__name__ for job, _ in jobs} >= {"log_prob_statistics", "log_prob", "log_prob_gradient"}


@pytest.mark.parametrize("streams", first_of([None, 4]))
def test_export(streams):
    config = make_config(streams=streams)
    model, (tokens, _) = make_model(config), make_tokens(config)
    exported = torch.export.export(model, (tokens,)).module()
    assert torch.equal(exported(tokens), model(tokens))


def test_recompute_on_the_meta_device():
    config = make_config(recompute=True)
    tokens, targets = (t.to("meta") for t in make_tokens(config))
    MHCTransformer(config, device="meta").loss(tokens, targets).backward()


@pytest.mark.parametrize("streams", [None, 1, 4])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_parameter_gets_a_gradient(streams, dtype, path):
    config = make_config(streams=streams)
    found = run(config, dtype)
    model = make_model(config, dtype=dtype)
    assert found["loss"].dtype is FP32
    for name, parameter in model.named_parameters():
        gradient = found[name]
        assert gradient.dtype == parameter.dtype and gradient.isfinite().all() and gradient.any(), name


@pytest.mark.parametrize("streams", [None, 4])
def test_kernels_path_is_the_references(streams):
    """Apart by the rounding of bf16 activations alone."""
    config = make_config(streams=streams)
    wanted = run(config, FP32)
    with fake_kernels() as jobs:
        ours = run(config, FP32)
    assert jobs
    errors = relative_errors(ours, wanted)
    assert max(errors.values()) < 0.1, errors


@pytest.mark.parametrize("streams", [None, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_the_checker_runs_strictly(streams):
    """Forward and backward call none of torch's operators that are not covered; bits: test_kernel_training.py."""
    config = make_config(streams=streams, layers=2)
    with fake_gpu(), batch_invariant("strict"):
        report = check_invariance(make_model(config), make_tokens(config)[0], transforms=())
    report.raise_if_failed()
    assert any(name.startswith("grad") for name in report.tensors), report.tensors


def test_the_backend_is_passed_on():
    """With backend="reference" no part of the model takes a kernel."""
    config = make_config(backend="reference", dropout_p=0.1)
    with fake_kernels() as jobs:
        found = run(config)
    assert not jobs
    assert_same_bits(found, run(replace(config, backend=None)))


@pytest.mark.parametrize("streams", [None, 4])
def test_it_learns(streams):
    config = make_config(streams=streams, layers=2)
    torch.manual_seed(0)
    model, batch = MHCTransformer(config), make_tokens(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("streams", [None, 4])
def test_a_token_does_not_see_the_next(streams):
    config = make_config(streams=streams)
    model, (tokens, _) = make_model(config), make_tokens(config)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab_size
    one, two = model(tokens), model(changed)
    assert torch.equal(one[:, :9], two[:, :9]) and not torch.equal(one[:, 9:], two[:, 9:])


def test_rotary_embedding_knows_distances_alone():
    """Scores of q and k depend on the difference of their positions; the norm of a head stays."""
    from cute_kernels.nn.attention import _rotate

    rotary = make_model(make_config(hidden=64, length=16)).block.rotary
    cos, sin = rotary(16)
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 16, 1, 16)
    rotated_q, rotated_k = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty(k.shape)
    _rotate(q, cos, sin, rotated_q)
    _rotate(k, cos, sin, rotated_k)
    scores = rotated_q[0, :, 0] @ rotated_k[0, :, 0].T
    for offset in range(-15, 16):
        diagonal = scores.diagonal(offset)
        assert torch.allclose(diagonal, diagonal[:1], atol=1e-4)
    assert torch.allclose(rotated_q.norm(dim=-1), q.norm(dim=-1))


def test_attention_is_the_formula():
    """Gradients of the one Function that splits and rotates, against torch's own operators in fp32."""
    from cute_kernels.nn.attention import _SplitRotated

    heads, kv_heads, size, length = 4, 2, 8, 6
    rotary = make_model(make_config(hidden=32, length=length)).block.rotary
    cos, sin = rotary(length)
    qkv = torch.randn(2, length, (heads + 2 * kv_heads) * size, requires_grad=True)
    ours = _SplitRotated.apply(qkv, cos, sin, heads, kv_heads)

    def rotated(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos[..., : size // 2] - b * sin, b * cos[..., : size // 2] + a * sin), -1)

    q, k, v = qkv.view(2, length, -1, size).split((heads, kv_heads, kv_heads), 2)
    theirs = [rotated(q), rotated(k), v]
    upstream = [torch.randn_like(t) for t in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, atol=1e-6)
    gradients = [torch.autograd.grad(outputs, qkv, upstream)[0] for outputs in (ours, theirs)]
    assert torch.allclose(*gradients, atol=1e-6)


def test_attention_is_ours():
    """In evaluation and training, also of a graph; on a Blackwell in evaluation."""
    config = make_config(hidden=256, layers=1, streams=None)
    model, (tokens, _) = make_model(config), make_tokens(config)
    wanted = model(tokens).detach()
    for arch, kernel in (("sm_90a", "forward_sm90"), ("sm_100a", "forward_sm100")):
        with fake_kernels(arch) as jobs, torch.no_grad():
            found = model(tokens)
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens)
            torch._dynamo.reset()
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)
        torch.testing.assert_close(compiled, wanted, atol=0.05, rtol=0.05)
        assert kernel in {builder.__name__ for builder, _ in jobs}
    with fake_kernels() as jobs:
        model(tokens).sum().backward()
    assert "backward_sm90" in {builder.__name__ for builder, _ in jobs}
    with fake_kernels("sm_100a"), pytest.raises(UnsupportedDeviceError, match="attention_backend='torch'"):
        model(tokens)


def test_attention_that_has_no_kernel():
    """On a GPU an error, before anything is computed by something else; on a CPU torch's."""
    config = replace(make_config(hidden=24, layers=1, streams=None), attention_backend=None)
    model, (tokens, _) = make_model(config), make_tokens(config)
    wanted = model(tokens).detach()
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with fake_kernels(), context, pytest.raises(ValueError, match="up to 256, or attention_backend 'torch', got 6"):
            model(tokens)
    by_torch = make_model(replace(config, attention_backend="torch"))
    for arch in ("sm_90a", "sm_100a"):
        with fake_kernels(arch) as jobs:
            found = by_torch(tokens)
            found.sum().backward()
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)
        assert not {builder.__name__ for builder, _ in jobs} & {"forward_sm90", "forward_sm100", "backward_sm90"}


def test_streams_exist_between_expand_and_head_alone():
    """Each once, whatever else there is; without hyper-connections neither."""
    for streams in (4, None):
        config = make_config(streams=streams, layers=3)
        model, (tokens, _) = make_model(config), make_tokens(config)
        shapes = []
        for layer in model.layers:
            layer.register_forward_hook(lambda module, args, out, shapes=shapes: shapes.append(tuple(out.shape)))
        with (
            mock.patch.object(mhc, "expand", wraps=mhc.expand) as expand,
            mock.patch.object(mhc, "head", wraps=mhc.head) as head,
        ):
            model(tokens)
        times = 0 if streams is None else 1
        assert expand.call_count == head.call_count == times
        assert shapes == [(2, 16, 32) if streams is None else (2, 16, 4, 32)] * 3


# Recompute and offload


@pytest.mark.parametrize("layers", [1, 3, 4, "optimal", None])
@pytest.mark.parametrize("name", ["deepseek_v4", "transformer_engine"])
def test_recompute_changes_no_bit(layers, name, path):
    config = with_connections(make_config(dropout_p=0.1), variant=name)
    assert_same_bits(run(config), run(with_connections(config, recompute=True, recompute_layers=layers)))


def test_recompute_with_main_grad(path):
    """For the norms on the kernels alone."""
    config = make_config()
    results = []
    for recompute in (False, True):
        model = make_model(with_connections(config, recompute=recompute))
        have = [(name, p) for name, p in model.named_parameters() if "norm" not in name and "embedding" not in name]
        for _, parameter in have:
            parameter.main_grad = torch.ones(parameter.shape)
        torch.manual_seed(2)
        model.loss(*make_tokens(config)).backward()
        assert not [name for name, parameter in have if parameter.grad is not None]
        results.append({name: p.main_grad for name, p in model.named_parameters() if hasattr(p, "main_grad")})
    assert_same_bits(*results)
    assert all((g != 1).any() for g in results[0].values())


def test_recompute_adds_to_no_main_grad_that_nobody_asked_for(path):
    config = with_connections(make_config(layers=2), recompute=True)
    model = make_model(config)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    h = torch.randn(2, 16, 32).to(BF16).requires_grad_()
    (found,) = torch.autograd.grad(model.block(h).sum(), h)
    assert found.any() and not [name for name, p in model.named_parameters() if p.main_grad.any()]


@pytest.mark.parametrize(("layers", "expected"), [(1, 4), (3, 2), ("optimal", 2)])
def test_what_a_block_discards(layers, expected, path):
    """Two layer inputs, two norms' outputs and two residuals a layer, but for the last residual of a block."""
    config = with_connections(make_config(), recompute=True, recompute_layers=layers)
    size = config.hyper_connections.layers_per_block(4)
    released = []

    class Block(transformer.RecomputeManager):
        def end_block(self, hook_tensor):
            outputs = [t for discarded in self._discarded for t in discarded.outputs + discarded.joined]
            super().end_block(hook_tensor)
            released.append([tuple(t.shape[2:]) for t in outputs if t.untyped_storage().nbytes() == 0])
            assert hook_tensor.untyped_storage().nbytes() == hook_tensor.nbytes

    with mock.patch.object(transformer, "RecomputeManager", Block):
        run(config)
    assert len(released) == expected
    for i, shapes in enumerate(released):
        layers_here = min(size, 4 - i * size)
        assert shapes.count((32,)) == 4 * layers_here and shapes.count((4, 32)) == 2 * layers_here - 1


def test_kernels_keep_the_coefficients():
    """No projection and no Sinkhorn are replayed; an aggregation goes with the residual, but for a block's first."""
    config = with_connections(make_config(layers=2), recompute=True, recompute_layers=2)
    with fake_kernels():
        from cute_kernels.mhc import launch

        model, batch = make_model(config), make_tokens(config)
        loss = model.loss(*batch)
        names = ("projection_forward", "pre_forward", "aggregate_forward", "expand_combine_forward")
        with mock.patch.multiple(launch, **{name: mock.Mock(wraps=getattr(launch, name)) for name in names}):
            loss.backward()
            called = [getattr(launch, name) for name in names]
            calls = [mocked.call_count + mocked.function.call_count for mocked in called]
    assert calls == [0, 0, 1 + 1, 3]  # and once for the gradient of expand


def test_recompute_in_evaluation():
    """Without gradients, or where nothing requires any, nothing is discarded."""
    config = with_connections(make_config(), recompute=True)
    model, (tokens, _) = make_model(config), make_tokens(config)
    with torch.no_grad():
        expected = model(tokens)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(model(tokens), expected)
    model.layers[3].mlp.down.weight.requires_grad_()
    model(tokens).sum().backward()
    assert model.layers[3].mlp.down.weight.grad.any()


def test_recompute_of_frozen_layers():
    """The first layers frozen: their block does not require grad, and keeps its outputs."""
    config = make_config()
    results = []
    for recompute in (False, True):
        model = make_model(with_connections(config, recompute=recompute, recompute_layers=2 if recompute else None))
        for module in (model.embedding, *model.layers[:3]):
            module.requires_grad_(False)
        model.loss(*make_tokens(config)).backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert_same_bits(*results)


def test_offload_and_recompute_of_one_layer_are_refused():
    config = make_config()
    model = make_model(config)
    x, rotation = torch.ones(2, 16, 4, 32, dtype=BF16), model.block.rotary(16)
    with pytest.raises(ValueError, match="TransformerLayer: offload must be None with recompute"):
        model.layers[0](x, rotation, RecomputeManager(), ResidualOffload())
    for options, expected in (({"recompute": 1}, "a RecomputeManager"), ({"offload": True}, "a ResidualOffload")):
        (name,) = options
        with pytest.raises(TypeError, match=f"^TransformerLayer: {name} must be {expected} or None, got"):
            model.layers[0](x, rotation, **options)


def test_recompute_and_offload_of_one_stream_are_refused():
    model = make_model(make_config(streams=None))
    x, rotation = torch.ones(2, 16, 32, dtype=BF16), model.block.rotary(16)
    for options in ({"recompute": RecomputeManager()}, {"offload": ResidualOffload()}):
        (name,) = options
        with pytest.raises(ValueError, match=f"TransformerLayer: {name} must be None without hyper-connections, got"):
            model.layers[0](x, rotation, **options)


def test_offload_is_of_gpus():
    config = with_connections(make_config(), offload=True)
    model, batch = make_model(config), make_tokens(config)
    with pytest.raises(ValueError, match=r"x must be on a GPU \(set offload=False on the CPU\), got cpu"):
        model.loss(*batch)
    with torch.no_grad():
        assert model(batch[0]).isfinite().all()
    with pytest.raises(ValueError, match="x must be on a GPU"):
        ResidualOffload().keep(torch.ones(4), torch.ones(4, requires_grad=True))


def test_residuals_offloaded_inside_of_a_checkpoint_are_refused():
    """Its replay would read a residual whose copy is still on its way back."""
    offload, x = ResidualOffload(), torch.ones(4, requires_grad=True)

    def layer(x):
        out = 2.0 * x
        offload.keep(x, out)
        return out

    with pytest.raises(
        RuntimeError, match="ResidualOffload: offload inside of torch.utils.checkpoint: use one of them"
    ):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("token", [200, -1, 2**40])
def test_a_token_beyond_the_vocabulary(token):
    config = make_config(vocab=200)
    model = MHCTransformer(config)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    tokens[1, 2] = token
    wanted = rf"^MHCTransformer: tokens must be from 0 to 199 \(vocab_size 200\), got {token}$"
    with pytest.raises(ValueError, match=wanted):
        model(tokens)
    with pytest.raises(ValueError, match=wanted):
        model.loss(tokens, tokens)
