"""What float8 costs around the computing, ours and torchao's: importing, converting, calling eagerly, compiling.

    python -m benchmarks.overhead                                              # on two idle cores about 15 minutes
    python -m benchmarks.overhead --parts imports conversion eager             # a minute
    python -m benchmarks.overhead --parts compile --compile rowwise torchao:rowwise --out /tmp/some

imports       seconds of `import float8_compile` and `import torchao.float8` after `import torch`; of bf16, torch's own
conversion    milliseconds to convert a model of 200 linears
eager         microseconds of a call of a small layer, as in eager_cost.py, which says more about it
compile       two narrow Llama layers, 14 linears, forward and backward: nodes of the graphs that Inductor gets, and
              seconds of the first step less those of the second, with an empty cache (cold) and in another process
              that finds the cache full (warm), also where AOTAutograd's cache may keep an autograd.Function, for which
              torch has a setting: TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD=1

Imports and compilations are processes of their own. All are medians of interleaved rounds.

Leaves overhead.json, .md and .png in benchmarks/results/ (or in --out), written anew after each part and compilation,
so what is done survives Ctrl-C.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from torch import nn

from benchmarks import eager_cost
from benchmarks.command import add_backend, command_line, count, known, parser_of, without_expected_warnings
from benchmarks.fresh_start import compile_start, import_seconds
from benchmarks.interleaved import interleaved, quantiles, seconds
from benchmarks.overhead_table import COMPILE, CONVERSION, EAGER, IMPORTS, PARTS, STARTS, Found, leave
from benchmarks.record import circumstances
from float8_compile import Recipe, convert_to_float8_training
from float8_compile.variants import AS_BUILT, TORCHAO, TORCHAO_RECIPES, quiet, variant

NAME = "overhead"
CONTENDERS = (AS_BUILT, *(TORCHAO + recipe for recipe in TORCHAO_RECIPES), *Recipe.names())
COMPILED = (AS_BUILT, f"{TORCHAO}tensorwise", "tensorwise", "delayed")
WIDTH = 64  # of the layers that are converted and called

Done = Callable[[str], object]


def package_of(name: str) -> str:
    """What a contender's user imports, beside torch."""
    return "" if name == AS_BUILT else "torchao.float8" if name.startswith(TORCHAO) else "float8_compile"


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Each name in each round, in another order each time. There is a round 0, which is not to count."""
    order, shuffled = list(names), random.Random(0)
    for number in range(rounds + 1):
        shuffled.shuffle(order)
        yield from ((number, name) for name in order)


def imports(names: Sequence[str], rounds: int, done: Done) -> Found:
    """Of each contender's package. The first round finds the disk cold, and doesn't count."""
    packages = list(dict.fromkeys(map(package_of, names)))
    samples: dict[str, list[float]] = {package: [] for package in packages}
    for number, package in turns(packages, rounds):
        torch_seconds, more = import_seconds(package)
        if number:
            samples[package].append(more if package else torch_seconds)
        done(f"import of {package or 'torch'}: round {number} of {rounds}")
    return {name: rounded(quantiles(samples[package_of(name)]), 3) for name in names}


def conversion(names: Sequence[str], layers: int, rounds: int, device: str) -> Found:
    """Of a model of so many linears, made anew for each. The first round imports what is needed, and doesn't count."""
    names = [name for name in names if name != AS_BUILT]
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number, name in turns(names, rounds):
        linears = (nn.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(layers))
        convert = converter(name, nn.Sequential(*linears))
        gc.collect()
        took = seconds(convert, device)
        if number:
            samples[name].append(1e3 * took)
    return {name: rounded(quantiles(times), 2) for name, times in samples.items()}


def converter(name: str, model: nn.Module) -> Callable[[], object]:
    """Ours alone, without what a variant does for a preview's sake."""
    if name.startswith(TORCHAO):
        return variant(lambda: (model, ()), name)
    return lambda: convert_to_float8_training(model, config=name)


def eager(names: Sequence[str], rounds: int, device: str) -> Found:
    """Microseconds a call, by pass: eager_cost's smallest layer, without compiling it."""
    with eager_cost.one_thread(device):
        calls = eager_cost.cases(WIDTH, names, device, False, lambda words: None)
        by_key = {" / ".join(case): call for case, call in calls.items()}
        times = interleaved(by_key, rounds, device=device, clock=time.thread_time)
    of_case = dict(zip(calls, times.values(), strict=True))
    found: Found = {name: {} for name in names}
    for (_, part, name), taken in of_case.items():
        if name in found:
            found[name][part] = rounded({key: 1e6 * value for key, value in quantiles(taken).items()}, 2)
    return found


def compilations(names: Sequence[str], layers: int, rounds: int, backend: str, into: Found, done: Done) -> None:
    """Cold and warm, of one contender after the other; `into` is filled, and `done` called, after each."""
    samples: dict[str, dict[str, list[float]]] = {name: {state: [] for state in STARTS} for name in names}
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = (compile_start(name, layers, backend, Path(cache)) for _ in range(2))
                _, warmest = (compile_start(name, layers, backend, Path(cache), keep_functions=True) for _ in range(2))
            for state, found in zip(STARTS, (cold, warm, warmest), strict=True):
                samples[name][state].append(found["seconds"])
            nodes = {phase: cold[phase] for phase in ("forward", "backward")}
            into[name] = {**nodes, **{state: median(samples[name][state]) for state in STARTS}}
            into[name]["samples"] = samples[name]
            took = ", ".join(f"{state} {samples[name][state][-1]:.1f} s" for state in STARTS)
            done(f"{name}: {nodes['forward']} + {nodes['backward']} nodes, {took}")


def rounded(numbers: Mapping[str, float], digits: int) -> dict[str, float]:
    """For JSON."""
    return {key: round(number, digits) for key, number in numbers.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line as each thing is done, and the table at the end."""
    parser = parser_of(NAME, __doc__, CONTENDERS, rounds=20)
    add_backend(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--compile", nargs="+", metavar="NAME", default=COMPILED, help=f"default: {', '.join(COMPILED)}"
    )
    parser.add_argument("--compile-rounds", type=count, default=3, help="default: %(default)s")
    parser.add_argument("--import-rounds", type=count, default=5, help="default: %(default)s")
    parser.add_argument("--linears", type=count, default=200, help="that are converted (default: %(default)s)")
    parser.add_argument("--layers", type=count, default=2, help="of Llama, compiled (default: %(default)s)")
    given = parser.parse_args(arguments)
    names, compiled = known(parser, given.contenders), known(parser, given.compile)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    title = "What float8 costs around the computing"
    method = (
        f"convert: {given.linears} linears; forward, + backward: an eager call of a layer of width {WIDTH} on "
        f"{eager_cost.TOKENS} tokens; nodes, compile: {given.layers} narrow Llama layers, forward and backward, by "
        f"{given.backend}. Medians of {given.import_rounds} imports, {given.rounds} rounds and {given.compile_rounds} "
        f"compilations."
    )
    about = {"title": title, **circumstances(command_line(NAME, arguments)), "device": device, "method": method}
    console, found = Console(), dict[str, Found]()

    def done(words: str) -> None:
        console.print(words, highlight=False, soft_wrap=True)
        leave(given.out, NAME, found, about)

    measure: dict[str, Callable[[], Found | None]] = {
        IMPORTS: lambda: imports(names, given.import_rounds, done),
        CONVERSION: lambda: conversion(names, given.linears, given.rounds, device),
        EAGER: lambda: eager(names, given.rounds, device),
    }
    code = 0
    try:
        with quiet(), without_expected_warnings():
            for part in [part for part in measure if part in given.parts]:
                found[part] = measure[part]() or {}
                done(f"{part}: done")
            if COMPILE in given.parts:
                into = found.setdefault(COMPILE, {})
                compilations(compiled, given.layers, given.compile_rounds, given.backend, into, done)
    except KeyboardInterrupt:
        code = 130
        print("stopped", file=sys.stderr)
    except RuntimeError as error:
        code = 1
        print(f"failed: {error}", file=sys.stderr)
    if any(found.values()):
        print(f"\n{(given.out / f'{NAME}.md').read_text()}\nin {given.out}: {NAME}.json, .md, .png")
    return code


if __name__ == "__main__":
    sys.exit(main())
