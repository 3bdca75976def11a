# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables that exist only as slices, with the same values in every layout."""

import abc
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence

from palm_mtf._tf import mtf, resource_variable_ops, tf

# Mesh TensorFlow's own variable keeps a full copy, the master, besides the
# slices that the mesh uses, and its random values differ between processes. A
# SlicedVariable has no master: each device holds only its slice, the initial
# value is a pure function of (seed, name, position), and checkpoints are
# written from slices and restored into slices.


def key_of(name: str) -> int:
  """Returns a variable's random seed, a hash of its name, 32 bits signed."""
  digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
  return int.from_bytes(digest, "little", signed=True)


class Initializer(abc.ABC):
  """Computes the initial value of a variable."""

  @abc.abstractmethod
  def full_value(self, name: str, shape: list[int]) -> tf.Tensor:
    """Returns the whole initial value of a variable, float32."""

  def slice_value(
    self, name: str, shape: list[int], begin: list[int], sizes: list[int]
  ) -> tf.Tensor:
    """Returns a slice (see tf.slice) of the initial value, float32."""
    if 0 in sizes:
      return tf.zeros(sizes)
    # Each device draws the whole value, so that no layout changes the values.
    whole = self.full_value(name, shape)
    return whole if sizes == shape else tf.slice(whole, begin, sizes)


@dataclasses.dataclass(frozen=True)
class Normal(Initializer):
  """Draws from N(0, stddev^2), not truncated (PaLM, section 5)."""

  stddev: float  # 1/sqrt(fan-in) for kernels, 1 for embeddings
  seed: int  # SEED of the run

  def full_value(self, name: str, shape: list[int]) -> tf.Tensor:
    """Returns the whole initial value of a variable, float32."""
    return self.stddev * tf.random.stateless_normal(
      shape, seed=[self.seed % 2**31, key_of(name)]
    )


@dataclasses.dataclass(frozen=True)
class Fill(Initializer):
  """Fills a variable with one number."""

  number: float

  def full_value(self, name: str, shape: list[int]) -> tf.Tensor:
    """Returns the whole initial value of a variable, float32."""
    del name
    return tf.fill(shape, self.number)

  def slice_value(
    self, name: str, shape: list[int], begin: list[int], sizes: list[int]
  ) -> tf.Tensor:
    """Returns a slice (see tf.slice) of the initial value, float32."""
    del shape, begin
    if self.number == 0:
      # tf.fill is not used, because TensorFlow would turn zeros of up to 10 MB
      # into constants and keep several copies besides the variables.
      return tf.raw_ops.Empty(shape=sizes, dtype=tf.float32, init=True)
    return self.full_value(name, sizes)


class SlicedVariable(mtf.Variable):
  """A variable without a full copy; `Lowering.variables` has its slices.

  Attributes:
    saved_dtype: dtype in checkpoints, by default that of the slices.
    state_rate: by how much a step changes a state of a router
      (optim/router_state.py).
  """

  state_rate = 0.0

  def __init__(
    self,
    mesh: mtf.Mesh,
    name: str,
    shape: mtf.Shape,
    *,
    initializer: Initializer,
    stored_dtype: tf.DType = tf.float32,
    activation_dtype: tf.DType = tf.float32,
    trainable: bool = True,
    sizes: Sequence[int] | None = None,
  ):
    """Adds the variable to the graph.

    Args:
      name: name in a checkpoint, the same in every pod and layout.
      stored_dtype: dtype of the slices.
      activation_dtype: dtype of `value`.
      trainable: False for variables of the optimizer.
      sizes: sizes of the dimensions without the zeros that pad their ends; None
        if there is no padding.
    """
    # mtf.Variable's constructor is not called, because it makes a full copy.
    mtf.Operation.__init__(self, [], mesh, name=name)
    # Undo mtf.Operation's renaming: a variable has the same name in every pod.
    self._name = name
    self._dtype = mtf.VariableDType(
      stored_dtype, stored_dtype, activation_dtype
    )
    self._trainable = trainable
    self.initializer = initializer
    self.saved_dtype = stored_dtype
    self.sizes = list(sizes or shape.to_integer_list)
    self._outputs = [mtf.Tensor(self, shape, activation_dtype)]
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_all_dimensions_as_splittable()
    )
    self.graph.all_variables.append(self)
    if trainable:
      self.graph.trainable_variables.append(self)

  def recompute(self, x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
    """Returns the value, cast again after `signal` to save the memory of x."""
    del x  # there is only one output to recompute
    return _Cast(self, signal).outputs[0]


class _Cast(mtf.Operation):
  """Casts a variable again for the backward pass, once `signal` is computed."""

  def __init__(self, variable: SlicedVariable, signal: mtf.Tensor):
    super().__init__([signal], name=f"{variable.name}/again")
    self._variable = variable
    self.variables = [variable]
    (value,) = variable.outputs
    self._outputs = [mtf.Tensor(self, value.shape, value.dtype)]

  def lower(self, lowering: mtf.Lowering) -> None:
    impl, (value,) = lowering.mesh_impl(self), self.outputs
    stored = lowering.variables[self._variable].laid_out_tensor
    stored = impl.delay(stored, lowering.tensors[self.inputs[0]])
    lowering.set_tensor_lowering(
      value, impl.slicewise(tf.cast, stored, value.dtype)
    )


def variables_read(operation: mtf.Operation) -> list[mtf.Variable]:
  """Returns variables that an operation reads besides its listed inputs."""
  if isinstance(operation, mtf.Variable):
    return [operation]
  return getattr(operation, "variables", [])


def make_variable(value: tf.Tensor, name: str) -> tf.Variable:
  """Makes a TensorFlow variable with initial `value` on the current device."""
  # tf.Variable would add more operations, and look for variables in all that
  # `value` depends on, which takes longer than all else.
  variable = resource_variable_ops.UninitializedVariable(
    shape=value.shape, dtype=value.dtype, name=name, trainable=False
  )
  with tf.name_scope(variable.op.name + "/"):
    variable._initializer_op = tf.raw_ops.AssignVariableOp(
      resource=variable.handle, value=value
    )
  return variable


def keep_variable(
  name: str, device: str, make_value: Callable[[], tf.Tensor]
) -> tf.Variable:
  """Returns a device's variable in the current graph; makes it if missing.

  Several Mesh TensorFlow programs are built in one graph. They share variables.

  Args:
    name: name of the variable, unique on the device.
    device: TensorFlow's name of the device.
    make_value: builds the initial value; `device` is then the current device.
  """
  # The graph's collection holds one item, {(name, device): variable}.
  held = tf.get_collection_ref("palm_mtf_variables")
  if not held:
    held.append({})
  (variables,) = held
  if (name, device) not in variables:
    with tf.device(device):
      variables[name, device] = make_variable(make_value(), name)
  return variables[name, device]


@dataclasses.dataclass(frozen=True)
class Drawn(Initializer):
  """Initial values from a TensorFlow initializer, equal on every device."""

  initializer: Callable[..., tf.Tensor]
  seed: int  # SEED of the run

  def full_value(self, name: str, shape: list[int]) -> tf.Tensor:
    """Returns the whole initial value of a variable, float32."""
    # The values of a TensorFlow initializer depend on the number of operations
    # in its graph. In a separate graph the values depend only on (seed, name).
    with tf.Graph().as_default() as graph:
      tf.set_random_seed((self.seed * 2**32 + key_of(name)) % 2**63)
      value = tf.identity(self.initializer(shape, dtype=tf.float32))
    (value,) = tf.import_graph_def(
      graph.as_graph_def(), return_elements=[value.name], name="first_value"
    )
    return value


@dataclasses.dataclass(frozen=True)
class _NoMaster:
  """Stands for an `mtf.Variable`'s master, which would be a full copy."""

  name: str
  initializer: Callable[..., tf.Tensor]


def _no_master(
  getter: Callable, name: str, initializer: object = None, **unused: object
) -> _NoMaster:
  # As in tf.get_variable, `initializer` may be a class; None is Glorot uniform.
  del getter, unused
  if initializer is None:
    initializer = tf.glorot_uniform_initializer
  if isinstance(initializer, type):
    initializer = initializer()
  return _NoMaster(f"{name}:0", initializer)


@contextlib.contextmanager
def adopt_variables(mesh: mtf.Mesh, seed: int) -> Iterator[None]:
  """Makes mtf.Variables that a user's function adds work as SlicedVariables.

  The function runs in the `with` body. Its variables get no full copy (master).
  Their initial values depend on `seed` and their names.
  """
  graph = mesh.graph
  num_before = len(graph.all_variables)
  # mtf.get_variable looks up a name in all meshes of a graph. Hide the
  # variables of other pods' meshes, because they have the same names.
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
      variable.saved_dtype = variable.slice_dtype
      variable.sizes = variable.shape.to_integer_list
