"""Forward and backward of single layers: compiled nn.Linear, torchao's float8 and ours, measured in turns.

    python -m benchmarks.linear                                           # two idle cores about 6 minutes
    python -m benchmarks.linear --shapes w13 --dtypes bf16 --rounds 30    # a look
    python -m benchmarks.linear --contenders nn.Linear torchao:tensorwise delayed delayed+keep --out /tmp/some

Layers without bias, each compiled by itself (fullgraph), so nothing around it is there to fuse with. The shapes are
those of Llama-2-70B on a tensor-parallel group of eight, of Llama-3-8B and some small ones. On a CPU they are cut to an
eighth, with few tokens, and its times say nothing of a GPU's.

    time          of forward and backward, for gradients of input and weight: medians and quartiles
    speed-up      over nn.Linear, and over torchao's counterpart: the median of the rounds' ratios
    saved         bytes that cross from forward to backward: the input or its cast, and casts of the weight; not what is
                  there anyway, parameters and the layer's own state
    kernels       launches of forward and backward. On a CPU, where nothing is launched: calls of generated and of
                  library functions in Inductor's code; of other backends none is counted

Leaves linear.json, .md and .png in benchmarks/results/ (or in --out), written anew after each shape, so what is done
survives Ctrl-C. A contender is nn.Linear or a variant of float8_compile/variants.py; of ours "+keep" keeps the casted
weight for backward (recompute_weight_cast=False), and the plain one casts it again.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.command import Live, add_backend, command_line, known, parser_of, reason, without_expected_warnings
from benchmarks.contenders import calibrated, compiled
from benchmarks.interleaved import Contender, interleaved
from benchmarks.launches import counted, launches_of
from benchmarks.linear_table import BASELINE, Layer, Row, leave, line, report
from benchmarks.record import circumstances
from benchmarks.saved import saved_bytes
from float8_compile import Recipe
from float8_compile.variants import AS_BUILT, KEEP, TORCHAO, TORCHAO_RECIPES, quiet, variant

NAME = "linear"
CONTENDERS = (
    BASELINE,
    *(TORCHAO + recipe for recipe in TORCHAO_RECIPES),
    *(recipe + keep for recipe in Recipe.names() for keep in ("", KEEP)),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS = {"cuda": 16384, "cpu": 256}
DIVIDED_BY = {"cuda": 1, "cpu": 8}
# (K, N): in_features, out_features
SHAPES = {
    "wqkv": (8192, 1280),
    "w0": (1024, 8192),
    "w13": (8192, 7168),
    "w2": (3584, 8192),
    "8b-q": (4096, 4096),
    "8b-kv": (4096, 1024),
    "8b-up": (4096, 14336),
    "8b-down": (14336, 4096),
    "70b-kv": (8192, 1024),
    "small": (1024, 1024),
}
ON_A_CPU = ("w0", "w13", "8b-kv", "small")


def features(shape: str, device: str) -> tuple[int, int]:
    """K and N, as the device can take them."""
    k, n = (number // DIVIDED_BY[device] for number in SHAPES[shape])
    return k, n


def layer_of(name: str, x: Tensor, n: int) -> nn.Module:
    """A layer in a variant that fits x, delayed scales as after a step."""

    def build() -> tuple[nn.Module, tuple[()]]:
        torch.manual_seed(0)
        linear = nn.Linear(x.shape[-1], n, bias=False, device=x.device, dtype=x.dtype)
        return nn.Sequential(linear), ()  # torchao replaces a layer only where it is another's child

    model = variant(build, AS_BUILT if name == BASELINE else name)()[0]
    calibrated(model, lambda: model(x).sum().backward())
    return model[0]  # type: ignore[no-any-return]


def measure(dtype: str, shape: str, names: Sequence[str], device: str, backend: str, rounds: int, live: Live) -> Layer:
    """All contenders at one shape: compiled and counted one after the other, then timed in turns."""
    k, n = features(shape, device)
    torch.manual_seed(0)
    x = torch.randn(TOKENS[device], k, device=device, dtype=DTYPES[dtype], requires_grad=True)
    gradient = torch.randn(TOKENS[device], n, device=device, dtype=DTYPES[dtype])
    steps, counts, failed = dict[str, Contender](), dict[str, tuple[int, int | None]](), dict[str, str]()
    for name in names:
        live.prepare(name)
        with quiet():
            try:
                steps[name], counts[name] = prepared(name, x, gradient, backend)
            except Exception as error:  # row-wise GEMMs of a GPU may have no float16 results: the others are worth it
                failed[name] = reason(error)
    seconds = interleaved(steps, rounds, device=device, after_round=live.round)
    return Layer(dtype, shape, k, n, {name: Row(seconds[name], *counts[name]) for name in steps}, failed)


def prepared(name: str, x: Tensor, gradient: Tensor, backend: str) -> tuple[Contender, tuple[int, int | None]]:
    """A contender's step, compiled, with its saved bytes and its launches."""
    layer = layer_of(name, x, gradient.shape[-1])
    run = compiled(layer, backend)

    def step() -> None:
        run(x).backward(gradient)
        x.grad = None
        layer.zero_grad(set_to_none=True)

    launches = launches_of(step, x.is_cuda, backend == "inductor")
    return step, (saved_bytes(lambda: run(x), x), launches)


def method(device: str, backend: str, rounds: int) -> str:
    """In words, how the numbers came about."""
    kernels = counted(device == "cuda", backend == "inductor")
    not_a_gpu = "" if device == "cuda" else " Shapes are cut to an eighth, and times say nothing of a GPU's."
    return (
        f"Layers without bias, in x out features, {TOKENS[device]} tokens, each compiled by {backend} (fullgraph): "
        f"forward and backward, medians of {rounds} interleaved rounds. Speed-ups are medians of the rounds' ratios. "
        f"Saved is what crosses from forward to backward, the layer's input too. {kernels}{not_a_gpu}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each shape is done, and the tables at the end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = tuple(SHAPES) if device == "cuda" else ON_A_CPU
    parser = parser_of(NAME, __doc__, CONTENDERS, rounds=50 if device == "cuda" else 20)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes, help=f"default: {', '.join(shapes)}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=tuple(DTYPES), help="default: both")
    add_backend(parser)
    given = parser.parse_args(arguments)
    names = known(parser, given.contenders, also=[BASELINE])
    about = circumstances(command_line(NAME, arguments))
    about |= {"device": device, "tokens": TOKENS[device], "rounds": given.rounds, "unit": "us, bytes"}
    about |= {"method": method(device, given.backend, given.rounds)}
    wanted = dict.fromkeys(itertools.product(given.dtypes, given.shapes))
    layers: list[Layer] = []
    try:
        with Live(Console()) as live, without_expected_warnings():
            for dtype, shape in wanted:
                live.begin(f"{dtype} {shape}", given.rounds)
                layers.append(measure(dtype, shape, names, device, given.backend, given.rounds, live))
                leave(given.out, NAME, layers, about)
                live.end(line(layers[-1]))
                torch.compiler.reset()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    if layers:
        print(f"\n{report(layers, about)}\nin {given.out}: {NAME}.json, .md, .png")
    return 0 if len(layers) == len(wanted) else 130


if __name__ == "__main__":
    sys.exit(main())
