"""From what a dry run wrote down to launches: bytes, sectors, FLOPs, a lower bound in seconds, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from float8_compile.preview.compiled import CUOBJDUMP, usage
from float8_compile.preview.dry_run import DryRun, KernelCall, OpCall
from float8_compile.preview.inductor import Generated, tree_leaves
from float8_compile.preview.layers import Layers, is_layout, name_of
from float8_compile.preview.result import Buffer, Config, Kernel, Kind, Launch
from float8_compile.preview.sectors import Traffic, TritonKernel, extent_of
from float8_compile.targets import Target

# GEMMs that Inductor may pad where they are bound by arithmetic (its `shape_padding`), rows to so many bytes.
PADDED = ("aten.mm", "aten.addmm", "aten.bmm")
PADDED_TO = 16


class Reading:
    """The launches and kernels of one graph. notes: what could not be counted."""

    def __init__(self, run: DryRun, generated: Generated, gm: fx.GraphModule, layers: Layers, target: Target) -> None:
        self.layers, self.target, self.origins = layers, target, generated.origins
        self.nodes = {node.name: node for node in gm.graph.nodes if node.op == "call_function"}
        self.fragments = _fragments(generated.code)
        self.loaded = {name: TritonKernel(name, source) for name, source in run.sources.items()}
        self.kernels: dict[str, Kernel] = {}
        self.notes: list[str] = []
        self.memory_of = run.memory_of
        self.last: list[fx.Node] = []
        self.launches = [self.kernel(call) if isinstance(call, KernelCall) else self.op(call) for call in run.calls]

    def kernel(self, call: KernelCall) -> Launch:
        """One launch of a Triton kernel, with the config that moves the fewest sectors."""
        kernel = self.loaded[call.name]
        costs = [kernel.traffic(call.args, config) for config in kernel.configs]
        sectors = [sum(traffic.sectors for traffic in cost.values()) for cost in costs]
        if call.name not in self.kernels:
            pairs = zip(kernel.configs, sectors, strict=True)
            configs = tuple(Config(dict(c.kwargs), c.num_warps, c.num_stages, cost) for c, cost in pairs)
            self.kernels[call.name] = Kernel(call.name, kernel.source, configs)
        best = costs[sectors.index(min(sectors))]
        self.notes += [
            f"{call.name}: what it touches of {name} can't be read from its source; bytes stand for sectors"
            for name, traffic in best.items()
            if not traffic.counted
        ]
        own = call.handle.rpartition(":")[0] == call.name
        self.last = self._in_order(self.origins.get(call.handle, ()) if own else self.fragments.get(call.name, ()))
        return self._launch("triton", call.name, kernel.arguments(call.args), best, 0, 0.0)

    def op(self, call: OpCall) -> Launch:
        """One call of an op that Inductor leaves to torch or to a library."""
        packet = call.op.overloadpacket
        name = str(packet)
        if packet.__name__ in call.handle:  # else it belongs to the launch before it: the last step of its sum
            self.last = self._in_order(self.origins.get(call.handle, ()))
        if "_for_cpu" in name or name.startswith("mkldnn"):
            self.notes.append(f"{name}: only a CPU has this op; a GPU would run another one")
        tensors, traffic = _ports(call)
        if packet not in flop_registry:
            return self._launch("aten", name, tensors, traffic, 0, 0.0)
        flops = int(flop_registry[packet](*call.args, **call.kwargs, out_val=call.result))
        if call.arguments().get("is_causal"):
            flops //= 2  # the formula doesn't ask
        operand = next(iter(tensors.values())).dtype
        least = flops / self.target.peak(operand)
        launch = self._launch("extern", name, tensors, traffic, flops, least)
        if name in PADDED and launch.seconds == least:
            self.notes += _padding(launch, PADDED_TO // operand.itemsize)
        return launch

    def _in_order(self, names: Sequence[str]) -> list[fx.Node]:
        wanted = set(names)
        return [node for name, node in self.nodes.items() if name in wanted]

    def _launch(
        self,
        kind: Kind,
        name: str,
        tensors: Mapping[str, Any],
        traffic: Mapping[str, Traffic],
        flops: int,
        least: float,
    ) -> Launch:
        buffers = []
        for port, used in traffic.items():
            if used.reads or used.writes:
                tensor = tensors[port]
                memory, dtype, shape = self.memory_of(tensor), name_of(tensor.dtype), tuple(tensor.shape)
                buffers.append(Buffer(port, memory, dtype, shape, used.reads, used.writes, used.sectors))
        reads, writes = sum(b.reads for b in buffers), sum(b.writes for b in buffers)
        dtypes = (dict.fromkeys(b.dtype for b in buffers if getattr(b, way)) for way in ("reads", "writes"))
        working = [node for node in self.last if not is_layout(node)] or self.last
        return Launch(
            kind=kind,
            name=name,
            layers=self.layers.of(working),
            nodes=tuple(node.name for node in self.last),
            ops=tuple(dict.fromkeys(str(node.target) for node in self.last)),
            reads=reads,
            writes=writes,
            sectors=sum(b.sectors for b in buffers),
            dtypes=" -> ".join(", ".join(way) for way in dtypes),
            flops=flops,
            seconds=max(least, (reads + writes) / self.target.bandwidth),
            buffers=tuple(buffers),
        )

    def compile_kernels(self) -> None:
        """Fill in what only machine code tells of each config."""
        for name, kernel in self.kernels.items():
            found = dict(usage(self.loaded[name]))
            configs = tuple(
                replace(config, **found.get(key, {}))
                for key, config in zip(self.loaded[name].configs, kernel.configs, strict=True)
            )
            self.kernels[name] = replace(kernel, configs=configs)
            failed = sum(config.ptx is None for config in configs)
            if failed:
                self.notes.append(f"{name}: {failed} of its {len(configs)} configs do not compile for this GPU")
        if not CUOBJDUMP.exists():
            self.notes.append("registers and spills are not known: this triton has no cuobjdump")


def _padding(launch: Launch, multiple: int) -> Iterator[str]:
    """A note, where sizes aren't what the GPU likes."""
    if any(size % multiple for buffer in launch.buffers for size in buffer.shape[-2:]):
        shapes = " x ".join(str(buffer.shape) for buffer in launch.buffers if buffer.reads)
        yield (
            f"{launch.name} of {shapes}: on the GPU Inductor times whether it pays to pad to multiples of {multiple}; "
            "a preview leaves sizes as they are"
        )


def _ports(call: OpCall) -> tuple[dict[str, Tensor], dict[str, Traffic]]:
    """The tensors that an op reads and writes, by the name of the argument."""
    tensors: dict[str, Tensor] = {}
    traffic: dict[str, Traffic] = {}

    def add(name: str, value: Any, reads: bool, writes: bool) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and all(tensor is not known for known in tensors.values()):
                port, nbytes = name if name not in tensors else f"{name}_{len(tensors)}", extent_of(tensor)
                tensors[port] = tensor
                traffic[port] = Traffic(nbytes * reads, nbytes * writes, nbytes * (reads + writes))

    given = call.arguments()
    for argument in call.op._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = argument.is_out or call.op.overloadpacket.__name__ in ("copy_", "fill_", "zero_")
        add(argument.name, given.get(argument.name), not (written and overwritten), written)
    add("result", call.result, False, True)
    return tensors, traffic


def _fragments(code: str) -> dict[str, list[str]]:
    """The nodes that the comment above each kernel's definition names, for kernels whose launches have no handle."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in code.splitlines():
        if line.startswith("# Graph fragment:"):
            names = []
        elif match := re.match(r"#   %(\w+) : .* = call_function", line):
            names.append(match[1])
        elif match := re.match(r"(\w+) = async_compile\.", line):
            found[match[1]] = names
    return found
