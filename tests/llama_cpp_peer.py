# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls llama.cpp in a separate process, which a fault may end.

`call(tokenize, path, texts)` returns `tokenize(path, texts)`. If the process
ends instead, the test fails with the signal and the file.
"""

import ctypes
import itertools
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tools.bench.pairs import describe_end


def call(
  function: Callable[..., Any],
  path: object,
  *arguments: object,
  peer: str = "llama.cpp",
) -> Any:
  """Returns function(path, *arguments), computed in the other process.

  Args:
    function: function of a module that the other process can import.
    path: file or folder that the function reads.
    *arguments: further arguments, which can be pickled.
    peer: name of the program that the function calls.

  Raises:
    AssertionError: if the process ended, "llama.cpp ended by SIGSEGV while it
      read PATH".
  """
  if not _running or not _running[0].is_alive():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=[theirs], daemon=True)
    process.start()
    theirs.close()
    _running[:] = process, ours
  process, pipe = _running
  try:
    pipe.send((function, str(path), arguments))
    found = pipe.recv()
  except (EOFError, ConnectionError):
    process.join()
    message = describe_end(peer, process.exitcode, f"read {path}")
    raise AssertionError(message) from None
  if isinstance(found, Exception):
    raise found
  return found


_PART = 128  # tokens that `compute_log_p` evaluates at a time
_running: list[Any] = []  # the process and our end of its pipe, once started


def _answer(pipe: Connection) -> None:
  while True:
    try:
      function, path, arguments = pipe.recv()
    except EOFError:  # the tests have ended
      return
    try:
      pipe.send(function(path, *arguments))
    except Exception as error:  # the tests report it
      pipe.send(error)


def _open(path: str, **settings: Any) -> Any:
  import llama_cpp

  # float32 keys and values, because float16 would cost 1e-4 of the range.
  exact = {"type_k": 0, "type_v": 0, "n_threads": 1, "n_threads_batch": 1}
  return llama_cpp.Llama(path, verbose=False, **exact, **settings)


def tokenize(
  path: str, texts: Sequence[str], adds_bos: bool = False, special: bool = False
) -> list:
  """Returns the ids of each text; `special`: names of control tokens count."""
  model = _open(path, vocab_only=True)
  return [
    model.tokenize(text.encode(), add_bos=adds_bos, special=special)
    for text in texts
  ]


def list_ends(path: str) -> list[int]:
  """Returns the ids of the tokens that end a text."""
  import llama_cpp

  model = _open(path, vocab_only=True)
  vocabulary = llama_cpp.llama_model_get_vocab(model.model)
  ids = range(model.n_vocab())
  return [i for i in ids if llama_cpp.llama_vocab_is_eog(vocabulary, i)]


def compute_logits(
  path: str, ids: Sequence[int], adapter: str | None = None
) -> np.ndarray:
  """Returns the logits after each token, [tokens, vocab].

  `adapter` is the path of a GGUF file with an adapter of the model.
  """
  settings = {"lora_path": adapter, "n_ctx": len(ids) + 8}
  model = _open(path, logits_all=True, **settings)
  model.eval(ids)
  return model.scores[: len(ids)].copy()


def compute_log_p(path: str, ids: Sequence[int]) -> float:
  """Returns log p of all tokens after the first.

  A part of the text at a time, because logits of large vocabularies would fill
  the memory.
  """
  import llama_cpp

  model, found = _open(path, n_ctx=len(ids) + 8, n_batch=_PART), 0.0
  batch = llama_cpp.llama_batch_init(_PART, 0, 1)
  for first in range(0, len(ids) - 1, _PART):
    places = range(first, min(first + _PART, len(ids) - 1))
    batch.n_tokens = len(places)
    for i, place in enumerate(places):
      batch.token[i], batch.pos[i] = ids[place], place
      batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
    assert llama_cpp.llama_decode(model.ctx, batch) == 0
    logits = llama_cpp.llama_get_logits(model.ctx)
    shape = len(places), model.n_vocab()
    for place, row in zip(
      places, np.ctypeslib.as_array(logits, shape), strict=True
    ):
      row = row.astype(float) - row.max()
      found += row[ids[place + 1]] - np.log(np.exp(row).sum())
  llama_cpp.llama_batch_free(batch)
  return found


def choose(path: str, ids: Sequence[int], count: int) -> list[int]:
  """Returns the `count` tokens that greedy decoding adds to `ids`."""
  made = _open(path, n_ctx=len(ids) + count + 8).generate(ids, temp=0.0)
  return [*itertools.islice(made, count)]


def generate(path: str, prompts: Sequence[Sequence[int]], count: int) -> list:
  """Returns the greedy text of `count` tokens after each prompt."""
  model = _open(path, n_ctx=max(map(len, prompts)) + count)
  settings = {"max_tokens": count, "temperature": 0.0}
  return [
    model.create_completion(ids, **settings)["choices"][0]["text"]
    for ids in prompts
  ]


def quantize(
  path: str,
  made: str,
  ftype: str,
  importance: Mapping[str, np.ndarray] | None = None,
) -> None:
  """Writes a file in a type such as "MOSTLY_Q8_0".

  `importance` is {tensor: mean square per input, float32}.
  """
  import llama_cpp

  settings = llama_cpp.llama_model_quantize_default_params()
  settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{ftype}")
  settings.nthread, settings.allow_requantize = 1, True
  number = ctypes.POINTER(ctypes.c_float)
  items = [
    llama_cpp.llama_model_imatrix_data(
      name.encode(), x.ctypes.data_as(number), x.size
    )
    for name, x in (importance or {}).items()
  ]
  if items:  # the array ends with an item without a name
    end = llama_cpp.llama_model_imatrix_data(None, None, 0)
    settings.imatrix = (type(end) * (len(items) + 1))(*items, end)
  arguments = path.encode(), str(made).encode(), ctypes.byref(settings)
  assert llama_cpp.llama_model_quantize(*arguments) == 0
