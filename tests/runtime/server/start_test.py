# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server starts restricted, or not at all."""

import errno
import os
import socket

import pytest

from palm_mtf.errors import UserError
from palm_mtf.runtime.server import restricted_port
from palm_mtf.runtime.server.start import start_server


def test_a_port_that_another_process_took_is_one_line():
  """This happens if two `pods serve` start at the same time."""
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    with pytest.raises(UserError) as error:
      start_server(1, 1, ("127.0.0.1", port))
  assert str(error.value) == (
    f"127.0.0.1:{port}: another process has just begun to listen there; give "
    "another port, or 0 for any."
  )


def test_a_system_that_cannot_restrict_a_server_gets_none(monkeypatch):
  def refuse(listener):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(restricted_port, "restrict_to_loopback", refuse)
  with pytest.raises(UserError, match=r"\(Operation not permitted\)"):
    start_server(1, 1)
