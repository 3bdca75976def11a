# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes a run's first weights by pruning those of INIT_CHECKPOINT (PRUNE).

With SPARSITY, weights of the kernels of layers become 0 (zeros.py), and stay 0
in training (KEEP_ZEROS). Without it, each layer keeps only the heads, key heads
and channels of its MLP with the highest scores, and the run trains an ordinary
smaller model. A head, or a channel, is a set of inputs i of the last kernel w
of its branch, o or wo. Its score is the sum of w_ij^2 for "magnitude"; and for
"wanda" of w_ij^2 |X_i|^2, with the values X_i of input i in a text: the square
of what it adds to the residual stream, if inputs are uncorrelated. The score of
a key head is that of the heads that it keeps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf.accounting.optimizer_state import row_rank
from palm_mtf.architecture.block import model_of
from palm_mtf.architecture.parameters import (
  dimension_sizes,
  dims_in_layer,
  layer_name,
  parameter_shapes,
  parse_name,
)
from palm_mtf.compression.zeros import GROUP, set_zeros
from palm_mtf.config import Config, ModelConfig
from palm_mtf.errors import UserError

_CHOSEN = {"heads", "kv_heads", "d_ff"}  # dimensions that may become smaller


def check_pruning(config: Config, dense: ModelConfig) -> None:
  """Raises UserError if a run cannot prune the model `dense` to its own."""
  run, model = config.run, config.model
  before, after = dimension_sizes(dense), dimension_sizes(model)
  changed = {x for x in before if before[x] != after[x]}
  kernels = _kernels(model).items() if run.sparsity == "2:4" else ()
  odd = [x for x, shape in kernels if _matrices(x, shape)[1] % GROUP]
  most = dense.num_heads // (dense.num_kv_heads or 1)
  joined = {model.positions, model.qk_norm} & {"alibi", "rms_norm_all_heads"}
  whole, sizes = run.sparsity is None, "NUM_HEADS, NUM_KV_HEADS and D_FF"
  for why, is_wrong in {
    'adapt in the next run; set ADAPTER = "none"': model.adapter != "none",
    f"give at most the {sizes} of INIT_CHECKPOINT": any(
      before[x] < after[x] for x in _CHOSEN
    ),
    f"experts lose no channels; keep D_FF = {dense.d_ff}": (
      model.has_experts and changed - _CHOSEN
    ),
    f"{' and '.join(joined)} joins heads; keep NUM_HEADS = {dense.num_heads}": (
      "heads" in changed and joined
    ),
    f"a key head has at most {most} heads; lower NUM_HEADS": (
      model.num_heads > most * (model.num_kv_heads or 1)
    ),
    f"set SPARSITY = None, or keep {sizes} of INIT_CHECKPOINT": (
      changed and not whole
    ),
    f"set SPARSITY = 0.5, or lower one of {sizes}": whole and not changed,
    'no heads and channels are chosen so; set PRUNE = "wanda"': (
      whole and run.prune == "sparsegpt"
    ),
    "training would change the zeros; set KEEP_ZEROS = True": (
      not whole and not config.optimizer.keep_zeros
    ),
    f"inputs of {odd[:1]} are no multiple of {GROUP}; set SPARSITY = 0.5": odd,
  }.items():
    if is_wrong:
      raise UserError(
        f"PRUNE = {run.prune!r} and SPARSITY = {run.sparsity!r}: {why}."
      )


def prune(
  config: Config,
  dense: ModelConfig,
  read: Callable[[str], np.ndarray],
  statistics: Mapping[str, Any],
) -> dict[str, np.ndarray]:
  """Returns {parameter: value, float32} of those that pruning changes.

  Args:
    config: settings of the run.
    dense: the model of INIT_CHECKPOINT.
    read: reads its parameters by name.
    statistics: `ColumnStatistics` of its kernels; {} for "magnitude".
  """
  run, found = config.run, {}
  if run.sparsity is None:
    for i, layer in enumerate(model_of(dense).layers):
      kept, own = {}, f"{layer_name(i)}/"
      for each in (x.output for x in layer.branches):
        if each.inputs[0] in _CHOSEN:
          scores = np.square(read(own + each.part), dtype=np.float64).sum(-1)
          if statistics:
            scores *= statistics[own + each.part].sums.reshape(scores.shape)
          scores = scores.reshape(len(scores), -1).sum(1)
          kept |= _choose(each.inputs[0], scores, dense, config.model)
      for name, dims in dims_in_layer(dense, layer).items():
        if _CHOSEN.intersection(dims):
          value = read(own + name)
          for axis, dim in enumerate(dims):
            value = np.take(value, kept[dim], axis) if dim in kept else value
          found[own + name] = value
    return found
  for name, shape in _kernels(dense).items():
    matrices = read(name).reshape(_matrices(name, shape))
    inputs = [None] * len(matrices)
    if statistics:
      of, size = statistics[name], matrices.shape[1]
      inputs = of.sums.reshape(-1, size)
      if run.prune == "sparsegpt":
        inputs = of.hessian.reshape(-1, size, size)
    pruned = [
      set_zeros(w.T, run.prune, run.sparsity, x).T
      for w, x in zip(matrices, inputs, strict=True)
    ]
    found[name] = np.reshape(pruned, shape)
  return found


def _choose(
  dim: str, scores: np.ndarray, dense: ModelConfig, model: ModelConfig
) -> dict[str, np.ndarray]:
  """Returns {dimension: indices that `model` keeps, in ascending order}.

  `scores`, [heads] or [d_ff], are those of `dim`.
  """
  if dim == "d_ff":
    return {dim: _best(scores, model.d_ff)}
  groups = scores.reshape(dense.num_kv_heads or 1, -1)  # by key head
  num_groups = model.num_kv_heads or 1
  heads = [_best(x, model.num_heads // num_groups) for x in groups]
  of_groups = [x[i].sum() for x, i in zip(groups, heads, strict=True)]
  kept = _best(np.array(of_groups), num_groups)
  chosen = [i * groups.shape[1] + heads[i] for i in kept]
  return {"kv_heads": kept, "heads": np.concatenate(chosen)}


def _best(scores: np.ndarray, count: int) -> np.ndarray:
  return np.sort(np.argsort(-scores, kind="stable")[:count])


def _kernels(model: ModelConfig) -> dict[str, tuple[int, ...]]:
  shapes = parameter_shapes(model)
  return {x: y for x, y in shapes.items() if parse_name(x).is_masked}


def _matrices(name: str, shape: Sequence[int]) -> list[int]:
  """Returns [experts or 1, inputs, outputs] of a kernel."""
  begin, end = int(parse_name(name).is_expert), row_rank(name)
  return [math.prod(x) for x in (shape[:begin], shape[begin:end], shape[end:])]
