"""What a layer's casts cost, and what its float8 GEMMs save: each GEMM's operands, followed back to who made them.

Casts that are fused into a kernel which would run anyway cost nothing; one that does nothing but cast, or that only
takes an amax, costs what it moves, shared by the layers that it serves. Times are bounds, as everywhere in a preview.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from float8_compile.preview.dataflow import Dataflow, Value
from float8_compile.preview.result import Buffer, Launch, Preview
from float8_compile.preview.roles import is_float8, large, only_takes_amax, operators
from float8_compile.targets import Target


@dataclass
class Balance:
    """Of one layer. nbytes, cost: bytes and seconds of its casts. saved: seconds that its GEMMs take less in float8
    than in bfloat16, of `high_precision` seconds."""

    nbytes: float = 0.0
    cost: float = 0.0
    saved: float = 0.0
    high_precision: float = 0.0


class Casts:
    """Of all graphs of a preview."""

    def __init__(self, preview: Preview, target: Target) -> None:
        self.target = target
        self.flows = [Dataflow(graph) for graph in preview.graphs]

    def weights_cast_twice(self) -> dict[str, tuple[int, int]]:
        """For each such layer, bytes that keeping the weight's cast would hold, and of traffic that it would spare.

        A weight is what forward was given, cast, and multiplied from the right; backward has it under the same name.
        """
        backward = {key: sizes for flow in self._of("backward") for key, *sizes in _cast_inputs(flow)}
        forward = [key for flow in self._of("forward") for key, *_ in _cast_inputs(flow)]
        return {key[0]: (backward[key][0], backward[key][1]) for key in forward if key in backward}

    def balances(self) -> dict[str, Balance]:
        """For each layer with float8 GEMMs."""
        balances: dict[str, Balance] = defaultdict(Balance)
        for flow in self.flows:
            for position in flow.gemms:
                launch = flow.graph.launches[position]
                if len(launch.layers) == 1:
                    _add_gemm(balances[launch.layers[0]], launch, self.target)
            for layer, nbytes in _cast_bytes(flow):
                balances[layer].nbytes += nbytes
                balances[layer].cost += nbytes / self.target.bandwidth
        return {layer: balance for layer, balance in balances.items() if balance.high_precision}

    def _of(self, phase: str) -> list[Dataflow]:
        return [flow for flow in self.flows if flow.graph.phase == phase]


def _cast_inputs(flow: Dataflow) -> Iterator[tuple[tuple[str, str], int, int]]:
    """Each right operand of a float8 GEMM that was cast from what the graph was given: (layer, name of that), bytes of
    the cast, bytes read for it."""
    for position in flow.gemms:
        gemm = flow.graph.launches[position]
        for value, buffer in flow.reads[position]:
            if buffer is not gemm.buffers[1] or value not in flow.writer or len(gemm.layers) != 1:
                continue
            made_in = flow.writer[value].launch
            for source, read in flow.reads[made_in]:
                same_size = _elements(read) == _elements(buffer)
                if source.version == 0 and source not in flow.writer and same_size and not is_float8(read):
                    yield (gemm.layers[0], source.tensor), buffer.reads, read.reads


def _cast_bytes(flow: Dataflow) -> Iterator[tuple[str, float]]:
    """(layer, bytes in sectors) for each share that a layer has in a launch that casts, copies or takes an amax."""
    served: dict[int, set[str]] = defaultdict(set)  # launch: layers whose GEMMs read what it makes
    sources: dict[Value, set[str]] = defaultdict(set)  # what is cast: the same
    for position in flow.gemms:
        gemm = flow.graph.launches[position]
        for value, buffer in flow.reads[position]:
            if any(buffer is operand for operand in gemm.buffers[:2]):
                for maker in _makers(flow, value):
                    served[maker].update(gemm.layers)
                    for source, read in flow.reads[maker]:
                        if not is_float8(read):
                            sources[source].update(gemm.layers)
    for position, launch in enumerate(flow.graph.launches):
        amax_of = [source for source, _ in flow.reads[position] if sources.get(source)]
        if amax_of and only_takes_amax(launch):
            served[position] = sources[amax_of[0]]
    for position, layers in served.items():
        nbytes = _cost_of_casting(flow.graph.launches[position])
        yield from ((layer, nbytes / len(layers)) for layer in layers)


def _makers(flow: Dataflow, value: Value) -> Iterator[int]:
    """The launch that wrote a float8 tensor, and if that only moved it, the one before."""
    while value in flow.writer:
        position = flow.writer[value].launch
        yield position
        before = [source for source, read in flow.reads[position] if is_float8(read)]
        if len(before) != 1:
            return
        value = before[0]


def _cost_of_casting(launch: Launch) -> float:
    """Bytes in sectors that the launch would not move if nothing were cast, or less; negative where it would move more.

    A producer that is fused with casts would run anyway, and write 2 bytes where it now writes one, or two where it
    writes both layouts. How many tensors it makes isn't known, so it never counts as a cost.
    """
    if only_takes_amax(launch):
        return launch.sectors
    buffers = large(launch.buffers)
    float8 = [buffer for buffer in buffers if buffer.writes and is_float8(buffer)]
    others = [buffer for buffer in buffers if not is_float8(buffer)]
    if len(others) <= 1 and not any(buffer.writes for buffer in others) and operators(launch) <= CASTING:
        return sum(buffer.sectors for buffer in buffers)
    if any(buffer.writes for buffer in others):
        return 0
    return min(0, sum(buffer.sectors for buffer in float8) - sum({2 * _elements(buffer) for buffer in float8}))


# Operators of which casts are made, up to the GEMM that wants them in some layout.
CASTING = {
    "abs", "amax", "max", "maximum", "minimum", "mul", "div", "reciprocal", "clamp", "clamp_min", "clamp_max", "where",
    "gt", "lt", "eq", "ne", "isnan", "isinf", "bitwise_and", "full", "scalar_tensor", "convert_element_type",
    "_to_copy", "view", "reshape", "permute", "t", "transpose", "clone", "as_strided", "unsqueeze", "squeeze", "expand",
    "slice", "select", "constant_pad_nd", "_scaled_mm",
}  # fmt: skip


def _add_gemm(balance: Balance, launch: Launch, target: Target) -> None:
    """At the peak of each precision, or at the memory's bandwidth where that is slower."""
    operands = sum(buffer.reads for buffer in launch.buffers[:2])
    others = launch.reads + launch.writes - operands
    high_precision = max(launch.flops / target.bfloat16, (2 * operands + others) / target.bandwidth)
    float8 = max(launch.flops / target.float8, (operands + others) / target.bandwidth)
    balance.high_precision += high_precision
    balance.saved += high_precision - float8


def _elements(buffer: Buffer) -> int:
    return math.prod(buffer.shape)
