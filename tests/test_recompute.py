"""Keep or recompute the casted weight: obeyed everywhere, layer by layer, and nobody else's business."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_checks import Graphs, compile_counted, graphs_of, saved_float8
from fresh_process import run_python
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import float8_compile as f8
from float8_compile import recompute
from float8_compile.delayed_step import scales_of
from float8_compile.recipe import HIGH_PRECISION, Cast, Gemm
from float8_compile.recompute import weights_to_keep

SHAPES = {"0": (96, 64), "2": (112, 96), "4": (64, 112)}  # (N, K) by layer
CHOICES = {
    "recompute": dict.fromkeys(SHAPES, True),
    "keep": dict.fromkeys(SHAPES, False),
    "mixed": {"0": True, "2": False, "4": True},
}


# "calibrated" is delayed where there is evidence, so that casts have their scales from the state: another graph
RECIPES = (*f8.Recipe.names(), "calibrated")


def mlp(recipe: str, choice: dict[str, bool], dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(k, n, bias=False) for n, k in SHAPES.values()]
    model = nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2]).to(dtype)
    config = "delayed" if recipe == "calibrated" else recipe
    f8.convert_to_float8_training(model, config=config, recompute_weight_cast=lambda linear, fqn: choice[fqn])
    if recipe == "calibrated":
        f8.mark_calibrated(model)
    return model


def kept_bytes(choice: dict[str, bool]) -> int:
    return sum(n * k for fqn, (n, k) in SHAPES.items() if not choice[fqn])


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)


def by_policy(decide: Callable[[Any], CheckpointPolicy]) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: decide(op))
    return lambda model: lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts)


def with_weights(model: nn.Module, make: Callable[[Tensor], Tensor], use: Callable[[Tensor], Tensor]) -> Any:
    weights = {name: make(p.detach()).requires_grad_() for name, p in model.named_parameters()}
    return lambda x: torch.func.functional_call(model, {name: use(w) for name, w in weights.items()}, (x,))


def in_a_nested_region(model: nn.Module) -> Callable[[Tensor], Tensor]:
    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Tensor:
        return model(x)

    return region


def under_autocast(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    return run


GEMMS = f8.sac_save_ops()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_eagerly_a_policy_may_save_whatever_it_likes(recipe: str, dtype: torch.dtype) -> None:
    model, x = mlp(recipe, CHOICES["mixed"], dtype), batch().to(dtype)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    by_policy(lambda op: CheckpointPolicy.MUST_SAVE)(model)(x).sum().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert gradient is not None
        assert torch.equal(p.grad, gradient)


SITUATIONS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "module": lambda model: model,
    "functional_call": lambda model: lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "plain leaf tensors": lambda model: with_weights(model, Tensor.clone, lambda w: w),
    "float32 masters cast in the graph": lambda model: with_weights(model, Tensor.float, Tensor.bfloat16),
    "checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=True),
    "checkpoint block by block": lambda model: (
        lambda x: functools.reduce(lambda h, block: checkpoint(block, h, use_reentrant=False), model, x)
    ),
    "a policy that saves GEMMs": by_policy(
        lambda op: CheckpointPolicy.MUST_SAVE if op in GEMMS else CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "a policy that saves everything": by_policy(lambda op: CheckpointPolicy.MUST_SAVE),
    "a policy that saves nothing": by_policy(lambda op: CheckpointPolicy.MUST_RECOMPUTE),
    "nested_compile_region": in_a_nested_region,
    "autocast": under_autocast,
}


def step(run: Callable[[Tensor], Tensor]) -> Tensor:
    x = batch()
    run(x).float().square().sum().backward()
    assert x.grad is not None
    return x.grad


def graphs_in(situation: str, model: nn.Module) -> Graphs:
    return graphs_of(step, SITUATIONS[situation](model))


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(
    ("recipe", "choice"),
    [("tensorwise", "recompute"), ("tensorwise", "keep")] + [(recipe, "mixed") for recipe in RECIPES],
)
def test_exactly_the_kept_weights_cross_to_backward(situation: str, recipe: str, choice: str) -> None:
    graphs = graphs_in(situation, mlp(recipe, CHOICES[choice]))
    assert saved_float8(graphs, SHAPES.values()) == kept_bytes(CHOICES[choice])
    assert len(graphs.forward) == len(graphs.backward) == 1


@pytest.mark.parametrize("situation", SITUATIONS)
def test_whether_parameters_count_as_free_to_save_makes_no_difference(situation: str) -> None:
    with torch._functorch.config.patch(treat_parameters_as_free_to_save=False):
        graphs = graphs_in(situation, mlp("tensorwise", CHOICES["mixed"]))
    assert saved_float8(graphs, SHAPES.values()) == kept_bytes(CHOICES["mixed"])


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_bitwise_those_of_eager_either_way(situation: str, recipe: str) -> None:
    """And the amaxes that delayed scales will be made of."""

    def gradients(choice: str, compiled: bool) -> list[Tensor]:
        model = mlp(recipe, CHOICES[choice])
        run = SITUATIONS[situation if compiled or situation != "nested_compile_region" else "module"](model)
        torch._dynamo.reset()
        x_grad = step(torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)
        amaxes = [entry.amax for layer in model for role, entry in scales_of(layer).items() if role != "weight"]
        assert all(amaxes)
        return [x_grad, *(p.grad for p in model.parameters() if p.grad is not None), *amaxes]

    expected = gradients("recompute", compiled=False)
    for got in (gradients("keep", compiled=False), gradients("mixed", compiled=True)):
        assert len(got) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_without_the_tags_the_partitioner_would_decide_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways round, so the tests above can fail: parameters are always cast again, leaf tensors always kept."""
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *a, **k: CheckpointPolicy.PREFER_SAVE)
    monkeypatch.setattr(recompute, "_CONTEXTS", {True: contexts, False: contexts})
    everything = sum(n * k for n, k in SHAPES.values())
    as_module = graphs_in("module", mlp("tensorwise", CHOICES["keep"]))
    as_leaves = graphs_in("plain leaf tensors", mlp("tensorwise", CHOICES["recompute"]))
    assert saved_float8(as_module, SHAPES.values()) == 0
    assert saved_float8(as_leaves, SHAPES.values()) == everything


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kept_weight_is_stored_as_backward_reads_it(recipe: str) -> None:
    graphs = graphs_in("module", mlp(recipe, CHOICES["keep"]))
    kept = [t for t in graphs.saved() if t.dtype.itemsize == 1 and tuple(t.shape) in SHAPES.values()]
    assert [t.stride() for t in kept] == [(1, t.shape[0]) for t in kept]
    assert len(kept) == 3


def amaxes_of_weights(graphs: Graphs) -> int:
    """Reductions of |weight|: first stages for "tensor", whole ones for "row"."""
    found = 0
    for graph in [*graphs.forward, *graphs.backward]:
        for node in graph.graph.nodes:
            if "aten.abs" in str(node.target) and tuple(node.meta["val"].shape) in SHAPES.values():
                found += sum("amax" in str(user.target) for user in node.users)
    return found


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_weights_amax_is_taken_once_a_step(situation: str, choice: str) -> None:
    graphs = graphs_in(situation, mlp("tensorwise", CHOICES[choice]))
    assert amaxes_of_weights(graphs) == len(SHAPES)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_delayed_weights_amax_is_taken_in_no_graph(situation: str) -> None:
    """But in the first step, which has no other scale."""
    assert amaxes_of_weights(graphs_in(situation, mlp("delayed", CHOICES["mixed"]))) == len(SHAPES)
    assert amaxes_of_weights(graphs_in(situation, mlp("calibrated", CHOICES["mixed"]))) == 0


def test_a_policy_on_sac_save_ops_repeats_no_gemm_and_no_reduction() -> None:
    plain = graphs_in("module", mlp("tensorwise", CHOICES["recompute"]))
    saved = graphs_in("a policy that saves GEMMs", mlp("tensorwise", CHOICES["recompute"]))
    nothing_saved = graphs_in("a policy that saves nothing", mlp("tensorwise", CHOICES["recompute"]))
    for op in ("_scaled_mm", "amax"):
        assert saved.calls(op) == plain.calls(op)
        assert nothing_saved.calls(op)[1] > plain.calls(op)[1]


def test_flipping_costs_one_recompilation() -> None:
    model = mlp("tensorwise", CHOICES["recompute"])
    run, counter = compile_counted(model)
    for expected, choice in enumerate(("recompute", "keep", "mixed"), start=1):
        for fqn, again in CHOICES[choice].items():
            model.get_submodule(fqn).recompute_weight_cast = again
        for _ in range(2):
            step(run)
        assert counter.frame_count == expected


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_eagerly_a_checkpoint_region_changes_no_gradient(recipe: str, reentrant: bool) -> None:
    expected = step(mlp(recipe, CHOICES["recompute"]))
    for choice in CHOICES.values():
        model = mlp(recipe, choice)
        assert torch.equal(step(lambda x, m=model: checkpoint(m, x, use_reentrant=reentrant)), expected)


FSDP2 = """
import warnings; warnings.simplefilter("ignore")  # Dynamo asks a non-leaf for its .grad
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import float8_compile as f8

recipe, keeps, per_block = sys.argv[1], [c == "K" for c in sys.argv[2]], sys.argv[3] == "block"
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in keeps)).bfloat16()
f8.convert_to_float8_training(model, config=recipe, recompute_weight_cast=lambda linear, fqn: not keeps[int(fqn)])
for block in model:
    if per_block:
        block.compile(backend="aot_eager_decomp_partition")
    fully_shard(block, mesh=mesh, reshard_after_forward=True)
fully_shard(model, mesh=mesh)
run = model if per_block else torch.compile(model, backend="aot_eager_decomp_partition")

saved = []
x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
    y = run(x)
weights = {}
for t in saved:
    if tuple(t.shape) == (64, 64) and not isinstance(t, nn.Parameter) and t.untyped_storage().nbytes():
        weights[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
y.float().sum().backward()
print(sum(weights.values()))
"""


@pytest.mark.parametrize("compiled", ["block"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_under_fsdp2_exactly_the_kept_weights_stay_after_forward(recipe: str, compiled: str) -> None:
    for keeps in ("RRR", "KKK", "RKR"):
        out = run_python(FSDP2, recipe, keeps, compiled)
        assert int(out.split()[-1]) == keeps.count("K") * 64 * 64


CACHED = """
import warnings; warnings.simplefilter("ignore")  # torch's own deprecations
import sys, torch, torch._functorch.config
torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
from torch import nn
from torch._dynamo.utils import counters
import float8_compile as f8

keeps = [c == "K" for c in sys.argv[1]]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 32, bias=False)).bfloat16()
f8.convert_to_float8_training(model, recompute_weight_cast=lambda linear, fqn: not keeps[int(fqn)])
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
    y = torch.compile(model, fullgraph=True)(torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True))
y.float().sum().backward()
shapes = {(96, 64), (64, 96), (32, 96), (96, 32)}
kept = sum(t.numel() for t in saved if t.dtype.itemsize == 1 and tuple(t.shape) in shapes)
print(kept, counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


def test_the_compile_caches_hit_across_processes_and_never_give_the_other_setting(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Inductor, and both caches on; an entry of another setting would show in the bytes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    results = {}
    for turn, keeps in enumerate(("RR", "KR", "RR", "KR")):
        kept, aot_hits, fx_hits = map(int, run_python(CACHED, keeps).split()[-3:])
        assert kept == (96 * 64 if keeps[0] == "K" else 0)
        results[turn] = (aot_hits, fx_hits)
    assert results[0] == results[1] == (0, 0)
    assert results[2] == results[3] == (1, 2)


def weights(**shapes: tuple[tuple[int, int], torch.dtype]) -> dict[str, tuple[Tensor, f8.Recipe]]:
    recipe = f8.Recipe.from_name("tensorwise")
    return {name: (torch.empty(shape, dtype=dtype), recipe) for name, (shape, dtype) in shapes.items()}


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(0, ""), (99, ""), (100, "a"), (400, "b"), (500, "ab"), (800, "bc"), (900, "abc"), (10**6, "abcd")],
)
def test_a_budget_is_filled_by_gain_per_byte_then_by_size(budget: int, kept: str) -> None:
    """float32 weights (c and d is not) gain 4 bytes of traffic per byte kept, bfloat16 ones 2."""
    layers = weights(
        a=((10, 10), torch.bfloat16),
        b=((20, 20), torch.float32),
        c=((20, 20), torch.bfloat16),
        d=((1000, 900), torch.bfloat16),
    )
    assert weights_to_keep(layers, budget) == set(kept)


def test_a_layer_whose_gradient_is_in_high_precision_has_nothing_to_keep() -> None:
    recipe = f8.Recipe(Gemm(), Gemm(HIGH_PRECISION, HIGH_PRECISION), Gemm(Cast(torch.float8_e5m2), Cast()))
    assert weights_to_keep({"a": (torch.empty(4, 4), recipe)}, 10**6) == set()


def test_auto_keeps_within_the_budget_at_conversion() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 16))
    f8.convert_to_float8_training(model, recompute_weight_cast="auto", weight_cast_budget=64 * 64 + 32 * 16)
    assert [layer.recompute_weight_cast for layer in model] == [False, True, False]


@pytest.mark.parametrize(("choice", "budget"), [("auto", None), (True, 100), (False, 0)])
def test_a_budget_goes_with_auto_and_only_with_it(choice: Any, budget: int | None) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r'recompute_weight_cast=.*a budget in bytes goes with .*"auto"'):
        f8.convert_to_float8_training(model, recompute_weight_cast=choice, weight_cast_budget=budget)
    assert type(model[0]) is nn.Linear
