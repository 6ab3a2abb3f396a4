"""Out of training: inference with constant scales, and ONNX. What torch itself exports needs nothing of ours:

    frozen = export.freeze_for_inference(model, calibration=[batch])       # a copy; the model may train on
    torch.export.export(frozen, (batch,))                                  # aten and float8 ops
    torch._inductor.aoti_compile_and_package(...)                          # a library for a process without Python
    export.onnx(frozen, (batch,), "model.onnx")                            # QuantizeLinear / DequantizeLinear

A converted model in `eval()` goes through `torch.export` too; each run then takes amaxes and casts the weights again.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from float8_compile.cast import tensor_amax
from float8_compile.frozen_linear import ONNX_OPSET, FrozenLinear, static_input_scale
from float8_compile.linear import Float8Linear


@torch.no_grad()
def freeze_for_inference(module: nn.Module, calibration: Iterable[Any] | None = None) -> nn.Module:
    """A copy of the model for inference: in `eval()`, without gradients, its float8 layers `FrozenLinear`s.

    calibration: inputs of the model, each a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
        They run through the model as it is, in `eval()` and eagerly, and each layer's input scale comes from the
        largest amax that it saw. Without them, and for layers that they don't reach, it is delayed scaling's.

    Weights are cast as `recipe.output` does it, one scale a tensor or a row. An input has one scale: rows of a batch to
    come have no constant one. Layers that are disabled, or whose `output` is in high precision, become `nn.Linear`s.

    Raises ValueError where a layer's input has no scale from anywhere or amaxes are not finite, TypeError for a
    calibration that is one input instead of several, for models without a `Float8Linear`, and for weights that are
    split or gathered over processes. The model is left as it was.
    """
    if isinstance(calibration, Tensor | Mapping | str):
        raise TypeError(
            f"calibration={type(calibration).__name__}: expected several inputs of the model, such as [batch], each a "
            "tensor, a tuple of arguments or a mapping of keyword arguments"
        )
    module = getattr(module, "_orig_mod", module)  # what torch.compile wraps
    layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
    if not layers:
        raise TypeError(f"{type(module).__name__} has no Float8Linear to freeze: convert it first")
    for layer in layers:
        if layer.split is not None or layer.gather is not None or hasattr(layer.weight, "to_local"):
            raise TypeError(
                f"layer {layer.fqn!r}: its weight is split or gathered over processes: save a checkpoint and load it "
                "into a model of one process"
            )
    amaxes = None if calibration is None else _input_amaxes(module, layers, calibration)
    frozen = {id(layer): FrozenLinear(layer, scale) for layer, scale in _input_scales(layers, amaxes).items()}
    copied = copy.deepcopy(module, memo=frozen)
    for layer in list(copied.modules()):
        if isinstance(layer, Float8Linear):
            layer.become_plain()
    return copied.eval().requires_grad_(False)


def onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    path: Any = None,
    *,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> Any:
    """`torch.onnx.export` of a frozen model: float8 weights, QuantizeLinear and DequantizeLinear, constant scales.

    args, path, and options such as `dynamic_shapes`, `kwargs` and `input_names`: as torch's; `opset_version` is 21 or
    higher. dtype: what is not float8 becomes this, in the graph and in floating-point arguments, since onnxruntime's
    CPU kernels take no bfloat16; None leaves it. Returns torch's ONNXProgram. Needs the extra `onnx`.

    Raises TypeError for a model with `Float8Linear`s, ImportError where onnx and onnxscript are missing, ValueError for
    an older opset. The model is left as it was.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, Float8Linear):
            raise TypeError(
                f"layer {name!r} is a Float8Linear, whose scales are computed at run time: export "
                "export.freeze_for_inference(model, calibration=[...]), or convert_from_float8_training(model) for an "
                "ONNX model in high precision"
            )
    if (opset := options.pop("opset_version", ONNX_OPSET)) < ONNX_OPSET:
        raise ValueError(f"opset_version={opset}: QuantizeLinear gives float8 from {ONNX_OPSET} on")
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise ImportError("export.onnx needs onnx and onnxscript: pip install float8_compile[onnx]")
    if dtype is not None:
        module = copy.deepcopy(module).to(dtype)
        args = tuple(_cast(argument, dtype) for argument in args)
        options["kwargs"] = {name: _cast(value, dtype) for name, value in (options.get("kwargs") or {}).items()}
    return torch.onnx.export(module, args, path, dynamo=True, opset_version=opset, **options)


def _input_amaxes(module: nn.Module, layers: list[Float8Linear], calibration: Iterable[Any]) -> dict[nn.Module, Tensor]:
    """The largest magnitude of each layer's input, of those that were called."""
    amaxes: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        amax = tensor_amax(args[0] if args else kwargs["input"]).float()
        amaxes[layer] = torch.maximum(amaxes.get(layer, amax), amax)

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with _in_eval(module), torch.compiler.set_stance("force_eager"):
            for inputs in calibration:
                if isinstance(inputs, Mapping):
                    module(**inputs)
                else:
                    module(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    finally:
        for handle in handles:
            handle.remove()
    return amaxes


@contextlib.contextmanager
def _in_eval(module: nn.Module) -> Iterator[None]:
    training = {each: each.training for each in module.modules()}
    try:
        module.eval()
        yield
    finally:
        for each, was in training.items():
            each.training = was


def _input_scales(layers: list[Float8Linear], amaxes: Mapping[nn.Module, Tensor] | None) -> dict[Float8Linear, Tensor]:
    """The `input_scale` of each layer that runs in float8."""
    scales, unknown = {}, []
    for layer in layers:
        if not layer.enabled or not layer.recipe.output.is_float8:
            continue
        amax = amaxes.get(layer) if amaxes is not None else None
        if amax is not None and not bool(amax.isfinite()):
            raise ValueError(f"layer {layer.fqn!r}: in calibration the largest magnitude of its input is {float(amax)}")
        if amax is not None and bool(amax > 0):
            scales[layer] = static_input_scale(amax, layer)
        elif layer.input_scale is not None and bool(layer.input_scale.scale > 0):
            scales[layer] = layer.input_scale.unscale.clone()
        else:
            unknown.append(layer.fqn or "(root)")
    if unknown:
        remedy = (
            "pass calibration=[inputs, ...], or train with delayed scales"
            if amaxes is None
            else "no calibration input reaches them, or only zeros do; give others"
        )
        raise ValueError(
            f"no scale is known for the inputs of {', '.join(unknown)}: {remedy}, or leave a layer in high precision "
            "with layer.enabled = False"
        )
    return scales


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    return argument.to(dtype) if isinstance(argument, Tensor) and argument.is_floating_point() else argument
