# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager as a gRPC server, and its queries to TensorFlow servers."""

import concurrent.futures
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from palm_mtf import __version__
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.runtime.addresses import ANY_ADDRESS, explain_start_error
from palm_mtf.runtime.manager.client import (
  CHANNEL_OPTIONS,
  PROTOCOL,
  SERVICE,
  TURNS,
  read_tls,
)
from palm_mtf.runtime.manager.manager import Manager, Store
from palm_mtf.runtime.manager.turns import Turns
from palm_mtf.runtime.scheduler import GangScheduler
from palm_mtf.runtime.server.restricted_port import restricted_port

_METHODS = (
  "register beat leave allocate release drain list_all".split()  # of Manager
)
_NUM_THREADS = 64
_STOP_SECS = 2.0  # for requests in progress
_COUNT_SECS = 10.0  # timeout for asking a TensorFlow server for its devices
# From TensorFlow's own protocol (worker.proto, device_attributes.proto).
_GET_STATUS = "/tensorflow.WorkerService/GetStatus"
_DEVICE_ATTRIBUTES, _DEVICE_TYPE = 1, 2  # field numbers


@contextlib.contextmanager
def serve(
  ip: str, port: int, state: str, tls: str, policy: str = "fifo"
) -> Iterator[int]:
  """Answers requests to the manager while the body runs.

  Access is restricted as for TensorFlow's servers (server/restricted_port.py).

  Args:
    ip: IPv4 address; "0.0.0.0" is every address of this host.
    port: TCP port; 0 is any free port.
    state: path of the manager's file.
    tls: PREFIX of the manager's key and certificate (`read_tls`), or "".
    policy: order of the programs of all clients, one of POLICIES.

  Yields:
    The port.

  Raises:
    UserError: another manager uses the file, the key cannot be used, the port
      is taken, or the system cannot restrict the port.
  """
  with contextlib.ExitStack() as stack:
    store = stack.enter_context(contextlib.closing(Store(state)))
    manager = Manager(store, count_devices)
    turns = Turns(GangScheduler(policy, {}), manager.list_devices)
    threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS)
    server = grpc.server(threads, options=CHANNEL_OPTIONS)
    handlers = {
      name: grpc.unary_unary_rpc_method_handler(
        functools.partial(_answer, getattr(manager, name))
      )
      for name in _METHODS
    }
    handlers[TURNS] = grpc.stream_stream_rpc_method_handler(
      functools.partial(_serve_turns, turns)
    )
    server.add_generic_rpc_handlers(
      [grpc.method_handlers_generic_handler(SERVICE, handlers)]
    )
    healthy = health.HealthServicer()  # reports "" as serving
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    healthy.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    port = _listen(server, ip, port, tls)
    server.start()
    stack.callback(lambda: server.stop(_STOP_SECS).wait())
    yield port


def _listen(server: grpc.Server, ip: str, port: int, tls: str) -> int:
  """Makes a server listen on a port that is restricted to `ip`."""
  both = read_tls(tls) if tls else None
  try:
    with contextlib.ExitStack() as stack:
      if ip != ANY_ADDRESS:
        port = stack.enter_context(restricted_port(ip, port))
      where = f"{ANY_ADDRESS}:{port}"
      if not both:
        return server.add_insecure_port(where)
      return server.add_secure_port(
        where,
        grpc.ssl_server_credentials([both], both[1], require_client_auth=True),
      )
  except (OSError, RuntimeError) as error:
    raise explain_start_error(f"{ip}:{port}", error) from None


def _answer(
  method: Callable[..., Any], request: bytes, context: grpc.ServicerContext
) -> bytes:
  """Returns the answer to a request, or ends the call with a one-line error."""
  _check_versions(context)
  try:
    return json_text(method(**json.loads(request))).encode()
  except UserError as error:
    code, why = grpc.StatusCode.INVALID_ARGUMENT, str(error)
  except (ValueError, TypeError, LookupError, AttributeError):
    code, why = grpc.StatusCode.INTERNAL, "no request of palm_mtf"
  context.abort(code, why)
  raise AssertionError  # abort raises an exception


def _serve_turns(
  turns: Turns, requests: Iterator[bytes], context: grpc.ServicerContext
) -> Iterator[bytes]:
  """Answers a client's stream of turns."""
  about = _check_versions(context)
  yield from turns.serve(about["owner"], float(about["weight"]), requests)


def _check_versions(context: grpc.ServicerContext) -> dict[str, str]:
  """Ends a call with another protocol; returns the client's metadata."""
  about = dict(context.invocation_metadata())
  if about.get("protocol") != str(PROTOCOL):
    context.abort(
      grpc.StatusCode.FAILED_PRECONDITION,
      f"the manager is of palm_mtf {__version__} and you have palm_mtf "
      f"{about.get('palm_mtf')}, whose requests differ; use one version",
    )
  return about


def count_devices(address: str) -> int:
  """Asks the TensorFlow server at `address` how many CPU devices it has.

  Raises:
    UserError: no TensorFlow server answers there.
  """
  try:
    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
      reply = channel.unary_unary(_GET_STATUS)(b"", timeout=_COUNT_SECS)
  except grpc.RpcError:
    raise UserError(
      f"no TensorFlow server answers the manager at {address}; start the "
      "server at an address that the manager reaches (--listen)."
    ) from None
  devices = [x for number, x in _fields(reply) if number == _DEVICE_ATTRIBUTES]
  return sum((_DEVICE_TYPE, b"CPU") in _fields(x) for x in devices)


def _fields(message: bytes) -> list[tuple[int, Any]]:
  """Returns the fields of a protocol buffer of any type."""
  fields = UnknownFieldSet(Empty.FromString(message))
  return [(x.field_number, x.data) for x in fields]
