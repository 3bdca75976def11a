# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder in which XLA keeps the code that it compiles, for later commands.

To compile takes most of the time in which a command starts, and each pod of a
process would compile the same again. The code is for one CPU and one version:
each has a folder of its own.
"""

import hashlib
import importlib.metadata
import os

from palm_mtf.machine.cpu import cpu_flags, cpu_name

_VARIABLE = "TF_XLA_FLAGS"


def keep_compiled_code() -> None:
  """Names the folder to TensorFlow, which reads it when it is imported.

  Processes that this one starts take it over. Who sets TF_XLA_FLAGS decides
  alone, and where no folder can be written nothing is kept.
  """
  if _VARIABLE in os.environ:
    return
  folder = compiled_code_folder()
  try:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for entry in os.scandir(folder):
      if not entry.stat().st_size:  # a machine without power forgets content
        os.remove(entry)
  except OSError:
    return
  os.environ[_VARIABLE] = f"--tf_xla_persistent_cache_directory={folder}"


def compiled_code_folder() -> str:
  """Returns the path of the folder for this CPU and these versions."""
  caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  what_it_is_for = (
    cpu_name(),
    *sorted(cpu_flags()),
    os.environ.get("XLA_FLAGS", ""),
    importlib.metadata.version("tensorflow"),
  )
  digest = hashlib.sha256("\n".join(what_it_is_for).encode()).hexdigest()
  return os.path.join(caches, "palm_mtf", "xla", digest[:16])
