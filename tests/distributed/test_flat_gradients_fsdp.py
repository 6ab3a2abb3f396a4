"""Flat gradients of FSDP2 groups on three ranks: bitwise FSDP2's own accumulation, without its copy to reduce."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import float8_compile as f8
from benchmarks.allocations import memory_of
from float8_compile.distributed import ShardedFlatGradients

RANKS, STEPS, MICROBATCHES, K = 3, 2, 2, 32


class Block(nn.Sequential):
    """Shards of uneven size: 47 rows on three ranks are 16, 16 and 15; 2 rows are 1, 1 and none."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(K, 47), nn.GELU(), nn.LayerNorm(47), nn.Linear(47, 2), nn.GELU(), nn.Linear(2, K))
        self.unused, self.frozen = nn.Linear(K, K), nn.Linear(K, K).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*list(self)[:6], self.frozen):
            x = layer(x)
        return x


def sharded(recipe: str | None, backend: str | None = None) -> Any:
    """Two groups and the root's own, in bfloat16, gradients in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(K, 5))
    if recipe:
        f8.convert_to_float8_training(model, config=recipe)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (model[0], model[1]):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if backend:
        torch._dynamo.reset()
        for block in (model[0], model[1]):
            block.compile(backend=backend)
    return model


def groups_of(model: nn.Module) -> list[ShardedFlatGradients]:
    return [ShardedFlatGradients(module) for module in model.modules() if isinstance(module, FSDPModule)]


def loss(model: nn.Module, step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + torch.distributed.get_rank())
    return model(torch.randn(8, K, generator=generator)).float().square().sum()


def shards(model: nn.Module, gradients: bool) -> list[Tensor]:
    tensors = [p.grad if gradients else p for p in model.parameters() if p.requires_grad]
    return [torch.zeros(0) if t is None else t.to_local().detach().clone() for t in tensors]  # type: ignore[attr-defined]


def trained(recipe: str | None, backend: str | None, flat: bool, explicit: bool = False) -> list[list[Tensor]]:
    """The gradients before each step and the parameters after it."""
    model = sharded(recipe, backend)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    groups = groups_of(model) if flat else []
    for gradients in groups:
        gradients.attach(optimizer)
    seen = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            model.set_requires_gradient_sync(flat or microbatch == MICROBATCHES - 1)
            loss(model, step, microbatch).backward()
        if explicit:
            for gradients in groups:
                gradients.reduce_scatter_()
        seen.append(shards(model, gradients=True) if explicit or not flat else [])
        optimizer.step()
        optimizer.zero_grad()
        seen.append(shards(model, gradients=False))
    return seen


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [(None, None), ("tensorwise", None), ("rowwise", None), ("delayed", None), ("tensorwise", "aot_eager")],
)
def test_gradients_are_bitwise_those_of_fsdp2s_own_accumulation(
    three: Ranks, recipe: str | None, backend: str | None
) -> None:
    own, flat = three(trained, recipe, backend, False), three(trained, recipe, backend, True, True)
    for rank in range(RANKS):
        for theirs, ours in zip(own[rank][::2], flat[rank][::2], strict=True):
            for expected, gradient in zip(theirs, ours, strict=True):
                assert torch.equal(gradient, expected) if expected.numel() else not gradient.any()


def steps_alike(recipe: str) -> list[bool]:
    explicit, by_the_step = trained(recipe, None, True, True), trained(recipe, None, True, False)
    return [all(map(torch.equal, a, b)) for a, b in zip(explicit[1::2], by_the_step[1::2], strict=True)]


def test_an_attached_optimizer_reduces_by_itself(three: Ranks) -> None:
    assert three(steps_alike, "delayed") == [[True] * STEPS] * RANKS


def memory_of_the_last_backward(flat: bool) -> tuple[int, int]:
    """Bytes allocated at one time while a last microbatch's gradients are added up and reduced; bytes of the group."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    groups = groups_of(model) if flat else []

    def last() -> None:
        model.set_requires_gradient_sync(True)
        y.backward()
        for gradients in groups:
            gradients.reduce_scatter_()

    model.set_requires_gradient_sync(flat)
    for microbatch in range(2):
        y = model(torch.ones(8, 256)).float().square().sum()
        if microbatch == 0:
            y.backward()
    return memory_of(last).peak, 4 * sum(p.numel() for p in model.parameters())


def test_nothing_of_a_groups_size_is_copied_for_the_reduction(three: Ranks) -> None:
    own, group = three(memory_of_the_last_backward, False)[0]
    flat, _ = three(memory_of_the_last_backward, True)[0]
    assert own - flat >= group, "4 bytes an element: the copy. (gloo makes one of its own, in both.)"


def parts_against_shards() -> list[bool]:
    """Whether a rank's part of the buffer, averaged, is its parameters' shards one by one, apart from the padding."""
    model = sharded(None)
    gradients = ShardedFlatGradients(model[0])
    loss(model, 0, 0).backward()
    summed = gradients.flat.clone()
    torch.distributed.all_reduce(summed)
    gradients.reduce_scatter_()
    parameters = [p for p in model[0].parameters() if p.requires_grad]
    part, alike = summed.view(RANKS, -1)[torch.distributed.get_rank()] / RANKS, []
    for parameter in parameters:
        shard = parameter.grad.to_local().flatten()  # type: ignore[union-attr]
        padded = -(-parameter.shape[0] // RANKS) * (parameter.numel() // parameter.shape[0])
        alike.append(torch.allclose(part[: len(shard)], shard) and not part[len(shard) : padded].any())
        part = part[padded:]
    return [*alike, part.numel() == 0]


def test_the_buffer_is_in_reduce_scatter_order(three: Ranks) -> None:
    assert all(map(all, three(parts_against_shards)))


def refusals() -> dict[str, str]:
    found = {}

    def asked(name: str, make: Any) -> None:
        try:
            make()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    asked("plain", lambda: ShardedFlatGradients(nn.Linear(4, 4)))
    model = sharded(None)
    asked("parameters", lambda: f8.FlatGradients(model.parameters()))
    hybrid = nn.Linear(K, K)
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard")))
    asked("hybrid", lambda: ShardedFlatGradients(hybrid))
    gradients = ShardedFlatGradients(model[0])
    loss(model, 0, 0).backward()
    gradients.reduce_scatter_()
    asked("late", lambda: loss(model, 0, 1).backward())
    asked("norm", lambda: gradients.clip_grad_norm_(1.0))
    return found


def test_what_is_not_supported_says_so(three: Ranks) -> None:
    for found in three(refusals):
        assert re.match("TypeError: .*", found["plain"])
        assert "fully_shard" in found["plain"]
        assert re.match("TypeError: .*", found["parameters"])
        assert "ShardedFlatGradients" in found["parameters"]
        assert re.match("NotImplementedError: .*", found["hybrid"])
        assert "HSDP" in found["hybrid"]
        assert re.match("RuntimeError: .*", found["late"])
        assert "zero_grad" in found["late"]
        assert re.match("NotImplementedError: .*", found["norm"])
        assert "reduce_scatter_" in found["norm"]
