# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures which executor multiplies fastest by packed kernels, once.

In bfloat16, the choice changes the last bits of logits. Therefore a machine
measures once, and all later processes read the choice from the cache, so that a
text does not change from process to process. Without a cache, nothing is
measured, and the CPU's flags choose (`BY_FLAGS`).
"""

import dataclasses
import fcntl
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from palm_mtf import __version__
from palm_mtf._tf import tf
from palm_mtf.json_text import json_text
from palm_mtf.machine.cache_folder import (
  CacheError,
  cache_path,
  open_cache,
  warn_of,
)
from palm_mtf.machine.processors import bfloat16_flags, gpu_capabilities
from palm_mtf.mesh.session import session_config
from palm_mtf.native import decoding
from palm_mtf.native.decoding import BY_FLAGS, NEVER, PackedKernel, Products
from palm_mtf.native.operations import operations_built_with
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program

_INNER, _OUTER = 1024, 8192  # of a kernel of 16 MiB in bfloat16
_STEP_ROWS, _PROMPT_ROWS = (1, 16), (64, 256)
_REPEATS = 8
# oneDNN has to be this many times as fast as the C++ products, because with
# oneDNN a server reads each prompt whole, while the other texts wait.
_ONEDNN_GAIN = 2.0


class Case(NamedTuple):
  """A product whose time is measured."""

  executor: str  # "vectors" (AVX-512, AVX2), "tiles" (AMX) or "oneDNN"
  dtype: str  # of the weights, "bfloat16" or "int8"
  rows: int


def fastest_products() -> Products:
  """Returns the products that are fastest on this machine, for any kernel."""
  built_with = operations_built_with()
  if built_with == "none" or not bfloat16_flags() or gpu_capabilities():
    return BY_FLAGS  # there is only one executor
  versions = __version__, importlib.metadata.version("tensorflow")
  key = built_with, *versions, *Products._fields
  folder, name = os.path.split(cache_path("products", *key))
  try:
    with open_cache(folder, make=True) as cache:
      kept = cache.load([name])
      if not kept:
        # Of several processes, one measures; the others wait for its choice.
        try:
          fcntl.flock(cache.descriptor, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
          raise CacheError(f"{folder}: {error.strerror}") from None
        kept = cache.load([name])
      if kept:
        return Products(**json.loads(kept[name]))
      found = choose_products(measure_products("amx" in built_with))
      cache.keep(name, json_text(found._asdict()).encode())
      return found
  except CacheError as error:
    warn_of(error)
    return BY_FLAGS


def choose_products(secs: Mapping[Case, float]) -> Products:
  """Chooses products by the seconds that each case takes.

  Without AMX, `secs` has no case with tiles, and the choice uses no tiles.
  """

  def fastest(rows: Sequence[int]) -> str:
    executors = [
      x for x in ("vectors", "tiles") if Case(x, "bfloat16", rows[0]) in secs
    ]
    # A product of times, so that the ratio at each number of rows counts
    # equally.
    return min(
      executors,
      key=lambda x: math.prod(secs[Case(x, "bfloat16", n)] for n in rows),
    )

  def least_rows(executor: str, other: str, dtype: str, gain: float) -> int:
    # Returns the least number of rows from which `executor` is at least `gain`
    # times as fast as `other`.
    least = NEVER
    for rows in reversed((*_STEP_ROWS, *_PROMPT_ROWS)):
      took = secs.get(Case(executor, dtype, rows), math.inf)
      if took * gain > secs.get(Case(other, dtype, rows), 0.0):
        break
      least = rows
    return least

  of_prompts = fastest(_PROMPT_ROWS)
  return Products(
    steps=1 if fastest(_STEP_ROWS) == "tiles" else NEVER,
    prompts=1 if of_prompts == "tiles" else NEVER,
    int8=least_rows("tiles", "vectors", "int8", 1.0),
    onednn=least_rows("oneDNN", of_prompts, "bfloat16", _ONEDNN_GAIN),
  )


def measure_products(has_tiles: bool) -> dict[Case, float]:
  """Returns the seconds that each executor takes for some products."""
  session = tf.Session(graph=tf.Graph(), config=session_config(1))
  with Client(session) as client, client.graph.as_default():

    def keep(x: tf.Tensor) -> tf.Tensor:
      variable = tf.Variable(x, use_resource=True)
      client.call(Program(operations=[variable.initializer]))
      return variable.read_value()

    all_rows = *_STEP_ROWS, *_PROMPT_ROWS
    inputs = {n: keep(tf.ones([n, _INNER], tf.bfloat16)) for n in all_rows}
    weights = keep(tf.ones([_INNER, _OUTER]))
    programs = {}
    for dtype in (tf.bfloat16, tf.int8) if has_tiles else (tf.bfloat16,):
      panels = keep(decoding.pack([weights], dtype).panels)
      kernel = PackedKernel(panels, _OUTER, dtype)
      for n, x in inputs.items():
        found = {}
        for name, least in {"vectors": NEVER, "tiles": 1}.items():
          products = Products(prompts=least, int8=least)
          w = dataclasses.replace(kernel, products=products)
          found[name] = decoding.multiply([x], w, x.dtype, is_step=False)
        if not has_tiles:
          del found["tiles"]
        if dtype == tf.bfloat16 and n in _PROMPT_ROWS:
          found["oneDNN"] = tf.matmul(x, decoding.unpack(kernel, _INNER))
        for name, y in found.items():
          programs[Case(name, dtype.name, n)] = Program(operations=[y.op])
    secs = dict.fromkeys(programs, math.inf)
    for i in range(_REPEATS + 1):
      for case, program in programs.items():
        start = time.perf_counter()
        client.call(program)
        if i:  # the first call prepares the operations
          # The fastest call counts, because other programs slow calls down.
          secs[case] = min(secs[case], time.perf_counter() - start)
    return secs
