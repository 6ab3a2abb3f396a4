"""Other people's models, small and with random weights, how they are trained here, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import float8_compile as f8

REASON = "needs the extra ecosystem: pip install float8_compile[ecosystem]"
VOCABULARY, HIDDEN, TOKENS = 128, 64, 16
IDS = torch.randint(0, VOCABULARY, (4, TOKENS), generator=torch.Generator().manual_seed(1))

every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())
Loss = Callable[[Any], Tensor]


# Models


def _language_model(name: str, **changes: Any) -> Any:
    import transformers

    config = getattr(transformers, name.removesuffix("ForCausalLM").removesuffix("ForMaskedLM") + "Config")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 2 * TOKENS}
    torch.manual_seed(0)
    return getattr(transformers, name)(config(**{**sizes, **heads, **changes}))


def llama(**changes: Any) -> Any:
    """Its head is tied to its embedding."""
    return _language_model("LlamaForCausalLM", **{"num_key_value_heads": 2, "tie_word_embeddings": True, **changes})


def bert(**changes: Any) -> Any:
    """Its head is tied too, and so is that one's bias. Without dropout, so that two runs can be compared."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _language_model("BertForMaskedLM", **{**no_dropout, **changes})


def mixtral(**changes: Any) -> Any:
    """Four experts, two of them for each token."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _language_model("MixtralForCausalLM", **{"num_key_value_heads": 2, **experts, **changes})


def language_loss(run: Any) -> Tensor:
    """As transformers computes it, of tokens that are to be learnt by heart."""
    return run(input_ids=IDS, labels=IDS).loss


# Training


def train(model: nn.Module, loss_of: Loss, steps: int = 6, run: Any = None, optimizer: Any = None) -> list[float]:
    """The losses of some steps of AdamW. run: the compiled model."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    losses = []
    for _ in range(steps):
        loss = loss_of(model if run is None else run)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def calibrated(model: Any, loss_of: Loss = language_loss) -> Any:
    """The same model, after README's `with f8.calibrate(model)`."""
    with f8.calibrate(model):
        loss_of(model).backward()
    model.zero_grad()
    return model


class Float8Gemms(TorchDispatchMode):
    """Counts the float8 GEMMs that run inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._scaled_mm.default
        return func(*args, **kwargs or {})


def assert_trains_as_plain(model: nn.Module, plain: nn.Module, loss_of: Loss, within: float) -> None:
    """The converted model's loss falls, and stays within this part of the plain one's."""
    with Float8Gemms() as gemms:
        losses = train(model, loss_of)
    assert gemms.count > 0
    assert_near(losses, train(plain, loss_of), within)


def assert_near(losses: Sequence[float], plain: Sequence[float], within: float) -> None:
    """Each loss is within this part of the plain model's, and the last one is below the first."""
    assert max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, plain, strict=True)) < within
    assert losses[-1] < losses[0]


# Conversion


def assert_every_linear_is_float8(model: nn.Module, names: Sequence[str], loss_of: Loss) -> None:
    """These layers are converted and no others are there, and each runs its three GEMMs in float8."""
    assert converted(model) == names
    assert left_out(model) == {}
    with Float8Gemms() as gemms:
        loss_of(model).backward()
    assert gemms.count == 3 * len(names)


def converted(model: nn.Module) -> list[str]:
    """Names of the layers that run in float8."""
    return [row.fqn for row in f8.conversion_report(model) if row.recipe is not None]


def left_out(model: nn.Module) -> dict[str, str]:
    """Names of the linear layers that don't, and why."""
    return {row.fqn: row.reason for row in f8.conversion_report(model) if row.recipe is None}


def assert_is_put_back(model: nn.Module, parameters: dict[str, nn.Parameter], plain: nn.Module) -> None:
    """After `convert_from_float8_training`: nothing of ours, the parameters from before, a plain model's checkpoint."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert {type(linear) for linear in linears} == {nn.Linear}
    now = dict(model.named_parameters())
    assert {name: id(parameter) for name, parameter in now.items()} == {n: id(p) for n, p in parameters.items()}
    plain.load_state_dict(model.state_dict(), strict=True)
