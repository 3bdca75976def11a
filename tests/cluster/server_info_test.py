# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server says that it is there, whatever it does."""

import threading

import pytest
import tensorflow.compat.v1 as tf

from palm_mtf.cluster.connect import start_server
from palm_mtf.cluster.server_info import (
  NoAnswerError,
  claim_server,
  read_incarnation,
  read_info,
)
from tests.cluster.served import Served


@pytest.fixture(scope="module")
def address():
  with Served(1) as servers:
    yield servers.addresses[0]


def compute(address):
  """Keeps every thread of a server busy, for some tenths of a second."""
  with tf.Graph().as_default(), tf.Session(f"grpc://{address}") as session:
    x = tf.random.uniform([2560, 2560])
    products = [tf.matmul(x + i, x) for i in range(4)]
    session.run(tf.add_n([y[0, 0] for y in products]))


def test_a_server_that_computes_answers_at_once(address):
  before = read_incarnation(address, 5.0)
  thread = threading.Thread(target=compute, args=[address])
  thread.start()
  late = 0
  while thread.is_alive():
    assert read_incarnation(address, 1.0) == before
    try:
      read_info(address, 0.1)
    except NoAnswerError:
      late += 1
  assert late > 0, "it was never busy"


@pytest.mark.slow
def test_each_start_of_a_server_has_its_own_number_and_one_client_till_its_end(
  address,
):
  """Every client has a server of its own, by which it is known."""
  assert read_info(address, 5.0).num_devices == 1
  late = start_server(1, 1).target.removeprefix("grpc://")
  with Served(1) as servers:
    (first,) = servers.addresses
    of_other = read_incarnation(first, 5.0)
    for _ in range(2):
      assert claim_server(address, first, [], 5.0) == ""
    assert claim_server(address, late, [], 5.0) == first
    assert claim_server(address, first, [], 5.0) == ""
  assert claim_server(address, late, [], 5.0) == ""
  assert read_incarnation(address, 5.0) != of_other
