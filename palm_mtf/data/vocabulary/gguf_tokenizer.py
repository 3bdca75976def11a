# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and makes the metadata of a GGUF file that describes a tokenizer.

  tokenizer.ggml.model = "gpt2"    byte-level byte-pair encoding
  tokenizer.ggml.model = "llama"   SentencePiece's byte-pair encoding

For "gpt2", tokenizer.ggml.pre names the regular expressions by which llama.cpp
splits a text before it merges bytes. llama.cpp then neither normalizes the text
nor puts a space before the text.
"""

import json
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from sentencepiece import sentencepiece_model_pb2

from palm_mtf.data.vocabulary import byte_pair, sentencepiece_vocabulary
from palm_mtf.data.vocabulary.byte_pair import (
  PLAIN_TOKEN,
  BytePairVocabulary,
  list_parts,
  start_processor,
)
from palm_mtf.data.vocabulary.sentencepiece_vocabulary import (
  SPACE_MARK,
  SentencePieceVocabulary,
)
from palm_mtf.data.vocabulary.vocabulary import GENERATION_CONFIG, Vocabulary
from palm_mtf.errors import UserError, did_you_mean, shorten
from palm_mtf.json_text import json_text

_KEY = "tokenizer.ggml."
# GGUF and SentencePiece use the same numbers for the types of tokens.
_PIECE = sentencepiece_model_pb2.ModelProto.SentencePiece
_NORMAL, _UNKNOWN, _CONTROL = _PIECE.NORMAL, _PIECE.UNKNOWN, _PIECE.CONTROL
_USER_DEFINED, _UNUSED, _BYTE = _PIECE.USER_DEFINED, _PIECE.UNUSED, _PIECE.BYTE
_TYPES = {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE}

_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r"|\s+(?!\S)|\s+"
)
# English contractions as in a tokenizer.json, and as in llama.cpp. To compare
# the two, `_list_patterns` replaces the first form by the second, although only
# the first form matches U+017F as an "s".
_ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BOTH_CASES = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_LLAMA3 = (
  _BOTH_CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT, _THREE_DIGITS = r"\p{N}", "[0-9][0-9][0-9]"
# {value of tokenizer.ggml.pre: (regular expressions, whether names win)}. Each
# expression splits the fragments that the previous one leaves. If names win, a
# fragment that is a token's name becomes this token, whatever the merges say.
_SPLITS = {
  "gpt-2": ((_GPT2,), False),
  "smollm": ((_DIGIT, _GPT2), False),
  "llama-bpe": ((_LLAMA3,), True),
  "smaug-bpe": ((_LLAMA3,), False),
  "qwen2": ((_LLAMA3.replace("{1,3}", ""),), False),
  "falcon": ((r"[\p{P}$+<=>^~|`]+", _GPT2, _THREE_DIGITS), False),
  "default": ((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE_DIGITS), False),
}
_SAME = {
  "gpt-2": "gpt-neox olmo mpt jais phi-2 trillion exaone4 granite-docling",
  "smollm": "command-r starcoder refact codeshell exaone minerva-7b",
  "llama-bpe": "llama3 llama-v3 falcon3 pixtral lfm2",
  "smaug-bpe": "dbrx",
  "qwen2": "stablelm2 deepseek-r1-qwen hunyuan megrez",
}
_FIRST_NAMES = {x: x for x in _SPLITS} | {
  x: first for first, names in _SAME.items() for x in names.split()
}

# llama.cpp treats tokens with these names as control tokens that end a text,
# whatever their types are; likewise tokens with ids under the keys in _ENDS.
_END_NAMES = set(
  "<|endoftext|> <|end_of_text|> </s> <eos> [EOS] <|end|> <|im_end|> "
  "<|eot_id|> <|eom_id|> <end_of_turn> <turn|> <EOT> _<EOT> [EOT] <|return|> "
  "<|call|> <|calls|> <|flush|> <|tool_response> <end_of_utterance> "
  "<\uff5cend\u2581of\u2581sentence\uff5c> "
  "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <fim-repo> <REPO> "
  "<|repo_name|> <reponame> <|file_sep|>".split()
)
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_start(
  metadata: Mapping[str, Any],
) -> tuple[int | None, int | None]:
  """Returns the start token's id or None; and the id to put before each text.

  The second id is the first id or None. Missing keys get llama.cpp's defaults.
  """
  is_llama = read_key(metadata, f"{_KEY}model", str, "") == "llama"
  bos_id = read_key(
    metadata, f"{_KEY}bos_token_id", int, 1 if is_llama else None
  )
  name = read_key(metadata, f"{_KEY}pre", str, "")
  _, adds_start = _SPLITS[_FIRST_NAMES.get(name, "default")]
  is_added = read_key(
    metadata, f"{_KEY}add_bos_token", bool, is_llama or adds_start
  )
  return bos_id, bos_id if is_added else None


def read_gguf_ends(metadata: Mapping[str, Any]) -> dict[str, bytes]:
  """Returns {name: content} of a file that lists tokens that end a text."""
  tokens = read_key(metadata, f"{_KEY}tokens", list[str], [])
  given = [read_key(metadata, f"{_KEY}{x}", int, None) for x in _ENDS]
  named = [i for i, name in enumerate(tokens) if name in _END_NAMES]
  ids = [i for i in dict.fromkeys([*given, *named]) if i is not None]
  return {GENERATION_CONFIG: json_text({"eos_token_id": ids}).encode()}


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> dict[str, bytes]:
  """Returns {file name: content}; the first file is the vocabulary.

  `metadata` is {key: value} of a GGUF file, such as "tokenizer.ggml.tokens".
  Raises UserError if it is wrong or incomplete, or names regular expressions
  that this module does not know.
  """
  kind = read_key(metadata, f"{_KEY}model", str)
  if kind not in ("gpt2", "llama"):
    raise UserError(
      f"{_KEY}model = {kind!r}: only 'gpt2' and 'llama' are read; give a "
      "tokenizer.json or a SentencePiece model."
    )
  tokens = read_key(metadata, f"{_KEY}tokens", list[str])
  eod_id = read_key(metadata, f"{_KEY}eos_token_id", int)
  types = read_key(metadata, f"{_KEY}token_type", list[int], [])
  types = [*types] or [_NORMAL] * len(tokens)
  lengths = {len(tokens), len(types)}
  if kind == "llama":
    scores = read_key(metadata, f"{_KEY}scores", list[float])
    lengths.add(len(scores))
    if not all(map(math.isfinite, scores)):
      raise UserError(
        f"{_KEY}scores: holds a number that is not finite; convert the model "
        "again."
      )
  special = (*_ENDS, "bos_token_id", "unknown_token_id")
  ids = [read_key(metadata, f"{_KEY}{name}", int, 0) for name in special]
  if len(lengths) > 1 or not all(0 <= i < len(tokens) for i in ids):
    raise UserError(
      f"{_KEY}tokens: are {len(tokens):,} with {len(types):,} types, and the "
      f"ids of special tokens are {ids}; convert the model again."
    )
  if not {*types} <= _TYPES:
    raise UserError(
      f"{_KEY}token_type: holds {max({*types} - _TYPES)}; types are numbers "
      f"from {min(_TYPES)} to {max(_TYPES)}; convert the model again."
    )
  for i, name in enumerate(tokens):
    if i == eod_id or name in _END_NAMES:
      types[i] = _CONTROL
  read = _read_byte_level if kind == "gpt2" else _read_sentencepiece
  return read(metadata, tokens, types, eod_id) | read_gguf_ends(metadata)


def make_gguf_tokenizer(
  vocabulary: Vocabulary,
  *,
  start_id: int | None,
  vocab_size: int,
  adds_start: bool = True,
) -> dict[str, Any]:
  """Returns {key of GGUF: value} for a tokenizer with the vocabulary's ids.

  The embedding has `vocab_size` rows. `start_id` is the id of the start token,
  if there is one; `adds_start` says whether each text gets it.

  Raises UserError if llama.cpp would encode a text differently. For a
  SentencePieceVocabulary, export/gguf/model.py checks this.
  """
  is_bytes = isinstance(vocabulary, BytePairVocabulary)
  describe = _describe_byte_level if is_bytes else _describe_sentencepiece
  described = describe(vocabulary)
  missing = range(vocabulary.size, vocab_size)  # embedding rows without a piece
  described["tokens"] += [f"[UNUSED {i}]" for i in missing]
  described["token_type"] += [_UNUSED] * len(missing)
  if not is_bytes:
    described["scores"] += [0.0] * len(missing)
  described |= {
    **dict(zip(_ENDS, vocabulary.end_ids, strict=False)),
    **({} if start_id is None else {"bos_token_id": start_id}),
    "padding_token_id": vocabulary.eod_id,
    "add_bos_token": adds_start,
    "add_eos_token": False,
    "add_space_prefix": False,
    "remove_extra_whitespaces": False,
  }
  return {f"{_KEY}{name}": value for name, value in described.items()}


def _read_byte_level(
  metadata: Mapping[str, Any],
  tokens: Sequence[str],
  types: Sequence[int],
  eod_id: int,
) -> dict[str, bytes]:
  name = read_key(metadata, f"{_KEY}pre", str, "") or "default"
  if name not in _FIRST_NAMES:
    raise UserError(
      f"{_KEY}pre = {name!r}{did_you_mean(name, _FIRST_NAMES)}: this way to "
      "split texts is unknown here; give the model's tokenizer.json."
    )
  patterns, ignores_merges = _SPLITS[_FIRST_NAMES[name]]
  used = [i for i, kind in enumerate(types) if kind != _UNUSED]
  ids = {tokens[i]: i for i in used}
  if len(ids) < len(used):
    raise UserError(
      f"{_KEY}tokens: some tokens have the same name; convert the model again."
    )
  _, start_id = read_gguf_start(metadata)
  byte_level = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
  }
  described = {
    "added_tokens": [
      PLAIN_TOKEN
      | {"id": i, "content": tokens[i], "special": kind != _USER_DEFINED}
      for i, kind in enumerate(types)
      if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    ],
    "pre_tokenizer": {
      "type": "Sequence",
      "pretokenizers": [*map(_make_split, patterns), byte_level],
    },
    "post_processor": None
    if start_id is None
    else start_processor(tokens[start_id], start_id),
    "decoder": byte_level,
    "model": {
      "type": "BPE",
      "ignore_merges": ignores_merges,
      "vocab": ids,
      "merges": read_key(metadata, f"{_KEY}merges", list[str]),
    },
  }
  config = {"eos_token": tokens[eod_id]}
  return {
    byte_pair.FILE_NAME: json_text(described).encode(),
    byte_pair.CONFIG: json_text(config).encode(),
  }


def _make_split(pattern: str) -> dict[str, Any]:
  return {
    "type": "Split",
    "pattern": {"Regex": pattern},
    "behavior": "Isolated",
    "invert": False,
  }


def _read_sentencepiece(
  metadata: Mapping[str, Any],
  tokens: Sequence[str],
  types: Sequence[int],
  eod_id: int,
) -> dict[str, bytes]:
  # SentencePiece requires exactly one unknown piece.
  unknown_id = read_key(metadata, f"{_KEY}unknown_token_id", int, 0)
  if unknown_id == eod_id:
    raise UserError(
      f"{_KEY}unknown_token_id = {unknown_id}: is also the eos_token_id; "
      "convert the model again."
    )
  types = [_CONTROL if kind == _UNKNOWN else kind for kind in types]
  types[unknown_id] = _UNKNOWN
  proto = sentencepiece_model_pb2.ModelProto()
  scores = read_key(metadata, f"{_KEY}scores", list[float])
  for token, score, kind in zip(tokens, scores, types, strict=True):
    # llama.cpp looks for user-defined tokens in the text itself, and
    # SentencePiece after spaces have become U+2581.
    own = token.replace(" ", SPACE_MARK) if kind == _USER_DEFINED else token
    proto.pieces.add(piece=own, score=score, type=kind)
  trained, normalizer = proto.trainer_spec, proto.normalizer_spec
  trained.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
  trained.vocab_size = len(tokens)
  trained.byte_fallback = types.count(_BYTE) == 256
  trained.unk_id, trained.unk_piece = unknown_id, tokens[unknown_id]
  trained.eos_id, trained.eos_piece = eod_id, tokens[eod_id]
  normalizer.name = "identity"
  normalizer.add_dummy_prefix = read_key(
    metadata, f"{_KEY}add_space_prefix", bool, True
  )
  normalizer.remove_extra_whitespaces = False
  return {sentencepiece_vocabulary.FILE_NAME: proto.SerializeToString()}


def _describe_byte_level(vocabulary: BytePairVocabulary) -> dict[str, Any]:
  found = json.loads(vocabulary.files()[byte_pair.FILE_NAME])
  model, reason = found["model"], ""
  plain = {x["content"]: x for x in found["added_tokens"] if not x["special"]}
  split = _list_patterns(found), bool(model.get("ignore_merges"))
  if model.get("byte_fallback"):
    reason = "it has byte fallback, not byte level"
  elif found.get("normalizer"):
    reason = "it normalizes text"
  elif any(
    x["lstrip"] or x["rstrip"] or x["single_word"] for x in plain.values()
  ):
    reason = "it has added tokens that depend on the text around them"
  elif split not in _SPLITS.values():
    reason = "its pre_tokenizer splits texts in another way than llama.cpp can"
  if reason:
    raise UserError(
      f"{vocabulary.path}: llama.cpp would encode differently: {reason}; use "
      "another --format."
    )

  def type_of(i: int) -> int:
    if not vocabulary.piece(i):
      return _UNUSED
    if vocabulary.is_control(i):
      return _CONTROL
    return _USER_DEFINED if vocabulary.piece(i) in plain else _NORMAL

  ids = range(vocabulary.size)
  return {
    "model": "gpt2",
    "pre": next(name for name, value in _SPLITS.items() if value == split),
    "tokens": [vocabulary.piece(i) or f"[UNUSED {i}]" for i in ids],
    "token_type": [*map(type_of, ids)],
    "merges": [
      x if isinstance(x, str) else " ".join(x) for x in model["merges"]
    ],
  }


def _list_patterns(found: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the regular expressions by which a tokenizer.json splits a text.

  They are written as in _SPLITS, to look them up there. () if a step of the
  pre-tokenizer splits texts in a way that llama.cpp cannot.
  """
  patterns: list[str] = []
  for each in list_parts(found.get("pre_tokenizer")):
    regex = each.get("pattern", {}).get("Regex", "")
    if each["type"] == "ByteLevel" and not each["add_prefix_space"]:
      patterns += [_GPT2] if each.get("use_regex", True) else []
    elif each["type"] == "Digits" and each["individual_digits"]:
      patterns.append(_DIGIT)
    elif each == _make_split(regex):
      patterns.append(regex.replace(_ANY_CASE, _BOTH_CASES))
    else:
      return ()
  return tuple(patterns)


def _describe_sentencepiece(
  vocabulary: SentencePieceVocabulary,
) -> dict[str, Any]:
  model = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)
  return {
    "model": "llama",
    "pre": "default",
    "tokens": [
      x.piece.replace(SPACE_MARK, " ") if x.type == _USER_DEFINED else x.piece
      for x in model.pieces
    ],
    "scores": [x.score for x in model.pieces],
    "token_type": [x.type for x in model.pieces],
    "unknown_token_id": vocabulary.unknown_id,
  }


_REQUIRED = object()
_AGAIN = "convert the model again"
_NAMES = {
  int: "a whole number",
  float: "a number",
  bool: "true or false",
  str: "a text",
  list[int]: "an array of whole numbers",
  list[float]: "an array of numbers",
  list[str]: "an array of texts",
}


def read_key(
  metadata: Mapping[str, Any],
  key: str,
  kind: type | types.GenericAlias,
  default: Any = _REQUIRED,
) -> Any:
  """Returns the value of a key.

  Args:
    metadata: {key: value} of a GGUF file.
    kind: type of the value, or list[type]. A whole number is a float, too.
    default: value for a file without the key.

  Raises:
    UserError: the value has another type; or the key is missing, and there is
      no default.
  """
  value, (item,) = metadata.get(key), get_args(kind) or (kind,)
  if value is None:
    if default is _REQUIRED:
      raise UserError(f"{key}: is missing in the GGUF file; {_AGAIN}.")
    return default
  allowed = (int, float) if item is float else (item,)
  is_array = item is not kind
  if isinstance(value, list) is not is_array or not all(
    type(x) in allowed for x in (value if is_array else [value])
  ):
    raise UserError(
      f"{key} = {shorten(value)}: is not {_NAMES[kind]}; {_AGAIN}."
    )
  return value
