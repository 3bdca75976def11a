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
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import palm_mtf
from palm_mtf.checkpoints.manifest import Checkpoint
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
from palm_mtf.native.build import BuildError, is_compiled, open_library

if TYPE_CHECKING:  # at run time, these imports would load TensorFlow
  from palm_mtf.generation.decode.generate_program import DecodePrograms
  from palm_mtf.generation.inference.sessions import LoadedDecoder
  from palm_mtf.runtime.program import Program

_logger = logging.getLogger(__name__)
_WEIGHTS = "weights"  # begins the names in the graph that makes the weights


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
    and config.decode.num_beams == 1  # XLA compiles steps of a beam search
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


def kept_path(kind: str, code: str, *settings: object) -> str:
  """Returns the path of a graph in the cache's folder `kind`.

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
  return cache_path(kind, code, products, *versions, *map(repr, settings))


def _read_products() -> bytes:
  """Returns the files of executors/host/products.py; they choose operations."""
  folder = os.path.dirname(cache_path("products"))
  try:
    with open_cache(folder) as cache:
      return b"".join(cache.read(x) or b"" for x in sorted(cache.names()))
  except (FileNotFoundError, CacheError):
    return b""  # nothing is measured, or not yet


def read_kept(path: str) -> tuple[dict[str, Any], bytes] | None:
  """Returns the description of a graph of the cache, and its GraphDef.

  Both are empty for a graph that needs TensorFlow's package. Returns None if
  there is no file, or if it is damaged.
  """
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
  return json.loads(header), graph


class KeptDecoder(contextlib.AbstractContextManager):
  """Decoding weights and programs of texts, from kept graphs if there are any.

  Has what `Generator` needs of a `LoadedDecoder`. If a batch has no kept graph,
  a `LoadedDecoder` builds its programs, which are kept at the end. As a context
  manager, frees the weights at the end.
  """

  num_slices = 1
  num_virtual = 0

  def __init__(self, checkpoint: Checkpoint, config: Config):
    """Begins to load a run's checkpoint, whose files are held open.

    `can_keep` of `config` is true. Another thread loads the weights, so that
    the caller can read the vocabulary meanwhile.
    """
    self._checkpoint, self._run = checkpoint, config
    self.config, self.client = config.model, self
    self._code: str | None = None
    self._is_ending = False
    self._session: tensorflow_c.Session | None = None
    self._whole: LoadedDecoder | None = None
    # {sizes: programs}, which `_session` runs, or `_whole` has built.
    self._built: dict[PromptBatch, Any] = {}
    self._missing: set[PromptBatch] = set()  # to keep at the end
    self._thread = futures.ThreadPoolExecutor(1)
    self._loading = self._thread.submit(self._load_weights)

  def _load_weights(self) -> None:
    # While the operations are compiled, nothing is kept, and an error or Ctrl-C
    # must not wait for this thread.
    if not is_compiled():
      return
    # Hash the code at the start, because this process continues to run it even
    # if another version is installed meanwhile.
    self._code = hash_code()
    kept = self._code and read_kept(self._weights_path(self._code))
    if not kept or not kept[0]:
      return
    described, graph = kept
    path, _ = open_library()
    self._session = tensorflow_c.Session(bytes.fromhex(described["session"]))
    tensorflow_c.load_operations(path)
    self._session.add_graph(graph, _WEIGHTS)
    prefix = os.path.abspath(self._checkpoint.prefix).encode()
    feeds = {f"{_WEIGHTS}/{described['prefix']}": prefix}
    for names in described["layers"]:
      if self._is_ending:
        return
      targets = [f"{_WEIGHTS}/{x}" for x in names]
      self._session.run(feeds, targets=targets)

  def _weights_path(self, code: str) -> str:
    run, dtype = self._run, self._run.decode.weight_dtype
    return kept_path("weights", code, run.model, run.mesh_layout, dtype)

  def _texts_path(self, code: str, sizes: PromptBatch) -> str:
    run = self._run
    return kept_path(
      "texts", code, run.model, run.mesh_layout, run.decode, sizes
    )

  def build_texts(
    self, decode: DecodeConfig, sizes: PromptBatch
  ) -> "DecodePrograms | KeptPrograms":
    """Returns the programs for batches of one size; `decode` is the run's."""
    if sizes not in self._built:
      found = self._find(sizes)
      self._built[sizes] = found or self._build(decode, sizes)
    return self._built[sizes]

  def _find(self, sizes: PromptBatch) -> KeptPrograms | None:
    futures.wait([self._loading])
    if not (self._code or self._whole):
      self._code = hash_code()
    if not self._code:
      return None
    prefix = f"texts_{len(self._built)}"
    kept = read_kept(self._texts_path(self._code, sizes))
    if kept and not kept[0]:
      return None
    try:
      self._loading.result()
      if kept and self._session:
        described, graph = kept
        self._session.add_graph(graph, prefix)
        return KeptPrograms(
          **{name: _prefixed(x, prefix) for name, x in described.items()}
        )
    except (tensorflow_c.TensorFlowError, OSError) as error:
      # The caller then tries TensorFlow's package, whose errors users see.
      _logger.debug("kept graphs cannot be used: %s", error)
    if not (kept and self._whole):
      self._missing.add(sizes)
    return None

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
    self._is_ending = True
    self._thread.shutdown()
    if self._session:
      self._session.close()
      self._session = None

  def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
    self._free()
    if not self._whole:
      return
    code = self._code
    if kind is None and code and self._missing and hash_code() == code:
      from palm_mtf.generation.inference.keep_programs import keep

      # Not the paths of the start, because building may measure products.
      texts = {self._texts_path(code, x): self._built[x] for x in self._missing}
      keep(self._whole, self._weights_path(code), texts)
    self._whole.__exit__(kind, *error)


def _prefixed(described: Mapping[str, Any], prefix: str) -> KeptProgram:
  return KeptProgram(
    {
      name: KeptTensor(f"{prefix}/{x}", *rest)
      for name, (x, *rest) in described["inputs"].items()
    },
    {name: f"{prefix}/{x}" for name, x in described["outputs"].items()},
    [f"{prefix}/{x}" for x in described["operations"]],
  )
