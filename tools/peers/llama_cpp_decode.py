# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes a PaLM with llama.cpp; a turn is a continuation of all prompts.

python llama_cpp_decode.py --model model.gguf --dtype q4_0
"""

# As llama-batched-bench does, each step decodes one token of every sequence in
# one batch on all cores, and chooses the likeliest tokens. Needs
# llama-cpp-python, compiled for this machine, e.g. with the settings in
# requirements-peers.lock. tools/bench writes the model and starts the program.

import ctypes
import os

import llama_cpp
import numpy as np
from turns import continue_in_turns, make_parser

FILE_TYPES = {
  "float16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
  "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
  "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
  "q4_k_s": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
  "q5_k_s": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_S,
  "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}


@llama_cpp.llama_log_callback
def ignore(level, text, data):
  """Discards the messages of llama.cpp about each tensor."""


def quantize(path: str, dtype: str) -> str:
  """Writes the model in another dtype; returns the path of the new file."""
  if dtype == "float32":
    return path
  made = f"{path}.{dtype}"
  settings = llama_cpp.llama_model_quantize_default_params()
  settings.ftype = FILE_TYPES[dtype]
  arguments = path.encode(), made.encode(), ctypes.byref(settings)
  assert llama_cpp.llama_model_quantize(*arguments) == 0
  return made


class Decoder:
  """A model with a cache for all sequences."""

  def __init__(self, sizes, path: str):
    self.sizes = sizes
    settings = llama_cpp.llama_model_default_params()
    self.model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = sizes.batch_size * sizes.sequence_length
    settings.n_batch = settings.n_ubatch = max(
      512, sizes.batch_size * sizes.prompt_tokens
    )
    settings.n_seq_max = sizes.batch_size
    settings.n_threads = settings.n_threads_batch = os.cpu_count()
    self.context = llama_cpp.llama_init_from_model(self.model, settings)
    count = sizes.batch_size * sizes.prompt_tokens
    self.batch = llama_cpp.llama_batch_init(count, 0, 1)

  def read(self, tokens, start: int):
    """Reads tokens [batch, length]; returns the likeliest next tokens."""
    if start == 0:
      memory = llama_cpp.llama_get_memory(self.context)
      llama_cpp.llama_memory_clear(memory, True)
    # Add tokens sequence by sequence; compute logits only for last tokens.
    batch, (rows, length) = self.batch, tokens.shape
    batch.n_tokens = tokens.size
    for i, token in enumerate(tokens.ravel().tolist()):
      row, place = divmod(i, length)
      batch.token[i] = token
      batch.pos[i] = start + place
      batch.n_seq_id[i] = 1
      batch.seq_id[i][0] = row
      batch.logits[i] = place == length - 1
    assert llama_cpp.llama_decode(self.context, batch) == 0
    logits = llama_cpp.llama_get_logits(self.context)
    shape = [rows, self.sizes.vocab_size]
    return np.ctypeslib.as_array(logits, shape).argmax(1)[:, None]


def main() -> None:
  """Takes turns."""
  parser = make_parser(__doc__.splitlines()[0], ["float32", *FILE_TYPES])
  parser.add_argument("--model", required=True, help="GGUF file, float32")
  sizes = parser.parse_args()
  llama_cpp.llama_log_set(ignore, ctypes.c_void_p(0))
  llama_cpp.llama_backend_init()
  decoder = Decoder(sizes, quantize(sizes.model, sizes.dtype))
  facts = [
    count(decoder.model)
    for count in (llama_cpp.llama_model_n_params, llama_cpp.llama_model_size)
  ]
  prompts = np.random.default_rng(0).integers(
    sizes.vocab_size, size=[sizes.batch_size, sizes.prompt_tokens]
  )
  continue_in_turns(decoder.read, prompts, sizes, *facts)


if __name__ == "__main__":
  main()
