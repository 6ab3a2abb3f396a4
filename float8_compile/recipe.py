"""What is cast how: three GEMMs, two casts each. Frozen, checked and complete when built.

    output      = x   @ w.T     (M,K) (N,K) -> (M,N)
    grad_input  = g   @ w       (M,N) (N,K) -> (M,K)
    grad_weight = g.T @ x       (M,N) (M,K) -> (N,K)

A preset is a function that returns a `Recipe`; a variant is `dataclasses.replace(recipe, ...)`. Nothing edits a
recipe after its birth, so two layers can share one and a compiled graph can take it for a constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

Scaling = Literal["dynamic", "delayed"]
Granularity = Literal["tensor", "row"]
AmaxRule = Literal["max", "most_recent"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8_DTYPES = (E4M3, E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class Cast:
    """How one operand of one GEMM is cast to float8.

    dtype: a float8 dtype, or None for high precision (the operand is left as it is).
    scaling: "dynamic", the scale comes from the tensor's own amax; "delayed", from the amaxes of earlier steps
        (delayed.py), of a weight from its amax after the last optimizer step.
    granularity: "tensor", one scale; "row", one scale per row of the operand along the contracted axis.
    power_of_two: round the scale down to a power of two, which makes scaling exact.

    Raises ValueError for anything else, and for delayed scales per row: the rows of a batch are other ones each step.
    """

    dtype: torch.dtype | None = E4M3
    scaling: Scaling = "dynamic"
    granularity: Granularity = "tensor"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in FLOAT8_DTYPES:
            raise ValueError(
                f"Cast(dtype={self.dtype}): expected a float8 dtype such as torch.float8_e4m3fn, "
                "or None for high precision"
            )
        for field, legal in (("scaling", Scaling), ("granularity", Granularity)):
            value = getattr(self, field)
            if value not in get_args(legal):
                raise ValueError(f"Cast({field}={value!r}): expected one of {get_args(legal)}")
        if self.is_delayed and self.granularity == "row":
            raise ValueError(
                "Cast(scaling='delayed', granularity='row'): a batch's rows are other ones each step, so no row has a "
                "history; use granularity='tensor', or scaling='dynamic'"
            )

    @property
    def is_delayed(self) -> bool:
        """Whether the scale comes from earlier steps."""
        return self.dtype is not None and self.scaling == "delayed"

    def __str__(self) -> str:
        if self.dtype is None:
            return "high precision"
        name = str(self.dtype).removeprefix("torch.float8_").removesuffix("fn")
        return f"{name} {'delayed' if self.is_delayed else self.granularity}" + (" 2^n" if self.power_of_two else "")


HIGH_PRECISION = Cast(dtype=None)


def _check_type(owner: object, fields: tuple[str, ...], expected: type) -> None:
    for field in fields:
        if not isinstance(value := getattr(owner, field), expected):
            raise TypeError(f"{type(owner).__name__}({field}={value!r}): expected a {expected.__name__}")


@dataclass(frozen=True)
class Gemm:
    """One GEMM: how its left and its right operand are cast, as they stand in the legend above.

    fast_accum: let the tensor core accumulate in lower precision (Hopper; elsewhere it changes nothing).

    Raises ValueError where one operand is float8 and the other is not, or where both are e5m2: no GPU has
    such a GEMM.
    """

    left: Cast = Cast()
    right: Cast = Cast()
    fast_accum: bool = False

    def __post_init__(self) -> None:
        _check_type(self, ("left", "right"), Cast)
        dtypes = (self.left.dtype, self.right.dtype)
        if (dtypes[0] is None) != (dtypes[1] is None):
            raise ValueError(
                f"Gemm({self.left} · {self.right}): both operands are float8 or both are high precision; "
                "give the other one a dtype, or None to both"
            )
        if all(dtype in (E5M2, torch.float8_e5m2fnuz) for dtype in dtypes):
            raise ValueError("Gemm(e5m2 · e5m2): no GPU multiplies it; use e4m3 for one operand")

    @property
    def is_float8(self) -> bool:
        """Whether the GEMM runs in float8 at all."""
        return self.left.dtype is not None

    def __str__(self) -> str:
        if not self.is_float8:
            return "high precision"
        return f"{self.left} · {self.right}" + (", fast accum" if self.fast_accum else "")


@dataclass(frozen=True)
class DelayedScaling:
    """How delayed scales follow from amaxes (FP8 Formats for Deep Learning, arXiv 2209.05433; Transformer Engine).

    history: how many earlier steps' amaxes are remembered; the scale looks at them and at the step that just ended.
    margin: scale / 2**margin leaves that many powers of two of headroom. Weights need none, their amax is exact.
    amax: "max", the largest of the history and of this step's amax; "most_recent", this step's.
    group: the process group over which amaxes are reduced; None: all ranks, where torch.distributed runs.

    Raises TypeError or ValueError for anything else.
    """

    history: int = 16
    margin: int = 0
    amax: AmaxRule = "max"
    group: torch.distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for field in ("history", "margin"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"DelayedScaling({field}={value!r}): expected an int")
        if self.history < 1:
            raise ValueError(f"DelayedScaling(history={self.history}): expected 1 or more")
        if self.amax not in get_args(AmaxRule):
            raise ValueError(f"DelayedScaling(amax={self.amax!r}): expected one of {get_args(AmaxRule)}")
        if self.group is not None and not isinstance(self.group, torch.distributed.ProcessGroup):
            raise TypeError(
                f"DelayedScaling(group={self.group!r}): expected a torch.distributed.ProcessGroup or None for all ranks"
            )

    def __deepcopy__(self, memo: Any) -> DelayedScaling:
        return self  # frozen; and a process group can't be copied


@dataclass(frozen=True)
class Recipe:
    """Three GEMMs and where they run.

    output, grad_input, grad_weight: see the legend of this module. For `grad_weight` the left operand is the
    gradient and the right one the input.
    emulate: multiply in float32 instead of calling the float8 GEMM, for GPUs that have none.
    name: what reports and `repr` call it.
    delayed: how the scales of delayed casts move.
    fsdp_float8_all_gather: under FSDP2 (`fully_shard`, after conversion) the weight is gathered as `output` casts it:
        one byte an element. What `grad_input` casts otherwise (`rowwise`) is cast from that, which under powers of two
        rounds no second time, but for numbers that are subnormal in one of the two.
    casts_input_once, casts_weight_once, casts_gradient_once: whether one float8 cast of it serves both of its GEMMs,
        which follows from these.

    Raises TypeError for fields of other types, and ValueError where the two casts of one tensor are both delayed and
    differ (it has one scale), where `delayed` is given and no cast is, or where there is no float8 weight to gather.
    """

    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm
    emulate: bool = False
    name: str = "custom"
    delayed: DelayedScaling = DelayedScaling()
    fsdp_float8_all_gather: bool = False
    casts_input_once: bool = dataclasses.field(init=False, repr=False, compare=False)
    casts_weight_once: bool = dataclasses.field(init=False, repr=False, compare=False)
    casts_gradient_once: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_type(self, ("output", "grad_input", "grad_weight"), Gemm)
        _check_type(self, ("delayed",), DelayedScaling)
        for role, (first, second) in self._casts().items():
            if first.is_delayed and second.is_delayed and first != second:
                raise ValueError(
                    f"Recipe: the {role} is cast as {first} and as {second}, but has one delayed scale: make the two "
                    "equal, or one of them dynamic"
                )
        _check_type(self, ("emulate", "fsdp_float8_all_gather"), bool)
        if self.fsdp_float8_all_gather and self.output.right.dtype is None:
            raise ValueError(
                "Recipe(fsdp_float8_all_gather=True): `output` is in high precision, so there is no float8 weight to "
                "gather; leave it False"
            )
        if self.delayed != DelayedScaling() and not any(map(self.delayed_cast, self._casts())):
            raise ValueError(f"Recipe(delayed={self.delayed}): no cast of it has scaling='delayed'")
        # Fields, since every call of a layer asks: eagerly and under Dynamo a comparison of two casts costs.
        for role, name in (("input", "input"), ("weight", "weight"), ("grad_output", "gradient")):
            object.__setattr__(self, f"casts_{name}_once", _one_cast(*self._casts()[role]))

    def _casts(self) -> dict[str, tuple[Cast, Cast]]:
        return {
            "input": (self.output.left, self.grad_weight.right),
            "weight": (self.output.right, self.grad_input.right),
            "grad_output": (self.grad_input.left, self.grad_weight.left),
        }

    def delayed_cast(self, role: str) -> Cast | None:
        """The delayed cast of the "input", "weight" or "grad_output", or None where neither of its two is delayed.

        A weight that FSDP2 gathers in float8 has its exact scale from there, whatever its cast says.
        """
        if role == "weight" and self.fsdp_float8_all_gather:
            return None
        return next((cast for cast in self._casts()[role] if cast.is_delayed), None)

    @property
    def is_float8(self) -> bool:
        """Whether any of the three runs in float8."""
        return self.output.is_float8 or self.grad_input.is_float8 or self.grad_weight.is_float8

    @property
    def reads_input_in_float8(self) -> bool:
        """Whether all GEMMs that read the input do, so that it may be sent in float8."""
        return self.output.is_float8 and self.grad_weight.is_float8

    @property
    def reads_gradient_in_float8(self) -> bool:
        """Whether all GEMMs that read the output's gradient do, so that it may be sent in float8."""
        return self.grad_input.is_float8 and self.grad_weight.is_float8

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names that `from_name` and `convert_to_float8_training(config=...)` know."""
        return tuple(_PRESETS)

    @classmethod
    def from_name(cls, name: str) -> Recipe:
        """The preset of that name, in any case. Raises ValueError with the known names."""
        try:
            return _PRESETS[name.lower()]()
        except KeyError:
            known = ", ".join(_PRESETS)
            raise ValueError(f"unknown recipe {name!r}: the recipes are {known}") from None

    def __str__(self) -> str:
        gathered = " + float8 all-gather" if self.fsdp_float8_all_gather else ""
        if self.name != "custom":
            return self.name + gathered
        return f"{self.output} | {self.grad_input} | {self.grad_weight}{gathered}"


def _one_cast(first: Cast, second: Cast) -> bool:
    # An operand's two GEMMs contract different axes, so scales per row can't be shared.
    return first == second and first.dtype is not None and first.granularity == "tensor"


def tensorwise() -> Recipe:
    """One dynamic scale a tensor, e5m2 gradients: the fastest dynamic recipe (torchao's default)."""
    forward, gradient = Cast(E4M3), Cast(E5M2)
    return Recipe(
        output=Gemm(forward, forward, fast_accum=True),
        grad_input=Gemm(gradient, forward),
        grad_weight=Gemm(gradient, forward),
        name="tensorwise",
    )


def rowwise() -> Recipe:
    """One dynamic power-of-two scale a row, e4m3 throughout: more accurate, outliers stay in their row."""
    row = Cast(E4M3, granularity="row", power_of_two=True)
    return Recipe(Gemm(row, row, fast_accum=True), Gemm(row, row), Gemm(row, row), name="rowwise")


def rowwise_with_gw_hp() -> Recipe:
    """`rowwise`, but the weight's gradient is computed in high precision: the most accurate recipe."""
    row = Cast(E4M3, granularity="row", power_of_two=True)
    tensor = Cast(E4M3, power_of_two=True)
    return Recipe(
        output=Gemm(row, row, fast_accum=True),
        grad_input=Gemm(row, tensor),
        grad_weight=Gemm(HIGH_PRECISION, HIGH_PRECISION),
        name="rowwise_with_gw_hp",
    )


def delayed() -> Recipe:
    """`tensorwise` with scales from the steps before: one read of each tensor, where a dynamic scale needs two."""
    forward, gradient = Cast(E4M3, "delayed"), Cast(E5M2, "delayed")
    return Recipe(
        output=Gemm(forward, forward, fast_accum=True),
        grad_input=Gemm(gradient, forward),
        grad_weight=Gemm(gradient, forward),
        name="delayed",
    )


_PRESETS: dict[str, Callable[[], Recipe]] = {
    preset.__name__: preset for preset in (tensorwise, rowwise, rowwise_with_gw_hp, delayed)
}
