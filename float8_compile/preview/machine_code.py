"""What the kernels' machine code uses, as a table; there is one where a preview was made with `compile_kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from float8_compile.preview.result import Config, Kernel, Preview
from float8_compile.preview.roles import shortened
from float8_compile.table import text_table


def machine_code(preview: Preview, most: int | None) -> Iterator[str]:
    """The table, of the `most` kernels that move most; nothing where nothing was compiled. Ranges are over configs."""
    kernels = {kernel.name: kernel for graph in preview.graphs for kernel in graph.kernels.values()}
    moved = dict.fromkeys(kernels, 0)
    for launch in preview.launches:
        if launch.name in moved:
            moved[launch.name] += launch.sectors
    largest = sorted(kernels, key=lambda name: -moved[name])[:most]
    lines = [_line(kernel) for name, kernel in kernels.items() if name in largest and _compiled(kernel)]
    if lines:
        yield text_table(
            ("compiled kernel", "configs", "registers", "bytes spilled", "bytes shared", "float8 conversions"), lines
        )


def _compiled(kernel: Kernel) -> list[Config]:
    return [config for config in kernel.configs if config.registers is not None]


def _line(kernel: Kernel) -> tuple[str, ...]:
    configs = _compiled(kernel)
    columns = ("registers", "spills", "shared", "float8_conversions")
    ranges = (_range([getattr(config, column) or 0 for config in configs]) for column in columns)
    return shortened(kernel.name.removeprefix("triton_"), 44), str(len(configs)), *ranges


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"
