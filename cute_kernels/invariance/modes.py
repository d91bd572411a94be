"""batch_invariant: torch's own operators run batch-invariant kernels inside a ``with`` block."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import TransformType, get_interpreter_stack, is_batchedtensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from cute_kernels.invariance import operators
from cute_kernels.runtime.checks import expect

Mode = Literal["strict", "warn", "off"]
MODES = get_args(Mode)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_warned_of_cpu = False  # once a process


class UncoveredOperatorError(RuntimeError):
    """An operator that may sum in an order that depends on the batch, inside ``batch_invariant("strict")``.

    Example:
        >>> import torch
        >>> from cute_kernels import UncoveredOperatorError, batch_invariant
        >>> try:
        ...     with batch_invariant("strict"):
        ...         y = torch.ones(2, 4).cumprod(0)  # on a GPU it is not covered
        ... except UncoveredOperatorError as error:
        ...     print(error)
    """


def batch_invariant(mode: Mode = "strict") -> _Block:
    """Inside, torch's operators on CUDA tensors give a row the same bits whatever the batch, forward and backward.

    Kernels of this library replace them where tensors are bf16, fp16 or (but for products) fp32: ``mm``, ``addmm``,
    ``bmm``, ``baddbmm``, ``mv``, ``dot`` and the operators that decompose into them (``linear``, ``matmul``,
    ``einsum``); ``softmax``, ``log_softmax``, ``sum``, ``mean``, ``nll_loss``, ``layer_norm``, ``rms_norm``; and their
    backwards. ``attention`` replaces the fused operators that ``scaled_dot_product_attention`` picks,
    without a mask, with ``is_causal`` where queries and keys are equally many, and with ``causal_lower_right``; and
    those of ``varlen_attn``. Other masks, dropout and, backward, heads beyond 128 channels are not covered.
    ``scaled_dot_product_attention`` consists of the operators before under ``sdpa_kernel(SDPBackend.MATH)`` and
    ``torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)`` (else its products are fp32): backward, too, but
    with bits that depend on the number of keys. Left alone, since they reduce nothing: elementwise operators, views,
    copies, indexing, maxima, sorting, collectives that only move data. Tensors on the CPU are left alone, too: where
    there is no CUDA device, the first operator on floating-point ones warns, once a process.

    Args:
        mode: the treatment of any other operator on floating-point CUDA tensors. "strict": an error. "warn": it runs,
            with a warning at its first call. "off": nothing is replaced, also inside of another block.

    Returns:
        A context manager and decorator. ``with`` gives a Counter, name of the operator -> calls: the operators that
        were not covered and ran while the block was live, also in a block within.

    Raises:
        ValueError: mode is none of these.
        TypeError: a decorated function is a generator function or async: the block would end before it runs.
        UncoveredOperatorError: in the block, in strict mode.
        RuntimeError: the block is live already; a block of another mode is live in another task of the thread; the
            block ends in another thread; the block ends before a weaker one that began later.

    Numerics:
        The bits of a sum depend on its length: padding along a dimension that is summed over, such as the keys of
        attention, may change them. In gradients of parameters the batch itself is summed over: reproducible, in an
        order that its size fixes. Left to torch: random numbers, which depend on the place in a batch, and the choice
        between equal values in ``topk`` and ``sort``.

    A block holds for one thread and for the backward passes that it starts. A backward that starts later, recomputation
    of checkpoints with it, runs torch's own kernels. A block is live from its begin to its end, by an exception, too.
    The live block of a thread that began last decides, so the innermost one. Blocks may end in any order, as those of
    two generators or asyncio tasks do: while a generator or task is suspended, its block goes on, and holds for all
    that the thread runs. Other dispatch modes (``FlopCounterMode``, say) see torch's operators, not the kernels that
    replace them.

    Under ``torch.func.vmap`` torch makes several operators of some, which round in between: of ``linear`` with a bias,
    ``addmm``, ``addmv``, ``baddbmm``, ``nll_loss``, ``cross_entropy``, norms with weights of a batch and the backwards
    of norms. They are not covered there: give them the batch as a dimension.

    Functions of ``torch.compile`` run eagerly inside, and in every other thread meanwhile (the backward of a function
    that was compiled and run before does not); torch refuses a block inside of one. Each operator costs host time of
    Python's: capture a CUDA graph inside.

    Example:
        >>> import torch
        >>> from cute_kernels import batch_invariant
        >>> x = torch.ones(2, 4, device="cuda" if torch.cuda.is_available() else "cpu")
        >>> with batch_invariant("warn") as uncovered:
        ...     y = x.softmax(-1)
        >>> y.shape, sum(uncovered.values())
        (torch.Size([2, 4]), 0)
    """
    expect(mode in MODES, "batch_invariant", "mode", f"be of {', '.join(MODES)}", repr(mode))
    return _Block(mode)


class _Block:
    """One block: its mode, its counter, and while it is live the thread that it began in."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.uncovered: Counter[str] = Counter()
        self.replacing: _Replacing | None = None
        self.thread = 0

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Each call of the function is a block of its own."""
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        expected = "be no generator function and not async: the block would end before it runs; use ``with`` inside"
        good = not any(is_such(function) for is_such in kinds)
        expect(good, "batch_invariant", "the decorated function", expected, function, TypeError)

        @functools.wraps(function)
        def inside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with _Block(self.mode):
                return function(*args, **kwargs)

        return inside

    def __enter__(self) -> Counter[str]:
        if self.replacing is not None:
            raise RuntimeError("batch_invariant: a block that has not ended cannot begin again; make another one")
        replacing = _Replacing.of_this_thread() or _Replacing()
        self.thread = threading.get_ident()
        for other in replacing.blocks:
            if other.thread == self.thread and other.mode != self.mode and other not in _begun.get():
                raise RuntimeError(
                    f"batch_invariant: a block of mode {self.mode!r} cannot begin: one of mode {other.mode!r} is live "
                    "in another task of this thread, for which it would decide, too"
                )
        replacing.add(self)
        _begun.set((*_begun.get(), self))
        self.uncovered, self.replacing = Counter(), replacing
        return self.uncovered

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.replacing is None:
            raise RuntimeError("batch_invariant: a block that has not begun cannot end")
        later = self.replacing.remove(self)
        self.replacing = None
        _begun.set(tuple(block for block in _begun.get() if block is not self))
        if kind is not None:
            return
        if self.thread != threading.get_ident():
            raise RuntimeError(
                "batch_invariant: a block must end in the thread that it began in: elsewhere it covered nothing"
            )
        for other in later:
            if MODES.index(other.mode) > MODES.index(self.mode):
                raise RuntimeError(
                    f"batch_invariant: a block of mode {self.mode!r} ends before one of mode {other.mode!r} that began "
                    "later, and decided what ran since"
                )


# The live blocks that began in this context: a task sees those that were there when it was made, and its own
_begun: ContextVar[tuple[_Block, ...]] = ContextVar("batch_invariant", default=())


class _Eager:
    """torch.compile's stance, of which a process has one: force_eager while any thread is in a block that replaces."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a generator that is collected ends its block at any place
        self._replacing: set[_Replacing] = set()
        self._stance = None  # ours; it knows the user's

    def update(self, replacing: _Replacing) -> None:
        """After a change of its blocks."""
        with self._lock:
            (self._replacing.add if replacing.is_on() else self._replacing.discard)(replacing)
            if self._replacing and self._stance is None:
                self._stance = torch.compiler.set_stance("force_eager")  # raises inside of a compiled function
            elif not self._replacing and self._stance is not None:
                if torch._dynamo.eval_frame._stance is self._stance.stance:  # else others have set one meanwhile
                    self._stance.__exit__(None, None, None)
                self._stance = None


_eager = _Eager()


class _Replacing(TorchDispatchMode):
    """The one mode of a thread, and of its backward passes; ``blocks``: the live ones, in the order that they began.

    It lies beneath the thread's other modes, which may begin and end while a block is live: each ends by taking the
    topmost mode off the stack, whichever that is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[_Block] = []
        self.functions = _Functions(self)

    @staticmethod
    def of_this_thread() -> _Replacing | None:
        return next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, _Replacing)), None)

    def add(self, block: _Block) -> None:
        """One more live block, which decides from here on."""
        self.blocks.append(block)
        try:
            _eager.update(self)
        except BaseException:
            self.blocks.remove(block)
            _eager.update(self)
            raise
        if self is not _Replacing.of_this_thread():
            with _without(_dispatch_modes(), _push_mode, _pop_mode):
                _push_mode(self)
            with _without(_function_modes(), _push_function_mode, _pop_function_mode):
                _push_function_mode(self.functions)

    def remove(self, block: _Block) -> list[_Block]:
        """One less; gives those that began after it. In another thread an empty mode stays, and does nothing."""
        later = self.blocks[self.blocks.index(block) + 1 :]
        self.blocks.remove(block)
        _eager.update(self)
        modes, functions = _dispatch_modes(), _function_modes()
        if not self.blocks and self in modes and self.functions in functions:
            with _without(modes[modes.index(self) + 1 :], _push_mode, _pop_mode):
                _pop_mode()
            with _without(functions[functions.index(self.functions) + 1 :], _push_function_mode, _pop_function_mode):
                _pop_function_mode()
        return later

    def __enter__(self) -> _Replacing:
        """As any mode, but for torch's flags: the process has one of each, which two threads would leave set."""
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    def is_on(self) -> bool:
        """Whether the block that decides replaces anything."""
        last = self.blocks[-1:]  # another thread may end the last one
        return bool(last) and last[0].mode != "off"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _PLAIN.issuperset(types):  # tensors that wrap others: what is inside comes by itself
            return NotImplemented
        kwargs = kwargs or {}
        if not self.is_on():
            return func(*args, **kwargs)
        if not _is_concerned(args, kwargs):
            if not _warned_of_cpu:
                _warn_of_cpu((*args, *kwargs.values()))
            return func(*args, **kwargs)
        treatment = operators.treatment_of(func)
        result = NotImplemented
        if treatment.kind == "replaced":
            result = treatment.function(*args, **kwargs)
        elif treatment.kind == "composite":
            with self:  # linear and matmul come whole under inference_mode
                result = func.decompose(*args, **kwargs)
        elif treatment.kind == "exact" or not operators.adds_up(treatment, func, args, kwargs):
            return func(*args, **kwargs)
        if result is not NotImplemented:
            return result
        self.count(str(func), (*args, *kwargs.values()))
        return func(*args, **kwargs)

    def count(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Count an operator that is not covered in all live blocks, or raise as the one that decides says."""
        live = list(self.blocks)
        if live[-1].mode == "strict":
            raise UncoveredOperatorError(
                f"batch_invariant: {name} of {', '.join(_signatures(arguments))} is not covered; "
                "batch_invariant('warn') lets it run"
            )
        for block in live:
            block.uncovered[name] += 1
        if live[-1].uncovered[name] == 1:
            warnings.warn(f"batch_invariant: {name} is not covered: its bits may depend on the batch", stacklevel=3)


class _Functions(TorchFunctionMode):
    """Decisions of torch above its operators: by strides, or in a transform of functions."""

    def __init__(self, replacing: _Replacing) -> None:
        super().__init__()
        self.replacing = replacing

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.replacing.is_on() or not _PLAIN.issuperset(types):
            return func(*args, **kwargs)
        if _is_taken_apart(func, args, kwargs) and _is_concerned(args, kwargs):
            self.replacing.count(f"{func.__name__} under vmap", (*args, *kwargs.values()))
        elif func is F.linear and _is_concerned(args, kwargs):
            return _linear(*args, **kwargs)
        elif func in WITH_THE_MODE:
            with self:
                return _body(func)(*args, **kwargs)
        return func(*args, **kwargs)


# Under vmap torch makes several operators of each, which round in between
SUMS = ("addmm", "addmv", "baddbmm", "addbmm", "addr")
LOSSES = ("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward")
TAKEN_APART = frozenset((*SUMS, *(f"{name}_" for name in SUMS), *LOSSES))
NORMS = ("layer_norm", "native_layer_norm", "rms_norm")  # with weights of a batch
NODES_OF_NORMS = ("NativeLayerNormBackward0", "FusedRmsNormBackward0")  # in a backward


def _is_taken_apart(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether vmap is on and makes other operators of a function than torch does without it."""
    if not _are_functorch_transforms_active():
        return False
    if all(layer.key() != TransformType.Vmap for layer in get_interpreter_stack()):
        return False
    name = getattr(func, "__name__", "").partition(".")[0]  # of aten's operators, too
    given = list(_tensors((*args, *kwargs.values())))
    if name == "linear":
        return len(given) == 3
    if name in NORMS:
        return any(map(is_batchedtensor, given[1:]))
    if name in ("backward", "grad"):
        return any(node.name() in NODES_OF_NORMS for node in _nodes(t.grad_fn for t in given))
    return name in TAKEN_APART


def _nodes(roots: Iterable[Node | None]) -> set[Node]:
    """The nodes of autograd's graph that a backward may go through."""
    found, waiting = set(), list(roots)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


# They call functions that a mode must see: torch runs them with the mode off, as all that it writes in Python
WITH_THE_MODE = frozenset(
    (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
)


def _body(func: types.FunctionType) -> types.FunctionType:
    """The function without its question whether a mode takes it, to which the answer is yes while one is on.

    Made anew at each call, so that it sees what its module holds now.
    """
    questions = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    variables = {**func.__globals__, **dict.fromkeys(questions, lambda *_: False)}
    body = types.FunctionType(func.__code__, variables, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _dispatch_modes() -> list[TorchDispatchMode]:
    """This thread's, the topmost last, without those of torch's own that lie beneath all others."""
    return [m for m in _get_current_dispatch_mode_stack() if getattr(m, "_mode_key", None) is None]


def _function_modes() -> list[TorchFunctionMode]:
    """This thread's, the topmost last, without the one of the default device, which lies beneath all others."""
    return [m for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext)]


@contextmanager
def _without(modes: list, push: Callable[[Any], Any], pop: Callable[[], Any]) -> Iterator[None]:
    """The topmost modes of a stack are off it meanwhile; they do not notice."""
    for _ in modes:
        pop()
    try:
        yield
    finally:
        for mode in modes:
            push(mode)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product and bias rounded once, where torch rounds twice if x is no view of a matrix. A batch of one mostly is."""
    if bias is None or input.dim() in (0, 2) or weight.dim() != 2:
        return F.linear(input, weight, bias)
    rows = input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)
    return torch.addmm(bias, rows, weight.t()).view(*input.shape[:-1], len(weight))


def _is_concerned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether floating-point numbers of CUDA tensors are computed with; integers may become such, by ``dtype``."""
    dtype = kwargs.get("dtype")
    converts = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    given = _tensors((*args, *kwargs.values()))
    return any(t.is_cuda and (converts or t.is_floating_point() or t.is_complex()) for t in given)


def _warn_of_cpu(arguments: tuple[Any, ...]) -> None:
    """Once, at floating-point CPU tensors: without a CUDA device a block changes nothing."""
    global _warned_of_cpu
    if not any(t.device.type == "cpu" and t.is_floating_point() for t in _tensors(arguments)):
        return
    _warned_of_cpu = True  # or nothing to warn of, from now on
    if not torch.cuda.device_count():
        warnings.warn(
            "batch_invariant: there is no CUDA device, and tensors on the CPU are left to torch's own operators, whose "
            "bits may depend on the batch: here the block changes nothing",
            stacklevel=6,  # the caller of the operator, past what torch puts around __torch_dispatch__
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _signatures(values: Iterable[Any]) -> list[str]:
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(values)]
