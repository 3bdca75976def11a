# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of a server, and their page in Prometheus' text format."""

import collections
import dataclasses

_GAUGES = ("running", "waiting", "checkpoint_step")


@dataclasses.dataclass
class Counters:
  """Counts since the start, and of this moment.

  Attributes:
    requests: {HTTP status: number of answers}.
    prompt_tokens: tokens of prompts that were read.
    generated_tokens: tokens that were chosen.
    steps: decoding steps of the batch.
    cancelled: completions whose client went away, or that a stop string ended.
    request_secs: seconds of all answers together.
    running: completions in a slot.
    waiting: completions that wait for one.
    checkpoint_step: training step of the weights that compute.
  """

  requests: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  prompt_tokens: int = 0
  generated_tokens: int = 0
  steps: int = 0
  cancelled: int = 0
  request_secs: float = 0.0
  running: int = 0
  waiting: int = 0
  checkpoint_step: int = 0

  def page(self) -> str:
    """Returns every count, one a line."""
    lines = ["# TYPE palm_mtf_requests_total counter"]
    lines += [
      f'palm_mtf_requests_total{{code="{code}"}} {count}'
      for code, count in sorted(self.requests.items())
    ]
    for field in dataclasses.fields(self)[1:]:
      is_gauge = field.name in _GAUGES
      name = f"palm_mtf_{field.name}" + ("" if is_gauge else "_total")
      lines += [
        f"# TYPE {name} {'gauge' if is_gauge else 'counter'}",
        f"{name} {getattr(self, field.name)}",
      ]
    return "\n".join(lines) + "\n"
