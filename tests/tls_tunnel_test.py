# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pods train through a tunnel that requires certificates, as in docs/pods.md.

The test runs both ends of the tunnel, with Python's ssl.
"""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading

import pytest

from tests import runs
from tests.runtime.served import Served

MOST_BYTES = 65536


def make_identity(folder, name):
  """Makes a key and a self-signed certificate."""
  if not shutil.which("openssl"):
    pytest.skip("no openssl here")
  key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
  subprocess.run(
    [
      *"openssl req -x509 -newkey rsa:2048 -nodes -days 1".split(),
      *["-subj", f"/CN={name}", "-keyout", key, "-out", certificate],
    ],
    check=True,
    capture_output=True,
  )
  return certificate, key


def context_of(identity, trusted, is_server):
  """Returns a TLS context; without `identity` a client has no certificate."""
  protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
  context = ssl.SSLContext(protocol)
  context.check_hostname = False
  context.verify_mode = ssl.CERT_REQUIRED
  context.load_verify_locations(trusted[0])
  if identity:
    context.load_cert_chain(*identity)
  return context


async def pass_on(reader, writer):
  """Passes bytes on in one direction until the sender ends."""
  with contextlib.suppress(OSError), contextlib.closing(writer):
    while data := await reader.read(MOST_BYTES):
      writer.write(data)
      await writer.drain()


class Tunnels:
  """Ends of tunnels, which run in a separate thread."""

  def __init__(self):
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._loop.run_forever, daemon=True).start()

  def opens(self, to, accepts=None, connects=None):
    """Opens one end of a tunnel; returns its address.

    Args:
      to: "host:port" to which the end connects.
      accepts: TLS context for accepted connections; None for no TLS.
      connects: TLS context for connections to `to`; None for no TLS.
    """
    host, _, port = to.rpartition(":")

    async def serve(reader, writer):
      with contextlib.closing(writer), contextlib.suppress(OSError):
        far = await asyncio.open_connection(host, int(port), ssl=connects)
        await asyncio.gather(pass_on(reader, far[1]), pass_on(far[0], writer))

    starting = asyncio.start_server(serve, "127.0.0.1", 0, ssl=accepts)
    started = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
    return f"127.0.0.1:{started.sockets[0].getsockname()[1]}"


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
  return make_identity(tmp_path_factory.mktemp("identity"), "pods")


def knock(address, context):
  """Sends bytes through a tunnel; returns what comes back."""
  host, _, port = address.rpartition(":")
  # A certificate is refused after the handshake, by an alert or by closing.
  with (
    contextlib.suppress(ssl.SSLError, ConnectionResetError),
    socket.create_connection((host, int(port)), timeout=10) as plain,
    context.wrap_socket(plain) as tls,
  ):
    tls.sendall(b"hello")
    return tls.recv(5)
  return b""


def test_who_has_no_certificate_or_another_ones_does_not_reach_a_server(
  identity, tmp_path
):
  with socket.create_server(("127.0.0.1", 0)) as server:
    server.settimeout(10)
    tunnel_end = Tunnels().opens(
      f"127.0.0.1:{server.getsockname()[1]}",
      accepts=context_of(identity, identity, is_server=True),
    )
    other = make_identity(tmp_path, "other")
    for mine in (None, other):
      context = context_of(mine, identity, is_server=False)
      assert knock(tunnel_end, context) == b""

    def answer():
      connection, _ = server.accept()  # the first one that arrives
      with connection:
        connection.sendall(connection.recv(5).upper())

    thread = threading.Thread(target=answer)
    thread.start()
    own = context_of(identity, identity, is_server=False)
    assert knock(tunnel_end, own) == b"HELLO"
    thread.join()


@pytest.mark.slow
def test_pods_train_the_bits_of_one_process_through_tunnels(
  identity, corpus, tmp_path
):
  tunnels = Tunnels()
  settings = {"NUM_PODS": 2, "TRAIN_STEPS": 4, "PROMPTS": []}
  with Served(2) as servers:
    islands = []
    for address in servers.addresses:
      far = context_of(identity, identity, is_server=True)
      near = context_of(identity, identity, is_server=False)
      end = tunnels.opens(address, accepts=far)
      islands.append([tunnels.opens(end, connects=near)])
    places = {"in_process": {}, "cluster": {"ISLANDS": islands}}
    for place, macros in places.items():
      macros = {**settings, **macros, "PODS": place}
      runs.finish(runs.start("train", corpus, tmp_path / place, **macros))
  runs.assert_same_tensors(*(tmp_path / place for place in places), 4)
