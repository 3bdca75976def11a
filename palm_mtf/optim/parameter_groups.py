# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which parameters are treated alike: by PARAMETER_SCALE and WEIGHT_DECAY_ON.

The paper multiplies the learning rate by the root mean square of "the parameter
matrix" and does not say which matrices the program has. Here each is one, which
is PARAMETER_SCALE = "variable". The published inference code of PaLM has three
for all layers, and a trainer of such matrices takes one root mean square over
each; PARAMETER_SCALE = "stacked" does the same with ours:

  q, wi_gate, wi   of all layers
  k, v             of all layers
  o, wo            of all layers
  the norm scales  of all layers, mlp_norm apart from norm
"""

from collections.abc import Sequence

from palm_mtf.config.parameter_names import parsed

_STACKED_WITH = {
  "q": "q_wi",
  "wi_gate": "q_wi",
  "wi": "q_wi",
  "k": "kv",
  "v": "kv",
  "o": "o_wo",
  "wo": "o_wo",
}


def scale_groups(names: Sequence[str], parameter_scale: str) -> list[list[int]]:
  """Returns the positions of the parameters that share root mean squares.

  Args:
    names: names of the parameters.
    parameter_scale: PARAMETER_SCALE.

  Example:
    ["layer_000/mlp/wi", "final_norm/scale", "layer_001/mlp/wi"], "stacked"
    gives [[0, 2], [1]].
  """
  groups: dict[str, list[int]] = {}
  for position, name in enumerate(names):
    key = name
    parameter = parsed(name)
    if parameter_scale == "stacked" and parameter.layer is not None:
      key = _STACKED_WITH.get(parameter.last, parameter.part)
    groups.setdefault(key, []).append(position)
  return list(groups.values())


def is_decayed(name: str, weight_decay_on: str) -> bool:
  """Returns whether weights of a parameter decay, by WEIGHT_DECAY_ON."""
  if weight_decay_on == "all":
    return True
  if weight_decay_on == "all_but_scales":
    return not parsed(name).is_scale
  return parsed(name).is_kernel
