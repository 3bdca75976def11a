# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs for TPUs and for CPUs compute the same and move the same bytes.

There is no TPU here: `tests/tpu_simulation.py` runs whole programs on the CPU.
"""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.communication import step_bytes
from palm_mtf.checkpoints.processes import CheckpointProcesses
from palm_mtf.checkpoints.variables import build_restorer, build_writer
from palm_mtf.checkpoints.weight_files import close_weights, open_weights
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.slices import names_of
from palm_mtf.mesh.tpu.devices import tpu_devices, tpu_topology
from palm_mtf.programs.features import ServerFeatures
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.processes import Process
from palm_mtf.training.variable_checks import (
  build_fingerprints,
  build_finite_check,
)
from tests.mtf_testing import (
  LAYOUTS,
  PALM_OPTIMIZER,
  SINGLE,
  random_examples,
  small_config,
)
from tests.tpu_simulation import counts, in_tpu_program, simulated
from tools.traffic import needed, traffic

TWO_D = LAYOUTS["PaLM's 2D"]
ALL = LAYOUTS["all over data and model"]
FSDP = LAYOUTS["fully sharded"]
BATCH_SIZE = 16
NUM_STEPS = 2


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


def tiny_config(**changes):
  return small_config(**{"num_layers": 1, **changes})


def mesh_of(layout, tpu="v4-8", **changes):
  mesh_shape, rules = layout
  return MeshLayout(mesh_shape=mesh_shape, layout=rules, tpu=tpu, **changes)


def build(
  config,
  mesh,
  num_pods=1,
  optimizer=PALM_OPTIMIZER,
  features=("inputs", "targets", "segments", "loss_weights", "prefix"),
):
  """Returns a program in a separate graph."""
  devices = None
  if mesh.tpu:
    where = tpu_slice(mesh.tpu)
    jobs = [f"pod_{i}" for i in range(num_pods)] if num_pods > 1 else [None]
    topologies = [tpu_topology(where)] * num_pods
    devices = tpu_devices(
      mesh, where, topologies, jobs=jobs, client="/job:client/device:cpu:0"
    )
  with tf.Graph().as_default() as graph:
    program = build_train_program(
      config,
      mesh,
      optimizer,
      batch_size=BATCH_SIZE,
      seed=3,
      pods=PodsConfig(num_pods=num_pods),
      devices=devices,
      features=features,
    )
  return graph, program


class Run:
  """Trains with a program, in its graph or in a rewritten copy."""

  def __init__(self, graph, program, values):
    self._graph, self.program = graph, program
    self.values = values
    self.session = tf.Session(graph=graph, config=session_config(1))
    self.session.run(self._here(program.initialize))

  def _here(self, x):
    return self._graph.as_graph_element(x.name)

  def _feed(self, batch, step):
    """Yields the feeds of each microbatch of all pods."""
    program = self.program
    shares = {name: np.split(x, len(program.pods)) for name, x in batch.items()}
    for i in range(program.num_microbatches):
      feed = {program.step: step, program.microbatch: i}
      for number, pod in enumerate(
        [] if program.batches is not None else program.pods
      ):
        for name, tensor in pod.features.items():
          parts = np.split(shares[name][number], program.num_microbatches)
          feed[tensor] = parts[i]
      yield {self._here(x): value for x, value in feed.items()}

  def step(self, batch, step):
    """Returns the metrics of a step."""
    program = self.program
    *others, last = self._feed(batch, step)
    for feed in others:
      for pod in program.pods:
        self.session.run(self._here(pod.stages[0].forward), feed)
    metrics = {name: self._here(x) for name, x in program.metrics.items()}
    done = self._here(program.update)
    return self.session.run([metrics, done], last)[0]

  def loss(self, batch):
    """Returns the loss of each pod's first microbatch, and its weight."""
    feed, *_ = self._feed(batch, 0)
    asked = [[x.loss, x.weight_sum] for x in self.program.pods]
    asked = tf.nest.map_structure(self._here, asked)
    return self.session.run(asked, feed)

  def is_finite(self, batch):
    """Returns whether a step with a batch of one microbatch is finite."""
    (feed,) = self._feed(batch, 1)
    return self.session.run(self._here(self.program.is_finite), feed)

  def fetch(self, tensors, feed=()):
    """Returns the values of a structure of tensors."""
    feed = {self._here(x): value for x, value in dict(feed).items()}
    return self.session.run(tf.nest.map_structure(self._here, tensors), feed)

  def slices(self, pod):
    """Returns the slices of every variable of a pod, by device."""
    return self.fetch(self.values[pod])


def run_of(config, mesh, extra=None, **changes):
  """Returns a run of a program, and what `extra` builds in its graph."""
  graph, program = build(config, mesh, **changes)
  with graph.as_default():
    values = [read_by_name(pod.slices) for pod in program.pods]
    built = extra(program) if extra else None
  if mesh.tpu:
    graph = simulated(graph, mesh.steps_per_loop, mesh.num_microbatches - 1)
  run = Run(graph, program, values)
  return (run, built) if extra else run


def read_by_name(slices):
  """Returns the slices of every variable, by device."""
  values = collections.defaultdict(list)
  for part in itertools.chain.from_iterable(slices.values()):
    for name, row in zip(part.names, part.rows(part.read()), strict=True):
      values[name].append(row)
  return values


@pytest.mark.parametrize(
  ("layout", "changes", "num_microbatches", "num_pods"),
  [
    slow(ALL, {"num_layers": 2}, 2, 1),
    slow(TWO_D, {"remat": "layer", "block": "serial"}, 1, 1),
    (FSDP, {"remat": "attention"}, 1, 2),
    slow(FSDP, {"remat": "attention", "num_layers": 2}, 1, 2),
    slow(("model:4", "vocab:model,heads:model"), {"norm": "rms_norm"}, 1, 1),
    slow(TWO_D, {"attention": "multi_head", "num_layers": 2}, 2, 2),
  ],
)
def test_a_simulated_tpu_step_is_that_of_one_cpu(
  layout, changes, num_microbatches, num_pods
):
  config = tiny_config(vocab_size=43, **changes)
  mesh = mesh_of(layout, num_microbatches=num_microbatches)
  tpu = run_of(config, mesh, num_pods=num_pods)
  one = run_of(
    config, dataclasses.replace(SINGLE, num_microbatches=num_microbatches)
  )
  for step in range(NUM_STEPS):
    batch = random_examples(config, BATCH_SIZE, seed=step)
    actual, expected = (run.step(batch, step) for run in (tpu, one))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
      np.testing.assert_allclose(actual[name], value, rtol=2e-5, err_msg=name)
  for number in range(1, num_pods):  # pods hold the same bits
    for name, parts in tpu.slices(number).items():
      np.testing.assert_equal(parts, tpu.slices(0)[name], err_msg=name)


@pytest.mark.slow
def test_a_pods_host_reads_the_rows_that_it_is_not_fed():
  config, mesh = tiny_config(), mesh_of(FSDP, num_microbatches=2)
  batch = random_examples(config, BATCH_SIZE, seed=0)

  def rows(part, num_parts):
    return [np.split(x, num_parts)[part] for x in batch.values()]

  def read(host, batches, step, part, num_parts):
    dtypes = [tf.as_dtype(x.dtype) for x in batch.values()]
    return tf.numpy_function(rows, [part, num_parts], dtypes)

  both = ServerFeatures([*batch], read), [*batch]
  runs = [run_of(config, mesh, num_pods=2, features=x) for x in both]
  actual, expected = (run.step(batch, 0) for run in runs)
  assert actual == expected


def test_the_loss_of_other_batches_is_that_of_one_cpu():
  config = tiny_config()
  batch = random_examples(config, BATCH_SIZE, seed=5)
  (actual,) = run_of(config, mesh_of(TWO_D)).loss(batch)
  (expected,) = run_of(config, SINGLE).loss(batch)
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.slow
def test_dropout_drops_the_same_numbers_as_on_one_cpu():
  config = tiny_config()
  optimizer = dataclasses.replace(PALM_OPTIMIZER, dropout=0.5)
  batch = random_examples(config, BATCH_SIZE, seed=5)
  losses = [
    run_of(config, mesh, optimizer=optimizer).step(batch, 0)["loss"]
    for mesh in (mesh_of(TWO_D), SINGLE)
  ]
  np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
  ("tpu", "mesh_shape", "num_hosts"),
  [slow("v4-8", TWO_D[0], 1), slow("v4-16", "data:4,model:2", 2)],
)
def test_first_weights_are_the_bits_of_a_cpu(tpu, mesh_shape, num_hosts):
  config = tiny_config(vocab_size=43, num_layers=2)
  mesh = mesh_of((mesh_shape, TWO_D[1]), tpu)
  assert tpu_slice(tpu).num_hosts == num_hosts  # each draws its own
  on_cpus = run_of(config, dataclasses.replace(mesh, tpu="")).slices(0)
  on_tpu = run_of(config, mesh).slices(0)
  assert on_tpu.keys() == on_cpus.keys()
  for name, parts in on_cpus.items():
    np.testing.assert_equal(on_tpu[name], parts, err_msg=name)


def saving_of(program, path="no/such/checkpoint"):
  """Returns operations that read, copy and inspect a program's variables."""
  pods = [x.slices for x in program.pods]
  hosts = CheckpointProcesses(Process(program.devices.client))
  return {
    "restore": build_restorer(pods, tf.constant(path), hosts),
    "fingerprints": [build_fingerprints(x) for x in pods],
    "finite": build_finite_check(program.slices),
    "names": names_of(program.slices),
    "writer": build_writer(pods, hosts),
  }


def save(run, saving, path):
  writer = saving["writer"]
  run.fetch(writer.copy)
  run.fetch(writer.sealed_files, {writer.prefix: path})


@pytest.mark.slow
def test_checkpoints_cross_between_tpus_and_a_cpu(tmp_path):
  config = tiny_config(vocab_size=43, num_layers=2)
  of_cpu, of_tpus = str(tmp_path / "cpu"), str(tmp_path / "tpus")
  cpu, saving = run_of(config, SINGLE, saving_of)
  cpu.step(random_examples(config, BATCH_SIZE, seed=0), 0)
  save(cpu, saving, of_cpu)
  tpus, saving = run_of(
    config, mesh_of(TWO_D), lambda x: saving_of(x, of_cpu), num_pods=2
  )
  open_weights(of_cpu.encode(), [])
  tpus.fetch(saving["restore"])
  close_weights(of_cpu.encode())
  save(tpus, saving, of_tpus)
  readers = [tf.train.load_checkpoint(x) for x in (of_cpu, of_tpus)]
  shapes, again = (x.get_variable_to_shape_map() for x in readers)
  assert again == shapes
  for name in shapes:
    first, second = (x.get_tensor(name) for x in readers)
    np.testing.assert_equal(second, first, err_msg=name)
  assert sorted(saving["names"]) == sorted(shapes)
  assert tpus.fetch(saving["finite"]).tolist() == [True] * len(shapes)
  first, second = tpus.fetch(saving["fingerprints"])
  np.testing.assert_equal(second, first)
  assert len(set(first.tolist())) == len(shapes)


@pytest.mark.slow
def test_what_is_not_finite_or_not_the_same_is_named_in_a_stack():
  config = tiny_config(num_layers=2)
  run, saving = run_of(config, mesh_of(TWO_D), saving_of, num_pods=2)
  name = "layer_001/mlp/wi/momentum"
  (part,) = (
    x
    for x in run.program.slices["layer_000/mlp/wi/momentum"]
    if x.variable.name.endswith("slice_2:0")
  )
  value = np.zeros(part.variable.shape.as_list(), np.float32)
  value[part.names.index(name)].ravel()[-1] = np.inf
  setter = part.variable.initializer
  run.fetch(setter, {setter.inputs[1]: value})
  at = saving["names"].index(name)
  assert np.flatnonzero(~run.fetch(saving["finite"])).tolist() == [at]
  first, second = run.fetch(saving["fingerprints"])
  assert np.flatnonzero(first != second).tolist() == [at]


@pytest.mark.slow
def test_a_step_that_is_not_finite_raises_and_changes_nothing():
  config = tiny_config(num_layers=2)
  run = run_of(config, mesh_of(ALL))
  batch = random_examples(config, BATCH_SIZE, seed=0)
  run.step(batch, 0)
  before = run.slices(0)
  bad = {**batch, "loss_weights": np.full_like(batch["loss_weights"], np.inf)}
  with pytest.raises(tf.errors.InvalidArgumentError):
    run.step(bad, 1)
  assert not run.is_finite(bad)
  for name, parts in run.slices(0).items():
    np.testing.assert_equal(parts, before[name], err_msg=name)
  assert run.is_finite(batch) and np.isfinite(run.step(batch, 1)["loss"])


@pytest.mark.parametrize(
  ("layout", "changes", "num_microbatches", "num_pods", "num_separate"),
  [
    (ALL, {"attention": "multi_head"}, 2, 1, 0),
    (FSDP, {}, 1, 1, 10),
    slow(TWO_D, {"remat": "layer"}, 2, 1, 0),
    (TWO_D, {"remat": "attention"}, 1, 2, 0),
  ],
)
def test_a_step_moves_the_bytes_of_the_closed_form(
  layout, changes, num_microbatches, num_pods, num_separate
):
  """If all is split alike, `num_separate` squares are fetched separately."""
  config = tiny_config(**changes)
  mesh = mesh_of(layout, num_microbatches=num_microbatches)
  of_one_pod = step_bytes(
    config,
    mesh,
    PALM_OPTIMIZER,
    pod_batch_size=BATCH_SIZE // num_pods,
    num_pods=num_pods,
  )
  expected = collections.Counter(
    {key: num_pods * value for key, value in of_one_pod.items()}
  )
  # 4 devices send a sum of 4 bytes three times, twice.
  expected["all_reduce", ("data",)] += num_separate * 4 * 3 * 2
  _, program = build(config, mesh, num_pods, features=("inputs", "targets"))
  actual = traffic([program.update, *program.metrics.values()])
  for _ in range(num_microbatches - 1):
    actual += traffic([pod.stages[0].forward for pod in program.pods])
  assert actual == expected


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_what_is_computed_again_waits_where_xla_would_find_what_it_has(remat):
  graph, _ = build(tiny_config(num_layers=1, remat=remat), mesh_of(ALL))
  assert counts(graph)["XlaOptimizationBarrier"] >= 7  # kernels of a layer


def test_every_operation_of_a_step_is_a_device_s_or_has_its_place():
  _, program = build(tiny_config(), mesh_of(TWO_D, num_microbatches=2), 2)
  types = placed_types(program)
  assert types["TPUReplicateMetadata"] == 2 * 4  # loss, accumulate, A, B


def placed_types(program):
  """Counts operations by type; each is a device's, or has its place."""
  fetches = [program.update, program.initialize, *program.metrics.values()]
  fetches += [
    x for pod in program.pods for x in (pod.stages[0].forward, pod.loss)
  ]
  jobs = ["client", *(f"pod_{i}" for i in range(len(program.pods)))]
  types = collections.Counter()
  for op in needed(fetches):
    types[op.type] += 1
    if in_tpu_program(op) or op.type in PLACED_BY_WHAT_THEY_JOIN:
      continue
    if op.inputs and op.inputs[0].op.type == "TPUReplicatedOutput":
      continue
    device = tf.DeviceSpec.from_string(op.device)
    assert device.job in jobs, op
    assert (device.device_type == "TPU") == (op.type in OF_VARIABLES), op
  return types


PLACED_BY_WHAT_THEY_JOIN = ("NoOp", "TPUReplicatedInput", "TPUReplicatedOutput")
OF_VARIABLES = ("VarHandleOp", "AssignVariableOp")
