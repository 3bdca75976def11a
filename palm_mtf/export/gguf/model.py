# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--format=gguf: writes one file that llama.cpp loads, and imports such files.

llama.cpp's tokenizer "llama" gives the same ids as SentencePiece's byte-pair
encoding with byte fallback. Unlike sentencepiece_vocabulary.py, "llama" encodes
a U+2581 in a text as a space, not as three bytes. gguf_tokenizer.py makes this
tokenizer and others.
"""

import logging
import os
from collections.abc import Callable, Mapping

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from palm_mtf.architecture.parameters import parse_name
from palm_mtf.config import ModelConfig
from palm_mtf.data.vocabulary.chat import read_template
from palm_mtf.data.vocabulary.gguf_tokenizer import make_gguf_tokenizer
from palm_mtf.data.vocabulary.sentencepiece_vocabulary import (
  SentencePieceVocabulary,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.architectures import GgufArchitecture
from palm_mtf.export.gguf.files import GgufFile, write_gguf
from palm_mtf.export.gguf.imatrix import read_importance
from palm_mtf.export.gguf.metadata import (
  find_gguf_architecture,
  make_model_metadata,
)
from palm_mtf.export.gguf.mixtures import (
  FILE_TYPES,
  choose_dtypes,
  count_bytes,
)
from palm_mtf.export.huggingface.folder import explain_inexact
from palm_mtf.export.huggingface.weights import (
  check_tensors,
  find_tensor_shapes,
  find_tensors,
  import_parameters,
  make_tensor_reader,
)
from palm_mtf.export.trained_model import Export, Reader, TrainedModel

_USER_DEFINED = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
_logger = logging.getLogger(__name__)

CHAT_TEMPLATE = "tokenizer.chat_template"


def make_gguf(
  trained: TrainedModel, dtype: str, imatrix: str | None = None
) -> Export:
  """Makes a GGUF file with the weights and the tokenizer.

  `dtype` is one of FILE_TYPES. `imatrix` is the path of statistics that weigh
  the errors of quantized weights; None for equal errors.

  Raises UserError if llama.cpp lacks the architecture or the tokenizer, or if
  the statistics are of another model.
  """
  model, vocabulary = trained.model, trained.vocabulary
  own = find_gguf_architecture(model)
  check_vocabulary(vocabulary)
  metadata = {
    **make_model_metadata(trained.described, own),
    **trained.gguf_origin,
    "general.file_type": FILE_TYPES[dtype],
    "general.quantization_version": 2,
    **make_gguf_tokenizer(
      vocabulary,
      start_id=trained.bos_id,
      adds_start=trained.prompt_start is not None,
      vocab_size=model.vocab_size,
    ),
  }
  if template := read_template(os.path.dirname(vocabulary.path)):
    metadata[CHAT_TEMPLATE] = template
  if others := vocabulary.end_ids[3:]:
    names = ", ".join(map(vocabulary.piece, others))
    _logger.warning(
      f"GGUF names three ends of a text; llama.cpp knows {names} only by name"
    )
  shapes = find_tensor_shapes(model, own.layout)
  importance = read_importance(imatrix, model) if imatrix else {}

  def write(path: str, read: Reader) -> None:
    read_tensor = make_reader(model, own, read)
    write_gguf(path, metadata, shapes, dtype, read_tensor, importance)

  num_bytes = count_bytes(shapes, choose_dtypes(shapes, dtype, metadata))
  return Export(f"a {own.name} in {dtype}", num_bytes, write)


def make_reader(
  model: ModelConfig, own: GgufArchitecture, read: Reader
) -> Callable[[str], np.ndarray]:
  """Returns a function that reads tensors by their names in GGUF."""
  read = make_tensor_reader(model, own.layout, read)
  offsets = _find_offsets(model, own)
  # Do not copy other tensors, which may have all experts of a layer.
  return lambda name: (
    read(name) + offsets[name] if name in offsets else read(name)
  )


def import_gguf_parameters(
  file: GgufFile, model: ModelConfig, own: GgufArchitecture, what: str
) -> dict[str, np.ndarray]:
  """Returns {our name: parameter} of a GGUF file.

  Raises UserError if the file lacks a tensor, or has an unknown tensor. The
  message begins with `what`.
  """
  layout = own.layout.in_files(file.shapes, model.num_layers)
  check_tensors(file, model, layout, what)
  offsets = _find_offsets(model, own)
  return import_parameters(
    model,
    layout,
    lambda name: (
      file.read(name) - offsets[name] if name in offsets else file.read(name)
    ),
  )


def _find_offsets(
  model: ModelConfig, own: GgufArchitecture
) -> Mapping[str, np.float32]:
  # Returns {tensor: number that the file adds to the scale of a norm}.
  return {
    theirs: np.float32(own.scale_offset)
    for theirs, names in find_tensors(model, own.layout).items()
    if own.scale_offset and (not names or parse_name(names[0]).is_scale)
  }


def check_vocabulary(vocabulary: Vocabulary) -> None:
  """Raises UserError if llama.cpp gives other ids than a SentencePiece model.

  `make_gguf_tokenizer` checks vocabularies of other kinds.
  """
  if isinstance(vocabulary, SentencePieceVocabulary) and (
    reason := explain_inexact(vocabulary) or _explain_overlap(vocabulary)
  ):
    raise UserError(
      f"{vocabulary.path}: llama.cpp would encode differently: {reason}; train "
      "a model with a vocabulary of palm_mtf vocab, or use another --format."
    )


def _explain_overlap(vocabulary: SentencePieceVocabulary) -> str:
  # Returns a reason if user-defined pieces can overlap in a text, unless both
  # repeat the same character. Of such pieces, llama.cpp takes the longest, and
  # SentencePiece the first.
  model = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)
  pieces = {x.piece for x in model.pieces if x.type == _USER_DEFINED}
  repeated = {x for x in pieces if len({*x}) == 1}

  def starts(pieces: set[str]) -> set[str]:
    return {x[:i] for x in pieces for i in range(1, len(x))}

  def ends(pieces: set[str]) -> set[str]:
    return {x[i:] for x in pieces for i in range(1, len(x))}

  others = pieces - repeated
  overlaps = starts(pieces) & ends(others) | starts(others) & ends(repeated)
  return "its user-defined pieces can overlap in a text" if overlaps else ""
