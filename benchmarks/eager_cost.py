"""What a call of a small layer costs, eager and compiled: nn.Linear, torchao's float8 and ours, measured in turns.

    python -m benchmarks.eager_cost                                       # on two cores about 3 minutes
    python -m benchmarks.eager_cost --sizes 64 --no-compile --rounds 20   # a look
    python -m benchmarks.eager_cost --contenders tensorwise delayed+keep torchao:tensorwise --out /tmp/some

Square bfloat16 layers without a bias on 16 tokens: so little to compute that the call itself is most of what is
measured, dispatch of ops, Python and autograd. That is the aim, and why these are no speeds of a model. A GPU is used
where there is one. On a CPU torch gets one thread, since to wake a second one takes longer than the GEMM of a small
layer, and that thread's own time is read, which leaves out what other programs take.

"forward" is training's, with gradients on; "forward + backward" gives gradients of input and weight. Of
`tensorwise+cached` it is a microbatch between two optimizer steps. "GEMMs alone" are the bare float8 GEMMs on operands
that were cast before: what a layer takes beyond them is its overhead.

Leaves eager_cost.json, .md and .png in benchmarks/results/ (or in --out), written anew after each size, so what is done
survives Ctrl-C. A contender is any variant that `python -m float8_compile preview` knows (float8_compile/variants.py).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.command import Live, command_line, known, parser_of, without_expected_warnings
from benchmarks.contenders import calibrated, compiled, counterpart
from benchmarks.interleaved import Contender, interleaved, quantiles, ratio
from benchmarks.look import colour, marker, picture
from benchmarks.record import circumstances, markdown, write, write_json
from float8_compile.torch_internals import scaled_mm
from float8_compile.variants import AS_BUILT, CACHED, TORCHAO, TORCHAO_RECIPES, quiet, variant

NAME = "eager_cost"
SIZES = (64, 128, 256, 512, 1024)
TOKENS = 16
ROUNDS = 100
CONTENDERS = (
    AS_BUILT,
    *(TORCHAO + recipe for recipe in TORCHAO_RECIPES),
    "tensorwise",
    f"tensorwise{CACHED}",
    "rowwise",
    "rowwise_with_gw_hp",
    "delayed",
)
GEMMS = "GEMMs alone"
FORWARD, STEP = PASSES = ("forward", "forward + backward")
EAGER, COMPILED = "eager", "compiled"

Case = tuple[str, str, str]  # eager or compiled, pass, contender
Samples = Mapping[Case, Sequence[float]]


def layer_and_input(name: str, size: int, device: str) -> tuple[nn.Module, Tensor]:
    """A layer in a variant, delayed scales as after a step."""

    def build() -> tuple[nn.Module, tuple[Tensor]]:
        torch.manual_seed(0)
        linear = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
        x = torch.randn(TOKENS, size, device=device, dtype=torch.bfloat16, requires_grad=True)
        return nn.Sequential(linear), (x,)  # torchao replaces a layer only where it is another's child

    with quiet():
        model, (x,), _ = variant(build, name)()
    calibrated(model, lambda: model(x).sum().backward())
    return model[0], x  # type: ignore[index]


def passes(layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Contender]:
    """Forward, and a training step's share of one layer."""
    gradient = torch.randn_like(x)

    def step() -> None:
        run(x).backward(gradient)
        x.grad = layer.weight.grad = None  # type: ignore[union-attr, assignment]

    return {FORWARD: lambda: run(x), STEP: step}


def gemms_alone(size: int, device: str) -> dict[str, Contender]:
    """One float8 GEMM, and the three of a step, on operands that are contiguous along what is contracted."""
    one = torch.ones((), device=device)

    def operand(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        return torch.randn(rows, columns, device=device).to(dtype)

    e5m2 = torch.float8_e5m2
    x_MK, w_NK, w_KN, x_KM = (operand(*s) for s in ((TOKENS, size), (size, size), (size, size), (size, TOKENS)))
    g_MN, g_NM = operand(TOKENS, size, e5m2), operand(size, TOKENS, e5m2)

    def gemm(a: Tensor, b: Tensor, fast: bool = False) -> Tensor:
        return scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def step() -> None:
        gemm(x_MK, w_NK, True), gemm(g_MN, w_KN), gemm(g_NM, x_KM)

    return {FORWARD: lambda: gemm(x_MK, w_NK, True), STEP: step}


def cases(
    size: int, names: Sequence[str], device: str, compiles: bool, tell: Callable[[str], object]
) -> dict[Case, Contender]:
    """All that is measured at one size, each called once, so that what is to be compiled is."""
    found: dict[Case, Contender] = {(EAGER, part, GEMMS): call for part, call in gemms_alone(size, device).items()}
    for name in names:
        layer, x = layer_and_input(name, size, device)
        for mode, run in [(EAGER, layer)] + [(COMPILED, compiled(layer))] * compiles:
            tell(f"{name}, {mode}")
            found |= {(mode, part, name): call for part, call in passes(layer, run, x).items()}
            found[mode, STEP, name]()
    return found


def overhead(samples: Samples, mode: str, part: str, name: str) -> float | None:
    """A call's time beyond the bare GEMMs, as a share of that of torchao's counterpart; None where it wasn't measured.

    Medians of differences within a round. rowwise_with_gw_hp has two float8 GEMMs and a bfloat16 one, which on so few
    tokens takes about as long.
    """
    other, gemms = samples.get((mode, part, counterpart(name) or "")), samples[EAGER, part, GEMMS]
    if other is None:
        return None
    beyond, others = (
        statistics.median(time - bare for time, bare in zip(times, gemms, strict=True))
        for times in (samples[mode, part, name], other)
    )
    return beyond / others if others > 0 else None


def leave(folder: Path, results: Mapping[int, Samples], about: Mapping[str, Any]) -> None:
    """The three files, of what there is so far."""
    write_json(folder / f"{NAME}.json", {**about, "sizes": {str(size): plain(of) for size, of in results.items()}})
    write(folder / f"{NAME}.md", report(results, about))
    draw(folder / f"{NAME}.png", results, about)


def plain(samples: Samples) -> dict[str, Any]:
    """Of one size, for JSON: {mode: {pass: {contender: quantiles and ratios}}}, in microseconds."""
    document: dict[str, Any] = {}
    for (mode, part, name), times in samples.items():
        entry: dict[str, Any] = {key: round(1e6 * value, 2) for key, value in quantiles(times).items()}
        other = samples.get((mode, part, counterpart(name) or ""))
        if other is not None:
            entry |= {"against": counterpart(name), "ratio": round(ratio(times, other), 3)}
            share = overhead(samples, mode, part, name)
            entry["overhead"] = None if share is None else round(share, 3)
        document.setdefault(mode, {}).setdefault(part, {})[name] = entry
    return document


def report(results: Mapping[int, Samples], about: Mapping[str, Any]) -> str:
    """Markdown: a table of medians for each mode and pass, and one of what is beyond the GEMMs, against torchao."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    spreads = [(q["p75"] - q["p25"]) / q["median"] for of in results.values() for q in map(quantiles, of.values())]
    lines = [
        f"{about['title']}, on {about['machine']}, {about['threads']} thread(s). Made by `{about['command']}` with "
        f"{versions}.\n",
        f"Microseconds a call, medians of {about['rounds']} interleaved rounds; half of all rounds lie within "
        f"{50 * statistics.median(spreads):.0f} % of theirs. On so few tokens the call itself is what takes time: no "
        "speeds of a model.",
    ]
    for mode, part in _tables(results):
        names = list(dict.fromkeys(name for of in results.values() for m, p, name in of if (m, p) == (mode, part)))
        rows = [
            {f"{mode}, {part}": name} | {str(s): _median(of, mode, part, name) for s, of in results.items()}
            for name in names
        ]
        lines.append(f"\n{markdown(rows)}")
    rows = [
        {"beyond the GEMMs, against torchao's": f"{name}, {mode}, {part}"}
        | {str(size): _share(of, mode, part, name) for size, of in results.items()}
        for mode, part, name in next(iter(results.values()))
        if overhead(next(iter(results.values())), mode, part, name) is not None
    ]
    if rows:
        lines.append(f"\n{markdown(rows)}")
    return "\n".join(lines)


def _tables(results: Mapping[int, Samples]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((mode, part) for mode, part, _ in next(iter(results.values()))))


def _median(samples: Samples, mode: str, part: str, name: str) -> str:
    return f"{1e6 * statistics.median(samples[mode, part, name]):,.0f}"


def _share(samples: Samples, mode: str, part: str, name: str) -> str:
    share = overhead(samples, mode, part, name)
    return "-" if share is None else f"{share:.2f}"


def draw(path: Path, results: Mapping[int, Samples], about: Mapping[str, Any]) -> None:
    """Writes a PNG: a picture for each mode and pass."""
    tables = _tables(results)
    modes, parts = list(dict.fromkeys(m for m, _ in tables)), list(dict.fromkeys(p for _, p in tables))
    sizes = list(results)
    title = f"{about['title']}: medians, shaded from the first quartile to the third\n{about['machine']}"
    with picture(path, 10, 1.6 + 3.4 * len(modes), title, dpi=150) as figure:
        grid = figure.subplots(len(modes), len(parts), sharex=True, sharey="col", squeeze=False)
        for mode, row in zip(modes, grid, strict=True):
            for part, axes in zip(parts, row, strict=True):
                for name in [name for m, p, name in results[sizes[0]] if (m, p) == (mode, part)]:
                    times = [quantiles(of[mode, part, name]) for of in results.values()]
                    low, middle, high = ([1e6 * q[key] for q in times] for key in ("p25", "median", "p75"))
                    axes.plot(sizes, middle, label=name, **_style(name))
                    axes.fill_between(sizes, low, high, color=_style(name)["color"], alpha=0.15, linewidth=0)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xticks(sizes, [str(size) for size in sizes])
                axes.set_title(f"{mode}, {part}", loc="left", fontsize=10)
                axes.grid(alpha=0.25, linewidth=0.6, which="both")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
                axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if str(value)[0] in "25" else "")
        for axes in grid[-1]:
            axes.set_xlabel("in_features = out_features")
        for axes in grid[:, 0]:
            axes.set_ylabel("us a call")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)


def _style(name: str) -> dict[str, Any]:
    """Torchao's dashed; dotted what is no whole layer's work."""
    line = "--" if name.startswith(TORCHAO) else ":" if name.endswith(CACHED) or name == GEMMS else "-"
    look = {"linestyle": line, "marker": "v" if name == GEMMS else marker(name), "markersize": 4, "linewidth": 1.4}
    return {**look, "color": "#999999" if name == GEMMS else colour(name)}


@contextlib.contextmanager
def one_thread(device: str) -> Iterator[int]:
    """On a CPU; what was set before comes back. Gives the number of threads."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _words(size: int, samples: Samples) -> str:
    """What has come out for one size, in a line."""
    mode = next(iter(samples))[0]
    words = [
        f"{name} {_median(samples, m, part, name)}"
        for m, part, name in samples
        if (m, part) == (mode, STEP) and name != GEMMS
    ]
    return f"{size}: {mode}, {STEP}, us: {', '.join(words)}"


def _size(text: str) -> int:
    size = int(text)
    if size <= 0 or size % 16:
        raise argparse.ArgumentTypeError(f"{size} is no positive multiple of 16, which bare float8 GEMMs want on a GPU")
    return size


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each size is done, and the tables at the end."""
    parser = parser_of(NAME, __doc__, CONTENDERS, ROUNDS)
    parser.add_argument("--sizes", type=_size, nargs="+", metavar="SIZE", default=SIZES, help="default: 64 to 1024")
    parser.add_argument("--no-compile", action="store_true", help="only eagerly")
    given = parser.parse_args(arguments)
    names = known(parser, given.contenders)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = list(dict.fromkeys(given.sizes))
    results: dict[int, Samples] = {}
    with one_thread(device) as threads, without_expected_warnings():
        title = f"A square bfloat16 layer without bias, {TOKENS} tokens"
        about = {"title": title, **circumstances(command_line(NAME, arguments)), "device": device, "threads": threads}
        about |= {"tokens": TOKENS, "rounds": given.rounds, "unit": "us a call"}
        try:
            with Live(Console()) as live:
                for size in sizes:
                    live.begin(size, given.rounds)
                    contenders = cases(size, names, device, not given.no_compile, live.prepare)
                    by_key = {" / ".join(case): call for case, call in contenders.items()}
                    times = interleaved(
                        by_key, given.rounds, device=device, clock=time.thread_time, after_round=live.round
                    )
                    results[size] = dict(zip(contenders, times.values(), strict=True))
                    leave(given.out, results, about)
                    live.end(_words(size, results[size]))
                    if not given.no_compile:
                        del contenders, by_key
                        torch.compiler.reset()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    if results:
        print(f"\n{report(results, about)}\nin {given.out}: {NAME}.json, .md, .png")
    return 0 if len(results) == len(sizes) else 130


if __name__ == "__main__":
    sys.exit(main())
