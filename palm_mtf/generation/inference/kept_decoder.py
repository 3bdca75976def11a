# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of texts that an earlier process built and kept.

To import TensorFlow's Python package and to build the graph takes most of the
time to a first token, and gives the same graph each time. So the process that
builds a graph keeps it in the cache (keep_programs.py), and later processes run
it by TensorFlow's C library. A kept graph is found by the hash of all code of
palm_mtf and of everything else on which the graph depends.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

import palm_mtf
from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  close_weights,
  find_opened_prefix,
  open_weights,
)
from palm_mtf.config import Config, DecodeConfig
from palm_mtf.executors.choose import decodes_on_accelerators
from palm_mtf.generation.decode.prompt_batch import PromptBatch
from palm_mtf.machine import tensorflow_c
from palm_mtf.machine.cache_folder import (
  CacheError,
  cache_path,
  open_cache,
  warn_of,
)
from palm_mtf.machine.process import is_owned
from palm_mtf.machine.processors import (
  gpu_capabilities,
  thread_count,
  usable_cores,
)
from palm_mtf.native.build import BuildError, open_library

if TYPE_CHECKING:  # at run time, these imports would load TensorFlow
  from palm_mtf.generation.decode.generate_program import DecodePrograms
  from palm_mtf.generation.inference.sessions import LoadedDecoder
  from palm_mtf.runtime.program import Program

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class KeptTensor(NamedTuple):
  """An input of a program."""

  name: str  # in the graph, "operation:index"
  dtype: str  # NumPy's name
  shape: Sequence[int]


class KeptProgram(NamedTuple):
  """A program of a kept graph; see `Program`."""

  inputs: Mapping[str, KeptTensor]
  outputs: Mapping[str, str]  # {name: tensor's name in the graph}
  operations: Sequence[str]


class KeptPrograms(NamedTuple):
  """The programs of batches of one size; see `DecodePrograms`."""

  start: KeptProgram
  advance: KeptProgram
  read: KeptProgram


class KeptGraph(NamedTuple):
  """A graph that makes the weights and texts of one model."""

  graph: bytes  # serialized GraphDef
  session: bytes  # serialized ConfigProto
  prefix: str  # tensor to feed with TensorFlow's prefix of a checkpoint
  # For each part of the weights, in turn: the operations that make it.
  layers: Sequence[Sequence[str]]
  programs: KeptPrograms


def can_keep(config: Config) -> bool:
  """Whether programs of this model can run without TensorFlow's package.

  They can on one CPU device, in a process that palm_mtf owns.
  """
  return (
    is_owned()
    and config.mesh_layout.num_devices == 1
    and not decodes_on_accelerators(config.mesh_layout, config.pods)
    and not gpu_capabilities()
    and config.model.adapter == "none"  # its base is a second checkpoint
    and not config.decode.knn_index
  )


def hash_code() -> str | None:
  """Returns a hash of palm_mtf's code and of the compiled operations.

  Returns None without C++ operations, or if a file cannot be read, such as the
  broken link by which an editor locks a file.
  """
  root = Path(palm_mtf.__file__).parent
  try:
    _, library = open_library()
    code = hashlib.sha256(library)
    for path in sorted(root.rglob("*.py")):
      code.update(f"{path.relative_to(root)}\n".encode())
      code.update(path.read_bytes())
  except (BuildError, OSError):
    return None
  return code.hexdigest()


def kept_path(code: str, *settings: object) -> str:
  """Returns the path of a graph in the cache.

  The path depends on all that a graph depends on: `code`, which `hash_code`
  returns; the versions of packages; the number of threads; the measured choice
  of products; and `settings`, dataclasses whose `repr` has all their values.
  """
  versions = [
    importlib.metadata.version(x)
    for x in ("tensorflow", "mesh_tensorflow", "numpy")
  ]
  threads = usable_cores(), thread_count(os.environ)
  products = hashlib.sha256(_read_products()).hexdigest()
  settings = *settings, threads
  return cache_path("texts", code, products, *versions, *map(repr, settings))


def _read_products() -> bytes:
  """Returns the files of executors/host/products.py; they choose operations."""
  folder = os.path.dirname(cache_path("products"))
  try:
    with open_cache(folder) as cache:
      return b"".join(cache.read(x) or b"" for x in sorted(cache.names()))
  except (FileNotFoundError, CacheError):
    return b""  # nothing is measured, or not yet


def read_kept(path: str) -> KeptGraph | None:
  """Returns a graph of the cache; None if it is missing or damaged."""
  folder, name = os.path.split(path)
  try:
    with open_cache(folder) as cache:
      content = cache.load([name]).get(name)
  except FileNotFoundError:
    return None
  except CacheError as error:
    warn_of(error)
    return None
  if content is None:
    return None
  header, _, graph = zlib.decompress(content).partition(b"\n")
  found = json.loads(header)
  programs = {
    name: KeptProgram(
      {x: KeptTensor(*y) for x, y in each["inputs"].items()},
      each["outputs"],
      each["operations"],
    )
    for name, each in found["programs"].items()
  }
  return KeptGraph(
    graph,
    bytes.fromhex(found["session"]),
    found["prefix"],
    found["layers"],
    KeptPrograms(**programs),
  )


class KeptDecoder(contextlib.AbstractContextManager):
  """Decoding weights and programs of texts, from a kept graph if there is one.

  Has what `Generator` needs of a `LoadedDecoder`. If a batch has no kept graph,
  a `LoadedDecoder` builds its programs, which are kept at the end. As a context
  manager, frees the weights at the end.
  """

  num_slices = 1
  num_virtual = 0

  def __init__(self, checkpoint: Checkpoint, config: Config):
    """Takes a run's checkpoint; `can_keep` of `config` is true."""
    self._checkpoint, self._run = checkpoint, config
    self.config, self.client = config.model, self
    # Hash the code at the start, because this process continues to run it even
    # if another version is installed meanwhile.
    self._code = hash_code()
    self._session: tensorflow_c.Session | None = None
    self._whole: LoadedDecoder | None = None
    # {sizes: programs}, which `_session` runs, or `_whole` has built.
    self._built: dict[PromptBatch, Any] = {}

  def build_texts(
    self, decode: DecodeConfig, sizes: PromptBatch
  ) -> "DecodePrograms | KeptPrograms":
    """Returns the programs for batches of one size; `decode` is the run's."""
    if sizes not in self._built:
      found = None if self._whole else self._find(sizes)
      self._built[sizes] = found or self._build(decode, sizes)
    return self._built[sizes]

  def _path(self, sizes: PromptBatch) -> str | None:
    run = self._run
    return self._code and kept_path(
      self._code, run.model, run.mesh_layout, run.decode, sizes
    )

  def _find(self, sizes: PromptBatch) -> KeptPrograms | None:
    path = self._path(sizes)
    kept = path and read_kept(path)
    if not kept:
      return None
    try:
      return self._load(kept)
    except (tensorflow_c.TensorFlowError, OSError) as error:
      # The caller then tries TensorFlow's package, whose errors users see.
      _logger.debug("%s cannot be used: %s", path, error)
      return None

  def _load(self, kept: KeptGraph) -> KeptPrograms:
    """Adds a graph to the session; makes the weights if it is the first."""
    prefix = f"texts_{len(self._built)}"
    is_first = self._session is None
    if is_first:
      path, _ = open_library()
      self._session = tensorflow_c.Session(kept.session)
      tensorflow_c.load_operations(path)
    self._session.add_graph(kept.graph, prefix)
    if is_first:
      with _opened(self._checkpoint.prefix) as files:
        feeds = {f"{prefix}/{kept.prefix}": files}
        for names in kept.layers:
          self._session.run(feeds, targets=[f"{prefix}/{x}" for x in names])
    return KeptPrograms(*(_prefixed(x, prefix) for x in kept.programs))

  def _build(
    self, decode: DecodeConfig, sizes: PromptBatch
  ) -> "DecodePrograms":
    if self._whole is None:
      from palm_mtf.generation.inference.sessions import LoadedDecoder

      self._free()
      self._built.clear()
      self._whole = LoadedDecoder.of_run(
        self._checkpoint, self._run, for_steps=True
      )
    return self._whole.build_texts(decode, sizes)

  def call(
    self,
    program: "Program | KeptProgram",
    inputs: Mapping[str, object] | None = None,
  ) -> Any:
    """Runs a program of `build_texts`; returns {name: output}."""
    if self._whole:
      return self._whole.client.call(program, inputs or {})
    feeds = {
      program.inputs[name].name: np.asarray(x, program.inputs[name].dtype)
      for name, x in (inputs or {}).items()
    }
    found = self._session.run(
      feeds, [*program.outputs.values()], program.operations
    )
    return dict(zip(program.outputs, found, strict=True))

  def _free(self) -> None:
    if self._session:
      self._session.close()
      self._session = None

  def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
    self._free()
    if not self._whole:
      return
    if kind is None and hash_code() == self._code:
      from palm_mtf.generation.inference.keep_programs import keep

      for sizes, programs in self._built.items():
        if path := self._path(sizes):
          keep(self._whole, programs, path)
    self._whole.__exit__(kind, *error)


@contextlib.contextmanager
def _opened(prefix: str) -> Iterator[bytes]:
  """Holds a checkpoint's files open; yields TensorFlow's prefix of them."""
  name = os.path.abspath(prefix).encode()
  _, number = open_weights(name, [])
  if number:
    raise OSError(int(number), os.strerror(number), prefix)
  try:
    yield find_opened_prefix(name)
  finally:
    close_weights(name)


def _prefixed(program: KeptProgram, prefix: str) -> KeptProgram:
  return KeptProgram(
    {
      name: x._replace(name=f"{prefix}/{x.name}")
      for name, x in program.inputs.items()
    },
    {name: f"{prefix}/{x}" for name, x in program.outputs.items()},
    [f"{prefix}/{x}" for x in program.operations],
  )
