# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A training step as data: nodes on the pods' devices, and edges between them.

A pod without stages has two nodes:

  gradients[pod]          forward and backward pass of the pod's rows
  update[pod]             the optimizer's update of the pod's parameters

A pod with S stages has a pipeline instead of the first node. Stage s computes
the layers s L/S to (s + 1) L/S - 1 (L layers). A microbatch goes forward
through all stages, then to the head (last norm, logits, loss and their
gradients), then backward through all stages. The head is on the devices of
stage 0.

  forward[pod, stage]     forward pass of a stage's layers
  head[pod]               forward and backward pass of the head
  backward[pod, stage]    backward pass of a stage's layers

If no parameter of the first stages is trained (FROZEN), they have no backward
pass, and nothing is sent back to them.

If pods exchange parameters (EXCHANGE = "diloco"), each pod updates its own
after its passes, without waiting for other pods, and in some steps there is a
third kind of node:

  outer[pod]              a sync: the outer update of the pod's parameters

There are two kinds of edges: `Send` from stage to stage, and `AllSum` of the
gradients, or of the parameters, of all pods. An executor builds a program for
each call of the plan; the client makes the calls in the plan's order, which is
fixed.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from palm_mtf.config import ExchangeConfig, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh

# Phases of nodes.
FORWARD, HEAD, BACKWARD = "forward", "head", "backward"
GRADIENTS, UPDATE, LOSS = "gradients", "update", "loss"
OUTER = "outer"

# What nodes read and write: features of a batch, parameters, the optimizer's
# slots, activations that the backward pass reads, and sums of losses and
# gradients over the microbatches of a step.
ROWS, PARAMETERS, SLOTS = "rows", "parameters", "slots"
ACTIVATIONS, SUMS = "activations", "sums"
OUTER_STATE = "outer parameters"  # and their momentum


class Node(NamedTuple):
  """A computation of a stage or of a pod, such as a forward pass."""

  name: str  # unique name, such as "forward[0, 1]"
  phase: str  # the first word of the name
  pod: int  # number of the pod whose devices compute
  # Number of the stage whose devices compute; None for all stages.
  stage: int | None
  reads: tuple[str, ...]  # what the node reads: ROWS and so on
  writes: tuple[str, ...]  # what the node writes
  # How many times a step runs the node: once per microbatch, or 1.
  repeats: int = 1
  every: int = 1  # number of steps from one step with this node to the next


class Send(NamedTuple):
  """Sends activations or their gradients from a node to the next node."""

  source: str  # names of nodes
  target: str


class AllSum(NamedTuple):
  """Sums the gradients, or parameters, of all pods; every pod gets all sums."""

  # Names of the nodes that compute gradients or update parameters.
  sources: tuple[str, ...]
  targets: tuple[str, ...]  # names of the nodes that take the sums
  dtype: str  # dtype in which the terms cross the network
  # Number of steps from one sum to the next; each sum of parameters is of one
  # fragment.
  every: int = 1


class Call(NamedTuple):
  """A call of the client, which runs some nodes for one microbatch."""

  nodes: tuple[str, ...]  # names of the nodes
  microbatch: int  # number of the microbatch in the step


@dataclasses.dataclass(frozen=True)
class StepPlan:
  """Nodes and edges of a step, and the order of the calls that run them."""

  nodes: tuple[Node, ...]
  edges: tuple[Send | AllSum, ...]
  # Lists of calls. Calls of one list run one after another; different lists run
  # at the same time.
  streams: tuple[tuple[Call, ...], ...]
  # The call after all `streams`; None if the plan only computes losses.
  last: Call | None

  def nodes_of(self, call: Call) -> list[Node]:
    """Returns the nodes that a call runs."""
    return [x for x in self.nodes if x.name in call.nodes]

  @property
  def calls(self) -> Iterator[Call]:
    """Yields a call of each program: for microbatch 0, except `last`."""
    made = dict.fromkeys(x.nodes for stream in self.streams for x in stream)
    yield from (Call(x, 0) for x in made)
    if self.last:
      yield self.last

  def sends_from(self, pod: int, stage: int) -> list[Send]:
    """Returns the edges by which a stage sends tensors to other stages."""
    here = {x.name for x in self.nodes if (x.pod, x.stage) == (pod, stage)}
    sends = [x for x in self.edges if isinstance(x, Send)]
    return [x for x in sends if x.source in here and x.target not in here]

  @property
  def has_pipeline(self) -> bool:
    """Whether calls of a list wait for tensors from calls of other lists."""
    return any(isinstance(x, Send) for x in self.edges)


def plan_step(
  mesh: DeviceMesh,
  pods: PodsConfig,
  exchange: ExchangeConfig | None = None,
  *,
  on_accelerators: bool = False,
  first_backward: int = 0,
) -> StepPlan:
  """Returns the plan of a training step.

  Args:
    mesh: number of stages, their order, and number of microbatches.
    pods: number of pods, and DCN_DTYPE.
    exchange: what pods exchange; None for gradients.
    on_accelerators: whether XLA's programs compute. If so, one call computes
      all microbatches of a pod without stages; else each call computes one
      microbatch. Also, if so, the calls of a pod's head are in the list of
      stage 0, because all hosts of stage 0 must run XLA's programs in the same
      order.
    first_backward: the first stage with a backward pass; the number of stages
      if only the head has one.
  """
  joins_microbatches = on_accelerators and mesh.stages == 1
  every_pod = range(pods.num_pods)
  nodes, edges, streams = [], [], []
  for pod in every_pod:
    found = _pass_nodes(mesh, pod, first_backward)
    nodes += found
    edges += _sends(found)
    if not joins_microbatches:
      of_pod = _streams(found, mesh)
      streams += _add_head(of_pod, found) if on_accelerators else of_pod
  kept = PARAMETERS, SLOTS
  updates = [
    _node(UPDATE, f"[{x}]", x, None, (SUMS, *kept), kept) for x in every_pod
  ]
  has_syncs = exchange is not None and exchange.is_diloco
  if pods.num_pods > 1 and not has_syncs:
    sources = [x for x in nodes if SUMS in x.writes]
    edges.append(AllSum(_names(sources), _names(updates), pods.dcn_dtype))
  last = updates
  if mesh.stages == 1:
    # The last microbatch is in the call of the update, so that the gradients of
    # a variable leave for the other pods during the rest of the backward pass.
    last = [*nodes, *updates]
  number = 0 if joins_microbatches else mesh.num_microbatches - 1
  plan = StepPlan(
    (*nodes, *updates), tuple(edges), tuple(streams), Call(_names(last), number)
  )
  return _add_syncs(plan, exchange, number) if has_syncs else plan


def _add_syncs(
  plan: StepPlan, exchange: ExchangeConfig, number: int
) -> StepPlan:
  """Turns a plan without an exchange into one whose last call is a sync.

  Each pod's update, for microbatch `number`, ends the first of its streams.
  """
  updates = [x for x in plan.nodes if x.phase == UPDATE]
  share, streams = len(plan.streams) // len(updates), []
  for pod, update in enumerate(updates):
    first, *others = plan.streams[pod * share : (pod + 1) * share] or [()]
    # Without stages, the call has the last microbatch, too.
    joined = [x for x in plan.nodes if (x.pod, x.phase) == (pod, GRADIENTS)]
    streams += [(*first, Call(_names([*joined, update]), number)), *others]
  kept, every = (PARAMETERS, OUTER_STATE), exchange.period
  outers = [
    _node(OUTER, f"[{x.pod}]", x.pod, None, kept, kept, 1, every)
    for x in updates
  ]
  edges, names = plan.edges, (_names(updates), _names(outers))
  if len(updates) > 1:
    edges = *edges, AllSum(*names, exchange.outer_dtype, every)
  last = Call(names[1], 0)
  return StepPlan((*plan.nodes, *outers), edges, tuple(streams), last)


def plan_losses(mesh: DeviceMesh, num_pods: int, num_calls: int) -> StepPlan:
  """Returns the plan that computes the losses of a batch, without gradients.

  The client calls each node `num_calls` times, each time for an equal share of
  the pod's rows. A pod has one node per stage and, if there are several stages,
  one node for the head, on the devices of stage 0. The last node of each pod
  returns the loss.
  """
  nodes, edges, streams = [], [], []
  for pod in range(num_pods):
    found = [
      _node(
        *(LOSS, f"[{pod}, {x}]", pod, x % mesh.stages),
        *((ROWS, PARAMETERS), (SUMS,), num_calls),
      )
      for x in range(mesh.stages + (mesh.stages > 1))
    ]
    nodes += found
    edges += _sends(found)
    streams += [_repeat(x, range(num_calls)) for x in found]
  return StepPlan(tuple(nodes), tuple(edges), tuple(streams), None)


def _pass_nodes(mesh: DeviceMesh, pod: int, first_backward: int) -> list[Node]:
  """Returns the nodes of a pod's passes, in the order in which data flows."""
  reads, count = (ROWS, PARAMETERS), mesh.num_microbatches
  if mesh.stages == 1:
    return [_node(GRADIENTS, f"[{pod}]", pod, None, reads, (SUMS,), count)]
  before, after = [], []
  for stage in range(mesh.stages):
    place = f"[{pod}, {stage}]", pod, stage
    if stage < first_backward:
      before.append(_node(FORWARD, *place, reads, (), count))
      continue
    before.append(_node(FORWARD, *place, reads, (ACTIVATIONS,), count))
    kept = PARAMETERS, ACTIVATIONS
    after.insert(0, _node(BACKWARD, *place, kept, (SUMS,), count))
  return [
    *before,
    _node(HEAD, f"[{pod}]", pod, 0, reads, (SUMS,), count),
    *after,
  ]


def _node(phase: str, place: str, *fields) -> Node:
  return Node(f"{phase}{place}", phase, *fields)


def _sends(nodes: Sequence[Node]) -> list[Send]:
  return [Send(x.name, y.name) for x, y in itertools.pairwise(nodes)]


def _names(nodes: Sequence[Node]) -> tuple[str, ...]:
  return tuple(x.name for x in nodes)


def _repeat(node: Node, microbatches: range) -> tuple[Call, ...]:
  return tuple(Call((node.name,), i) for i in microbatches)


def _streams(nodes: Sequence[Node], mesh: DeviceMesh) -> list[tuple[Call, ...]]:
  """Returns a pod's lists of calls: one list per stage, then the head's list.

  Without stages, the one list lacks the last microbatch (`StepPlan.last`).

  STAGE_ORDER chooses how many forward passes a stage runs before its first
  backward pass; then the stage alternates backward passes with any remaining
  forward passes. With S stages and M microbatches, a step takes the time of
  M + S - 1 microbatches, and a stage is idle for the time of S - 1 of these.
  The orders differ in the number of microbatches whose activations a stage
  keeps. docs/pods.md has a picture.

  gpipe    all forward passes, then all backward passes (Huang et al. 2019)
  1f1b     a backward pass as soon as one can run (Narayanan et al. 2019)

  A stage without backward passes waits for nothing but its inputs.
  """
  count = mesh.num_microbatches
  if mesh.stages == 1:
    return [_repeat(nodes[0], range(count - 1))]
  streams = []
  for stage in range(mesh.stages):
    passes = {
      x.phase: _repeat(x, range(count)) for x in nodes if x.stage == stage
    }
    forward, backward = passes[FORWARD], passes.get(BACKWARD, ())
    ahead = num_kept(stage, mesh) if backward else count
    calls = [*forward[:ahead]]
    for i, call in enumerate(backward):
      calls += [call, *forward[ahead + i : ahead + i + 1]]
    streams.append(tuple(calls))
  return [*streams, _repeat(nodes[mesh.stages], range(count))]


def _add_head(
  streams: Sequence[tuple[Call, ...]], nodes: Sequence[Node]
) -> list[tuple[Call, ...]]:
  """Merges the head's list, which is the last, into the list of stage 0.

  The merged list is in the order in which the calls begin in a simulation of
  the pipeline: a backward pass takes 2 units of time, any other call 1 unit.
  """
  by_name = {x.name: x for x in nodes}
  sources = {x.target: x.source for x in _sends(nodes)}
  free = dict.fromkeys((x.stage for x in nodes), 0)  # when a stage is free
  ends: dict[tuple[str | None, int], int] = {}
  left, ordered = [[*x] for x in streams], []
  while any(left):
    begins = {}
    for number, calls in enumerate(left):
      if calls:
        (name,), microbatch = calls[0]
        source = sources.get(name), microbatch
        if source[0] is None or source in ends:
          begin = max(free[by_name[name].stage], ends.get(source, 0))
          begins[number] = begin
    number = min(begins, key=lambda x: (begins[x], -x))
    call = left[number].pop(0)
    node = by_name[call.nodes[0]]
    end = begins[number] + (2 if node.phase == BACKWARD else 1)
    free[node.stage] = ends[node.name, call.microbatch] = end
    if node.stage == 0:
      ordered.append(call)
  return [tuple(ordered), *streams[1:-1]]


def num_kept(stage: int, mesh: DeviceMesh) -> int:
  """Returns the most microbatches whose activations a stage keeps at a time."""
  if mesh.stage_order == "gpipe":
    return mesh.num_microbatches
  # The last stage keeps two: it computes one while the other is in the head.
  return min(mesh.stages + 1 - stage, mesh.num_microbatches)


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
  """Returns, per stage, the numbers of its layers, equally many per stage."""
  share = num_layers // num_stages
  return [range(i * share, (i + 1) * share) for i in range(num_stages)]
