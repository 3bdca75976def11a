# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits the connections from one address before TLS begins, as gRPC cannot."""

import asyncio
import collections
import contextlib

from palm_mtf.runtime.addresses import ANY_ADDRESS, explain_start_error
from palm_mtf.runtime.server.restricted_port import restricted_port

_MOST_OF_ADDRESS = 64
_CHUNK_BYTES = 2**16


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
    with contextlib.closing(writer):
      if counts[address] >= _MOST_OF_ADDRESS:
        return
      counts[address] += 1
      try:
        with contextlib.suppress(OSError):
          inner, to = await asyncio.open_unix_connection(path)
          await asyncio.gather(_copy(reader, to), _copy(inner, writer))
      finally:
        counts[address] -= 1

  is_shared = ip != ANY_ADDRESS  # guards of `restricted_port` listen, too
  try:
    with contextlib.ExitStack() as stack:
      if is_shared:
        port = stack.enter_context(restricted_port(ip, port))
      return await asyncio.start_server(
        take, ANY_ADDRESS, port, reuse_port=is_shared
      )
  except OSError as error:
    raise explain_start_error(f"{ip}:{port}", error) from None


async def _copy(
  reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
  """Copies bytes until one side ends; then closes `writer`.

  This also ends the copy in the other direction.
  """
  with contextlib.closing(writer), contextlib.suppress(OSError):
    while chunk := await reader.read(_CHUNK_BYTES):
      writer.write(chunk)
      await writer.drain()
