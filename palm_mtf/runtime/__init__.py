# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs programs on virtual slices: devices of this process or of servers."""

import importlib
from typing import Any

_MODULES = {
  "connect": "client",
  "connect_managed": "client",
  "function": "functions",
  "mesh_function": "functions",
  "all_sum": "functions",
}


def __getattr__(name: str) -> Any:
  # Import lazily: these modules import TensorFlow, which few users need.
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = importlib.import_module(f"{__name__}.tracer.{_MODULES[name]}")
  return getattr(module, name)
