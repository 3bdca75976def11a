# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pods train through a tunnel that requires certificates, as in docs/pods.md.

The test runs both ends of the tunnel, with Python's ssl.
"""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading

import pytest

from tests import runs
from tests.runtime.served import Served

MOST_BYTES = 65536


@pytest.fixture
def identity(tmp_path):
  """A self-signed certificate, and its key."""
  if not shutil.which("openssl"):
    pytest.skip("no openssl here")
  key, certificate = tmp_path / "pods.key", tmp_path / "pods.pem"
  subprocess.run(
    [
      *"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=a".split(),
      *["-keyout", key, "-out", certificate],
    ],
    check=True,
    capture_output=True,
  )
  return certificate, key


def context_of(identity, is_server):
  """Returns a TLS context that demands the same certificate of the peer."""
  protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
  context = ssl.SSLContext(protocol)
  context.check_hostname = False
  context.verify_mode = ssl.CERT_REQUIRED
  context.load_verify_locations(identity[0])
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


@pytest.mark.slow
def test_pods_train_the_bits_of_one_process_through_tunnels(
  identity, corpus, tmp_path
):
  tunnels = Tunnels()
  settings = {"NUM_PODS": 2, "TRAIN_STEPS": 4, "PROMPTS": []}
  with Served(2) as servers:
    islands = []
    for address in servers.addresses:
      far = context_of(identity, is_server=True)
      near = context_of(identity, is_server=False)
      end = tunnels.opens(address, accepts=far)
      islands.append([tunnels.opens(end, connects=near)])
    places = {"in_process": {}, "cluster": {"ISLANDS": islands}}
    for place, macros in places.items():
      macros = {**settings, **macros, "PODS": place}
      runs.finish(runs.start("train", corpus, tmp_path / place, **macros))
  runs.assert_same_tensors(*(tmp_path / place for place in places), 4)
