# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions in a server, through which clients use the server's accelerators.

The functions import JAX only when a client calls them, because the import takes
a second and 100 MB, which a server without accelerators need not spend.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

from palm_mtf.config import MeshLayout
from palm_mtf.errors import UserError
from palm_mtf.json_text import read_dataclass
from palm_mtf.runtime.host_functions import host_function

_Function = TypeVar("_Function", bound=Callable)

# The text of a host's `JaxFailedError` in the TensorFlow error that the client
# gets: the module and the function that failed, and JAX's message.
_FAILURE = re.compile(r"JAX failed in (\w+)\.(\w+): (.*)")
# Advice to the user, by the module of the function that failed.
_OUT_OF_MEMORY = {
  "pod_arrays": "raise NUM_MICROBATCHES, lower GLOBAL_BATCH_SIZE or take a "
  "larger mesh; `palm_mtf plan --compile` shows the memory.",
  "decode_arrays": "take a larger mesh or, if the command continues texts, "
  "continue fewer at once (NUM_SAMPLES, NUM_BEAMS, --slots); `palm_mtf plan "
  "--compile` shows the memory.",
}
_OUT_OF_MEMORY["stage_arrays"] = _OUT_OF_MEMORY["pod_arrays"]
_OTHERWISE = {
  "pod_arrays": "run the same command again; training resumes from the newest "
  "checkpoint.",
  "decode_arrays": "run the same command again.",
}
_OTHERWISE["stage_arrays"] = _OTHERWISE["pod_arrays"]


# Functions that clients call on accelerators, by `name_of`. The functions'
# modules register them at their import, which imports JAX.
POD_FUNCTIONS: dict[str, Callable] = {}


def name_of(function: Callable) -> str:
  """Returns the name of a `pod_function`, such as "pod_arrays.run_steps"."""
  return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def pod_function(function: _Function) -> _Function:
  """Lets clients call a function by `call_pod`; returns the function."""
  POD_FUNCTIONS[name_of(function)] = function
  return function


class JaxFailedError(Exception):
  """A program failed on the accelerators of a host; the message is one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSettings:
  """Settings that a host of a pod needs before it finds its devices."""

  mesh_layout: MeshLayout  # axes of the pod, or of each of its stages
  number: int  # of the host in its pod or stage
  num_hosts: int  # of the pod or stage
  # Number of stages that the host has; 1 for a pod without stages.
  num_stages: int
  # "host:port" of the coordinator of these hosts (`open_coordinator`); "" if
  # there is one host.
  coordinator: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
  """Settings of a pod's coordinator, a service where its JAX processes meet."""

  host: str  # name or address at which all hosts reach the pod's first host
  port: int  # port to listen on; 0 is any free port
  num_hosts: int


@host_function
def open_coordinator(text: bytes) -> bytes:
  """Starts the service through which JAX's processes of a pod meet.

  Takes a `CoordinatorSettings` as JSON. Returns the service's port in decimal
  digits, or why it cannot listen.
  """
  given = read_dataclass(CoordinatorSettings, text)
  devices = importlib.import_module("palm_mtf.executors.xla.devices")
  try:
    return str(devices.open_coordinator(given)).encode()
  except UserError as error:
    return str(error).encode()


# What `check_host` returns of a server that can become a host.
JOINED, NEW = "joined", "new"


@host_function
def check_host(text: bytes) -> bytes:
  """Checks that a server can become a host of a pod.

  JAX starts on one host only when the other hosts start too, and if one of them
  fails, it ends the processes of all others. So this call comes first.

  Takes a `HostSettings` as JSON. Returns JOINED or NEW, which say whether the
  server has already joined the other hosts; or why it cannot compute for the
  pod.
  """
  given = read_dataclass(HostSettings, text)
  devices = importlib.import_module("palm_mtf.executors.xla.devices")
  try:
    return (JOINED if devices.check_host(given) else NEW).encode()
  except UserError as error:
    return str(error).encode()


@host_function
def start_host(text: bytes) -> bytes:
  """Starts JAX on a host of a pod, at the same time as on the other hosts.

  Takes a `HostSettings` as JSON. Returns b"", or why the host cannot compute
  for the pod.
  """
  given = read_dataclass(HostSettings, text)
  devices = importlib.import_module("palm_mtf.executors.xla.devices")
  try:
    devices.start_host(given)
  except UserError as error:
    return str(error).encode()
  except RuntimeError as error:
    line = devices.first_line(error)
    return f"JAX does not start ({line}); start its server again.".encode()
  return b""


@host_function
def call_pod(function: bytes, *inputs: Any) -> Any:
  """Calls the `pod_function` that `name_of` names `function`.

  Raises JaxFailedError if JAX fails, for example because a device lacks memory.
  """
  name = function.decode()
  importlib.import_module(f"palm_mtf.executors.xla.{name.partition('.')[0]}")
  jax = importlib.import_module("jax")
  try:
    return POD_FUNCTIONS[name](*inputs)
  except jax.errors.JaxRuntimeError as error:
    line = str(error).partition("\n")[0]
    raise JaxFailedError(f"JAX failed in {name}: {line}") from None


def describe_failure(message: str, phase: str) -> str | None:
  """Returns the message of a `JaxFailedError` in a TensorFlow error, and a fix.

  The result is one line; None if TensorFlow reports another error. `phase` is
  what the run was doing, such as "in step 8".
  """
  found = _FAILURE.search(message)
  if not found:
    return None
  module, function, line = found.groups()
  fix = _OTHERWISE[module]
  if line.startswith("RESOURCE_EXHAUSTED"):
    fix = _OUT_OF_MEMORY[module]
  return f"JAX failed in {function}, {phase}: {line.rstrip('. ')}; {fix}"
