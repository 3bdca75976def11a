# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--format=hf: a folder that Hugging Face transformers loads.

The folder has the vocabulary as a fast tokenizer, if the vocabulary is a
tokenizer.json or a SentencePiece model of `palm_mtf vocab`. SentencePiece and
transformers have the same byte-pair encoding, except that SentencePiece first
merges the neighbours whose merged piece has the best score, and transformers
the pair that comes first in a list. The tokenizer.json of a SentencePiece model
has spaces instead of U+2581, so that texts need no normalization. A U+2581 in a
text becomes three bytes, as in sentencepiece_vocabulary.py.
"""

import json
import logging
import math
import os

from sentencepiece import sentencepiece_model_pb2

from palm_mtf.data.vocabulary.byte_pair import (
  FILE_NAME,
  PLAIN_TOKEN,
  BytePairVocabulary,
  start_processor,
)
from palm_mtf.data.vocabulary.chat import read_template
from palm_mtf.data.vocabulary.sentencepiece_vocabulary import (
  SPACE_MARK,
  SentencePieceVocabulary,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.export.huggingface.config_json import find_family, make_config
from palm_mtf.export.huggingface.model_card import write_card
from palm_mtf.export.huggingface.tensor_files import WEIGHTS, write_safetensors
from palm_mtf.export.huggingface.weights import (
  find_tensor_shapes,
  make_tensor_reader,
)
from palm_mtf.export.trained_model import Export, Reader, TrainedModel
from palm_mtf.json_text import json_text

_logger = logging.getLogger(__name__)

_NORMAL = sentencepiece_model_pb2.ModelProto.SentencePiece.NORMAL
_USER_DEFINED = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
_BPE = sentencepiece_model_pb2.TrainerSpec.BPE


def make_hf(trained: TrainedModel) -> Export:
  """Makes a folder with safetensors in float32, configuration and tokenizer.

  Raises UserError if no class of transformers computes the model.
  """
  family = find_family(trained.model)
  shapes = find_tensor_shapes(trained.model, family)

  def write(path: str, read: Reader) -> None:
    os.mkdir(path)
    trained.vocabulary.write(path)
    for name, content in _make_json_files(trained).items():
      with open(os.path.join(path, name), "w", encoding="utf-8") as file:
        file.write(json_text(content, indent=1))
    read = make_tensor_reader(trained.model, family, read)
    weights = os.path.join(path, WEIGHTS)
    write_safetensors(weights, shapes, read, trained.origin)
    write_card(path, trained)

  num_bytes = 4 * sum(map(math.prod, shapes.values()))
  return Export(f"a {family.architecture}", num_bytes, write)


def _make_json_files(trained: TrainedModel) -> dict[str, object]:
  # Returns {file name: content}.
  vocabulary = trained.vocabulary
  described = make_config(
    trained.described,
    start_id=trained.bos_id,
    end_ids=vocabulary.end_ids,
    packing=trained.config.data.packing,
  )
  ids = ("bos_token_id", "eos_token_id", "pad_token_id")
  tokenizer_config = make_tokenizer_config(trained)
  if template := read_template(os.path.dirname(vocabulary.path)):
    # Encode special tokens' names as their ids: templates contain such names.
    tokenizer_config["chat_template"] = template
    tokenizer_config["split_special_tokens"] = False
  files = {
    "config.json": described,
    "generation_config.json": {name: described[name] for name in ids},
    "tokenizer_config.json": tokenizer_config,
  }
  if reason := (
    isinstance(vocabulary, SentencePieceVocabulary)
    and explain_inexact(vocabulary)
  ):
    _logger.warning(
      f"no tokenizer.json is written for {vocabulary.path}: {reason}; encode "
      "with SentencePiece and vocabulary.model"
    )
    return files
  tokenizer = make_tokenizer_json(vocabulary, trained.prompt_start)
  return files | {"tokenizer.json": tokenizer}


def explain_inexact(vocabulary: SentencePieceVocabulary) -> str:
  """Returns why an exported tokenizer would change ids; "" if it would not."""
  model = _parse(vocabulary)
  trainer, normalizer = model.trainer_spec, model.normalizer_spec
  is_plain = normalizer.name == "identity"
  reasons = {
    "it is not a byte-pair encoding": trainer.model_type != _BPE,
    "it has no byte pieces": not vocabulary.has_bytes,
    f"it normalizes text ({normalizer.name})": not is_plain
    or normalizer.precompiled_charsmap,
    "it adds or removes spaces": normalizer.add_dummy_prefix
    or normalizer.remove_extra_whitespaces,
    "its pieces end in spaces": trainer.treat_whitespace_as_suffix,
  }
  return next((reason for reason, holds in reasons.items() if holds), "")


def make_tokenizer_json(
  vocabulary: Vocabulary, start_id: int | None
) -> dict[str, object]:
  """Returns tokenizer.json, which gives the vocabulary's ids for every text.

  An encoding with special tokens begins with `start_id`, unless it is None.
  `explain_inexact` must return "" for a SentencePieceVocabulary.
  """
  start = None
  if start_id is not None:
    name = vocabulary.piece(start_id).replace(SPACE_MARK, " ")
    start = start_processor(name, start_id)
  if isinstance(vocabulary, BytePairVocabulary):
    found = json.loads(vocabulary.files()[FILE_NAME])
    return {**found, "post_processor": start}
  model = _parse(vocabulary)
  pieces = [x.piece.replace(SPACE_MARK, " ") for x in model.pieces]
  scores = {
    piece: each.score
    for piece, each in zip(pieces, model.pieces, strict=True)
    if each.type == _NORMAL
  }
  merged = sorted(
    (x for x in scores if len(x) > 1), key=lambda piece: -scores[piece]
  )
  merges = [
    [piece[:cut], piece[cut:]]
    for piece in merged
    for cut in range(1, len(piece))
    if piece[:cut] in scores and piece[cut:] in scores
  ]
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    # Without "[eod]", which in a text is encoded like any other text.
    "added_tokens": [
      PLAIN_TOKEN | {"id": i, "content": piece, "special": False}
      for i, piece in enumerate(pieces)
      if model.pieces[i].type == _USER_DEFINED
    ],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": start,
    "decoder": {
      "type": "Sequence",
      "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}],
    },
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": pieces[model.trainer_spec.unk_id],
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": True,
      "ignore_merges": False,
      "vocab": {piece: i for i, piece in enumerate(pieces)},
      "merges": merges,
    },
  }


def make_tokenizer_config(trained: TrainedModel) -> dict[str, object]:
  """Returns tokenizer_config.json."""
  vocabulary, bos_id = trained.vocabulary, trained.bos_id
  eod, named = vocabulary.piece(vocabulary.eod_id), {}
  # transformers makes tokens named here special: name only a token of no text.
  if bos_id is not None and vocabulary.is_control(bos_id):
    named = {"bos_token": vocabulary.piece(bos_id)}
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **named,
    "add_bos_token": trained.prompt_start is not None,
    "eos_token": eod,
    "pad_token": eod,
    # Encode "[eod]" in a text as text, not as the id of [eod].
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
    "model_max_length": trained.described.sequence_length,
  }


def _parse(
  vocabulary: SentencePieceVocabulary,
) -> sentencepiece_model_pb2.ModelProto:
  return sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)
