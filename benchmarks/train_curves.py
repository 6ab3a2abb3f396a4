"""How recipes learn: the held-out loss of scripts/train's language model in each, over several seeds, against bf16's.

    python -m benchmarks.train_curves                                     # on two idle cores about 15 minutes
    python -m benchmarks.train_curves --seeds 5 --resume                  # goes on with what is missing
    python -m benchmarks.train_curves --size small --steps 500 --recipes delayed torchao:tensorwise --out /tmp/some

Needs scripts/ on PYTHONPATH, where the training's code is. A seed is one of weights and of batches: runs of one seed
begin with the same numbers and see the same bytes. So each run is compared with bf16's of its own seed, and what is
shown of these differences is their mean and their range over all seeds.

bf16 always runs, as the yardstick, and so does "bf16+nudge" by default: bf16 whose weights differ at the start by a
thousandth of their size. Two such runs part by chance alone, and how far says which differences mean nothing.

Leaves train_curves.json, .md and .png in benchmarks/results/ (or in --out), written anew after each run. Ctrl-C loses
the run that is under way; --resume goes on with the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from benchmarks.command import command_line, count, known
from benchmarks.look import colour, picture
from benchmarks.record import RESULTS, circumstances, made_by, markdown, write, write_json
from benchmarks.seed_spread import Runs, summary
from byte_lm.data import Text, load_text
from byte_lm.display import Live
from byte_lm.interrupt import Interrupt, listening
from byte_lm.progress import Progress
from byte_lm.results import tokens_per_step
from byte_lm.settings import BASELINE, SIZES, Settings, UsageError
from byte_lm.training import Trainer, start_compiler, train
from float8_compile import Recipe
from float8_compile.variants import CACHED, KEEP, TORCHAO, quiet

NAME = "train_curves"
NUDGE, SIZE_OF_NUDGE = "+nudge", 1e-3
RECIPES = (BASELINE, BASELINE + NUDGE, *Recipe.names())
POINTS = 20  # at which the held-out loss is taken
SHOWN = (0.25, 0.5, 0.75, 1.0)  # of the steps: where the table says how far a recipe is from bf16
SAME = ("size", "steps", "batch", "compile", "text", "commit", "versions", "machine")  # or a run can't be gone on with


@dataclass(frozen=True, kw_only=True)
class CurveSettings(Settings):
    """A run of `scripts/train` that looks at the held-out loss more often."""

    @property
    def validation_every(self) -> int:
        return -(-self.steps // POINTS)


def trained(settings: Settings, recipe: str, text: Text, console: Console, interrupt: Interrupt) -> Progress:
    """One recipe with one seed, from the first step to the last."""
    trainer = Trainer(settings, recipe.removesuffix(NUDGE), text)
    if recipe.endswith(NUDGE):
        generator = torch.Generator().manual_seed(settings.seed)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                parameter.mul_(1 + SIZE_OF_NUDGE * noise)
    shown = replace(settings, recipes=(trainer.progress.recipe,))
    with Live(console, shown) as live, tempfile.TemporaryDirectory() as folder:
        train(trainer, Path(folder) / "checkpoint.pt", live, interrupt)
    return trainer.progress


def plain(progress: Progress) -> dict[str, Any]:
    """For JSON: the held-out losses, and training's, of which each is the mean since the one before."""
    ends = [step for step, _ in progress.validation]
    parts = zip([0, *ends[:-1]], ends, strict=True)
    return {
        "validation": [(step, round(loss, 5)) for step, loss in progress.validation],
        "training": [(end, round(fmean(progress.losses[start:end]), 5)) for start, end in parts],
        "seconds": round(sum(progress.step_seconds), 1),
        "compile_seconds": progress.compile_seconds and round(progress.compile_seconds, 1),
    }


def figures(runs: Runs, recipe: str, steps: int) -> dict[str, str]:
    """Of one recipe, for people."""
    found = summary(runs, recipe)
    end, apart = found["held-out loss"][-1], {round(at["step"]): at for at in found["to bf16, %"]}
    cells = {"seeds": str(len(runs[recipe])), "held-out loss": f"{end['mean']:.4f}"}
    cells["min..max"] = f"{end['min']:.4f}..{end['max']:.4f}"
    for share in SHOWN:
        near = min(apart, key=lambda step: abs(step - share * steps), default=0)
        at = apart.get(near)
        words = "-" if at is None or recipe == BASELINE else f"{at['mean']:+.2f} ({at['min']:+.2f}..{at['max']:+.2f})"
        cells[f"to bf16 after {near or round(share * steps)} steps, %"] = words
    return cells


def table(runs: Runs, steps: int) -> str:
    """Markdown."""
    return markdown([{"recipe": name} | figures(runs, name, steps) for name in runs if runs[name]])


def draw(path: Path, runs: Runs, about: Mapping[str, Any]) -> None:
    """The curves with their range over the seeds, and below them the difference to bf16, with its range."""
    with picture(path, 9, 7.5, f"{about['title']}\n{about['machine']}") as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))
        for recipe in [name for name in runs if runs[name]]:
            style = {"color": colour(recipe), "linestyle": "--" if recipe.startswith(TORCHAO) else "-"}
            for axes, points in zip((above, below), summary(runs, recipe).values(), strict=True):
                if points and not (axes is below and recipe == BASELINE):
                    steps, mean, low, high = ([at[key] for at in points] for key in ("step", "mean", "min", "max"))
                    axes.plot(steps, mean, label=recipe, marker="o", markersize=2.5, linewidth=1.3, **style)
                    axes.fill_between(steps, low, high, color=style["color"], alpha=0.13, linewidth=0)
        below.axhline(0, color=colour(BASELINE), linewidth=1)
        above.set_ylabel("held-out loss, nats a byte")
        below.set_ylabel("to bf16 of the same seed, %")
        below.set_xlabel("step")
        above.legend(frameon=False, ncols=2)
        for axes in (above, below):
            axes.grid(alpha=0.25, linewidth=0.6)


def leave(folder: Path, runs: Runs, about: Mapping[str, Any]) -> None:
    """The three files, of what there is so far."""
    if not runs.get(BASELINE):
        return
    recipes = {name: {"runs": of} | summary(runs, name) for name, of in runs.items() if of}
    write_json(folder / f"{NAME}.json", {**about, "unit": "nats a byte, %", "recipes": recipes})
    words = f"{made_by(about)} {about['title']}."
    write(folder / f"{NAME}.md", f"{words}\n\n{table(runs, about['steps'])}")
    draw(folder / f"{NAME}.png", runs, about)


def earlier(path: Path, about: Mapping[str, Any]) -> Runs:
    """The runs in the file that --resume goes on with; none without a file. Raises UsageError where it is of others."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    for name in SAME:
        if found.get(name) != about[name]:
            raise UsageError(f"--resume: {path} was made with {name} {found.get(name)}, and this is {about[name]}")
    return {
        recipe: {int(seed): run for seed, run in of["runs"].items()} for recipe, of in found["recipes"].items()
    }  # JSON has no numbers for keys


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{NAME}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of scripts/train (default: %(default)s)")
    parser.add_argument("--steps", type=count, default=2000, help="default: %(default)s")
    parser.add_argument("--seeds", type=count, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", default=RECIPES, help=", ".join(RECIPES))
    parser.add_argument("--data", metavar="PATH", help="a file or a folder (default: Python's standard library)")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    parser.add_argument("--resume", action="store_true", help="keep the runs that --out has, and do the missing ones")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=RESULTS, help="default: benchmarks/results")
    return parser


def recipes_of(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """bf16 first. Ends the command where one is unknown."""
    if variants := [name for name in given if name.endswith((KEEP, CACHED))]:
        parser.error(f"{variants[0]!r}: what is kept or cached changes no loss; name the recipe alone")
    return known(parser, [BASELINE, *given], flag=NUDGE)


def train_all(todo: Sequence[tuple[str, int]], settings: Settings, text: Text, runs: Runs, done: Any) -> bool:
    """Fills `runs`, and calls `done()` after each. Whether all were run: False after Ctrl-C."""
    console, last = Console(), None
    with listening() as interrupt, quiet():
        try:
            if settings.compile:
                start_compiler()
            for number, (recipe, seed) in enumerate(todo, 1):
                console.print(f"{recipe}, seed {seed}: run {number} of {len(todo)}", highlight=False)
                if recipe != last:
                    torch.compiler.reset()  # seeds share what was compiled
                last = recipe
                runs.setdefault(recipe, {})[seed] = plain(
                    trained(replace(settings, seed=seed), recipe, text, console, interrupt)
                )
                done()
        except KeyboardInterrupt:
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints as it goes, and the table at the end."""
    options = parser()
    given = options.parse_args(arguments)
    recipes, size = recipes_of(options, given.recipes), SIZES[given.size]
    settings = CurveSettings(
        recipes=tuple(recipes), size=given.size, steps=given.steps, batch=size.batch, seed=0, data=given.data,
        compile=not given.no_compile,
    )  # fmt: skip
    title = (
        f"scripts/train's {given.size}: {size.layers} layers of width {size.width}, {tokens_per_step(settings)} bytes "
        f"a step, {given.seeds} seeds: their mean, and their range"
    )
    about = {"title": title, **circumstances(command_line(NAME, arguments).replace(" --resume", ""))}
    about |= {name: value for name, value in asdict(settings).items() if name in ("size", "steps", "batch", "compile")}
    try:
        text = load_text(given.data, size.context)
        about["text"] = text.fingerprint
        runs = earlier(given.out / f"{NAME}.json", about) if given.resume else {}
    except UsageError as error:
        options.error(str(error))
    todo = [(name, seed) for name in recipes for seed in range(given.seeds) if seed not in runs.get(name, {})]
    complete = train_all(todo, settings, text, runs, lambda: leave(given.out, runs, about))
    if runs.get(BASELINE):
        print(f"\n{table(runs, given.steps)}\nin {given.out}: {NAME}.json, .md, .png")
    if not complete:
        print("stopped; go on with the same command and --resume", file=sys.stderr)
    return 0 if complete else 130


if __name__ == "__main__":
    sys.exit(main())
