# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A manager's servers join, leave, are drained, and outlive its death."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from palm_mtf.commands.pods import join_manager
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.runtime.client import heartbeat
from palm_mtf.runtime.client.heartbeat import Heartbeat
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Wish
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import NoAnswerError, read_incarnation
from tests import processes, runs
from tests.log_lines import without_stamps
from tests.refusals import message_of
from tests.runtime.intrusion import free_ports


class Processes(contextlib.ExitStack):
  """A manager and servers that register there, as processes."""

  def __init__(self, folder):
    super().__init__()
    (port,) = free_ports(1)
    self.state, self.address = str(folder / "state"), f"127.0.0.1:{port}"
    self.manager = self.manage()

  def start(self, *arguments):
    command = ("-m", "palm_mtf", "pods", *arguments)
    process = self.enter_context(processes.start(*command, stderr=None))
    self.callback(process.kill)
    return process

  def manage(self):
    """Starts the manager; returns its process when it answers."""
    flags = f"--listen={self.address}", f"--state={self.state}"
    process = self.start("manage", *flags)
    assert process.stdout.readline() == f"managing on {self.address}\n"
    return process

  def serve(self, *flags):
    """Starts a server; returns its process, and its address when it serves."""
    to = "--threads=1", f"--manager={self.address}"
    process = self.start("serve", *to, *flags)
    return process, process.stdout.readline().split()[-1]

  def list_all(self):
    with ManagerClient("--manager", self.address) as client:
      return client.call("list_all")

  def wait_for(self, states):
    """Waits until servers have these states, by address."""
    end = time.monotonic() + 30
    while (found := self._states()) != states:
      assert time.monotonic() < end, found
      time.sleep(0.1)

  def _states(self):
    with contextlib.suppress(ValueError):  # a manager that just starts
      return {x["address"]: x["state"] for x in self.list_all() if "state" in x}


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
  with Processes(tmp_path_factory.mktemp("pods")) as found:
    yield found


def start(devices, threads):
  """Starts a server in this process; returns its address."""
  return start_server(devices, threads).target.removeprefix("grpc://")


@pytest.fixture(scope="module")
def served(pods):
  """Address of a server that stays, in this process."""
  address = start(devices=2, threads=1)
  with ManagerClient("--manager", pods.address) as client:
    join_manager(client, address, "east")
    yield address


def to(pods):
  return f"--manager={pods.address}"


def test_a_list_has_servers_and_owners(pods, served, palm_mtf):
  with ManagerClient("MANAGER", pods.address) as client:
    client.allocate("run-1", Wish(slices=["1x2"], device_bytes=10**8))
    code, out, _ = palm_mtf("pods", "list", to(pods))
    assert code == 0
    head, row, owner = out.splitlines()
    assert head.split("  ")[0] == "server"
    found = row.split()
    assert (*found[:3], *found[4:]) == (served, "east", "2", "serving", "run-1")
    assert float(found[3]) > 0.1
    assert owner == "run-1 has 1x2 (0.1 GB per device)"
    _, out, _ = palm_mtf("pods", "list", to(pods), "--json")
    server, owner = map(json.loads, out.splitlines())
    assert server["address"] == served and server["owners"] == ["run-1"]
    assert server["kind"].keys() == {"palm_mtf", "tensorflow", "threads", "cpu"}
    assert owner["owner"] == "run-1"
    assert owner["places"] == [[[served, 0], [served, 1]]]


def test_a_drained_server_gets_no_slices_until_that_is_undone(
  pods, served, palm_mtf
):
  assert palm_mtf("pods", "drain", served, to(pods)) == (
    *(0, f"new slices avoid {served}\n", ""),
  )
  with ManagerClient("MANAGER", pods.address) as client:
    with pytest.raises(ValueError, match="no island can hold"):
      client.allocate("run-2", Wish(slices=["1"]))
  assert palm_mtf("pods", "drain", served, "--undo", to(pods), "--json") == (
    *(0, f'{{"address": "{served}", "is_drained": false}}\n', ""),
  )


def test_a_released_owner_has_no_devices(pods, served, palm_mtf, fails):
  with ManagerClient("MANAGER", pods.address) as client:
    client.allocate("run-3", Wish(slices=["1"]))
    assert fails("pods", "release", "run-4", to(pods)) == (
      'no owner "run-4" (did you mean "run-3"?); `palm_mtf pods list` prints '
      "every owner."
    )
    assert palm_mtf("pods", "release", "run-3", to(pods)) == (
      *(0, "run-3 has no slices\n", ""),
    )
    assert [x["owners"] for x in pods.list_all()] == [[]]


@pytest.mark.slow
def test_a_killed_manager_that_is_started_again_has_lost_nothing(pods, served):
  with ManagerClient("MANAGER", pods.address) as client:
    wish = Wish(slices=["2"])
    places = client.allocate("run-5", wish)
    before = pods.list_all()
    pods.manager.kill()
    pods.manager.wait()
    assert client.allocate("run-5", wish) == places
    pods.manager = pods.manage()
    pods.wait_for({served: "serving"})
    assert pods.list_all() == before
    time.sleep(7)  # longer than a server may be silent
    pods.wait_for({served: "serving"})
    assert client.allocate("run-5", wish) == places


def test_a_second_manager_on_the_same_file_is_refused(pods, fails):
  flags = "--listen=127.0.0.1:0", f"--state={pods.state}"
  assert fails("pods", "manage", *flags) == (
    f"--state = '{pods.state}': another manager uses it; stop that one, or "
    "name another file."
  )


@pytest.mark.slow  # starts several servers
def test_servers_join_and_leave_while_a_client_has_a_slice(tmp_path):
  with Processes(tmp_path) as pods:
    first, address = pods.serve()
    with ManagerClient("MANAGER", pods.address) as client:
      wish = Wish(slices=["1"])
      assert client.allocate("run", wish) == [[(address, 0)]]
      second, other = pods.serve()
      assert client.allocate("run", wish) == [[(address, 0)]]
      first.send_signal(signal.SIGKILL)  # is silent
      pods.wait_for({address: "lost", other: "serving"})
      assert client.allocate("run", wish) == [[(other, 0)]]
      third, last = pods.serve()
      second.terminate()  # says so
      assert second.wait() == 0
      pods.wait_for({address: "lost", last: "serving"})
      assert client.allocate("run", wish) == [[(last, 0)]]
      third.send_signal(signal.SIGSTOP)
      pods.wait_for({address: "lost", last: "lost"})
      third.send_signal(signal.SIGCONT)
      pods.wait_for({address: "lost", last: "serving"})


@pytest.mark.slow  # waits until a server has registered again
def test_a_server_registers_again_with_a_manager_that_lost_its_file(tmp_path):
  with Processes(tmp_path) as pods:
    _, address = pods.serve()
    pods.manager.kill()
    pods.manager.wait()
    for path in tmp_path.iterdir():
      path.unlink()
    pods.manage()
    pods.wait_for({address: "serving"})


def test_a_server_that_cannot_register_does_not_start(fails):
  (port,) = free_ports(1)
  assert fails("pods", "serve", f"--manager=127.0.0.1:{port}") == (
    f'--manager = "127.0.0.1:{port}": no manager answers there; start '
    "`palm_mtf pods manage`, or give the address that it prints, and its key "
    "if it has one."
  )

  code = fails("pods", "serve", "--manager=localhost:1", "--island=a b")
  assert code == (
    '--island = \'a b\': give a name of letters, digits, ".", "-" and "_".'
  )


SPLIT = {"MESH_SHAPE": "data:2", "LAYOUT": "batch:data"}
MESH = MeshLayout(mesh_shape="data:2", layout="batch:data")


def serve(devices, variables=None):
  flags = ["--listen=localhost:0", f"--devices={devices}", "--threads=1"]
  command = ["-m", "palm_mtf", "pods", "serve", *flags]
  return processes.start(*command, variables=variables, stderr=None)


@contextlib.contextmanager
def addresses_of(*started):
  """Yields the addresses of server processes, and ends them."""
  with contextlib.ExitStack() as stack:
    for process in started:
      stack.enter_context(process)
      stack.callback(process.terminate)
    yield [process.stdout.readline().split()[-1] for process in started]


@pytest.fixture(scope="module")
def servers():
  """Addresses of servers: 2 devices, 1 device, more threads, other version."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("palm_mtf.runtime.server.start.__version__", "0.0.1")
    other_version = start(2, 1)
  return [start(2, 1), start(1, 1), start(2, 3), other_version]


@pytest.mark.slow
def test_pods_of_several_hosts_train_the_bits_of_one_process(corpus, tmp_path):
  """After the first client, a second one resumes on the same servers.

  The second client has another address.
  """
  settings = {"NUM_PODS": 2, "PROMPTS": [], **SPLIT}
  with addresses_of(serve(2), serve(1), serve(1)) as servers:
    islands = [servers[:1], servers[1:]]
    cluster = {"PODS": "cluster", "ISLANDS": islands}
    for folder, steps, more in (
      ("in_process", 4, {}),
      ("cluster", 2, cluster),
      ("cluster", 4, {**cluster, "CLIENT_ADDRESS": "127.0.0.2"}),
    ):
      process = runs.start(
        "train",
        corpus,
        tmp_path / folder,
        **{**settings, **more, "TRAIN_STEPS": steps},
      )
      _, error = process.communicate(timeout=240)
      assert process.returncode == 0, error
  runs.assert_same_tensors(tmp_path / "in_process", tmp_path / "cluster", 4)


def refusal(*islands):
  pods = PodsConfig(num_pods=len(islands), pods="cluster", islands=islands)
  with PodServers(pods, MESH) as none:
    return message_of(Heartbeat, none, none.places(), secs=4.0)


@pytest.mark.slow
def test_a_client_that_was_stopped_while_it_asked_asks_again(
  servers, monkeypatch
):
  """The answer may come while Ctrl-Z or a migration stops the client."""
  times = []

  def read(address, secs):
    times.append(time.monotonic())
    if len(times) == 1:
      time.sleep(3 * secs)
      raise NoAnswerError("has not answered")
    return read_incarnation(address, secs)

  monkeypatch.setattr(heartbeat, "read_incarnation", read)
  pods = PodsConfig(num_pods=1, pods="cluster", islands=[servers[:1]])
  with PodServers(pods, MESH) as none:
    assert Heartbeat(none, none.places(), secs=1.0).infos.keys() == {servers[0]}
  assert len(times) == 2


END = ", at the start"


@pytest.mark.parametrize(
  ("index", "problem"),
  [
    (
      1,
      "serves 1 devices, but the run needs its device 1, counted from 0 "
      f"(--devices){END}.",
    ),
    (
      2,
      "computes with 3 threads and pod 0's first with 1, whose bits would "
      f"differ (--threads){END}.",
    ),
    (3, "has palm_mtf 0.0.1"),
  ],
  ids=["devices", "threads", "version"],
)
def test_a_server_of_other_devices_threads_or_version_is_named(
  index, problem, servers
):
  message = refusal(servers[:1], servers[index : index + 1])
  expected = f"pod 1: its server {servers[index]} {problem}"
  assert message[: len(expected)] == expected


@pytest.mark.slow
def test_a_server_on_another_kind_of_cpu_is_refused_before_the_first_step(
  servers,
):
  other = serve(2, variables={"ONEDNN_MAX_CPU_ISA": "SSE41"})
  with addresses_of(other) as (address,):
    message = refusal(servers[:1], [address])
  assert message.startswith(
    f"pod 1: its server {address} has another kind of CPU than pod 0's first "
    "(with ONEDNN_MAX_CPU_ISA=SSE41, without avx2, "
  )


@pytest.mark.parametrize(
  ("flag", "line"),
  [
    (
      "--listen=0.0.0.0:0",
      '--listen = "0.0.0.0:0" lets every host that can reach this host run '
      "programs on it; give one address, or add --allow_any_address.",
    ),
    (
      "--listen=127.0.0.1:{port}",
      '--listen = "127.0.0.1:{port}": port {port} is in use; give another, or '
      "0 for any.",
    ),
    ("--devices=0", "--devices = 0: give a whole number of at least 1."),
  ],
  ids=["every_address", "port_in_use", "no_device"],
)
def test_where_a_server_cannot_listen_is_one_line(flag, line, fails):
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    assert fails("pods", "serve", flag.format(port=port)) == (
      line.format(port=port)
    )


@contextlib.contextmanager
def apart(script):
  """Runs a shell script with separate mounts and network addresses."""
  own = "unshare --user --map-root-user --net --mount sh -ec".split()
  if not shutil.which("unshare") or subprocess.call([*own, "ip link"]):
    pytest.skip("no namespaces, or no iproute2, here")
  with subprocess.Popen(
    [*own, "ip link set lo up\n" + script],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=processes.environment(),
  ) as process:
    try:
      yield process
    finally:
      process.kill()


def test_a_name_that_is_loopback_on_its_own_host_is_refused(tmp_path):
  """Debian's installer writes such a line into /etc/hosts."""
  hosts = tmp_path / "hosts"
  hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node-b\n")
  with apart(
    f"mount --bind {hosts} /etc/hosts\n"
    f"exec {sys.executable} -m palm_mtf pods serve --listen node-b:2222"
  ) as process:
    _, error = process.communicate(timeout=60)
  assert process.returncode == 2
  assert error == (
    'palm_mtf: --listen = "node-b:2222": "node-b" is 127.0.1.1 on this host, '
    "which no other host can reach; give an address that others can reach, or "
    "localhost.\n"
  )


WARNING = (
  "palm_mtf: warning: TensorFlow's protocol has no authentication: every host "
  "that reaches {where} can run programs and read files as this user; let a "
  "firewall admit only the client and the other servers"
)
ANY = "any address of this host"


def test_whoever_listens_on_every_address_is_warned(palm_mtf, monkeypatch):
  def end(*unused):
    raise UserError("no server")

  monkeypatch.setattr("palm_mtf.runtime.server.start.start_server", end)
  flags = "--listen=0.0.0.0:0", "--allow_any_address"
  _, _, error = palm_mtf("pods", "serve", *flags)
  warning, end = without_stamps(error).splitlines()
  assert warning == WARNING.format(where=ANY)
  assert end == "palm_mtf: no server"


def test_a_cluster_without_servers_is_refused():
  said = message_of(PodsConfig, num_pods=2, pods="cluster")
  assert "ISLANDS is empty" in said
