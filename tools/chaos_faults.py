# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of the disk that chaos.py makes: no room, and no right to read."""

import contextlib
import ctypes
import errno
import os
import random
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

_DISK = "size=64m"
_CHUNK_BYTES = 4096
# linux/prctl.h and linux/capability.h.
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


def deny_children() -> None:
  """Takes root's right to read every file from the processes started here."""
  libc = ctypes.CDLL(None, use_errno=True)
  for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
    libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # without root: EPERM


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
  """Mounts a small disk at a folder; yields whether it could be mounted."""
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(folder)]
  mounted = os.geteuid() == 0 and not subprocess.run(mount).returncode
  try:
    yield mounted
  finally:
    if mounted:
      # Detached: a process that ends may still hold a file.
      subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full_disk(
  folder: Path, process: subprocess.Popen, rng: random.Random
) -> Iterator[None]:
  """Leaves a process a few bytes to write, until the context ends.

  Args:
    folder: the small disk, None where there is none: a file of the process may
      not grow beyond a limit then, for as long as it lives.
    process: process that writes.
    rng: source of how many bytes are left.
  """
  left = rng.randrange(0, 50 * _CHUNK_BYTES)
  if not os.path.ismount(folder):
    with contextlib.suppress(ProcessLookupError):
      _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
      resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (left, hard))
    yield
    return
  ballast = folder / "ballast"
  try:
    with open(ballast, "wb", buffering=0) as file:
      try:
        while True:
          file.write(bytes(_CHUNK_BYTES))
      except OSError as error:
        if error.errno != errno.ENOSPC:
          raise
      file.truncate(max(0, file.tell() - left))
    yield
  finally:
    ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def unreadable(folder: Path, rng: random.Random) -> Iterator[bool]:
  """Takes the right to read from a file; yields whether there was one."""
  files = sorted(each for each in folder.rglob("*") if each.is_file())
  if not files:
    yield False
    return
  path = rng.choice(files)
  mode = path.stat().st_mode
  path.chmod(0)
  try:
    yield True
  finally:
    # It may have been replaced or removed meanwhile.
    with contextlib.suppress(FileNotFoundError):
      path.chmod(mode)
