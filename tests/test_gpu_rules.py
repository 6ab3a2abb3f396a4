"""What CUDA asks of a float8 GEMM, checked without a GPU: torch's own shape rules, on fake CUDA tensors.

The CPU takes what CUDA refuses (sizes that are no multiple of 16, a row-major right operand), so a green CPU test
says nothing. All in one process of its own: it pretends to have a GPU. The fakes need no gradient; one that did
would abort the interpreter.
"""

from __future__ import annotations

import re
import textwrap

from fresh_process import run_python

# Two methods of Python's Tensor ask for the present CUDA device, which a CPU build of torch can't answer; the ops that
# they call don't. This is for a process of its own.
PRETEND = """
import torch

def columns(matrix, index):
    rows, wanted = index
    assert rows == slice(None)
    return torch.ops.aten.slice(matrix, 1, wanted.start, wanted.stop)

torch.Tensor.contiguous = lambda matrix: torch.ops.aten.contiguous(matrix)
torch.Tensor.__getitem__ = columns
"""

# Prints a line for each GEMM that breaks a rule; then how many were tried, and who gave what to which kernel.
TRY_EVERY_GEMM = """
    import itertools
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from float8_compile import Cast, gemm
    from float8_compile.cast import cast

    E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
    SIZES = [(m, k, n) for m in (1, 16, 17) for k in (1, 16, 33) for n in (1, 16, 50)]
    HOW = {g: Cast(E4M3, granularity=g, power_of_two=True) for g in ("tensor", "row")}

    def is_row_wise(scale):
        return scale.dim() == 2

    def broken_rules(a, b, scale_a, scale_b, dtype):
        "Those of CUDA's kernels that torch's fake one does not know, or knows only in part."
        (m, k), n = a.shape, b.shape[1]
        if scale_a.dtype is not torch.float32 or scale_b.dtype is not torch.float32:
            yield "scales are float32"
        if not (scale_a.is_contiguous() and scale_b.is_contiguous()):
            yield "scales are contiguous"
        if (a.dtype, b.dtype) == (E5M2, E5M2):
            yield "one operand is e4m3"
        if is_row_wise(scale_a) or is_row_wise(scale_b):
            if (tuple(scale_a.shape), tuple(scale_b.shape)) != ((m, 1), (1, n)):
                yield f"row-wise scales are (M, 1) and (1, N), not {tuple(scale_a.shape)} and {tuple(scale_b.shape)}"
            if dtype is not torch.bfloat16:
                yield f"the row-wise kernel gives bfloat16, not {dtype}"
        elif scale_a.numel() != 1 or scale_b.numel() != 1:
            yield "a tensor-wise scale is one number"

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.kinds, self.broken = [], []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._scaled_mm.default:
                self.kinds.append("row" if is_row_wise(args[2]) else "tensor")
                self.broken += broken_rules(*args[:4], result.dtype)
            return result

    tried, kinds = 0, set()
    for (m, k, n), left, right in itertools.product(SIZES, HOW, HOW):
        with FakeTensorMode():
            x, w, g = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((m, k), (n, k), (m, n)))
            g_how = Cast(E5M2) if left == "tensor" else HOW[left]
            gemms = [
                (gemm.output, cast(x, HOW[left], -1), cast(w, HOW[right], -1), (m, n)),
                (gemm.grad_input, cast(g, g_how, -1), cast(w, HOW[right], 0), (m, k)),
                (gemm.grad_weight, cast(g, g_how, 0), cast(x, HOW[right], 0), (n, k)),
            ]
        for (function, a, b, shape), dtype, fast_accum in itertools.product(
            gemms, (torch.bfloat16, torch.float16, torch.float32), (False, True)
        ):
            tried += 1
            try:
                with Record() as record:
                    result = function(a, b, dtype, fast_accum=fast_accum)
                assert result.device.type == "cuda", "it runs elsewhere"
                assert (tuple(result.shape), result.dtype) == (shape, dtype), "its shape or dtype is wrong"
                assert len(record.kinds) == 1, "there is one GEMM"
                assert not record.broken, record.broken
                kinds.add((left, right, record.kinds[0]))
            except Exception as error:
                print(f"{function.__name__} M={m} K={k} N={n} {left}.{right} {dtype} {fast_accum}: {error}")
    print(f"{tried} tried", *sorted(" ".join(kind) for kind in kinds), sep=", ")
    """


def test_every_gemm_keeps_cudas_rules() -> None:
    """Odd and aligned sizes, all mixtures of granularities, dtypes and accumulations; and which kernel took it."""
    *broken, summary = run_python(PRETEND + textwrap.dedent(TRY_EVERY_GEMM)).splitlines()
    assert broken == []
    assert summary == (
        "1944 tried, row row row, row row tensor, row tensor tensor, tensor row tensor, tensor tensor tensor"
    )


# What breaks a rule: x is (M, K), w is (N, K), scales are of the shapes named.
BROKEN = {
    "a contracted axis of 24": ("mm((32, 24), (16, 24))", r"Expected self\.size\(1\) to be divisible by 16"),
    "24 columns": ("mm((32, 16), (24, 16))", "Expected both dimensions of mat2 to be divisible by 16"),
    "a right operand by rows": (
        "torch._scaled_mm(e4m3(32, 16), e4m3(16, 48), one(), one(), out_dtype=torch.bfloat16)",
        "mat2 must be col_major",
    ),
    "a left operand by columns": (
        "torch._scaled_mm(e4m3(16, 32).t(), e4m3(48, 16).t(), one(), one(), out_dtype=torch.bfloat16)",
        "self must be row_major",
    ),
    "scales in float64": ("mm((32, 16), (48, 16), one().double(), one().double())", r"must be float \(fp32\) tensors"),
    "one scale per row, one per tensor": ("mm((32, 16), (48, 16), one(32, 1), one())", "scale tensors must be 2D"),
    "scales the wrong way round": ("mm((32, 16), (48, 16), one(1, 32), one(48, 1))", "Invalid scaling configuration"),
    "scales that are not contiguous": (
        "mm((32, 16), (48, 16), one(32, 2).narrow(1, 0, 1), one(1, 48))",
        "scale_a and scale_b must be contiguous",
    ),
    "torchao with an odd size, unpadded": ("torchao_mm(32, 16, 7, False)", "divisible by 16"),
    "torchao's pad_inner_dim with an odd N": ("torchao_mm(32, 33, 7, True)", "divisible by 16"),
}
ALLOWED = {
    "what is padded and laid out": "mm((32, 16), (48, 16))",
    "one scale per row": "mm((32, 16), (48, 16), one(32, 1), one(1, 48))",
    "torchao's pad_inner_dim with an odd K": "torchao_mm(32, 33, 16, True)",
}
TRY_ONE = """
    import sys
    from torch._subclasses.fake_tensor import FakeTensorMode

    def e4m3(*shape):
        return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)

    def one(*shape):
        return torch.ones(shape, device="cuda")

    def mm(x_shape, w_shape, scale_a=None, scale_b=None):
        scales = [one() if scale is None else scale for scale in (scale_a, scale_b)]
        return torch._scaled_mm(e4m3(*x_shape), e4m3(*w_shape).t(), *scales, out_dtype=torch.bfloat16)

    def torchao_mm(m, k, n, pad_inner_dim):
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

        config = LinearMMConfig(*[ScaledMMConfig(False, True, False, pad_inner_dim)] * 3)
        x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
        x8 = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, config, gemm_input_role=GemmInputRole.INPUT)
        w8 = hp_tensor_to_float8_dynamic(w, torch.float8_e4m3fn, config, gemm_input_role=GemmInputRole.WEIGHT)
        return torch.mm(x8, w8.t())

    for expression in sys.argv[1:]:
        with FakeTensorMode():
            try:
                print("allowed", tuple(eval(expression).shape))
            except Exception as error:
                print(" ".join(str(error).split()))
    """


def test_a_broken_rule_would_be_seen() -> None:
    expressions = [expression for expression, _ in BROKEN.values()]
    printed = run_python(PRETEND + textwrap.dedent(TRY_ONE), *expressions, *ALLOWED.values()).splitlines()
    for (name, (_, message)), line in zip(BROKEN.items(), printed, strict=False):
        assert re.search(message, line), name
    assert [line.split()[0] for line in printed[len(BROKEN) :]] == ["allowed"] * len(ALLOWED)
