# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a pod's server says of itself to whoever asks: also that it is there.

It is a variable, which a server keeps beside those of any session: asking is a
session of TensorFlow like any other, with a bound. Reading it waits for a
thread that computes, and a step may keep all of those busy for long, a first
one above all, which compiles. That a server is there is therefore asked for in
another way, which takes none of them (`ask_incarnation`).
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator

from palm_mtf import __version__
from palm_mtf._tf import tf

_NAME = "palm_mtf_server_facts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerFacts:
  """What a server is.

  Attributes:
    palm_mtf: its version.
    tensorflow: its version.
    num_devices: that it serves.
    num_threads: that share an operation's work.
  """

  palm_mtf: str
  tensorflow: str
  num_devices: int
  num_threads: int


class NoAnswerError(Exception):
  """A server did not say what it is; says why."""


class NotOursError(NoAnswerError):
  """What answers is no server of palm_mtf, or not yet."""


def publish(
  server: tf.distribute.Server, num_devices: int, num_threads: int
) -> None:
  """Lets a server of this process say what it is."""
  facts = ServerFacts(
    palm_mtf=__version__,
    tensorflow=tf.__version__,
    num_devices=num_devices,
    num_threads=num_threads,
  )
  with tf.Graph().as_default(), tf.Session(server.target) as session:
    text = tf.constant(json.dumps(dataclasses.asdict(facts)))
    session.run(tf.raw_ops.AssignVariableOp(resource=_handle(), value=text))


def ask(address: str, secs: float) -> ServerFacts:
  """Asks the server at "host:port" what it is.

  Raises:
    NoAnswerError: it does not answer in time.
    NotOursError: it does not know what it is.
  """
  with _question(address, secs) as session:
    with session.graph.as_default():
      value = tf.raw_ops.ReadVariableOp(resource=_handle(), dtype=tf.string)
    return ServerFacts(**json.loads(session.run(value)))


def ask_incarnation(address: str, secs: float) -> int:
  """Asks the server at "host:port" for the number it drew when it started.

  Raises:
    NoAnswerError: it does not answer in time.
    NotOursError: it answers something else.
  """
  with _question(address, secs) as session:
    with session.graph.as_default():
      tf.no_op()
    session._extend_graph()  # begins the session; without it TensorFlow warns
    return session.list_devices()[0].incarnation


@contextlib.contextmanager
def _question(address: str, secs: float) -> Iterator[tf.Session]:
  """Gives a session with a bound; raises NoAnswerError where it fails."""
  config = tf.ConfigProto(operation_timeout_in_ms=max(1, int(1000 * secs)))
  try:
    session = tf.Session(f"grpc://{address}", graph=tf.Graph(), config=config)
    yield session
    session.close()  # where it failed there is none
  except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError):
    raise NoAnswerError(f"has not answered for {secs:g} seconds") from None
  except (tf.errors.OpError, ValueError, TypeError):
    raise NotOursError("is not one of palm_mtf") from None


def difference(facts: ServerFacts, first: ServerFacts) -> str:
  """Returns why a server cannot work with this client; "" if it can.

  Args:
    facts: facts about the server.
    first: facts about the first server of the run.
  """
  for name, theirs, ours in (
    ("palm_mtf", facts.palm_mtf, __version__),
    ("TensorFlow", facts.tensorflow, tf.__version__),
  ):
    if theirs != ours:
      return f"has {name} {theirs} and this client {ours}"
  if facts.num_threads != first.num_threads:
    return (
      f"computes with {facts.num_threads} threads and pod 0's first with "
      f"{first.num_threads}, whose bits would differ (--threads)"
    )
  return ""


def _handle() -> tf.Tensor:
  return tf.raw_ops.VarHandleOp(
    dtype=tf.string, shape=[], container="", shared_name=_NAME
  )
