# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Info of a pod's server: versions, devices, liveness, and its client."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator

from palm_mtf import __version__
from palm_mtf._tf import tf

# Variables that a server keeps beside those of sessions: its info, and the
# client that works with it, "host:port incarnation" of the client's own server.
_INFO, _CLIENT = "palm_mtf_server_facts", "palm_mtf_server_client"
# A client that has ended does not answer; one that works does so at once.
_CLIENT_SECS = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
  """Versions and devices of a server."""

  palm_mtf: str  # version
  tensorflow: str  # version
  num_devices: int
  num_threads: int  # of an operation


class NoAnswerError(Exception):
  """A server did not answer; says why."""


class NotOursError(NoAnswerError):
  """A server that answers is not of palm_mtf, or has not published its info."""


def publish(
  server: tf.distribute.Server, num_devices: int, num_threads: int
) -> None:
  """Publishes the info of a server of this process."""
  info = ServerInfo(
    palm_mtf=__version__,
    tensorflow=tf.__version__,
    num_devices=num_devices,
    num_threads=num_threads,
  )
  with tf.Graph().as_default(), tf.Session(server.target) as session:
    session.run(
      [_assign(_INFO, json.dumps(dataclasses.asdict(info))), _assign(_CLIENT)]
    )


def read_info(address: str, secs: float) -> ServerInfo:
  """Reads the info of a server; raises NoAnswerError.

  Args:
    address: "host:port" of the server.
    secs: timeout in seconds.
  """
  # Needs a free thread of the server: a step that computes, or a first one that
  # compiles, may keep all of them busy for long.
  with _session(address, secs) as session:
    with session.graph.as_default():
      value = _read(_INFO)
    return ServerInfo(**json.loads(session.run(value)))


def claim(address: str, client: str, secs: float) -> str:
  """Gives a server to a client, unless another one still works with it.

  Args:
    address: "host:port" of the server.
    client: "host:port" of the client's own server.
    secs: timeout in seconds.

  Returns:
    Address of the client that has the server; "" if it is this one now.

  Raises:
    NoAnswerError: one of the two servers does not answer.
  """
  mine = f"{client} {read_incarnation(client, secs)}"
  with _session(address, secs) as session:
    with session.graph.as_default():
      held, assign = _read(_CLIENT), _assign(_CLIENT, mine)
    other = session.run(held).decode()
    if other not in ("", mine):
      where, incarnation = other.split()
      with contextlib.suppress(NoAnswerError):
        if read_incarnation(where, _CLIENT_SECS) == int(incarnation):
          return where
    session.run(assign)
  return ""


def read_incarnation(address: str, secs: float) -> int:
  """Reads the random number that a server drew at its start: its liveness.

  Args:
    address: "host:port" of the server.
    secs: timeout in seconds.
  """
  # A list of devices needs none of the threads that compute: a server that is
  # busy answers at once.
  with _session(address, secs) as session:
    with session.graph.as_default():
      tf.no_op()
    session._extend_graph()  # begins the session; without it TensorFlow warns
    return session.list_devices()[0].incarnation


@contextlib.contextmanager
def _session(address: str, secs: float) -> Iterator[tf.Session]:
  """Opens a session with a timeout; raises NoAnswerError where it fails."""
  config = tf.ConfigProto(operation_timeout_in_ms=max(1, int(1000 * secs)))
  try:
    session = tf.Session(f"grpc://{address}", graph=tf.Graph(), config=config)
    yield session
    session.close()  # after an error the server has none to close
  except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError):
    raise NoAnswerError(f"has not answered for {secs:g} seconds") from None
  except (tf.errors.OpError, ValueError, TypeError):
    raise NotOursError("is not one of palm_mtf") from None


def difference(info: ServerInfo, first: ServerInfo) -> str:
  """Returns why a server cannot work with this client; "" if it can.

  Args:
    info: info of the server.
    first: info of the run's first server.
  """
  for name, theirs, ours in (
    ("palm_mtf", info.palm_mtf, __version__),
    ("TensorFlow", info.tensorflow, tf.__version__),
  ):
    if theirs != ours:
      return f"has {name} {theirs} and this client {ours}"
  # Threads divide a sum, and the division decides its last bit.
  if info.num_threads != first.num_threads:
    return (
      f"computes with {info.num_threads} threads and pod 0's first with "
      f"{first.num_threads}, whose bits would differ (--threads)"
    )
  return ""


def _read(name: str) -> tf.Tensor:
  return tf.raw_ops.ReadVariableOp(resource=_handle(name), dtype=tf.string)


def _assign(name: str, text: str = "") -> tf.Operation:
  value = tf.constant(text)
  return tf.raw_ops.AssignVariableOp(resource=_handle(name), value=value)


def _handle(name: str) -> tf.Tensor:
  return tf.raw_ops.VarHandleOp(
    dtype=tf.string, shape=[], container="", shared_name=name
  )
