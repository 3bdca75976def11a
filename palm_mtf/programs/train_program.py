# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow graph of a training step.

gradients  each pod: forward and backward pass of its share of the batch
exchange   each pod sends its gradients to all other pods (pod.py)
update     each pod: the same clipping and optimizer
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palm_mtf._tf import mtf, tf
from palm_mtf.config import OptimizerConfig, PodsConfig, StepConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.mesh.cpu_gpu import CpuGpuDevices, CpuGpuLowering, local_devices
from palm_mtf.mesh.session import ONE_BY_ONE
from palm_mtf.mesh.slices import Slice
from palm_mtf.mesh.stages import StagesLowering, find_parts
from palm_mtf.model.loss import divisor
from palm_mtf.optim.optimizer import SumOfSquares, largest_load, rms_by_kind
from palm_mtf.programs.features import (
  REQUIRED_FEATURES,
  ReadFeatures,
  ServerFeatures,
  Stage,
)
from palm_mtf.programs.loss_function import LossFunction, PalmLoss
from palm_mtf.programs.model_loss import text_loss
from palm_mtf.programs.pod import Gradients, PodBuilder, Update, exchange_sums
from palm_mtf.programs.step_programs import (
  VALIDATED,
  CallGraph,
  Inputs,
  Rows,
  StepPrograms,
  make_programs,
)
from palm_mtf.steps.plan import (
  BACKWARD,
  FORWARD,
  GRADIENTS,
  HEAD,
  LOSS,
  StepPlan,
  plan_losses,
  plan_step,
)


def build_train_program(
  config: StepConfig,
  *,
  batch_size: int,
  seed: int,
  frozen: Sequence[str] = (),
  features: Sequence[str] | ServerFeatures = REQUIRED_FEATURES,
  devices: Any = None,
  build: Callable[..., StepPrograms] | None = None,
) -> StepPrograms:
  """Builds a training step of PaLM, or MODEL_FUNCTION's, in the current graph.

  Args:
    config: model, mesh of each pod (checked against the model), optimizer, loss
      and number of pods.
    batch_size: sequences in one step, over all pods.
    seed: seed of the initial weights and of dropout.
    frozen: FROZEN, patterns of parameters that are not trained.
    features: keys of FEATURE_DTYPES that every batch has; a ServerFeatures with
      these keys if servers read the features.
    devices: devices of the pods; None for the CPUs or GPUs of this process.
    build: `build_program` of the executor that has opened `devices`; None for
      the executor of hosts.

  Raises UserError if a feature is unknown, or inputs or targets are missing.
  """
  names, read = features, None
  if isinstance(features, ServerFeatures):
    names, read = features
  mesh_layout, pods = config.mesh_layout, config.pods
  loss_of: Callable[..., LossFunction] = (
    text_loss if config.model.model_function else PalmLoss
  )
  loss_function = loss_of(
    config,
    names,
    num_rows=batch_size // (pods.num_pods * mesh_layout.num_microbatches),
    seed=seed,
    frozen=frozen,
  )
  return (build or build_program)(
    loss_function,
    mesh_layout,
    config.optimizer,
    batch_size=batch_size,
    pods=pods,
    devices=devices,
    read=read,
  )


def build_program(
  loss_function: LossFunction,
  mesh_layout: DeviceMesh,
  optimizer: OptimizerConfig,
  *,
  batch_size: int,
  pods: PodsConfig,
  devices: CpuGpuDevices | None = None,
  read: ReadFeatures | None = None,
) -> StepPrograms:
  """Builds a training step of any model in the current tf.Graph.

  `loss_function` is the model and the loss of a microbatch. `read` builds the
  operations by which servers read features; it is None if the client feeds all
  features. For the other arguments see `build_train_program`.
  """
  devices = devices or local_devices(mesh_layout.pod_devices, pods.num_pods)
  begin = loss_function.first_backward
  plan = plan_step(mesh_layout, pods, first_backward=begin)
  given = loss_function, mesh_layout, optimizer, devices, read
  builder = PodBuilder(*given, batch_size // pods.num_pods)
  built = [builder.build_gradients(x) for x in range(pods.num_pods)]
  sums = exchange_sums(
    [x.sums for x in built], built[0].variables, tf.as_dtype(pods.dcn_dtype)
  )
  builder.mark("exchange")
  updates = [
    builder.build_update(*each) for each in zip(built, sums, strict=True)
  ]
  losses = [
    [terms[x] / divisor(weight) for x in VALIDATED if x in terms]
    for terms, weight in ((y.losses.terms, y.losses.weight) for y in built)
  ]
  builder.mark("update")
  lowering = _lower(built)
  graphs, rows = _lower_passes(built, losses, lowering)
  graphs |= _lower_step(plan, built[0], updates, lowering)
  pod_slices = _find_slices(built, lowering)
  inputs = Inputs(builder.scalars, rows, batch_size // pods.num_pods)
  plans = (
    plan,
    plan_losses(mesh_layout, pods.num_pods, mesh_layout.num_microbatches),
  )
  return StepPrograms(
    *plans,
    **make_programs(plans, graphs, inputs, pod_slices, devices),
    batch_size=batch_size,
    parameters=[variable.name for variable in built[0].variables],
    pod_slices=pod_slices,
    initialize=lowering.initialize,
    devices=devices,
    first_options=ONE_BY_ONE if pods.num_pods > 1 else None,
    phases={lowering.scopes[x]: y for x, y in builder.phases.items()},
  )


def _lower(pods: Sequence[Gradients]) -> CpuGpuLowering:
  """Lowers the graph of all pods; with stages, as parts for separate calls."""
  stages = [stage for pod in pods for stage in pod.stages]
  placements = {x.mesh: x.placement for x in stages}
  if len(stages) == len(pods):
    return stages[0].placement.lower(placements)
  first = {}
  for pod in pods:
    for i, stage in enumerate(pod.stages):
      first |= dict.fromkeys(stage.imports, _number_part(pod, i))
    # Put accumulations into the head's part or a later part. Otherwise sums of
    # constants, such as the number of tokens, would be in no part, because
    # constants depend on no import.
    first |= dict.fromkeys(pod.accumulations, _number_part(pod, i))
  return StagesLowering(
    placements, find_parts(stages[0].mesh.graph.operations, first)
  )


def _number_part(pod: Gradients, index: int) -> int:
  """Returns the number of a part of a pod's graph, unique over all pods.

  With S stages a pod has 2 S + 1 parts: forward passes of the stages, the head,
  and backward passes of the stages, the last stage first.
  """
  return pod.pod * (2 * len(pod.stages) - 1) + index


def _lower_passes(
  pods: Sequence[Gradients],
  losses: Sequence[Sequence[mtf.Tensor]],
  lowering: CpuGpuLowering,
) -> tuple[dict[tuple[str, ...], CallGraph], dict[str, Rows]]:
  """Lowers all nodes except updates; `losses` has each pod's VALIDATED means.

  Returns the graph of each call except the last, and the rows of each node.
  """
  graphs: dict[tuple[str, ...], CallGraph] = {}
  rows: dict[str, Rows] = {}
  for pod, means in zip(pods, losses, strict=True):
    values = dict(enumerate([*means, pod.losses.weight]))
    measured = [*lowering.call(values)[0].values()]
    _add_pod(pod, measured, lowering, graphs, rows)
  return graphs, rows


def _add_pod(
  pod: Gradients,
  loss: list[tf.Tensor],
  lowering: CpuGpuLowering,
  graphs: dict[tuple[str, ...], CallGraph],
  rows: dict[str, Rows],
) -> None:
  """Adds a pod's nodes to `graphs` and `rows`, except the last call's graph.

  `loss` is what the last `LOSS` node of the pod returns.
  """
  number, stages = pod.pod, pod.stages

  def add(name: str, stage: Stage, operations=(), outputs=()):
    graphs[name,] = CallGraph(operations, outputs)
    rows[name] = stage.features, *stage.copies

  if not isinstance(lowering, StagesLowering):
    _, done = lowering.call({}, pod.accumulations)
    add(f"{GRADIENTS}[{number}]", stages[0], [done])
    add(f"{LOSS}[{number}, 0]", stages[0], outputs=loss)
    return
  head = len(stages) - 1
  for i, stage in enumerate(stages):
    part, place = _number_part(pod, i), f"[{number}, {i}]"
    done = lowering.run_part(part, pod.accumulations)
    forward = f"{FORWARD}{place}" if i < head else f"{HEAD}[{number}]"
    add(forward, stage, [done])
    if i < head:
      back = _number_part(pod, 2 * head - i)
      done = lowering.run_part(back, pod.accumulations)
      graphs[f"{BACKWARD}{place}",] = CallGraph([done])
    done = lowering.run_part(part, last=_number_part(pod, head))
    add(f"{LOSS}{place}", stage, [done], loss if i == head else ())


def _find_slices(
  pods: Sequence[Gradients], lowering: CpuGpuLowering
) -> list[dict[str, list[Slice]]]:
  """Returns each pod's slices without accumulators, which are not saved."""
  of_meshes = iter(lowering.slices)
  found = []
  for pod in pods:
    sums = {each.sum_name for each in pod.accumulations}
    found.append(
      {
        key: x
        for _ in {stage.mesh for stage in pod.stages}
        for key, x in next(of_meshes).items()
        if sums.isdisjoint(x[0].names)
      }
    )
  return found


def _lower_step(
  plan: StepPlan,
  pod: Gradients,
  updates: Sequence[Update],
  lowering: CpuGpuLowering,
) -> dict[tuple[str, ...], CallGraph]:
  """Lowers the last call of a step, and the graph of `StepPrograms.measure`."""
  operations = [x for update in updates for x in update.operations]
  # All pods compute the same values, so fetch them only from the first pod.
  update = updates[0]
  values, done = lowering.call(update.fetched, operations)
  stage = pod.stages[0]
  losses = {name: values[name] for name in update.losses}
  sums = [
    x._replace(value=values[f"{x.of}_squares/{x.variable}"])
    for each in update.operations
    for x in each.sums_of_squares
  ]
  with tf.device(stage.placement.cpu):
    squares = tf.stack(
      [values[f"squares/{i}"] for i in range(len(update.squares))]
    )
    is_finite = values["is_finite"]
    check = tf.raw_ops.Assert(condition=is_finite, data=[is_finite])
    done = tf.group(done, check)
    metrics = make_metrics(losses, sums, stage.numbers["learning_rate"])
    squares /= tf.square(values["weight"])
  return {
    plan.last.nodes: CallGraph([done], metrics),
    (): CallGraph(outputs=[losses, squares, is_finite]),
  }


def make_metrics(
  losses: Mapping[str, tf.Tensor],
  sums: Sequence[SumOfSquares],
  learning_rate: tf.Tensor,
) -> dict[str, tf.Tensor]:
  """Returns the metrics of a step, by name, [] float32 each."""
  return {
    **losses,
    "learning_rate": learning_rate,
    **rms_by_kind(sums),
    **largest_load(sums),
  }
