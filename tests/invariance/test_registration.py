"""Kernels under torch's operators, registered for the CPU: which calls they change, and that nothing is left."""

import itertools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from cute_kernels import UncoveredOperatorError, batch_invariant, declare_invariant, install, is_installed, uninstall
from cute_kernels.invariance import installation, operators, registration, scopes
from tests import fakes
from tests.invariance.cases import Product

OPS = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:batch_invariant. aten")


@pytest.fixture
def covered():
    with fakes.covered():
        yield


def is_refused() -> bool:
    try:
        torch.ones(2).cumprod(0)
    except UncoveredOperatorError:
        return True
    return False


# fmt: off
X, SQUARE, IMAGE = (3, 4), (4, 4), (1, 2, 6, 6)
REFUSED = {  # by name: shapes of float tensors, then other arguments
    "prod": (X,), "prod.dim_int": (X, 0), "cumprod": (X, 0), "cumprod_": (X, 0), "_logcumsumexp": (X, 0),
    "logcumsumexp": (X, 0),     "renorm": (X, 2, 0, 1.0), "addr": (X, (3,), (4,)), "addr_": (X, (3,), (4,)),
    "addbmm": (SQUARE, (2, 4, 4), (2, 4, 4)), "_addmm_activation": ((4,), SQUARE, SQUARE),
    "_cdist_forward": (X, X, 2.0, None),
    "_pdist_forward": (X,), "_euclidean_dist": (X, X), "multinomial": ((4,), 2), "native_dropout": (X, 0.5, True),
    "convolution": (IMAGE, (2, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "_convolution": (IMAGE, (2, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, False),
    "native_group_norm": (IMAGE, None, None, 1, 2, 36, 1, 1e-5),
    "native_batch_norm": (IMAGE, None, None, None, None, True, 0.1, 1e-5),
    "_native_batch_norm_legit.no_stats": (IMAGE, None, None, True, 0.1, 1e-5),
    "avg_pool2d": (IMAGE, [2, 2]), "_adaptive_avg_pool2d": (IMAGE, [2, 2]), "avg_pool3d": ((1, 2, 4, 4, 4), [2, 2, 2]),
    "upsample_linear1d": ((1, 2, 6), [9], False), "upsample_bilinear2d": (IMAGE, [9, 9], False),
    "upsample_bicubic2d": (IMAGE, [9, 9], False), "_upsample_bilinear2d_aa": (IMAGE, [9, 9], False),
    "grid_sampler_2d": (IMAGE, (1, 3, 3, 2), 0, 0, False),
    "col2im": ((1, 8, 25), [6, 6], [2, 2], [1, 1], [0, 0], [1, 1]),
    "reflection_pad1d_backward": ((1, 2, 8), (1, 2, 6), [1, 1]), "unfold_backward": ((5, 2), [6], 0, 2, 1),
    "replication_pad1d_backward": ((1, 2, 8), (1, 2, 6), [1, 1]),
    "linalg_inv_ex": (SQUARE,), "linalg_cholesky_ex": (SQUARE,), "linalg_qr": (SQUARE,), "linalg_lu": (SQUARE,),
    "linalg_matrix_exp": (SQUARE,), "linalg_eig": (SQUARE,),
    "linalg_householder_product": (SQUARE, (4,)), "_linalg_svd": (SQUARE,), "_linalg_det": (SQUARE,),
    "_linalg_eigh": (SQUARE,), "_linalg_slogdet": (SQUARE,), "_linalg_solve_ex": (SQUARE, SQUARE),
    "linalg_lu_factor_ex": (SQUARE,), "geqrf": (SQUARE,), "cholesky_inverse": (SQUARE,),
    "_fft_r2c": (X, [1], 0, True), "segment_reduce": ((4,), "sum"),
    "_weight_norm_interface": (X, (3, 1), 0), "_foreach_powsum.Scalar": ([X], 2),
    "_masked_softmax": (X, X, 1),
    "avg_pool2d_backward": (IMAGE[:2] + (3, 3), IMAGE, [2, 2], [2, 2], [0, 0], False, True, None),
    "_adaptive_avg_pool2d_backward": (IMAGE[:2] + (1, 1), IMAGE),
    "native_group_norm_backward": (IMAGE, IMAGE, (1, 1), (1, 1), None, 1, 2, 36, 1, [True, False, False]),
    "upsample_nearest1d_backward": ((1, 2, 6), [6], [1, 2, 3]),
    "upsample_bilinear2d_backward": (IMAGE, [6, 6], [1, 2, 3, 3], False),
    "replication_pad2d_backward": ((1, 2, 8, 8), IMAGE, [1, 1, 1, 1]),
    "reflection_pad2d_backward": ((1, 2, 8, 8), IMAGE, [1, 1, 1, 1]),
    "multi_margin_loss": (X, (3,)), "multilabel_margin_loss_forward": (X, X, 1),
    "_trilinear": (X, X, X, [], [], [], []),
}
# fmt: on


def tensors_of(arguments, make):
    for argument in arguments:
        if isinstance(argument, tuple):
            yield make(argument)
        elif isinstance(argument, list) and argument and isinstance(argument[0], tuple):
            yield [make(shape) for shape in argument]
        else:
            yield argument


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, covered):
    packet, _, overload = name.partition(".")
    if not hasattr(OPS, packet):
        pytest.skip("this torch has no such operator")
    op = getattr(getattr(OPS, packet), overload or "default")
    assert operators.treatment_of(op).kind == "refused"
    with batch_invariant(), pytest.raises(UncoveredOperatorError, match=rf"aten\.{packet}\."):
        op(*tensors_of(REFUSED[name], torch.ones))
    assert len(REFUSED) >= 60


def test_integers_pass(covered):
    """To integers, and without what makes an operator add up; numbers that torch wraps, too."""
    x, index = torch.arange(1, 5), torch.tensor([0, 1, 1])
    wanted = [x.prod(), x.cumprod(0), x.trace() if x.dim() == 2 else x.sum(), x.bincount(), index.bincount(), x // 2]
    with batch_invariant() as uncovered:
        found = [x.prod(), x.cumprod(0), x.trace() if x.dim() == 2 else x.sum(), x.bincount(), index.bincount(), x // 2]
        x.view(2, 2).trace(), x.nansum(), torch.sort(x), x.topk(2), x.cumsum(0), x.view(2, 2) @ x.view(2, 2)
        assert (x.float() // 2).tolist() == [0, 1, 1, 2]
        assert not F.mse_loss(x.float(), x.float(), reduction="none").any()
        assert torch.zeros(3).index_put_((index,), torch.ones(3)).tolist() == [1, 1, 0]
        with pytest.raises(UncoveredOperatorError, match="aten.bincount"):
            index.bincount(x.float()[:3])
    assert all(map(torch.equal, found, wanted)) and not uncovered


def test_each_overload_that_adds_up_has_a_kernel(covered):
    """Every overload that adds up and that the backend has at all has a kernel of ours; no other one has."""
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    elsewhere = {"scaled_dot_product_attention", *registration.TAKEN_APART}
    with batch_invariant():
        for op, treatment in operators.treatments().items():
            wanted = treatment.kind == "replaced" or (treatment.kind == "refused" and has_kernel(op.name(), "CPU"))
            ours = "/invariance/registration.py" in torch._C._dispatch_dump(op.name())
            assert ours == wanted or op._schema.name.removeprefix("aten::") in elsewhere, op


def test_uninstall_leaves_nothing(covered):
    names = ["aten::mm", "aten::prod", "aten::linear", "aten::sum.dim_IntList", "aten::addmm.out", "aten::addmm"]
    before = [torch._C._dispatch_dump(name) for name in names]
    for begin in (install, lambda: batch_invariant().__call__(lambda: None)()):
        begin()
        assert all("registration.py" in torch._C._dispatch_dump(name) for name in names)
        uninstall()
        assert [torch._C._dispatch_dump(name) for name in names] == before
    uninstall()


def test_install_holds_for_all_threads(covered):
    def elsewhere(function):
        found = []
        thread = threading.Thread(target=lambda: found.append(function()))
        thread.start()
        thread.join()
        return found[0]

    assert not is_installed() and not is_refused()
    install()
    assert is_installed() and is_refused() and elsewhere(is_refused)
    with batch_invariant("off"):
        assert not is_refused() and elsewhere(is_refused)
        with batch_invariant("strict"):
            assert is_refused()
    counter = install("warn")
    assert not is_refused() and counter == {"aten.cumprod.default": 1}
    with batch_invariant("strict"):
        assert is_refused() and not elsewhere(is_refused)
    assert counter.total() == 2
    uninstall()
    assert not is_installed() and not is_refused() and not elsewhere(is_refused)
    with batch_invariant():
        assert is_refused() and not elsewhere(is_refused)
        with pytest.raises(RuntimeError, match="uninstall: a block of batch_invariant is live"):
            uninstall()
    assert not is_refused()


@pytest.mark.parametrize("begin", [install, uninstall])
def test_not_inside_of_a_compiled_function(covered, begin):
    @torch.compile(backend="eager")
    def function(x):
        y = x + 1
        begin()
        return y

    message = f"{begin.__name__}: call it outside of a compiled function"
    if begin is uninstall:
        install()
    with pytest.raises(RuntimeError, match=message):
        function(torch.ones(2))
    assert is_installed() == (begin is uninstall)
    torch._dynamo.reset()


def test_a_backward(covered):
    """That a block starts is its own; one that starts later is torch's, or install's."""
    x = torch.ones(3, requires_grad=True)
    with batch_invariant():
        y = Product.apply(x)
        with pytest.raises(UncoveredOperatorError):
            y.backward(torch.ones(3))
    y = Product.apply(x)
    y.backward(torch.ones(3))
    install()
    y = torch.utils.checkpoint.checkpoint(lambda t: Product.apply(t), x, use_reentrant=False)
    with pytest.raises(UncoveredOperatorError):
        y.backward(torch.ones(3))
    uninstall()


def product(x: Tensor) -> Tensor:
    return torch.cumprod(x, 0)


def forked(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(product, x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_threads_that_torch_starts(covered, monkeypatch):
    """They take the state of the one that starts them, TorchScript's on a CPU as autograd's on a GPU."""
    threads, deciding, scripted = [], scopes.deciding, torch.jit.script(forked)

    def noted():
        threads.append(threading.get_ident())
        return deciding()

    monkeypatch.setattr(scopes, "deciding", noted)
    monkeypatch.setattr(installation, "make_registration", lambda: registration.Registration("CPU"))
    with batch_invariant("warn") as uncovered:
        scripted(torch.ones(3))
    assert uncovered == {"aten.cumprod.default": 1} and threading.get_ident() not in threads
    scripted(torch.ones(3))
    assert uncovered.total() == 1


def test_a_plain_thread_beside_a_block(covered):
    """The thread's results meanwhile have torch's bits, and nobody counts its calls."""
    x = torch.randn(40, 40)
    wanted, begun, done, found = x.cumprod(0) @ x, threading.Event(), threading.Event(), []

    def plain():
        begun.wait(60)
        found.append(x.cumprod(0) @ x)
        done.set()

    thread = threading.Thread(target=plain)
    thread.start()
    with batch_invariant("warn") as uncovered:
        begun.set()
        assert done.wait(60)
    thread.join()
    assert torch.equal(found[0], wanted) and not uncovered


def test_what_an_error_says(covered):
    with batch_invariant(), pytest.raises(UncoveredOperatorError) as error:
        torch.multinomial(torch.ones(3, 4), 2)
    text = str(error.value)
    assert "aten.multinomial.default of float32[3, 4] is not covered" in text and "use cute_kernels.sample" in text
    assert "for a model, models.generate" in text  # what transformers' do_sample calls
    assert f"{__file__}:" in text and "in test_what_an_error_says" in text
    with batch_invariant("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.ones(4).cumprod(0)
    assert [w.filename for w in caught] == [__file__] and "exponential of a cumsum" in str(caught[0].message)


def test_an_exception_inside_of_a_kernel_leaves_no_flag(covered, monkeypatch):
    def fails(*arguments):
        raise KeyError

    monkeypatch.setattr(scopes.thread, "inside", False)
    with fakes.fake_gpu(), batch_invariant():
        monkeypatch.setattr("cute_kernels.invariance.aten.gemm", fails)
        with pytest.raises(KeyError):
            torch.ones(2, 2, dtype=torch.bfloat16) @ torch.ones(2, 2, dtype=torch.bfloat16)
        assert not scopes.thread.inside and is_refused()


def made_elsewhere(tmp_path, key="CPU"):
    """A kernel under torch's mm, registered by a file of another library."""
    file = tmp_path / "other_library.py"
    file.write_text(
        "import torch\nlibrary = torch.library.Library('aten', 'IMPL')\n"
        f"library.impl('mm', lambda a, b: a * 2, '{key}')\n"
    )
    variables = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(file.read_text(), str(file), "exec"), variables)
    return variables["library"], str(file)


def test_a_second_owner(tmp_path, monkeypatch, covered):
    library, file = made_elsewhere(tmp_path)
    monkeypatch.setattr(installation, "make_registration", lambda: registration.Registration("CPU"))
    try:
        for begin in (install, batch_invariant().__enter__):
            with pytest.raises(
                RuntimeError, match=rf"have registered kernels under torch's operators: aten::mm \({file}"
            ):
                begin()
        assert not is_installed() and not is_refused()
        with pytest.warns(UserWarning, match="aten::mm .*this library's run in their place"):
            install("warn")
        with batch_invariant("off"):
            assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))  # theirs, handed back to
        uninstall()
        assert file in torch._C._dispatch_dump("aten::mm")
    finally:
        library._destroy()
    install()
    library, file = made_elsewhere(tmp_path)
    try:
        with pytest.raises(RuntimeError, match=rf"registered kernels over this library's: aten::mm \({file}\)"):
            install()
        with pytest.warns(UserWarning, match="over this library's"):
            install("warn")
    finally:
        library._destroy()


def test_operators_of_others(covered, monkeypatch):
    library = torch.library.Library("of_a_test", "DEF")
    library.define("rotate(Tensor x) -> Tensor")
    library.impl("rotate", lambda x: x + 1, "CPU")
    monkeypatch.setattr(installation, "make_registration", lambda: registration.Registration("CPU"))
    rotate = torch.ops.of_a_test.rotate
    try:
        with batch_invariant():
            assert rotate(torch.tensor(1)) == 2
            with pytest.raises(UncoveredOperatorError, match="of_a_test.rotate.default of .*declare_invariant"):
                rotate(torch.ones(1))
            declare_invariant(rotate)
            assert rotate(torch.ones(1)) == 2
    finally:
        uninstall()
        operators._declared.clear()
        operators.treatment_of.cache_clear()
        library._destroy()


def test_modes_and_policies_that_are_none(covered, monkeypatch):
    with pytest.raises(ValueError, match="install: mode must be of strict, warn, got 'off'"):
        install("off")
    with pytest.raises(ValueError, match="install: collectives must be of refuse, pinned, ordered, got 'gather'"):
        install(collectives="gather")
    for name, value in itertools.islice(installation.PINNED.items(), 3, None):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="NCCL_LAUNCH_MODE=GROUP NCCL_COLLNET_ENABLE=0 NCCL_NVLS_ENABLE=0, got"):
        install(collectives="pinned")
    assert not is_installed()


def test_pinned_collectives(covered, monkeypatch, tmp_path):
    import torch.distributed as dist

    for name, value in installation.PINNED.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.ones(4)
        install()
        with pytest.raises(UncoveredOperatorError, match="c10d.allreduce_.default .*adds over ranks"):
            dist.all_reduce(x)
        install(collectives="pinned")
        dist.all_reduce(x)
        assert torch.equal(x, torch.ones(4))
    finally:
        dist.destroy_process_group()


def test_a_torch_that_is_too_old(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(RuntimeError, match=r"lacks torch.library.get_kernel; torch 2\.11 has"):
        registration.Registration("CPU")


def test_a_layer_under_inference_mode_and_without_gradients():
    """linear takes one kernel, of whatever strides."""
    with fakes.fake_gpu() as jobs, install_for_test():
        linear = torch.nn.Linear(16, 8, dtype=torch.bfloat16)
        x = torch.randn(3, 5, 16).bfloat16()
        wanted = linear(x).detach()
        for context in (torch.no_grad, torch.inference_mode):
            jobs.clear()
            with context():
                assert torch.equal(linear(x), wanted) and torch.equal(linear(x.transpose(0, 1)).transpose(0, 1), wanted)
                assert torch.equal(linear(x[1, 2]), wanted[1, 2]) and linear(x[:0]).shape == (0, 5, 8)
        y = linear(x)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), linear.weight, create_graph=True)
        assert gradient.requires_grad and type(y.grad_fn).__name__ == "ViewBackward0"


def install_for_test():
    from contextlib import ExitStack

    stack = ExitStack()
    install()
    stack.callback(uninstall)
    return stack


def test_attention_of_torch(generator):
    """scaled_dot_product_attention, differentiable, runs attention; of products under the backend MATH."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cute_kernels import attention
    from tests.attention.cases import Case, make_inputs, same_bits

    with fakes.fake_gpu() as jobs, install_for_test():
        q, k, v = (t.transpose(1, 2) for t in make_inputs(Case(2, 9, 9, 4, 2, 64), generator))
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        found = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        rows = [t.transpose(1, 2) for t in leaves]
        wanted = attention(*rows, causal=True)
        assert same_bits(found.transpose(1, 2).detach(), wanted.detach())
        dy: Tensor = torch.ones_like(wanted)
        ours, theirs = torch.autograd.grad(found, leaves, dy.transpose(1, 2)), torch.autograd.grad(wanted, leaves, dy)
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
        assert {builder.__name__ for builder, _ in jobs} & {"gemm", "softmax_forward"} == set()
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert "gemm" in {builder.__name__ for builder, _ in jobs}
        mask = torch.zeros(9, 9, dtype=torch.bfloat16)
        with pytest.raises(UncoveredOperatorError, match="use cute_kernels.attention"):
            OPS._scaled_dot_product_efficient_attention(q, k, v, mask, False)


def test_tensors_in_shards():
    """DTensor's own kernel takes the whole operator; its shards reach ours, forward and backward."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((4, 3, 16), (32, 16), (32,)))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        with fakes.fake_kernels() as jobs, fakes.covered(), install_for_test():
            placed = zip((x, weight, bias), (Replicate(), Shard(0), Shard(0)), strict=True)
            leaves = [distribute_tensor(t, mesh, [where]).requires_grad_() for t, where in placed]
            y = F.linear(*leaves).to_local()
            assert torch.equal(y, F.linear(x, weight[:16], bias[:16])) and {b.__name__ for b, _ in jobs} == {"gemm"}
            jobs.clear()
            y.backward(torch.ones_like(y))
            assert leaves[1].grad.to_local().shape == (16, 16) and "gemm" in {b.__name__ for b, _ in jobs}
    finally:
        dist.destroy_process_group()


def test_transforms_of_linear():
    """torch takes it apart in any of them: here it has one rounding nonetheless, and the gradients of autograd."""
    with fakes.fake_gpu(), install_for_test():
        x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((5, 3, 64), (48, 64), (48,)))
        x = x.transpose(0, 1)
        leaf = x.detach().requires_grad_()
        wanted = F.linear(leaf, weight, bias)
        (gradient,) = torch.autograd.grad(wanted.float().square().sum(), leaf)

        def loss(t):
            y = F.linear(t, weight, bias)
            return y.float().square().sum(), y

        found, y = torch.func.grad(loss, has_aux=True)(x)
        assert torch.equal(y, wanted) and torch.equal(found, gradient)


def test_a_second_backward_and_a_recomputation(covered):
    x = torch.ones(3, requires_grad=True)
    with batch_invariant() as uncovered:
        y = x * 2
        for _ in range(2):
            y.backward(torch.ones(3), retain_graph=True)
        for reentrant in (True, False):
            z = torch.utils.checkpoint.checkpoint(lambda t: t.sin() * 2, x, use_reentrant=reentrant)
            z.backward(torch.ones(3))
    assert not uncovered and x.grad is not None
