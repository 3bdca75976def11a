# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's layers for `mesh_tensorflow.transformer`, registered for gin.

The layers use Mesh TensorFlow's variables, layouts and contexts. Importing this
package registers every name below with gin, in the module
`palm_mtf.unitransformer`; gin/mesh_tensorflow/palm.gin builds a Unitransformer
from these layers.
"""

import gin

from palm_mtf.unitransformer.layers import (
  Attention,
  Mlp,
  MultiQueryAttention,
  ParallelBlock,
  SwiGlu,
  sublayer_norm,
)

__all__ = [
  "Attention",
  "Mlp",
  "MultiQueryAttention",
  "ParallelBlock",
  "SwiGlu",
  "sublayer_norm",
]


# Let old gin files use the module name `palm_mtf.layers`. Add the names only to
# gin's map of exact names. If gin also had them in its tree of partial names,
# the bare name, such as `Mlp`, would be ambiguous.
_registry = gin.config._REGISTRY
for _name in __all__:
  for _old in (f"palm_mtf.layers.{_name}", f"layers.{_name}"):
    _registry._selector_map[_old] = _registry[
      f"palm_mtf.unitransformer.{_name}"
    ]
