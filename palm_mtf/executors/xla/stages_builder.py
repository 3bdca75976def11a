# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client's graph of a training step on pods of accelerators with stages.

The graph calls the functions of stage_arrays.py in the stages' hosts. A call
runs one pass of a stage for a microbatch. A queue on the stage's host keeps the
tensors that the call returns, until a call of the next stage dequeues them.
"""

from collections.abc import Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.executors.xla import stage_arrays
from palm_mtf.executors.xla.client_calls import after_all
from palm_mtf.executors.xla.step_builder import Rows, StepBuilder
from palm_mtf.mesh.stages import pass_by_queue
from palm_mtf.programs.pod import build_dropout_state
from palm_mtf.programs.step_programs import CallGraph
from palm_mtf.steps.plan import LOSS, ROWS, UPDATE, Node, Send, StepPlan

# Results of a pass: for each host of the stage, the tensors that the pass sends
# to the next stage.
_Stream = Sequence[Sequence[tf.Tensor]]


class StagesBuilder(StepBuilder):
  """Builds the graphs of pods with stages."""

  @property
  def _rows_per_call(self) -> int:
    return self._settings.micro_rows

  def _build_passes(
    self, plan: StepPlan, rows: Rows
  ) -> dict[tuple[str, ...], CallGraph]:
    graphs: dict[tuple[str, ...], CallGraph] = {}
    sends = [x for x in plan.edges if isinstance(x, Send)]
    by_name = {x.name: x for x in plan.nodes}
    sources = {x.target: by_name[x.source] for x in sends}
    targets = {x.source: by_name[x.target] for x in sends}
    streams: dict[str, _Stream] = {}
    for node in plan.nodes:
      if node.phase == UPDATE:
        continue
      source, target = sources.get(node.name), targets.get(node.name)
      found = self._call_pass(
        node, source, target, rows, streams.get(source.name) if source else None
      )
      if target:
        streams[node.name], operations = self._pass_on(node, found)
        graphs[node.name,] = CallGraph(operations)
      elif node.phase == LOSS:
        graphs[node.name,] = CallGraph(
          outputs=self._find_mean(*after_all(found))
        )
      else:
        graphs[node.name,] = CallGraph([x.op for x, *_ in found])
    return graphs

  def _call_pass(
    self,
    node: Node,
    source: Node | None,
    target: Node | None,
    rows: Rows,
    stream: _Stream | None,
  ) -> list[list[tf.Tensor]]:
    """Calls `run_pass` in each host; returns what each host returns."""
    place = node.pod, node.stage
    phase, dtypes = node.phase, [tf.int32]
    if phase == LOSS:
      phase = stage_arrays.INFER
      if target is None:
        phase, dtypes = stage_arrays.INFER_HEAD, [tf.float32]
    goes = b""
    if target:
      is_here = self._is_near(node, target)
      goes = stage_arrays.HERE if is_here else stage_arrays.AWAY
    if goes == stage_arrays.AWAY:
      dtypes = [self._pod_step.model.stream.dtype] * self._devices.num_local
    with tf.device(self._devices.client):
      step, _, first_pod, microbatch, _ = self._scalars
      first_row = (first_pod + node.pod) * self._settings.num_rows
      first_row += microbatch * self._rows_per_call
      state = build_dropout_state(step, first_row)
    name, of_source, waits = "", "", []
    given = [[] for _ in self._devices.hosts_of(*place)]
    if source and stream:
      of_source = stage_arrays.INFER if node.phase == LOSS else source.phase
      if self._is_near(source, node):
        name = self._devices.name_pod(source.pod, source.stage)
        waits = [x for of_host in stream for x in of_host]
      else:
        given = [list(x) for x in stream]
    if ROWS in node.reads:
      of_hosts = zip(given, rows[place], strict=True)
      given = [[*x, *y.values()] for x, y in of_hosts]
    scope = f"{node.phase}/pod_{node.pod}/stage_{node.stage}"
    with tf.control_dependencies(waits), tf.name_scope(scope) as name_scope:
      self._phases[name_scope] = node.phase
      return self._call(
        place,
        stage_arrays.run_pass,
        dtypes,
        *(phase, microbatch, state, name, of_source, goes),
        of_host=given,
      )

  def _is_near(self, one: Node, other: Node) -> bool:
    """Returns whether the same processes hold the stages of both nodes."""
    hosts = [self._devices.hosts_of(x.pod, x.stage) for x in (one, other)]
    first, second = ([x.device for x in of_stage] for of_stage in hosts)
    return first == second

  def _pass_on(
    self, node: Node, found: _Stream
  ) -> tuple[_Stream, list[tf.Operation]]:
    """Makes queues for `found`, the results of a call of `node`.

    Returns tensors that dequeue the results, and operations that enqueue them.
    """
    stream, operations = [], []
    hosts = self._devices.hosts_of(node.pod, node.stage)
    for process, of_host in zip(hosts, found, strict=True):
      with tf.device(process.device):
        passed = [pass_by_queue(x) for x in of_host]
      stream.append([x for x, _ in passed])
      operations += [x for _, x in passed]
    return stream, operations

  def _build_step(
    self, rows: Rows, rates: Mapping[str, tf.Tensor]
  ) -> tf.Tensor:
    stages = range(self._num_stages)
    with tf.device(self._devices.client):
      of_step = tf.stack([*rates.values()])
    if len(self._every_pod) == 1:
      found = [self._sum_gradients(x) for x in stages]
      losses = found[0][0]
      squares = [[x for _, x in found]]
    else:
      losses, squares = self._exchange()
    updated = []
    for pod, of_pod in zip(self._every_pod, squares, strict=True):
      numbers = [of_step, losses, self._join(of_pod)]
      measured = []
      for stage in stages:
        function = stage_arrays.measure_variables
        measured += after_all(
          self._call((pod, stage), function, [tf.float32], *numbers)
        )
      numbers.append(self._join(measured))
      function = stage_arrays.update_variables
      for stage in stages:
        updated += self._call((pod, stage), function, [tf.float32], *numbers)
    (numbers,) = after_all(updated)
    return numbers

  def _sum_gradients(self, stage: int) -> list[tf.Tensor]:
    """Returns what `stage_arrays.sum_gradients` does: losses and squares."""
    dtypes = [tf.float32, tf.float32]
    return after_all(self._call((0, stage), stage_arrays.sum_gradients, dtypes))

  def _exchange(self) -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
    """Sums gradients over pods, stage by stage.

    Returns the losses summed over pods, [losses] float32; and for each pod, the
    gradients' sums of squares of each stage, [squares] float32.
    """
    losses, squares = None, [[] for _ in self._every_pod]
    for stage in range(self._num_stages):
      names = self._pod_step.parameters_in(stage)
      dtypes = [tf.float32, *self._message_dtypes(names)]
      gradients = [
        self._call((pod, stage), stage_arrays.cut_gradients, dtypes)
        for pod in self._every_pod
      ]
      of_pods = [after_all(x)[0] for x in gradients]
      for pod in self._every_pod:
        sums = self._sum_messages((pod, stage), of_pods, gradients)
        if losses is None:
          losses = sums[0][0]
        squares[pod] += after_all(
          self._call(
            (pod, stage),
            stage_arrays.join_gradients,
            [tf.float32],
            of_host=[x[1:] for x in sums],
          )
        )
    return losses, squares

  def _join(self, vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    with tf.device(self._devices.client):
      return tf.concat(vectors, 0)
