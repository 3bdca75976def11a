# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables that a model makes by `mtf.get_variable`, without their masters.

`adopted_variables` gives them what a `SlicedVariable` has, `initializer` and
`sizes`, so that meshes and the optimizer see no difference.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.variables import SlicedVariable, key_of


@dataclasses.dataclass(frozen=True)
class Drawn:
  """Draws with an initializer of TensorFlow, on every device the same."""

  initializer: Callable[..., tf.Tensor]
  seed: int  # of the run

  def full_value(self, name: str, shape: list[int]) -> tf.Tensor:
    """Returns the whole initial value of a variable, float32."""
    # TensorFlow's initializers draw by the number of operations in their graph.
    # In a graph of its own, a draw depends on (seed, name) alone.
    with tf.Graph().as_default() as graph:
      tf.set_random_seed((self.seed * 2**32 + key_of(name)) % 2**63)
      value = tf.identity(self.initializer(shape, dtype=tf.float32))
    (value,) = tf.import_graph_def(
      graph.as_graph_def(), return_elements=[value.name], name="first_value"
    )
    return value

  def slice_value(
    self, name: str, shape: list[int], begin: list[int], sizes: list[int]
  ) -> tf.Tensor:
    """Returns a slice of the initial value."""
    return tf.slice(self.full_value(name, shape), begin, sizes)


@dataclasses.dataclass(frozen=True)
class _NoMaster:
  """What `mtf.Variable` takes for its master, a variable of TensorFlow."""

  name: str
  initializer: Callable[..., tf.Tensor]


def _no_master(
  getter: Callable, name: str, initializer: object = None, **unused: object
) -> _NoMaster:
  # As tf.get_variable does: a class stands for its object, none for Glorot's.
  del getter, unused
  if initializer is None:
    initializer = tf.glorot_uniform_initializer
  if isinstance(initializer, type):
    initializer = initializer()
  return _NoMaster(f"{name}:0", initializer)


@contextlib.contextmanager
def adopted_variables(mesh: mtf.Mesh, seed: int) -> Iterator[None]:
  """Adopts the variables that its body makes on a mesh.

  Args:
    mesh: mesh of one pod.
    seed: seed of the first values, with the name of each variable.
  """
  graph = mesh.graph
  num_before = len(graph.all_variables)
  # mtf.get_variable looks for a name in all meshes of a graph; each pod has a
  # variable of each name.
  others, graph.name_to_variable = graph.name_to_variable, {}
  try:
    scope = tf.get_variable_scope()
    with tf.variable_scope(scope, custom_getter=_no_master):
      yield
  finally:
    graph.name_to_variable = others
  for variable in graph.all_variables[num_before:]:
    if not isinstance(variable, SlicedVariable):
      master = variable.get_master()
      variable.initializer = Drawn(master.initializer, seed)
      variable.sizes = variable.shape.to_integer_list
