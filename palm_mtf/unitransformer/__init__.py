# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's layers for `mesh_tensorflow.transformer`, registered for gin.

Their variables, layouts and contexts are Mesh TensorFlow's own. Importing this
package makes every name below a gin configurable of the module
`palm_mtf.unitransformer`; gin/mesh_tensorflow/palm.gin builds a Unitransformer
of them.
"""

import gin

from palm_mtf.unitransformer.layers import (
  MultiQueryAttention,
  ParallelBlock,
  SwiGlu,
  sublayer_norm,
)

__all__ = ["MultiQueryAttention", "ParallelBlock", "SwiGlu", "sublayer_norm"]


def _keep_old_gin_names() -> None:
  """Lets gin files still name the configurables by `palm_mtf.layers`."""
  registry = gin.config._REGISTRY
  for name in __all__:
    # Only exact matches: a second entry in the tree of partial names would make
    # the bare name ambiguous.
    for old in (f"palm_mtf.layers.{name}", f"layers.{name}"):
      registry._selector_map[old] = registry[f"palm_mtf.unitransformer.{name}"]


_keep_old_gin_names()
