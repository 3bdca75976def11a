# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls the user's own code: modules and functions that gin files name.

Text that this code prints goes to stderr, because stdout is for results. An
exception becomes one line, which names the exception and the line of the user's
code that raised it.
"""

import contextlib
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from palm_mtf.errors import UserError

_MOST_SHOWN = 400  # characters of the user's message that a UserError quotes
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# Code that is not the user's. A checkout has tasks/ next to the package.
_OWN = (f"{_PACKAGE}/", f"{os.path.dirname(_PACKAGE)}/tasks/")
# Installed libraries and AutoGraph's generated code are not the user's either.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/__autograph_generated")
# Gin's function that raises a user's exception again, as an instance of a new
# class with a longer message. We report the user's exception instead.
_GIN_WRAPPER = "augment_exception_message_and_reraise"
# Text to remove: TensorFlow adds it to the errors of Python functions.
_TENSORFLOW = re.compile(
  r"\{\{function_node .*?\}\}\s*|\n\s*\[\[\{\{node .*|\s*\[Op:.*"
  r"|Error in user-defined function passed to \w+:\d+ transformation with "
  r"iterator: [\w:]+: ",
  re.DOTALL,
)
_TRACEBACK = "\nTraceback (most recent call last):"
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


class _Frame(NamedTuple):
  path: str
  line: int | str
  function: str

  @property
  def is_users(self) -> bool:
    """Whether the file is not part of Python, a library or palm_mtf."""
    return (
      os.path.isabs(self.path)
      and not self.path.startswith((_STANDARD_LIBRARY, *_OWN))
      and not _INSTALLED.search(self.path)
    )


@contextlib.contextmanager
def user_code(where: str) -> Iterator[None]:
  """Turns exceptions of the body, which calls the user's code, into UserError.

  The body prints to stderr. KeyboardInterrupt and UserError pass unchanged, but
  not SystemExit. Messages begin with the code's name, such as "TASK: my_task".
  """
  with _PRINTS_TO_STDERR:
    try:
      yield
    except (GeneratorExit, KeyboardInterrupt, UserError):
      raise
    except BaseException as error:
      cause = _find_cause(error)
      # If the Python generator of a tf.data dataset raises UserError, only the
      # text of TensorFlow's error quotes it.
      own = re.search(r"UserError: (.*)", _to_text(cause))
      if own or isinstance(cause, UserError):
        raise UserError(own[1] if own else str(cause)) from error
      raise UserError(f"{where}: {describe(cause)}") from error


def describe(error: BaseException) -> str:
  """Describes an exception by type, message and the user's failing line."""
  text = _TENSORFLOW.sub("", _to_text(error))
  message = f"{type(error).__name__}: {text}"
  if text.startswith("in user code:"):  # AutoGraph's text ends with the error
    message = text.rstrip().rpartition("\n\n")[2]
  elif _TRACEBACK in text:  # TensorFlow adds a Python traceback
    message = text.partition(_TRACEBACK)[0]
  message = " ".join(message.split()).removesuffix(":").removesuffix(".")
  if len(message) > _MOST_SHOWN:
    message = f"{message[:_MOST_SHOWN]} ..."
  frame = _last_frame(error, text)
  if frame is None:
    return message
  path = os.path.relpath(frame.path)
  if path.startswith(os.pardir):
    path = frame.path
  place = f"{path}:{frame.line}"
  if frame.function != "None":  # AutoGraph may not know the function
    place += f", in {frame.function}"
  return f"{message} ({place})"


def _find_cause(error: BaseException) -> BaseException:
  """Returns the exception that a library, such as gin, wrapped in `error`."""
  seen: set[int] = set()
  while id(error) not in seen and not isinstance(error, UserError):
    seen.add(id(error))
    frames = _list_frames(error)
    by_gin = _GIN_WRAPPER in type(error).__str__.__qualname__ or (
      # Gin's function failed in its own code, which hides the user's error.
      bool(frames) and frames[-1].function == _GIN_WRAPPER
    )
    inner = error.__context__ if by_gin else error.__cause__
    # Stop at an exception that the user's code raised, even if it has a cause.
    if inner is None or (not by_gin and frames and frames[-1].is_users):
      break
    error = inner
  return error


def _list_frames(error: BaseException) -> list[_Frame]:
  return [
    _Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
    for frame, line in traceback.walk_tb(error.__traceback__)
  ]


def _to_text(error: BaseException) -> str:
  try:
    return str(error)
  except Exception:  # the user's class may have a faulty __str__
    return ""


def _last_frame(error: BaseException, text: str) -> _Frame | None:
  """Returns the innermost frame of the user's code, or None."""
  # If TensorFlow called the function, only the message has its frames.
  named = [_Frame(*found) for found in _FRAME.findall(text)]
  users = [frame for frame in [*_list_frames(error), *named] if frame.is_users]
  return users[-1] if users else None


class _PrintsToStderr:
  """Sends all threads' prints to stderr while any thread runs a `with` body."""

  def __init__(self):
    self._lock = threading.Lock()
    self._count, self._stdout = 0, None

  def __enter__(self) -> None:
    with self._lock:
      if not self._count:
        self._stdout, sys.stdout = sys.stdout, sys.stderr
      self._count += 1

  def __exit__(self, *exception: Any) -> None:
    with self._lock:
      self._count -= 1
      if not self._count:
        sys.stdout = self._stdout


_PRINTS_TO_STDERR = _PrintsToStderr()
