# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether this process belongs to palm_mtf or to a program that imports it.

Commands, server processes and benchmarks own their process: they call
`own_process` first, and then change its allocator, its garbage collector, the
log levels of TensorFlow and the packages that TensorFlow imports. A program
that imports layers or pods of palm_mtf keeps its own settings.
"""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import os
import resource
import sys
import tempfile
import types
from collections.abc import Iterator

from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import limit_arenas, release_file_pages

_is_owned = False


def own_process() -> None:
  """Takes this process over, before it has threads and imports TensorFlow."""
  global _is_owned
  _is_owned = True
  # TensorFlow reads the level at its import, which a module of the user may
  # do first. Errors are Python exceptions.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  limit_arenas()


def is_owned() -> bool:
  """Returns whether `own_process` was called."""
  return _is_owned


@contextlib.contextmanager
def lean_import() -> Iterator[None]:
  """Imports what its body does, without packages that TensorFlow can lack."""
  try:
    tempfile.gettempdir()
  except FileNotFoundError:
    # None can be written. What TensorFlow imports asks for the name alone.
    tempfile.tempdir = "/tmp"
  with _never_garbage(), silent_unless_it_fails(), _Withheld(), _memory():
    yield


@contextlib.contextmanager
def _memory() -> Iterator[None]:
  """Raises UserError where TensorFlow does not fit into a memory limit."""
  try:
    yield
  except Exception as error:  # libraries report it in many ways
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
      raise
    raise UserError(
      f"TensorFlow cannot be loaded into the {limit:,} bytes of memory that "
      f"this process may have; raise its limit (ulimit -v): {error}"
    ) from error


@contextlib.contextmanager
def silent_unless_it_fails() -> Iterator[None]:
  """Holds back what C++ writes to stderr; shows it if the body raises."""
  sys.stderr.flush()
  terminal = os.dup(2)
  # In memory: there may be no folder for temporary files.
  with os.fdopen(os.memfd_create("palm_mtf"), "w+b") as held:
    os.dup2(held.fileno(), 2)
    try:
      yield
    except UserError:
      raise  # says enough
    except BaseException:
      held.seek(0)
      os.write(terminal, held.read())
      raise
    finally:
      os.dup2(terminal, 2)
      os.close(terminal)


class _Withheld(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds packages that TensorFlow would load at once, and does not load them.

  Half of the time of its import is Keras, which it loads for what registers
  itself there, JAX, if there is one, for a converter, and what the old copy of
  Keras inside of it, which nothing else uses, would like to have. It goes on
  without them; whoever asks for one of them later has it.
  """

  _NAMES = ("h5py", "jax", "keras", "scipy")
  # What TensorFlow imports first behind its libraries. To load these the
  # dynamic linker has read 300 MB of symbols and relocations, for good.
  _AFTER_LIBRARIES = "tensorflow.python.tools"

  def __enter__(self) -> None:
    sys.meta_path.insert(0, self)

  def __exit__(self, *exception: object) -> None:
    sys.meta_path.remove(self)

  def find_spec(
    self, name: str, path: object = None, target: object = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns where the package is, with a loader that refuses."""
    if name == self._AFTER_LIBRARIES:
      release_file_pages()
    if name not in self._NAMES:
      return None
    spec = importlib.machinery.PathFinder.find_spec(name)
    if spec:
      spec.loader = self
    return spec

  def exec_module(self, module: types.ModuleType) -> None:
    """Refuses."""
    raise ImportError(f"{module.__name__} is not needed yet")


@contextlib.contextmanager
def _never_garbage() -> Iterator[None]:
  """Keeps Python from looking for garbage in what its body makes, for good.

  An import makes 400,000 objects that stay. To walk through them again and
  again is a fifth of its time, and more while a program's graph is built.
  """
  gc.collect()  # what is garbage already shall not stay
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    gc.freeze()
    if was_enabled:
      gc.enable()
