# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a pod's server or its link is told in time, by name.

  pytest tests/pod_faults_test.py -m '' -s

prints each fault with the seconds until the client ended, and its last line.
"""

import contextlib
import re
import signal
import socket
import time

import pytest

from tests import runs
from tests.cluster.recovery_test import assert_same_tensors
from tests.commands.pods_serve_test import OTHER_VERSION, serve, start
from tests.relay import Relay

TIMEOUT_SECS = 4.0
# Until a client ends: two questions, another two, and TensorFlow's own end.
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return runs.write_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="module")
def table():
  """Takes rows (fault, seconds, message); prints them at the end."""
  rows = []
  yield lambda *row: rows.append(row)
  print(f"\n{'fault':40} {'seconds':>7}  message")
  for fault, secs, message in rows:
    print(f"{fault:40} {secs:7.1f}  {message}")


class Cluster:
  """Two servers, the second behind a relay; and one client after another."""

  def __init__(self, corpus, model_dir, stack):
    self._corpus, self.model_dir, self._stack = corpus, model_dir, stack
    self.servers = [self.served(), self.served()]
    self.direct = [self.address_of(each) for each in self.servers]
    self.relay = Relay(self.direct[1])
    stack.callback(self.relay.close)
    self.addresses = [self.direct[0], self.relay.address]

  def served(self, port=0):
    server = serve(1, port=port)
    self._stack.enter_context(server)
    self._stack.callback(server.kill)
    return server

  @staticmethod
  def address_of(server):
    return server.stdout.readline().split()[-1]

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
    wait_until(lambda: client.poll() is not None or self.has_step(20))
    assert client.poll() is None, client.communicate()[1]
    return client


def wait_until(condition, secs=120):
  end = time.monotonic() + secs
  while not condition():
    assert time.monotonic() < end, "it did not happen in time"
    time.sleep(0.01)


@pytest.fixture
def cluster(corpus, tmp_path):
  with contextlib.ExitStack() as stack:
    yield Cluster(corpus, tmp_path / "run", stack)


def kill(cluster):
  cluster.servers[1].kill()


def stop(cluster):
  cluster.servers[1].send_signal(signal.SIGSTOP)


def start_anew(cluster):
  cluster.servers[1].kill()
  cluster.servers[1].wait()
  cluster.served(cluster.direct[1].rpartition(":")[2])


def cut_within_a_step(cluster):
  cluster.relay.fail_after(50_000, closes=True)
  assert cluster.relay.failed.wait(60)


def silence_within_a_step(cluster):
  cluster.relay.fail_after(50_000, closes=False)
  assert cluster.relay.failed.wait(60)


NO_ANSWER = "has not answered for 4 seconds"
WHEN = (
  "(in step|while pods were compared after step|while step) \\d+( was saved)?"
)


@pytest.mark.parametrize(
  ("fault", "how"),
  [
    pytest.param(kill, NO_ANSWER, marks=pytest.mark.slow),
    pytest.param(stop, NO_ANSWER, marks=pytest.mark.slow),
    # Which takes longer than the timeout of the others.
    pytest.param(start_anew, "has been started anew", marks=pytest.mark.slow),
    pytest.param(cut_within_a_step, NO_ANSWER, marks=pytest.mark.slow),
    pytest.param(silence_within_a_step, NO_ANSWER, marks=pytest.mark.slow),
  ],
)
def test_a_fault_ends_the_run_in_time_with_the_pod_its_host_and_the_phase(
  cluster, table, fault, how
):
  timeout = 60.0 if fault == start_anew else TIMEOUT_SECS
  if fault == start_anew:  # the link is not what fails
    cluster.addresses = cluster.direct
  client = cluster.client_in_step_20(POD_TIMEOUT_SECS=timeout)
  start = time.monotonic()
  fault(cluster)
  _, error = client.communicate(timeout=120)
  secs = time.monotonic() - start
  line = error.splitlines()[-1]
  table(fault.__name__, secs, line)
  assert client.returncode == 2, error
  assert re.fullmatch(
    f"palm_mtf: pod 1: its server {cluster.addresses[1]} {how}, {WHEN}; run "
    "the same command to go on.",
    line,
  ), line
  assert secs < MOST_SECS + timeout


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_waits_for_no_pod(cluster):
  """Who stops a run may have stopped its servers before."""
  client = cluster.client_in_step_20(ON_POD_FAILURE="wait")
  stop(cluster)
  time.sleep(1)
  client.terminate()
  _, error = client.communicate(timeout=MOST_SECS)
  assert client.returncode == 2, error
  assert error.splitlines()[-1].endswith(
    "after SIGTERM; run the same command to go on."
  )


@pytest.mark.slow
def test_servers_that_another_client_takes_are_named(cluster, table, tmp_path):
  client = cluster.client_in_step_20()
  begun = time.monotonic()
  cluster.model_dir = tmp_path / "other"
  other = cluster.client(TRAIN_STEPS=8)
  _, error = client.communicate(timeout=120)
  line = error.splitlines()[-1]
  table("taken by another client", time.monotonic() - begun, line)
  assert client.returncode == 2, error
  assert re.match(
    r"palm_mtf: pod \d: its server \S+ answers, but has broken off \(another "
    r"client has taken it, .*\), "
    f"{WHEN}; run the same command to go on.",
    line,
  ), line
  _, error = other.communicate(timeout=120)
  assert other.returncode == 0, error


@pytest.mark.slow
def test_a_slow_server_is_not_lost(cluster, table):
  """It has a fifth of the time, and answers late."""
  client = cluster.client(TRAIN_STEPS=60)
  wait_until(lambda: cluster.has_step(20))
  start = time.monotonic()
  while client.poll() is None and time.monotonic() < start + 120:
    cluster.servers[1].send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    cluster.servers[1].send_signal(signal.SIGCONT)
    time.sleep(0.3)
  _, error = client.communicate(timeout=60)
  assert client.returncode == 0, error
  assert "pod 1" not in error
  table("slow", time.monotonic() - start, "the run ends as it should")


@pytest.mark.slow
@pytest.mark.parametrize(
  "macros",
  [{"POD_TIMEOUT_SECS": 60.0}, {"ON_POD_FAILURE": "wait"}],
  ids=["within_the_timeout", "waited_for"],
)
def test_a_late_server_is_taken(cluster, table, macros):
  cluster.servers[1].kill()
  cluster.servers[1].wait()
  client = cluster.client(TRAIN_STEPS=8, **macros)
  time.sleep(20)
  start_anew(cluster)
  start = time.monotonic()
  _, error = client.communicate(timeout=120)
  assert client.returncode == 0, error
  assert cluster.has_step(8)
  table("late", time.monotonic() - start, "the run ends as it should")


@pytest.mark.slow
def test_after_a_killed_client_the_servers_serve_the_next(
  cluster, corpus, tmp_path
):
  client = cluster.client_in_step_20()
  client.kill()
  client.communicate()
  end = {"TRAIN_STEPS": 1000, "CHECKPOINT_STEPS": 500}
  client = cluster.client(**end)
  _, error = client.communicate(timeout=240)
  assert client.returncode == 0, error
  macros = {**SETTINGS, **end, "PODS": "in_process"}
  assert runs.run("train", corpus, tmp_path / "whole", **macros) == 0
  assert_same_tensors(cluster.model_dir, tmp_path / "whole", 1000)


def refused(corpus, model_dir, capsys, **macros):
  """Returns the one line of a run that never begins, and its seconds."""
  start = time.monotonic()
  settings = {**SETTINGS, **macros}
  assert runs.run("train", corpus, model_dir, **settings) == 2
  return capsys.readouterr().err.splitlines()[-1], time.monotonic() - start


@pytest.mark.parametrize("policy", ["stop", "shrink"])
def test_a_server_that_cannot_be_reached_at_the_start_ends_the_run(
  corpus, tmp_path, capsys, table, policy
):
  """Shrinking is for a pod that the run has had."""
  dead = [["127.0.0.1:9"], ["127.0.0.1:19"]]
  macros = {"ISLANDS": dead, "ON_POD_FAILURE": policy, "POD_TIMEOUT_SECS": 1.0}
  line, secs = refused(corpus, tmp_path, capsys, **macros)
  table(f"unreachable at the start, {policy}", secs, line)
  assert line == (
    "palm_mtf: pod 0: its server 127.0.0.1:9 has not answered for 1 seconds, "
    "at the start; start it with `palm_mtf pods serve`, or correct ISLANDS; "
    'ON_POD_FAILURE = "wait" would wait for it.'
  )


def test_a_server_that_never_comes_is_waited_for_so_long(
  corpus, tmp_path, capsys, table
):
  line, secs = refused(
    corpus,
    tmp_path,
    capsys,
    ISLANDS=[["127.0.0.1:9"], ["127.0.0.1:19"]],
    ON_POD_FAILURE="wait",
    POD_TIMEOUT_SECS=1.0,
    POD_WAIT_SECS=3.0,
  )
  table("POD_WAIT_SECS reached", secs, line)
  assert line == (
    "palm_mtf: pod 0: its server 127.0.0.1:9 has not answered for 1 seconds, "
    "at the start; it was waited for, 3 seconds (POD_WAIT_SECS); run the same "
    "command to go on."
  )


def test_a_mistyped_address_is_refused(corpus, tmp_path, capsys, table):
  for server, message in (
    ("10.0.0.1", "pod 1 has '10.0.0.1': write \"host:port\""),
    ("no-such-host.invalid:22", 'the name "no-such-host.invalid" has no IPv4'),
  ):
    islands = [["127.0.0.1:9"], [server]]
    line, secs = refused(corpus, tmp_path, capsys, ISLANDS=islands)
    table("mistyped address", secs, line)
    assert line.startswith(f"palm_mtf: ISLANDS: {message}")


def test_a_clients_address_that_cannot_be_is_refused(
  corpus, tmp_path, capsys, table
):
  islands = [["127.0.0.1:9"], ["127.0.0.1:19"]]
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    for given, message in (
      (
        f"127.0.0.1:{port}",
        f"port {port} is in use; give another, or 0 for any.",
      ),
      ("192.0.2.1", "this host has no such address."),
    ):
      macros = {"ISLANDS": islands, "CLIENT_ADDRESS": given}
      line, secs = refused(corpus, tmp_path, capsys, **macros)
      table(f"CLIENT_ADDRESS {given}", secs, line)
      host, _, shown = given.partition(":")
      assert line.startswith(
        f'palm_mtf: CLIENT_ADDRESS = "{host}:{shown or 0}": {message}'
      )


@pytest.mark.slow
@pytest.mark.parametrize("cluster_of", ["version", "devices", "threads"])
def test_a_server_that_differs_is_refused_under_every_policy(
  cluster, table, cluster_of
):
  other = {
    "version": lambda: start("-c", OTHER_VERSION),
    "devices": lambda: serve(1),
    "threads": lambda: serve(2, threads=3),
  }[cluster_of]()
  with other:
    cluster.addresses[1] = cluster.address_of(other)
    macros = {}
    if cluster_of == "devices":
      macros = {"MESH_SHAPE": "data:2", "LAYOUT": "batch:data"}
    begun = time.monotonic()
    client = cluster.client(ON_POD_FAILURE="wait", **macros)
    _, error = client.communicate(timeout=60)
    other.kill()
  assert client.returncode == 2, error
  line = error.splitlines()[-1]
  table(f"other {cluster_of}, from the command", time.monotonic() - begun, line)
  pod = 0 if cluster_of == "devices" else 1
  assert line.startswith(f"palm_mtf: pod {pod}: its server ")
  assert re.search("has palm_mtf 0.0.1|serves 1 devices|with 3 threads", line)


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [1_000, 4_000, 16_000, 64_000, 256_000])
@pytest.mark.parametrize("closes", [False, True], ids=["silent", "closed"])
def test_a_link_that_fails_at_any_moment_ends_the_run(
  cluster, table, num_bytes, closes
):
  """From the first question on, through the session's start, to a step."""
  cluster.relay.fail_after(num_bytes, closes)
  client = cluster.client()
  assert cluster.relay.failed.wait(60)
  begun = time.monotonic()
  _, error = client.communicate(timeout=120)
  secs = time.monotonic() - begun
  line = error.splitlines()[-1]
  how = "closed" if closes else "silent"
  table(f"link {how} after {num_bytes} bytes", secs, line)
  assert client.returncode == 2, error
  assert line.startswith(
    f"palm_mtf: pod 1: its server {cluster.addresses[1]} {NO_ANSWER}, "
  )
  assert secs < MOST_SECS
