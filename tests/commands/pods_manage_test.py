# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A manager's servers join, leave, are drained, and outlive its death."""

import contextlib
import json
import signal
import time

import pytest

from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Wish
from tests import processes
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


@pytest.fixture(scope="module")
def served(pods):
  """Address of a server that stays."""
  return pods.serve("--devices=2", "--island=east")[1]


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
  pods, served, palm_mtf, fails
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
  near = served[:-1] + str((int(served[-1]) + 1) % 10)
  assert fails("pods", "drain", near, to(pods)) == (
    f'no server "{near}" (did you mean "{served}"?); `palm_mtf pods list` '
    "prints every server."
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


OTHER_VERSION = """
import palm_mtf
palm_mtf.__version__ = "9.9"
from palm_mtf.runtime.manager import client
client.PROTOCOL = 99
from palm_mtf.commands.pods_manage import manage
manage(listen="127.0.0.1:0", state={state!r}, policy="fifo", manager_tls="",
       allow_any_address=False)
"""


def test_a_manager_of_another_version_is_refused(tmp_path, fails):
  program = OTHER_VERSION.format(state=str(tmp_path / "state"))
  with processes.start("-c", program, stderr=None) as process:
    address = process.stdout.readline().split()[-1]
    for command in (["list"], ["serve", "--threads=1"]):
      line = fails("pods", *command, f"--manager={address}")
      assert line.startswith(
        f'--manager = "{address}": the manager is of palm_mtf 9.9 and you have '
        "palm_mtf "
      )
      assert line.endswith(", whose requests differ; use one version.")
    process.terminate()
    assert process.wait() == 0


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
