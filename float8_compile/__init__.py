"""Float8 training for PyTorch, written for torch.compile first.

    import float8_compile as f8

    f8.convert_to_float8_training(model, config="rowwise")
    model = torch.compile(model)

The path to read: convert.py -> linear.py -> cast.py, gemm.py.
"""

from float8_compile import export, preview
from float8_compile.calibration import (
    calibrate,
    mark_calibrated,
    reset_delayed_scaling,
    sync_float8_amax_and_scale_history,
    update_delayed_scaling,
)
from float8_compile.checkpoint import float8_state_dict, plain_state_dict
from float8_compile.compat import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from float8_compile.compat import auto_filter_for_recipe as _auto_filter_for_recipe
from float8_compile.convert import (
    conversion_report,
    convert_from_float8_training,
    convert_to_float8_training,
    float8_disabled,
)
from float8_compile.filters import auto_filter
from float8_compile.flat_gradients import FlatGradients
from float8_compile.graphs import make_graphed_callables
from float8_compile.linear import Float8Linear
from float8_compile.monitor import monitor
from float8_compile.recipe import Cast, DelayedScaling, Gemm, Recipe
from float8_compile.recompute import sac_save_ops
from float8_compile.report import saved_tensors_report
from float8_compile.tensor import Float8Tensor
from float8_compile.weight_cache import cache_weight_casts
from float8_compile.weight_gather import precompute_float8_dynamic_scale_for_fsdp

__version__ = "0.1.0"

__all__ = [
    "Cast",
    "CastConfig",
    "DelayedScaling",
    "FlatGradients",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8Tensor",
    "Gemm",
    "Recipe",
    "ScalingGranularity",
    "ScalingType",
    "__version__",
    "_auto_filter_for_recipe",
    "auto_filter",
    "cache_weight_casts",
    "calibrate",
    "conversion_report",
    "convert_from_float8_training",
    "convert_to_float8_training",
    "export",
    "float8_disabled",
    "float8_state_dict",
    "make_graphed_callables",
    "mark_calibrated",
    "monitor",
    "plain_state_dict",
    "precompute_float8_dynamic_scale_for_fsdp",
    "preview",
    "reset_delayed_scaling",
    "sac_save_ops",
    "saved_tensors_report",
    "sync_float8_amax_and_scale_history",
    "update_delayed_scaling",
]
