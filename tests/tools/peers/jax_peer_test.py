# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's optimizer in JAX takes the oracle's steps."""

import jax

from tests.mtf_testing import relative_error
from tests.tools.peers.oracle_steps import initial_parameters, oracle_steps
from tools.peers import jax_peer


def test_it_takes_the_oracle_s_steps():
  with jax.enable_x64(True):
    params = jax.tree.map(jax.numpy.asarray, initial_parameters())
    state = jax_peer.adafactor_init(params)
    for k, gradients, expected in oracle_steps():
      params, state = jax_peer.adafactor_step(
        params, state, gradients, *jax_peer.adafactor_schedule(k)
      )
      for name, value in params.items():
        assert relative_error(value, expected[name]) < 1e-12, (name, k)
