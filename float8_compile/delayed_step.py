"""Who has delayed scales, and when they move on: once per optimizer step, by themselves.

    optimizer.step()  ->  after_step  ->  the layers whose weights it holds
                                          their running amaxes, and their weights' own   one vector
                                          all-reduce MAX over the recipe's group         one call a group
                                          the update rule (delayed.py)                   one graph on a GPU

A layer that no optimizer trains (frozen, LoRA's base) moves along with any optimizer. `update_delayed_scaling` does the
same by hand; where nothing ran since, nothing happens.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile.after_step import listen
from float8_compile.cast import batched_amax
from float8_compile.collectives import largest_of_all
from float8_compile.delayed import ROLES, DelayedScale, DelayedScales, move_on
from float8_compile.recipe import Recipe

UNSEEN_BACKWARDS = 20

_alive: weakref.WeakValueDictionary[int, DelayedScales] = weakref.WeakValueDictionary()  # in order, as on every rank
_serial_numbers = itertools.count()
_alike: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()  # by group: what was checked


def scales_of(layer: nn.Module) -> dict[str, DelayedScale]:
    """The layer's entries, by role: its attributes `input_scale`, `grad_output_scale`, `weight_scale`."""
    found = {role: vars(layer).get(f"{role}_scale") for role in ROLES}
    return {role: scale for role, scale in found.items() if scale is not None}


def give_scales(layers: Sequence[nn.Linear], recipes: Sequence[Recipe]) -> None:
    """Entries for what each layer's recipe delays, and None for the rest.

    Layers with equal settings on one device share their vectors. A layer whose settings stay keeps its state.
    """
    together: dict[Any, list[nn.Linear]] = {}
    for layer, recipe in zip(layers, recipes, strict=True):
        settings = recipe.delayed, tuple(recipe.delayed_cast(role) for role in ROLES)
        kept = scales_of(layer).values()
        if kept and all((entry.scales.delayed, entry.scales.casts) == settings for entry in kept):
            continue
        for role in ROLES:
            setattr(layer, f"{role}_scale", None)
        if any(settings[1]):
            together.setdefault((*settings, layer.weight.device), []).append(layer)
    for (delayed, casts, device), alike in together.items():
        scales = DelayedScales(len(alike), delayed, casts, device)
        for row, layer in enumerate(alike):
            for role, entry in scales.entries(row).items():
                setattr(layer, f"{role}_scale", entry)
            adopt(layer)
        watch(next((layer for layer in alike if layer.weight.requires_grad), alike[0]))


def adopt(layer: nn.Linear) -> None:
    """Let the vectors that hold a layer's entries know it: after it was made, copied, loaded or moved."""
    for entry in scales_of(layer).values():
        scales = entry.scales
        if not any(holder() is layer for holder in scales.holders):
            scales.holders.append(weakref.ref(layer))
        if not any(known is scales for known in _alive.values()):
            _alive[next(_serial_numbers)] = scales
            listen(_after_step)


@torch.no_grad()
def advance(chosen: Callable[[nn.Linear], bool], skipped: Tensor | None = None) -> None:
    """Move on the entries of the chosen layers; none of them where `skipped` is > 0, which the host doesn't ask.

    Collective: each rank of a recipe's group must call it, for layers with the same settings in the same order.
    """
    moving = _moving(chosen)
    together = _by_group(moving)
    if any(_layers(parts) not in _known(group) for group, parts in together):
        # A model that was dropped is alive until its cycles are collected, which ranks do at other times, and a frozen
        # layer of it would move along on some ranks only.
        del moving, together
        gc.collect()
        moving = _moving(chosen)
        together = _by_group(moving)
        for group, parts in together:
            _check_alike(group, parts)
    for part, amax in zip(moving, _reduced(moving, together), strict=True):
        _move(part, amax, skipped)


@contextlib.contextmanager
def running_amaxes_kept() -> Iterator[None]:
    """What runs inside leaves no trace in running amaxes, which is all that forward and backward move."""
    before = [(scales, scales.amax.clone()) for scales in _alive.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for scales, amax in before:
                scales.amax.copy_(amax)


def _after_step(stepped: set[int], skipped: Tensor | None) -> None:
    advance(partial(_trained_by, stepped), skipped)


def _trained_by(stepped: set[int], layer: nn.Linear) -> bool:
    parameters = list(layer.parameters())
    return any(id(p) in stepped for p in parameters) or not any(p.requires_grad for p in parameters)


def _held(scales: DelayedScales) -> dict[nn.Linear, list[DelayedScale]]:
    """The layers that have entries in these vectors, and those entries."""
    layers = [layer for holder in scales.holders if (layer := holder()) is not None]
    held = {layer: [entry for entry in scales_of(layer).values() if entry.scales is scales] for layer in layers}
    return {layer: entries for layer, entries in held.items() if entries}


@dataclass(frozen=True)
class _Moving:
    """Vectors, the layers that have entries in them, and which of these layers move on."""

    scales: DelayedScales
    held: dict[nn.Linear, list[DelayedScale]]
    layers: set[nn.Linear]

    def entries(self) -> list[DelayedScale]:
        return [entry for layer, entries in self.held.items() if layer in self.layers for entry in entries]

    def mask(self) -> Tensor | None:
        """The entries that move, or None for all."""
        if len(self.layers) == len(self.held):
            return None
        return self.scales.mask({entry.position for entry in self.entries()})


def _moving(chosen: Callable[[nn.Linear], bool]) -> list[_Moving]:
    every = [(scales, _held(scales)) for scales in list(_alive.values()) if not scales.amax.is_meta]
    moving = [_Moving(scales, held, set(filter(chosen, held))) for scales, held in every]
    return [part for part in moving if part.layers]


def _amaxes(moving: _Moving) -> Tensor:
    """This step's amaxes, (3 · layers,): the running ones, and the weights' own."""
    scales = moving.scales
    first = ROLES.index("weight") * scales.count
    weights = {
        entry.position - first: _local(layer.weight)
        for layer, (*_, entry) in moving.held.items()
        if layer in moving.layers and entry.position >= first
    }
    of_weights = batched_amax([weights.get(row) for row in range(scales.count)], scales.amax.device)
    return torch.cat([scales.amax[:first], of_weights])


def _local(weight: Tensor) -> Tensor:
    """What this rank holds of a weight: amaxes are reduced over the ranks anyway."""
    to_local = getattr(weight, "to_local", None)
    return to_local() if to_local is not None else weight


def _by_group(moving: Sequence[_Moving]) -> list[tuple[Any, list[_Moving]]]:
    """What is reduced in one call: all that share a group of several ranks and a device."""
    together: dict[Any, tuple[Any, list[_Moving]]] = {}
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for part in moving:
            group = part.scales.delayed.group
            if torch.distributed.get_world_size(group) > 1:
                together.setdefault((group, part.scales.amax.device), (group, []))[1].append(part)
    return list(together.values())


def _reduced(moving: Sequence[_Moving], together: Sequence[tuple[Any, list[_Moving]]]) -> list[Tensor]:
    """The amaxes of each, the largest of all ranks; together: as `_by_group` gives it."""
    amaxes = {id(part): _amaxes(part) for part in moving}
    for group, parts in together:
        vector = torch.cat([amaxes[id(part)] for part in parts])
        reduced = largest_of_all(vector, group).split([len(amaxes[id(part)]) for part in parts])
        amaxes |= {id(part): of_all for part, of_all in zip(parts, reduced, strict=True)}
    return [amaxes[id(part)] for part in moving]


def _layers(parts: Sequence[_Moving]) -> tuple[int, tuple[tuple[str, int, int], ...]]:
    """How many amaxes are reduced, and the names and sizes of the layers that they are of."""
    layers = (layer for part in parts for layer in part.held)
    names = tuple((getattr(layer, "fqn", ""), layer.in_features, layer.out_features) for layer in layers)
    return sum(len(part.scales.amax) for part in parts), names


def _known(group: Any) -> set[Any]:
    return _alike.setdefault(group or torch.distributed.group.WORLD, set())


def _check_alike(group: Any, parts: Sequence[_Moving]) -> None:
    """Raise RuntimeError on every rank where ranks have other layers, before amaxes are mixed.

    Collective, and the host reads the answer: once for each set of layers. Other lengths would hang or fail in the
    reduction itself.
    """
    length, names = _layers(parts)
    if (length, names) in _known(group):
        return
    described = [length, zlib.crc32(repr(names).encode())]
    answer = torch.tensor([n * sign for n in described for sign in (1, -1)], device=parts[0].scales.amax.device)
    torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX, group=group)
    longest, minus_shortest, name, minus_name = answer.tolist()
    if (longest, name) != (-minus_shortest, -minus_name):
        raise RuntimeError(
            f"the ranks that share amaxes have different layers with delayed scales: this one {len(names)}, from "
            f"{names[0][0]!r} to {names[-1][0]!r}. Ranks whose layers differ (pipeline stages) need a group each: "
            "dataclasses.replace(recipe, delayed=DelayedScaling(group=...)) with the ranks that have the same layers"
        )
    _known(group).add((length, names))


def _move(moving: _Moving, amax: Tensor, skipped: Tensor | None) -> None:
    scales, entries = moving.scales, moving.entries()
    vectors = scales.amax, scales.amax_history, scales.scale, scales.unscale
    mask = moving.mask()
    if skipped is not None:
        taken = (skipped.to(amax.device, non_blocking=True) == 0).expand_as(amax)
        mask = taken if mask is None else mask & taken
    move: Any = _compiled_move_on() if amax.is_cuda else move_on
    move(amax, mask, *vectors, scales.casts, scales.delayed)
    # A backward that is still to come would use other scales than its forward did: autograd shall refuse it.
    torch.autograd.graph.increment_version([t for entry in entries for t in (entry.scale, entry.unscale)])
    scales.updates += 1
    if amax.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a whole step is captured: nothing may be read, and a replay would not read it
    _look_for_evidence(scales, [entry for entries in moving.held.values() for entry in entries])


@cache
def _compiled_move_on() -> Any:
    """On a GPU only, where its thirty small launches cost more than what they compute."""
    return torch.compile(move_on, fullgraph=True)


def _look_for_evidence(scales: DelayedScales, entries: Sequence[DelayedScale]) -> None:
    """Tell Python which entries have a scale now.

    The one read of the device by the host: after the 1st, 2nd, 4th, ... update, while there is an entry without a
    scale (an expert that gets no tokens, a layer whose gradient is zero), so graphs change seldom.
    """
    if scales.updates & (scales.updates - 1) == 0 and any(not entry.calibrated for entry in entries):
        values = scales.scale.tolist()
        for entry in entries:
            entry.calibrated = entry.calibrated or values[entry.position] > 0


def watch(layer: nn.Linear) -> None:
    """Warn, once for all layers of a conversion, where backward ran 20 times and nothing was ever updated.

    Counted by a hook on a parameter's gradient, outside every graph; it removes itself after the first update.
    """
    parameter = next((p for p in layer.parameters() if p.requires_grad), None)
    if parameter is None:
        return
    watched, seen = weakref.ref(layer), itertools.count(1)

    def count(_: Tensor) -> None:
        alive = watched()
        scales = next((entry.scales for entry in scales_of(alive).values()), None) if alive is not None else None
        if scales is None or scales.updates or scales.warned:
            handle.remove()
        elif next(seen) == UNSEEN_BACKWARDS:
            scales.warned = True
            warnings.warn(
                f"{UNSEEN_BACKWARDS} backward passes through delayed scaling and no optimizer step that its layers "
                "could see: their scales don't move. Call update_delayed_scaling(model) after each step, which is "
                "needed where an optimizer holds copies of the weights or is no torch.optim.Optimizer.",
                stacklevel=2,
            )

    handle = parameter.register_post_accumulate_grad_hook(count)
