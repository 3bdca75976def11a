# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""This process: who owns it, its children, its imports and its stop signals.

Commands, server processes and benchmarks own their process: they call
`own_process` first, and then change Python's garbage collector, TensorFlow's
log level and the packages that TensorFlow imports. A program that imports
palm_mtf owns its process, and keeps its own settings.
"""

import contextlib
import ctypes
import gc
import importlib.abc
import importlib.machinery
import os
import resource
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator

from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import release_file_pages

_PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
_is_owned = False


def own_process() -> None:
  """Marks this process as palm_mtf's; call before threads or TensorFlow run."""
  global _is_owned
  _is_owned = True
  # TensorFlow's import, perhaps by the user's module, reads this level. Level 3
  # hides logged errors too, which are raised as Python exceptions anyway.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  # Mesh TensorFlow's transformer imports it, which users cannot change.
  warnings.filterwarnings("ignore", "pkg_resources is deprecated")


def is_owned() -> bool:
  """Returns whether palm_mtf owns this process, so may change its settings."""
  return _is_owned


def die_with(parent: int) -> None:
  """Makes the kernel kill this process, even after exec, if its parent ends."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:  # the parent ended before the line above
    os._exit(1)


def make_child_environment() -> dict[str, str]:
  """Returns environment variables with which a child finds the same modules.

  Without PYTHONSAFEPATH, `python -m` would look for modules in the current
  folder first, and would run files that a downloaded model brings.
  """
  path = os.pathsep.join(folder for folder in sys.path if folder)
  return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def lean_import() -> Iterator[None]:
  """Lets imports in the body skip packages that TensorFlow does not need."""
  try:
    tempfile.gettempdir()
  except FileNotFoundError:
    # No folder can be written. TensorFlow's imports only ask for the folder's
    # name, so any name will do.
    tempfile.tempdir = "/tmp"
  with _never_garbage(), silent_unless_it_fails(), _Withheld(), _memory():
    yield


@contextlib.contextmanager
def _memory() -> Iterator[None]:
  """Raises UserError if an import in the body exceeds `ulimit -v`."""
  try:
    yield
  except Exception as error:  # libraries raise many types for lack of memory
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
      raise
    raise UserError(
      f"TensorFlow cannot be loaded into the {limit:,} bytes of memory that "
      f"this process may have; raise its limit (ulimit -v): {error}"
    ) from error


@contextlib.contextmanager
def silent_unless_it_fails() -> Iterator[None]:
  """Holds back the stderr output of C++; shows it if the body raises."""
  sys.stderr.flush()
  terminal = os.dup(2)
  # Hold the output in memory, because there may be no temporary folder.
  with os.fdopen(os.memfd_create("palm_mtf"), "w+b") as held:
    os.dup2(held.fileno(), 2)
    try:
      yield
    except UserError:
      raise  # a UserError's message says enough without this output
    except BaseException:
      held.seek(0)
      os.write(terminal, held.read())
      raise
    finally:
      os.dup2(terminal, 2)
      os.close(terminal)


class _Withheld(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Refuses packages that TensorFlow would import but does not need.

  Half of TensorFlow's import time goes to Keras, to JAX (which a converter of
  TensorFlow Lite imports) and to packages that TensorFlow's old copy of Keras
  imports. Programs can import these packages later.
  """

  _NAMES = ("h5py", "jax", "keras", "scipy")
  # TensorFlow imports this module right after its C++ libraries. `find_spec`
  # then releases 300 MB of symbols and relocations: only the linker needs them.
  _AFTER_LIBRARIES = "tensorflow.python.tools"

  def __enter__(self) -> None:
    sys.meta_path.insert(0, self)

  def __exit__(self, *exception: object) -> None:
    sys.meta_path.remove(self)

  def find_spec(
    self, name: str, path: object = None, target: object = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Returns a spec whose loader raises ImportError, for names in _NAMES."""
    if name == self._AFTER_LIBRARIES:
      release_file_pages()
    if name in self._NAMES:
      if spec := importlib.machinery.PathFinder.find_spec(name):
        spec.loader = self
        return spec
    return None

  def exec_module(self, module: types.ModuleType) -> None:
    raise ImportError(f"{module.__name__} is not needed yet")


@contextlib.contextmanager
def _never_garbage() -> Iterator[None]:
  """Permanently exempts objects made in the body from garbage collection.

  Imports make 400,000 permanent objects. Scanning them again and again would
  take a third of the time of `generate` and a fifth of a short `train`.
  """
  gc.collect()  # because gc.freeze would keep garbage permanently
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    gc.freeze()
    if was_enabled:
      gc.enable()


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handled_signals() -> list[signal.Signals]:
  """Returns the stop signals that a command in this thread handles.

  Signals that are already ignored (by nohup, or in a background job of a shell)
  stay ignored. Python lets only the main thread handle signals, so a command in
  another thread leaves signals to the program that called the command.
  """
  if threading.current_thread() is not threading.main_thread():
    return []
  return [x for x in _STOP_SIGNALS if signal.getsignal(x) != signal.SIG_IGN]


class StopRequest:
  """A context manager that handles the first stop signal by noting its name.

  Outside the main thread, no signal is handled. A second SIGINT or SIGTERM
  interrupts at once. SIGHUP never interrupts, because a terminal that closes
  may send it twice.
  """

  def __init__(self):
    self.signal_name = ""  # name of the first stop signal, such as "SIGTERM"
    self._previous = {}

  def __enter__(self) -> "StopRequest":
    for number in handled_signals():
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _note(self, number: int, unused_frame: object) -> None:
    self.signal_name = self.signal_name or signal.Signals(number).name
    if number != signal.SIGHUP:
      signal.signal(number, self._previous[number])
