# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a learner and the client of its run send each other.

A message is JSON (the header) and named arrays. On the wire it is a stream of
chunks: JSON with the header, names, dtypes and shapes; then the bytes of all
arrays, one after another, little-endian. The receiver checks names, dtypes and
shapes before it takes memory for the arrays.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from palm_mtf import __version__
from palm_mtf.config import PodStepConfig, StepConfig
from palm_mtf.config.macros import MISSING, from_macros, macros_of, values_of
from palm_mtf.errors import UserError, did_you_mean, shorten
from palm_mtf.json_text import STRICT_DECODER, json_text
from palm_mtf.runtime.manager.slices import WRONG_JSON

# Version of the protocol. Learner and client refuse each other if they have
# different ones. Raise it whenever headers or the format of messages change.
PROTOCOL = 2
CHUNK_BYTES = 2**20  # no chunk is larger
# bfloat16 is sent as its bits, in uint16; 4-bit numbers as two per uint8.
DTYPES = ("float32", "int32", "uint16", "uint8", "int8", "bool")
_MOST_ARRAYS, _MOST_DIMENSIONS = 100_000, 8
# Settings with which a step would read files or import code.
_OF_FILES = ("MODEL_FUNCTION", "TEACHER", "TEACHER_CACHE")

Spec = tuple[str, tuple[int, ...]]  # dtype, one of DTYPES, and shape
# Raises UserError if a message may not have this header and these arrays.
Check = Callable[[dict[str, Any], Mapping[str, Spec]], None]


class Message(NamedTuple):
  """A header, which is a JSON object, and arrays of DTYPES by name."""

  header: dict[str, Any]
  arrays: Mapping[str, np.ndarray] = {}


@contextlib.contextmanager
def reading(wrong: str) -> Iterator[None]:
  """Turns errors of a body that reads a peer's JSON into UserErrors.

  `wrong` is the message, without a period.
  """
  try:
    yield
  except UserError:
    raise
  except WRONG_JSON:
    raise UserError(f"{wrong}.") from None


def specs_of(arrays: Mapping[str, np.ndarray]) -> dict[str, Spec]:
  """Returns dtype and shape of each array."""
  return {x: (y.dtype.name, y.shape) for x, y in arrays.items()}


def num_bytes(spec: Spec) -> int:
  """Returns the size of an array."""
  return math.prod(spec[1]) * np.dtype(spec[0]).itemsize


def check_same(wanted: Mapping[str, Spec], given: Mapping[str, Spec]) -> None:
  """Raises UserError, which names the first array that is not as wanted."""
  for name in [*wanted, *given]:
    if wanted.get(name) != given.get(name):
      raise UserError(
        f"array {shorten(name)} is {_show(given.get(name))} and has to be "
        f"{_show(wanted.get(name))}: the contribution is of another model."
      )


def _show(spec: Spec | None) -> str:
  return f"{spec[0]} {[*spec[1]]}" if spec else "missing"


def at_most(most_bytes: float) -> Check:
  """Returns a check that a message's arrays have at most so many bytes."""

  def check(unused_header: dict[str, Any], specs: Mapping[str, Spec]) -> None:
    size = sum(map(num_bytes, specs.values()))
    if size > most_bytes:
      raise UserError(
        f"a message of {size:,} bytes; at most {most_bytes:,} are accepted."
      )

  return check


def write_chunks(message: Message) -> Iterator[bytes]:
  """Yields the chunks of a message."""
  specs = specs_of(message.arrays)
  declared = [[x, y, [*shape]] for x, (y, shape) in specs.items()]
  about = {"protocol": PROTOCOL, "palm_mtf": __version__}
  text = json_text({**about, "header": message.header, "arrays": declared})
  if len(text) > CHUNK_BYTES:
    raise ValueError(f"a header of {len(text):,} bytes")
  yield text.encode()
  for array in message.arrays.values():
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    for start in range(0, len(content), CHUNK_BYTES):
      yield bytes(content[start : start + CHUNK_BYTES])


class MessageReader:
  """Joins chunks to a message; UserError if they are not as declared."""

  def __init__(self, first: bytes, check: Check):
    """Reads the header from the first chunk; allocates the arrays."""
    with reading("not a message of palm_mtf"):
      header, declared = _read_first(first)
      specs = dict(map(_read_spec, declared))
      if len(specs) < len(declared):
        raise ValueError(declared)
    check(header, specs)
    arrays = {x: np.empty(shape, dtype) for x, (dtype, shape) in specs.items()}
    self.message = Message(header, arrays)
    self.num_bytes = sum(map(num_bytes, specs.values()))
    views = [x.reshape(-1).view(np.uint8) for x in arrays.values() if x.size]
    self._left = views[::-1]

  def take(self, chunk: bytes) -> None:
    """Copies a chunk into the arrays."""
    content = np.frombuffer(chunk, np.uint8)
    while content.size:
      if not self._left:
        raise UserError("a message with more bytes than its arrays have.")
      view = self._left.pop()
      size = min(view.size, content.size)
      view[:size], content = content[:size], content[size:]
      if size < view.size:
        self._left.append(view[size:])

  def end(self) -> Message:
    """Returns the whole message."""
    if self._left:
      raise UserError("a message with fewer bytes than its arrays have.")
    return self.message


def _read_first(first: bytes) -> tuple[dict[str, Any], list[Any]]:
  if len(first) > CHUNK_BYTES:
    raise ValueError(len(first))
  found = STRICT_DECODER.decode(first.decode())
  if found["protocol"] != PROTOCOL:
    raise UserError(
      f"a message of palm_mtf {shorten(found['palm_mtf'])}, and this is "
      f"palm_mtf {__version__}, whose messages differ; use one version."
    )
  header, declared = found["header"], found["arrays"]
  if not isinstance(header, dict) or not isinstance(declared, list):
    raise TypeError(found)
  if len(declared) > _MOST_ARRAYS:
    raise ValueError(len(declared))
  return header, declared


def _read_spec(declared: Any) -> tuple[str, Spec]:
  name, dtype, shape = declared
  if not isinstance(name, str) or dtype not in DTYPES:
    raise TypeError(declared)
  if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
    raise TypeError(declared)
  # bool is a subclass of int, and Python's int does not overflow.
  if any(type(size) is not int or not 0 <= size < 2**40 for size in shape):
    raise ValueError(declared)
  return name, (dtype, tuple(shape))


def program_of(config: StepConfig) -> dict[str, Any]:
  """Returns {macro: value} of the settings that make a learner's step."""
  values = values_of(config)
  return {x: values[x] for x in macros_of(PodStepConfig, values)}


def read_program(values: object) -> StepConfig:
  """Reads what `program_of` returned; the result has one pod, in this process.

  Raises UserError if a setting is unknown, missing or wrong, or would make this
  process read a file or import code.
  """
  with reading("the run's program has a setting of a wrong type"):
    if not isinstance(values, dict):
      raise TypeError(values)
    known = macros_of(PodStepConfig, values)
    for name in values:
      if name not in known:
        raise UserError(
          f"the run's program has the setting {shorten(name)}"
          f"{did_you_mean(name, known)}, which a learner does not take."
        )
      if name in _OF_FILES and values[name]:
        raise UserError(
          f"the run's program has {name} = {shorten(values[name])}: a learner "
          "reads no files and imports no code for a run."
        )
    for name, default in known.items():
      if default is MISSING and name not in values:
        raise UserError(f"the run's program lacks {name}.")
    return from_macros(StepConfig, values)
  raise AssertionError
