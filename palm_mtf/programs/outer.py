# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs of DiLoCo's syncs, on CPUs, GPUs and TPUs.

The outer parameters and their momentum are float32 variables in the memory of
the hosts, with equal values on all pods. A sync of a fragment has three calls:

send      each pod encodes what it sends, from its own and outer parameters
exchange  each pod computes the mean of what all pods have sent
merge     each pod does the outer update, and takes the new outer parameters

A call hands its tensors to the next one in TensorFlow's Stage, not in variables
of the pods, so that training steps can run during `exchange` (OVERLAP_STEPS).
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.architecture.parameters import parse_name, sent_dtype
from palm_mtf.config import ExchangeConfig
from palm_mtf.mesh.slices import Pods, Slice, variables_of
from palm_mtf.ops.variables import keep_variable
from palm_mtf.optim.outer import (
  Sent,
  decode,
  encode,
  mean_of,
  merge,
  outer_step,
)
from palm_mtf.runtime.program import Program, state_of

# A name by which the client orders calls that use the outer parameters.
_OUTER = frozenset({"outer parameters"})


def fragment_of(name: str, num_fragments: int) -> int:
  """Returns the number of the fragment that has a parameter."""
  layer, kind = parse_name(name).layer, parse_name(name).kind
  if layer is None:
    return 0 if kind == "embedding" else num_fragments - 1
  return layer % num_fragments


class _Region(NamedTuple):
  """A region of a trained variable on a pod, and its outer state."""

  holders: Sequence[Slice]  # of all devices that hold the region
  outer: tf.Variable
  momentum: tf.Variable
  # The parameters of a stack that this stands for, [rows]; None for all.
  rows: Sequence[int] | None = None

  @property
  def near(self) -> str:
    return self.holders[0].near

  @property
  def is_state(self) -> bool:
    return parse_name(self.holders[0].names[0]).is_state

  def begin(self) -> list[tf.Operation]:
    """Returns operations that copy the pod's parameters to the outer state."""
    with tf.device(self.near):
      own, zeros = self.holders[0].read(), tf.zeros_like(self.momentum)
      return [self.outer.assign(own).op, self.momentum.assign(zeros).op]

  def take(self, value: tf.Tensor) -> tf.Tensor:
    """Returns the rows of `value` that this stands for."""
    return value if self.rows is None else tf.gather(value, self.rows)

  def put(
    self, variable: tf.Variable, before: tf.Tensor, value: tf.Tensor
  ) -> tf.Operation:
    """Returns the operation that sets these rows of a variable to `value`.

    `before` is the whole variable's value, whose other rows stay.
    """
    if self.rows is not None:
      rows = [[x] for x in self.rows]
      value = tf.tensor_scatter_nd_update(before, rows, value)
    return variable.assign(value).op


@dataclasses.dataclass(frozen=True)
class OuterPrograms:
  """The programs of syncs, and the variables that checkpoints hold."""

  begin: Program  # sets outer parameters to the pods' parameters, momentum to 0
  # `send`, `exchange` and `merge`: the calls of a sync, for each fragment.
  send: Sequence[Program]
  exchange: Sequence[Program]
  merge: Sequence[Program]
  # Keeps the pods' own parameters aside, and sets them to the outer ones.
  show: Program
  hide: Program  # undoes `show`
  # Each pod's variables that are equal on all pods: outer parameters under the
  # parameters' names, their momentum, and what is not trained.
  equal: Pods
  # Each pod's own parameters and optimizer slots, by "pods/<pod>/<name>".
  own: Pods

  def saved(self, num_pods: int) -> dict[str, list[Slice]]:
    """Returns all variables by their names in a checkpoint of `num_pods` pods.

    A pod that the checkpoint lacks has the name of another pod, whose state it
    takes.
    """
    found: dict[str, list[Slice]] = {
      key: [x for pod in self.equal for x in pod[key]] for key in self.equal[0]
    }
    for pod, slices in enumerate(self.own):
      own, held = f"pods/{pod}/", f"pods/{pod % num_pods}/"
      for key, parts in slices.items():
        names = [x.replace(own, held, 1) for x in parts[0].names]
        # Restoring programs are cached by key, so other names need other keys.
        found[key if own == held else f"{key} from {held}"] = [
          dataclasses.replace(x, names=names) for x in parts
        ]
    return found


def build_outer(
  pods: Pods, parameters: Iterable[str], config: ExchangeConfig
) -> OuterPrograms:
  """Builds the programs of syncs in the current graph.

  Args:
    pods: each pod's variables, by name in checkpoints.
    parameters: names of the trained parameters.
    config: fragments, outer update and OUTER_DTYPE.
  """
  return _Builder(pods, frozenset(parameters), config).build()


class _Builder:
  """Builds the programs of `build_outer`."""

  def __init__(
    self, pods: Pods, trained: frozenset[str], config: ExchangeConfig
  ):
    self._pods, self._trained, self._config = pods, trained, config
    self._of_slice: dict[int, _Region] = {}  # by id of the slice
    self._regions = [[*self._find_regions(x)] for x in range(len(pods))]

  def build(self) -> OuterPrograms:
    """Builds all programs."""
    state = state_of(variables_of(self._pods)) | _OUTER
    every = functools.partial(Program, reads=state, writes=state)
    syncs = [self._build_sync(x) for x in range(self._config.fragments)]
    saved = [self._find_saved(x) for x in range(len(self._pods))]
    show, hide = self._build_show()
    begin = [x for pod in self._regions for y in pod for x in y.begin()]
    return OuterPrograms(
      begin=every(operations=begin),
      send=[Program(operations=x, reads=state) for x, _, _ in syncs],
      exchange=[Program(operations=x, reads=_OUTER) for _, x, _ in syncs],
      merge=[every(operations=x) for _, _, x in syncs],
      show=every(operations=show),
      hide=every(operations=hide),
      equal=[x for x, _ in saved],
      own=[x for _, x in saved],
    )

  def _find_regions(self, pod: int) -> Iterator[_Region]:
    for key, parts in self._pods[pod].items():
      if self._trained.isdisjoint(parts[0].names):
        continue
      holders = collections.defaultdict(list)
      for number, part in enumerate(parts):
        # Each device with only padding has a separate region.
        holders[number if part.spec is None else part.spec].append(part)
      for number, of_region in enumerate(holders.values()):
        name = f"outer_{pod}/{key}/{number}"
        region = _Region(of_region, *_make_variables(name, of_region[0]))
        self._of_slice |= dict.fromkeys(map(id, of_region), region)
        yield region

  def _find_saved(self, pod: int) -> tuple[dict, dict]:
    """Returns a pod's items of `OuterPrograms.equal` and `own`."""
    equal, own, prefix = {}, {}, f"pods/{pod}/"
    for key, parts in self._pods[pod].items():
      regions = [self._of_slice.get(id(x)) for x in parts]
      if all(regions):
        names = [f"{x}/outer_momentum" for x in parts[0].names]
        pairs = [*zip(parts, regions, strict=True)]
        equal[key] = [
          dataclasses.replace(x, variable=y.outer) for x, y in pairs
        ]
        equal[names[0]] = [
          dataclasses.replace(x, variable=y.momentum, names=names)
          for x, y in pairs
        ]
      elif key.rpartition("/")[0] not in self._trained:  # not a slot
        equal[key] = [*parts]
        continue
      names = [prefix + x for x in parts[0].names]
      own[prefix + key] = [dataclasses.replace(x, names=names) for x in parts]
    return equal, own

  def _build_show(self) -> tuple[list, list]:
    """Returns the operations of `show` and `hide`."""
    shown, hidden = [], []
    for pod, regions in enumerate(self._regions):
      by_device = collections.defaultdict(list)
      for region in regions:
        for x in region.holders:
          by_device[x.near].append((region, x))
      for device, pairs in by_device.items():
        kept = _Handover(f"own_{pod}", device, [x.read() for _, x in pairs])
        for (region, x), own in zip(pairs, kept.taken, strict=True):
          with tf.control_dependencies([kept.put]), tf.device(region.near):
            outer = tf.identity(region.outer.value())
          shown.append(x.variable.assign(outer).op)
          hidden.append(x.variable.assign(own).op)
    return shown, hidden

  def _find_parts(self, pod: int, fragment: int) -> dict[str, list[_Region]]:
    """Returns {device: parts of the fragment whose outer state it has}."""
    found = collections.defaultdict(list)
    for region in self._regions[pod]:
      names, count = region.holders[0].names, self._config.fragments
      rows = [
        row
        for row, name in enumerate(names)
        if name in self._trained and fragment_of(name, count) == fragment
      ]
      if rows:
        part = region if len(rows) == len(names) else region._replace(rows=rows)
        found[region.near].append(part)
    return found

  def _build_sync(self, fragment: int) -> tuple[list, list, list]:
    """Returns the operations of `send`, `exchange` and `merge`."""
    sends, exchanges, merges = [], [], []
    by_pod = [self._find_parts(x, fragment) for x in range(len(self._pods))]
    sent = []  # per pod and device, what the pod sends of each part
    for pod, by_device in enumerate(by_pod):
      sent.append([])
      for device, parts in by_device.items():
        with tf.device(device):
          values = [self._encode(x) for x in parts]
        kept = _Handover(f"sent_{fragment}_{pod}", device, values)
        sends.append(kept.put)
        sent[-1].append(kept.taken)
    for pod, by_device in enumerate(by_pod):
      for number, (device, parts) in enumerate(by_device.items()):
        of_pods = zip(*(x[number] for x in sent), strict=True)
        with tf.device(device):
          means = [
            self._find_mean(x, y) for x, y in zip(parts, of_pods, strict=True)
          ]
        kept = _Handover(f"mean_{fragment}_{pod}", device, means)
        exchanges.append(kept.put)
        for part, mean in zip(parts, kept.taken, strict=True):
          merges += self._merge(part, mean)
    return sends, exchanges, merges

  def _dtype(self, part: _Region) -> str:
    return sent_dtype(part.holders[0].names[0], self._config.outer_dtype)

  def _encode(self, part: _Region) -> Sent:
    own = part.take(part.holders[0].read())
    return encode(part.take(part.outer.value()), own, self._dtype(part))

  def _find_mean(self, part: _Region, sent: Sequence[Sent]) -> tf.Tensor:
    outer = part.take(part.outer.value())
    return mean_of([decode(outer, x, self._dtype(part)) for x in sent])

  def _merge(self, part: _Region, mean: tf.Tensor) -> list[tf.Operation]:
    config = self._config
    rates = config.outer_lr, config.outer_momentum
    if part.is_state:  # the loads of experts are measured
      rates = 1.0, 0.0
    held = part.outer, part.momentum
    with tf.device(part.near):
      before = [x.value() for x in held]
      after = outer_step(*map(part.take, before), mean, *rates)
      # Both of `after` have to be computed before the outer parameters change.
      with tf.control_dependencies(after):
        done = [*map(part.put, held, before, after)]
    for x in part.holders:
      own = x.read()
      with tf.device(x.near):
        new = merge(part.take(own), after[0], config.merge_alpha)
        done.append(part.put(x.variable, own, new))
    return done


def _make_variables(name: str, part: Slice) -> list[tf.Variable]:
  """Makes the outer parameters and the momentum of a region."""

  def make() -> tf.Tensor:
    shape = part.variable.shape.as_list()
    return tf.raw_ops.Empty(shape=shape, dtype=tf.float32, init=True)

  names = name, f"{name}/momentum"
  return [keep_variable(x, part.near, make) for x in names]


class _Handover:
  """Keeps tensors on a device from one call of a sync to the next.

  Attributes:
    put: operation that keeps them.
    taken: the kept tensors, in the structure of those given.
  """

  def __init__(self, name: str, device: str, values: Sequence[object]):
    """Takes tensors in nested structures; `name` is unique on the device."""
    flat = [x for x in tf.nest.flatten([*values]) if x is not None]
    held = {"dtypes": [x.dtype for x in flat], "shared_name": f"diloco_{name}"}
    with tf.device(device):
      # Remove what a call has left if a rewind kept the next call from running.
      with tf.control_dependencies([tf.raw_ops.StageClear(**held)]):
        self.put = tf.raw_ops.Stage(
          values=flat, shared_name=held["shared_name"]
        )
      taken = tf.raw_ops.Unstage(**held)
    for value, x in zip(taken, flat, strict=True):
      value.set_shape(x.shape)
    left = iter(taken)
    self.taken = tf.nest.map_structure(
      lambda x: None if x is None else next(left), [*values]
    )
