"""What crosses from forward to backward: every tensor that is kept alive in between, in bytes, eager and compiled.

Measured over real forwards, not computed from shapes: eagerly through autograd's saved-tensor hooks; compiled from
what each forward graph hands its backward graph after Inductor's decompositions, joint-graph passes and partitioner
(no code is generated), plus what runs outside the graphs where they break, which is booked on the model itself. The
same is measured once more with float8 off, which is what the totals compare with.

What counts: the bytes of a storage, once, in the layer that kept it first. What doesn't: parameters, buffers, cached
weights (`cache_weight_casts`) and the model's arguments. They are alive anyway, so a weight that is saved to be cast
again costs nothing. The model's output counts where backward reads it. Not seen: what a selective checkpoint policy
saves eagerly, and what an autograd.Function leaves on its ctx: torch keeps both out of the hooks' sight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from float8_compile.convert import WRAPPER_NAMES, float8_disabled
from float8_compile.delayed_step import scales_of
from float8_compile.linear import Float8Linear
from float8_compile.table import text_table
from float8_compile.torch_internals import run_watched

Role = Literal["input", "weight", "scale", "other"]
Mode = Literal["eager", "compiled"]


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that forward keeps for backward.

    layer: name of the innermost module that keeps it (eager) or whose backward reads it (compiled); "" is the model.
    role: of a Float8Linear's tensors "input", "weight" or "scale" (or the amax that one is made of), else "other".
    nbytes: of its storage, which a view may use only part of.
    """

    layer: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class SavedTensorsReport:
    """What is kept, in the order in which it is saved: eager and compiled, and both again with float8 off.

    layers: the names of all modules, in the model's order. `str` gives a table, `total` sums.
    """

    layers: tuple[str, ...]
    eager: tuple[SavedTensor, ...]
    compiled: tuple[SavedTensor, ...]
    eager_without_float8: tuple[SavedTensor, ...]
    compiled_without_float8: tuple[SavedTensor, ...]

    def total(
        self, mode: Mode = "compiled", *, layer: str | None = None, role: Role | None = None, float8: bool = True
    ) -> int:
        """Bytes kept in all, or by one layer, or in one role; `float8=False`: by the same model without float8.

        Raises ValueError for a mode, role or layer that there isn't.
        """
        for given, known in ((mode, get_args(Mode)), (role, get_args(Role)), (layer, self.layers)):
            if given is not None and given not in known:
                raise ValueError(f"total of {given!r}: expected one of {', '.join(map(repr, known))}")
        rows: tuple[SavedTensor, ...] = getattr(self, mode if float8 else f"{mode}_without_float8")
        return sum(row.nbytes for row in rows if layer in (None, row.layer) and role in (None, row.role))

    def __str__(self) -> str:
        lines = [line for layer in self.layers for line in self._lines_of(layer)]
        lines += [_line("total", "", "", *self._totals())]
        lines += [_line(f"  {role}", "", "", *self._totals(role=role)) for role in get_args(Role)]
        table = text_table(("layer, tensor", "dtype", "shape", "   eager", "compiled"), lines)
        both = zip(get_args(Mode), self._totals(), self._totals(float8=False), strict=True)
        totals = (f"{mode} {readable(kept)} (without float8: {readable(plain)})" for mode, kept, plain in both)
        note = "Parameters, buffers and arguments are alive anyway and not counted; a storage counts once."
        return f"{table}\n{', '.join(totals)}\n{note}"

    def _lines_of(self, layer: str) -> Iterator[tuple[str, ...]]:
        """A layer's sums, then its tensors, those that look alike in one line."""
        sides = [[row for row in rows if row.layer == layer] for rows in (self.eager, self.compiled)]
        kinds = {(row.role, row.dtype, row.shape) for side in sides for row in side}
        if kinds:
            yield _line(layer or "(the model)", "", "", *self._totals(layer=layer))
        for role, dtype, shape in sorted(kinds, key=lambda kind: (get_args(Role).index(kind[0]), str(kind[1:]))):
            alike = [[r.nbytes for r in side if (r.role, r.dtype, r.shape) == (role, dtype, shape)] for side in sides]
            count = max(map(len, alike))
            shapes = f"{count} of {shape}" if count > 1 else str(shape)
            yield _line(f"  {role}", str(dtype).removeprefix("torch."), shapes, *map(sum, alike))

    def _totals(self, **which: Any) -> tuple[int, int]:
        return self.total("eager", **which), self.total("compiled", **which)


def saved_tensors_report(model: nn.Module, /, *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """What `model(*args, **kwargs)` keeps for backward: per layer and tensor, eager and compiled, with and without
    float8. The model may be compiled already, or have no Float8Linear.

    Runs the model's forward four times, as it is (train or eval, under the caller's autocast), and no backward.
    Gradients, buffers, random state, hooks and what was compiled before stay as they are.

    Raises TypeError for a model that is no nn.Module, ValueError where no output requires a gradient, and what the
    model itself raises.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"saved_tensors_report(model, *args) needs an nn.Module first, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)
    with _left_as_it_was(model), torch.enable_grad():
        kept = [_Forward(model, args, kwargs).eager(), _Forward(model, args, kwargs).compiled()]
        with float8_disabled(model):
            kept += [_Forward(model, args, kwargs).eager(), _Forward(model, args, kwargs).compiled()]
    return SavedTensorsReport(tuple(dict.fromkeys(_names(model).values())), *kept)


def readable(nbytes: int) -> str:
    """Bytes for people, in powers of 1000: "512 B", "1.2 kB", "167.8 MB"; "-" for none."""
    if nbytes < 1000:
        return f"{nbytes} B" if nbytes else "-"
    power = next(p for p in (1, 2, 3, 4) if nbytes < 999.95 * 1000**p or p == 4)
    return f"{nbytes / 1000**power:.1f} {' kMGT'[power]}B"


def _line(name: str, dtype: str, shape: str, eager: int, compiled: int) -> tuple[str, ...]:
    return name, dtype, shape, readable(eager).rjust(8), readable(compiled).rjust(8)


class _Forward:
    """One forward that is watched.

    saved: what was saved, in order. Held weakly, since what the output does not need of autograd's graph is dropped
        again; what graphs hand on is held by `by_graphs`.
    running: the modules whose forwards run, the innermost last (eager).
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.modules = {id(module): module for module in model.modules()}
        self.saved: list[weakref.ref[_Held]] = []
        self.by_graphs: list[_Held] = []
        self.running = [_Running(model)]

    def eager(self) -> tuple[SavedTensor, ...]:
        with _hooked(self.model, self.running), torch.compiler.set_stance("force_eager"):
            return tuple(self._rows(partial(self.model, *self.args, **self.kwargs)))

    def compiled(self) -> tuple[SavedTensor, ...]:
        with torch.compiler.set_stance("default"):
            return tuple(self._rows(partial(run_watched, self.model, self.args, self.kwargs, self._watch_graph)))

    def _rows(self, call: Callable[[], Any]) -> Iterator[SavedTensor]:
        with saved_tensors_hooks(self._pack, lambda held: held.tensor):
            output = call()
        if not any(tensor.requires_grad for tensor in _tensors(output)):
            raise ValueError(
                "no output of the model requires a gradient, so forward keeps nothing for backward: let a parameter "
                "or an argument require one, and return a tensor that depends on it and is not detached"
            )
        names, counted = _names(self.model), _storages([*_state(self.model), *_tensors([self.args, self.kwargs])])
        for held in [held for reference in self.saved if (held := reference())]:
            layer, tensor = names[id(held.module)], held.tensor
            for key, storage in _storages([tensor]).items():
                if key not in counted:
                    counted[key] = storage
                    yield SavedTensor(layer, held.role, tensor.dtype, tuple(tensor.shape), storage.nbytes())

    def _pack(self, tensor: Tensor) -> _Held:
        running = self.running[-1]
        return self._note(tensor, running.module, running.role_of(tensor))

    def _note(self, tensor: Tensor, module: nn.Module, role: Role) -> _Held:
        held = _Held(tensor.detach(), module, role)  # a node's own result would keep the node, which keeps `held`
        self.saved.append(weakref.ref(held))
        return held

    def _watch_graph(self, tensor: Tensor, readers: list[int], sources: list[Any]) -> None:
        """A tensor crosses. It belongs to a Float8Linear that reads it, the model's first, else to the first reader."""
        modules = [self.modules[key] for key in readers if key in self.modules]
        linears = [m for m in self.modules.values() if isinstance(m, Float8Linear) and m in modules]
        module = [*linears, *modules, self.model][0]
        self.by_graphs.append(self._note(tensor, module, _role_by_sources(module, tensor, sources)))


@dataclass(eq=False)
class _Held:
    """What autograd holds in place of a saved tensor."""

    tensor: Tensor
    module: nn.Module
    role: Role


@dataclass
class _Running:
    """A module whose forward runs, with its arguments, and whether its input has been saved already."""

    module: nn.Module
    arguments: Any = ()
    input_seen: bool = False

    def role_of(self, tensor: Tensor) -> Role:
        """By shape, and by order where (N, K) and (M, K) are the same: the input is saved first, if at all."""
        if not isinstance(layer := self.module, Float8Linear):
            return "other"
        n, k, shape = layer.out_features, layer.in_features, tuple(tensor.shape)
        may_be_input = any(shape == (x.numel() // k, k) for x in _tensors(self.arguments))
        is_weight = self.input_seen or not layer.weight.requires_grad or not may_be_input
        role = _role(layer, tensor, is_weight and shape in ((n, k), (k, n)))
        self.input_seen |= role == "input"
        return role


def _role(layer: Float8Linear, tensor: Tensor, is_weight: bool) -> Role:
    one_byte, shape = tensor.dtype.itemsize == 1, tensor.shape
    if not one_byte and (len(shape) == 0 or (len(shape) == 2 and 1 in shape)):
        return "scale"
    if is_weight:
        return "weight"
    return "input" if one_byte or layer.in_features in (shape[0], shape[-1]) else "other"


def _role_by_sources(layer: nn.Module, tensor: Tensor, sources: list[Any]) -> Role:
    """By what it was computed from: of the layer's own parameters alone, it is the weight."""
    if not isinstance(layer, Float8Linear):
        return "other"
    parameters = _storages(_state(layer))
    own = [key in parameters for key in _storages(_tensors(sources))]
    role = _role(layer, tensor, bool(own) and all(own))
    return "other" if role == "input" and tensor.dtype.itemsize > 1 and any(own) else role  # the layer's own output


@contextmanager
def _hooked(model: nn.Module, running: list[_Running]) -> Iterator[None]:
    """Inside, the last of `running` is the module whose forward runs."""

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as handles:
        for module in model.modules():
            enter = module.register_forward_pre_hook(
                lambda m, *arguments: running.append(_Running(m, arguments)), prepend=True, with_kwargs=True
            )
            handles.callback(enter.remove)
            handles.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, running amaxes and random state are what they were, whatever forward does to them."""
    amaxes = [(scale.amax, scale.amax.clone()) for module in model.modules() for scale in scales_of(module).values()]
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    cuda = {t.get_device() for t in _state(model) if t.is_cuda}
    with torch.random.fork_rng(sorted(cuda)):
        try:
            yield
        finally:
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer)
                if not (buffer.is_meta or torch.equal(buffer, before)):  # write no equal one: autograd counts versions
                    buffer.detach().copy_(before)
            for amax, before in amaxes:
                amax.copy_(before)


def _state(module: nn.Module) -> list[Tensor]:
    scales = [scale for m in module.modules() for scale in scales_of(m).values()]
    casts = [m.cached_weight for m in module.modules() if isinstance(m, Float8Linear)]
    return [
        *module.parameters(),
        *module.buffers(),
        *(t for s in scales for t in (s.amax, s.scale, s.unscale)),
        *(t for cast in casts if cast is not None for t in cast.tensors()),
    ]


def _names(model: nn.Module) -> dict[int, str]:
    """By id, without what torch.compile, FSDP1 and activation checkpointing put into names."""
    return {id(m): ".".join(p for p in fqn.split(".") if p not in WRAPPER_NAMES) for fqn, m in model.named_modules()}


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, Mapping)) or is_dataclass(tree):
        tree = vars(tree) if is_dataclass(tree) and not isinstance(tree, Mapping) else tree
        for branch in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(branch)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """By id, which stays as long as somebody holds the storage. A subclass (DTensor, Float8Tensor) has its parts'."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            storages |= _storages([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            storages[id(tensor.untyped_storage())] = tensor.untyped_storage()
    return storages
