"""The rules of the house: imports point one way, nothing optional is imported, strange things stay in one file."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_process import run_python

import float8_compile

PACKAGE = Path(float8_compile.__file__).parent


def name_of(file: Path) -> str:
    """Of a module within the package: "cast", "preview.result", "__init__", "preview.__init__"."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("file", FILES, ids=name_of)

# The plan: a module imports only from those above it.
ORDER = [
    "torch_internals",
    "storage",
    "watched",
    "gradient_slice",
    "recipe",
    "tensor",
    "collectives",
    "split",
    "cast",
    "gemm",
    "after_step",
    "delayed",
    "delayed_step",
    "cached_weight",
    "weight_gather",
    "gathered_weight",
    "layer_scales",
    "recompute",
    "operand_statistics",
    "linear_function",
    "linear",
    "weight_cache",
    "flat_gradients",
    "graphs",
    "calibration",
    "checkpoint",
    "attention",
    "targets",
    "roofline",
    "filters",
    "compat",
    "table",
    "figure",
    "convert",
    "report",
    "monitor_advice",
    "monitor_picture",
    "monitor",
    "frozen_linear",
    "export",
    "distributed.flat_gradients",
    "distributed.tensor_parallel",
    "distributed.__init__",
    "integrations.__init__",
    "integrations.torchtitan",
    "preview.result",
    "preview.__init__",
    "__init__",
    # what only the command line and a preview bring
    "preview.unsupported",
    "preview.roles",
    "preview.dataflow",
    "preview.shared_inputs",
    "preview.casts",
    "preview.advice",
    "preview.machine_code",
    "preview.summary",
    "preview.picture",
    "preview.readable",
    "preview.tiles",
    "preview.accesses",
    "preview.device",
    "preview.inductor",
    "preview.retarget",
    "preview.dry_run",
    "preview.sectors",
    "preview.compiled",
    "preview.layers",
    "preview.launches",
    "preview.traced_as_cuda",
    "preview.capture",
    "machine",
    "doctor",
    "variants",
    "__main__",
]


# Imports point one way


def imported(source: str) -> Iterator[str]:
    """Every module that the source imports, anywhere in it; `from a import b` gives "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the house imports by full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_in(import_: str) -> str:
    """The module of the package that an import of ours names: "float8_compile.cast.tensor_amax" is of "cast"."""
    parts = import_.split(".")[1:]
    for name in (".".join(parts[:2]), ".".join([*parts[:1], "__init__"]), ".".join(parts[:1])):
        if name in ORDER:
            return name
    return "__init__"


def imports_downwards(name: str, source: str) -> list[str]:
    """Modules of the package that this one must not import."""
    above = ORDER[: ORDER.index(name)]
    ours = [module for module in imported(source) if module.split(".")[0] == "float8_compile"]
    return [module for module in ours if module_in(module) not in above]


# Imports inside a function, of what only a call of it needs.
LATE = {"preview.__init__": ["float8_compile.preview.capture.capture"]}


@every_file
def test_imports_point_upwards(file: Path) -> None:
    name = name_of(file)
    assert imports_downwards(name, file.read_text()) == LATE.get(name, [])


@pytest.mark.parametrize(
    "source",
    [
        "from float8_compile.linear import Float8Linear",
        "import float8_compile.convert",
        "import float8_compile",
        "from float8_compile import Recipe",
        "def late():\n    from float8_compile import gemm",
    ],
)
def test_an_import_downwards_would_be_seen(source: str) -> None:
    assert len(imports_downwards("cast", source)) == 1


def test_every_module_has_its_place() -> None:
    assert sorted(map(name_of, FILES)) == sorted(ORDER)


# What importing it brings

OPTIONAL = ("torchao", "triton", "rich", "matplotlib")
COMPILER = ("torch._dynamo", "torch._inductor")


def test_it_needs_nothing_but_torch() -> None:
    assert run_python("import float8_compile; print('imported')", blocked=OPTIONAL) == "imported"


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_module_that_is_needed_would_be_missed(name: str) -> None:
    with pytest.raises(AssertionError, match=f"import of {name} halted"):
        run_python(f"import {name}", blocked=OPTIONAL)


def test_it_brings_no_compiler_and_no_optional_package() -> None:
    printed = run_python(
        f"""
        import torch
        before = set(sys.modules)

        def brought():
            return [name for name in set(sys.modules) - before if name.startswith({(*OPTIONAL, *COMPILER)!r})]

        import float8_compile
        print(brought())
        import torch._dynamo
        print("torch._dynamo" in brought())
        """
    )
    assert printed.splitlines() == ["[]", "True"], "the second one shows that a compiler would be seen"


# Names and words


@every_file
def test_a_file_is_named_after_its_idea(file: Path) -> None:
    words = set(file.stem.split("_"))
    assert words.isdisjoint({"util", "utils", "helper", "helpers", "common", "misc", "manager", "base", "core"})


@every_file
def test_what_is_public_is_explained(file: Path) -> None:
    tree = ast.parse(file.read_text())
    public = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    assert ast.get_docstring(tree), "the module"
    assert [node.name for node in public if not ast.get_docstring(node)] == []

    module = importlib.import_module(f"float8_compile.{name_of(file)}".removesuffix(".__init__"))
    for node in public:
        thing = getattr(module, node.name)
        if isinstance(node, ast.ClassDef):  # a method that overrides one has its words
            methods = [getattr(thing, name) for name in vars(thing) if not name.startswith("_")]
            assert [m.__name__ for m in methods if inspect.isroutine(m) and not inspect.getdoc(m)] == []


def test_all_is_what_can_be_imported() -> None:
    names = float8_compile.__all__
    assert names == sorted(set(names))
    is_module = {name: inspect.ismodule(thing) and not callable(thing) for name, thing in vars(float8_compile).items()}
    public = {name for name in is_module if not (name[0] == "_" or is_module[name])}
    assert public | {"export"} == {name for name in names if name[0] != "_"}  # a room of its own, with a door to it
    assert {name for name in names if name[0] == "_"} == {"__version__", "_auto_filter_for_recipe"}


# Strange things stay in one file


def strange(source: str) -> list[str]:
    """Private names of torch, settings of torch that are changed, and `.item()`, each as it is written."""
    tree = ast.parse(source)
    from_torch = {"torch"} | {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"
        for alias in node.names
    }

    def is_torchs(node: ast.expr) -> bool:
        name = ast.unparse(node)
        return name.split(".")[0] in from_torch and not name.startswith("torch.ops.")  # ops are named with _ in public

    found = [module for module in imported(source) if module.startswith("torch.") and is_private(module)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_torchs(node) and is_private(node.attr):
            found.append(ast.unparse(node))
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [ast.unparse(t) for t in targets if isinstance(t, ast.Attribute) and is_torchs(t)]
            found += [ast.unparse(t) for t in targets if isinstance(t, ast.Attribute) and "config." in ast.unparse(t)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "item":
                found.append(".item()")
            if node.func.attr in ("patch", "load_config") and "config" in ast.unparse(node.func):
                found.append(ast.unparse(node.func))
    return found


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


# torch's private names for what trains, and for a preview: what stands in for a GPU, and Inductor.
STRANGE = ("torch_internals", "collectives", "preview.device", "preview.inductor")

EXCEPTIONS = {
    "tensor": [".item()"],  # the scale in `repr`, which no graph traces
}


@every_file
def test_strange_things_stay_in_torch_internals(file: Path) -> None:
    if name_of(file) not in STRANGE:
        assert strange(file.read_text()) == EXCEPTIONS.get(name_of(file), [])


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("import torch\ny = torch._scaled_mm(a, b)", ["torch._scaled_mm"]),
        ("import torch\ntorch.library._something.public()", ["torch.library._something"]),
        ("from torch import Tensor\nTensor._make_wrapper_subclass()", ["Tensor._make_wrapper_subclass"]),
        ("from torch._C import _foreach", ["torch._C._foreach"]),
        ("import torch._inductor.config as settings", ["torch._inductor.config"]),
        ("scale.item()", [".item()"]),
        ("import torch\ntorch.backends.cudnn.benchmark = True", ["torch.backends.cudnn.benchmark"]),
        ("from somewhere import config\nconfig.cache = True", ["config.cache"]),
        ("from torch.compiler import config\nwith config.patch(x=1): pass", ["config.patch"]),
        ("import torch\nself._private = torch.ops.aten._to_copy.default, torch.float32.__class__", []),
    ],
)
def test_a_strange_thing_would_be_seen(source: str, seen: list[str]) -> None:
    assert strange(source) == seen


def test_converting_and_training_changes_no_setting() -> None:
    printed = run_python(
        """
        import torch
        import torch._dynamo, torch._functorch.config, torch._inductor.config
        from torch import nn

        def settings():
            configs = torch._dynamo.config, torch._functorch.config, torch._inductor.config
            return [config.get_config_copy() for config in configs]

        before = settings()
        import float8_compile
        for recipe in float8_compile.Recipe.names():
            model = float8_compile.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=recipe)
            model(torch.randn(4, 32)).sum().backward()
            float8_compile.convert_from_float8_training(model)
        print(settings() == before)
        torch._inductor.config.combo_kernels = not torch._inductor.config.combo_kernels
        print(settings() == before)
        """
    )
    assert printed.split() == ["True", "False"], "the second one shows that a change would be seen"
