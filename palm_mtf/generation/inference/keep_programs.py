# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps the graph of a decoder's programs in the cache (kept_decoder.py)."""

import os
import zlib
from collections.abc import Mapping

from palm_mtf._tf import tf
from palm_mtf.checkpoints.variables import read_slice
from palm_mtf.generation.decode.generate_program import DecodePrograms
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.json_text import json_text
from palm_mtf.machine.cache_folder import CacheError, open_cache, warn_of
from palm_mtf.runtime.program import Program

_MOST_BYTES = 2**27  # of parameters that are read at the same time
_MOST_KEPT = 64  # newest graphs to keep; a graph takes some 100 kB
# Operations that need TensorFlow's package: they call Python, or code that XLA
# compiles and the package keeps.
_NEEDS_PACKAGE = {"PyFunc", "PyFuncStateless", "EagerPyFunc", "XlaLaunch"}
_XLA = "_XlaMustCompile", "_XlaCompile"


def keep(
  loaded: LoadedDecoder, weights_path: str, texts: Mapping[str, DecodePrograms]
) -> None:
  """Writes the graph of the weights, and those of texts, to the cache.

  `texts` is {path: programs}. A file says of a graph whether it needs
  TensorFlow's Python package; then the file has no graph.
  """
  if not loaded.session_config:
    for path in texts:
      _write(path, {}, tf.GraphDef())
    return
  prefix, values = _read_parameters(loaded)
  whole = loaded.client.graph.as_graph_def()
  _replace_variables(whole, values)
  layers = _join_small(loaded, values)
  names = [name for some in layers for name in some]
  weights = tf.graph_util.extract_sub_graph(whole, names)
  session = loaded.session_config.hex()
  described = {"session": session, "prefix": prefix.name, "layers": layers}
  _write(weights_path, described, weights)
  of_weights = {x.name for x in weights.node}
  for path, programs in texts.items():
    names = [name for each in programs for name in _names(each)]
    found = tf.graph_util.extract_sub_graph(whole, names)
    for node in found.node:
      # In a session, graphs share variables of the same name. Graphs must share
      # only the weights, so all other variables get names with the graph's.
      if node.op == "VarHandleOp" and node.name not in of_weights:
        node.attr["shared_name"].s += os.path.basename(path).encode()
    described = {x: _describe(y) for x, y in programs._asdict().items()}
    _write(path, described, found)


def _write(
  path: str, described: Mapping[str, object], graph: tf.GraphDef
) -> None:
  functions = graph.library.function
  every = [*graph.node, *(y for x in functions for y in x.node_def)]
  if any(x.op in _NEEDS_PACKAGE or {*_XLA} & {*x.attr} for x in every):
    described, graph = {}, tf.GraphDef()
  header = json_text(described).encode()
  content = header + b"\n" + graph.SerializeToString()
  folder, name = os.path.split(path)
  try:
    with open_cache(folder, make=True) as cache:
      cache.keep_newest(name, zlib.compress(content, 1), _MOST_KEPT)
  except CacheError as error:
    warn_of(error)


def _read_parameters(
  loaded: LoadedDecoder,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
  """Adds operations that read a checkpoint.

  Returns the placeholder for the checkpoint's prefix, and {name of a variable's
  operation: the value that is read}.
  """
  with loaded.client.graph.as_default(), tf.device("/device:cpu:0"):
    prefix = tf.placeholder(tf.string, [], "kept_prefix")
    return prefix, {
      part.variable.handle.op.name: read_slice(prefix, part)
      for layer in loaded.layers
      for (part,) in layer.slices.values()
    }


def _replace_variables(
  graph: tf.GraphDef, values: Mapping[str, tf.Tensor]
) -> None:
  """Replaces each read of a parameter's variable by the value in `values`."""
  for node in graph.node:
    if node.op == "ReadVariableOp" and node.input[0] in values:
      dtype = node.attr["dtype"].type
      node.op, node.input[0] = "Identity", values[node.input[0]].op.name
      node.attr.clear()
      node.attr["T"].type = dtype


def _join_small(
  loaded: LoadedDecoder, values: Mapping[str, tf.Tensor]
) -> list[list[str]]:
  """Returns the operations that make the weights, in parts.

  A part reads at most _MOST_BYTES of parameters, or has only one layer.
  """
  parts, num_bytes = [], 0
  for layer in loaded.layers:
    own = [x.variable for (x,) in layer.slices.values()]
    more = sum(x.shape.num_elements() * x.dtype.size for x in own)
    num_bytes += more
    if not parts or num_bytes > _MOST_BYTES:
      parts.append([])
      num_bytes = more
    # `prepare` waits for what frees the parameters, and that waits for the
    # operations that make the weights.
    made = {
      y.name: y for x in layer.prepare.control_inputs for y in x.control_inputs
    }
    parts[-1] += made
  return parts


def _names(program: Program) -> list[str]:
  tensors = [*program.inputs.values(), *dict(program.outputs).values()]
  return [x.op.name for x in tensors] + [x.name for x in program.operations]


def _describe(program: Program) -> dict[str, object]:
  return {
    "inputs": {
      name: [x.name, x.dtype.as_numpy_dtype.__name__, x.shape.as_list()]
      for name, x in program.inputs.items()
    },
    "outputs": {name: x.name for name, x in dict(program.outputs).items()},
    "operations": [x.name for x in program.operations],
  }
