# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's layers for `mesh_tensorflow.transformer`, registered for gin.

Their variables, layouts and contexts are Mesh TensorFlow's own. Importing this
package makes every name below a gin configurable of the module
`palm_mtf.layers`; gin/mesh_tensorflow/palm.gin builds a Unitransformer of them.
"""

from palm_mtf.layers.multi_query_attention import MultiQueryAttention
from palm_mtf.layers.norm import sublayer_norm
from palm_mtf.layers.parallel_block import ParallelBlock
from palm_mtf.layers.swiglu import SwiGlu

__all__ = ["MultiQueryAttention", "ParallelBlock", "SwiGlu", "sublayer_norm"]
