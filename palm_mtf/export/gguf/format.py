# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--format=gguf: one file that llama.cpp loads."""

from palm_mtf.export.gguf.architecture import gguf_name, model_metadata
from palm_mtf.export.gguf.dtypes import DTYPES, dtype_of
from palm_mtf.export.gguf.file import Tensor, write_gguf
from palm_mtf.export.gguf.vocabulary import (
  check_vocabulary,
  vocabulary_metadata,
)
from palm_mtf.export.huggingface.config_json import COHERE
from palm_mtf.export.huggingface.weights import exported, tensor_shapes
from palm_mtf.export.trained_model import Reader, TrainedModel


class GgufFile:
  """A model of llama.cpp with the tokenizer inside (a `Format`)."""

  subfolder = ""

  def __init__(self, trained: TrainedModel, dtype: str):
    """Raises UserError if llama.cpp has no such model or tokenizer.

    Args:
      trained: the model.
      dtype: dtype of the weights; what it cannot hold is float16 or float32.
    """
    model, vocabulary = trained.model, trained.vocabulary
    self._model = model
    self._metadata = model_metadata(model)
    check_vocabulary(vocabulary)
    wanted = DTYPES[dtype]
    self._metadata["general.file_type"] = wanted.file_type
    self._metadata["general.quantization_version"] = 2
    self._metadata |= vocabulary_metadata(
      vocabulary, start_id=trained.start_id, vocab_size=model.vocab_size
    )
    shapes = tensor_shapes(model)
    self._names = {gguf_name(name): name for name in shapes}
    self._tensors = {
      name: Tensor(shapes[theirs], dtype_of(shapes[theirs], wanted))
      for name, theirs in self._names.items()
    }
    self.num_bytes = sum(x.num_bytes for x in self._tensors.values())
    name = self._metadata["general.architecture"]
    self.kind = f"a {name} in {dtype}"

  def write(self, path: str, read: Reader) -> None:
    """Writes the file; see `Format`."""
    # llama.cpp rotates neighbours in both architectures, as Cohere does.
    of_name = exported(self._model, COHERE, read)
    write_gguf(
      path,
      self._metadata,
      self._tensors,
      lambda name: of_name(self._names[name]),
    )
