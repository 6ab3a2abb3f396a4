"""What CUDA graphs save: a small model's forward and backward, launched kernel by kernel and replayed as a graph.

    python -m benchmarks.cuda_graphs                                      # a GPU, a minute or two
    python -m benchmarks.cuda_graphs --contenders bf16 delayed+cached --out /tmp/some

A contender is a variant of float8_compile/variants.py. Each runs in four ways:

    eager                    an op at a time
    eager, graphed           `make_graphed_callables`, ours where layers are float8
    compiled                 `torch.compile`
    compiled, graphed        `torch.compile(mode="reduce-overhead")`

The model is small, so that the host is what a step waits for. Of a step there is its time, by the GPU's clock, which
also counts the gaps between kernels, the kernels that the GPU ran, and how often the host launched something. Medians
of interleaved rounds. On a CPU there are no graphs: what is left is a trial of this command.

Leaves cuda_graphs.json, .md and .png in benchmarks/results/ (or in --out), written anew after each contender.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.allocations import events_of
from benchmarks.command import add_backend, command_line, known, parser_of, without_expected_warnings
from benchmarks.contenders import calibrated
from benchmarks.interleaved import Contender, interleaved, quantiles
from benchmarks.look import bars, picture
from benchmarks.record import circumstances, made_by, markdown, write, write_json
from float8_compile import make_graphed_callables
from float8_compile.torch_internals import with_own_code
from float8_compile.variants import AS_BUILT, CACHED, quiet, variant

NAME = "cuda_graphs"
CONTENDERS = (AS_BUILT, "tensorwise", "rowwise", "delayed", f"delayed{CACHED}")
WAYS = {
    "eager": "#BBBBBB",
    "eager, graphed": "#555555",
    "compiled": "#56B4E9",
    "compiled, graphed": "#0072B2",
}  # with their colours
SIZES = {"cuda": (8, 512, 1024), "cpu": (2, 16, 64)}  # MLPs, tokens, width

Found = dict[str, dict[str, dict[str, Any]]]  # by contender and way


def model_of(name: str, device: str) -> nn.Module:
    """A stack of MLPs in a variant, scales as after a step."""
    blocks, _, width = SIZES[device]

    def build() -> tuple[nn.Module, tuple[()]]:
        torch.manual_seed(0)
        mlps = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )
        return nn.Sequential(*mlps).to(device, torch.bfloat16), ()

    model: nn.Module = variant(build, name)()[0]
    calibrated(model, lambda: model(batch(device)).sum().backward())
    model.zero_grad()
    return model


def batch(device: str) -> torch.Tensor:
    """Requires a gradient, as inside a larger model, and as graphs want to know beforehand."""
    _, tokens, width = SIZES[device]
    return torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)


def step_of(name: str, way: str, device: str, backend: str) -> Contender:
    """Forward and backward of a model of its own."""
    model, x = model_of(name, device), batch(device)
    gradient = torch.randn_like(x)
    run, begin = forward_of(model, way, device, backend)

    def step() -> None:
        begin()
        run(x).backward(gradient)
        x.grad = None
        model.zero_grad()

    return step


def forward_of(model: nn.Module, way: str, device: str, backend: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """What is called in a step, and what before it."""
    if way == "eager, graphed":
        return make_graphed_callables(model, (batch(device),)), lambda: None
    if way == "eager":
        return model, lambda: None

    def run(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    compile: Any = torch.compile
    options = {"mode": "reduce-overhead"} if way == "compiled, graphed" else {"backend": backend}
    begin = torch.compiler.cudagraph_mark_step_begin if way == "compiled, graphed" else lambda: None
    return compile(with_own_code(run), fullgraph=True, dynamic=False, **options), begin


def launches(step: Contender, device: str) -> dict[str, int | None]:
    """Of one step: kernels that ran, and the host's calls that launched them."""
    if device != "cuda":
        return {"kernels": None, "launches": None}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = events_of(profiler)
    calls = [event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return {
        "kernels": sum(event.get("cat") == "kernel" for event in events),
        "launches": sum("Launch" in name for name in calls),
    }


def measure(name: str, ways: Sequence[str], device: str, backend: str, rounds: int) -> dict[str, dict[str, Any]]:
    """One contender in all ways, in turns. A way that fails says why, and the others go on."""
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Contender] = {}
    for way in ways:
        try:
            steps[way] = step_of(name, way, device, backend)
            for _ in range(4):  # compiles, and records a graph
                steps[way]()
            found[way] = launches(steps[way], device)
        except Exception as error:  # whatever it is, it is what there is to know about this way
            steps.pop(way, None)
            found[way] = {"failed": (str(error).strip() or type(error).__name__).splitlines()[0]}
    for way, times in interleaved(steps, rounds, device=device).items():
        found[way] |= {key: round(1e6 * value, 1) for key, value in quantiles(times).items()}
    return found


def table(found: Found) -> str:
    """Markdown: a line for each contender and way."""
    rows, failed = [], []
    for name, ways in found.items():
        for way, of in ways.items():
            time = f"{of['median']:,.0f}" if "median" in of else "failed"
            counts = {key: "-" if of.get(key) is None else str(of[key]) for key in ("kernels", "launches")}
            rows.append({"": f"{name}, {way}", "us a step": time, **counts})
            if "failed" in of:
                failed.append(f"* {name}, {way}: {of['failed']}")
    return "\n".join([markdown(rows), *failed])


def leave(folder: Path, found: Found, about: Mapping[str, Any]) -> None:
    """The three files, of what there is so far."""
    write_json(folder / f"{NAME}.json", {**about, "unit": "us a step", "contenders": found})
    write(folder / f"{NAME}.md", f"{made_by(about)} {about['method']}\n\n{table(found)}")
    title = f"{about['title']}\n{about['machine']}"
    with picture(folder / f"{NAME}.png", 9, 1.4 + 0.75 * len(found), title) as figure:
        axes = figure.subplots()
        groups = {
            way: (hue, [of.get(way, {}).get("median") for of in found.values()])
            for way, hue in WAYS.items()
            if any(way in of for of in found.values())
        }
        bars(axes, list(found), groups)
        axes.set_xlabel("us a step")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each contender is done, and the table at the end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = parser_of(NAME, __doc__, CONTENDERS, rounds=50 if device == "cuda" else 5)
    add_backend(parser)
    given = parser.parse_args(arguments)
    names = known(parser, given.contenders)
    blocks, tokens, width = SIZES[device]
    title = f"{blocks} MLPs of width {width}, {tokens} tokens, forward and backward"
    graphs = "" if device == "cuda" else " A CPU has no CUDA graphs: this is a trial."
    about = {"title": title, **circumstances(command_line(NAME, arguments)), "device": device}
    about |= {"method": f"{title}. Medians of {given.rounds} interleaved rounds.{graphs}"}
    ways = list(WAYS) if device == "cuda" else ["eager", "compiled"]
    console, found = Console(), Found()
    try:
        with quiet(), without_expected_warnings():
            for name in names:
                found[name] = measure(name, ways, device, given.backend, given.rounds)
                leave(given.out, found, about)
                words = ", ".join(f"{way} {of.get('median', 'failed')}" for way, of in found[name].items())
                console.print(f"{name}, us a step: {words}", highlight=False, soft_wrap=True)
                torch.compiler.reset()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    if found:
        print(f"\n{table(found)}\nin {given.out}: {NAME}.json, .md, .png")
    failed = any("failed" in of for ways_of in found.values() for of in ways_of.values())
    return 130 if len(found) < len(names) else int(failed)


if __name__ == "__main__":
    sys.exit(main())
