"""Parameters of which every write is seen, also one through `.data`.

A tensor counts the writes to it (`_version`), but `w.data` is another tensor with a counter of its own, which torch
throws away: `w.data.copy_(...)` and `w.data = t` leave no trace. Here `.data` is a property whose results share one
counter. What is not seen: aliases made before (`flat = w.data.view(-1)`), the `.data` of an alias
(`w.detach().data`), other libraries' aliases (NumPy, DLPack), and ops that don't say that they write: those of
torch.distributed (`broadcast(w.data, 0)`) and fused optimizers, after which the optimizer's hook comes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_OWN = ("_alias", "_assigned", "_watchers", "_watched")
_numbers = itertools.count()  # no two assignments have the same: what `swap_tensors` puts here looks like another
Watcher = Callable[[], object]


class _AskedBeforeEachCall:
    """An attribute that is True, after each watcher was called: the last moment to put right what depends on a weight.
    False where `swap_tensors` has put another watched parameter here, with other watchers.

    A compiled graph that reads it reads it anew before each call: Dynamo takes an attribute of a parameter for a value,
    whatever computes it, and guards on it. It traces into a property, so this is a descriptor of another kind; a Dynamo
    that looks into all kinds would trace the watchers, and a test notice. (A guard on an object of its own would
    compile each of a model's equal blocks anew.) Not read under
    `torch.compiler.set_stance(skip_guard_eval_unsafe=True)`, which says that nothing has changed.
    """

    def __get__(self, parameter: WatchedParameter | None, _: object) -> bool:
        if parameter is None:  # asked of the class
            return True
        try:
            for watcher in parameter._watchers:
                watcher()
        except AttributeError as error:  # which would say that the parameter has no such attribute
            raise RuntimeError(f"what depends on a parameter could not be brought up to date: {error}") from error
        return parameter._watched == id(parameter)


class WatchedParameter(nn.Parameter):
    """A live `nn.Parameter`, the same object, between `watch` and `unwatch`. Its copies and pickles are plain."""

    _alias: Tensor | None
    _assigned: int
    _watchers: list[Watcher]
    _watched: int

    watchers_asked = _AskedBeforeEachCall()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """As `Tensor.data`, but writes to it count."""
        if torch.compiler.is_dynamo_compiling():
            return self.detach()  # which Dynamo knows, and counts as a write to the parameter itself
        if self.is_meta:
            return super().data
        if self._alias is not None and not self._alias.is_set_to(self):  # moved by an op such as `set_`
            self._alias, self._assigned = None, next(_numbers)
        if self._alias is None:
            self._alias = super().data
        return self._alias.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        nn.Parameter.data.__set__(self, data)  # type: ignore[attr-defined]
        self._assigned = next(_numbers)
        if self._alias is None or not self._alias.is_set_to(self):
            uncounted = data is self or data.is_inference()
            self._alias = None if uncounted else data.detach()  # so that writes through `data` count too

    def writes(self) -> tuple[int, ...]:
        """Another tuple after each write."""
        return self._version, self._assigned, 0 if self._alias is None else self._alias._version

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = copy.deepcopy(self._plain(), memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        plain = nn.Parameter(super().data, self.requires_grad)
        vars(plain).update({name: value for name, value in vars(self).items() if name not in _OWN})
        return plain


def watch(parameter: nn.Parameter, watcher: Watcher) -> None:
    """From here on see writes to it, and call the watcher before it is used; there may be several."""
    if not isinstance(parameter, WatchedParameter):
        parameter.__class__ = WatchedParameter
        assert isinstance(parameter, WatchedParameter)
        parameter._alias, parameter._assigned = None, next(_numbers)
        parameter._watchers, parameter._watched = [], id(parameter)
    parameter._watchers.append(watcher)


def unwatch(parameter: nn.Parameter, watcher: Watcher) -> None:
    """The counterpart of `watch`: after the last one it is a plain parameter again."""
    if isinstance(parameter, WatchedParameter) and watcher in parameter._watchers:
        parameter._watchers.remove(watcher)
        if not parameter._watchers:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            for name in _OWN:
                delattr(parameter, name)
