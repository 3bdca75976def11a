# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits the number of connections before TLS begins.

gRPC has no limit for one address. It has a limit for all, but beyond this limit
connections would still use the gate's file descriptors, without which a run
could write no checkpoint.
"""

import asyncio
import collections
import contextlib

from palm_mtf.runtime.addresses import ANY_ADDRESS, explain_start_error
from palm_mtf.runtime.server.restricted_port import restricted_port

MOST_CONNECTIONS = 256
_MOST_OF_ADDRESS = 64
_CHUNK_BYTES = 2**16
_BACKLOG = 64  # asyncio accepts as many before it closes those beyond a limit
# A peer that for so long reads nothing of a full buffer loses its connection.
_SECS = 60.0


async def open_gate(path: str, ip: str, port: int) -> asyncio.Server:
  """Listens on a TCP port; forwards each connection to the Unix socket `path`.

  Only `ip` gives access; see `restricted_port`. `port` 0 is any free port.

  Raises UserError if the port is taken, or access cannot be limited.
  """
  counts: collections.Counter[str] = collections.Counter()

  async def take(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    address = writer.get_extra_info("peername")[0]
    is_full = counts.total() >= MOST_CONNECTIONS
    if is_full or counts[address] >= _MOST_OF_ADDRESS:
      writer.transport.abort()
      return
    counts[address] += 1
    try:
      with contextlib.suppress(OSError):
        inner, to = await asyncio.open_unix_connection(path)
        await asyncio.gather(_copy(reader, to), _copy(inner, writer))
    finally:
      writer.transport.abort()
      counts[address] -= 1

  is_shared = ip != ANY_ADDRESS  # guards of `restricted_port` listen, too
  try:
    with contextlib.ExitStack() as stack:
      if is_shared:
        port = stack.enter_context(restricted_port(ip, port))
      return await asyncio.start_server(
        take, ANY_ADDRESS, port, reuse_port=is_shared, backlog=_BACKLOG
      )
  except OSError as error:
    raise explain_start_error(f"{ip}:{port}", error) from None


async def _copy(
  reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
  """Copies bytes until an end; then closes, which ends the other direction."""
  with contextlib.suppress(OSError, TimeoutError):
    while chunk := await reader.read(_CHUNK_BYTES):
      writer.write(chunk)
      async with asyncio.timeout(_SECS):
        await writer.drain()
    writer.close()
    async with asyncio.timeout(_SECS):
      await writer.wait_closed()  # after the last bytes
  writer.transport.abort()
