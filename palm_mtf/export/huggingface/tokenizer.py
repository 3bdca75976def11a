# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""tokenizer.json: a vocabulary of `palm_mtf vocab` as a fast tokenizer.

Both tokenizers are byte-pair encodings. SentencePiece merges the neighbours
whose merged piece has the best score; transformers merges the pair that comes
first in a list. tokenizer.json has spaces instead of SentencePiece's U+2581, so
that texts need no normalization. A U+2581 in a text becomes three bytes, as in
vocabulary.py.
"""

from collections.abc import Sequence

from sentencepiece import sentencepiece_model_pb2

from palm_mtf.data.vocabulary.vocabulary import SPACE_MARK, Vocabulary

_NORMAL = sentencepiece_model_pb2.ModelProto.SentencePiece.NORMAL
_BPE = sentencepiece_model_pb2.TrainerSpec.BPE


def explain_inexact(vocabulary: Vocabulary) -> str:
  """Returns why an exported tokenizer would change ids; "" if it would not."""
  model = _read(vocabulary)
  normalizer = model.normalizer_spec
  if model.trainer_spec.model_type != _BPE:
    return "it is not a byte-pair encoding"
  if not vocabulary.has_bytes:
    return "it has no byte pieces"
  if normalizer.name != "identity" or normalizer.precompiled_charsmap:
    return f"it normalizes text ({normalizer.name})"
  if normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces:
    return "it adds or removes spaces"
  if model.trainer_spec.treat_whitespace_as_suffix:
    return "its pieces end in spaces"
  kinds = {each.type for each in model.pieces}
  if sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED in kinds:
    return "it has pieces that are never merged"
  return ""


def make_tokenizer_json(
  vocabulary: Vocabulary, start_id: int
) -> dict[str, object]:
  """Returns tokenizer.json, which gives the vocabulary's ids for every text.

  An encoding with special tokens begins with `start_id`. `explain_inexact` must
  return "" for the vocabulary.
  """
  model = _read(vocabulary)
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
  start = pieces[start_id]
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    # Empty, so that "[eod]" in a text is encoded like any other text.
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": {
      "type": "TemplateProcessing",
      "single": [
        {"SpecialToken": {"id": start, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
      ],
      "pair": [
        {"SpecialToken": {"id": start, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 0}},
      ],
      "special_tokens": {
        start: {"id": start, "ids": [start_id], "tokens": [start]}
      },
    },
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


def make_tokenizer_config(
  vocabulary: Vocabulary, *, start_id: int, sequence_length: int
) -> dict[str, object]:
  """Returns tokenizer_config.json for texts that begin with `start_id`."""
  eod = vocabulary.piece(vocabulary.eod_id)
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": vocabulary.piece(start_id),
    "eos_token": eod,
    "pad_token": eod,
    # Encode "[eod]" in a text as text, not as the id of [eod].
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
    "model_max_length": sequence_length,
  }


def read_pieces(
  vocabulary: Vocabulary,
) -> Sequence[sentencepiece_model_pb2.ModelProto.SentencePiece]:
  """Returns every piece (text, score and type), in the order of ids."""
  return _read(vocabulary).pieces


def _read(vocabulary: Vocabulary) -> sentencepiece_model_pb2.ModelProto:
  return sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)
