# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Learners: processes with their own clocks, whose work the client merges.

With LEARNERS = "host:port", `palm_mtf train` computes no step. It gives rows to
learners (`palm_mtf pods join`), and merges a fragment once QUORUM of them have
sent it (Decoupled DiLoCo, arXiv:2604.21428). NUM_PODS is how many learners the
run expects; each step's batch has as many shares.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from palm_mtf.config.checked import (
  Checked,
  Count,
  real,
  refuse_unused,
  text_or_empty,
)
from palm_mtf.config.run import RunConfig
from palm_mtf.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnersConfig(Checked):
  """Who takes part in a run of learners, and when their work is merged.

  Attributes:
    learners: "host:port" where the client waits for learners; "" for none.
    learners_tls: PREFIX of PREFIX.key and PREFIX.pem, the key and certificate
      of the client.
    learner_tokens: file of the learners' names and tokens.
    quorum: number of learners that have to send a fragment before the client
      merges it; None for all NUM_PODS.
    grace_secs: how long a merge waits for more learners after the quorum; None
      for half the median, over learners, of the time of each one's slowest
      task.
    audit_share: if given, learners are volunteers, who are not trusted: they
      train in rounds (learners/rounds.py), and this share of their tasks is
      computed again.
    audit_by: who computes it again: "client", or "volunteers" of other owners.
    merge: how a round merges volunteers' work: "mean"; or "median" or "clipped"
      (learners/audit.py), for volunteers whose kernels round differently.
    task_secs: a volunteer that takes longer for a task loses it.
  """

  learners: Annotated[
    str, text_or_empty('"host:port" of the client, or "" for no learners')
  ] = ""
  learners_tls: Annotated[str, text_or_empty("PREFIX of a key")] = ""
  learner_tokens: Annotated[str, text_or_empty("a file of tokens")] = ""
  quorum: Count | None = None
  grace_secs: Annotated[
    float | None, real(0.0, 1e6, none="for half the time of a task")
  ] = 5.0
  audit_share: Annotated[
    float | None, real(0.0, 1.0, none="for learners that are trusted")
  ] = None
  audit_by: Literal["client", "volunteers"] = "client"
  merge: Literal["mean", "median", "clipped"] = "mean"
  task_secs: Annotated[float, real(1.0, 1e6)] = 600.0


# {macro: the only value with which learners train}
_ONLY: dict[str, object] = {
  "EXCHANGE": "diloco",
  "MERGE_ALPHA": 0.0,  # a learner always keeps its unsent steps
  "PODS": "in_process",
  "ADAPTER": "none",
  "MODEL_FUNCTION": None,
  "TEACHER": None,
  "PREFERENCE_BETA": None,
  "INIT_STATE": "weights",
  "TASK_EVAL_STEPS": None,
  "TRACE_STEPS": (),
}


# {macro: the only value with which volunteers train}
_ONLY_OF_VOLUNTEERS: dict[str, object] = {
  "FRAGMENTS": 1,
  "OVERLAP_STEPS": 0,
  "QUORUM": None,
  "GRACE_SECS": 5.0,
}
_OF_VOLUNTEERS = "audit_by", "merge", "task_secs"


def check_learners(
  own: LearnersConfig, run: RunConfig, values: Mapping[str, object]
) -> None:
  """Raises UserError if a setting does not fit LEARNERS.

  `values` is {macro: value} of all settings of the run.
  """
  names = {x.name for x in dataclasses.fields(own)} - {"learners"}
  if not own.learners:
    given, use = 'LEARNERS = ""', 'LEARNERS = "host:port"'
    refuse_unused(own, sorted(names), given, use)
    return
  if own.audit_share is None:
    use = "AUDIT_SHARE, for volunteers"
    refuse_unused(own, _OF_VOLUNTEERS, "AUDIT_SHARE = None", use)
  fits = [(_ONLY, f"LEARNERS = {own.learners!r}", "learners")]
  if own.audit_share is not None:
    given = f"AUDIT_SHARE = {own.audit_share}"
    fits.append((_ONLY_OF_VOLUNTEERS, given, "volunteers"))
  for only, given, who in fits:
    for macro, value in only.items():
      if (values[macro] or None) != (value or None):
        raise UserError(
          f"{macro} = {values[macro]!r} and {given}: {who} train only with "
          f"{macro} = {value!r}; set it."
        )
  num_pods = int(str(values["NUM_PODS"]))
  if own.quorum is not None and own.quorum > num_pods:
    raise UserError(
      f"QUORUM = {own.quorum} and NUM_PODS = {num_pods}: no merge would have "
      f"enough learners; give at most {num_pods}, or raise NUM_PODS."
    )
  sizes = run.batch_sizes
  if len(sizes.pairs) > 1:
    raise UserError(
      f"GLOBAL_BATCH_SIZE = {sizes.pairs} and LEARNERS = {own.learners!r}: "
      f"a learner's rows stay as many; give one size, such as {sizes.largest}."
    )
