# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How soon a thread runs after it is woken while other threads use all cores.

Then a woken thread waits until a running thread has used up its time slice,
some milliseconds, and leaves its core. But if the slice of the woken thread is
shorter than that of the running thread, the woken thread gets the core at once.
"""

import ctypes
import errno
import os
import platform

_SHORT_NS = 100_000  # the least that Linux accepts
# Numbers of the system calls sched_setattr and sched_getattr, for which the C
# library may have no functions.
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}


class _Attributes(ctypes.Structure):
  # sched_attr of Linux's sched.h, in its first version.
  _fields_ = (
    ("size", ctypes.c_uint32),
    ("policy", ctypes.c_uint32),
    ("flags", ctypes.c_uint64),
    ("nice", ctypes.c_int32),
    ("priority", ctypes.c_uint32),
    ("runtime", ctypes.c_uint64),
    ("deadline", ctypes.c_uint64),
    ("period", ctypes.c_uint64),
  )


def read_slice() -> int:
  """Returns the slice of the calling thread in ns; 0 if it is not known.

  Raises OSError if the system lacks the call.
  """
  return _read_attributes().runtime


def shorten_slice() -> bool:
  """Gives the calling thread, and threads that it starts, the least slice.

  This gives no more processor time, and needs no privilege. Returns whether the
  system can do it: Linux 6.12 or newer, for threads with the default policy.
  """
  try:
    attributes = _read_attributes()
    if attributes.policy != os.SCHED_OTHER:
      return False
    attributes.runtime = _SHORT_NS
    _call(0, ctypes.byref(attributes), 0)
    return read_slice() == _SHORT_NS
  except (AttributeError, OSError):
    return False


def _read_attributes() -> _Attributes:
  found = _Attributes()
  _call(1, ctypes.byref(found), ctypes.sizeof(found), 0)
  return found


def _call(which: int, *arguments: object) -> None:
  # Calls a system call of _CALLS; the thread number 0 is the calling thread.
  numbers = _CALLS.get(platform.machine())
  if not numbers or platform.system() != "Linux":
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
  libc = ctypes.CDLL(None, use_errno=True)
  if libc.syscall(numbers[which], 0, *arguments) < 0:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
