"""A weight to be gathered in float8, in one process: what it is before it is sharded, mistakes, and the bytes it keeps.

On real ranks: tests/distributed/test_fsdp_gather.py.
"""

from __future__ import annotations

import copy
import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from fresh_process import run_python
from torch import nn

import float8_compile as f8
from float8_compile.recipe import HIGH_PRECISION, Gemm

RECIPES = f8.Recipe.names()


def gathering(recipe: str) -> f8.Recipe:
    return replace(f8.Recipe.from_name(recipe), fsdp_float8_all_gather=True)


def net(config: Any = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    return model if config is None else f8.convert_to_float8_training(model, config=config)


# Before it is sharded


def test_conversion_keeps_the_parameter_and_the_way_back_gives_a_plain_one() -> None:
    model = net()
    before = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]
    f8.convert_to_float8_training(model, config=gathering("tensorwise"))
    assert [(parameter, parameter.data_ptr()) for parameter in model.parameters()] == before
    assert type(model[0].weight) is not nn.Parameter, "which FSDP2 would gather as it is"
    assert isinstance(model[0].weight, nn.Parameter)
    f8.convert_from_float8_training(model)
    assert [(parameter, parameter.data_ptr()) for parameter in model.parameters()] == before
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert not any(map(vars, model.parameters()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_deepcopy_has_parameters_and_gathers_of_its_own(recipe: str) -> None:
    model = net(gathering(recipe))
    copied = copy.deepcopy(model)
    for layer, other in ((model[0], copied[0]), (model[2], copied[2])):
        assert other.gather is not layer.gather
        assert other.gather.cast == layer.gather.cast
        assert type(other.weight) is type(layer.weight)
        assert other.weight.data_ptr() != layer.weight.data_ptr()
        assert torch.equal(other.weight, layer.weight)
    for turned in (model, copied):
        for layer in (turned[0], turned[2]):
            layer.recipe = f8.Recipe.from_name(recipe)
    for run in (model, copied):
        optimizer = torch.optim.SGD(run.parameters(), lr=1e-2)
        run(torch.ones(8, 32)).square().sum().backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), copied.parameters()))
    assert not torch.equal(model[0].weight, net()[0].weight)


@pytest.mark.parametrize("what", ["state_dict", "weight"])
def test_what_is_saved_loads_where_there_is_only_torch(what: str, tmp_path: Any) -> None:
    model, file = net(gathering("tensorwise")), io.BytesIO()
    torch.save(model.state_dict() if what == "state_dict" else {"0.weight": model[0].weight}, file)
    (tmp_path / "saved").write_bytes(file.getvalue())
    code = (
        "import sys, torch; t = torch.load(sys.argv[1], weights_only=True)['0.weight']; print(type(t), t.sum().item())"
    )
    kind, loaded = run_python(code, str(tmp_path / "saved")).rsplit(maxsplit=1)
    assert kind in ("<class 'torch.Tensor'>", "<class 'torch.nn.parameter.Parameter'>")
    assert float(loaded) == model[0].weight.sum().item()


def test_a_gather_can_be_switched_on_and_off() -> None:
    model, x = net("tensorwise"), torch.ones(8, 32)
    expected = model(x)
    model[0].recipe = gathering("rowwise")
    assert model[0].gather.by_row
    model[0].recipe = gathering("tensorwise")
    assert not model[0].gather.by_row
    model[0].recipe = f8.Recipe.from_name("tensorwise")
    assert model[0].gather is None
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model(x), expected)


# Mistakes


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forward_without_fully_shard_says_so(recipe: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"Float8Linear '0': its recipe has fsdp_float8_all_gather=True.*fully_shard"
    ):
        net(gathering(recipe))(torch.ones(8, 32))


def test_disabled_it_runs_without_fully_shard() -> None:
    model = net(gathering("tensorwise"))
    with f8.float8_disabled(model):
        assert torch.equal(model(torch.ones(8, 32)), net()(torch.ones(8, 32)))


def test_there_must_be_a_float8_weight_to_gather() -> None:
    recipe, high = f8.Recipe.from_name("tensorwise"), Gemm(HIGH_PRECISION, HIGH_PRECISION)
    with pytest.raises(ValueError, match=r"all_gather=True\): `output` is in high precision.*leave it False"):
        replace(recipe, output=high, fsdp_float8_all_gather=True)
    with pytest.raises(TypeError, match="fsdp_float8_all_gather='yes'"):
        replace(recipe, fsdp_float8_all_gather="yes")


def test_a_cache_of_such_weights_is_refused() -> None:
    model = net(gathering("tensorwise"))
    before = [type(parameter) for parameter in model.parameters()]
    with pytest.raises(TypeError, match="layer '0'"):
        f8.cache_weight_casts(model)
    assert [type(parameter) for parameter in model.parameters()] == before


# Shared weights


class Tied(nn.Module):
    def __init__(self, first: str = "tensorwise", second: str = "tensorwise") -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 48), nn.Linear(48, 32, bias=False)
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)
        self.head.weight, self.second.weight = self.embedding.weight, self.first.weight
        recipes = {"first": gathering(first), "second": gathering(second), "head": gathering("tensorwise")}
        f8.convert_to_float8_training(self, config=lambda linear, fqn: recipes[fqn])


@pytest.mark.parametrize(
    ("first", "second", "gathered"), [("tensorwise", "tensorwise", True), ("tensorwise", "rowwise", False)]
)
def test_a_shared_weight_is_gathered_in_float8_if_all_who_hold_it_multiply_the_same(
    first: str, second: str, gathered: bool
) -> None:
    """Scenario 23."""
    model = Tied(first, second)
    report = {row.fqn: row.recipe.fsdp_float8_all_gather for row in f8.conversion_report(model)}
    assert report == {"head": False, "first": gathered, "second": gathered}
    assert model.head.gather is None
    assert type(model.embedding.weight) is nn.Parameter
    assert model.first.gather is model.second.gather
    assert (model.first.gather is not None) == gathered
    assert model.first.weight is model.second.weight


# Bytes that stay between forward and backward

ALIVE = """
import warnings; warnings.simplefilter("ignore")  # Dynamo asks a non-leaf for its .grad
import dataclasses, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import float8_compile as f8

how = sys.argv[1]
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
backend = "aot_eager_decomp_partition"
N, K = 96, 64

def alive(model, run, input_needs_gradient):
    x = torch.randn(16, K, dtype=torch.bfloat16, requires_grad=input_needs_gradient)
    for _ in range(2):  # evidence of delayed scales, and the graph that has it
        run(x).float().sum().backward()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = run(x)
    found = [getattr(t, "payload", t) for t in saved]
    shards = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found if t.dim() == 2
             and sorted(t.shape) == [K, N] and t.untyped_storage().data_ptr() not in shards}
    y.float().sum().backward()
    return sum(sizes.values())

for recipe in f8.Recipe.names():
    gathered = dataclasses.replace(f8.Recipe.from_name(recipe), fsdp_float8_all_gather=True)
    for keeps in ("RR", "KK", "RK"):
        for input_needs_gradient in (True, False):
            if how != "eager" and (keeps, input_needs_gradient) != ("RK", True):
                continue  # compiling takes its time
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False)).bfloat16()
            f8.convert_to_float8_training(
                model, config=gathered, recompute_weight_cast=lambda linear, fqn: keeps[int(fqn)] == "R")
            for block in model:
                if how == "block":
                    block.compile(backend=backend)
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(model, mesh=mesh)
            run = torch.compile(model, backend=backend) if how == "whole" else model
            torch._dynamo.utils.counters.clear()
            print(recipe, keeps, input_needs_gradient, alive(model, run, input_needs_gradient) / (N * K), flush=True)
            # FSDP2's own hooks break the graph of a whole model; a block's is one.
            assert how == "whole" or not torch._dynamo.utils.counters["graph_break"]
"""


@pytest.mark.parametrize("how", ["eager", "block", "whole"])
def test_exactly_the_kept_weights_stay_after_forward(how: str) -> None:
    """Scenario 28: N·K bytes of a layer that keeps its weight and whose input needs a gradient, 0 of any other."""
    lines = run_python(ALIVE, how).splitlines()
    seen = {
        tuple(line.split()[:3]): float(line.split()[3]) for line in lines if re.search(r"(True|False) [\d.]+$", line)
    }
    assert len(seen) == len(RECIPES) * (6 if how == "eager" else 1)
    for (recipe, keeps, input_needs_gradient), weights in seen.items():
        needed = keeps if input_needs_gradient == "True" else keeps[1:]
        assert weights == needed.count("K"), (recipe, keeps, input_needs_gradient)
