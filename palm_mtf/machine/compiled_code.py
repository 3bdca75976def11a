# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache of code that XLA compiles, a folder for each CPU and version."""

import importlib.metadata
import os

from palm_mtf.machine.cache_folder import cache_path

_VARIABLE = "TF_XLA_FLAGS"


def keep_compiled_code() -> None:
  """Turns XLA's cache on, before TensorFlow is imported."""
  # Compiling takes most of the time in which a command starts, and the pods of
  # a process would each compile the same. Whoever sets the flags decides alone.
  if _VARIABLE in os.environ:
    return
  folder = compiled_code_folder()
  try:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for entry in os.scandir(folder):
      # A machine that lost power may keep a file's name without its content.
      if not entry.stat().st_size:
        os.remove(entry)
  except OSError:
    return
  # TensorFlow reads the variable when it is imported, and processes that this
  # one starts inherit it.
  os.environ[_VARIABLE] = f"--tf_xla_persistent_cache_directory={folder}"


def compiled_code_folder() -> str:
  """Returns the cache folder of this CPU and these versions."""
  # Code that is run on a CPU without its instructions ends the process.
  flags = os.environ.get("XLA_FLAGS", "")
  return cache_path("xla", flags, importlib.metadata.version("tensorflow"))
