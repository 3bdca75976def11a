# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's layers for `mesh_tensorflow.transformer`, registered for gin.

The layers use Mesh TensorFlow's variables, layouts and contexts. Importing this
package registers every name below with gin, in the module
`palm_mtf.unitransformer`; gin/mesh_tensorflow/palm.gin builds a Unitransformer
from these layers.
"""

from palm_mtf.unitransformer.encoder_decoder import bitransformer
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
  "bitransformer",
  "sublayer_norm",
]
