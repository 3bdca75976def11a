# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Whatever answers in place of a manager is one line; beats outlive it."""

import contextlib
import http.server
import threading
import time

import pytest

from palm_mtf.errors import UserError
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.service import serve
from palm_mtf.runtime.manager.slices import Wish
from tests.processes import wait_for
from tests.refusals import message_of
from tests.runtime.intrusion import free_ports
from tests.runtime.manager.service_test import (
  connect,
  register,
  tensorflow_address,
)


@contextlib.contextmanager
def web_server():
  handler = http.server.SimpleHTTPRequestHandler
  with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


NOBODY_ANSWERS = (
  "no manager answers there; start `palm_mtf pods manage`, or give the address "
  "that it prints, and its key if it has one."
)


def refusal(address):
  with ManagerClient("--manager", address) as client:
    return message_of(client.call, "list_all")


def test_where_no_manager_answers_is_one_line():
  (port,) = free_ports(1)
  with web_server() as web:
    for address in (f"127.0.0.1:{port}", web):
      assert refusal(address) == f'--manager = "{address}": {NOBODY_ANSWERS}'


def test_a_server_of_tensorflow_is_no_manager():
  address = tensorflow_address()
  assert refusal(address) == (
    f'--manager = "{address}": is no manager of palm_mtf; give the address '
    "that `palm_mtf pods manage` prints."
  )


def test_an_environment_with_a_proxy_reaches_the_manager(tmp_path, monkeypatch):
  monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
  with serve("127.0.0.1", 0, str(tmp_path / "state"), "") as port:
    with connect(port) as client:
      assert client.call("list_all") == []


def is_listed(port, owner):
  """Returns whether a manager answers, and has slices of an owner."""
  with connect(port) as client, contextlib.suppress(UserError):
    return client.call("list_all")[0]["owners"] == [owner]
  return False


def test_an_owner_keeps_its_slices_while_the_manager_is_away(tmp_path):
  state, (port,) = str(tmp_path / "state"), free_ports(1)
  wish = Wish(slices=["2"])
  with contextlib.closing(connect(port)) as client:
    with serve("127.0.0.1", port, state, ""):
      register(client, tensorflow_address(), 2)
      places = client.allocate("run", wish)
    assert client.allocate("run", wish) == places
    with pytest.raises(UserError):
      client.allocate("another", wish)
    with serve("127.0.0.1", port, state, ""):
      wait_for(lambda: is_listed(port, "run"))
      assert client.allocate("run", wish) == places
      client.close()
      assert not is_listed(port, "run")


@pytest.mark.slow
def test_an_owner_whose_slices_are_released_is_warned_once(tmp_path, caplog):
  with serve("127.0.0.1", 0, str(tmp_path / "state"), "") as port:
    with connect(port) as client, connect(port) as other:
      register(client, tensorflow_address(), 2)
      client.allocate("run", Wish(slices=["2"]))
      other.call("release", owner="run")
      wait_for(lambda: "the manager has released" in caplog.text)
      time.sleep(2.5)  # more beats
  warnings = [x.message for x in caplog.records if x.levelname == "WARNING"]
  assert warnings == [
    "the manager has released the slices of this process (run); other clients "
    "may use their devices"
  ]
