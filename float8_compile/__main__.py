"""python -m float8_compile preview | report | doctor: what runs in float8 and what it costs, before it runs.

    python -m float8_compile preview my_project.models:build --recipe delayed --against torchao:tensorwise
    python -m float8_compile report my_project.models:build --recipe tensorwise
    python -m float8_compile doctor

`build` is a function without arguments that returns (model, args): an nn.Module and a tuple of its arguments. A preview
calls it under `torch.device("meta")`, so the model may be larger than this machine's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import float8_compile
from float8_compile.convert import conversion_report
from float8_compile.doctor import doctor
from float8_compile.report import saved_tensors_report
from float8_compile.variants import AS_BUILT, check, load, names, quiet, variant

if TYPE_CHECKING:  # it brings the compiler and triton, and `doctor` shall work without
    from float8_compile.preview.result import Preview

USAGE = 2  # exit code, argparse's


class UsageError(Exception):
    """What the user can put right, in one line."""


class Parser(argparse.ArgumentParser):
    """One that raises UsageError."""

    def error(self, message: str) -> NoReturn:
        """Instead of printing the whole usage."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 0 or 2."""
    given = None
    try:
        given = parser().parse_args(arguments)
        with quiet():
            given.run(given)
            sys.stdout.flush()
    except UsageError as error:
        if given is not None and given.traceback:
            raise
        print(f"float8_compile: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # `| head` has seen enough; and Python shall not complain when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("float8_compile: stopped", file=sys.stderr)
        return 130
    return 0


def parser() -> Parser:
    """Of the three commands."""
    parser = Parser(
        prog="python -m float8_compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{preview,report,doctor}")

    option = _command(commands, "preview", preview, "what Inductor would generate for a GPU; needs none")
    option("build", help="package.module:function, which returns (model, args)")
    option("--target", default="H100", help="the GPU: H100, H200, B200 or L40S (default: %(default)s)")
    option("--recipe", default=AS_BUILT, help=f"{', '.join(names())}; ours with +keep, +cached (default: as built)")
    option("--against", action="append", default=[], metavar="RECIPE", help="compare with this one; may be repeated")
    option("--compile-kernels", action="store_true", help="to machine code: registers and spills; seconds a kernel")
    option("--all", action="store_true", help="every launch, not the largest only")
    option("--json", type=Path, metavar="FILE", help="write all numbers")
    option("--plot", type=Path, metavar="FILE", help="write a picture: bytes by layer and role")
    option("--code", type=Path, metavar="FILE", help="write the code that Inductor generates")

    option = _command(commands, "report", report, "which layers run in float8, and why the others don't")
    option("build", help="package.module:function, which returns (model, args)")
    option("--recipe", default=AS_BUILT, help="as of preview (default: as built)")
    option("--saved", action="store_true", help="what crosses from forward to backward too: builds and runs the model")

    _command(commands, "doctor", lambda _: print(doctor()), "what this machine can and cannot do for float8")
    return parser


def preview(given: argparse.Namespace) -> None:
    """Side by side, then the first one in full."""
    recipes = list(dict.fromkeys([given.recipe, *given.against]))
    builds = [(recipe, variant_of(given.build, recipe)) for recipe in recipes]
    for path in filter(None, (given.json, given.plot, given.code)):
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
    function = _preview_function(given.target)
    previews: list[tuple[str, Preview]] = []
    for recipe, build in builds:
        print(f"float8_compile: {recipe} for {given.target} ...", file=sys.stderr, flush=True)
        make = partial(function, build, given.target, compile_kernels=given.compile_kernels)
        found = _in_one_line(recipe, make)
        previews.append((recipe, found))
    _print_previews(previews, given.all)
    _write_previews(previews, given)


def report(given: argparse.Namespace) -> None:
    """On the meta device, since the table needs no memory; what is saved is measured on the CPU."""
    build = variant_of(given.build, given.recipe)
    with torch.device("cpu" if given.saved else "meta"):
        model, args, kwargs = _in_one_line(given.recipe, build)
    print(conversion_report(model))
    if given.saved:
        print(f"\n{_in_one_line(given.recipe, lambda: saved_tensors_report(model, *args, **kwargs))}")


def variant_of(spec: str, recipe: str) -> Callable[[], Any]:
    """The build function that `spec` names, in a recipe. Raises UsageError."""
    try:
        return variant(load(spec), check(recipe))
    except (ValueError, TypeError, AttributeError, ModuleNotFoundError) as error:
        raise UsageError(str(error)) from error


def _in_one_line(recipe: str, make: Callable[[], Any]) -> Any:
    """What `make()` returns; what it raises as a UsageError, with warnings shown as lines and not as source code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            return make()
        except Exception as error:
            raise UsageError(f"{recipe}: {_one_line(error)}") from error
        finally:
            for line in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
                print(f"float8_compile: {recipe}: {line}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    """Its type and first line; of an error that only says where another one was raised, that one's."""
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"


def _preview_function(target: str) -> Callable[..., Preview]:
    from float8_compile.targets import named

    try:
        named(target)
        import float8_compile.preview as package
        import float8_compile.preview.capture  # noqa: F401  brings the compiler and triton
    except ValueError as error:
        raise UsageError(str(error)) from None
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a preview needs {error.name}, which is not installed: python -m float8_compile doctor"
        ) from None
    return package  # type: ignore[return-value]  # callable, see there


def _print_previews(previews: Sequence[tuple[str, Preview]], everything: bool) -> None:
    from float8_compile.preview.summary import compare, text

    name, first = previews[0]
    print(f"{compare(previews)}\n\n== {name}\n{text(first, everything=everything)}")


def _write_previews(previews: Sequence[tuple[str, Preview]], given: argparse.Namespace) -> None:
    name, first = previews[0]
    if given.json:
        document = {"version": float8_compile.__version__, "torch": str(torch.__version__), "build": given.build}
        document |= {"previews": {recipe: found.to_json() for recipe, found in previews}}
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    if given.code:
        given.code.write_text("\n\n".join(f"# {name}: {graph.phase}\n{graph.code}" for graph in first.graphs) + "\n")
    if given.plot:
        from float8_compile.preview.picture import plot

        _in_one_line(name, lambda: plot(first, given.plot))
    for path in filter(None, (given.json, given.code, given.plot)):
        print(f"float8_compile: wrote {path}", file=sys.stderr)


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], words: str) -> Callable[..., Any]:
    command = commands.add_parser(name, help=words, description=words)
    command.set_defaults(run=run)
    command.add_argument("--traceback", action="store_true", help="where an error was raised, not only what it says")
    return command.add_argument


if __name__ == "__main__":
    sys.exit(main())
