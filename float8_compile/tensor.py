"""Float8Tensor: a float8 payload and the scale that it was cast with, traceable by torch.compile.

    payload = saturate(high_precision * scale)        high_precision ~ payload / scale

It says what the numbers mean and no more: no GEMM role and no configuration rides on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8_compile.torch_internals import disabled_torch_function, make_wrapper

aten = torch.ops.aten


class Operand(NamedTuple):
    """A GEMM's operand in parts: a float8 payload and its scale, or a high-precision tensor and twice None.

    What `Float8Linear` works with. A Float8Tensor says the same, but building one in a traced function puts a call
    of its class into Dynamo's graph, which AOTAutograd's cache then refuses to keep.

    unscale: 1 / scale, by which a GEMM multiplies. Carried along, since a scalar's reciprocal is a kernel of its own.
    """

    payload: Tensor
    scale: Tensor | None = None
    unscale: Tensor | None = None


def dequantized(payload: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `Float8Tensor.dequantize`."""
    largest = torch.finfo(dtype).max
    return (payload.float() / scale).clamp(-largest, largest).to(dtype)


class Float8Tensor(Tensor):
    """`payload / scale`, of any shape.

    payload: float8, the tensor's shape.
    scale: float32, multiplies high precision into float8 (as in torchao); of shape () for one scale a tensor,
        else the payload's shape with 1 along the axis that shares a scale.
    dtype: the high-precision dtype it was cast from, which is what `.dtype` says and `dequantize` gives.
    """

    payload: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, payload: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Tensor:
        self = make_wrapper(
            cls,
            payload.shape,
            strides=payload.stride(),
            storage_offset=payload.storage_offset(),
            dtype=dtype,
            device=payload.device,
        )
        self.payload = payload
        self.scale = scale
        return self

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """The high-precision tensor that this one stands for, divided in float32, of dtype `self.dtype`.

        Saturating: a number near the dtype's largest may have been rounded beyond it.
        """
        return dequantized(self.payload, self.scale, self.dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        name = str(self.payload.dtype).removeprefix("torch.")
        scale = f"{self.scale.item():.6g}" if _is_readable_scalar(self.scale) else tuple(self.scale.shape)
        return f"Float8Tensor({tuple(self.shape)}, {name}, scale={scale}, for {self.dtype}, {self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["payload", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, outer_size: object, outer_stride: object
    ) -> Float8Tensor:
        return Float8Tensor(inner["payload"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _OPS:
            raise NotImplementedError(
                f"{func} is not defined for a Float8Tensor: call .dequantize() first, or work on .payload and .scale"
            )
        return _OPS[func](func, *args, **(kwargs or {}))

    # Ops on a Float8Tensor may well give plain tensors: don't wrap results in the subclass.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]


def _is_readable_scalar(scale: Tensor) -> bool:
    return scale.dim() == 0 and type(scale) is Tensor and scale.device.type != "meta"


def _both(func: Callable[..., Tensor], t: Float8Tensor, *args: Any, **kwargs: Any) -> Float8Tensor:
    """Ops that keep the shape: the same for payload and scale."""
    return Float8Tensor(func(t.payload, *args, **kwargs), func(t.scale, *args, **kwargs), t.dtype)


def _transpose(func: Callable[..., Tensor], t: Float8Tensor, *axes: Any) -> Float8Tensor:
    scale = t.scale if t.scale.dim() == 0 else func(t.scale, *axes)
    return Float8Tensor(func(t.payload, *axes), scale, t.dtype)


def _view(func: Callable[..., Tensor], t: Float8Tensor, shape: list[int]) -> Float8Tensor:
    if t.scale.dim() == 0:
        return Float8Tensor(func(t.payload, shape), t.scale, t.dtype)
    payload = func(t.payload, shape)
    if payload.shape == t.shape:
        return Float8Tensor(payload, t.scale, t.dtype)
    if t.scale.shape[-1] != 1 or payload.shape[-1] != t.shape[-1]:
        raise NotImplementedError(
            f"{func} of {tuple(t.shape)} as {tuple(shape)}: a Float8Tensor with a scale per row can only be viewed "
            "so that its rows stay whole; call .dequantize() first"
        )
    return Float8Tensor(payload, func(t.scale, [*payload.shape[:-1], 1]), t.dtype)


def _as_strided(func: Callable[..., Tensor], t: Float8Tensor, size: list[int], stride: list[int], *args: Any) -> Tensor:
    """FSDP2 cuts the padding off a gathered weight with it: the first rows of it, all as they are."""
    if list(stride) != list(t.stride()) or any(args):
        raise NotImplementedError(f"{func} to strides {stride} is not defined for a Float8Tensor: use a view")
    scale = t.scale if t.scale.dim() == 0 else t.scale[: size[0]]
    return Float8Tensor(func(t.payload, size, stride), scale, t.dtype)


def _zeros_like(func: Callable[..., Tensor], t: Float8Tensor, **kwargs: Any) -> Tensor:
    return torch.zeros(t.shape, dtype=kwargs.get("dtype") or t.dtype, device=t.device)


def _to_copy(
    func: Callable[..., Tensor], t: Float8Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> Tensor:
    if dtype not in (None, t.dtype):
        return t.dequantize().to(dtype=dtype, **kwargs)
    return Float8Tensor(func(t.payload, **kwargs), func(t.scale, **kwargs), t.dtype)


_OPS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _both,
    aten.as_strided.default: _as_strided,
    aten.clone.default: _both,
    aten.detach.default: _both,
    aten.permute.default: _transpose,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._to_copy.default: _to_copy,
    aten.zeros_like.default: _zeros_like,
}

# torch.load(weights_only=True) builds only what it is told to trust.
torch.serialization.add_safe_globals([Float8Tensor])
