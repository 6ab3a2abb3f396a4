"""From build() to a Preview: torch.compile as always, up to the point where Inductor gets a graph to generate code for.

1. Dynamo traces what build() made, on the meta device. What it hands the backend is moved to the CPU (retarget.py).
2. AOTAutograd, Inductor's joint-graph passes and its partitioner run as always, except that a few ops are traced as
   CUDA has them (traced_as_cuda.py), and that `compile_fx` gets another `inner_compile`, an argument of its own.
3. That one moves the forward or backward graph to cuda:0, gives it to the real one, and answers questions about the GPU
   from a table (device.py). The generated code is run with nothing behind it (dry_run.py) and read (launches.py).
4. The user's code gets tensors on meta back, and goes on: graph breaks and `.backward()` work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from float8_compile.calibration import mark_calibrated
from float8_compile.delayed_step import scales_of
from float8_compile.preview import device, inductor
from float8_compile.preview.dry_run import dry_run
from float8_compile.preview.launches import Reading
from float8_compile.preview.layers import Layers, saved_for_backward
from float8_compile.preview.readable import ReadablePreview
from float8_compile.preview.result import Graph, Phase
from float8_compile.preview.retarget import CPU, CUDA, Move, graphs, move_graph, results_on_meta
from float8_compile.preview.traced_as_cuda import TracedAsCuda, decompositions, patterns_attention
from float8_compile.preview.unsupported import NotOnMetaError, explained, refuse_autocast
from float8_compile.targets import Target, named


def capture(build: Callable[[], Any], target: str, *, compile_kernels: bool = False) -> ReadablePreview:
    """See `preview`."""
    start, gpu = time.perf_counter(), named(target)
    notes = [f"Inductor's {setting} is off in a preview" for setting in inductor.switched_off()]
    with inductor.settings(), device.triton_driver(gpu), explained():
        refuse_autocast()
        with torch.device("meta"):
            function, args, kwargs = _parts(build())
        for model in _models(function):
            mark_calibrated(model)  # the first step is another graph, but a run is all the others
        backend = _Backend(gpu, Layers(function), compile_kernels)
        with inductor.graph_breaks() as breaks:
            outputs = torch.compile(function, backend=backend, dynamic=False)(*args, **kwargs)
            _backward(outputs)
    notes += [f"graph break, and nothing of what runs in it is counted: {reason}" for reason in breaks]
    if not backend.graphs:
        notes.append("nothing was compiled: no op was traced, or torch.compile is switched off")
    notes += backend.notes
    return ReadablePreview(gpu.name, tuple(backend.graphs), tuple(dict.fromkeys(notes)), time.perf_counter() - start)


def _parts(built: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    function, args, kwargs = (*built, {}) if len(built) == 2 else built
    return function, (args,) if isinstance(args, Tensor) else tuple(args), kwargs


def _models(function: Callable[..., Any]) -> list[nn.Module]:
    """Modules with delayed scales: what is called, what it is a method of, or what it has in its closure."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    modules = [m for m in (function, getattr(function, "__self__", None), *cells) if isinstance(m, nn.Module)]
    return [module for module in modules if any(map(scales_of, module.modules()))]


def _backward(outputs: Any) -> None:
    """Through every output that requires a gradient. The gradients themselves are of no use and don't stay."""
    differentiable = [x for x in inductor.tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    before = [(leaf, leaf.grad) for leaf in _leaves(differentiable)]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.empty_like(x) for x in differentiable])
    for leaf, grad in before:
        leaf.grad = grad


def _leaves(outputs: list[Tensor]) -> Iterator[Tensor]:
    """What backward from here would give a gradient."""
    yield from (x for x in outputs if x.is_leaf)
    waiting, seen = [x.grad_fn for x in outputs if x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions if following]
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf


class _Backend:
    """A backend of torch.compile that generates code as Inductor would, and keeps what it is."""

    def __init__(self, target: Target, layers: Layers, compile_kernels: bool) -> None:
        self.target, self.layers, self.compile_kernels = target, layers, compile_kernels
        self.graphs: list[Graph] = []
        self.notes: list[str] = []
        self.forwards: dict[int, tuple[int, fx.GraphModule]] = {}

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        refuse_autocast(graphs(gm))
        self.check(inputs)
        move = Move(CPU, inductor.fake_mode_of(inputs), gradients=True)
        inputs = [move(x) for x in inputs]
        move_graph(gm, move)
        with TracedAsCuda(), inductor.patterns_write(self.attention_by_pattern):
            return inductor.compile_fx(gm, inputs, inner_compile=self.generate, decompositions=decompositions())

    def check(self, inputs: list[Any]) -> None:
        """Raise ValueError for a tensor that isn't where build() should have made it."""
        for x in inputs:
            if isinstance(x, Tensor) and x.device.type != "meta" and x.dim():
                raise NotOnMetaError(
                    f"a tensor of shape {tuple(x.shape)} is on {x.device}: build() should make its tensors without a "
                    "device, or on meta"
                )

    def attention_by_pattern(self, *args: Any, **kwargs: Any) -> Tensor:
        """What Inductor puts in the place of attention that is written by hand."""
        self.notes.append(
            "attention written by hand was recognised as Inductor does it for CPU tensors; for CUDA it leaves out a "
            "few forms with masks: F.scaled_dot_product_attention leaves no doubt"
        )
        return patterns_attention(*args, **kwargs)

    def generate(self, gm: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        """What `compile_fx` calls for each graph. Instead of the compiled graph it gets one without values."""
        results = results_on_meta(gm)
        move = Move(CUDA, inductor.fake_mode_of(inputs), gradients=False)
        move_graph(gm, move)
        inputs = [move(x) for x in inputs]
        with device.pretended(self.target):
            generated = inductor.generate(gm, inputs, **options)
            if generated is not None:
                run = dry_run(generated.code, inputs, generated.constants, move)
                reading = Reading(run, generated, gm, self.layers, self.target)
                if self.compile_kernels:
                    reading.compile_kernels()
                backward, inference = options.get("is_backward"), options.get("is_inference")
                phase: Phase = "backward" if backward else "inference" if inference else "forward"
                self.keep(phase, gm, generated.code, reading)
        return results

    def keep(self, phase: Phase, gm: fx.GraphModule, code: str, reading: Reading) -> None:
        """Add the graph; a backward graph says what its forward graph keeps."""
        compilation = inductor.this_compilation()
        if phase == "forward":
            self.forwards[compilation] = len(self.graphs), gm
        elif compilation in self.forwards:
            position, forward = self.forwards[compilation]
            saved = saved_for_backward(forward, gm, self.layers)
            self.graphs[position] = replace(self.graphs[position], saved=saved)
        text = gm.print_readable(print_output=False, include_stride=True, include_device=True)
        self.graphs.append(Graph(phase, tuple(reading.launches), reading.kernels, (), code, text))
        self.notes += reading.notes
