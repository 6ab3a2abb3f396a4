"""A checkpoint from the version that wrote it, in tests/golden: what changes keys, or what they mean, is noticed here.

`PYTHONPATH=. python tests/test_golden_checkpoint.py` wrote it, with torch 2.13 on a CPU and float8_compile 0.1.0: an
MLP with delayed scales, three AdamW steps, one microbatch more that no step followed, and then the losses of three
steps on batches four times as large, where a scale decides what saturates. To be written anew only where users are
told that their checkpoints are no longer read. One of a dynamic recipe would hold nothing that a plain model's doesn't.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from delayed_checks import assert_same_bits, backward, batches, evidence, mlp, plain_mlp, train
from torch import Tensor, nn

import float8_compile as f8

FILE = Path(__file__).parent / "golden" / "delayed.pt"
WIDTHS = (16, 16, 16)
DATA = batches(4, 8, WIDTHS[0])
LATER = [4 * x for x in DATA[:3]]
KEYS = [
    "weight",
    "bias",
    "fp8_amax_input",
    "fp8_amax_history_input",
    "fp8_scale_input",
    "fp8_amax_grad_output",
    "fp8_amax_history_grad_output",
    "fp8_scale_grad_output",
    "fp8_scale_weight",
]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(*WIDTHS)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def write() -> None:
    """The file, with this version and this torch."""
    model, optimizer = model_and_optimizer()
    train(model, model, DATA[:3], optimizer)
    backward(model, DATA[3])
    optimizer.zero_grad()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = optimizer.state_dict()
    states["state"] = {
        number: {name: tensor.clone() for name, tensor in one.items()} for number, one in states["state"].items()
    }
    losses = torch.stack(train(model, model, LATER, optimizer))
    FILE.parent.mkdir(exist_ok=True)
    torch.save({"model": saved, "optimizer": states, "losses": losses}, FILE)


@pytest.fixture
def golden() -> Any:
    return torch.load(FILE, weights_only=True)


def test_its_keys_are_those_of_today(golden: Any) -> None:
    assert list(golden["model"]) == [f"{layer}.{key}" for layer in (0, 2) for key in KEYS]
    assert list(mlp(*WIDTHS).state_dict()) == list(golden["model"])


def test_its_numbers_mean_what_they_did(golden: Any) -> None:
    """By the rules, not by this package: a scale multiplies into float8, and the newest amax is the first."""
    state = golden["model"]
    history = state["0.fp8_amax_history_input"]
    assert history.tolist() == [x.abs().max().item() for x in (DATA[2], DATA[1], DATA[0])] + [0.0] * 13
    assert state["0.fp8_amax_input"] == DATA[3].abs().max()
    assert state["0.fp8_scale_input"] == torch.tensor(448.0).div(history.max())
    assert state["2.fp8_scale_grad_output"] == torch.tensor(57344.0).div(state["2.fp8_amax_history_grad_output"].max())
    assert state["2.fp8_scale_weight"] == torch.tensor(448.0).div(state["2.weight"].abs().max())


def test_it_loads_strictly_and_every_number_is_there(golden: Any) -> None:
    model, optimizer = model_and_optimizer()
    model.load_state_dict(golden["model"], strict=True)
    optimizer.load_state_dict(golden["optimizer"])
    assert_same_bits(dict(model.state_dict()), golden["model"])
    ours, theirs = (
        {f"{number}.{name}": tensor for number, of_one in each["state"].items() for name, tensor in of_one.items()}
        for each in (optimizer.state_dict(), golden["optimizer"])
    )
    assert_same_bits(ours, theirs)
    assert evidence(model) == dict.fromkeys(evidence(model), True)


def losses_from(state: dict[str, Tensor], golden: Any, compiled: bool = False) -> Tensor:
    model, optimizer = model_and_optimizer()
    model.load_state_dict(state, strict=True)
    optimizer.load_state_dict(golden["optimizer"])
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    return torch.stack(train(model, run, LATER, optimizer))


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_goes_on_from_it(compiled: bool, golden: Any) -> None:
    """Bitwise on the machine that wrote it. Within 1 % on others, whose GEMMs add in another order, so that a number
    may be rounded to the float8 beside it. Without its scales the first loss is 20 % off."""
    assert losses_from(golden["model"], golden, compiled).allclose(golden["losses"], rtol=0.01, atol=0)
    afresh = losses_from(f8.plain_state_dict(golden["model"]), golden)
    assert not afresh.allclose(golden["losses"], rtol=0.1, atol=0)


@pytest.mark.parametrize("recipe", f8.Recipe.names())
def test_every_recipe_takes_it(recipe: str, golden: Any) -> None:
    model, same = mlp(*WIDTHS, config=recipe), mlp(*WIDTHS, config=recipe)
    model.load_state_dict(golden["model"], strict=True)
    same.load_state_dict(f8.plain_state_dict(golden["model"]), strict=True)
    same.load_state_dict(f8.float8_state_dict(golden["model"]), strict=False)
    assert_same_bits(dict(model.state_dict()), dict(same.state_dict()))
    assert torch.equal(model(DATA[0]), same(DATA[0]))


def test_a_plain_model_takes_it_without_its_scales(golden: Any) -> None:
    plain, model = plain_mlp(*WIDTHS), mlp(*WIDTHS)
    plain.load_state_dict(f8.plain_state_dict(golden["model"]), strict=True)
    model.load_state_dict(golden["model"])
    with f8.float8_disabled(model):
        assert torch.equal(model(DATA[0]), plain(DATA[0]))
    assert torch.equal(plain[0].weight, golden["model"]["0.weight"])


if __name__ == "__main__":
    write()
