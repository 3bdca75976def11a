# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Beats, slices and clients that join need linearly many messages."""

import json

import pytest

from tests import processes


@pytest.mark.slow  # starts several processes
def test_messages_per_server_do_not_grow_with_the_number_of_servers():
  flags = "--servers=8,256", "--json"
  done = processes.python("-m", "tools.bench", "manager", *flags)
  assert done.returncode == 0, done.stderr
  rows = [json.loads(x) for x in done.stdout.splitlines()]
  few, many = (
    {x["step"]: x["messages"] for x in rows if x["servers"] == number}
    for number in (8, 256)
  )
  assert few.keys() == many.keys()
  for step, most in {"register": 1, "beat": 1, "join": 1}.items():
    assert few[step] >= 8 * most and many[step] >= 256 * most
    # An owner sends a beat per second, too.
    assert many[step] <= 256 * most + 60
  for step in ("allocate", "release"):
    assert few[step] <= 2 and many[step] <= 2
