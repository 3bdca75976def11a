# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Information that servers publish to clients, and calls of their functions.

A server keeps its versions, devices and functions as JSON in a TensorFlow
variable that sessions share.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from palm_mtf import __version__
from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.json_text import dataclass_text, read_dataclass
from palm_mtf.machine.processors import (
  BFLOAT16_FLAGS,
  bfloat16_flags,
  describe_flags,
)
from palm_mtf.runtime.processes import Process

_INFO = "palm_mtf_server_facts"  # name of the variable with a server's info


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
  """Versions and devices of a server."""

  palm_mtf: str  # version
  tensorflow: str  # version
  num_devices: int
  num_threads: int  # threads that compute one operation
  device_bytes: int = 0  # bytes of host memory free at its start / num_devices
  # {name of a function: token with which sessions of clients call the function}
  functions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  has_native: bool = False  # has palm_mtf's C++ operations
  # CPU instruction sets that decide which kernels run. Servers of a run must
  # have the same, because the last bits of their results could differ.
  cpu_flags: Sequence[str] = ()
  # Versions and settings on which the last bits of results depend. Checkpoints
  # record them, so that a run that resumes can report a change.
  kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)


class NoAnswerError(Exception):
  """A server did not answer; the message says why."""


class NotOursError(NoAnswerError):
  """A server answers but is not palm_mtf's, or has not published its info."""


def read_info(address: str, secs: float) -> ServerInfo:
  """Reads a server's info; NoAnswerError if none comes in `secs` seconds."""
  # A busy server may answer too late: the read waits for a free thread, and a
  # training step, above all the first, which compiles, may use all threads.
  with _session(address, secs) as session:
    with session.graph.as_default():
      value = tf.raw_ops.ReadVariableOp(resource=_handle(), dtype=tf.string)
    return read_dataclass(ServerInfo, session.run(value))


def call_function(
  address: str, info: ServerInfo, function: Callable, text: str, secs: float
) -> str:
  """Calls a host function in the server at `address`; returns its result.

  The function takes and returns one string. `info` is the server's info. Raises
  NoAnswerError if the server does not answer within `secs` seconds.
  """
  with _session(address, secs) as session:
    with session.graph.as_default():
      process = Process("/device:cpu:0", info.functions)
      (value,) = process.call(function, [text], [tf.string])
    return session.run(value).decode()


def read_incarnation(address: str, secs: float) -> int:
  """Reads the incarnation, a random number that a server draws at its start.

  A number that has changed shows that the server was restarted. Raises
  NoAnswerError if the server does not answer within `secs` seconds.
  """
  # Listing the devices needs no thread of the server's pool for computing, so
  # even a busy server answers at once.
  with _session(address, secs) as session:
    with session.graph.as_default():
      tf.no_op()
    session._extend_graph()  # begins the session; without it TensorFlow warns
    return session.list_devices()[0].incarnation


@contextlib.contextmanager
def _session(address: str, secs: float) -> Iterator[tf.Session]:
  """Opens a session; NoAnswerError if a call in it fails or takes `secs`."""
  config = tf.ConfigProto(operation_timeout_in_ms=max(1, int(1000 * secs)))
  try:
    session = tf.Session(f"grpc://{address}", graph=tf.Graph(), config=config)
    yield session
    session.close()  # not after an error: then the server has no session
  except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError):
    raise NoAnswerError(f"has not answered for {secs:g} seconds") from None
  except (tf.errors.OpError, ValueError, TypeError):
    raise NotOursError("is not a server of palm_mtf") from None


def difference(info: ServerInfo, first: ServerInfo) -> str:
  """Returns why a server cannot work with this client; "" if it can.

  Servers of a run must compute the same bits. Therefore `info` is also compared
  with `first`, the info of the run's first server.
  """
  for name, theirs, ours in (
    ("palm_mtf", info.palm_mtf, __version__),
    ("TensorFlow", info.tensorflow, tf.__version__),
  ):
    if theirs != ours:
      return f"has {name} {theirs} and this client {ours}"
  # The last bits of a sum depend on the number of threads that compute it.
  if info.num_threads != first.num_threads:
    return (
      f"computes with {info.num_threads} threads and pod 0's first with "
      f"{first.num_threads}, whose bits would differ (--threads)"
    )
  if info.cpu_flags != first.cpu_flags:
    return (
      "has another kind of CPU than pod 0's first "
      f"({describe_flags(info.cpu_flags, first.cpu_flags)}): its kernels may "
      "compute other bits, and the comparison of the pods "
      "(FINGERPRINT_STEPS) would stop the run; use servers with one kind of CPU"
    )
  return ""


def check_bfloat16(infos: Mapping[str, ServerInfo], dtype: str) -> None:
  """Raises UserError if the graph needs bfloat16 products that a CPU lacks.

  `dtype` is the ACTIVATION_DTYPE of a run on CPUs.
  """
  # If the client's CPU multiplies bfloat16 numbers, so does the graph that the
  # client builds. On a CPU that cannot, oneDNN would end the process.
  if dtype != "bfloat16" or not bfloat16_flags():
    return
  for address, info in infos.items():
    if not BFLOAT16_FLAGS.intersection(info.cpu_flags):
      raise UserError(
        f'ACTIVATION_DTYPE = "bfloat16": the CPU of the server {address} does '
        "not multiply bfloat16 numbers, but this client's CPU does; start the "
        'client on the same kind of CPU as the servers, or give "float32".'
      )


def publish_info(target: str, info: ServerInfo) -> None:
  """Lets clients read the info of this process's server, which has `target`."""
  with tf.Graph().as_default(), tf.Session(target) as session:
    value = tf.convert_to_tensor(dataclass_text(info))
    session.run(tf.raw_ops.AssignVariableOp(resource=_handle(), value=value))


def _handle() -> tf.Tensor:
  return tf.raw_ops.VarHandleOp(
    dtype=tf.string, shape=[], container="", shared_name=_INFO
  )
