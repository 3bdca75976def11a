# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache of code that XLA compiles: a folder per CPU and TensorFlow version.

XLA fails if it cannot write its cache or if a file there is damaged. Therefore
XLA gets a folder in memory, in TensorFlow's file system ram://, as its cache.
This module first copies undamaged files from the disk to that folder. Files
that XLA then adds to that folder are copied to the disk every second. So a full
disk, a damaged file or a killed process costs only time to compile.
"""

import atexit
import glob
import importlib.metadata
import os
import re
import threading
from collections.abc import Mapping
from types import ModuleType

from palm_mtf.errors import UserError, shorten
from palm_mtf.machine.cache_folder import (
  CacheError,
  cache_path,
  open_cache,
  remove_abandoned,
  warn_of,
)

_VARIABLE = "TF_XLA_FLAGS"
# For ram://, a file exists as soon as any name begins with its name. So XLA
# would read a file that another pod's XLA, in the same process, still writes as
# NAME.pb<...>.tmp, and fail with an empty NOT_FOUND. With this prefix twice,
# XLA writes and reads ram://ram://PATH, but asks whether ram://PATH exists,
# where we put an empty file as soon as the other file is complete.
_FOUND, _MEMORY = "ram://", "ram://ram://"
# The folder in memory has the same path as on the disk. So this flag tells a
# child process, which inherits TF_XLA_FLAGS, which folder to copy.
_FLAG = f"--tf_xla_persistent_cache_directory={_MEMORY}"
_SAVE_SECS = 1.0
# With both flags, TensorFlow compiles CPU operations with XLA even where no
# code asks for that, which fails with several devices (`check_xla_flags`).
_COMPILES_FOR_CPUS = (
  re.compile(r"--tf_xla_auto_jit=(1|2|fusible)(\s|$)"),
  re.compile(r"--tf_xla_cpu_global_jit(=1|=true)?(\s|$)"),
)


def keep_compiled_code() -> None:
  """Turns XLA's cache on; call this before the import of TensorFlow."""
  # Without a cache, compilation takes most of a command's start, and each pod
  # of a process compiles the same code. setdefault keeps the user's flags.
  os.environ.setdefault(_VARIABLE, _FLAG + compiled_code_folder())
  # JAX reads this variable at its import. Its cache keeps programs that take
  # more than a second to compile.
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache_path("jax"))


def check_xla_flags(num_devices: int) -> None:
  """Raises UserError if TF_XLA_FLAGS cannot work with so many CPU devices."""
  flags = os.environ.get(_VARIABLE, "")
  # With these flags, TensorFlow puts operations of several devices into one XLA
  # program, which then fails ("Multiple CPU devices").
  if num_devices > 1 and all(x.search(flags) for x in _COMPILES_FOR_CPUS):
    raise UserError(
      f"{_VARIABLE} = {shorten(flags)}: TensorFlow cannot compile for the "
      f"{num_devices:,} CPU devices of one process; remove "
      "--tf_xla_cpu_global_jit."
    )


def compiled_code_folder() -> str:
  """Returns the cache folder's path for this CPU, TensorFlow and XLA_FLAGS."""
  # The CPU is part of the path, because code with instructions that the CPU
  # lacks would crash the process.
  flags = os.environ.get("XLA_FLAGS", "")
  version = importlib.metadata.version("tensorflow")
  return cache_path("xla", "sealed", flags, version)


class CompiledCode:
  """The files of XLA's cache in memory and on the disk."""

  def __init__(self, memory: ModuleType, folder: str):
    """Copies the files of a folder on the disk to tf.io.gfile's ram://."""
    self._memory, self._folder = memory, folder
    self._lock = threading.Lock()
    self._is_lost = False  # whether the folder on the disk cannot be used
    self._known: set[str] = set()
    self.load()

  def load(self) -> None:
    """Copies the files that the folder on the disk has now."""
    kept = self._read()
    with self._lock:
      # Leave out files that are already in memory, because in ram:// a file
      # that is opened for writing keeps its old content.
      for name in kept.keys() - self._names():
        with self._memory.GFile(self._in_memory(name), "wb") as file:
          file.write(kept[name])
        self._let_find(name)
      self._known |= {*kept}

  def _in_memory(self, name: str) -> str:
    return f"{_MEMORY}{self._folder}/{name}"

  def _names(self) -> set[str]:
    # XLA gives only complete files a name that ends in ".pb".
    pattern = f"{_MEMORY}{glob.escape(self._folder)}/*.pb"
    return {os.path.basename(x) for x in self._memory.glob(pattern)}

  def _let_find(self, name: str) -> None:
    with self._memory.GFile(f"{_FOUND}{self._folder}/{name}", "wb") as file:
      file.write(b"")

  def _read(self) -> Mapping[str, bytes]:
    try:
      with open_cache(self._folder) as cache:
        remove_abandoned(cache.descriptor)
        return cache.load(cache.names())
    except FileNotFoundError:
      return {}
    except CacheError as error:
      warn_of(error)
      self._is_lost = True
      return {}

  def save(self) -> None:
    """Writes new files of the folder in memory to the disk; logs a failure."""
    with self._lock:
      new = self._names() - self._known
      for name in new:
        self._let_find(name)
      if not new or self._is_lost:
        return
      try:
        with open_cache(self._folder, make=True) as cache:
          for name in new:
            with self._memory.GFile(self._in_memory(name), "rb") as file:
              cache.keep(name, file.read())
            self._known.add(name)
      except CacheError as error:
        warn_of(error)
        self._is_lost = True


# The cache of this process; empty until `share_compiled_code` turns it on.
_shared: list[CompiledCode] = []


def share_compiled_code(memory: ModuleType) -> None:
  """Lets this process use and extend XLA's cache, if the cache is turned on.

  `memory` is the module tf.io.gfile, which accesses the folder in memory.
  """
  flag = os.environ.get(_VARIABLE, "")
  if not flag.startswith(_FLAG):
    return
  code = CompiledCode(memory, flag.removeprefix(_FLAG))
  _shared.append(code)
  end = threading.Event()

  def save_often() -> None:  # because a kill skips atexit
    while not end.wait(_SAVE_SECS):
      code.save()

  saving = threading.Thread(target=save_often, daemon=True)
  saving.start()
  # At the exit, these run in the opposite order: the thread ends, then we save.
  atexit.register(code.save)
  atexit.register(saving.join)
  atexit.register(end.set)


def save_compiled_code() -> None:
  """Saves this process's compiled code before os._exit, which skips atexit."""
  for code in _shared:
    code.save()
