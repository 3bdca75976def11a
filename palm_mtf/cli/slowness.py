# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What will make a run slow on this machine, and what to do about it.

A pure function of what doctor.py found. What is wrong with the installation is
in diagnosis.py.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf.cli.diagnosis import Problem

# Other programs leave less than this of a core that is fit for training.
_BUSY = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """What was found.

  Attributes:
    native_bfloat16: CPU feature or GPUs that multiply bfloat16, "" for none.
    asked_dtype: ACTIVATION_DTYPE of the configuration that was given.
    asked_where: the place that sets it, "file:line".
    cores: the cores that may be used, by number.
    quota: the cores' worth of time that a container has, None if all.
    threads: the threads that share a product's work.
    busy: {core: the share of its time that other programs take}.
  """

  native_bfloat16: str
  asked_dtype: str = "auto"
  asked_where: str = ""
  cores: Sequence[int]
  quota: float | None = None
  threads: int
  busy: Mapping[int, float]


def find_slowness(machine: Machine) -> list[Problem]:
  """Returns every problem, the one that costs most first."""
  return [
    *_slow_dtype(machine),
    *_too_many_threads(machine),
    *_busy_cores(machine),
  ]


def dtype_line(machine: Machine) -> str:
  """Returns what "auto" is here, and why."""
  if machine.native_bfloat16:
    return f'native ({machine.native_bfloat16}): "auto" is "bfloat16"'
  return 'not native: "auto" is "float32"'


def _slow_dtype(machine: Machine) -> Iterator[Problem]:
  # Emulated, a product costs the float32 product and two passes of rounding.
  if machine.asked_dtype == "bfloat16" and not machine.native_bfloat16:
    yield Problem(
      f'ACTIVATION_DTYPE = "bfloat16" ({machine.asked_where}): this machine '
      "has no native bfloat16; it computes in float32 and rounds.",
      "--gin.ACTIVATION_DTYPE='\"auto\"'",
    )


def _too_many_threads(machine: Machine) -> Iterator[Problem]:
  cores = len(machine.cores)
  # A container may see more cores than its quota of time pays for.
  if machine.quota is not None and machine.quota < cores:
    cores = max(1, int(machine.quota))
  if machine.threads <= cores:
    return
  ours = ",".join(map(str, machine.cores[:cores]))
  yield Problem(
    f"{machine.threads} threads would share {cores} "
    f"core{'s' if cores > 1 else ''}, and wait for each other.",
    "unset TF_NUM_INTRAOP_THREADS OMP_NUM_THREADS, and begin the command with "
    f"taskset -c {ours}",
  )


def _busy_cores(machine: Machine) -> Iterator[Problem]:
  busy = {core: share for core, share in machine.busy.items() if share > _BUSY}
  if not busy:
    return
  listed = ", ".join(f"{core} ({share:.0%})" for core, share in busy.items())
  # Pinned to cores that nobody else uses, no thread waits for a busy one.
  free = [core for core in machine.cores if core not in busy]
  fix = "end the programs that top shows, or wait until they have ended"
  if free:
    fix += f"; or begin the command with taskset -c {','.join(map(str, free))}"
  yield Problem(
    f"other programs, or other guests of the host, keep cores busy: {listed}.",
    fix,
  )
