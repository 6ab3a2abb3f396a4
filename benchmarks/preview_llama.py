"""What Inductor generates for one Llama-3-8B layer, 8192 tokens, forward and backward, in each recipe. Needs no GPU.

    python -m benchmarks.preview_llama                                  # all of them for an H100, about 3 minutes
    python -m benchmarks.preview_llama --target B200 --recipes bf16 delayed --out /tmp/b200

Leaves preview_llama.json, .md and .png in benchmarks/results/ (or in --out), written anew after each recipe, so what is
done survives Ctrl-C. Bytes are counted, and are those of the Triton kernels; times are bounds, not measurements.

The recipes are those of `python -m float8_compile preview`. In the delayed ones q, k and v share one input scale, and
so do w1 and w3, as after `float8_compile.calibrate`; "+own scales" is the same without that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks import llama
from benchmarks.command import command_line
from benchmarks.record import RESULTS, circumstances, markdown, write, write_json
from float8_compile import Recipe
from float8_compile.preview.result import Preview
from float8_compile.variants import AS_BUILT, CACHED, KEEP, TORCHAO, TORCHAO_RECIPES, quiet, variant

OWN_SCALES = "+own scales"
DELAYED = (
    "delayed",
    f"delayed{KEEP}",
    f"delayed{CACHED}",
    f"delayed{KEEP}{CACHED}",
    f"delayed{OWN_SCALES}",
)
RECIPES = (
    AS_BUILT,
    *(TORCHAO + recipe for recipe in TORCHAO_RECIPES),
    *(recipe for recipe in Recipe.names() if recipe not in DELAYED),
    *DELAYED,
)
NAME = "preview_llama"


def build(recipe: str) -> Callable[[], Any]:
    """The layer in a recipe, delayed scales as after some steps. Raises ValueError for an unknown recipe."""
    make = variant(llama.build, recipe.removesuffix(OWN_SCALES))

    def build_layer() -> Any:
        layer, *arguments = make()
        if recipe in DELAYED and not recipe.endswith(OWN_SCALES):
            share_input_scales(layer)
        return layer, *arguments

    return build_layer


def share_input_scales(layer: nn.Module) -> None:
    """One input scale for the layers that read the same tensor, as `calibrate` would find out."""
    attention, feed_forward = layer.attention, layer.feed_forward
    attention.wk.input_scale = attention.wv.input_scale = attention.wq.input_scale  # type: ignore[union-attr]
    feed_forward.w3.input_scale = feed_forward.w1.input_scale  # type: ignore[union-attr]


def preview(make: Callable[[], Any], target: str) -> Preview:
    """`float8_compile.preview`, which brings the compiler: imported after the arguments are known to be right."""
    import float8_compile.preview as package

    return package(make, target)  # type: ignore[operator]


def totals(found: Preview) -> dict[str, Any]:
    """Of one preview, for JSON: per kind of launch, and of the Triton kernels per graph and role."""
    from float8_compile.preview.roles import role

    triton: dict[str, dict[str, int]] = defaultdict(lambda: {"count": 0, "sectors": 0})
    for graph in found.graphs:
        for launch in graph.launches:
            if launch.kind == "triton":
                part = triton[f"{graph.phase} {role(launch)}"]
                part["count"] += 1
                part["sectors"] += launch.sectors
    kinds = found.to_json()["totals"]
    saved = sum(saved.nbytes for graph in found.graphs for saved in graph.saved)
    return {
        "totals": kinds,
        "triton": triton,
        "saved_bytes": saved,
        "at_least_seconds": found.total().seconds,
        "preview_seconds": round(found.seconds, 1),
        "notes": list(found.notes),
    }


def leave(folder: Path, target: str, previews: Sequence[tuple[str, Preview]], command: str) -> None:
    """The three files, of what there is so far."""
    from float8_compile.preview.picture import plot_comparison
    from float8_compile.preview.summary import figures

    title = f"One Llama-3-8B layer, {llama.TOKENS} tokens, forward + backward, for {target}"
    about = circumstances(command)
    recipes = {name: totals(found) for name, found in previews}
    write_json(folder / f"{NAME}.json", {"model": title, "target": target, **about, "recipes": recipes})
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    table = markdown([{"recipe": name} | figures(found) for name, found in previews])
    write(folder / f"{NAME}.md", f"{title}. Made by `{command}` with {versions}.\n\n{table}")
    plot_comparison(previews, folder / f"{NAME}.png", f"{title}: bytes that Triton kernels move")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each recipe is done, and the table at the end."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{NAME}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="H100", help="the GPU (default: %(default)s)")
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", default=RECIPES, help=", ".join(RECIPES))
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=RESULTS, help="default: benchmarks/results")
    given = parser.parse_args(arguments)
    command = command_line(NAME, arguments)
    try:
        with quiet():
            builds = [(recipe, build(recipe)) for recipe in given.recipes]
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))

    from float8_compile.preview.summary import compare, headline

    previews: list[tuple[str, Preview]] = []
    try:
        for recipe, make in builds:
            start = time.perf_counter()
            with quiet():
                previews.append((recipe, preview(make, given.target)))
            leave(given.out, given.target, previews, command)
            first_line = headline(previews[-1][1]).partition("\n")[0]
            print(f"{recipe} ({time.perf_counter() - start:.0f} s): {first_line}", flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    if previews:
        print(f"\n{compare(previews)}\n\nin {given.out}: {NAME}.json, .md, .png")
    return 0 if len(previews) == len(builds) else 130


if __name__ == "__main__":
    sys.exit(main())
