# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The registry of Python functions that a client may call in servers.

A server offers the functions of the modules that it has imported when it
starts (server/start.py); processes.py builds the calls.
"""

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable)

# Modules with host functions that training calls. Servers have to import them.
HOST_MODULES = (
  "palm_mtf.executors.xla.host_calls",
  "palm_mtf.checkpoints.manifest",
  "palm_mtf.data.batches.server_batches",
)
HOST_FUNCTIONS: dict[str, Callable] = {}  # by name


def host_function(function: _Function) -> _Function:
  """Lets clients call a module-level function of NumPy values; returns it.

  Raises ValueError if another function of this name is registered.
  """
  held = HOST_FUNCTIONS.setdefault(function.__name__, function)
  if held.__module__ != function.__module__:
    raise ValueError(
      f"{held.__module__} and {function.__module__} both register the host "
      f'function "{function.__name__}": rename one.'
    )
  return function
