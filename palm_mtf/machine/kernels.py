# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels that compute the numbers of a run, recorded in its checkpoints.

The same program gives the same bits only with the same kernels, which depend on
the versions, the hardware and the environment variables that are recorded here.
"""

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from palm_mtf import __version__
from palm_mtf.machine.processors import cpu_name, gpu_capabilities, kernel_flags

# Folders of the package with the source of a training step.
_SOURCES = ("ops", "native", "mesh", "model", "optim", "programs")
_INSTRUCTIONS = "CPU instructions"
_OPERATIONS = "operations in C++"
_NONE = "none"
# Environment variables that limit or replace kernels, as ONEDNN_MAX_CPU_ISA (in
# processors.py) does too.
_VARIABLES = (
  "DNNL_MAX_CPU_ISA",
  "TF_ENABLE_ONEDNN_OPTS",
  "NVIDIA_TF32_OVERRIDE",
  "XLA_FLAGS",
)


def kernels_here(operations: str) -> dict[str, str]:
  """Returns {name: value} of what decides this process's kernels.

  `operations` has options and compiler of our C++ operations, or is "none".
  """
  return {
    "palm_mtf": f"{__version__} ({_fingerprint()})",
    "tensorflow": importlib.metadata.version("tensorflow"),
    "mesh-tensorflow": importlib.metadata.version("mesh-tensorflow"),
    "CPU": cpu_name(),
    _INSTRUCTIONS: " ".join(kernel_flags()),
    "GPUs": " ".join(map(str, gpu_capabilities())) or _NONE,
    _OPERATIONS: operations,
    **{x: os.environ.get(x, "") for x in _VARIABLES},
  }


@functools.cache
def _fingerprint() -> str:
  """Returns a hash of the source files that a training step depends on."""
  package = Path(__file__).parent.parent
  digest = hashlib.sha256()
  for folder in _SOURCES:
    for path in sorted((package / folder).rglob("*.*")):
      if path.suffix in (".py", ".h", ".cc"):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(path.read_bytes())
  return digest.hexdigest()[:8]


def kernels_of(servers: Sequence[Mapping[str, str]]) -> dict[str, str]:
  """Merges the results of `kernels_here` on all servers."""
  found = {}
  for name in servers[0]:
    values = dict.fromkeys(x.get(name, "") for x in servers)
    found[name] = " and ".join(values)
  # If one server lacks the operations in C++, no server uses them.
  if any(x.get(_OPERATIONS) == _NONE for x in servers):
    found[_OPERATIONS] = _NONE
  return found


def difference(now: Mapping[str, str], before: Mapping[str, str]) -> str:
  """Returns the differences between two results of `kernels_here`; "" if none.

  Names that only one of them has are left out.
  """
  return "; ".join(
    _describe_change(name, now[name], before[name])
    for name in now
    if name in before and now[name] != before[name]
  )


def _describe_change(name: str, now: str, before: str) -> str:
  if name != _INSTRUCTIONS:
    return f"{name}: {now or 'not set'}, before {before or 'not set'}"
  added, lost = {*now.split()}, {*before.split()}
  changes = [f"with {x}" for x in sorted(added - lost)]
  changes += [f"without {x}" for x in sorted(lost - added)]
  return f"{name}: {', '.join(changes)}"
