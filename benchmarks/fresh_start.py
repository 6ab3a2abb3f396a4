"""What a process pays before it trains: importing, and compiling with an empty cache and with a full one.

Each measurement is a process of its own, since nothing is imported or compiled twice in one: `import_seconds` and
`compile_start` start one and wait for it. The model that is compiled are narrow Llama layers, seven linears each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT

NARROW = {"tokens": 64, "dim": 64, "hidden": 128, "heads": 2, "key_heads": 1}
KEEP_FUNCTIONS = "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD"
NOTHING_GENERATED = "aot_eager"  # a backend that traces and counts, and runs the graphs as they are

_IMPORT = """
import sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
if sys.argv[1]:
    __import__(sys.argv[1])
print(middle - start, time.perf_counter() - middle)
"""


def import_seconds(package: str) -> tuple[float, float]:
    """Of `import torch`, and of `import package` after it ("" for nothing). Raises RuntimeError where it fails."""
    torch_seconds, more = _printed(["-c", _IMPORT, package]).split()
    return float(torch_seconds), float(more)


def compile_start(name: str, layers: int, backend: str, cache: Path, *, keep_functions: bool = False) -> dict[str, Any]:
    """The first step of a variant, in a new process with this folder for Inductor's cache.

    keep_functions: with the setting of torch that lets AOTAutograd's cache keep what has an autograd.Function in it.

    {"seconds": of forward and backward, less those of a second step, "forward": nodes of the graph that Inductor gets,
    None where a cache gave all of it, "backward": ...}. Raises RuntimeError where it fails.
    """
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | ({KEEP_FUNCTIONS: "1"} if keep_functions else {})
    found: dict[str, Any] = json.loads(
        _printed(["-m", "benchmarks.fresh_start", name, str(layers), backend], environment)
    )
    return found


def _printed(arguments: list[str], environment: dict[str, str] | None = None) -> str:
    """The last line that Python prints with these arguments, run in the project's folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout.strip().splitlines()[-1]


def main(name: str, layers: int, backend: str) -> None:
    """In the process that `compile_start` starts."""
    import torch
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch import Tensor, nn
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from benchmarks import llama
    from benchmarks.interleaved import seconds
    from float8_compile.variants import quiet, variant

    class Layers(nn.Module):
        def __init__(self, shape: llama.Shape) -> None:
            super().__init__()
            self.layers = nn.ModuleList(llama.Layer(shape) for _ in range(layers))

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, cos, sin)
            return x

    nodes: Counter[str] = Counter()

    def counting(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        nodes["backward" if options.get("is_backward") else "forward"] += len(gm.graph.nodes)
        return make_boxed_func(gm.forward) if backend == NOTHING_GENERATED else compile_fx_inner(gm, inputs, **options)

    def inductor(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(gm, inputs, inner_compile=counting)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = llama.Shape(**NARROW)
    with quiet():
        with torch.device(device):  # not around what is compiled: Dynamo would trace it through each op
            _, inputs = llama.build(shape=shape)
            model, _, _ = variant(lambda: (Layers(shape).bfloat16(), ()), name)()
        if backend != NOTHING_GENERATED:
            torch.compile(torch.sin)(torch.ones(16, device=device))  # loads Inductor
        compiled: Any = torch.compile(model, fullgraph=True, dynamic=False, backend=inductor)
        first, second = (seconds(lambda: compiled(*inputs).sum().backward(), device) for _ in range(2))
    counts = {phase: nodes.get(phase) for phase in ("forward", "backward")}
    print(json.dumps({"seconds": round(first - second, 3), **counts}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
