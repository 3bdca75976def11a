# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps TensorFlow's servers to this machine.

Whoever reaches such a server may run any program on it, files included, and
TensorFlow makes it listen on all of the machine's addresses. So the socket is
bound to the loopback device between its making and the first answer.
"""

import contextlib
import os
import socket


def keep_to_this_machine(port: int) -> None:
  """Lets the sockets of this process that listen on `port` hear loopback only.

  Raises:
    OSError: the kernel refuses.
  """
  for name in os.listdir("/proc/self/fd"):
    with contextlib.ExitStack() as stack:
      try:
        listener = socket.socket(fileno=os.dup(int(name)))
        stack.enter_context(listener)
        if listener.getsockname()[1] != port:
          continue
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
          continue
      except (OSError, IndexError, TypeError):
        continue  # no socket of the network
      device = b"lo\0"
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device)
