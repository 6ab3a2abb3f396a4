"""A preview as text: bytes in sectors first, then where they go, what crosses to backward, and what could be better.

Every time is a lower bound and is called "at least": datasheet bandwidth and peak, as if each launch met both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from textwrap import fill
from typing import NamedTuple

from float8_compile.preview.advice import KINDS, Advice, advise
from float8_compile.preview.machine_code import machine_code
from float8_compile.preview.result import Graph, Launch, Preview, Saved
from float8_compile.preview.roles import dtypes, layer_names, role, short_dtype, shortened
from float8_compile.table import text_table

ROWS = 12  # of a graph's launches, and a few of everything else
FEW = 3
WIDTH = 120  # characters, of a line of words


class Unit(NamedTuple):
    """Of bytes."""

    name: str
    size: float


GB, MB = Unit("GB", 1e9), Unit("MB", 1e6)


def text(preview: Preview, *, everything: bool = False) -> str:
    """All of it, as tables. Long ones are folded, the largest launches in full, unless `everything` is asked for."""
    rows = None if everything else ROWS
    parts = [headline(preview), _totals(preview)]
    parts += [_launches(name, graph, rows) for name, graph in _named_graphs(preview) if graph.launches]
    parts += machine_code(preview, rows)
    parts += [_saved(preview, None if everything else 2 * FEW)]
    parts += _notes(preview)
    parts += _advice(advise(preview), None if everything else FEW)
    return "\n\n".join(parts)


def headline(preview: Preview) -> str:
    """The figures that matter, in two lines."""
    total, triton, unit = preview.total(), preview.total("triton"), _unit([preview])
    phases = " + ".join(dict.fromkeys(graph.phase for graph in preview.graphs)) or "no graph"
    return (
        f"{preview.target}, {phases}: {triton.sectors / unit.size:.2f} {unit.name} in sectors "
        f"({triton.nbytes / unit.size:.2f} {unit.name}) in {_counted(triton.count, 'Triton kernel')}; "
        f"{_others(preview.launches)}; at least {total.seconds * 1e3:.2f} ms\n"
        "in sectors: all 32-byte sectors that are touched, by the best of a kernel's configs; at least: a bound from "
        "datasheet bandwidth and peak, not a time"
    )


def compare(previews: Sequence[tuple[str, Preview]]) -> str:
    """Side by side, a line for each name."""
    unit = _unit([preview for _, preview in previews])
    rows = [{"": name} | figures(preview, unit) for name, preview in previews]
    return text_table(list(rows[0]), [list(row.values()) for row in rows])


def figures(preview: Preview, unit: Unit = GB) -> dict[str, str]:
    """What `compare` shows of one, by the column's title. Bytes are those of the Triton kernels."""
    triton, roles = preview.total("triton"), Counter(role(launch) for launch in _not_triton(preview.launches))
    saved = sum(saved.nbytes for graph in preview.graphs for saved in graph.saved)
    return {
        "Triton kernels": str(triton.count),
        f"{unit.name} in sectors": f"{triton.sectors / unit.size:.2f}",
        unit.name: f"{triton.nbytes / unit.size:.2f}",
        "GEMMs": str(roles["GEMM"]),
        "others": str(roles.total() - roles["GEMM"]),
        "saved MB": f"{saved / MB.size:,.1f}",
        "at least ms": f"{preview.total().seconds * 1e3:.2f}",
    }


def _unit(previews: Iterable[Preview]) -> Unit:
    return GB if any(preview.total().sectors >= GB.size for preview in previews) else MB


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _not_triton(launches: Iterable[Launch]) -> list[Launch]:
    return [launch for launch in launches if launch.kind != "triton"]


def _others(launches: Iterable[Launch]) -> str:
    counts = Counter(role(launch) for launch in _not_triton(launches))
    words = [_counted(counts["GEMM"], "GEMM")] if counts["GEMM"] else []
    words += [f"{counts['attention']} of attention"] if counts["attention"] else []
    rest = counts["cast"] + counts["other"]
    words += [f"{_counted(rest, 'op')} that torch runs"] if rest else []
    return ", ".join(words) or "nothing else"


def _totals(preview: Preview) -> str:
    """By graph, and by what the launches are for."""
    unit = _unit([preview])
    rows: dict[tuple[str, str], list[Launch]] = defaultdict(list)
    for name, graph in _named_graphs(preview):
        for launch in graph.launches:
            rows[name, f"{'Triton' if launch.kind == 'triton' else 'library'}: {role(launch)}"].append(launch)
    order = [name for name, _ in _named_graphs(preview)]
    keys = sorted(rows, key=lambda key: order.index(key[0]))
    lines = [(*key, *_sums(rows[key], unit)) for key in keys] + [("total", "", *_sums(preview.launches, unit))]
    return text_table(
        ("graph", "launches", "count", f"{unit.name} in sectors", unit.name, "TFLOP", "at least ms"), lines
    )


def _sums(launches: Sequence[Launch], unit: Unit) -> tuple[str, ...]:
    return (
        str(len(launches)),
        f"{sum(launch.sectors for launch in launches) / unit.size:.2f}",
        f"{sum(launch.reads + launch.writes for launch in launches) / unit.size:.2f}",
        f"{sum(launch.flops for launch in launches) / 1e12:.2f}",
        f"{sum(launch.seconds for launch in launches) * 1e3:.3f}",
    )


def _named_graphs(preview: Preview) -> Iterator[tuple[str, Graph]]:
    """ "forward", or "forward 2" where a graph break makes several."""
    phases = [graph.phase for graph in preview.graphs]
    seen: Counter[str] = Counter()
    for graph in preview.graphs:
        seen[graph.phase] += 1
        yield graph.phase if phases.count(graph.phase) == 1 else f"{graph.phase} {seen[graph.phase]}", graph


def _launches(phase: str, graph: Graph, rows: int | None) -> str:
    """In the order in which they run; of a long list the largest, and the others as one sum."""
    by_size = sorted(graph.launches, key=lambda launch: -launch.sectors)
    shown = {id(launch) for launch in (by_size if rows is None or len(by_size) <= rows + 1 else by_size[:rows])}
    lines = [_launch_line(launch) for launch in graph.launches if id(launch) in shown]
    if folded := [launch for launch in graph.launches if id(launch) not in shown]:
        lines.append(("", f"{len(folded)} smaller launches", "", "", *_sizes(folded)))
    sizes = ("MB read", "MB written", "MB in sectors", "at least us")
    return text_table((phase, "launch", "serves", "dtypes", *sizes), lines)


def _launch_line(launch: Launch) -> tuple[str, ...]:
    name = launch.name.removeprefix("triton_")
    if role(launch) == "GEMM":
        shapes = ["x".join(map(str, buffer.shape)) for buffer in launch.buffers if len(buffer.shape) > 1]
        name += f" {shapes[0]} -> {shapes[-1]}" if len(shapes) > 1 else ""
    kind = "op" if launch.kind == "aten" else role(launch)
    return kind, shortened(name, 44), layer_names(launch.layers, 2), dtypes(launch) or launch.dtypes, *_sizes([launch])


def _sizes(launches: Sequence[Launch]) -> tuple[str, ...]:
    return (
        f"{sum(launch.reads for launch in launches) / MB.size:,.1f}",
        f"{sum(launch.writes for launch in launches) / MB.size:,.1f}",
        f"{sum(launch.sectors for launch in launches) / MB.size:,.1f}",
        f"{sum(launch.seconds for launch in launches) * 1e6:,.1f}",
    )


def _saved(preview: Preview, rows: int | None) -> str:
    """What forward makes and keeps for backward: the largest, those that look alike in one line."""
    alike: dict[tuple[object, ...], list[Saved]] = defaultdict(list)
    for saved in (saved for graph in preview.graphs for saved in graph.saved):
        alike[saved.dtype, saved.shape, saved.layers].append(saved)
    if not alike:
        return "Nothing that forward computes is kept for backward."
    groups = sorted(alike.values(), key=lambda group: -sum(saved.nbytes for saved in group))
    lines = [(*_saved_line(group), _saved_mb(group)) for group in groups[:rows]]
    if rest := [saved for group in groups[len(lines) :] for saved in group]:
        lines.append((f"{len(rest)} smaller ones", "", "", _saved_mb(rest)))
    lines.append(("total", "", "", _saved_mb([saved for group in groups for saved in group])))
    return text_table(("kept for backward", "shape", "read by", "MB"), lines)


def _saved_line(group: Sequence[Saved]) -> tuple[str, str, str]:
    first, count = group[0], f"{len(group)} of " if len(group) > 1 else ""
    return short_dtype(first.dtype), f"{count}{first.shape}", layer_names(first.layers)


def _saved_mb(group: Sequence[Saved]) -> str:
    return f"{sum(saved.nbytes for saved in group) / MB.size:,.1f}"


def _notes(preview: Preview) -> list[str]:
    lines = [_wrapped(f"* {note}") for note in preview.notes]
    return ["\n".join(["Not modelled or not counted:", *lines])] if lines else []


def _advice(advices: Sequence[Advice], most: int | None) -> list[str]:
    """Each kind's largest in full, the others of it as a sum."""
    lines = []
    for kind in KINDS:
        of_kind = [advice for advice in advices if advice.kind == kind]
        lines += [_wrapped(f"* {advice.text}") for advice in of_kind[:most]]
        if rest := of_kind[len(of_kind[:most]) :]:
            layers = tuple(dict.fromkeys(layer for advice in rest for layer in advice.layers))
            nbytes = sum(advice.nbytes for advice in rest)
            lines.append(f"  {len(rest)} more like this, {nbytes / MB.size:,.1f} MB: {layer_names(layers, 6)}")
    return ["\n".join(["Advice:", *lines])] if lines else []


def _wrapped(line: str) -> str:
    return fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
