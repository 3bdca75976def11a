# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests run on virtual CPU devices, however many GPUs a machine has.

Code that XLA compiles is cached in .pytest_cache. Compilation takes much of the
time of a small run, and other tests, their processes and the next run of the
tests need the same code.

A run of the tests always ends: a test that takes too long ends its process
(pytest-timeout), and a process that dies ends the run. The test is named.
"""

import contextlib
import fcntl
import functools
import gc
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from palm_mtf.console import configure_logging
from palm_mtf.machine.compiled_code import keep_compiled_code
from palm_mtf.machine.process import own_process
from palm_mtf.native.build import BuildError, load_library
from tests import claims, resume, workers

# Commands call these too; so tests see the same stderr as users.
configure_logging()
own_process()
# Turn garbage collection off until all tests are imported, because it takes a
# fifth of the import time.
gc.disable()

# Files of tests with much memory; a process is given one of the first two while
# it has no other tests' memory.
_FIRST = re.compile(r"stage_arrays|frozen")
_LARGEST = re.compile(
  r"frozen|stage_arrays|executor_test|decode_arrays|scanned_model|whole_model|"
  r"loop_test|oracle_test|palm_test|variable_checks_test|saved_model"
)
# Libraries of extras, which an environment may lack.
_OPTIONAL = {"aiohttp", "jinja2", "llguidance", "matplotlib", "scipy"}
# Slow tests take up to ten minutes on a fast machine. pyproject.toml has the
# limit for other tests.
_SLOW_SECS = 3600

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# Set the level that our processes set, before JAX sets another one. Otherwise
# XLA logs a line for each cached function, which fills the pipes of processes.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Compilation takes most of the oracles' time, because a function runs only once
# or twice.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The programs of accelerators run on virtual CPU devices.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Shells (for background jobs) and nohup make processes ignore these signals,
# and child processes inherit that. But tests interrupt processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Set before TensorFlow is imported. Workers and processes that tests start
# inherit the folder with the environment; the user's own cache is not touched.
with pytest.MonkeyPatch.context() as patch:
  cache = Path(__file__).resolve().parent.parent / ".pytest_cache"
  patch.setenv("XDG_CACHE_HOME", str(cache))
  keep_compiled_code()
  # The oracles' hundred small functions are the same in every test file.
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
  """Adds our plugins, with their options."""
  for plugin in (claims, resume, workers):
    pluginmanager.register(plugin)


def pytest_configure(config: pytest.Config) -> None:
  """Imports for all workers what a test module might import with more."""
  if config.getoption("workers"):
    # Without Keras, which TensorFlow imports if a test module imports it first.
    import palm_mtf._tf  # noqa: F401

    # SeqIO imports TensorFlow Text, whose layers for Keras nobody uses here.
    # Keras and what it imports would take 2 seconds and 0.2 GB.
    without_layers = types.ModuleType("tensorflow_text.python.keras")
    sys.modules[without_layers.__name__] = without_layers


# Compile the C++ library before tests count lines on stderr.
with contextlib.suppress(BuildError):
  load_library()


class _Module(pytest.Module):
  """A module of tests; skipped if it imports an optional library in vain."""

  def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
    try:
      return super().collect()
    except self.CollectError as error:
      name = getattr(error.__cause__, "name", None)
      if name not in _OPTIONAL:
        raise
      pytest.skip(f"{name} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(
  module_path: Path, parent: pytest.Collector
) -> pytest.Module:
  """Makes a module that may be skipped."""
  return _Module.from_parent(parent, path=module_path)


def pytest_collection_finish() -> None:
  """Exempts imported objects from garbage collection, because they stay."""
  gc.collect()
  gc.freeze()
  gc.enable()


def _made_once(
  factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
  """Returns a path that `make` writes to, in the first worker that needs it.

  Otherwise each worker, and each that replaces one, would train the same run.
  """
  path = factory.getbasetemp() / "made_once" / name
  made = path.with_name(f"{name}.made")
  path.parent.mkdir(exist_ok=True)
  with path.with_name(f"{name}.lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not made.exists():
      make(path)
      made.touch()
  return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The folder of `runs.write_corpus`; tests must not write into it."""
  from tests import runs

  return _made_once(tmp_path_factory, "corpus", runs.write_corpus)


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A run of 12 steps without a stop; tests may read or copy it."""
  from tests import runs

  def train(model_dir: Path) -> None:
    assert runs.run("train", corpus, model_dir) == 0

  return _made_once(tmp_path_factory, "finished", train)


@pytest.fixture(scope="session")
def base(finished: Path) -> Path:
  """The run that tests adapt; they may read or copy it."""
  return finished


@pytest.fixture(scope="session")
def adapted(
  base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
  """Trains an adapter of each kind once; see KINDS in adapter_runs.py."""
  from tests import adapter_runs

  def train(kind: str, run: Path) -> None:
    assert adapter_runs.train(base, run, **adapter_runs.KINDS[kind]) == 0

  return lambda kind: _made_once(
    tmp_path_factory, kind, functools.partial(train, kind)
  )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """An empty folder, which is the current one."""
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture
def registries() -> Iterator[None]:
  """Removes the SeqIO tasks that a test registers."""
  from tests.seqio_testing import registries_restored

  with registries_restored():
    yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Gives slow tests more time, and runs the tests with the most memory first.

  XLA briefly takes half a gigabyte to compile a TPU's program, and JAX to
  compile the oracles' gradients. A process can spare that much while it is
  small, and it only grows, because imported modules stay.
  """
  items.sort(
    key=lambda item: tuple(
      not x.search(item.path.name) for x in (_FIRST, _LARGEST)
    )
  )
  for item in items:
    if claims.is_slow(item):
      item.add_marker(pytest.mark.timeout(_SLOW_SECS))
