# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a server counts, for its page /metrics."""

import collections
import dataclasses
from collections.abc import Mapping

_GAUGES = ("running", "waiting", "checkpoint_step")


@dataclasses.dataclass
class Counters:
  """Values for /metrics: counts since the server's start, and gauges."""

  # {HTTP status: number of answers}.
  requests: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  # {(assertion, what came of it): number of answers}
  assertions: Mapping[tuple[str, str], int] = dataclasses.field(
    default_factory=dict
  )
  prompt_tokens: int = 0  # number of prompt tokens that the model has read
  generated_tokens: int = 0  # number of tokens that the model has generated
  steps: int = 0  # number of decoding steps, each for all rows of the batch
  # Number of completions whose client disconnected, or that a stop string
  # ended.
  cancelled: int = 0
  request_secs: float = 0.0  # sum of seconds from request to answer's end
  running: int = 0  # number of completions in slots now
  waiting: int = 0  # number of completions that wait for a slot now
  checkpoint_step: int = 0  # training step of the current weights

  def format_page(self) -> str:
    """Returns the counts in Prometheus' text format."""
    lines = ["# TYPE palm_mtf_requests_total counter"]
    lines += [
      f'palm_mtf_requests_total{{code="{code}"}} {count}'
      for code, count in sorted(self.requests.items())
    ]
    lines += ["# TYPE palm_mtf_assertions_total counter"]
    lines += [
      f'palm_mtf_assertions_total{{assertion="{x}",result="{y}"}} {count}'
      for (x, y), count in self.assertions.items()
    ]
    for field in dataclasses.fields(self)[2:]:
      is_gauge = field.name in _GAUGES
      name = f"palm_mtf_{field.name}" + ("" if is_gauge else "_total")
      lines += [
        f"# TYPE {name} {'gauge' if is_gauge else 'counter'}",
        f"{name} {getattr(self, field.name)}",
      ]
    return "\n".join(lines) + "\n"
