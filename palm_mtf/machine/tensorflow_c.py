# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sessions of TensorFlow's C library, without TensorFlow's Python package.

To import the package takes several times as long as to load the library, and
the library is enough to run a saved graph. A process may import the package
later, which then uses the same library.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from palm_mtf.machine.process import silent_unless_it_fails

# TF_DataType in tf_datatype.h, of the arrays that `Session` takes and returns.
_DTYPES = {1: np.float32, 3: np.int32, 9: np.int64, 10: np.bool_}
_STRING, _STRING_BYTES = 7, 24
_CLONE_FILES = 0x400  # of Linux's sched.h

_P, _Int, _Size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_Text = ctypes.c_char_p


class TensorFlowError(Exception):
  """TensorFlow's C library reports an error, with the library's message."""


class _Output(ctypes.Structure):
  """TF_Output of c_api.h: a tensor of a graph."""

  _fields_ = (("operation", _P), ("index", _Int))


# {function of c_api.h: type of its result, then types of its arguments}
_FUNCTIONS: Mapping[str, tuple] = {
  "TF_NewStatus": (_P,),
  "TF_DeleteStatus": (None, _P),
  "TF_GetCode": (_Int, _P),
  "TF_Message": (_Text, _P),
  "TF_NewGraph": (_P,),
  "TF_DeleteGraph": (None, _P),
  "TF_NewBufferFromString": (_P, _Text, _Size),
  "TF_DeleteBuffer": (None, _P),
  "TF_NewImportGraphDefOptions": (_P,),
  "TF_DeleteImportGraphDefOptions": (None, _P),
  "TF_ImportGraphDefOptionsSetPrefix": (None, _P, _Text),
  "TF_GraphImportGraphDef": (None, _P, _P, _P, _P),
  "TF_GraphOperationByName": (_P, _P, _Text),
  "TF_NewSessionOptions": (_P,),
  "TF_DeleteSessionOptions": (None, _P),
  "TF_SetConfig": (None, _P, _Text, _Size, _P),
  "TF_NewSession": (_P, _P, _P, _P),
  "TF_CloseSession": (None, _P, _P),
  "TF_DeleteSession": (None, _P, _P),
  "TF_SessionRun": (
    *(None, _P, _P, ctypes.POINTER(_Output), ctypes.POINTER(_P), _Int),
    *(ctypes.POINTER(_Output), ctypes.POINTER(_P), _Int),
    *(ctypes.POINTER(_P), _Int, _P, _P),
  ),
  "TF_LoadLibrary": (_P, _Text, _P),
  "TF_AllocateTensor": (_P, _Int, ctypes.POINTER(ctypes.c_int64), _Int, _Size),
  "TF_DeleteTensor": (None, _P),
  "TF_TensorData": (_P, _P),
  "TF_TensorType": (_Int, _P),
  "TF_NumDims": (_Int, _P),
  "TF_Dim": (ctypes.c_int64, _P, _Int),
  "TF_StringInit": (None, _P),
  "TF_StringCopy": (None, _P, _Text, _Size),
}


_loading: list[threading.Thread] = []  # the thread of `preload`, if any


def preload() -> None:
  """Begins to load the library, while this thread does other work."""
  if sys.platform == "linux" and not _loading:
    loading = threading.Thread(target=_load_silently, daemon=True)
    loading.start()
    _loading.append(loading)
    atexit.register(_await, loading)


def _await(loading: threading.Thread) -> None:
  """Lets a process end only once its library is loaded.

  Otherwise the end of the process would destroy the library's objects while
  other code of the library initializes and uses them, and some of that code
  would never end.
  """
  try:
    loading.join()
  except KeyboardInterrupt:
    os._exit(128 + signal.SIGINT)


def _load_silently() -> None:
  # The thread gets its own table of open files, so that only what the library
  # prints to stderr is lost, and not what other threads print.
  libc = ctypes.CDLL(None)
  if libc.unshare(_CLONE_FILES) == 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Unlike ctypes.CDLL(path), this call lets Python's other threads run.
    libc.dlopen.argtypes, libc.dlopen.restype = [_Text, _Int], _P
    for path in _paths():
      libc.dlopen(path.encode(), os.RTLD_LAZY)


def _paths() -> list[str]:
  spec = importlib.util.find_spec("tensorflow")
  folder = spec.submodule_search_locations[0]
  names = "libtensorflow_framework.so.2", "libtensorflow_cc.so.2"
  return [os.path.join(folder, name) for name in names]


@functools.cache
def _library() -> dict[str, ctypes._CFuncPtr]:
  """Returns the functions of the C library by name; may raise OSError."""
  # ctypes.CDLL does not let other threads run. A library that `preload` has
  # loaded prints nothing more, and other threads may print meanwhile.
  for loading in _loading:
    loading.join()
  with contextlib.nullcontext() if _loading else silent_unless_it_fails():
    framework, whole = map(ctypes.CDLL, _paths())
  found = {}
  for name, (result, *arguments) in _FUNCTIONS.items():
    # Which of the two has a function depends on TensorFlow's version.
    function = getattr(whole if hasattr(whole, name) else framework, name)
    function.restype, function.argtypes = result, arguments
    found[name] = function
  return found


class _Status:
  """Calls functions that report errors; raises TensorFlowError."""

  def __init__(self) -> None:
    self._functions = _library()
    self._status = self._functions["TF_NewStatus"]()

  def __del__(self) -> None:
    self._functions["TF_DeleteStatus"](self._status)

  def call(self, name: str, *arguments: object) -> int | None:
    """Calls a function whose last argument is the status."""
    result = self._functions[name](*arguments, self._status)
    if self._functions["TF_GetCode"](self._status):
      message = self._functions["TF_Message"](self._status)
      raise TensorFlowError(message.decode(errors="replace"))
    return result


def load_operations(path: str) -> None:
  """Loads a library of operations; raises TensorFlowError if that fails."""
  _Status().call("TF_LoadLibrary", path.encode())


class Session:
  """A session on this machine's CPUs, and its graph.

  Tensors have the C library's names, "operation:index". Several threads may
  call `run`.
  """

  def __init__(self, config: bytes):
    """Takes a serialized ConfigProto."""
    self._c = _library()
    self._graph = self._c["TF_NewGraph"]()
    options = self._c["TF_NewSessionOptions"]()
    try:
      _Status().call("TF_SetConfig", options, config, len(config))
      self._session = _Status().call("TF_NewSession", self._graph, options)
    finally:
      self._c["TF_DeleteSessionOptions"](options)

  def close(self) -> None:
    """Frees the session, its variables and its graph."""
    for name in ("TF_CloseSession", "TF_DeleteSession"):
      _Status().call(name, self._session)
    self._c["TF_DeleteGraph"](self._graph)

  def add_graph(self, graph: bytes, prefix: str) -> None:
    """Adds a serialized GraphDef; its names then begin with "prefix/"."""
    buffer = self._c["TF_NewBufferFromString"](graph, len(graph))
    options = self._c["TF_NewImportGraphDefOptions"]()
    self._c["TF_ImportGraphDefOptionsSetPrefix"](options, prefix.encode())
    try:
      _Status().call("TF_GraphImportGraphDef", self._graph, buffer, options)
    finally:
      self._c["TF_DeleteImportGraphDefOptions"](options)
      self._c["TF_DeleteBuffer"](buffer)

  def run(
    self,
    feeds: Mapping[str, np.ndarray | bytes] | None = None,
    fetches: Sequence[str] = (),
    targets: Iterable[str] = (),
  ) -> list[np.ndarray]:
    """Runs the graph.

    Args:
      feeds: {tensor's name: its value, an array, or bytes for a [] string}.
      fetches: names of tensors to return.
      targets: names of operations to run.

    Raises TensorFlowError.
    """
    fed = feeds or {}
    operations = [self._operation(x) for x in targets]
    values = (_P * len(fed))(*map(self._tensor, fed.values()))
    results = (_P * len(fetches))()
    try:
      _Status().call(
        *("TF_SessionRun", self._session, None),
        *(self._outputs(fed), values, len(fed)),
        *(self._outputs(fetches), results, len(fetches)),
        *((_P * len(operations))(*operations), len(operations), None),
      )
      return [self._array(x) for x in results]
    finally:
      for each in (*values, *results):
        if each:
          self._c["TF_DeleteTensor"](each)

  def _operation(self, name: str) -> int:
    found = self._c["TF_GraphOperationByName"](self._graph, name.encode())
    if not found:
      raise TensorFlowError(f"{name}: no such operation")
    return found

  def _outputs(self, names: Iterable[str]) -> ctypes.Array:
    pairs = [name.rpartition(":") for name in names]
    found = [_Output(self._operation(x), int(index)) for x, _, index in pairs]
    return (_Output * len(found))(*found)

  def _tensor(self, value: np.ndarray | bytes) -> int:
    if isinstance(value, bytes):
      tensor = self._c["TF_AllocateTensor"](_STRING, None, 0, _STRING_BYTES)
      data = self._c["TF_TensorData"](tensor)
      self._c["TF_StringInit"](data)
      self._c["TF_StringCopy"](data, value, len(value))
      return tensor
    dtype = next(x for x, each in _DTYPES.items() if each == value.dtype)
    array = np.ascontiguousarray(value)
    sizes = (ctypes.c_int64 * value.ndim)(*value.shape)
    tensor = self._c["TF_AllocateTensor"](
      dtype, sizes, value.ndim, array.nbytes
    )
    data = self._c["TF_TensorData"](tensor)
    ctypes.memmove(data, array.ctypes.data, array.nbytes)
    return tensor

  def _array(self, tensor: int) -> np.ndarray:
    sizes = range(self._c["TF_NumDims"](tensor))
    shape = [self._c["TF_Dim"](tensor, i) for i in sizes]
    found = np.empty(shape, _DTYPES[self._c["TF_TensorType"](tensor)])
    ctypes.memmove(
      found.ctypes.data, self._c["TF_TensorData"](tensor), found.nbytes
    )
    return found
