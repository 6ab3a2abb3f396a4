"""Each private name of torch that the package uses is there and does what torch_internals.py says of it."""

from __future__ import annotations

import inspect
import math
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_checks import compile_counted, graphs_of
from oracles import E4M3
from test_house import strange
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from float8_compile import Float8Linear, torch_internals
from float8_compile.torch_internals import (
    apply_function,
    break_graph_if_written,
    disabled_torch_function,
    foreach_amax,
    guard_or_false,
    is_called_by_another,
    is_transformed,
    make_wrapper,
    mark_static_address,
    raise_to,
    scaled_mm,
    statically_known_true,
    transforms_are_active,
    with_own_code,
    without_modes,
)


def private_names(source: str) -> list[str]:
    """Each private name of torch that the source touches or imports, in full."""
    written = {name if name.startswith("torch.") else f"torch.{name}" for name in strange(source)}
    return sorted(name for name in written if not any(longer.startswith(f"{name}.") for longer in written))


def missing(name: str) -> bool:
    """Whether this torch has no such name; modules on the way are imported."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return True
    return False


PRIVATE = private_names(Path(torch_internals.__file__).read_text())


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_still_has(name: str) -> None:
    assert not missing(name)


def test_a_name_that_torch_has_dropped_would_be_seen() -> None:
    source = "import torch\nfrom torch._gone import it\nfrom torch import _C\ntorch._gone_too(torch.Tensor._is_gone)"
    names = private_names(source)
    assert names == ["torch.Tensor._is_gone", "torch._C", "torch._gone.it", "torch._gone_too"]
    assert [name for name in names if not missing(name)] == ["torch._C"]
    assert {"torch._scaled_mm", "torch.Tensor._make_wrapper_subclass"} <= set(PRIVATE)


@pytest.mark.parametrize("name", torch_internals.__all__)
def test_all_of_it_exists(name: str) -> None:
    assert callable(getattr(torch_internals, name))


# The wrapper


class Boxed(Tensor):
    """A tensor in a box; ops see what is inside and give plain tensors."""

    @staticmethod
    def __new__(cls, inside: Tensor) -> Boxed:
        self = make_wrapper(cls, inside.shape, strides=inside.stride(), dtype=torch.bfloat16, device=inside.device)
        self.inside = inside
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[arg.inside if isinstance(arg, Boxed) else arg for arg in args], **(kwargs or {}))


class Meddling(Boxed):
    """What `__torch_function__` may do where it is not disabled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "meddled with"


def test_make_wrapper_makes_a_tensor_that_says_what_it_is_told_and_stores_nothing() -> None:
    boxed = Boxed(torch.ones(3, 4).t())
    assert (boxed.shape, boxed.stride(), boxed.dtype) == ((4, 3), (1, 4), torch.bfloat16)
    assert boxed.data_ptr() == 0


def test_with_torch_function_disabled_results_stay_as_dispatch_gave_them() -> None:
    assert type(Boxed(torch.ones(2)) + 1) is Tensor
    assert Meddling(torch.ones(2)) + 1 == "meddled with", "otherwise they might not"


def test_scaled_mm_multiplies_and_scales() -> None:
    a, b = torch.eye(16).to(E4M3), torch.full((32, 16), 3.0).to(E4M3)
    half, two = torch.tensor(0.5), torch.tensor(2.0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        result = scaled_mm(a, b.t(), half, two, out_dtype=dtype, use_fast_accum=True)
        assert torch.equal(result, torch.full((16, 32), 3.0, dtype=dtype))
    rows = scaled_mm(a, b.t(), torch.full((16, 1), 0.5), torch.full((1, 32), 4.0), out_dtype=torch.bfloat16)
    assert torch.equal(rows, torch.full((16, 32), 6.0, dtype=torch.bfloat16))


# Questions about a size

SIZES = (3, 16, 17, 32, 48, 5, 64)
ADD_NO_GUARD = {
    "is it known to be a multiple": lambda size: statically_known_true(size % 16 == 0),
    "is it empty": lambda size: guard_or_false(size == 0),  # 0 and 1 have a graph of their own anyhow
    "is it one": lambda size: guard_or_false(size == 1),
}
ADD_A_GUARD = {
    "is it a multiple": lambda size: size % 16 == 0,
    "is it 16": lambda size: guard_or_false(size == 16),  # it says the truth, and so asks
}


def compilations(question: Any) -> int:
    compiled, counter = compile_counted(lambda x: x + 1 if question(x.shape[0]) else x * 2, dynamic=True)
    for size in SIZES:
        compiled(torch.ones(size, 2))
    return counter.frame_count


@pytest.mark.parametrize("question", ADD_NO_GUARD.values(), ids=ADD_NO_GUARD)
def test_questions_that_cost_no_recompilation(question: Any) -> None:
    assert compilations(question) == 1


@pytest.mark.parametrize("question", ADD_A_GUARD.values(), ids=ADD_A_GUARD)
def test_questions_that_would_be_seen(question: Any) -> None:
    assert compilations(question) > 1


@pytest.mark.parametrize("question", [guard_or_false, statically_known_true])
def test_of_a_size_that_nobody_knows_the_answer_is_no(question: Any) -> None:
    """Where a plain `if` would be an error: a size that depends on data."""
    compiled, _ = compile_counted(lambda x: x + 1 if question(x.nonzero().shape[0] == 16) else x * 2)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(compiled(torch.ones(16)), torch.full((16,), 2.0))


@pytest.mark.parametrize("question", [guard_or_false, statically_known_true])
def test_of_a_number_they_say_the_truth(question: Any) -> None:
    assert question(16 % 16 == 0) is True
    assert question(17 % 16 == 0) is False


@pytest.mark.parametrize("question", [guard_or_false, statically_known_true])
def test_of_a_static_size_they_say_the_truth(question: Any) -> None:
    compiled, _ = compile_counted(lambda x: x + 1 if question(x.shape[0] % 16 == 0) else x * 2, dynamic=False)
    assert torch.equal(compiled(torch.ones(32)), torch.full((32,), 2.0))
    assert torch.equal(compiled(torch.zeros(32)), torch.ones(32))
    assert torch.equal(compiled(torch.zeros(3)), torch.zeros(3))


# Function.apply


class TimesConstant(torch.autograd.Function):
    """y = c x, with a backward that is recognizably its own: 10 c g."""

    @staticmethod
    def forward(x: Tensor, constant: float, unused: Tensor | None) -> Tensor:
        return x * constant

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.constant = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return 10 * ctx.constant * g, None, None


def by_apply(x: Tensor) -> Tensor:
    return TimesConstant.apply(x, 3.0, None).sum()


def by_apply_function(x: Tensor) -> Tensor:
    return apply_function(TimesConstant, x, 3.0, None).sum()


def value_and_grad(fn: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = fn(x)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad


USES = {
    "eager": lambda fn, x: value_and_grad(fn, x),
    "without gradients": lambda fn, x: (fn(x),),
    "torch.func.grad": lambda fn, x: (torch.func.grad(fn)(x),),
    "torch.func.vjp": lambda fn, x: torch.func.vjp(fn, x)[1](torch.tensor(2.0)),
    "compiled": lambda fn, x: value_and_grad(compile_counted(fn)[0], x),
    "torch.func.grad, compiled": lambda fn, x: (compile_counted(torch.func.grad(fn))[0](x),),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_apply_function_is_apply(use: Any) -> None:
    x = torch.arange(4.0)
    for actual, expected in zip(use(by_apply_function, x), use(by_apply, x), strict=True):
        assert torch.equal(actual, expected)


def test_apply_function_runs_our_backward() -> None:
    value, grad = value_and_grad(by_apply_function, torch.ones(4))
    assert value == 12
    assert torch.equal(grad, torch.full((4,), 30.0))
    assert torch.equal(torch.func.grad(by_apply_function)(torch.ones(4)), torch.full((4,), 30.0))


def test_above_function_there_still_is_an_apply_that_binds_no_arguments() -> None:
    """The one in C++: what `apply_function` calls."""
    first, second = [cls for cls in TimesConstant.__mro__ if "apply" in vars(cls)][:2]
    assert first is torch.autograd.Function
    if inspect.isbuiltin(first.apply):
        pytest.skip("this torch's Function.apply is in C++ itself")
    assert inspect.isbuiltin(second.apply)


# Delayed scaling


def written_to(tensor: Tensor, inside: list[bool]) -> Any:
    """A function that adds its argument to the tensor from outside, and says what `is_transformed` did."""

    def f(x: Tensor) -> Tensor:
        inside.append(is_transformed())
        tensor.add_(x.detach())
        return x * 2

    return f


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(torch.tensor(1.0)),
    "vjp": lambda f: torch.func.vjp(f, torch.tensor(1.0)),
    "vmap": lambda f: torch.vmap(f)(torch.ones(3)),
    "grad of vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(torch.ones(3)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_is_transformed_says_where_a_tensor_from_outside_can_not_be_written_to(transform: Any) -> None:
    inside: list[bool] = []
    with pytest.raises(RuntimeError, match=r"mutate a captured Tensor|broadcast shape"):
        transform(written_to(torch.zeros(()), inside))
    assert inside == [True]


def test_outside_of_transforms_it_can() -> None:
    inside: list[bool] = []
    tensor = torch.zeros(())
    f = written_to(tensor, inside)
    f(torch.tensor(1.0, requires_grad=True)).backward()
    with torch.inference_mode():
        f(torch.tensor(1.0))
    compile_counted(f)[0](torch.tensor(1.0))
    assert inside == [False] * 3
    assert tensor == 3


def test_foreach_amax_is_the_largest_magnitude_of_each_in_float32() -> None:
    tensors = [
        torch.randn(3, 4),
        torch.randn(5).bfloat16(),
        torch.randn(6, 4).t()[::2],
        torch.tensor([[1.0, -7.0]]).half(),
        torch.tensor(-3.0),
        torch.zeros(2, 2),
        torch.tensor([1.0, -math.inf]),
        torch.tensor([1e-45, 0.0]),
        torch.tensor([math.nan, 1.0]),
    ]
    amaxes = foreach_amax(tensors)
    assert all((amax.shape, amax.dtype) == ((), torch.float32) for amax in amaxes)
    assert amaxes[-1].isnan()
    assert torch.equal(torch.stack(amaxes[:-1]), torch.stack([t.abs().max().float() for t in tensors[:-1]]))


def test_foreach_amax_is_one_op_for_any_number_of_tensors() -> None:
    class Count(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += 1
            return func(*args, **(kwargs or {}))

    for number in (1, 200):
        tensors = list(torch.ones(number, 4))
        with Count() as count:
            foreach_amax(tensors)
        assert count.ops == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_raise_to_is_a_maximum_in_place(dtype: torch.dtype, compiled: bool) -> None:
    running = torch.tensor(3.0)
    run = compile_counted(raise_to)[0] if compiled else raise_to
    for number, expected in (
        (2.0, 3.0),
        (5.0, 5.0),
        (0.0, 5.0),
        (math.inf, math.inf),
        (math.inf, math.inf),
        (1.0, 1.0),
    ):
        run(running, torch.tensor(number, dtype=dtype))
        assert running.item() == expected
    run(running, torch.tensor(math.nan, dtype=dtype))
    assert running.isnan()
    run(running, torch.tensor(2.0, dtype=dtype))
    assert running.item() == 2.0


def test_raise_to_may_stand_where_a_policy_saves_everything() -> None:
    """And other ways to write in place may not."""
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    running = torch.zeros(())

    def step(write: Any) -> None:
        def region(x: Tensor) -> Tensor:
            with torch.no_grad():
                write(running, x.detach().abs().max())
            return x.sin()

        checkpoint(region, torch.ones(3, requires_grad=True), use_reentrant=False, context_fn=contexts).sum().backward()

    step(raise_to)
    assert running == 1
    for write in (Tensor.copy_, Tensor.clamp_min_, lambda t, x: torch.maximum(t, x, out=t)):
        with pytest.raises(RuntimeError, match="mutated"):
            step(write)


def test_a_graph_takes_a_marked_tensor_for_one_whose_address_stays() -> None:
    """As it does buffers. No guard is on the address, so another tensor in its place costs nothing."""

    class Holder:
        def __init__(self) -> None:
            self.marked = mark_static_address(torch.zeros(()))
            self.other = torch.zeros(())

    compilations: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        inputs = gm.graph.find_nodes(op="placeholder")
        compilations.append([n.name for n in inputs if "_dynamo_static_input_type" in n.meta["tensor_dict"]])
        return gm.forward

    holder = Holder()
    compiled = torch.compile(lambda x: x + holder.marked + holder.other, backend=backend, fullgraph=True)
    for number in range(3):
        holder.marked = mark_static_address(torch.full((), float(number)))
        assert compiled(torch.ones(())) == 1 + number
    assert [["marked" in name for name in static] for static in compilations] == [[True]]


class Outer(torch.optim.SGD):
    """Steps an optimizer of its own, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameter: torch.nn.Parameter, inner: torch.optim.Optimizer) -> None:
        super().__init__([parameter])
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_is_called_by_another_says_which_step_is_inside_of_which() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    outer = Outer(torch.nn.Parameter(torch.ones(1)), inner)
    asked: list[tuple[str, bool]] = []
    for optimizer in (inner, outer):
        optimizer.register_step_post_hook(
            lambda which, *_: asked.append((type(which).__name__, is_called_by_another(which)))
        )
    inner.step()
    outer.step()
    inner.step()
    assert asked == [("SGD", False), ("SGD", True), ("Outer", False), ("SGD", False)]


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    outer = Outer(torch.nn.Parameter(torch.ones(1)), inner)
    inner.register_step_pre_hook(lambda *_: asked.append("before") or 1 / 0)
    asked: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        outer.step()
    inner._optimizer_step_pre_hooks.clear()
    inner.register_step_post_hook(lambda which, *_: asked.append(is_called_by_another(which)))
    inner.step()
    assert asked == ["before", False]


@pytest.mark.parametrize("clamp_is_safe", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturating_by_comparison_is_clamping(
    monkeypatch: pytest.MonkeyPatch, clamp_is_safe: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch_internals, "CLAMP_IS_SAFE", clamp_is_safe)
    x = torch.tensor([0.0, -0.0, 1.0, 448.0, -448.0, 448.1, -1e30, math.inf, -math.inf, math.nan], dtype=dtype)
    for by_us, by_torch in (
        (torch_internals.saturate(x, 448.0), x.clamp(-448.0, 448.0)),
        (torch_internals.at_most(x, 448.0), x.clamp(max=448.0)),
    ):
        assert by_us.dtype is dtype
        assert torch.equal(by_us.nan_to_num(), by_torch.nan_to_num())
        assert torch.equal(by_us.isnan(), by_torch.isnan())
        assert torch.equal(by_us.signbit(), by_torch.signbit())


def test_where_triton_miscompiles_clamp_no_cast_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for clamp_is_safe, clamps in ((True, True), (False, False)):
        monkeypatch.setattr(torch_internals, "CLAMP_IS_SAFE", clamp_is_safe)
        graphs = graphs_of(lambda f: f(torch.randn(8, 8, requires_grad=True)).sum().backward(), Float8Linear(8, 8))
        assert (sum(graphs.calls("clamp")) > 0) is clamps


# Cached weights


def test_a_function_with_its_own_code_is_the_same_and_compiles_on_its_own_account() -> None:
    one = 1

    def plus_one(x: Tensor) -> Tensor:
        return x + one

    own = [with_own_code(plus_one) for _ in range(2)]
    assert len({function.__code__ for function in (plus_one, *own)}) == 3
    torch._dynamo.reset()
    compile: Any = torch.compile
    with torch._dynamo.config.patch(recompile_limit=2):
        for function in (plus_one, *own):
            compiled = compile(function, backend="eager", dynamic=False, fullgraph=True)
            for size in (2, 3):
                assert torch.equal(compiled(torch.zeros(size)), torch.ones(size))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(torch.zeros(4))


def test_without_modes_no_mode_sees_what_runs_and_afterwards_they_are_back() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        x = torch.ones(2)
        with without_modes():
            x.add_(1)
        x.mul_(2)
        with pytest.raises(ZeroDivisionError), without_modes():
            _ = 1 / 0
        x.sub_(1)
    assert torch.equal(x, torch.full((2,), 3.0))
    assert seen.ops == ["aten.ones.default", "aten.mul_.Tensor", "aten.sub_.Tensor"]


GRAPH_WRITES = {
    "nothing": lambda t: t.sum(),
    "in place": lambda t: t.mul_(2),
    "a view": lambda t: t[0].mul_(2),
    "an alias": lambda t: t.detach().mul_(2),
}


@pytest.mark.parametrize("name", GRAPH_WRITES)
def test_a_graph_breaks_where_it_has_written_to_a_tensor_and_only_there(name: str) -> None:
    tensor = torch.ones(2)
    tensor.add_(0)  # what was before the graph doesn't count

    def run(x: Tensor) -> Tensor:
        GRAPH_WRITES[name](tensor)
        break_graph_if_written(tensor)
        return x + tensor

    if name == "nothing":
        compiled, counter = compile_counted(run)
        assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))
        assert counter.frame_count == 1
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="cached cast"):
            compile_counted(run)[0](torch.zeros(2))
    torch._dynamo.reset()
    compile: Any = torch.compile
    compiled, before = compile(run, backend="aot_eager"), tensor.clone()
    result = compiled(torch.zeros(2))
    assert torch.equal(result, tensor)
    assert torch.equal(tensor, before) is (name == "nothing")


def test_eagerly_there_is_no_graph_to_break() -> None:
    tensor = torch.ones(2).mul_(2)
    break_graph_if_written(tensor)


@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_are_active_inside_of_them_also_where_they_are_traced(compiled: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 if transforms_are_active() else x * 3

    inside = {"grad": torch.func.grad(lambda x: f(x).sum()), "vmap": torch.vmap(f)}
    for name, run in {**inside, "none": f}.items():
        run = compile_counted(run)[0] if compiled else run
        assert torch.equal(run(torch.ones(2)), torch.full((2,), 3.0 if name == "none" else 2.0))
