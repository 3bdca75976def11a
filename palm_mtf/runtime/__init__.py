# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Public API: runs functions on virtual slices, meshes made on demand."""

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
  # Import lazily: these modules import TensorFlow, which takes seconds.
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = importlib.import_module(f"{__name__}.tracer.{_MODULES[name]}")
  return getattr(module, name)
