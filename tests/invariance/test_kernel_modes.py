"""batch_invariant: torch's operators inside of it, against fp64 and bit by bit in other batches."""

import contextlib
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import UncoveredOperatorError, batch_invariant, check_invariance
from tests.reduction.cases import BF16, FP32

WIDTH = 64


class Block(torch.nn.Module):
    """A layer as torch's own modules make it: norms, attention over the last but one dimension, an MLP, a head."""

    def __init__(self, device, dtype=BF16, width=WIDTH):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.first, self.second = torch.nn.LayerNorm(width, **options), torch.nn.RMSNorm(width, eps=1e-6, **options)
        self.qkv = torch.nn.Linear(width, 3 * width, **options)
        self.out = torch.nn.Linear(width, width, bias=False, **options)
        self.up, self.down = torch.nn.Linear(width, 2 * width, **options), torch.nn.Linear(2 * width, width, **options)
        self.head = torch.nn.Linear(width, 200, bias=False, **options)

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return F.log_softmax(self.head(x).float(), -1)


@contextlib.contextmanager
def attention_of_products():
    """Attention as products and a softmax, in the dtype of its arguments."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def block(generator) -> Block:
    module = Block(generator.device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device=generator.device) / 8)
    return module


@pytest.fixture
def x(generator):
    return torch.randn(9, 12, WIDTH, generator=generator, device=generator.device).to(BF16)


def exact(function, *tensors):
    """The result and the gradients of floating-point tensors, in fp64, outside of the mode."""
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    with batch_invariant("off"):
        y = function(*wide)
        g = torch.ones_like(y)
        return [y.detach(), *torch.autograd.grad(y, [t for t in wide if t.requires_grad], g)]


def indices(*shape):
    return lambda generator: torch.randint(0, 5, shape, generator=generator, device=generator.device)


CALLS = {
    "mm": (torch.mm, (30, 40), (40, 24)),
    "matmul": (torch.matmul, (2, 3, 30, 40), (2, 3, 40, 24)),
    "matmul by a vector": (torch.matmul, (30, 40), (40,)),
    "dot": (torch.dot, (40,), (40,)),
    "bmm": (torch.bmm, (3, 30, 40), (3, 40, 24)),
    "linear": (F.linear, (2, 30, 40), (24, 40), (24,)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (30, 24), (30, 40), (40, 24)),
    "addmm without c": (lambda c, a, b: torch.addmm(c, a, b, beta=0), (24,), (30, 40), (40, 24)),
    "baddbmm": (torch.baddbmm, (3, 30, 24), (3, 30, 40), (3, 40, 24)),
    "addmv": (torch.addmv, (30,), (30, 40), (40,)),
    "einsum": (lambda a, b: torch.einsum("bsh,bth->bst", a, b), (3, 30, 40), (3, 20, 40)),
    "softmax": (lambda x: x.softmax(-1) * x, (30, 40)),
    "softmax of another dimension": (lambda x: x.softmax(1) * x, (3, 30, 40)),
    "softmax to fp32": (lambda x: torch.softmax(x, -1, dtype=FP32 if x.dtype is BF16 else None) * x, (30, 40)),
    "log_softmax": (lambda x: x.log_softmax(-1) * x, (30, 40)),
    "softmax of a scalar": (lambda x: x.softmax(0), ()),
    "sum": (lambda x: x.sum((0, 2)).square() + x.sum(), (3, 30, 40)),
    "mean": (lambda x: x.mean(1, keepdim=True) + x.mean(), (3, 30, 40)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8, 5), w, b), (30, 8, 5), (8, 5), (8, 5)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (40,), w, 1e-5), (2, 30, 40), (40,)),
    "norms without weights": (lambda x: F.layer_norm(x, (40,)) * F.rms_norm(x, (40,)), (30, 40)),
    "cross_entropy": (F.cross_entropy, (30, 40), indices(30)),
    "cross_entropy, ignored": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=2, reduction="sum"),
        (30, 40),
        indices(30),
    ),
    "cross_entropy, weighted": (
        lambda x, t: F.cross_entropy(x, t, torch.linspace(0.5, 2, 40, device=x.device, dtype=x.dtype)),
        (30, 40),
        indices(30),
    ),
    "losses": (lambda x, t: F.cross_entropy(x, t, reduction="none"), (30, 40), indices(30)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_against_fp64(name, generator):
    function, *shapes = CALLS[name]
    tensors = [
        shape(generator)
        if callable(shape)
        else torch.randn(shape, generator=generator, device=generator.device).to(BF16)
        for shape in shapes
    ]
    expected = exact(function, *tensors)
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    with batch_invariant() as uncovered:
        y = function(*leaves)
        gradients = torch.autograd.grad(y, [t for t in leaves if t.requires_grad], torch.ones_like(y))
    assert not uncovered
    for got, want in zip([y, *gradients], expected, strict=True):
        assert got.shape == want.shape
        assert (got.double() - want).norm() <= 0.02 * want.norm() + 1e-3 * math.sqrt(want.numel())


def test_a_sequence_does_not_know_its_batch(generator, x):
    module = block(generator)
    with batch_invariant() as uncovered, attention_of_products():
        report = check_invariance(module, x, transforms=("T1", "T2", "T3", "T4", "T5", "T6"))
    assert report.ok, str(report)
    assert not uncovered


def test_linear_of_a_batch_in_any_order(generator):
    """A batch of one is contiguous in whichever order its dimensions are in memory, one of several is not."""
    linear = torch.nn.Linear(64, 48, device=generator.device, dtype=BF16)
    batch = torch.randn(5, 7, 64, generator=generator, device=generator.device).to(BF16)

    def bits(x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        y = linear(leaf)
        y.sin().sum().backward()
        return [y.detach(), leaf.grad]

    with batch_invariant() as uncovered:
        together = bits(batch)
        for i in range(len(batch)):
            assert all(
                torch.equal(t[i : i + 1], alone) for t, alone in zip(together, bits(batch[i : i + 1]), strict=True)
            )
    assert not uncovered


def test_close_to_torch(generator, x):
    module = block(generator)
    with attention_of_products():
        expected = module.double()(x.double())
        module.to(BF16)
        with batch_invariant():
            got = module(x)
    assert (got.double() - expected).abs().mean() < 0.05


def test_strict_refuses_and_names_the_operator(x):
    with batch_invariant() as uncovered:
        for call, name in (
            (lambda: x.cumprod(0), "aten.cumprod"),
            (lambda: x.double() @ x.double().mT, r"aten.bmm.default of float64\[9, 12, 64\], float64\[9, 64, 12\]"),
            (lambda: x.prod(), "aten.prod"),
            (lambda: x.scatter_reduce(0, torch.zeros_like(x, dtype=torch.long), x, "mean"), "scatter_reduce"),
            (lambda: x.double().sum(), "aten.sum"),
        ):
            with pytest.raises(UncoveredOperatorError, match=name):
                call()
    assert not uncovered


def test_warn_counts_and_says_so_once(x):
    with batch_invariant("warn") as uncovered, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            y = x.float().cumprod(0)
        x.float().logcumsumexp(-1)
    assert uncovered == {"aten.cumprod.default": 3, "aten.logcumsumexp.default": 1}
    ours = [message for w in caught if (message := str(w.message)).startswith("batch_invariant: ")]
    assert [message.split(" ")[1] for message in ours] == ["aten.cumprod.default", "aten.logcumsumexp.default"]
    assert torch.equal(y, x.float().cumprod(0))


def test_blocks_nest_and_end_with_exceptions(x):
    def is_strict():
        try:
            x.float().cumprod(0)
        except UncoveredOperatorError:
            return True
        return False

    with batch_invariant():
        assert is_strict()
        with batch_invariant("off") as uncovered:
            assert not is_strict() and not uncovered
            with batch_invariant("strict"):
                assert is_strict()
        with contextlib.suppress(KeyError), warnings.catch_warnings(), batch_invariant("warn"):
            warnings.simplefilter("ignore")
            assert not is_strict()
            raise KeyError
        assert is_strict()
    assert not is_strict()
    with pytest.raises(ValueError, match="mode must be of strict, warn, off, got 'loud'"), batch_invariant("loud"):
        pass


def test_it_decorates_a_function(x):
    @batch_invariant("strict")
    def function():
        return x.float().cumprod(0)

    for _ in range(2):
        with pytest.raises(UncoveredOperatorError):
            function()
    x.float().cumprod(0)


def test_what_is_non_reducing_runs(x):
    """In place, by index, by copy, elementwise, without a word."""
    with batch_invariant() as uncovered:
        y = torch.cat([x, x.flip(0)]).add_(1).masked_fill(x[:1] > 0, 2.0)[:, [1, 3]].contiguous().float()
        y = (
            torch.where(y > 0, y, y.amax(-1, keepdim=True))
            .topk(3)
            .values.sort()
            .values.unsqueeze(0)
            .expand(2, -1, -1, -1)
        )
        torch._foreach_mul_([y.clone()], 2.0)
        y.clone().index_put_((torch.tensor([0], device=y.device),), y[:1])
        F.dropout(y, 0.0).to(BF16).cpu().numel()
        assert (x > 0).sum().item() >= 0 and F.embedding(torch.tensor([1], device=x.device), x[0]).shape == (1, WIDTH)
    assert not uncovered


def test_fp32_products_of_one_k(x):
    """As of rotary embeddings: nothing is added up."""
    frequencies, positions = torch.rand(2, 8, 1, device=x.device), torch.arange(12.0, device=x.device).expand(2, 1, 12)
    with batch_invariant():
        assert torch.equal(frequencies @ positions, frequencies * positions)
        assert torch.equal(frequencies[0] @ positions[0], frequencies[0] * positions[0])


def test_in_place_and_out(x):
    a, b = x[0], x[1].mT
    with batch_invariant():
        product = a @ b
        out = torch.empty(12, 12, device=x.device, dtype=BF16)
        assert torch.mm(a, b, out=out) is out and torch.equal(out, product)
        again = torch.ones_like(out)
        assert again.addmm_(a, b, beta=0) is again and torch.equal(again, product)
        empty = torch.empty(0, device=x.device, dtype=BF16)
        torch.mm(a, b, out=empty)
        assert torch.equal(empty, product)


def test_inference_mode(generator, x):
    module = block(generator)
    with batch_invariant(), attention_of_products():
        expected = module(x)
        with torch.inference_mode():
            assert torch.equal(module(x), expected)


def test_a_compiled_function_runs_eagerly(x):
    function = torch.compile(lambda x: (x @ x.mT).softmax(-1))
    with batch_invariant():
        assert torch.equal(function(x), (x @ x.mT).softmax(-1))


def test_rows_that_are_masked(x):
    """Attention's probabilities are 0 where all keys are masked, as torch has them."""
    mask = torch.ones(12, 12, device=x.device, dtype=torch.bool).tril()
    mask[3] = False
    q = x.unsqueeze(1)
    with batch_invariant(), attention_of_products():
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    expected = F.scaled_dot_product_attention(*[q.double()] * 3, attn_mask=mask)
    assert torch.equal(y[:, :, 3], torch.zeros_like(y[:, :, 3]))
    assert (y.double() - expected).abs().max() < 0.05


@pytest.mark.parametrize("low", ["finfo.min", "-inf"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_a_masked_vocabulary(dtype, low, generator):
    """Masked logits have probability 0, and add 0 to a loss and to its gradients; the others as without them."""
    logits = torch.randn(9, 300, generator=generator, device=generator.device).to(dtype)
    target = torch.arange(9, device=generator.device)
    wanted = [torch.softmax(logits, -1), torch.log_softmax(logits, -1)]
    padded = F.pad(logits, (0, 700), value=torch.finfo(dtype).min if low == "finfo.min" else -math.inf)
    padded.requires_grad_()
    with batch_invariant("strict"):
        softmax, log_softmax = padded.softmax(-1), padded.log_softmax(-1)
        (of_softmax,) = torch.autograd.grad(softmax[:, :300].float().square().sum(), padded)
        (of_loss,) = torch.autograd.grad(F.cross_entropy(padded, target), padded)
    assert torch.allclose(softmax[:, :300], wanted[0], rtol=1e-2) and not softmax[:, 300:].any()
    assert torch.allclose(log_softmax[:, :300], wanted[1], rtol=1e-2, atol=1e-2)
    for gradient in (of_softmax, of_loss):
        assert gradient.isfinite().all() and not gradient[:, 300:].any() and gradient[:, :300].any()


def test_a_row_that_begins_anywhere(generator):
    """Alone it is contiguous; among others it is copied: the same bits."""
    wide = torch.randn(5, 400, generator=generator, device=generator.device)
    for x in (wide[:, 3:363], wide[:, 1:].to(BF16), wide.to(BF16)[:, 5:365], wide.to(BF16)[:, 1:301]):
        leaf = x.detach().requires_grad_()
        with batch_invariant():
            for function in (
                lambda t: t.softmax(-1),
                lambda t: t.log_softmax(-1),
                lambda t: F.layer_norm(t, t.shape[1:]),
                lambda t: F.rms_norm(t, t.shape[1:]),
                lambda t: t.sum(1),
            ):
                assert torch.equal(function(x[:1]), function(x)[:1])
                (whole,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
                alone = leaf.detach()[:1].requires_grad_()
                (row,) = torch.autograd.grad(function(alone).square().sum(), alone)
                assert torch.equal(row, whole[:1])


def test_in_place_and_on_lists(x):
    with batch_invariant() as uncovered:
        y = x.clone().masked_fill_(x > 1, 0.0).abs_().masked_fill_(x < 0, torch.ones((), device=x.device, dtype=BF16))
        F.threshold_(F.hardtanh_(F.elu_(torch.ops.aten.gelu_(y.float()))), 0.1, 0.0).eq_(1)
        y.clone().unsqueeze_(0).squeeze_((0,)).transpose_(0, 1)
        torch._foreach_lerp_([y.float()], [y.float()], 0.5)
        torch._foreach_maximum([y], [y])
        F.cross_entropy(x[0], torch.arange(12, device=x.device), label_smoothing=0.1)
        for call in ("_foreach_mm", "_foreach_powsum"):
            function, arguments = (
                getattr(torch.ops.aten, call, None),
                {"_foreach_mm": ([x[0].mT],), "_foreach_powsum": (2,)},
            )
            if function is not None:
                with pytest.raises(UncoveredOperatorError, match=call):
                    function([x[0]], *arguments.get(call, ()))
    assert not uncovered


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a.sum(2),
        lambda a, b: a.sum((0, -2)),
        lambda a, b: a[0, 0].sum(1),
        lambda a, b: a[0, 0].softmax(1),
        lambda a, b: torch.addmm(a.new_zeros(5), a, b),
        lambda a, b: torch.addmm(a.new_zeros(2, 4, 4), a, b),
        lambda a, b: torch.addmm(a.new_zeros(4, dtype=torch.float64), a, b),
        lambda a, b: torch.addmv(a.new_zeros(4, 1), a, b[:, 0]),
        lambda a, b: torch.mm(a, b, out=a.new_empty(4, 4, dtype=FP32)),
        lambda a, b: a[:, :1] @ b[:1].float(),
        lambda a, b: torch.bmm(a[None], b.expand(2, -1, -1)),
        lambda a, b: torch.bmm(a[None], a[None]),
        lambda a, b: a @ a,
        lambda a, b: F.linear(a, a[:, 1:], a[:, 0]),
        lambda a, b: torch.mv(a, b[1:, 0]),
        lambda a, b: torch.dot(a[0], a[0, 1:]),
        lambda a, b: torch.bmm(a[None, :, :1], b[None, :1].expand(2, 1, 4)),
        lambda a, b: F.nll_loss(a, torch.zeros(4, device=a.device, dtype=torch.long), a.new_ones(7)),
    ],
)
def test_what_torch_refuses(call, x):
    a, b = x[0, :4], x[1, :4].mT
    for block in (contextlib.nullcontext(), batch_invariant()):
        with block, pytest.raises((IndexError, RuntimeError)):
            call(a, b)


def test_arguments_as_torch_takes_them(x):
    a, b = x[0], x[1].mT
    bytes_, whole = (torch.arange(150, 162, device=x.device, dtype=dtype) for dtype in (torch.uint8, torch.long))
    wide = torch.cat([a] * (162 // a.shape[1] + 1), 1)  # a byte may be 156, which -100 is of that dtype
    with batch_invariant():
        assert torch.equal(torch.addmm(a[:, :12], a, b, beta=True), torch.addmm(a[:, :12], a, b, beta=1))
        assert torch.equal(F.nll_loss(wide, bytes_), F.nll_loss(wide, whole))
        expected = -wide[torch.arange(12), whole]
        assert torch.equal(F.nll_loss(wide, bytes_, reduction="none"), expected)


def test_transforms_of_functions(x):
    weight = x[0, :8].mT.contiguous()
    with batch_invariant() as uncovered:
        expected = (x[0] @ weight).softmax(-1)
        assert torch.equal(torch.func.vmap(lambda row: (row @ weight).softmax(-1))(x[0]), expected)
        gradient = torch.func.grad(lambda x: (x @ weight).softmax(-1).square().sum())(x[0])
        leaf = x[0].clone().requires_grad_()
        assert torch.equal(torch.autograd.grad((leaf @ weight).softmax(-1).square().sum(), leaf)[0], gradient)
    assert not uncovered


def rows_of_vmap(generator):
    """(function, its batches) of what reaches batch_invariant in another form, or not, where vmap is on."""

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=generator.device).to(BF16)

    weight, bias, scale = randn(24, 40), randn(24), randn(40)
    target = torch.randint(0, 40, (6, 5), generator=generator, device=generator.device)
    return {
        "linear": (lambda x: F.linear(x, weight, bias), randn(6, 40)),
        "linear of matrices": (torch.nn.Linear(40, 24, dtype=BF16, device=generator.device), randn(6, 5, 40)),
        "linear, its weights of a batch": (F.linear, randn(6, 5, 40), randn(6, 24, 40), randn(6, 24)),
        "linear without bias": (lambda x: F.linear(x, weight), randn(6, 5, 40)),
        "aten.addmm": (lambda x: torch.ops.aten.addmm(bias, x, weight.mT), randn(6, 5, 40)),
        "addmm with factors": (lambda x: torch.addmm(bias, x, weight.mT, beta=0.5, alpha=2), randn(6, 5, 40)),
        "addmm in place": (lambda x, c: c.clone().addmm_(x, weight.mT), randn(6, 5, 40), randn(6, 5, 24)),
        "addmv": (lambda x: torch.addmv(bias, weight, x), randn(6, 40)),
        "baddbmm": (torch.baddbmm, randn(6, 2, 5, 7), randn(6, 2, 5, 40), randn(6, 2, 40, 7)),
        "matmul and sum": (lambda x: x @ weight.mT + bias, randn(6, 5, 40)),
        "mv": (lambda x: weight @ x, randn(6, 40)),
        "softmax": (lambda x: x.softmax(-1), randn(6, 5, 40)),
        "log_softmax": (lambda x: x.log_softmax(0), randn(6, 5, 40)),
        "sum and mean": (lambda x: x.sum(0) + x.mean(), randn(6, 5, 40)),
        "layer_norm": (lambda x: F.layer_norm(x, (40,), scale, scale), randn(6, 5, 40)),
        "layer_norm, its weights of a batch": (
            lambda x, w: F.layer_norm(x, (40,), w, w),
            randn(6, 5, 40),
            randn(6, 40),
        ),
        "rms_norm": (lambda x: F.rms_norm(x, (40,), scale, 1e-5), randn(6, 5, 40)),
        "rms_norm, its weights of a batch": (lambda x, w: F.rms_norm(x, (40,), w, 1e-5), randn(6, 5, 40), randn(6, 40)),
        "cross_entropy": (F.cross_entropy, randn(6, 5, 40), target),
        "nll_loss": (F.nll_loss, randn(6, 5, 40), target),
    }


@pytest.mark.parametrize("gradient", [False, True])
def test_vmap_gives_the_bits_of_each_row_or_refuses(generator, gradient):
    refused = set()
    for name, (function, *batches) in rows_of_vmap(generator).items():

        def call(first, *rest, function=function):
            return function(first, *rest).float().square().sum()

        mapped = torch.func.grad(call) if gradient else function
        with batch_invariant() as uncovered:
            rows = torch.stack([mapped(*row) for row in zip(*batches, strict=True)])
            try:
                assert torch.equal(torch.func.vmap(mapped)(*batches), rows), name
            except UncoveredOperatorError:
                refused.add(name)
        assert not uncovered
    assert refused >= {"linear", "linear of matrices", "aten.addmm", "addmm with factors", "addmv", "baddbmm"}
    kept = {"linear without bias", "matmul and sum", "mv", "softmax", "log_softmax", "sum and mean"}
    assert refused.isdisjoint(kept if gradient else {*kept, "layer_norm"})


def test_what_vmap_takes_apart_is_named(generator):
    linear = torch.nn.Linear(64, 48, device=generator.device, dtype=BF16)
    x = torch.randn(7, 64, generator=generator, device=generator.device).to(BF16)
    with (
        batch_invariant(),
        pytest.raises(UncoveredOperatorError, match=r"aten.linear.default under vmap of bfloat16\[64\]"),
    ):
        torch.func.vmap(linear)(x)
    with batch_invariant("warn") as uncovered, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.func.vmap(linear)(x)
    assert uncovered == {"aten.linear.default under vmap": 1}


def test_linear_under_autocast(generator):
    """The same bits for a vector, a matrix and a batch, whose bias is cast."""
    linear = torch.nn.Linear(64, 48, device=generator.device)
    x = torch.randn(3, 5, 64, generator=generator, device=generator.device)
    with batch_invariant() as uncovered, torch.autocast(torch.device(generator.device).type, BF16):
        y = linear(x.transpose(0, 1))
        assert y.dtype is BF16 and torch.equal(y.transpose(0, 1), linear(x))
        assert torch.equal(linear(x[0]), y[:, 0]) and torch.equal(linear(x[0, 2]), y[2, 0])
    assert not uncovered


def test_a_vector_that_is_not_contiguous(generator):
    x = torch.randn(64, 9, generator=generator, device=generator.device).to(BF16).mT
    linear = torch.nn.Linear(64, 48, device=generator.device, dtype=BF16)
    with batch_invariant():
        for row, expected in zip(x, linear(x), strict=True):
            assert torch.equal(linear(row), expected)


def test_attention_of_torch_does_not_know_its_batch(generator, x):
    """Its projections are of tensors that are contiguous only where the batch is one."""
    module = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True, device=generator.device, dtype=BF16)
    torch.nn.init.normal_(module.in_proj_bias)
    with batch_invariant() as uncovered, attention_of_products():
        together = module(x, x, x, need_weights=False)[0]
        for i in range(len(x)):
            one = x[i : i + 1]
            assert torch.equal(module(one, one, one, need_weights=False)[0], together[i : i + 1])
    assert not uncovered


@pytest.mark.parametrize("way", ["Tensor.backward", "backward", "grad"])
def test_what_a_backward_recomputes(generator, way):
    """The recomputed product has the bits of the forward."""
    linear = torch.nn.Linear(64, 48, device=generator.device, dtype=BF16)
    x = torch.randn(7, 5, 64, generator=generator, device=generator.device).to(BF16).transpose(0, 1)
    outputs = []

    def function(x):
        outputs.append(linear(x))
        return outputs[-1].sin()

    with batch_invariant():
        y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum()
        if way == "Tensor.backward":
            y.backward()
        elif way == "backward":
            torch.autograd.backward(y)
        else:
            torch.autograd.grad(y, linear.weight)
    assert len(outputs) == 2 and torch.equal(*outputs)


def test_nothing_at_all(device):
    with batch_invariant():
        x = torch.empty(0, WIDTH, device=device, dtype=BF16)
        assert (x @ torch.ones(WIDTH, 8, device=device, dtype=BF16)).shape == (0, 8)
        assert x.softmax(-1).shape == x.shape and x.sum(0).shape == (WIDTH,) and x.sum().item() == 0
        weight = torch.ones(WIDTH, device=device, dtype=BF16, requires_grad=True)
        for norm in (F.layer_norm, F.rms_norm):
            y = norm(x, (WIDTH,), weight)
            (gradient,) = torch.autograd.grad(y.sum(), weight)
            assert y.shape == x.shape and torch.equal(gradient, torch.zeros_like(weight))


@pytest.mark.gpu
def test_a_graph_of_a_step(generator, device, x):
    if device == "cpu":
        pytest.skip("needs a GPU")
    module = block(generator)

    def step():
        with batch_invariant(), attention_of_products():
            loss = F.nll_loss(module(x).flatten(0, 1), target)
            return [loss.detach(), *torch.autograd.grad(loss, list(module.parameters()))]

    target = torch.randint(0, 200, (9 * 12,), generator=generator, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_without_it_torch_is_caught(device):
    """The positive control: cuBLAS splits K where there are few rows."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    linear = torch.nn.Linear(4096, 4096, bias=False, device=device, dtype=BF16)
    x = torch.randn(100, 4096, device=device, dtype=BF16)
    assert not check_invariance(linear, x, gradients=False, transforms=("T1",)).ok
    with batch_invariant():
        assert check_invariance(linear, x, gradients=False, transforms=("T1",)).ok


def test_flops_are_counted_as_without(x, generator):
    """By a counter around the block, forward and backward."""
    module, found = block(generator), []
    for mode in ("off", "strict"):
        with FlopCounterMode(display=False) as counter, batch_invariant(mode), attention_of_products():
            module(x).square().sum().backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0
