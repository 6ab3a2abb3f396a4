"""What in a preview could be better, each finding with its numbers and what to do about it.

Only what the graphs prove: a finding names launches, bytes and layers, its seconds are datasheet bounds, and where a
tensor's way through the graph isn't known there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from float8_compile.preview.casts import Casts
from float8_compile.preview.dataflow import Dataflow
from float8_compile.preview.result import Graph, Launch, Preview
from float8_compile.preview.roles import (
    is_float8,
    layer_names,
    only_moves_float8,
    only_takes_amax,
    operators,
    shortened,
)
from float8_compile.preview.shared_inputs import shared_inputs
from float8_compile.targets import Target, named

Kind = Literal["costs more than it saves", "sectors", "spills", "copy", "input cast twice", "amax", "weight cast twice"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MEGABYTE = 10**6
WORTH_A_WORD = MEGABYTE  # bytes of traffic: less than that is lost in a launch's own microseconds
COALESCED = 1.3  # bytes in sectors, of a byte that is used: up to here a few edges explain it


@dataclass(frozen=True)
class Advice:
    """One finding.

    kind: "costs more than it saves", a layer's casts against its GEMMs; "sectors", a kernel none of whose configs is
        coalesced; "spills", a kernel each of whose configs spills; "copy", a kernel that only moves float8; "input cast
        twice", by layers that read the same tensor; "amax", a tensor read for its amax alone; "weight cast twice", in
        forward and in backward.
    layers: whom it is about. nbytes: of traffic that it is about. text: in words, with numbers and the remedy.
    """

    kind: Kind
    layers: tuple[str, ...]
    nbytes: int
    text: str


def advise(preview: Preview) -> tuple[Advice, ...]:
    """What could be better, kind by kind, the largest first."""
    target = named(preview.target)
    found = [advice for graph in preview.graphs for advice in _of_graph(graph, target)]
    casts = Casts(preview, target)
    found += _weights_cast_twice(casts, target)
    found += _not_worth_it(casts)
    return tuple(sorted(found, key=lambda advice: (KINDS.index(advice.kind), -advice.nbytes)))


def _of_graph(graph: Graph, target: Target) -> Iterator[Advice]:
    flow = Dataflow(graph)
    for position, launch in enumerate(graph.launches):
        yield from _copy(launch, graph.phase)
        yield from _amax(flow, position, target)
        yield from _sectors(launch, graph, target)
        yield from _spills(launch, graph)
    if graph.phase != "backward":
        yield from _inputs_cast_twice(graph, target)


def _copy(launch: Launch, phase: str) -> Iterator[Advice]:
    if only_moves_float8(launch) and launch.sectors >= WORTH_A_WORD:
        padded = "constant_pad_nd" in operators(launch)
        remedy = (
            "a size is no multiple of 16 and is padded: choose sizes that are, or leave the layer out"
            if padded
            else "a copy, mostly a transposed one, that was not fused with the cast before it"
        )
        yield _advice("copy", launch, launch.sectors, f"only moves float8 in {phase}, {_cost(launch)}: {remedy}")


def _amax(flow: Dataflow, position: int, target: Target) -> Iterator[Advice]:
    """A launch that only reduces what another one, which gets the result, reads again in order to cast it."""
    launch = flow.graph.launches[position]
    if not only_takes_amax(launch):
        return
    for later in flow.after(position, through=lambda between: between.sectors < WORTH_A_WORD):
        read_again = {value for value, _ in flow.reads[later]}
        nbytes = sum(b.reads for value, b in flow.reads[position] if value in read_again and not is_float8(b))
        if nbytes >= WORTH_A_WORD and any(is_float8(buffer) for _, buffer in flow.writes[later]):
            purpose = "an amax among other reductions" if _reduces_otherwise(launch) else "an amax alone"
            text = (
                f"reads {_mb(nbytes)} in {flow.graph.phase} for {purpose}, at least {_us(nbytes / target.bandwidth)}, "
                f'and {_short(flow.graph.launches[later])} reads it again to cast it: with config="delayed" one kernel '
                "can do both"
            )
            yield _advice("amax", launch, nbytes, text)
            return


def _reduces_otherwise(launch: Launch) -> bool:
    return not operators(launch).isdisjoint({"sum", "mean", "rsqrt", "var_mean", "prod"})


def _sectors(launch: Launch, graph: Graph, target: Target) -> Iterator[Advice]:
    nbytes = launch.reads + launch.writes
    wasted = launch.sectors - nbytes
    if launch.name in graph.kernels and launch.sectors > COALESCED * nbytes and wasted >= WORTH_A_WORD:
        configs = len(graph.kernels[launch.name].configs)
        text = (
            f"moves {_mb(launch.sectors)} in sectors for {_mb(nbytes)} in {graph.phase}, at least "
            f"{_us(wasted / target.bandwidth)} lost: "
            + (f"none of its {configs} configs is coalesced" if configs > 1 else "its only config is not coalesced")
        )
        yield _advice("sectors", launch, launch.sectors, text)


def _spills(launch: Launch, graph: Graph) -> Iterator[Advice]:
    configs = graph.kernels[launch.name].configs if launch.name in graph.kernels else ()
    spills = [config.spills or 0 for config in configs]
    if spills and min(spills) > 0:
        every = f"each of its {len(spills)} configs spills" if len(spills) > 1 else "its only config spills"
        text = f"{every} registers to memory in {graph.phase}: at least {min(spills)} bytes a thread"
        yield _advice("spills", launch, launch.sectors, text)


def _inputs_cast_twice(graph: Graph, target: Target) -> Iterator[Advice]:
    for shared in shared_inputs(graph):
        first, *others = shared.layers
        nbytes = (shared.casts - 1) * shared.nbytes
        if nbytes >= WORTH_A_WORD:
            text = (
                f"{layer_names(shared.layers, 9)}: read the same tensor and have {shared.casts} casts of it made, "
                f"{_mb(shared.nbytes)} each; with one scale ({others[0]}.input_scale = {first}.input_scale, which "
                f"`calibrate` does by itself) at least {_mb(nbytes)} of traffic are spared, "
                f"{_us(nbytes / target.bandwidth)} or more"
            )
            yield Advice("input cast twice", shared.layers, nbytes, text)


def _weights_cast_twice(casts: Casts, target: Target) -> Iterator[Advice]:
    """One finding for all of them: keeping spares the same for each byte kept, whatever the layer."""
    found = casts.weights_cast_twice()
    if found:
        kept, spared = (sum(each) for each in zip(*found.values(), strict=True))
        text = (
            f"{layer_names(tuple(found), len(found))}: cast in forward and again in backward; float8_compile's "
            f"recompute_weight_cast=False keeps {_mb(kept)} in between and spares {_mb(spared)} of traffic, at least "
            f"{_us(spared / target.bandwidth)} each time"
        )
        yield Advice("weight cast twice", tuple(found), spared, text)


def _not_worth_it(casts: Casts) -> Iterator[Advice]:
    for layer, balance in casts.balances().items():
        if balance.nbytes >= WORTH_A_WORD and balance.cost > balance.saved:
            text = (
                f"{layer_names((layer,))}: its casts move {_mb(balance.nbytes)}, {_us(balance.cost)} at datasheet "
                f"speed, and float8 saves its GEMMs {_us(balance.saved)} of {_us(balance.high_precision)}: leave it "
                "out with module_filter_fn"
            )
            yield Advice("costs more than it saves", (layer,), round(balance.nbytes), text)


def _advice(kind: Kind, launch: Launch, nbytes: int, text: str) -> Advice:
    return Advice(kind, launch.layers, nbytes, f"{layer_names(launch.layers)}: {_short(launch)} {text}")


def _short(launch: Launch) -> str:
    return shortened(launch.name.removeprefix("triton_"), 40)


def _cost(launch: Launch) -> str:
    return f"{_mb(launch.sectors)} in sectors, at least {_us(launch.seconds)}"


def _mb(nbytes: float) -> str:
    return f"{nbytes / MEGABYTE:,.1f} MB"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"
