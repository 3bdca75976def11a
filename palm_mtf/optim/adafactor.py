# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adafactor without factorization, as PaLM trained with (PaLM 5; Shazeer 2018).

For a variable p with gradient g, clipped by the global norm, at step k:

  v  <-  beta2 v + (1 - beta2) (g^2 + 1e-30)         beta2 = 1 - k^-0.8
  u   =  g / sqrt(v)
  u  <-  u / max(1, RMS(u) / UPDATE_CLIP)
  m  <-  beta1 m + (1 - beta1) lr max(1e-3, RMS(p)) u
  p  <-  p (1 - lr^2) - m                            lr = min(1e-2, 1/sqrt(k))

It is Adam with the learning rate relative to the size of each variable. The
moments are float32 and start at zero; v needs no bias correction because
beta2 is 0 at the first step. Two passes over memory do all of it: one for the
two root mean squares, one for the three assignments. A step whose gradients are
not all finite numbers leaves all three as they were.
"""

from collections.abc import Sequence

from palm_mtf._tf import fused, mtf, tf
from palm_mtf.config import AdafactorConfig
from palm_mtf.variables import Fill, sliced_variable
from palm_mtf.whole_slice import split_axes

GRADIENT_FLOOR = 1e-30  # epsilon_1 of the Adafactor paper
SCALE_FLOOR = 1e-3  # epsilon_2


def _second_moment(g, v, decay):
  return v + (tf.square(g) + GRADIENT_FLOOR - v) * decay


@fused
def _sums_of_squares(p, v, g, clip, decay):
  """Returns the sums of squares of p and u over the slice, [] float32 each."""
  g = tf.cast(g, tf.float32) * clip
  u_squared = tf.square(g) / _second_moment(g, v, decay)
  return tf.reduce_sum(tf.square(p)), tf.reduce_sum(u_squared)


@fused
def _next_values(p, v, m, g, scalars):
  """Returns p, v and m after the step, the shape of the slice each."""
  slots = p, v, m
  clip, decay, beta1, step_size, shrink = tf.unstack(scalars)
  g = tf.cast(g, tf.float32) * clip
  v = _second_moment(g, v, decay)
  m = beta1 * m + step_size * g * tf.math.rsqrt(v)
  new = p * shrink - m, v, m
  is_good = tf.math.is_finite(clip)
  return tuple(
    tf.where(is_good, x, old) for x, old in zip(new, slots, strict=True)
  )


class AdafactorUpdate(mtf.Operation):
  """Updates one variable and its two moments in place."""

  def __init__(
    self,
    variable: mtf.Variable,
    gradient: mtf.Tensor,
    scalars: Sequence[mtf.Tensor],
    config: AdafactorConfig,
  ):
    """Makes the moments `<variable>/second_moment` and `<variable>/momentum`.

    Args:
      variable: what is trained.
      gradient: its gradient, the variable's shape, any float dtype.
      scalars: clip factor, learning rate and 1 - beta2, [] float32 each.
      config: beta1, update_clip and weight_decay_exponent are read.
    """
    self._slots = [
      sliced_variable(
        variable.mesh,
        f"{variable.name}/{slot}",
        variable.shape,
        initializer=Fill(0.0),
        trainable=False,
      ).operation
      for slot in ("second_moment", "momentum")
    ]
    super().__init__([gradient, *scalars], name=f"{variable.name}/update")
    self._variable = variable
    self._config = config

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to the assignments of all slices, as one operation."""
    mesh_impl = lowering.mesh_impl(self)
    slots = [
      lowering.variables[x].laid_out_tensor
      for x in (self._variable, *self._slots)
    ]
    p, v, m = (mesh_impl.slicewise(tf.convert_to_tensor, x) for x in slots)
    g, clip, learning_rate, decay = (lowering.tensors[x] for x in self.inputs)
    # all-reduce of two numbers, over the axes that split the variable
    axes = split_axes(mesh_impl, self._variable.shape.dims)
    sums = [
      mesh_impl.allreduce(x, axes, "SUM")
      for x in mesh_impl.slicewise(_sums_of_squares, p, v, g, clip, decay)
    ]
    scalars = mesh_impl.slicewise(
      self._scalars, clip, decay, learning_rate, *sums
    )
    new_values = mesh_impl.slicewise(_next_values, p, v, m, g, scalars)
    assigned = [
      mesh_impl.slicewise(lambda slot, new: slot.assign(new).op, slot, new)
      for slot, new in zip(slots, new_values, strict=True)
    ]
    lowering.operations[self] = tf.group([x.all_slices for x in assigned])

  def _scalars(self, clip, decay, learning_rate, p_squares, u_squares):
    """Returns what `_next_values` multiplies by, [5] float32."""
    config, count = self._config, float(self._variable.size)
    scale = tf.maximum(SCALE_FLOOR, tf.sqrt(p_squares / count))
    update_rms = tf.sqrt(u_squares / count)
    update_clip = tf.maximum(1.0, update_rms / config.update_clip)
    step_size = (1.0 - config.beta1) * learning_rate * scale / update_clip
    shrink = 1.0 - learning_rate**config.weight_decay_exponent
    return tf.stack([clip, decay, config.beta1, step_size, shrink])
