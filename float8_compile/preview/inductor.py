"""Where a preview cuts into Inductor.

The private names of torch that a preview uses are here and in device.py; a torch that lacks one fails there, at the
first preview, with its name.

    compile_fx(inner_compile=...)       what it calls for each graph is ours
    compile_fx_inner                    what it would call: post-grad passes, scheduling, code generation
    GraphLowering.compile_to_module     replaced: keeps the generated code where Inductor would import it
    AsyncCompile.triton, _cuda_getCurrentRawStream      replaced while generated code runs: write launches down
    fuse_attention._scaled_dot_product_attention        replaced: what Inductor's patterns write
    debug._inductor_triton_kernel_to_post_grad_node_info        which nodes each launch was made of
    CachingAutotuner, GridExpr          a kernel's candidate configs, its grid, its machine code
    TracingContext, FakeTensorMode, TorchDispatchMode, select_decomp_table, counters, _pytree       used as they are
"""

from __future__ import annotations

import contextlib
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.debug as provenance
from torch import fx
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._guards import detect_fake_mode as find_fake_mode
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import fuse_attention
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "CachingAutotuner",
    "FakeTensorMode",
    "Generated",
    "TorchDispatchMode",
    "compile_configs",
    "compile_fx",
    "fake_mode_of",
    "generate",
    "graph_breaks",
    "grid",
    "nothing_runs",
    "patterns_write",
    "select_decomp_table",
    "settings",
    "switched_off",
    "this_compilation",
    "tree_leaves",
    "tree_map",
]

_INDUCTOR = {
    "fx_graph_cache": False,  # neither hand out what was generated for a real device nor store what was not
    "fx_graph_remote_cache": False,
    "compile_threads": 1,
    "shape_padding": False,  # on in every torch: it times a padded matmul on the device
    "trace.provenance_tracking_level": 2,  # writes a handle above each launch; 1 also watches every pass
}

_OFF_WHERE_TURNED_ON = (
    "cpp_wrapper",
    # These time kernels on the device while code is generated.
    "benchmark_combo_kernel",
    "benchmark_fusion",
    "coordinate_descent_tuning",  # which torchao's quantize_ turns on for the whole process
    "max_autotune",
    "max_autotune_gemm",
    "triton.mix_order_reduction_autotune_split_size",
    "triton.multi_kernel",
)


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Inside, what is compiled is meant for a preview, and compiled afresh. Outside it is all forgotten."""
    torch.compiler.reset()
    with (
        inductor_config.patch({**_INDUCTOR, **dict.fromkeys(_OFF_WHERE_TURNED_ON, False)}),
        functorch_config.patch(enable_autograd_cache=False),
        dynamo_config.patch(suppress_errors=False),
        mock.patch.dict(os.environ),  # where Inductor writes the folders of its caches
    ):
        try:
            yield
        finally:
            torch.compiler.reset()


def fake_mode_of(inputs: Sequence[Any]) -> FakeTensorMode:
    """The mode that made a graph's fake inputs."""
    mode = find_fake_mode(inputs)
    assert mode is not None, "Dynamo and AOTAutograd trace with fake tensors"
    return mode


def patterns_write(attention: Callable[..., Any]) -> Any:
    """A context: inside, where Inductor finds attention written by hand it writes `attention(query, key, ...)`."""
    return mock.patch.object(fuse_attention, "_scaled_dot_product_attention", attention)


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """A list that has, after the context, why Dynamo broke graphs in it."""
    reasons: list[str] = []
    before = counters["graph_break"].copy()
    yield reasons
    new = counters["graph_break"] - before
    reasons += [" ".join(str(reason).split("\n\n")[0].split()) for reason in new]


def switched_off() -> list[str]:
    """The settings that the user has turned on and a preview turns off, but for caches."""
    return [name for name in _OFF_WHERE_TURNED_ON if operator.attrgetter(name)(inductor_config)]


@dataclass(frozen=True)
class Generated:
    """What Inductor made of a graph.

    constants: the tensors that the code refers to by name. origins: by handle, the names of the nodes in the graph
    (as Inductor's passes have left it) that a launch was made of.
    """

    code: str
    constants: dict[str, Any]
    origins: dict[str, list[str]]


def generate(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Generated | None:
    """Inductor's code for a forward or backward graph, which it rewrites; None where there is nothing to compute."""
    kept: list[tuple[GraphLowering, str]] = []

    def keep(graph: GraphLowering) -> Any:
        code, _ = graph.codegen()
        kept.append((graph, code.value))
        return SimpleNamespace(call=lambda inputs: None, __file__="")

    with provenance.reset_provenance_globals(), mock.patch.object(GraphLowering, "compile_to_module", keep):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # which this process has none of
            compile_fx_inner(gm, inputs, **options)
        origins = dict(provenance._inductor_triton_kernel_to_post_grad_node_info)
    if not kept:
        return None
    ((graph, code),) = kept
    return Generated(code, dict(graph.constants), origins)


def this_compilation() -> int:
    """The same number in a forward graph and in its backward graph, and in no other."""
    return id(TracingContext.get())


@contextlib.contextmanager
def nothing_runs(triton: Callable[..., Any]) -> Iterator[None]:
    """Inside, generated code gets its Triton kernels from `triton(async_compile, name, source, device_str)`."""
    with (
        mock.patch.object(AsyncCompile, "triton", triton),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0),
    ):
        yield


def grid(tuner: CachingAutotuner, config: Any, arguments: dict[str, int]) -> tuple[int, int, int]:
    """How many programs one launch with this config has, along each axis."""
    return GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(arguments)


def compile_configs(tuner: CachingAutotuner) -> list[tuple[Any, Any]]:
    """Triton's configs that compile, each with Triton's compiled kernel: `asm`, `metadata`."""
    plain = ("use_static_triton_launcher", "use_static_cuda_launcher")  # launchers of Inductor's keep no PTX
    with inductor_config.patch({name: False for name in plain if hasattr(inductor_config, name)}):
        tuner.precompile(warm_cache_only=True)  # as in Inductor's compile workers: nothing is launched
    return [(result.config, result.kernel) for result in tuner.compile_results]
