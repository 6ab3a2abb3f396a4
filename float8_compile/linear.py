"""Float8Linear: `nn.Linear` whose three GEMMs run in float8. A whole step:

    forward     cast x, cast w                 output      = x @ w.T + bias
    backward    cast g                         grad_input  = g @ w
                                               grad_weight = g.T @ x

Each operand is cast once, unless its other GEMM wants another cast (`rowwise`: one scale per row of what is
contracted, which is another axis there). Of the input, backward keeps the float8 cast where it serves both GEMMs,
else the input; of the weight the float8 cast, or it casts again, as `recompute_weight_cast` says (recompute.py).
Shapes: M tokens, K in_features, N out_features, as in gemm.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile import gemm
from float8_compile.collectives import GatherTokens, gather_operand
from float8_compile.delayed import DelayedScale, cast_with
from float8_compile.delayed_step import give_scales
from float8_compile.gathered_weight import high_precision, release
from float8_compile.gradient_slice import slice_of
from float8_compile.layer_scales import ScaledLinear
from float8_compile.linear_function import Float8LinearFunction, State, parts
from float8_compile.operand_statistics import LayerStatistics
from float8_compile.recipe import HIGH_PRECISION, Gemm, Recipe
from float8_compile.recompute import cast_weight, gathered_weight
from float8_compile.split import Exchange, unflattened, ways_split
from float8_compile.tensor import Float8Tensor, Operand
from float8_compile.torch_internals import apply_function, local_part, transforms_are_active
from float8_compile.weight_gather import Model

_PLAIN = Gemm(HIGH_PRECISION, HIGH_PRECISION)
_HIGH_PRECISION = Recipe(_PLAIN, _PLAIN, _PLAIN, name="high precision")
HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Float8Linear(ScaledLinear):
    """`nn.Linear` in float8: the same parameters, arguments and gradients, other arithmetic.

    Made from a live `nn.Linear` by `convert_to_float8_training`, or built like one, with a recipe.

    recipe: how each operand is cast; may be replaced by another recipe at any time.
    input_scale, grad_output_scale, weight_scale: the state of delayed scales (delayed.py), else None. It moves in
        training with gradients enabled; in `eval()` or under `no_grad` scales are used and amaxes are not recorded. In
        `eval()` a weight's scale is dynamic.
    recompute_weight_cast: True casts the weight again in backward, False keeps the float8 weight (N·K bytes).
        Settable at any time; costs one recompilation.
    enabled: False runs the layer in high precision (see `float8_disabled`).
    fqn: the layer's name in the model that was converted, for messages.
    calibrating: record amaxes in any mode (see `calibrate`).
    statistics: what its casts add to while it is monitored (see `monitor`), else None.
    """

    recompute_weight_cast: bool
    enabled: bool
    fqn: str
    calibrating: bool
    statistics: LayerStatistics | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "tensorwise",
        recompute_weight_cast: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_name(recipe)
        become_float8([self], [recipe], [recompute_weight_cast], [""])

    def become_plain(self) -> None:
        """Become an `nn.Linear` again, the same object."""
        if self.gather is not None:
            release(self.gather, self)
        self.hold(None)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        for name in _ATTRIBUTES:
            delattr(self, name)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N), of the input's dtype, or of autocast's where that is on.

        Raises TypeError for a dtype other than bfloat16, float16 and float32, ValueError for a last dimension
        other than K.
        """
        w_NK, bias, split = *self._local_parameters(), self.split
        if not self.enabled and split is None:
            return nn.functional.linear(input, high_precision(w_NK), bias)
        if input.is_cuda and not torch.compiler.is_compiling():
            _warn_eager()
        check_input(input, w_NK.shape[1], self._name)
        x = autocast_input(input)
        x_MK = x if x.dim() == 2 else x.reshape(-1, w_NK.shape[1])
        records = self.records_amaxes()
        recipe = self._recipe if self.enabled else _HIGH_PRECISION
        if torch.compiler.is_exporting() and not self.training and split is None:
            y_MN = self._as_plain_ops(x_MK, w_NK, bias, recipe)
            return y_MN if x.dim() == 2 else unflattened(y_MN, x, None)
        sums_x_grad = split is not None and split.axis == 0 and not isinstance(x, Float8Tensor)
        blocks = 1 if split is None else split.blocks(x)
        gathers_x = split is not None and split.gathers_input
        if split is not None and gathers_x and not recipe.reads_input_in_float8:
            x_MK, gathers_x, sums_x_grad = GatherTokens.apply(x_MK, split.group, blocks), False, False
        with torch.no_grad():
            of_x = ways_split(split)[0]
            x8 = cast_with(x_MK, recipe.output.left, self.input_scale, record=records, across=of_x)
            if self.statistics is not None:
                self.statistics.add("input", x_MK, x8, recipe)
            if split is not None and gathers_x:
                x8 = gather_operand(x8, split.group, blocks)
        # In eval the weights may be another's (an average, a checkpoint copied in): no optimizer step would tell.
        weight_scale = self.weight_scale if self.training else None
        w8, kept_w8, kept_as_it_is = self._cast_weight(w_NK, recipe, weight_scale, read_by_backward=x.requires_grad)
        keeps_w8 = kept_w8 is w8
        other_w8 = None if keeps_w8 else kept_w8
        if self.statistics is not None:
            self.statistics.add("weight", w_NK, w8, recipe)
            if not recipe.casts_weight_once:
                self.statistics.add("weight for grad_input", w_NK, other_w8, recipe)
        exchange = None if split is None else Exchange(split, blocks, gathers_x, sums_x_grad)
        scales = self.input_scale, self.grad_output_scale, weight_scale
        state = State(*scales, records, slice_of(w_NK), exchange, self.statistics)
        operands = *parts(x8), *parts(w8), *parts(other_w8, w8)
        y_MN = apply_function(Float8LinearFunction, x_MK, w_NK, bias, *operands, keeps_w8, kept_as_it_is, recipe, state)
        return y_MN if x.dim() == 2 else unflattened(y_MN, x, None if split is None else split.tokens)

    def _as_plain_ops(self, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
        """The same numbers for `torch.export`, without what only a backward needs: a graph would show it."""
        if torch.onnx.is_in_onnx_export():  # an error here torch takes for a reason to trace in another way
            warnings.warn(
                f"{self._name()} computes its scales at run time, which no ONNX runtime makes a float8 GEMM of: export "
                "export.freeze_for_inference(model, calibration=[...]), or, for high precision, "
                "convert_from_float8_training(model)",
                stacklevel=2,
            )
        x8 = cast_with(x_MK, recipe.output.left, self.input_scale)
        w8 = cast_with(w_NK, recipe.output.right, None)
        how = recipe.output
        y_MN = gemm.output(x8, w8, x_MK.dtype, fast_accum=how.fast_accum, emulate=recipe.emulate)
        return y_MN if bias is None else y_MN + bias.to(y_MN.dtype)

    def records_amaxes(self) -> bool:
        """Whether a call records amaxes of delayed scales: in training with gradients, and while it calibrates."""
        return self.calibrating or (self.training and torch.is_grad_enabled())

    def _cast_weight(
        self, w_NK: Tensor, recipe: Recipe, delayed: DelayedScale | None, read_by_backward: bool
    ) -> tuple[Operand, Operand | None, bool]:
        """The weight as `output` multiplies it, what backward is handed, and whether that is kept as it is."""
        of_w = ways_split(self.split)[1]
        # A transform allows no write to the buffers, and compiled it loses what backward saves of them.
        cached = self.cached_weight if self.training and not transforms_are_active() else None
        if cached is not None and cached.holds(w_NK):
            # Alive anyway, and as backward reads it if a copy of that may be kept.
            return *cached.operands(), True
        if self.gather is not None and recipe.output.is_float8:
            w8 = self.gather.operand(self._gathered(w_NK))
            w8, kept_w8 = gathered_weight(w_NK, w8, recipe, self.recompute_weight_cast, read_by_backward, of_w)
            return w8, kept_w8, self.recompute_weight_cast  # FSDP2's buffer, empty between forward and backward
        return *cast_weight(w_NK, recipe, self.recompute_weight_cast, read_by_backward, delayed, of_w), False

    def _local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the weight and of the bias, where tensor parallelism has split them."""
        if self.split is None:
            w_NK = self.weight
            if self.input_scale is not None and local_part(w_NK) is not None:
                raise TypeError(
                    f"{self._name()}: its weight is a DTensor and its scales are delayed, of which torch's parallel "
                    "styles know nothing: use float8_compile.distributed.Float8ColwiseParallel or Float8RowwiseParallel"
                )
            return w_NK, self.bias
        weight: Any = self.weight
        bias: Any = self.bias
        return weight.to_local(), None if bias is None else bias.to_local()

    def _gathered(self, weight: Tensor) -> Float8Tensor:
        if isinstance(weight, Float8Tensor):
            return weight
        raise RuntimeError(
            f"{self._name()}: its recipe has fsdp_float8_all_gather=True, but FSDP2 has not gathered its weight, which "
            f"is a {type(weight).__name__}: call fully_shard on the converted model, or on what holds this layer; in "
            "one process, under DDP or FSDP1 leave fsdp_float8_all_gather=False"
        )

    def _name(self) -> str:
        return f"Float8Linear {self.fqn!r}" if self.fqn else "Float8Linear"

    def extra_repr(self) -> str:
        kept = "" if self.recompute_weight_cast else ", recompute_weight_cast=False"
        return f"{super().extra_repr()}, recipe={self.recipe}{kept}{'' if self.enabled else ', disabled'}"


def check_input(x: Tensor, in_features: int, name: Callable[[], str]) -> None:
    """TypeError or ValueError for what a float8 layer can't take; name: of the layer."""
    if x.is_nested:
        raise TypeError(
            f"{name()}: the input is a nested tensor, which has no float8 GEMM; give a padded one, and convert what "
            "holds the whole nn.TransformerEncoder, which then makes none"
        )
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{name()}: the input is {x.dtype}, but float8 GEMMs give bfloat16, float16 or float32; "
            "cast the input, or leave this layer out with module_filter_fn"
        )
    if x.dim() == 0 or x.shape[-1] != in_features:
        last = x.shape[-1] if x.dim() else "missing"
        raise ValueError(
            f"{name()}: the input's last dimension is {last} in {tuple(x.shape)}, but in_features is {in_features}"
        )


def autocast_input(x: Tensor) -> Tensor:
    """The input in autocast's dtype, where that is on."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


_ATTRIBUTES = (
    "_recipe",
    "recompute_weight_cast",
    "enabled",
    "fqn",
    "calibrating",
    "statistics",
    "input_scale",
    "grad_output_scale",
    "weight_scale",
    "cached_weight",
    "gather",
    "split",
)


def become_float8(
    linears: Sequence[nn.Linear], recipes: Sequence[Recipe], recompute: Sequence[bool], fqns: Sequence[str]
) -> None:
    """Turn live linears into `Float8Linear`s, all at once, so that those with equal settings share their state's
    vectors. The objects and their parameters stay the same."""
    model = Model()
    for linear, recipe, recompute_weight_cast, fqn in zip(linears, recipes, recompute, fqns, strict=True):
        if not isinstance(linear, Float8Linear):
            linear.__class__ = Float8Linear  # type: ignore[assignment]
            assert isinstance(linear, Float8Linear)
        linear._recipe, linear.fqn = recipe, fqn
        linear.recompute_weight_cast, linear.enabled, linear.calibrating = recompute_weight_cast, True, False
        for name in ("gather", "split", "statistics"):
            vars(linear).setdefault(name, None)
        linear.have_gathered(recipe, model)
        if (cached := vars(linear).setdefault("cached_weight", None)) is not None:
            cached.fit(recipe)
    give_scales(linears, recipes)


@cache
def _warn_eager() -> None:
    warnings.warn(
        "a Float8Linear runs eagerly on a GPU: its casts are then separate kernels and it is slower than nn.Linear. "
        "Wrap the model in torch.compile.",
        stacklevel=4,
    )
