# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of parameters: PARAMETER_SCALE, WEIGHT_DECAY_ON, NORM_SCALE."""

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


def center_of(name: str, norm_scale: str) -> float:
  """Returns the number that a parameter decays towards, by NORM_SCALE."""
  # Google's published code stores the scale of a norm minus one. Its optimizer
  # then works on scale - 1, and so does ours; checkpoints hold the scale itself
  # under either setting.
  is_centered = norm_scale == "zero_centered" and parsed(name).is_scale
  return 1.0 if is_centered else 0.0
