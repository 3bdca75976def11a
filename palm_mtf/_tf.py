# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The only module of palm_mtf that imports TensorFlow and Mesh TensorFlow.

Everything in palm_mtf runs inside an explicit `tf.Graph`, so that a user's code
in the same process can use eager TensorFlow.

In palm_mtf's own processes, the import prints no notices and skips packages
that TensorFlow does not need (machine/process.py). In other processes, this
module imports TensorFlow as usual.
"""

import contextlib

from palm_mtf.machine.compiled_code import share_compiled_code
from palm_mtf.machine.host_memory import release_file_pages
from palm_mtf.machine.process import is_owned, lean_import

with lean_import() if is_owned() else contextlib.nullcontext():
  import tensorflow as tf2
  import tensorflow.compat.v1 as tf
  from tensorflow.compiler.tf2xla.ops import gen_xla_ops
  from tensorflow.compiler.xla import xla_data_pb2
  from tensorflow.core.framework import attr_value_pb2
  from tensorflow.core.protobuf import config_pb2
  from tensorflow.python.eager import context
  from tensorflow.python.eager.polymorphic_function import atomic_function
  from tensorflow.python.framework import kernels, ops
  from tensorflow.python.ops import control_flow_util, resource_variable_ops


import mesh_tensorflow as mtf

if is_owned():
  release_file_pages()
  tf.logging.set_verbosity(tf.logging.ERROR)
share_compiled_code(tf.io.gfile)


# SeqIO's code needs eager mode even where a tf.Graph is the default.
eager_mode = context.eager_mode


__all__ = [
  "atomic_function",
  "attr_value_pb2",
  "config_pb2",
  "control_flow_util",
  "eager_mode",
  "gen_xla_ops",
  "kernels",
  "mtf",
  "ops",
  "resource_variable_ops",
  "tf",
  "tf2",
  "xla_data_pb2",
]
