# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every fault of a pod's server or its link is reported in time, by name."""

import contextlib
import re
import signal
import socket
import time

import pytest

from tests import runs
from tests.processes import wait_until
from tests.relay import Relay
from tests.runtime.served import Served

TIMEOUT_SECS = 4.0
# A client ends after two probes, two more, and TensorFlow's own shutdown.
MOST_SECS = 4 * TIMEOUT_SECS + 15
SETTINGS = {
  "NUM_PODS": 2,
  "PODS": "cluster",
  "POD_TIMEOUT_SECS": TIMEOUT_SECS,
  "TRAIN_STEPS": 100_000,
  "CHECKPOINT_STEPS": 20,
  "EVAL_STEPS": 100_000,
  "PROMPTS": [],
}


class Cluster:
  """Two servers, with a relay before the second, and one client at a time."""

  def __init__(self, corpus, model_dir, stack):
    self._corpus, self.model_dir, self._stack = corpus, model_dir, stack
    self.served = stack.enter_context(Served(2))
    self.servers = self.served.processes
    self.relay = Relay(self.served.addresses[1])
    stack.callback(self.relay.close)
    self.addresses = [self.served.addresses[0], self.relay.address]

  def client(self, **macros):
    islands = [[each] for each in self.addresses]
    settings = {**SETTINGS, "ISLANDS": islands, **macros}
    client = runs.start("train", self._corpus, self.model_dir, **settings)
    self._stack.enter_context(client)
    self._stack.callback(client.kill)
    return client

  def has_step(self, step):
    return (self.model_dir / f"checkpoints/step_{step:08d}").exists()

  def client_in_step_20(self, **macros):
    client = self.client(**macros)
    wait_until(lambda: self.has_step(20), client)
    return client

  def end_of(self, client, *, code=2, most_secs=120.0):
    """Waits for a client's end; returns its last line."""
    _, error = client.communicate(timeout=most_secs)
    assert client.returncode == code, error
    return error.splitlines()[-1]


@pytest.fixture
def cluster(corpus, tmp_path):
  with contextlib.ExitStack() as stack:
    yield Cluster(corpus, tmp_path / "run", stack)


def kill(cluster):
  cluster.servers[1].kill()


def stop(cluster):
  cluster.servers[1].send_signal(signal.SIGSTOP)


def start_again(cluster):
  cluster.servers[1].kill()
  cluster.servers[1].wait()
  cluster.served.start(cluster.served.addresses[1].rpartition(":")[2])


def cut_within_a_step(cluster):
  cluster.relay.fail_after(50_000, closes=True)
  assert cluster.relay.failed.wait(60)


def silence_within_a_step(cluster):
  cluster.relay.fail_after(50_000, closes=False)
  assert cluster.relay.failed.wait(60)


NO_ANSWER = "has not answered for 4 seconds"
WHEN = (
  "(in step|while pods were compared after step|while step|"
  "while its memory was read after step) \\d+( was saved)?"
)
RESUME = "run the same command to resume."


@pytest.mark.slow
@pytest.mark.parametrize(
  "fault", [kill, stop, start_again, cut_within_a_step, silence_within_a_step]
)
def test_a_fault_ends_the_run_in_time_with_the_pod_its_host_and_the_phase(
  cluster, fault
):
  timeout, how = TIMEOUT_SECS, NO_ANSWER
  if fault == start_again:  # it takes longer; the link does not fail
    timeout, how = 60.0, "has been started again"
    cluster.addresses = cluster.served.addresses
  client = cluster.client_in_step_20(POD_TIMEOUT_SECS=timeout)
  fault(cluster)
  line = cluster.end_of(client, most_secs=MOST_SECS + timeout)
  assert re.fullmatch(
    f"palm_mtf: pod 1: its server {cluster.addresses[1]} {how}, {WHEN}; "
    f"{RESUME}",
    line,
  ), line


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "wait"])
def test_a_silent_link_between_pods_is_reported_with_both_ends(cluster, policy):
  client = cluster.client_in_step_20(ON_POD_FAILURE=policy, POD_WAIT_SECS=8.0)
  cluster.relay.silence(cluster.servers[0].pid)
  start = time.monotonic()
  for line in client.stderr:
    if "is silent" in line:
      break
  # POD_TIMEOUT_SECS does not include TensorFlow's own end of the step.
  assert time.monotonic() - start < TIMEOUT_SECS + 2
  near, far = cluster.addresses
  assert re.search(
    f"pod 0: its server {near} answers, but its link to pod 1's server {far} "
    f"is silent, {WHEN}",
    line,
  ), line
  if policy == "wait":
    line = cluster.end_of(client)
    assert line.endswith(
      f"is silent, ever since; the run waited for 8 seconds (POD_WAIT_SECS); "
      f"{RESUME}"
    )


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_waits_for_no_pod(cluster):
  """The user who stops a run may have stopped its servers before."""
  client = cluster.client_in_step_20(ON_POD_FAILURE="wait")
  stop(cluster)
  time.sleep(1)
  client.terminate()
  line = cluster.end_of(client, most_secs=MOST_SECS)
  assert line.endswith(f"after SIGTERM; {RESUME}")


@pytest.mark.slow
def test_a_slow_server_is_not_lost(cluster):
  """The server gets a fifth of the CPU time, so it answers late."""
  client = cluster.client(TRAIN_STEPS=60)
  wait_until(lambda: cluster.has_step(20), client)
  start = time.monotonic()
  while client.poll() is None and time.monotonic() < start + 120:
    cluster.servers[1].send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    cluster.servers[1].send_signal(signal.SIGCONT)
    time.sleep(0.3)
  cluster.end_of(client, code=0)


@pytest.mark.slow
@pytest.mark.parametrize(
  "macros",
  [{"POD_TIMEOUT_SECS": 60.0}, {"ON_POD_FAILURE": "wait"}],
  ids=["within_the_timeout", "waited_for"],
)
def test_a_late_server_is_taken(cluster, macros):
  kill(cluster)
  cluster.servers[1].wait()
  client = cluster.client(TRAIN_STEPS=8, **macros)
  time.sleep(20)
  start_again(cluster)
  cluster.end_of(client, code=0)
  assert cluster.has_step(8)


@pytest.mark.slow
def test_after_a_killed_client_the_servers_serve_the_next(
  cluster, corpus, tmp_path
):
  client = cluster.client_in_step_20()
  client.kill()
  client.communicate()
  end = {"TRAIN_STEPS": 1000, "CHECKPOINT_STEPS": 500}
  client = cluster.client(**end)
  cluster.end_of(client, code=0, most_secs=240)
  macros = {**SETTINGS, **end, "PODS": "in_process"}
  assert runs.run("train", corpus, tmp_path / "whole", **macros) == 0
  runs.assert_same_tensors(cluster.model_dir, tmp_path / "whole", 1000)


NOBODY = {"ISLANDS": [["127.0.0.1:9"], ["127.0.0.1:19"]]}
SILENT = "pod 0: its server 127.0.0.1:9 has not answered for 1 seconds, at the "


@pytest.mark.parametrize(
  ("macros", "expected"),
  [
    *(
      (
        {**NOBODY, "ON_POD_FAILURE": policy, "POD_TIMEOUT_SECS": 1.0},
        f"{SILENT}start; start it with `palm_mtf pods serve`, or correct "
        'ISLANDS; ON_POD_FAILURE = "wait" would wait for it.',
      )
      # A run shrinks only when a pod is lost that the run has had.
      for policy in ("stop", "shrink")
    ),
    (
      {
        **NOBODY,
        "ON_POD_FAILURE": "wait",
        "POD_TIMEOUT_SECS": 1.0,
        "POD_WAIT_SECS": 2.0,
      },
      f"{SILENT}start; the run waited for 2 seconds (POD_WAIT_SECS); {RESUME}",
    ),
    (
      {**NOBODY, "CLIENT_ADDRESS": "127.0.0.1:{used}"},
      'CLIENT_ADDRESS = "127.0.0.1:{used}": port {used} is in use; give '
      "another, or 0 for any.",
    ),
  ],
  ids=[
    *("unreachable_stop", "unreachable_shrink", "never_comes"),
    "client_port_in_use",
  ],
)
def test_servers_and_clients_that_cannot_be_end_the_run_at_its_start(
  macros, expected, corpus, tmp_path, capsys
):
  with socket.create_server(("127.0.0.1", 0)) as other:
    used = str(other.getsockname()[1])
    if address := macros.get("CLIENT_ADDRESS"):
      macros = {**macros, "CLIENT_ADDRESS": address.format(used=used)}
    settings = {**SETTINGS, **macros}
    assert runs.run("train", corpus, tmp_path, **settings) == 2
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith("palm_mtf: " + expected.replace("{used}", used))


@pytest.mark.slow
def test_a_server_that_differs_is_not_waited_for(cluster):
  macros = {"MESH_SHAPE": "data:2", "LAYOUT": "batch:data"}
  client = cluster.client(ON_POD_FAILURE="wait", **macros)
  line = cluster.end_of(client, most_secs=60)
  assert line.startswith("palm_mtf: pod 0: its server ")
  assert "serves 1 devices" in line


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [1_000, 4_000, 16_000, 64_000, 256_000])
@pytest.mark.parametrize("closes", [False, True], ids=["silent", "closed"])
def test_a_link_that_fails_at_any_moment_ends_the_run(
  cluster, num_bytes, closes
):
  """The moment is in the first probe, the session's start, or a step."""
  cluster.relay.fail_after(num_bytes, closes)
  client = cluster.client()
  assert cluster.relay.failed.wait(60)
  line = cluster.end_of(client, most_secs=MOST_SECS)
  assert line.startswith(
    f"palm_mtf: pod 1: its server {cluster.addresses[1]} {NO_ANSWER}, "
  )
