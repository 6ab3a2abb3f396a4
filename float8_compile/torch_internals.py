"""Every name of torch that we use and that torch does not promise to keep.

One entry each: why it is needed, what would break it, when to delete it. `tests/test_torch_internals.py` asks
for every one of them, so a torch that drops a name fails there and says which. Nothing here patches torch or
changes a setting.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from inspect import isbuiltin, signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

__all__ = [
    "apply_function",
    "at_most",
    "break_graph_if_written",
    "copy_all",
    "disabled_torch_function",
    "foreach_amax",
    "guard_or_false",
    "is_called_by_another",
    "is_nested_transform",
    "is_transformed",
    "is_watched",
    "local_part",
    "make_wrapper",
    "mark_static_address",
    "put_local_part",
    "raise_to",
    "run_watched",
    "saturate",
    "scaled_mm",
    "statically_known_true",
    "transforms_are_active",
    "with_own_code",
    "without_dispatch",
    "without_modes",
    "without_subclass",
    "written_arguments",
]


# torch._scaled_mm: the float8 GEMM, on the CPU, CUDA and ROCm. torch.nn.functional.scaled_mm is its public face
# since 2.10, but traces to `_scaled_mm_v2`, for which Inductor has no epilogue fusion or templates in 2.11.
# Delete when the oldest torch that we support lowers the public one equally well.
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool = False
) -> Tensor:
    """`torch._scaled_mm`, which autocast shall not see.

    On a CPU without a float8 GEMM torch's kernel falls back on a float32 one, which autocast would turn into a
    bfloat16 one: float32 results of 8 bits, and not those of a compiled graph.
    """
    if torch.is_autocast_enabled("cpu") and a.is_cpu:
        with torch.autocast("cpu", enabled=False):
            return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


# torch.Tensor._make_wrapper_subclass: the constructor that every traceable wrapper subclass uses, torch's own
# (DTensor) and torchao's; there is no public one. https://github.com/albanD/subclass_zoo
make_wrapper = Tensor._make_wrapper_subclass

# torch._C._disabled_torch_function_impl: what torch's own subclasses set as `__torch_function__` when only
# `__torch_dispatch__` shall see them. Documented in "Extending PyTorch", without a public alias.
disabled_torch_function = torch._C._disabled_torch_function_impl

# statically_known_true, guard_or_false (torch.fx.experimental.symbolic_shapes, documented but "experimental"):
# questions about a symbolic size. The first never adds a guard, so that padding to 16 costs no recompilation per
# token count. The second asks where it can, which adds a guard (none for 0 and 1, which have graphs of their own
# anyhow), and says no of a size that depends on data. Dynamo knows both by name and evaluates them while it traces
# (2.11, 2.13, 2.14).


# From torch 2.14 on Inductor writes clamp as `tl.minimum(..., PropagateNan.ALL)`, and Triton 3.8 then miscompiles a
# transposed one-byte store beside it: garbage that reads as NaN (https://github.com/triton-lang/triton/issues/11111).
# The same values by comparison use no such instruction, at twice the graph nodes. Delete when Triton has mended it.
CLAMP_IS_SAFE = torch.__version__ < (2, 14)  # type: ignore[operator]


def at_most(x: Tensor, largest: float) -> Tensor:
    """`x.clamp(max=largest)`; NaN stays NaN."""
    return x.clamp(max=largest) if CLAMP_IS_SAFE else torch.where(x > largest, largest, x)


def saturate(x: Tensor, largest: float) -> Tensor:
    """`x.clamp(-largest, largest)`; NaN stays NaN."""
    if CLAMP_IS_SAFE:
        return x.clamp(-largest, largest)
    return torch.where(x < -largest, -largest, at_most(x, largest))


_APPLY_BINDS = not isbuiltin(torch.autograd.Function.apply)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, without the 30 us that it takes eagerly to bind arguments of a `setup_context`.

    Up to torch 2.13 `Function.apply` looks up and binds the signature at each call, for keyword arguments that we
    don't use; its C++ base class has the rest. Dynamo and functorch know only the public one (the second question is
    torch._C._are_functorch_transforms_active). Delete when 2.14, where `apply` itself is C++, is the oldest.
    """
    if not _APPLY_BINDS or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def is_transformed() -> bool:
    """Whether this runs under one of torch.func's transforms, which refuse to write to tensors from outside.

    torch._C._are_functorch_transforms_active. Not asked under Dynamo, which traces each transform.
    """
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """Whether a dispatch mode sees each op: a selective checkpoint that saves one's result refuses a write to it.

    torch._C._len_torch_dispatch_stack, which torch.utils._python_dispatch is made of. Delete when
    `_CachingTorchDispatchMode` allows writes in the region that made the tensor.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def transforms_are_active() -> bool:
    """Whether this runs under one of torch.func's transforms, also where Dynamo traces them.

    torch._C._are_functorch_transforms_active, which Dynamo takes for a constant.
    """
    return torch._C._are_functorch_transforms_active()


def foreach_amax(tensors: list[Tensor]) -> list[Tensor]:
    """The largest magnitude of each, float32, in as few launches as tensors fit into one. Non-empty tensors only.

    torch._foreach_norm: what torch.nn.utils' gradient clipping and torchao use; no foreach op has a public name.
    """
    return list(torch._foreach_norm(tensors, math.inf, dtype=torch.float32))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Each source into its target, in one call.

    torch._foreach_copy_: see `foreach_amax`.
    """
    torch._foreach_copy_(targets, sources)


def local_part(tensor: Tensor) -> Tensor | None:
    """What this rank holds of a DTensor, the object itself; None of any other tensor.

    DTensor._local_tensor: `to_local()` gives another object, without what is written on this one, and without which
    FSDP2 does not ask it for a float8 all-gather: FSDPParam reads `_local_tensor` too. Delete when FSDP2 takes its
    extension from elsewhere.
    """
    return getattr(tensor, "_local_tensor", None)


def put_local_part(tensor: Tensor, local: Tensor) -> None:
    """Have a DTensor hold this tensor of the same numbers. See `local_part`; FSDP2 does the same when it pads."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def without_subclass(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function(*args, **kwargs)` from a `__torch_function__`, which it does not come back to; results are plain.

    torch._C.DisableTorchFunctionSubclass: what `Tensor.__torch_function__` is made of, in "Extending PyTorch".
    """
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def without_dispatch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function(*args, **kwargs)` from a `__torch_dispatch__`, which it does not come back to; results are plain.

    torch._C._DisableTorchDispatch: a subclass with a storage of its own has no inner tensor to go on with. Delete when
    FSDP2 takes its extension from elsewhere.
    """
    with torch._C._DisableTorchDispatch():
        return function(*args, **kwargs)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors, alone and in lists, that this op of a `__torch_dispatch__` writes to.

    OpOverload._schema: what torch.utils' own schema checks ask. Delete when an op tells in public.
    """
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return found


def raise_to(running: Tensor, amax: Tensor) -> None:
    """`running = maximum(running, amax)`, in place, where a running inf or NaN counts for 0.

    So what is not finite lasts until the next finite amax: an update right after it sees it, but a step that GradScaler
    skips, where no update follows, does not hide the evidence of the next one.

    Under a dispatch mode torch._foreach_copy_, because it returns nothing: what an op returns a selective checkpoint
    policy may save, and torch then takes the very write of an op in place for a change behind its back (BatchNorm can't
    run in such a region either). No foreach op has a public name. Delete when `_CachingTorchDispatchMode` leaves them
    out.
    """
    finite = running.nan_to_num(0.0, 0.0, 0.0)
    if torch.compiler.is_compiling():
        running.copy_(torch.maximum(finite, amax))
    elif is_watched():
        torch._foreach_copy_([running], [torch.maximum(finite, amax)])
    else:
        torch.maximum(finite, amax, out=running)


def mark_static_address(tensor: Tensor) -> Tensor:
    """The tensor, marked as one whose address stays: CUDA graphs then write to it in place, as they do to buffers.

    torch._dynamo.mark_static_address: documented with torch.compile, but in a private module, which brings the
    compiler; imported here, when the first state is made.
    """
    from torch._dynamo import mark_static_address

    mark_static_address(tensor, guard=False)
    return tensor


def without_modes() -> AbstractContextManager[None]:
    """Inside, no dispatch mode sees what runs: a selective checkpoint would count ops that it will not see again.

    torch.utils._python_dispatch._disable_current_modes, which torch's own compilers use for the same. Delete when torch
    offers it in public.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def break_graph_if_written(tensor: Tensor) -> None:
    """End the graph here where it has written to the tensor, so that what guards ask is asked anew; fullgraph=True then
    raises. Nothing outside of Dynamo.

    torch._dynamo.comptime: public by its docstring, but in a private module, which brings the compiler. It hands out
    the fake tensor of the trace, whose count of writes begins at 0. Delete when guards can look into a graph.
    """
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_break_graph_if_written)


def _break_graph_if_written(context: Any) -> None:
    if context.get_local("tensor").as_fake()._version:
        context.graph_break(
            "a weight is written to and used in one graph, which its cached cast (cache_weight_casts) can't follow; "
            "write to it outside of the compiled function, or remove the cache"
        )


def is_called_by_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the `step` of another optimizer, whose hooks are still to come, called this one's.

    torch.optim.Optimizer.profile_hook_step wraps `step` in a function that calls the hooks: its frames are looked for
    on the stack, since a hook before the step would not hear of one that raises. A torch that renames it, or its
    `self`, breaks this. Delete when torch tells a hook.
    """
    file, frame = torch.optim.Optimizer.profile_hook_step.__code__.co_filename, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == file:
            stepping = frame.f_locals.get("self")  # in code that Dynamo made there may be none
            if isinstance(stepping, torch.optim.Optimizer) and stepping is not optimizer:
                return True
    return False


def is_nested_transform() -> bool:
    """Whether this runs under two or more of torch.func's transforms, such as grad of grad.

    torch._C._functorch.maybe_current_level: the depth, or None. Not asked under Dynamo, which traces each transform.
    """
    if torch.compiler.is_compiling():
        return False
    level = torch._C._functorch.maybe_current_level()
    return level is not None and level > 1


def run_watched(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    watch: Callable[[Tensor, list[int], list[Any]], Any],
) -> Any:
    """`function(*args, **kwargs)`, split into forward and backward graphs as Inductor would, without generated code.

    `watch(tensor, modules, sources)` hears of each tensor that a forward graph hands its backward graph.
    modules: the ids of the innermost modules whose backward reads the tensor, in order, then of the one that made it.
    sources: the graph's inputs that it was computed from.
    Shapes are static. Nothing compiled before is dropped, no setting is changed and no compile cache is written. The
    output has its autograd graph, but what it ran with is forgotten, except in frames behind a graph break.

    Needs AOTAutograd with Inductor's decompositions, joint-graph passes and partitioner, which only its private
    modules offer; imported here, since they bring the compiler. A torch that moves one of them breaks it, or one that
    names backward's placeholders otherwise than forward's nodes, or one whose `nn_module_stack` has no ids of modules
    for keys (then modules is empty). Delete when torch reports what it saves.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.eval_frame import reset_code  # type: ignore[attr-defined]
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    watchers = [watch]
    backward_of_the_next: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        with V.set_fake_mode(detect_fake_mode(inputs)):  # which the joint-graph passes want, for random numbers
            forward, backward = partition_fn(joint, inputs, **options)
        backward_of_the_next[:] = [backward]
        return forward, backward

    def compile_forward(forward: fx.GraphModule, _: Any) -> Callable[..., Any]:
        backward = backward_of_the_next.pop() if backward_of_the_next else None
        crossing = {node.name: node for node in backward.graph.find_nodes(op="placeholder")} if backward else {}

        def run(*inputs: Any) -> Any:
            results, sources = forward.forward(*inputs), _sources(forward.graph)
            for node, value in zip(forward.graph.output_node().args[0], results, strict=True):  # type: ignore[arg-type]
                if isinstance(node, fx.Node) and node.name in crossing and isinstance(value, Tensor):
                    modules = _modules([*crossing[node.name].users, node])
                    for tell in watchers:
                        tell(value, modules, [inputs[position] for position in sources[node]])
            return results

        return run

    def watched(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    backend = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=lambda backward, _: backward.forward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    own = with_own_code(watched)  # and frames behind a graph break a bucket of their own where torch has that (2.13)
    isolated = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
    compile: Any = torch.compile
    try:
        return compile(own, backend=backend, dynamic=False, **isolated)(*args, **kwargs)
    finally:
        watchers.clear()  # Dynamo's caches outlive code objects, and with them would whatever `watch` knows
        reset_code(own.__code__)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which Dynamo counts compilations apart: its caches and their limit belong to a code."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__, closure=function.__closure__)


_numbers = itertools.count()


def _sources(graph: fx.Graph) -> dict[fx.Node, set[int]]:
    """The positions of the graph's inputs that each node is computed from."""
    sources = {node: {position} for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    for node in graph.nodes:
        if node not in sources:
            sources[node] = set().union(*(sources[before] for before in node.all_input_nodes))
    return sources


def _modules(nodes: Iterable[fx.Node]) -> list[int]:
    """The ids of the modules in which the nodes ran: a key is one, with "@1" at a second call."""
    stacks = (node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {"": ()} for node in nodes)
    innermost = (next(reversed(stack)).split("@")[0] for stack in stacks)
    return [int(key) for key in innermost if key.isdigit()]


def not_compiled_by_itself(function: Any) -> None:
    """Have Dynamo run this function eagerly where it is called from no graph, and trace it as ever where it is.

    A compiled module calls its own hooks so, and each would be a graph, whose gradients AOTAutograd takes for
    Float8Tensors where its outputs are. torch._C._dynamo.eval_frame.set_code_exec_strategy: what Dynamo skips frames
    by; torch.compiler.disable would break a graph that calls the function. Delete when hooks of a compiled module are
    in its graph (torch._dynamo.config.wrap_top_frame).
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
