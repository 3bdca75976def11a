# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts a TensorFlow server in this process."""

import contextlib

from palm_mtf import __version__
from palm_mtf._tf import tf
from palm_mtf.machine.compiled_code import check_xla_flags
from palm_mtf.machine.host_memory import memory_bytes, resident_bytes
from palm_mtf.machine.processors import kernel_flags, kernels_here
from palm_mtf.native.operations import operations, operations_built_with
from palm_mtf.runtime.addresses import ANY_ADDRESS, explain_start_error
from palm_mtf.runtime.host_functions import HOST_FUNCTIONS, host_function
from palm_mtf.runtime.processes import function_token
from palm_mtf.runtime.server.clients import add_server
from palm_mtf.runtime.server.restricted_port import restricted_port
from palm_mtf.runtime.server_info import ServerInfo, publish_info

host_function(resident_bytes)


def start_server(
  num_devices: int, num_threads: int, listen: tuple[str, int] = ("127.0.0.1", 0)
) -> tf.distribute.Server:
  """Starts a TensorFlow server in this process.

  Args:
    num_devices: number of virtual CPU devices.
    num_threads: number of threads per operation; 0 is one per core.
    listen: IPv4 address and port; 0 is any free port, "0.0.0.0" every address.

  Raises UserError if the port is taken, the system cannot limit who may connect
  to the server, or TF_XLA_FLAGS cannot work with so many devices.
  """
  check_xla_flags(num_devices)
  ip, port = listen
  config = tf.ConfigProto(
    device_count={"CPU": num_devices, "GPU": 0},
    intra_op_parallelism_threads=num_threads,
    # Have one thread besides those that compute, because a host function, such
    # as one that writes a checkpoint, blocks a thread. With more threads, more
    # operations would hold results in memory at the same time.
    inter_op_parallelism_threads=max(2, num_threads) + 1,
  )
  # Any job name works, because a client's session later gives the server
  # another name. The session recognizes the server by this address.
  host = "127.0.0.1" if ip == ANY_ADDRESS else ip
  try:
    with contextlib.ExitStack() as stack:
      if ip != ANY_ADDRESS:
        port = stack.enter_context(restricted_port(ip, port))
      server = tf.distribute.Server(
        {"unnamed": [f"{host}:{port}"]}, config=config, start=False
      )
  except (OSError, tf.errors.OpError) as error:
    raise explain_start_error(f"{host}:{listen[1]}", error) from None
  server.start()
  add_server(server.target)
  _, available = memory_bytes()
  info = ServerInfo(
    palm_mtf=__version__,
    tensorflow=tf.__version__,
    num_devices=num_devices,
    num_threads=num_threads,
    device_bytes=available // num_devices,
    functions={x: function_token(y) for x, y in HOST_FUNCTIONS.items()},
    has_native=operations() is not None,
    cpu_flags=kernel_flags(),
    kernels=kernels_here(operations_built_with()),
  )
  publish_info(server.target, info)
  return server
