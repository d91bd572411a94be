"""RecomputeManager: discarded outputs, one replay in the forward's order, restored in place; and its guards."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint

from cute_kernels import linear
from cute_kernels.nn import RecomputeManager


def double(x):
    return 2 * x


def transposed(x):
    return x.t().contiguous()


def nbytes(t):
    return t.untyped_storage().nbytes()


def block(manager, x, *functions):
    """(all outputs, the last made of its predecessor by an operator that stays)."""
    outputs = []
    for function in functions:
        x = manager.checkpoint(function, x)
        outputs.append(x)
    return outputs, x.sin()


def test_outputs_are_discarded_and_restored_in_place():
    """Between the block's end and its backward they have no memory; then the same storage objects hold the same data,
    views and what autograd saved included, and no version counter has moved."""
    x = torch.randn(8, 8, requires_grad=True)
    manager = RecomputeManager()
    outputs, end = block(manager, x, torch.sin, torch.exp)
    view, storages = outputs[0].view(64), [t.untyped_storage()._cdata for t in outputs]
    wanted, versions = [t.detach().clone() for t in outputs], [t._version for t in outputs]
    assert all(nbytes(t) == 256 for t in outputs)
    manager.end_block(end)
    assert all(nbytes(t) == 0 for t in outputs) and nbytes(end) == 256
    end.sum().backward()
    assert [t.untyped_storage()._cdata for t in outputs] == storages and [t._version for t in outputs] == versions
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
    assert torch.equal(view, wanted[0].view(64))
    other = x.detach().clone().requires_grad_()
    other.sin().exp().sin().sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_replays_run_in_the_order_of_the_forward():
    """Once each, from one hook, each after what it reads has been restored."""
    calls = []

    def step(name):
        def function(x):
            calls.append((name, bool(nbytes(x)), x.detach().sum().item()))
            return x + 1

        return function

    x = torch.zeros(4, requires_grad=True)
    manager = RecomputeManager()
    _, end = block(manager, x, step("a"), step("b"), step("c"))
    manager.end_block(end)
    forward = list(calls)
    assert forward == [("a", True, 0.0), ("b", True, 4.0), ("c", True, 8.0)]
    end.sum().backward()
    assert calls == forward * 2


def test_functions_run_without_a_graph_at_first():
    modes = []

    def function(x):
        modes.append(torch.is_grad_enabled())
        return x * x

    x = torch.ones(4, requires_grad=True)
    manager = RecomputeManager()
    _, end = block(manager, x, function)
    manager.end_block(end)
    end.sum().backward()
    assert modes == [False, True]


def test_blocks_replay_one_after_the_other():
    """The last block first; a block's memory is back only from its own hook on."""
    seen = []
    x = torch.randn(16, requires_grad=True)
    first, second = RecomputeManager(), RecomputeManager()
    outputs, middle = block(first, x, torch.sin)
    first.end_block(middle)
    more, end = block(second, middle, torch.exp)
    second.end_block(end)
    middle.register_hook(lambda g: seen.append((nbytes(outputs[0]), nbytes(more[0]))))
    more[0].register_hook(lambda g: seen.append((nbytes(outputs[0]), nbytes(more[0]))))
    end.sum().backward()
    assert seen == [(0, 64), (64, 64)]


def test_what_a_block_ends_in_is_kept():
    """The graph of a checkpoint is still made again; a refill is left out."""
    x = torch.randn(16, requires_grad=True)
    manager = RecomputeManager()
    y = manager.checkpoint(torch.sin, x)
    end = manager.checkpoint(torch.exp, y)
    manager.end_block(end)
    assert nbytes(y) == 0 and nbytes(end) == 64
    end.sum().backward()
    assert torch.allclose(x.grad, x.detach().cos() * x.detach().sin().exp())

    manager = RecomputeManager()  # its replay does not undo what is done to it after the block
    end = manager.checkpoint(torch.exp, x * 1)
    manager.end_block(end)
    wanted = 2 * end.detach()
    end.mul_(2)
    end.sum().backward()
    assert torch.equal(end, wanted)

    manager, refills = RecomputeManager(), []
    end = x.sin()
    manager.discard((end,), lambda out: refills.append(out))
    manager.end_block(end)
    end.sum().backward()
    assert not refills and nbytes(end) == 64


def test_a_discarded_output_of_an_operator_with_a_graph():
    """``refill`` writes to the place in memory; autograd does not count it as a modification."""
    x = torch.randn(16, requires_grad=True)
    manager = RecomputeManager()
    y = x.exp()  # its backward reads y
    manager.discard((y,), lambda out: torch.exp(x.detach(), out=out))
    end = y.sin()  # so does this
    manager.end_block(end)
    assert nbytes(y) == 0
    end.sum().backward()
    assert torch.allclose(x.grad, x.detach().exp().cos() * x.detach().exp()) and y._version == 0


def test_mixed_arguments_and_several_outputs():
    """Tensors that do and do not require grad, among what is none: these get no gradient."""

    def function(scale, x, options, index, y, nothing):
        assert options == {"shift": 3.0} and nothing is None
        return (scale * x + options["shift"], y[index])

    x, y = torch.randn(4, requires_grad=True), torch.randn(6, requires_grad=True)
    index = torch.tensor([0, 2, 4, 4])
    manager = RecomputeManager()
    a, b = manager.checkpoint(function, 2.0, x, {"shift": 3.0}, index, y, None)
    end = (a * b).sum()
    node = a.grad_fn
    manager.end_block(end)
    end.backward()
    expected = torch.autograd.grad(((2 * x + 3) * y[index]).sum(), (x, y))
    assert torch.equal(x.grad, expected[0]) and torch.equal(y.grad, expected[1])
    assert [next_function is None for next_function, _ in node.next_functions] == [False, True, False]  # x, index, y


def test_gradients_keep_their_layout():
    """The order of sums on GPUs follows it: those before the checkpoint would have other bits."""
    strides = []
    for checkpoints in (False, True):
        x = torch.randn(4, 6, requires_grad=True)
        h = x * 1
        h.register_hook(lambda g: strides.append(g.stride()))
        manager = RecomputeManager()
        y = manager.checkpoint(transposed, h) if checkpoints else transposed(h)
        end = y.sin()
        if checkpoints:
            manager.end_block(end)
        end.sum().backward()
    assert strides[0] == strides[1] == (1, 4)


def test_outputs_that_nobody_uses():
    x = torch.randn(4, requires_grad=True)
    manager = RecomputeManager()
    a, _ = manager.checkpoint(lambda x: (x.sin(), x.exp()), x)
    end = a * 1
    manager.end_block(end)
    end.sum().backward()
    assert torch.allclose(x.grad, x.detach().cos())


def test_parameters_that_the_function_reaches_by_itself():
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(2, 8)
    manager = RecomputeManager()
    h = torch.nn.Linear(8, 8)(x)
    end = manager.checkpoint(layer, h).sin()
    manager.end_block(end)
    end.sum().backward()
    found = layer.weight.grad.clone()
    layer.zero_grad()
    layer(h.detach()).sin().sum().backward()
    assert torch.equal(found, layer.weight.grad)


def test_parameters_that_nobody_can_ask_for():
    """A backward that was told which gradients to find gives no other tensor one, and none that is not there."""
    layer, h = torch.nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    for differentiate in (
        lambda end: torch.autograd.grad(end, h),
        lambda end: torch.autograd.grad(end, [h, layer.weight], allow_unused=True),
        lambda end: end.backward(inputs=[h, layer.weight]),
    ):
        manager = RecomputeManager()
        end = manager.checkpoint(layer, h).sin().sum()
        manager.end_block(end)
        with pytest.raises(RuntimeError, match="reaches parameters by itself, whose gradients torch.autograd.grad"):
            differentiate(end)
        assert layer.weight.grad is None and h.grad is None
    manager = RecomputeManager()
    end = manager.checkpoint(torch.nn.functional.linear, h, layer.weight).sin().sum()
    manager.end_block(end)
    found = torch.autograd.grad(end, layer.weight)
    wanted = torch.autograd.grad(torch.nn.functional.linear(h, layer.weight).sin().sum(), layer.weight)
    assert torch.equal(*found, *wanted)


def test_parameters_behind_arguments_that_are_frozen():
    """Without a gradient to pass on the checkpoint would be no part of the graph: it runs as it is."""
    layer, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    manager = RecomputeManager()
    y = manager.checkpoint(layer, x)
    end = y.sin()
    manager.end_block(end)
    end.sum().backward()
    found = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).sin().sum().backward()
    assert torch.equal(found, layer.weight.grad) and nbytes(y) == 64


def test_main_grad_of_an_argument():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.main_grad = weight.main_grad
            ctx.save_for_backward(x)
            return x * weight

        @staticmethod
        def backward(ctx, dy):
            ctx.main_grad += (dy * ctx.saved_tensors[0]).sum()
            return dy, None

    weight = torch.nn.Parameter(torch.ones(()))
    weight.main_grad = torch.full((), 7.0)
    x = torch.ones(4, requires_grad=True)
    manager = RecomputeManager()
    end = manager.checkpoint(Scale.apply, x, weight) * 1
    manager.end_block(end)
    end.sum().backward()
    assert weight.grad is None and weight.main_grad == 11.0


def test_main_grad_of_an_argument_that_nobody_asked_for():
    """It stays as it is; what asks for it later, of the same forward, adds to it."""
    x, weight = torch.randn(4, 8).bfloat16(), torch.nn.Parameter(torch.randn(8, 8).bfloat16())
    weight.main_grad = torch.zeros(8, 8)
    h = x.clone().requires_grad_()
    for asked, changes in (("argument", False), ("output", False), ("all", True)):
        weight.main_grad.zero_()
        manager = RecomputeManager()
        y = manager.checkpoint(linear, h * 1, weight)
        end = y.sin().sum()
        manager.end_block(end)
        if asked == "argument":
            torch.autograd.grad(end, h)
        else:
            torch.autograd.grad(end, y, retain_graph=True)
        if asked == "all":
            end.backward()
        assert bool(weight.main_grad.any()) == changes, asked


def test_a_main_grad_of_an_argument_beside_a_tensor_hook_is_refused():
    """As without recompute; without main_grad the hook sees the gradient."""
    x, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.nn.Parameter(torch.randn(8, 8).bfloat16())
    weight.main_grad, seen = torch.zeros(8, 8), []
    handle = weight.register_hook(seen.append)

    def end():
        manager = RecomputeManager()
        end = manager.checkpoint(linear, x * 1, weight).sin().sum()
        manager.end_block(end)
        return end

    with pytest.raises(ValueError, match="^linear: weight.main_grad must be of a parameter without tensor hooks"):
        end().backward()
    assert not seen and not weight.main_grad.any()
    handle.remove()
    end().backward()
    assert weight.main_grad.any() and weight.grad is None
    weight.main_grad = None
    weight.register_hook(seen.append)
    end().backward()
    assert torch.equal(seen[0], weight.grad)


def test_random_numbers_are_forked_and_restored():
    """The replay sees the forward's; whoever draws after the backward sees what they would have seen."""
    x = torch.randn(64, requires_grad=True)
    torch.manual_seed(1)
    manager = RecomputeManager()
    y = manager.checkpoint(torch.nn.functional.dropout, x, 0.5)
    forward = y.detach().clone()
    end = y * 1
    manager.end_block(end)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    end.sum().backward()
    assert torch.equal(y, forward) and torch.equal(x.grad, 2.0 * (forward != 0))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_hook_tensor_without_grad_is_an_error_and_loses_nothing():
    manager = RecomputeManager()
    y = manager.checkpoint(torch.sin, torch.ones(4, requires_grad=True))
    with pytest.raises(ValueError, match="end_block: hook_tensor must require grad, or the discarded outputs would be"):
        manager.end_block(y.detach())
    with pytest.raises(TypeError, match="hook_tensor must be a torch.Tensor, got NoneType"):
        manager.end_block(None)
    assert nbytes(y) == 16 and y.grad_fn is not None
    manager.end_block(y * 1)
    assert nbytes(y) == 0


def test_nothing_requires_grad():
    """Frozen inputs of frozen functions: nothing is discarded, since nothing is kept for a backward."""
    manager = RecomputeManager()
    y = manager.checkpoint(torch.sin, torch.ones(4))
    x = torch.ones(4, requires_grad=True)
    manager.end_block(x * y)
    assert nbytes(y) == 16


def test_a_second_backward():
    """An operator's own graph survives it, a checkpoint's does not, and says so."""
    x = torch.randn(4, requires_grad=True)
    manager = RecomputeManager()
    refills = []
    y = x.exp()
    manager.discard((y,), lambda out: refills.append(torch.exp(x.detach(), out=out)))
    end = y.sin()
    manager.end_block(end)
    end.sum().backward(retain_graph=True)
    first = x.grad.clone()
    end.sum().backward()
    assert torch.equal(x.grad, 2 * first) and len(refills) == 1

    manager = RecomputeManager()
    end = manager.checkpoint(torch.sin, x) * 1
    manager.end_block(end)
    end.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward of one forward, which recompute does not support"):
        end.sum().backward()


def test_a_second_derivative():
    x = torch.randn(4, requires_grad=True)
    manager = RecomputeManager()
    end = manager.checkpoint(torch.sin, x) * 1
    manager.end_block(end)
    with pytest.raises(RuntimeError, match="Checkpoint has no second derivative, got create_graph=True"):
        torch.autograd.grad(end.sum(), x, create_graph=True)


@pytest.mark.parametrize("fails", ["checkpoint", "refill"])
def test_a_replay_that_fails(fails):
    """For want of memory, say. The next backward goes on where it stopped."""
    calls = []

    def runs_out(name, function):
        def called(*args, **options):
            calls.append(name)
            if name == fails and calls.count(name) == (2 if name == "checkpoint" else 1):
                raise MemoryError
            return function(*args, **options)

        return called

    x = torch.randn(16, requires_grad=True)
    manager = RecomputeManager()
    first = manager.checkpoint(runs_out("first", torch.sin), x)
    second = manager.checkpoint(runs_out("checkpoint", torch.cos), first)
    third = second.exp()
    refill = runs_out("refill", torch.exp)
    manager.discard((third,), lambda out: refill(second.detach(), out=out))
    end = first * second * third
    manager.end_block(end)
    with pytest.raises(MemoryError):
        end.sum().backward(retain_graph=True)
    end.sum().backward()
    assert calls.count("first") == 2
    found, x.grad = x.grad, None
    (x.sin() * x.sin().cos() * x.sin().cos().exp()).sum().backward()
    assert torch.allclose(found, x.grad)


def test_a_backward_without_an_end():
    y = RecomputeManager().checkpoint(torch.sin, torch.ones(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="end_block was not called before the backward"):
        y.sum().backward()


def test_a_manager_is_of_one_block():
    x = torch.ones(4, requires_grad=True)
    manager = RecomputeManager()
    end = manager.checkpoint(torch.sin, x) * 1
    manager.end_block(end)
    for name, call in (
        ("checkpoint", lambda: manager.checkpoint(torch.sin, x)),
        ("discard", lambda: manager.discard((end,), double)),
        ("end_block", lambda: manager.end_block(end)),
    ):
        with pytest.raises(RuntimeError, match=f"{name} after end_block; a new block takes a new manager"):
            call()


def test_an_input_that_was_modified_in_place():
    """Its new value would give other gradients without a word."""
    x, c = torch.ones(4, requires_grad=True), torch.ones(4)
    manager = RecomputeManager()
    end = manager.checkpoint(torch.mul, x, c) * 1
    manager.end_block(end)
    c.add_(1)
    with pytest.raises(RuntimeError, match="checkpoint: tensor argument 1 was modified in place after the forward"):
        end.sum().backward()


def test_what_a_refill_reads_and_autograd_does_not_keep():
    x, c = torch.ones(4, requires_grad=True), torch.ones(4)
    for spoil, message in ((lambda: c.add_(1), "scale was modified in place"), (lambda: c.clone().add_(1), None)):
        manager = RecomputeManager()
        y = x + c
        manager.discard((y,), lambda out: torch.add(x.detach(), c, out=out), {"x": x, "scale": c, "none": None})
        end = y.sin()
        manager.end_block(end)
        spoil()
        with pytest.raises(RuntimeError, match=message) if message else contextlib.nullcontext():
            end.sum().backward()


def test_an_input_that_does_not_count_its_versions():
    with torch.inference_mode():
        t = torch.ones(4)
    x = torch.ones(4, requires_grad=True)
    manager = RecomputeManager()
    end = manager.checkpoint(torch.add, x, t) * 1
    manager.end_block(end)
    end.sum().backward()
    assert torch.equal(x.grad, torch.ones(4))


def test_an_input_without_memory():
    """As of a parameter that fully_shard has freed."""
    x, c = torch.ones(4, requires_grad=True), torch.ones(4)
    manager = RecomputeManager()
    end = manager.checkpoint(torch.mul, x, c) * 1
    manager.end_block(end)
    c.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="tensor argument 1 has no memory when the block is replayed"):
        end.sum().backward()


def test_an_output_that_was_modified_in_place():
    """A replay would write what it was before, and nobody would know."""
    x = torch.randn(4, requires_grad=True)
    for makes in (
        lambda manager: manager.checkpoint(torch.cos, x),
        lambda manager: (y := x.cos(), manager.discard((y,), lambda out: torch.cos(x.detach(), out=out)))[0],
    ):
        manager = RecomputeManager()
        y = makes(manager)
        end = y.mul_(2).sin()
        with pytest.raises(RuntimeError, match="a discarded output was modified in place; its replay would undo that"):
            manager.end_block(end)


@pytest.mark.parametrize(
    "function, error, got",
    [
        (lambda x: [x.sin()], TypeError, "return a tensor or a tuple of tensors, got list"),
        (lambda x: (x.sin(), None), TypeError, "return a tensor or a tuple of tensors, got NoneType"),
        (lambda x: x.sum().expand(4), ValueError, "return tensors in memory of their own, got elements that share"),
        (lambda x: torch.complex(x, x).conj(), ValueError, "return tensors in memory of their own, got numbers that"),
        (lambda x: torch.complex(x, x).conj().imag, ValueError, "return tensors in memory of their own, got numbers"),
    ],
    ids=["list", "None", "expanded", "conjugated", "negated"],
)
def test_results_that_cannot_be_restored(function, error, got):
    with pytest.raises(error, match=f"checkpoint: function must {got}"):
        RecomputeManager().checkpoint(function, torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("function", [lambda x: x.view(2, 2), lambda x: x], ids=["view", "itself"])
def test_a_view_of_an_argument_is_refused(function):
    """Its memory is the argument's, which the replay has to find."""
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match="checkpoint: function must return tensors in memory of their own, got a view"):
        RecomputeManager().checkpoint(function, x * 1)


def test_a_view_of_what_an_argument_holds_is_refused():
    x, h = torch.ones(4, requires_grad=True), torch.ones(4)
    for holder, function in (
        ({"h": h}, lambda x, d: (x.sin(), d["h"].view(2, 2))),
        ([h], lambda x, d: (x.sin(), d[0])),
    ):
        with pytest.raises(ValueError, match="return tensors in memory of their own, got a view of an argument"):
            RecomputeManager().checkpoint(function, x * 1, holder)


def test_what_an_argument_holds_may_not_require_grad():
    x = torch.ones(4, requires_grad=True)
    for holder, function in (({"h": x.sin()}, lambda x, d: x * d["h"]), ([x], lambda x, d: x * d[0])):
        with pytest.raises(ValueError, match="^checkpoint: args must hold no tensor that requires grad in a list, tup"):
            RecomputeManager().checkpoint(function, x * 1, holder)


def test_what_an_argument_holds_may_not_change():
    x, h = torch.ones(4, requires_grad=True), torch.ones(4)
    manager = RecomputeManager()
    y = manager.checkpoint(lambda x, d: x * d["h"], x * 1, {"h": h})
    end = y.sin()
    manager.end_block(end)
    h.add_(1)
    with pytest.raises(RuntimeError, match="tensor argument 1 was modified in place after the forward"):
        end.sum().backward()


def test_the_replay_runs_under_the_forward_s_autocast():
    linear = torch.nn.Linear(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    found = []
    for recompute in (False, True):
        linear.zero_grad()
        x.grad = None
        manager = RecomputeManager()
        with torch.autocast("cpu", torch.bfloat16):
            y = manager.checkpoint(linear, x) if recompute else linear(x)
            end = y.float().sin()
            if recompute:
                manager.end_block(end)
        end.sum().backward()
        found.append((y.detach().clone(), x.grad, linear.weight.grad.clone()))
    assert found[0][0].dtype is torch.bfloat16
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_checkpoint_beneath_other_hooks_is_found():
    """Torch shows the topmost hooks alone; those of others stay where they were."""

    def function(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            with pytest.raises(RuntimeError, match="inside of torch.utils.checkpoint: use one of them"):
                RecomputeManager()
            x = x.sin()
        return x.exp()

    packed, x = [], torch.ones(4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert packed and torch.equal(x.grad, (x.sin().exp() * x.cos()).detach())


def test_recompute_inside_of_torch_s_checkpoint_is_refused():
    def function(x):
        manager = RecomputeManager()
        end = manager.checkpoint(torch.sin, x).exp()
        if end.requires_grad:
            manager.end_block(end)
        return end

    x, outside = torch.ones(4, requires_grad=True), RecomputeManager()
    for inner in (function, lambda x: outside.checkpoint(torch.sin, x), lambda x: outside.discard((x,), double)):
        with pytest.raises(RuntimeError, match="recompute inside of torch.utils.checkpoint: use one of them"):
            torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)


def test_nothing_outlives_the_backward():
    x = torch.randn(16, requires_grad=True)
    manager = RecomputeManager()
    kept = torch.randn(16)
    reference = weakref.ref(kept)
    end = manager.checkpoint(torch.mul, x, kept).sin()
    manager.end_block(end)
    end.sum().backward()
    del kept, end
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("ends_in_the_joined", [False, True])
def test_a_refill_makes_what_joined_it(ends_in_the_joined):
    """One call for both; what the block ends in is left as it is, also where it was modified since."""
    calls = []

    def refill(first, second):
        calls.append((first is None, second is None))
        first.copy_(x.detach().sin())
        if second is not None:
            second.copy_(x.detach().cos())

    x = torch.randn(16, requires_grad=True)
    manager = RecomputeManager()
    first, second = x.sin(), x.cos()
    assert manager.entry_of(first) is None
    manager.discard((first,), refill)
    assert manager.entry_of(first).refill is refill and manager.entry_of(second) is None
    manager.entry_of(first).join((second,))
    assert manager.entry_of(second) is None
    end = second if ends_in_the_joined else first * second
    wanted = first.detach().clone(), second.detach().clone()
    manager.end_block(end)
    assert nbytes(first) == 0 and nbytes(second) == (64 if ends_in_the_joined else 0)
    if ends_in_the_joined:
        end.mul_(2)
    end.sum().backward()
    assert calls == [(False, ends_in_the_joined)]
    assert torch.equal(first, wanted[0])
    assert torch.equal(second, wanted[1] * 2 if ends_in_the_joined else wanted[1])


def test_what_joined_may_not_change():
    x = torch.randn(16, requires_grad=True)
    manager = RecomputeManager()
    y, z = x.sin(), x.cos()
    manager.discard((y,), print)
    manager.entry_of(y).join((z,))
    z.detach().add_(1)
    with pytest.raises(RuntimeError, match="a discarded output was modified in place"):
        manager.end_block(y * z)


def test_arguments_of_other_types():
    manager, x = RecomputeManager(), torch.ones(4, requires_grad=True)
    with pytest.raises(TypeError, match="^checkpoint: function must be callable, got NoneType$"):
        manager.checkpoint(None, x)
    with pytest.raises(TypeError, match="^discard: outputs must be a tuple of tensors, got Tensor$"):
        manager.discard(x, double)
