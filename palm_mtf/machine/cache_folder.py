# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The paths under ~/.cache/palm_mtf of what is kept for one kind of machine."""

import hashlib
import os

from palm_mtf.machine.cores import usable_cores
from palm_mtf.machine.cpu import cpu_flags, cpu_name

# Version of what is measured (rates/calibration.py), to be raised when plans
# use the rates otherwise: those of before are not found then.
CALIBRATION = 3


def cache_path(kind: str, *key: str) -> str:
  """Returns a path of its own for this CPU and `key`.

  Args:
    kind: name of the folder.
    *key: what else the content depends on.
  """
  caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  text = "\n".join((cpu_name(), *sorted(cpu_flags()), *key))
  digest = hashlib.sha256(text.encode()).hexdigest()
  return os.path.join(caches, "palm_mtf", kind, digest[:16])


def measured_hardware() -> str:
  """Returns the path of the gin file of this machine's measured rates."""
  key = str(usable_cores()), f"calibration {CALIBRATION}"
  return cache_path("hardware", *key) + ".gin"
