"""Gradients of many parameters in one buffer, each in its slice, added up as backward computes them.

Accumulating microbatches in float32 costs a list of gradients and, for one all-reduce or one norm over all of them, the
concatenation of that list: twice the memory (FSDP's discussion of flat gradients). Here there is only the buffer:

    Float8Linear        adds its weight's gradient into the slice in its backward, which in a compiled region is a part
                        of the graph: one gradient is alive at a time
    other parameters    get `.grad` from autograd, and a hook adds it into the slice

A slice is a view of the buffer. Where parameter and buffer have the same dtype it is also the parameter's `.grad`, from
the first gradient on; else `.grad` is None, and the attached optimizer gets gradients of the parameter's dtype for the
time of its step.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from float8_compile.gradient_slice import ATTRIBUTE, GradientSlice, slice_of
from float8_compile.storage import own_storage
from float8_compile.torch_internals import mark_static_address

_alive: weakref.WeakSet[FlatGradients] = weakref.WeakSet()


class FlatGradients:
    """One flat buffer for the gradients of `parameters`, accumulated over microbatches.

        gradients = FlatGradients(model.parameters())
        gradients.attach(optimizer)
        for microbatches in data:
            for batch in microbatches:
                model(batch).backward()
            gradients.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    parameters: in the order in which they lie in the buffer, each once; those without `requires_grad` get no slice.
        Gradients that they have already are taken over.
    dtype: of the buffer.

    flat: (sum of numels,), of dtype: every gradient as its parameter lies in memory, zeros where none came. Keeps its
        address. With plain replicas (without DDP) `torch.distributed.all_reduce(gradients.flat)` is the whole
        communication.

    A parameter that got no gradient since `zero_` has `.grad` None at the step, as without this. Between a step and the
    next backward gradients have to be set to zero, by `zero_()` or by an attached optimizer's `zero_grad()`;
    `model.zero_grad()` does not reach the buffer, and backward then raises RuntimeError. Hooks on the weight of a
    Float8Linear, and `torch.autograd.grad` by it, see no gradient; `torch.autograd.grad` by anything else adds to the
    buffer too, as it runs the same backward.

    Raises ValueError where no parameter requires a gradient, where they are on several devices or have a slice already,
    TypeError for a dtype that is not floating point and for sharded parameters (float8_compile.distributed has another
    class for those).
    """

    flat: Tensor

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
        parameters = _checked(parameters, dtype)
        numels = [p.numel() for p in parameters]
        self._begin(parameters, sum(numels), dtype)
        self._views: dict[nn.Parameter, Tensor] = {}
        for parameter, part in zip(parameters, self.flat.split(numels), strict=True):
            self._views[parameter] = _laid_out_as(parameter, part)
            self._give_slice(parameter, [self._views[parameter]])
            if parameter.grad is not None:
                self._take(parameter)

    def _begin(self, parameters: list[nn.Parameter], numel: int, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self.flat = torch.zeros(numel, dtype=dtype, device=parameters[0].device)
        self._used: set[nn.Parameter] = set()  # have a gradient since the last zero
        self._stepped: set[nn.Parameter] = set()  # and an optimizer has taken it
        self._shown: set[nn.Parameter] = set()  # had the slice as `.grad` after their last backward
        self._handles: list[Any] = []
        self._attached: list[Optimizer] = []
        self._detach: list[Callable[[], None]] = []  # what remove() does for each of them
        self._slices: dict[nn.Parameter, GradientSlice] = {}
        _alive.add(self)

    def _give_slice(self, parameter: nn.Parameter, pieces: list[Tensor]) -> None:
        """Have gradients of a parameter added up in parts of the buffer."""
        slice_ = GradientSlice([mark_static_address(own_storage(piece)) for piece in pieces], owner=self)
        setattr(parameter, ATTRIBUTE, slice_)
        self._slices[parameter] = slice_
        myself = weakref.ref(self)  # a parameter's hooks don't keep it alive, its slice does

        def after_backward(parameter: nn.Parameter) -> None:  # also where the slice has got the gradient already
            if (gradients := myself()) is not None:
                gradients._take(parameter)

        self._handles.append(parameter.register_post_accumulate_grad_hook(after_backward))

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's slice, of its shape."""
        return self._views[parameter]

    @torch.no_grad()
    def zero_(self) -> None:
        """All gradients to zero, and `.grad` to None."""
        self._zero(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None

    def attach(self, optimizer: Optimizer) -> None:
        """Let an optimizer, of all or some of the parameters, step from the buffer; `zero_grad` then zeroes it too.

        For parameters of the buffer's dtype nothing is copied. For others (bfloat16 weights, float32 buffer) gradients
        of the parameter's dtype are alive while the optimizer steps.
        """
        if any(known is optimizer for known in self._attached):
            return
        self._attached.append(optimizer)
        self._handles += [
            optimizer.register_step_pre_hook(self._hand_over),
            optimizer.register_step_post_hook(self._take_back),
        ]
        zero_grad, before = optimizer.zero_grad, vars(optimizer).get("zero_grad")
        attached = [self]  # empty after remove(), where this may lie below another buffer's

        def zero_grad_and_slices(set_to_none: bool = True) -> None:
            for gradients in attached:
                with torch.no_grad():
                    gradients._zero(gradients._held_by(optimizer), forget=set_to_none)
            zero_grad(set_to_none)

        def detach() -> None:
            attached.clear()
            if vars(optimizer).get("zero_grad") is zero_grad_and_slices:
                del optimizer.zero_grad
                vars(optimizer).update({} if before is None else {"zero_grad": before})

        # Of this optimizer object alone: torch has no hook for it (its LR schedulers replace `step` in the same way).
        optimizer.zero_grad = zero_grad_and_slices  # type: ignore[method-assign]
        self._detach.append(detach)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all gradients in the buffer: scales them, returns the norm before."""
        norm = torch.nn.utils.get_total_norm([self.flat], norm_type, error_if_nonfinite)
        self.flat.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def remove(self) -> None:
        """Give the parameters back: gradients go to `.grad` again, and those in the buffer stay there."""
        for handle in self._handles:
            handle.remove()
        for detach in self._detach:
            detach()
        for parameter in self._slices:
            delattr(parameter, ATTRIBUTE)
        self._handles, self._attached, self._detach, self._slices = [], [], [], {}

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """After backward of a parameter: `.grad`, if autograd has made one, goes into the slice, and shows it."""
        view, gradient = self._views[parameter], parameter.grad
        shown = self._shows(parameter) or parameter in self._shown
        lost = shown and parameter in self._used and not self._is_view(parameter, gradient)
        if parameter in self._stepped or lost:
            raise RuntimeError(
                f"a gradient of a parameter of shape {tuple(parameter.shape)} came while FlatGradients still held that "
                "of the step before: call optimizer.zero_grad() of an attached optimizer, or FlatGradients.zero_(); "
                "model.zero_grad(), `.grad = None` and `.to(dtype)` don't reach the buffer"
            )
        if not self._is_view(parameter, gradient):
            if gradient is not None:
                self._slices[parameter].add(gradient)
            parameter.grad = view.detach() if self._shows(parameter) else None
        self._used.add(parameter)
        if self._shows(parameter):
            self._shown.add(parameter)
        else:
            self._shown.discard(parameter)

    def _hand_over(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step: gradients of the parameters' dtype, where that is not the buffer's."""
        held = self._held_by(optimizer)
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None and not all(map(self._shows, held)):
            raise TypeError(
                f"{type(optimizer).__name__}.step(closure): gradients are computed inside the step, so their dtype has "
                f"to be the parameters'; use FlatGradients(..., dtype={held[0].dtype})"
            )
        wanted = {p for p in held if p in self._used and not self._shows(p)}
        position = 0
        for (dtype, is_wanted), run in itertools.groupby(self._parameters, key=lambda p: (p.dtype, p in wanted)):
            parameters = list(run)
            numels = [p.numel() for p in parameters]
            if is_wanted:
                cast = self.flat[position : position + sum(numels)].to(dtype)
                for parameter, part in zip(parameters, cast.split(numels), strict=True):
                    parameter.grad = _laid_out_as(parameter, part)
            position += sum(numels)

    def _take_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a step: the optimizer's gradients are the buffer's again, and to be zeroed before the next backward."""
        held = self._held_by(optimizer)
        for parameter in held:
            if not self._shows(parameter):
                parameter.grad = None
        self._stepped |= self._used & set(held)

    def _zero(self, parameters: list[nn.Parameter], forget: bool = True) -> None:
        if len(parameters) == len(self._parameters):
            self.flat.zero_()
        else:
            for parameter in parameters:
                self._slices[parameter].zero_()
        self._stepped -= set(parameters)
        if forget:
            self._used -= set(parameters)

    def _shows(self, parameter: nn.Parameter) -> bool:
        """Whether the slice can be the parameter's `.grad`."""
        return parameter.dtype == self.flat.dtype

    def _is_view(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        is_dense = gradient is not None and gradient.layout is torch.strided
        return gradient is not None and is_dense and gradient.is_set_to(self._views[parameter])

    def _held_by(self, optimizer: Optimizer) -> list[nn.Parameter]:
        known = set(self._parameters)
        return [p for group in optimizer.param_groups for p in group["params"] if p in known]


@contextlib.contextmanager
def flat_gradients_kept() -> Iterator[None]:
    """What runs inside leaves no trace in flat gradients. A copy is only made of what is not all zero."""
    before = [(gradients, gradients.flat.clone() if gradients._used else None) for gradients in list(_alive)]
    try:
        yield
    finally:
        for gradients, flat in before:
            gradients.flat.zero_() if flat is None else gradients.flat.copy_(flat)


def _laid_out_as(parameter: Tensor, part: Tensor) -> Tensor:
    """The part in the parameter's shape and, where those leave no gaps, with its strides: a fused optimizer goes
    through parameter and gradient as they lie in memory."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)


def _checked(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    """Those that get a slice, each once."""
    parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    if any(hasattr(p, "placements") for p in parameters):
        raise TypeError(
            "FlatGradients: these parameters are sharded (DTensor), and gradients come by the gathered ones; for FSDP2 "
            "there is float8_compile.distributed.ShardedFlatGradients(module), one for each fully_shard group"
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"FlatGradients(dtype={dtype}): expected a floating-point dtype of 16 bits or more")
    if not parameters:
        raise ValueError("FlatGradients: no parameter requires a gradient; was an iterator passed that is used up?")
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"FlatGradients: the parameters are on {names}; make one for each device")
    for parameter in parameters:
        if slice_of(parameter) is not None:
            raise ValueError(
                f"FlatGradients: a parameter of shape {tuple(parameter.shape)} has a slice of another FlatGradients; "
                "remove() that one first"
            )
    return parameters
