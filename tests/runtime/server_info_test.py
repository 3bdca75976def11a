# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server answers, however busy it is."""

import dataclasses
import threading

import pytest
import tensorflow.compat.v1 as tf

from palm_mtf.machine.processors import kernel_flags, kernels_here
from palm_mtf.native.operations import operations_built_with
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import (
  NoAnswerError,
  ServerInfo,
  check_bfloat16,
  difference,
  read_incarnation,
  read_info,
)
from tests.cpus import ZEN_3, ZEN_4, pretend_cpu
from tests.refusals import message_of
from tests.runtime.served import Served


@pytest.fixture(scope="module")
def address_here():
  """The address of a server in this process, which starts faster."""
  return start_server(1, 1).target.removeprefix("grpc://")


def compute(address):
  """Keeps every thread of a server busy for some tenths of a second."""
  with tf.Graph().as_default(), tf.Session(f"grpc://{address}") as session:
    x = tf.random.uniform([2560, 2560])
    products = [tf.matmul(x + i, x) for i in range(4)]
    session.run(tf.add_n([y[0, 0] for y in products]))


@pytest.mark.slow
def test_a_server_that_computes_answers_at_once():
  with Served(1) as servers:
    (address,) = servers.addresses
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


def test_another_kind_of_cpu_is_refused_by_its_instructions(address_here):
  info = read_info(address_here, 5.0)
  assert info.cpu_flags == kernel_flags()
  assert difference(info, info) == ""
  first = dataclasses.replace(info, cpu_flags=["avx2", "avx512f", "fma"])
  for flags, what in (
    (["avx2", "fma"], "without avx512f"),
    (["avx2", "avx512_bf16", "avx512f", "fma"], "with avx512_bf16"),
    (["asimd"], "with asimd, without avx2, without avx512f, without fma"),
  ):
    other = dataclasses.replace(info, cpu_flags=flags)
    assert difference(other, first) == (
      f"has another kind of CPU than pod 0's first ({what}): its kernels may "
      "compute other bits, and the comparison of the pods (FINGERPRINT_STEPS) "
      "would stop the run; use servers with one kind of CPU"
    )


def test_a_server_without_bfloat16_gets_no_such_products_of_the_client(
  tmp_path, monkeypatch
):
  def info(flags):
    given = {"palm_mtf": "1", "tensorflow": "2", "cpu_flags": flags.split()}
    return ServerInfo(num_devices=1, num_threads=1, **given)

  servers = {"a:1": info(ZEN_4), "b:2": info(ZEN_3)}
  pretend_cpu(ZEN_3, tmp_path, monkeypatch)  # emulates bfloat16 everywhere
  check_bfloat16(servers, "bfloat16")
  pretend_cpu(ZEN_4, tmp_path, monkeypatch)
  check_bfloat16(servers, "float32")
  assert message_of(check_bfloat16, servers, "bfloat16") == (
    'ACTIVATION_DTYPE = "bfloat16": the CPU of the server b:2 does not '
    "multiply bfloat16 numbers, but this client's CPU does; start the client "
    'on the same kind of CPU as the servers, or give "float32".'
  )


def test_a_server_says_what_computes_there(address_here):
  built_with = operations_built_with()
  assert read_info(address_here, 5.0).kernels == kernels_here(built_with)
