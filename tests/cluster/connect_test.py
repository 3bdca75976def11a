# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Wherever pods are, they train the same bits."""

import dataclasses
import errno
import os
import socket
import threading
import time
import types

import pytest

from palm_mtf.cluster import connect, restricted_port
from palm_mtf.cluster.device_table import Place
from palm_mtf.cluster.heartbeat import PodLostError
from palm_mtf.cluster.local_servers import cores_of_pods
from palm_mtf.cluster.server_info import read_info
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.pods import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.native.operations import operations
from tests import runs
from tests.cluster.served import Served


@pytest.mark.slow
@pytest.mark.parametrize("num_pods", [2, 3, 4])
def test_pods_in_all_three_places_hold_the_same_bits_for_200_steps(
  num_pods, corpus, tmp_path
):
  """Pods are compared after every step, the three places at the end."""

  def train(place, **macros):
    process = runs.start(
      "train",
      corpus,
      tmp_path / place,
      NUM_PODS=num_pods,
      PODS=place,
      GLOBAL_BATCH_SIZE=12,
      ACTIVATION_DTYPE="bfloat16",
      DCN_DTYPE="bfloat16",
      FINGERPRINT_STEPS=1,
      TRAIN_STEPS=200,
      CHECKPOINT_STEPS=200,
      EVAL_STEPS=200,
      PROMPTS=[],
      **macros,
    )
    runs.finish(process)

  train("in_process")
  train("local_servers")
  with Served(num_pods, len(cores_of_pods(num_pods)[0])) as servers:
    train("cluster", ISLANDS=servers.islands)
  for place in ("local_servers", "cluster"):
    runs.assert_same_tensors(tmp_path / "in_process", tmp_path / place, 200)
  names = runs.read_tensors(tmp_path / "in_process", 200)
  assert any(name.endswith("/momentum") for name in names)


def test_a_port_that_another_process_took_meanwhile_is_one_line():
  """As that of two `pods serve` that begin at once."""
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    with pytest.raises(UserError) as error:
      connect.start_server(1, 1, ("127.0.0.1", port))
  assert str(error.value) == (
    f"127.0.0.1:{port}: another process has just begun to listen there; give "
    "another port, or 0 for any."
  )


def test_a_system_that_cannot_restrict_a_server_gets_none(monkeypatch):
  def refuse(listener):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(restricted_port, "restrict_to_loopback", refuse)
  with pytest.raises(UserError, match=r"\(Operation not permitted\)"):
    connect.start_server(1, 1)


def test_a_session_of_a_lost_pod_is_not_waited_for(monkeypatch):
  """Its `close` waits for the pod."""
  comes_back = threading.Event()
  session = types.SimpleNamespace(close=comes_back.wait)
  monkeypatch.setattr(connect.tf, "Session", lambda *_, **__: session)
  start = time.monotonic()
  with (
    pytest.raises(PodLostError),
    connect.Cluster(devices=[], config=None).session(),
  ):
    raise PodLostError(1, "pod 1 is gone")
  assert time.monotonic() - start < 8
  comes_back.set()


@pytest.mark.parametrize(
  "has_native", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_where_one_server_lacks_what_we_compile_all_do_without(has_native):
  """Pods take equal steps."""
  with Served(2) as servers:
    places = [[Place(x, 0)] for x in servers.addresses]
    infos = {x: read_info(x, 5.0) for x in servers.addresses}
    last = infos[servers.addresses[1]]
    assert last.has_native == (operations() is not None)
    infos[servers.addresses[1]] = dataclasses.replace(
      last, has_native=has_native and last.has_native
    )
    pods = PodsConfig(num_pods=2, pods="local_servers")
    cluster = connect.connect(
      pods, MeshLayout(mesh_shape="", layout=""), places, infos
    )
  expected = last.num_threads if has_native and last.has_native else 0
  assert cluster.devices.native_threads == expected
