# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""XLA can tell the collectives of a program apart."""

import collections
import re

import jax
import pytest

from palm_mtf.executors.xla.executor import EXECUTOR
from tests.cases import slow
from tests.executors.xla.program_run import pod_step
from tests.mtf_testing import mesh_layout, small_config


@pytest.mark.parametrize("frozen", [slow(()), ["*embedding"]])
def test_no_two_collectives_of_ours_in_a_step_have_one_channel(frozen):
  """XLA mixes collectives of one channel if it runs them at the same time.

  A step of two pods with a frozen embedding crashed on CPUs for this reason.
  """
  mesh = mesh_layout("PaLM's 2D", tpu="v4-8")
  EXECUTOR.open_here(mesh, num_pods=1)
  made = pod_step(small_config(remat="layer"), mesh, frozen=frozen)
  devices = made.model.placement.make_mesh(jax.devices()[:4])
  state = made.split(made.abstract_state(devices))
  numbers = made.abstract_numbers(devices)
  rows = made.abstract_batch(devices)
  text = made.step(devices).lower(*state, rows, numbers).as_text()
  found = re.findall(r"channel_handle<handle = (\d+)", text)
  channels = collections.Counter(found)
  del channels["1"]  # JAX's own: every psum has this channel
  assert len(channels) > 10
  assert max(channels.values()) == 1, channels
