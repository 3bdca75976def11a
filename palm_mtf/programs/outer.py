# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs of DiLoCo's syncs, which work on the slices of any executor.

The outer parameters and their momentum are float32 variables in the memory of
the hosts, with equal values on all pods. A sync of a fragment has three calls:

send      each pod: what it sends, from its own and the outer parameters
exchange  each pod: the mean of what all pods have sent
merge     each pod: the outer update; own parameters take the outer ones

The calls hand tensors over by TensorFlow's Stage, so that `exchange` shares no
state with training steps, which run meanwhile if OVERLAP_STEPS is above 0.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from palm_mtf._tf import tf
from palm_mtf.architecture.parameters import parse_name
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

OUTER_MOMENTUM = "outer_momentum"  # slot of a parameter in checkpoints
_OUTER = frozenset({"outer parameters"})  # a state for the order of calls


def fragment_of(name: str, num_fragments: int) -> int:
  """Returns the number of the fragment that has a parameter."""
  parsed = parse_name(name)
  if parsed.layer is not None:
    return parsed.layer % num_fragments
  return 0 if parsed.kind == "embedding" else num_fragments - 1


def name_in_pod(pod: int, name: str) -> str:
  """Returns the name in checkpoints of a variable that differs between pods."""
  return f"pods/{pod}/{name}"


class _Region(NamedTuple):
  """A region of a trained variable on a pod, and its outer state."""

  holders: Sequence[Slice]  # of all devices that hold the region
  outer: tf.Variable
  momentum: tf.Variable

  @property
  def near(self) -> str:
    return self.holders[0].near


class _Item(NamedTuple):
  """One parameter's part of a region; a stack has several parameters."""

  region: _Region
  row: int

  @property
  def name(self) -> str:
    return self.region.holders[0].names[self.row]

  def of(self, value: tf.Tensor) -> tf.Tensor:
    """Returns the parameter's part of a value of the region."""
    return self.region.holders[0].rows(value)[self.row]


@dataclasses.dataclass(frozen=True)
class OuterPrograms:
  """The programs of syncs, and the variables that checkpoints hold.

  Attributes:
    begin: sets outer parameters to the pods' parameters, momentum to 0.
    send, exchange, merge: the calls of a sync, for each fragment.
    show: keeps the pods' own parameters aside, and sets them to the outer ones.
    hide: undoes `show`.
    equal: each pod's variables that are equal on all pods: outer parameters
      under the parameters' names, their momentum, and what is not trained.
    own: each pod's own parameters and optimizer slots, by `name_in_pod`.
  """

  begin: Program
  send: Sequence[Program]
  exchange: Sequence[Program]
  merge: Sequence[Program]
  show: Program
  hide: Program
  equal: Pods
  own: Pods

  @property
  def saved(self) -> dict[str, list[Slice]]:
    """Slices of all variables in a checkpoint, by name."""
    return self.saved_from(len(self.own))

  def saved_from(self, num_pods: int) -> dict[str, list[Slice]]:
    """Returns `saved`, to restore a checkpoint of a run on `num_pods` pods.

    Pods that the checkpoint lacks begin with the state of another pod.
    """
    found: dict[str, list[Slice]] = {
      key: [x for pod in self.equal for x in pod[key]] for key in self.equal[0]
    }
    for pod, slices in enumerate(self.own):
      before, after = (name_in_pod(x, "") for x in (pod % num_pods, pod))
      for key, parts in slices.items():
        names = [before + x.removeprefix(after) for x in parts[0].names]
        # Keys differ if names do, because restoring programs are kept by keys.
        found[f"{key} from {before}" if pod >= num_pods else key] = [
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
    self._regions = [self._find_regions(x) for x in range(len(pods))]
    self._state = state_of(variables_of(pods)) | _OUTER

  def build(self) -> OuterPrograms:
    """Builds all programs."""
    fragments = range(self._config.fragments)
    begun, shown, hidden = [], [], []
    for pod, by_key in enumerate(self._regions):
      for region in itertools.chain(*by_key.values()):
        with tf.device(region.near):
          begun.append(region.outer.assign(region.holders[0].read()).op)
          zeros = tf.zeros_like(region.momentum)
          begun.append(region.momentum.assign(zeros).op)
      for device, pairs in self._holders(pod).items():
        own = [x.read() for _, x in pairs]
        kept = _Handover(f"own_{pod}", device)
        with tf.control_dependencies([kept.put(own)]):
          for region, x in pairs:
            with tf.device(region.near):
              outer = tf.identity(region.outer.value())
            shown.append(x.variable.assign(outer).op)
        for (_, x), value in zip(pairs, kept.take(own), strict=True):
          hidden.append(x.variable.assign(value).op)
    every = functools.partial(Program, reads=self._state, writes=self._state)
    built = [self._build_sync(x) for x in fragments]
    return OuterPrograms(
      begin=every(operations=begun),
      send=[Program(operations=x, reads=self._state) for x, _, _ in built],
      exchange=[Program(operations=x, reads=_OUTER) for _, x, _ in built],
      merge=[every(operations=x) for _, _, x in built],
      show=every(operations=shown),
      hide=every(operations=hidden),
      equal=[self._equal_of(x) for x in range(len(self._pods))],
      own=[self._own_of(x) for x in range(len(self._pods))],
    )

  def _find_regions(self, pod: int) -> dict[str, list[_Region]]:
    """Returns {name of a trained variable: its regions on a pod}."""
    found: dict[str, list[_Region]] = {}
    for key, parts in self._pods[pod].items():
      if self._trained.isdisjoint(parts[0].names):
        continue
      holders: dict[object, list[Slice]] = {}
      for number, part in enumerate(parts):
        # Each device with only padding has a separate region.
        region = number if part.spec is None else part.spec
        holders.setdefault(region, []).append(part)
      found[key] = [
        _Region(x, *_make_variables(f"outer_{pod}/{key}/{number}", x[0]))
        for number, x in enumerate(holders.values())
      ]
    return found

  def _holders(self, pod: int) -> dict[str, list[tuple[_Region, Slice]]]:
    """Returns {device: slices near it, with their regions}."""
    found: dict[str, list[tuple[_Region, Slice]]] = {}
    for region in itertools.chain(*self._regions[pod].values()):
      for x in region.holders:
        found.setdefault(x.near, []).append((region, x))
    return found

  def _items(self, pod: int, fragment: int) -> dict[str, list[_Item]]:
    """Returns {device: the fragment's parameters whose outer state it has}."""
    found: dict[str, list[_Item]] = {}
    for region in itertools.chain(*self._regions[pod].values()):
      for row, name in enumerate(region.holders[0].names):
        is_in = fragment_of(name, self._config.fragments) == fragment
        if name in self._trained and is_in:
          found.setdefault(region.near, []).append(_Item(region, row))
    return found

  def _build_sync(self, fragment: int) -> tuple[list, list, list]:
    """Returns the operations of `send`, `exchange` and `merge`."""
    sends, exchanges, merges = [], [], []
    by_pod = [self._items(x, fragment) for x in range(len(self._pods))]
    sent: list[list[list[Sent]]] = []  # per pod and device, of each parameter
    for pod, by_device in enumerate(by_pod):
      sent.append([])
      for device, items in by_device.items():
        with tf.device(device):
          values = [self._encode(x) for x in items]
        handover = _Handover(f"sent_{fragment}_{pod}", device)
        sends.append(handover.put(values))
        sent[-1].append(handover.take(values))
    for pod, by_device in enumerate(by_pod):
      for number, (device, items) in enumerate(by_device.items()):
        with tf.device(device):
          means = [
            mean_of(
              [
                decode(x.of(x.region.outer.value()), y, self._dtype(x.name))
                for y in of_pods
              ]
            )
            for x, *of_pods in zip(
              items, *(of_pod[number] for of_pod in sent), strict=True
            )
          ]
        handover = _Handover(f"mean_{fragment}_{pod}", device)
        exchanges.append(handover.put(means))
        merges += self._merge(items, handover.take(means))
    return sends, exchanges, merges

  def _dtype(self, name: str) -> str:
    # The loads of experts are measured, and stay exact.
    return "float32" if parse_name(name).is_state else self._config.outer_dtype

  def _encode(self, item: _Item) -> Sent:
    region = item.region
    local = tf.identity(item.of(region.holders[0].read()))
    return encode(item.of(region.outer.value()), local, self._dtype(item.name))

  def _merge(
    self, items: Sequence[_Item], means: Sequence[tf.Tensor]
  ) -> list[tf.Operation]:
    """Returns operations that update the regions of a device's parameters."""
    by_region: dict[int, dict[int, tf.Tensor]] = {}
    regions = {id(x.region): x.region for x in items}
    for item, mean in zip(items, means, strict=True):
      by_region.setdefault(id(item.region), {})[item.row] = mean
    operations = []
    for key, by_row in by_region.items():
      operations += self._merge_region(regions[key], by_row)
    return operations

  def _merge_region(
    self, region: _Region, means: Mapping[int, tf.Tensor]
  ) -> list[tf.Operation]:
    config, (first, *_) = self._config, region.holders
    with tf.device(region.near):
      outer, momentum = (
        first.rows(x.value()) for x in (region.outer, region.momentum)
      )
      for row, mean in means.items():
        # Loads of experts are measured, so their mean needs no momentum.
        is_state = parse_name(first.names[row]).is_state
        rates = (
          (1.0, 0.0)
          if is_state
          else (
            config.outer_lr,
            config.outer_momentum,
          )
        )
        outer[row], momentum[row] = outer_step(
          outer[row], momentum[row], mean, *rates
        )
      values = [first.stack_rows(x) for x in (outer, momentum)]
      with tf.control_dependencies(values):  # both read the outer parameters
        held = region.outer, region.momentum
        operations = [x.assign(y).op for x, y in zip(held, values, strict=True)]
    for x in region.holders:
      own = x.rows(x.read())
      with tf.device(x.near):
        for row in means:
          own[row] = merge(own[row], outer[row], config.merge_alpha)
        operations.append(x.variable.assign(x.stack_rows(own)).op)
    return operations

  def _equal_of(self, pod: int) -> dict[str, list[Slice]]:
    found = {}
    for key, parts in self._pods[pod].items():
      if key not in self._regions[pod]:
        if not self._is_slot(key):
          found[key] = [*parts]
        continue
      names = [f"{x}/{OUTER_MOMENTUM}" for x in parts[0].names]
      of_part = {
        id(x): region
        for region in self._regions[pod][key]
        for x in region.holders
      }
      found[key] = [
        dataclasses.replace(x, variable=of_part[id(x)].outer) for x in parts
      ]
      found[names[0]] = [
        dataclasses.replace(x, variable=of_part[id(x)].momentum, names=names)
        for x in parts
      ]
    return found

  def _own_of(self, pod: int) -> dict[str, list[Slice]]:
    return {
      name_in_pod(pod, key): [
        dataclasses.replace(x, names=[name_in_pod(pod, y) for y in x.names])
        for x in parts
      ]
      for key, parts in self._pods[pod].items()
      if key in self._regions[pod] or self._is_slot(key)
    }

  def _is_slot(self, key: str) -> bool:
    return key.rpartition("/")[0] in self._trained


def _make_variables(name: str, part: Slice) -> list[tf.Variable]:
  """Makes the outer parameters and the momentum of a region."""

  def make() -> tf.Tensor:
    return tf.raw_ops.Empty(
      shape=part.variable.shape.as_list(), dtype=tf.float32, init=True
    )

  return [
    keep_variable(f"{x}_{name}", part.near, make)
    for x in ("params", "momentum")
  ]


class _Handover:
  """Keeps tensors on a device from one call to a later one."""

  def __init__(self, name: str, device: str):
    # `name` is unique on the device.
    self._device, self._name = device, f"palm_mtf_{name}"

  def put(self, values: Sequence[object]) -> tf.Operation:
    """Returns the operation that keeps tensors, in nested structures."""
    flat = _tensors_in(values)
    held = {"dtypes": [x.dtype for x in flat], "shared_name": self._name}
    with tf.device(self._device):
      # A call whose successor never ran, before a rewind, left its tensors.
      with tf.control_dependencies([tf.raw_ops.StageClear(**held)]):
        return tf.raw_ops.Stage(values=flat, shared_name=self._name)

  def take(self, like: Sequence[object]) -> list:
    """Returns the kept tensors, in the structure of `like`."""
    flat = _tensors_in(like)
    with tf.device(self._device):
      taken = tf.raw_ops.Unstage(
        dtypes=[x.dtype for x in flat], shared_name=self._name
      )
    for value, x in zip(taken, flat, strict=True):
      value.set_shape(x.shape)
    left = iter(taken)
    return tf.nest.map_structure(
      lambda x: None if x is None else next(left), [*like]
    )


def _tensors_in(values: Sequence[object]) -> list[tf.Tensor]:
  return [x for x in tf.nest.flatten([*values]) if x is not None]
