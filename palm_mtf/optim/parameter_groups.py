# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of parameters: by PARAMETER_SCALE and WEIGHT_DECAY_ON."""

from collections.abc import Sequence

from palm_mtf.config.parameter_names import parsed

# The paper multiplies the learning rate by the root mean square of "the
# parameter matrix" and does not say which matrices the program has. With
# "variable" each is one. The published inference code of PaLM has three for all
# layers, and a trainer of such matrices takes one root mean square over each;
# "stacked" does the same. The norm scales of all layers are groups too, that of
# norm and that of mlp_norm.
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
  """Returns the positions in `names` that share root mean squares."""
  # ["layer_000/mlp/wi", "final_norm/scale", "layer_001/mlp/wi"], "stacked"
  # gives [[0, 2], [1]].
  groups: dict[str, list[int]] = {}
  for position, name in enumerate(names):
    key = name
    parameter = parsed(name)
    if parameter_scale == "stacked" and parameter.layer is not None:
      key = _STACKED_WITH.get(parameter.last, parameter.part)
    groups.setdefault(key, []).append(position)
  return list(groups.values())


def is_decayed(name: str, weight_decay_on: str) -> bool:
  """Whether a parameter decays, by WEIGHT_DECAY_ON."""
  if weight_decay_on == "all":
    return True
  if weight_decay_on == "all_but_scales":
    return not parsed(name).is_scale
  return parsed(name).is_kernel
