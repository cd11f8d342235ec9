"""Functions that tell of settings of torch, which change unnoticed by what was traced."""

from __future__ import annotations

import types

import torch

_GETTERS = (
    *("get_default_dtype", "get_default_device", "get_num_threads", "get_num_interop_threads"),
    *("is_grad_enabled", "is_inference_mode_enabled", "is_anomaly_enabled"),
    *("is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled"),
    *("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
    *("are_deterministic_algorithms_enabled", "get_deterministic_debug_mode"),
    *("is_deterministic_algorithms_warn_only_enabled", "is_warn_always_enabled"),
    *("get_float32_matmul_precision", "initial_seed", "get_rng_state", "seed"),
)

_FUNCTIONS = [vars(torch)[name] for name in _GETTERS if name in vars(torch)]
_FUNCTIONS.append(torch.random.fork_rng)

BUILTINS = frozenset(id(f) for f in _FUNCTIONS if isinstance(f, types.BuiltinFunctionType))
"""Those that are written in C++, by their identity."""

CODES = frozenset(f.__code__ for f in _FUNCTIONS if isinstance(f, types.FunctionType))
"""The codes of the others."""
