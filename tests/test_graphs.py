"""CUDA graphs: what makes capture possible, and what `make_graphed_callables` puts back.

Without a GPU, torch's function is stood in for by what it does before it captures: warm-up passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delayed_checks import K, assert_same_bits, batches, layers_of, mlp, state_of
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode

import float8_compile as f8
from float8_compile.delayed_step import scales_of

pytestmark = pytest.mark.usefixtures("afresh")
every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())
WIDTHS = (K, 64, 48)


def warmed_up(
    callables: Any, sample_args: Any, num_warmup_iters: int, allow_unused_input: bool, pool: Any
) -> nn.Module | tuple[nn.Module, ...]:
    """torch.cuda.make_graphed_callables up to the capture, and another `forward` in place of the module's."""
    several = callables if isinstance(callables, tuple) else (callables,)
    arguments = sample_args if isinstance(callables, tuple) else (sample_args,)
    for module, args in zip(several, arguments, strict=True):
        assert not module._forward_pre_hooks, "torch refuses modules with hooks"
        for _ in range(num_warmup_iters):
            y = module(*args)
            inputs = [t for t in (*args, *module.parameters()) if t.requires_grad]
            torch.autograd.grad(y, inputs, torch.full_like(y, 1e4), allow_unused=allow_unused_input)
        module.forward = partial(module.forward)
    return callables


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", warmed_up)


def sample(rows: int = 16) -> Tensor:
    return torch.randn(rows, K, requires_grad=True)


def loss(y: Tensor) -> Tensor:
    return y.square().sum()


@pytest.mark.usefixtures("on_a_gpu")
def test_running_amaxes_are_those_before_the_warm_up() -> None:
    model, other = mlp(*WIDTHS), mlp(*WIDTHS)
    loss(model(sample())).backward()
    before = state_of(model), state_of(other)
    f8.make_graphed_callables(model, (sample(),))
    assert_same_bits(state_of(model), before[0])
    assert_same_bits(state_of(other), before[1])


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("started", [False, True])
def test_flat_gradients_are_those_before_the_warm_up(started: bool) -> None:
    model = mlp(*WIDTHS, config="tensorwise")
    gradients = f8.FlatGradients(model.parameters())
    if started:
        loss(model(sample())).backward()
    before = gradients.flat.clone()
    f8.make_graphed_callables(model, (sample(),))  # weights are unused inputs there: the slice has their gradients
    assert torch.equal(gradients.flat, before)
    loss(model(sample())).backward()
    assert not torch.equal(gradients.flat, before)


@pytest.mark.usefixtures("on_a_gpu")
@every_recipe
def test_a_step_after_it_is_the_step_without_it(recipe: str) -> None:
    graphed, plain = mlp(*WIDTHS, config=recipe), mlp(*WIDTHS, config=recipe)
    f8.cache_weight_casts(graphed)
    f8.make_graphed_callables(graphed, (sample(),), num_warmup_iters=2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in (graphed, plain)]
    for x in batches(6, 16, K):
        for model, optimizer in zip((graphed, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
    assert all(map(torch.equal, graphed.parameters(), plain.parameters()))
    assert_same_bits(state_of(graphed), state_of(plain))


@pytest.mark.usefixtures("on_a_gpu")
def test_a_weight_that_was_written_to_is_cast_again_before_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(*WIDTHS, config="tensorwise")
    f8.cache_weight_casts(model)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, *_: replaced(module))
    replays: list[Tensor] = []

    def replaced(module: nn.Module) -> nn.Module:
        def replay(x: Tensor) -> Tensor:  # asks nothing, as a graph
            replays.append(payload_of(module).clone())
            return x

        module.forward = replay  # type: ignore[method-assign]
        return module

    f8.make_graphed_callables(model, (sample(),))
    model(sample())
    layers_of(model)[0].weight.data.mul_(-1)
    model(sample())
    assert torch.equal(replays[1].float(), -replays[0].float())


def payload_of(model: nn.Module) -> Tensor:
    cast = layers_of(model)[0].cached_weight
    assert cast is not None
    assert cast.output is not None
    return cast.output.payload


@pytest.mark.usefixtures("on_a_gpu")
def test_several_callables_and_torchs_arguments() -> None:
    first, second = mlp(K, K), mlp(K, K, config="rowwise")
    graphed = f8.make_graphed_callables((first, second), ((sample(),), (sample(),)), 1, True, None)
    assert graphed == (first, second)
    assert f8.make_graphed_callables(mlp(K, K), sample_args=(sample(),), num_warmup_iters=1) is not None


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"CUDA graphs need a GPU.*leave the call out"):
        f8.make_graphed_callables(mlp(K, K), (sample(),))


# What makes capture possible


def persistent(model: nn.Module, gradients: f8.FlatGradients) -> dict[str, int]:
    """The address of everything that a captured step reads or writes beside activations and parameters."""
    found = {"flat": gradients.flat.data_ptr()}
    for fqn, layer in model.named_modules():
        for role, scale in scales_of(layer).items():
            tensors = {"amax": scale.amax, "scale": scale.scale, "unscale": scale.unscale}
            found |= {f"{fqn}.{role}.{name}": tensor.data_ptr() for name, tensor in tensors.items()}
        if isinstance(layer, f8.Float8Linear) and layer.cached_weight is not None:
            found |= {f"{fqn}.{n}": t.data_ptr() for n, t in enumerate(layer.cached_weight.tensors())}
    return found


class Reads(TorchDispatchMode):
    """Notes what would wait for a GPU: a number that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@every_recipe
@pytest.mark.parametrize("keep", [False, True])
def test_over_five_steps_addresses_stay_and_the_host_reads_nothing(recipe: str, keep: bool) -> None:
    model = mlp(*WIDTHS, config=recipe, recompute=not keep)
    f8.cache_weight_casts(model)
    gradients = f8.FlatGradients(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)
    gradients.attach(optimizer)

    def step(x: Tensor) -> None:
        for microbatch in x.chunk(2):
            loss(model(microbatch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    data = batches(6, 32, K)
    step(data[0])  # looks for evidence of delayed scales, which reads them
    before, reads = persistent(model, gradients), Reads()
    with reads:
        for x in data[1:]:
            step(x)
    assert persistent(model, gradients) == before
    assert reads.seen == []


def test_a_read_would_be_seen() -> None:
    with Reads() as reads:
        torch.ones(()).item()
    assert len(reads.seen) == 1


@dataclass
class Mutations:
    """What a compiled graph writes in place: which of its inputs, and which of them it knows to stay where they are."""

    forward: set[int]
    static: set[int]
    backward: set[str]


def mutations_of(model: nn.Module) -> Mutations:
    found = Mutations(set(), set(), set())

    def written(gm: torch.fx.GraphModule) -> dict[int, str]:
        inputs = list(gm.graph.find_nodes(op="placeholder"))
        targets = [
            node.args[0] for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        ]
        return {inputs.index(node): node.name for node in targets if node in inputs}

    def forward(gm: torch.fx.GraphModule, _: Any) -> Any:
        metadata = TracingContext.get().fw_metadata
        assert metadata is not None
        found.static |= set(metadata.static_input_indices)
        found.forward |= set(written(gm))
        return make_boxed_func(gm.forward)

    def backward(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.backward |= set(written(gm).values())
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, keep_inference_input_mutations=True)
    loss(torch.compile(model, backend=backend, fullgraph=True)(sample())).backward()
    return found


@every_recipe
def test_what_a_graph_mutates_is_marked_as_static(recipe: str) -> None:
    """Else `mode="reduce-overhead"` skips CUDA graphs, "due to mutated inputs"."""
    model = mlp(*WIDTHS, config=recipe)
    f8.cache_weight_casts(model)
    gradients = f8.FlatGradients(model.parameters())
    found = mutations_of(model)
    layers = len(layers_of(model))
    assert len(found.forward) == (layers if recipe == "delayed" else 0), "the inputs' running amaxes"
    assert found.forward <= found.static
    assert len(found.backward) == layers * (2 if recipe == "delayed" else 1), (
        "slices, and the gradients' running amaxes"
    )
    assert not any(name.startswith("tangents") for name in found.backward), "all that is not static there"
    assert gradients.flat.any()


def test_a_mutation_of_what_is_not_marked_would_be_seen() -> None:
    elsewhere = SimpleNamespace(count=torch.zeros(()))

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            elsewhere.count.add_(1)
            return super().forward(x)

    found = mutations_of(Counting(K, K))
    assert len(found.forward) == 1
    assert not found.forward <= found.static
