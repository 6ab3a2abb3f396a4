"""Under torch.compile: one graph, the bits of eager mode, no recompilation, no more nodes than torchao's, cached."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_checks import Graphs, compile_counted, graphs_of, op_counts
from fresh_process import run_python
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

import float8_compile as f8

pytestmark = pytest.mark.usefixtures("afresh")

K, N = 32, 48
BF16, FP32 = torch.bfloat16, torch.float32

every_recipe = pytest.mark.parametrize("recipe", f8.Recipe.names())


def converted(model: nn.Module, recipe: str | None, **options: Any) -> nn.Module:
    return model if recipe is None else f8.convert_to_float8_training(model, config=recipe, **options)


def step(model: Callable[..., Tensor], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    """The output, the input's gradient, every parameter's gradient."""
    x = x.detach().requires_grad_()
    y = model(x)
    loss = (y.float() * torch.linspace(-1, 1, y.shape[-1])).square().sum()
    return [y.detach(), *torch.autograd.grad(loss, [x, *parameters])]


# The bits of eager mode, in every frame around the layers


class Chain(nn.Module):
    """A ModuleList walked in a loop, with something between the layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.silu(layer(x))
        return x


def bare(bias: bool) -> nn.Module:
    return nn.Linear(K, N, bias)


def sequential(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(K, N, bias), nn.LayerNorm(N), nn.Linear(N, K, bias))


def module_list(bias: bool) -> nn.Module:
    return Chain([nn.Linear(K, N, bias), nn.Linear(N, N, bias), nn.Linear(N, K, bias)])


def compile_whole(model: nn.Module) -> Callable[..., Tensor]:
    return compile_counted(model)[0]


def compile_nested(model: nn.Module) -> Callable[..., Tensor]:
    """A compiled function that calls compiled layers."""
    for layer in model.children():
        layer.compile(backend="aot_eager", fullgraph=True)
    return torch.compile(lambda x: model(x) * 1, backend="aot_eager", fullgraph=True)


def compile_in_place(model: nn.Module) -> Callable[..., Tensor]:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


FRAMES = {
    "bare": (bare, compile_whole),
    "sequential": (sequential, compile_whole),
    "module list": (module_list, compile_whole),
    "nested": (sequential, compile_nested),
    "in place": (module_list, compile_in_place),
}
# recipe, frame, bias, recompute_weight_cast, autocast: 15 of the 120 combinations
CASES = [
    (recipe, frame, bool(i & 1), bool(i & 2), bool(i & 4))
    for i, (recipe, frame) in enumerate(itertools.product(f8.Recipe.names(), FRAMES))
]


def test_the_cases_have_every_pair_of_choices() -> None:
    choices = [sorted({case[i] for case in CASES}) for i in range(5)]
    assert [len(of_one) for of_one in choices] == [len(f8.Recipe.names()), len(FRAMES), 2, 2, 2]
    for i, j in itertools.combinations(range(5), 2):
        assert {(case[i], case[j]) for case in CASES} == set(itertools.product(choices[i], choices[j])), (i, j)


@pytest.mark.parametrize(("recipe", "frame", "bias", "recompute", "autocast"), CASES)
def test_one_graph_has_the_bits_of_eager_mode(
    recipe: str, frame: str, bias: bool, recompute: bool, autocast: bool
) -> None:
    """Scenario 32. fullgraph=True raises where there would be two graphs."""
    build, compiled = FRAMES[frame]
    model = converted(build(bias), recipe, recompute_weight_cast=recompute)
    parameters, x = list(model.parameters()), torch.randn(3, 8, K)
    with torch.autocast("cpu", BF16, enabled=autocast):
        eager = step(model, parameters, x)
        traced = step(compiled(model), parameters, x)
    assert torch.compiler.is_compiling() is False
    for actual, expected in zip(traced, eager, strict=True):
        assert actual.dtype is expected.dtype
        assert torch.equal(actual, expected)


@every_recipe
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_low_precision_model_has_the_bits_of_eager_mode(recipe: str, dtype: torch.dtype) -> None:
    model = converted(sequential(True).to(dtype), recipe)
    parameters, x = list(model.parameters()), torch.randn(24, K, dtype=dtype)
    eager = step(model, parameters, x)
    for actual, expected in zip(step(compile_whole(model), parameters, x), eager, strict=True):
        assert torch.equal(actual, expected)


@every_recipe
def test_a_gradient_of_any_strides_has_the_bits_of_eager_mode(recipe: str) -> None:
    """A compiled backward is handed a contiguous gradient, whatever the loss made."""
    layer, x = converted(nn.Linear(K, N), recipe), torch.randn(24, K)
    gradients = {"expanded": torch.randn(1, N).expand(24, N), "transposed": torch.randn(N, 24).t()}
    compiled = compile_whole(layer)
    for strides, g in gradients.items():
        eager, traced = (torch.autograd.grad(each(x), [*layer.parameters()], g) for each in (layer, compiled))
        for actual, expected in zip(traced, eager, strict=True):
            assert torch.equal(actual, expected), strides


# With Inductor


@every_recipe
def test_inductor_differs_by_no_more_than_a_rounding_here_and_there(recipe: str) -> None:
    """A bfloat16 MLP. The first layer has only a cast in front of it, and agrees to the bit.

    Behind SiLU Inductor keeps float32 where eager mode rounds to bfloat16 first: what differs by up to 2**-9 can fall
    to the other side of a float8 value's border, and is then off by 2**-3 or, as a gradient in e5m2, 2**-2. About one
    element in 2**-9 / 2**-3 (the width of the first against the distance of the second) is concerned, 1/64: as a share
    of the norm 2**-3 * sqrt(1/64) = 2**-6 for each cast, of which four lie behind one another in the longest path.
    """
    model = converted(nn.Sequential(nn.Linear(K, N), nn.SiLU(), nn.Linear(N, K)).to(BF16), recipe)
    x = torch.randn(64, K, dtype=BF16)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        h = model[0](x)
        return h, model[2](model[1](h))

    def results(run: Callable[..., Any]) -> list[Tensor]:
        h, y = run(x)
        loss = (y.float() * torch.linspace(-1, 1, K)).square().sum()
        return [h.detach(), y.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]

    x.requires_grad_()
    eager, inductor = results(run), results(torch.compile(run, fullgraph=True))
    assert torch.equal(inductor[0], eager[0])
    for actual, expected in zip(inductor, eager, strict=True):
        difference = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert difference <= 4 * 2.0**-6, difference


@pytest.mark.parametrize("recompute", [True, False])
def test_on_a_cpu_a_rows_scale_is_computed_once(recompute: bool) -> None:
    """Not again for each element: what comes of the double division goes into a vector, in no loop over a matrix."""
    layer = converted(nn.Linear(K, N, dtype=BF16), "rowwise", recompute_weight_cast=recompute)
    x = torch.randn(64, K, dtype=BF16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True)
    _, graphs = run_and_get_code(lambda: compiled(x).sum().backward())
    loops = [loop.split("error_flag = nullptr")[0] for code in graphs for loop in code.split("for(int64_t ")[1:]]
    divisions = ["".join(loop.partition("double")[1:]) for loop in loops if "double" in loop]
    assert len(divisions) >= 6, graphs  # three operands, each cast along both of its axes
    assert not [division for division in divisions if re.search(r"\dL\*x\d", division)]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("recipe", f8.Recipe.names())
def test_dynamo_traces_a_backward_once(recipe: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backward asks for a stride, Dynamo begins anew, with this function around it: half of a warm start."""

    def anew(backward: Any) -> Any:
        raise AssertionError("it was traced a second time")

    monkeypatch.setattr("torch._dynamo._trace_wrapped_higher_order_op.autograd_function_backward_rewritten", anew)
    layer = converted(nn.Linear(K, N, dtype=BF16), recipe, recompute_weight_cast=recompute)
    x = torch.randn(17, K, dtype=BF16, requires_grad=True)
    torch.compile(layer, fullgraph=True, backend="eager")(x).sum().backward()
    assert x.grad is not None


# Recompilations


@every_recipe
def test_20_steps_compile_once_and_evaluation_once_more(recipe: str) -> None:
    """Scenario 31, with a learning rate that changes, a checkpoint that is resumed and evaluations in between.

    With delayed scales once more, after the first step: from then on there are some.
    """
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Dropout(0.1), nn.Linear(N, K))
    converted(model, recipe, recompute_weight_cast=lambda linear, fqn: fqn == "0")
    compiled, counter = compile_counted(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    x, counts, losses = torch.randn(16, K), [], []
    for number in range(20):
        if number == 10:
            model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
            optimizer.load_state_dict(optimizer.state_dict())
        loss = (compiled(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        losses.append(loss.item())
        if number in (5, 15):
            model.eval()
            with torch.no_grad():
                compiled(x)
            model.train()
        counts.append(counter.frame_count)
    later = 2 if recipe == "delayed" else 1
    assert counts == [1] + [later] * 4 + [later + 1] * 15
    assert losses[-1] < losses[0]


@every_recipe
def test_flipping_recompute_weight_cast_costs_one_compilation_and_flipping_back_none(recipe: str) -> None:
    layer, x = converted(nn.Linear(K, N), recipe), torch.randn(16, K, requires_grad=True)
    compiled, counter = compile_counted(layer)
    counts = []
    for recompute in (True, False, True, False):
        layer.recompute_weight_cast = recompute
        compiled(x).sum().backward()
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(x)))


TOKENS = (16, 3, 0, 1, 48, 2)


def compilations(model: nn.Module, tokens: tuple[int, ...], k: int, **options: Any) -> list[int]:
    """How many there have been after each number of tokens, whose values have the bits of eager mode."""
    compiled, counter = compile_counted(model, **options)
    parameters, counts = list(model.parameters()), []
    for m in tokens:
        x = torch.randn(m, k)
        for actual, expected in zip(step(compiled, parameters, x), step(model, parameters, x), strict=True):
            assert torch.equal(actual, expected), m
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("recipe", [None, *f8.Recipe.names()])
def test_an_expert_compiles_three_times_whatever_its_number_of_tokens(recipe: str | None) -> None:
    """Scenario 34, with dynamic=True: a graph for 2 and more, one for 0, one for 1, as for plain layers (None)."""
    assert compilations(converted(Expert(), recipe), TOKENS, K, dynamic=True) == [1, 1, 2, 3, 3, 3]


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_by_default_an_expert_compiles_once_more_as_with_plain_layers(recipe: str | None) -> None:
    """torch makes the first number of tokens a static graph; the second one starts the dynamic one."""
    assert compilations(converted(Expert(), recipe), TOKENS, K) == [1, 2, 3, 4, 4, 4]


@every_recipe
def test_mark_dynamic_holds_in_forward_and_backward(recipe: str) -> None:
    """It raises where anything in the layer makes its number of tokens a constant, or asks whether it is n times 16."""
    model = converted(Expert(), recipe, recompute_weight_cast=lambda linear, fqn: fqn == "up")
    compiled, counter = compile_counted(model)
    for m in (17, 16, 3, 48, 5):
        x = torch.randn(m, K, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x).sum().backward()
    assert counter.frame_count == 1


@every_recipe
def test_padding_odd_shapes_adds_no_compilation(recipe: str) -> None:
    """As for plain layers: one graph for the first number of tokens, one for all others, multiples of 16 or not."""
    tokens = (5, 17, 32, 33, 64, 50)
    plain, ours = (compilations(converted(nn.Linear(37, 45), name), tokens, 37) for name in (None, recipe))
    assert ours == plain == [1, 2, 2, 2, 2, 2]


# What is in the graphs


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, causal attention, SwiGLU; seven linear layers, whose inputs are those of Llama 3's."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def rotated(x_BHTE: Tensor) -> Tensor:
    tokens, width = x_BHTE.shape[-2:]
    angle = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, width, 2) / width))
    a, b = x_BHTE.float().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x_BHTE.dtype)


def llama_graphs(convert: Callable[[nn.Module], Any]) -> Graphs:
    """Of two blocks, forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(LlamaBlock(64, 2, 160) for _ in range(2))).to(BF16)
    convert(model)
    x = torch.randn(2, 32, 64, dtype=BF16, requires_grad=True)
    return graphs_of(lambda compiled: compiled(x).float().square().sum().backward(), model)


def test_two_llama_blocks_have_no_more_nodes_than_torchaos() -> None:
    """tensorwise. torchao patches Inductor for the whole process, so it runs in one of its own.

    A kept weight moves work from backward to forward, so there only the sum can be compared.
    """
    printed = run_python(
        """
        import sys, warnings
        sys.path.insert(0, sys.argv[1])
        warnings.simplefilter("ignore")
        from torchao.float8 import convert_to_float8_training
        from test_compile import llama_graphs
        print(*llama_graphs(convert_to_float8_training).node_counts())
        """,
        str(Path(__file__).parent),
    )
    theirs = tuple(map(int, printed.splitlines()[-1].split()))
    recomputed = llama_graphs(lambda model: converted(model, "tensorwise")).node_counts()
    assert recomputed[0] <= theirs[0], (recomputed, theirs)
    assert recomputed[1] <= theirs[1], (recomputed, theirs)
    kept = llama_graphs(lambda model: converted(model, "tensorwise", recompute_weight_cast=False)).node_counts()
    assert sum(kept) <= sum(theirs), (kept, theirs)


class Projections(nn.Module):
    """Two that read one tensor, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(K, K, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.silu(x)
        return self.o(self.q(h) * self.k(h))


@every_recipe
def test_layers_that_read_one_tensor_cast_it_once(recipe: str) -> None:
    model, x = converted(Projections(), recipe), torch.randn(16, K, requires_grad=True)
    if recipe == "delayed":  # a scale of one's own is a cast of one's own; `calibrate` does this by itself
        model.k.input_scale = model.q.input_scale
    graphs = graphs_of(lambda compiled: compiled(x).sum().backward(), model)
    (forward,) = graphs.forward
    nodes = [n for n in forward.graph.nodes if n.target is torch.ops.prims.convert_element_type.default]
    assert sum(n.args[1].itemsize == 1 for n in nodes) == 3 + 2


@every_recipe
@pytest.mark.parametrize("needs", ["everything", "a frozen weight", "an input without gradient"])
def test_only_needed_gemms_are_in_the_graphs(recipe: str, needs: str) -> None:
    """Scenario 16, compiled."""
    layer, x = converted(nn.Linear(K, N), recipe), torch.randn(16, K, requires_grad=True)
    if needs == "a frozen weight":
        layer.weight.requires_grad_(False)
    x.requires_grad_(needs != "an input without gradient")
    graphs = graphs_of(lambda compiled: compiled(x).sum().backward(), layer)
    counts = op_counts([*graphs.forward, *graphs.backward])
    gemms = counts["aten._scaled_mm.default"] + counts["aten.mm.default"]
    assert gemms == (3 if needs == "everything" else 2)


@every_recipe
def test_without_gradients_one_gemm_is_in_the_graph(recipe: str) -> None:
    layer, x = converted(nn.Linear(K, N), recipe), torch.randn(16, K)
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    with torch.no_grad():
        torch.compile(layer, backend=backend, fullgraph=True)(x)
    (graph,) = graphs
    assert sum("scaled_mm" in str(n.target) for n in graph.graph.nodes) == 1
    assert not any("checkpoint" in str(n.target) for n in graph.graph.nodes)


# Numbers that eager mode has tests for


@every_recipe
def test_zeros_and_bad_numbers_come_out_as_they_do_eagerly(recipe: str) -> None:
    """Scenarios 9, 11 and 14. NaN where eager mode has NaN, the same bits elsewhere."""
    layer = converted(nn.Linear(K, N), recipe)
    compiled, parameters = compile_whole(layer), list(layer.parameters())
    for bad in (0.0, math.nan, math.inf):
        x = torch.randn(16, K)
        x[3] = bad
        eager, traced = step(layer, parameters, x), step(compiled, parameters, x)
        for actual, expected in zip(traced, eager, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert eager[0].isfinite().all() == (bad == 0)


# Caches


def test_a_second_process_finds_the_graph_in_both_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's FX graph cache by default; AOTAutograd's too, where the user allows it to keep autograd Functions."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    code = """
        import json, warnings
        import torch
        from torch._dynamo.utils import counters
        import float8_compile as f8
        warnings.simplefilter("ignore")
        torch._inductor.config.cpp_cache_precompile_headers = False  # would take longer than the kernels
        model = f8.Float8Linear(16, 32, bias=False)
        x = torch.randn(16, 16)
        counts = []
        for allowed in (False, True):
            torch._dynamo.reset()
            counters.clear()
            with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=allowed):
                torch.compile(model, fullgraph=True)(x).sum().backward()
            of_fx, of_aot = counters["inductor"], counters["aot_autograd"]
            counts.append([of_fx["fxgraph_cache_hit"], of_fx["fxgraph_cache_miss"],
                           of_aot["autograd_cache_hit"], of_aot["autograd_cache_miss"]])
        print(json.dumps(counts))
        """
    first, second = (json.loads(run_python(code).splitlines()[-1]) for _ in range(2))
    (_, cold_misses, *_), (*_, cold_aot_hits, cold_aot_misses) = first
    assert (cold_misses, cold_aot_hits, cold_aot_misses) == (2, 0, 1)  # so a miss would be seen
    (fx_hits, fx_misses, *_), (*_, aot_hits, aot_misses) = second
    assert (fx_hits, fx_misses) == (2, 0)
    assert (aot_hits, aot_misses) == (1, 0)
