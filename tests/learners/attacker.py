# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run with a handler of the test, and calls that no learner makes."""

import contextlib
import subprocess

import grpc
import numpy as np

from palm_mtf.learners.client import LearnerClient
from palm_mtf.learners.members import Members, add_member
from palm_mtf.learners.protocol import Message
from palm_mtf.learners.service import SERVICE, TOKEN, serve
from palm_mtf.runtime.manager.client import TLS_NAME


def make_key(folder):
  """Makes a key and a certificate, as docs/pods.md does; returns the PREFIX."""
  prefix = f"{folder}/run"
  command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=pods"
  files = ["-keyout", f"{prefix}.key", "-out", f"{prefix}.pem"]
  subprocess.run(
    [*command.split(), *files], check=True, stderr=subprocess.DEVNULL
  )
  return prefix


class Echo:
  """A handler that gives arrays out and takes the same arrays back."""

  def __init__(self, **arrays):
    self.arrays, self.taken = arrays, []

  def join(self, member, header):
    return Message({"member": member, **header})

  def next(self, member, header):
    return Message({"kind": "steps", "work": "1"}, self.arrays)

  def expect(self, member, header):
    return {x: (y.dtype.name, y.shape) for x, y in self.arrays.items()}

  def contribute(self, member, message):
    self.taken.append((member, message))
    return Message({"accepted": True, "reason": ""})


class Target:
  """A run at an address, of which an attacker has a token."""

  def __init__(self, address, prefix, token):
    self.address, self.prefix, self.token = address, prefix, token

  def connect(self, token=None, certificate=None, wait_secs=0.0):
    """Returns a learner's client; a context manager."""
    certificate = certificate or f"{self.prefix}.pem"
    token = self.token if token is None else token
    return LearnerClient(self.address, certificate, token, wait_secs)

  @contextlib.contextmanager
  def open(self, token=None):
    """Yields a function that sends any bytes to a method."""
    with open(f"{self.prefix}.pem", "rb") as file:
      trusted = grpc.ssl_channel_credentials(file.read())
    unlimited = [
      (f"grpc.max_{x}_message_length", -1) for x in ("send", "receive")
    ]
    options = (*TLS_NAME, *unlimited)
    metadata = [(TOKEN, self.token if token is None else token)]
    with grpc.secure_channel(self.address, trusted, options) as channel:

      def call(method, chunks, secs):
        send = channel.stream_stream(f"/{SERVICE}/{method}")
        return send(iter(chunks), timeout=secs, metadata=metadata)

      yield call

  def send(self, method, chunks, secs=20.0, token=None):
    """Sends any bytes; returns the error's code, or "OK", and its details."""
    with self.open(token) as call:
      try:
        list(call(method, chunks, secs))
      except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


class Run(Target):
  """A run that is served on loopback."""

  def __init__(self, folder, prefix, handler):
    self.tokens, self.handler = f"{folder}/tokens", handler
    self._ended = contextlib.ExitStack()
    token = add_member(self.tokens, "alice/1")
    members = Members(self.tokens)
    self.port = self._ended.enter_context(
      serve("127.0.0.1", 0, prefix, members, handler)
    )
    super().__init__(f"127.0.0.1:{self.port}", prefix, token)

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self._ended.close()


def numbers(*shape):
  """Returns float32 numbers, no two equal."""
  return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
