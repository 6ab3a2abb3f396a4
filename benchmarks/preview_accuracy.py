"""The preview, held against a GPU: are the kernels that it shows those that run, and how near to its bounds are they?

    python -m benchmarks.preview_accuracy                                    # a GPU, 2 minutes
    python -m benchmarks.preview_accuracy --recipes bf16 delayed --out /tmp/some

One Llama-3-8B layer, 8192 tokens, forward and backward. The preview is made in a process that sees no GPU, so it is
what it would be on any machine; then the same layer is compiled and run, and torch's profiler says which kernels ran
and for how long (medians of some steps, launch by launch).

    kernels       what the preview shows, and what ran: Triton's, GEMMs, attention's, others
    same names    Triton kernels that the preview shows under the very name under which they ran
    at least ms   the preview's bound: bytes in sectors over the datasheet's bandwidth, or FLOPs over its peak
    measured ms   what they took

Leaves preview_accuracy.json, .md and .png in benchmarks/results/ (or in --out), written anew after each recipe. On a
CPU a tiny layer is run, and Inductor's own kernels are not seen there: a trial of this command, which shows nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from benchmarks import llama
from benchmarks.allocations import events_of
from benchmarks.command import add_backend, command_line, known, parser_of, without_expected_warnings
from benchmarks.contenders import calibrated, compiled
from benchmarks.launch_pairs import ATTENTION, GEMM, OTHER, TRITON, Measured, Predicted, figures, role_of
from benchmarks.look import colour, picture
from benchmarks.preview_llama import DELAYED, share_input_scales
from benchmarks.record import circumstances, made_by, markdown, write, write_json
from float8_compile.targets import TARGETS, Target
from float8_compile.variants import AS_BUILT, quiet, variant

NAME = "preview_accuracy"
RECIPES = (AS_BUILT, "tensorwise", "rowwise", "delayed")
SHAPES = {
    "cuda": llama.LLAMA_3_8B,
    "cpu": llama.Shape(tokens=32, dim=64, hidden=128, heads=2, key_heads=1),
}
MARKERS = {TRITON: "o", GEMM: "s", ATTENTION: "^"}


def build(recipe: str, shape: llama.Shape) -> Any:
    """The layer, and its inputs."""
    layer, inputs, _ = variant(lambda: llama.build(shape=shape), recipe)()
    if recipe in DELAYED:
        share_input_scales(layer)
    return layer, inputs


def predicted(recipe: str, shape: llama.Shape, target: str) -> list[Predicted]:
    """The preview's launches, in order; made by another process, which sees no GPU."""
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""), ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_preview, recipe, shape, target).result()


def _preview(recipe: str, shape: llama.Shape, target: str) -> list[Predicted]:
    import float8_compile.preview as preview
    from float8_compile.preview.roles import role

    names = {"GEMM": GEMM, "attention": ATTENTION}
    with quiet():
        found = preview(lambda: build(recipe, shape), target)  # type: ignore[operator]
    return [
        Predicted(
            launch.name,
            TRITON if launch.kind == "triton" else names.get(role(launch), OTHER),
            launch.reads + launch.writes,
            launch.sectors,
            max(launch.seconds, launch.sectors / TARGETS[target].bandwidth),
        )
        for launch in found.launches
    ]


def measured(recipe: str, shape: llama.Shape, device: str, backend: str, steps: int) -> list[Measured]:
    """The kernels of a step, in order, each with the median of its times. Raises RuntimeError if steps differ."""
    torch.manual_seed(0)
    with torch.device(device):
        layer, inputs = build(recipe, shape)
    x = inputs[0]
    gradient = torch.randn_like(x)
    calibrated(layer, lambda: layer(*inputs).backward(gradient))
    run = compiled(lambda *inputs: layer(*inputs), backend)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        run(*inputs).backward(gradient)

    for _ in range(3):  # compiles, and has Triton choose among its configs
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    kind = "kernel" if device == "cuda" else "cpu_op"
    events = sorted((e for e in events_of(profiler) if e.get("cat") == kind), key=lambda event: event["ts"])
    a_step = len(events) // steps
    parts = [events[number * a_step : (number + 1) * a_step] for number in range(steps)]
    if len(events) % steps or any([e["name"] for e in part] != [e["name"] for e in parts[0]] for part in parts):
        raise RuntimeError(f"{recipe}: {len(events)} kernels in {steps} steps, and not the same in each")
    times = [(at[0]["name"], 1e-6 * median(event["dur"] for event in at)) for at in zip(*parts, strict=True)]
    return [Measured(name, role_of(name), seconds) for name, seconds in times]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line for each recipe and role."""
    rows = []
    for recipe, of in found.items():
        for role, at in of["roles"].items():
            least, took = 1e3 * at["at least seconds"], 1e3 * at["measured seconds"]
            rows.append(
                {
                    "": f"{recipe}, {role}",
                    "predicted": str(at["predicted"]),
                    "ran": str(at["ran"]),
                    "same names": str(of["same names"]) if role == TRITON else "-",
                    "GB in sectors": f"{at['bytes in sectors'] / 1e9:.2f}",
                    "at least ms": f"{least:.2f}",
                    "measured ms": f"{took:.2f}",
                    "of the bound": f"{least / took:.0%}" if took and least else "-",
                }
            )
    return markdown(rows)


def leave(folder: Path, found: dict[str, dict[str, Any]], about: dict[str, Any]) -> None:
    """The three files, of what there is so far."""
    write_json(folder / f"{NAME}.json", {**about, "recipes": found})
    write(folder / f"{NAME}.md", f"{made_by(about)} {about['method']}\n\n{table(found)}")
    with picture(folder / f"{NAME}.png", 7.5, 7, f"{about['method']}\n{about['machine']}") as figure:
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        for recipe, of in found.items():
            for role, marker in MARKERS.items():
                at = [(1e6 * pair["seconds"], 1e6 * pair["measured"]) for pair in of["pairs"] if pair["role"] == role]
                if at:
                    look = {"marker": marker, "s": 22, "edgecolors": colour(recipe), "facecolors": "none"}
                    axes.scatter(*zip(*at, strict=True), label=f"{recipe}, {role}", **look)
        axes.axline((1, 1), (10, 10), color="grey", linewidth=1)
        axes.text(0.99, 0.01, "line: the bound itself", transform=axes.transAxes, ha="right", fontsize=8)
        axes.set_xlabel("at least, us: the preview's bound")
        axes.set_ylabel("measured, us")
        axes.grid(alpha=0.25, linewidth=0.6)
        if any(of["pairs"] for of in found.values()):
            figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def target_here() -> Target | None:
    """The target that this machine's GPU is."""
    name = torch.cuda.get_device_name().upper() if torch.cuda.is_available() else ""
    return next((target for key, target in TARGETS.items() if key in name), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each recipe is done, and the table at the end."""
    device, here = "cuda" if torch.cuda.is_available() else "cpu", target_here()
    parser = parser_of(NAME, __doc__, RECIPES, rounds=10)
    add_backend(parser)
    parser.add_argument("--target", choices=TARGETS, default=here.name if here else "H100", help="default: %(default)s")
    given = parser.parse_args(arguments)
    names, shape = known(parser, given.contenders), SHAPES[device]
    layer = f"A Llama layer of width {shape.dim}, {shape.tokens} tokens, forward and backward"
    trial = "" if device == "cuda" else ", and run on a CPU, as a trial that shows nothing"
    method = f"{layer}, previewed for {given.target}{trial}."
    about = circumstances(command_line(NAME, arguments)) | {"device": device, "target": given.target, "method": method}
    about |= {"rounds": given.rounds}
    console, found, failed = Console(), dict[str, dict[str, Any]](), False
    try:
        with without_expected_warnings():
            for name in names:
                try:
                    with quiet():
                        ran = measured(name, shape, device, given.backend, given.rounds)
                        found[name] = figures(predicted(name, shape, given.target), ran)
                except RuntimeError as error:
                    failed = True
                    print(f"failed: {error}", file=sys.stderr)
                    continue
                finally:
                    torch.compiler.reset()
                leave(given.out, found, about)
                at = found[name]["roles"][TRITON]
                words = (
                    f"{at['predicted']} Triton kernels predicted, {at['ran']} ran, {found[name]['same names']} alike"
                )
                console.print(f"{name}: {words}", highlight=False)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    if found:
        print(f"\n{table(found)}\nin {given.out}: {NAME}.json, .md, .png")
    return int(failed) if failed or len(found) == len(names) else 130


if __name__ == "__main__":
    sys.exit(main())
