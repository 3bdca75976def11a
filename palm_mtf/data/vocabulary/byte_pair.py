# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of Hugging Face's library `tokenizers`, from a tokenizer.json.

Only these byte-pair encodings are read, because they can encode every
character:

  byte level      of GPT-2, GPT-NeoX, LLaMA 3, Qwen, Cohere and SmolLM: a token
                  is a run of bytes, which may be a part of a character
  byte fallback   of LLaMA 2, Mistral and Gemma: a token is a run of characters,
                  or one byte; most files write a space as U+2581

The library encodes as the file says, except that the file's post-processor is
not applied, because it may add a start token, which the caller adds.

The name of a special token in a text is encoded like other characters, as
llama.cpp and transformers do on request, so that no text can contain control
tokens. The name of an added token that is not special becomes the token's id.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf.data.vocabulary.vocabulary import (
  EACH_BYTE,
  Vocabulary,
  encode_parts,
  find_ends,
)
from palm_mtf.errors import UserError, shorten
from palm_mtf.json_text import json_text

FILE_NAME, CONFIG = "tokenizer.json", "tokenizer_config.json"
_END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
_OTHER = "give a byte-pair encoding that keeps bytes, or a SentencePiece model"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
# Larger ids are refused, because host memory holds one list entry per id.
_MOST_IDS = 2**20
# A normalizer, pre-tokenizer or decoder of type "Sequence" lists its steps in
# one of these fields.
_PARTS = ("normalizers", "pretokenizers", "decoders")
# Some regular expressions with nested repetitions fail on this text. Their file
# is then refused when it is opened, not when a user's text is encoded.
_PROBE = f"{'a' * 99}! 1 a\u00e9\n"
_MOST_SHOWN = 200  # characters; cuts off longer errors of the library
# A file with byte fallback and other decoders is refused, because only these
# decoders can be applied to single tokens, to find each token's bytes.
_FALLBACK = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}

# Flags for added tokens that we write into a tokenizer.json: the token is found
# anywhere in a text, and white space next to it stays.
PLAIN_TOKEN = dict.fromkeys(
  ("single_word", "lstrip", "rstrip", "normalized"), False
)

Json = dict[str, Any]


class BytePairVocabulary(Vocabulary):
  """A tokenizer.json whose byte-pair encoding can encode every character."""

  def __init__(
    self,
    path: str,
    model: bytes,
    *,
    what: str,
    extra_ids: int = 0,
    ends: Sequence[str | int] = (),
  ):
    """Reads a tokenizer.json; see `Vocabulary`."""
    self.path, self.extra_ids = path, extra_ids
    self._model, self._what, self._ends = model, what, ends
    described = _read_tokenizer(model, what)
    text = model.decode()
    self._tokenizer = self._inside = _make_tokenizer(text, extra_ids, what)
    inside = {x: described.get(x) for x in ("normalizer", "pre_tokenizer")}
    changed = {name: _drop_prefix(part) for name, part in inside.items()}
    if changed != inside:
      # Encodes texts that continue another text, without a space before them.
      inside = json_text(described | changed)
      self._inside = _make_tokenizer(inside, extra_ids, what)
    ids = self._tokenizer.get_vocab()
    self._names = {i: name for name, i in ids.items()}
    self.size = max(self._names) + 1
    if self.size > _MOST_IDS:
      raise UserError(f"{what}: has an id above {_MOST_IDS:,}; copy it again.")
    self.end_ids = _find_ends(ends, ids, what)
    self.eod_id = self.end_ids[0]
    added = self._tokenizer.get_added_tokens_decoder()
    self.added_ids = frozenset(added)
    names = [self._names[i] for i in self.end_ids if i in added]
    for tokenizer in (self._tokenizer, self._inside):
      # The names of special tokens in a text are encoded as characters, so no
      # text can contain an end token.
      tokenizer.add_special_tokens(names)
    self._controls = {i for i in range(self.size) if i not in self._names}
    self._controls |= {i for i in added if added[i].special}
    # An end token that is a learned piece, not an added token, can also come
    # from a text. So it decodes to text, unless it is [eod].
    self._controls |= {self.eod_id, *(i for i in self.end_ids if i in added)}
    to_bytes, self._drops_space = _read_decoders(described, what)
    self._bytes = [b""] * self.size  # what each id adds to a decoded text
    self.is_byte = np.zeros(self.size, bool)
    for i in self._names.keys() - self._controls:
      name = self._names[i]
      found = self._bytes[i] = name.encode() if i in added else to_bytes(name)
      is_piece = name[:3] == "<0x" and _BYTE.fullmatch(name)
      if is_piece or not (found.isascii() or _is_whole(found)):
        self.is_byte[i] = True
    # Hash only what affects the ids of a text, on which checkpoints depend.
    kept = ("normalizer", "pre_tokenizer", "model", "added_tokens", "decoder")
    parts = [*map(described.get, kept), extra_ids, self.eod_id]
    self.sha256 = hashlib.sha256(json_text(parts).encode()).hexdigest()

  def __reduce__(self) -> tuple:
    # Worker processes read the file's content again, because a pickled
    # tokenizer loses the setting to encode special tokens as text.
    settings = {"what": self._what, "ends": self._ends}
    make = functools.partial(
      BytePairVocabulary, extra_ids=self.extra_ids, **settings
    )
    return make, (self.path, self._model)

  def files(self) -> Mapping[str, bytes]:
    """Returns files for `write`: tokenizer.json, and lists of end tokens."""
    model, config = self._model, dict(self.special_tokens)
    config["eos_token"] = self.piece(self.eod_id)
    if self.extra_ids:
      model = self._tokenizer.to_str().encode()
    return {
      FILE_NAME: model,
      CONFIG: json_text(config).encode(),
      **self.end_files(),
    }

  def start_ids(self) -> list[int]:
    """Returns the post-processor's start ids, which the caller must add."""
    found = self._tokenizer.encode("a")
    pairs = zip(found.ids, found.special_tokens_mask, strict=True)
    return [i for i, _ in itertools.takewhile(lambda pair: pair[1], pairs)]

  def piece(self, i: int) -> str:
    """Returns the name of id `i` in the file; "" if the id is unused."""
    return self._names.get(i, "")

  def is_control(self, i: int) -> bool:
    """Whether id `i` stands for no text: a special token or an unused id."""
    return i in self._controls

  def token_bytes(self, i: int, before: Sequence[int] | None = None) -> bytes:
    """Returns the bytes that id `i` adds to a text; see `Vocabulary`."""
    found = self._bytes[i] if i < self.size else "\ufffd".encode()
    if before is None or not self._drops_space:
      return found
    is_dropped = any(map(self.token_bytes, before))
    return found if is_dropped else found.removeprefix(b" ")

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`; special tokens have no text."""
    runs = itertools.groupby(map(int, ids), self._controls.__contains__)
    text = "".join(
      b"".join(map(self.token_bytes, run)).decode(errors=EACH_BYTE)
      for is_control, run in runs
      if not is_control
    )
    return text.removeprefix(" ") if self._drops_space else text

  def _encode(
    self, texts: Sequence[str], num_threads: int, are_inside: Sequence[bool]
  ) -> list[np.ndarray]:
    def encode(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
      if num_threads > 1:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
      else:  # one thread; encode_batch_fast would start one per core
        found = [tokenizer.encode(x, add_special_tokens=False) for x in texts]
      return [np.array(x.ids, np.int32) for x in found]

    first = functools.partial(encode, self._tokenizer)
    inside = functools.partial(encode, self._inside)
    with _library_errors(
      self._what, "leave out the text that it cannot encode"
    ):
      return encode_parts(first, inside, texts, are_inside)


def _read_tokenizer(model: bytes, what: str) -> Json:
  """Parses a tokenizer.json; refuses models other than byte-pair encoding."""
  try:
    found = json.loads(model.decode())
  except (ValueError, RecursionError):
    found = None
  if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
    raise UserError(
      f"{what}: is JSON, but no tokenizer.json of Hugging Face's tokenizers; "
      "copy it again, or give another file."
    )
  for name in ("normalizer", "pre_tokenizer", "decoder"):
    if not _has_parts(found.get(name)):
      raise UserError(
        f"{what}: its {name} is {shorten(found[name])}, but no JSON object; "
        "copy the file again."
      )
  kind = found["model"].get("type", "BPE")
  if kind != "BPE":
    raise UserError(f"{what}: its model is {kind}; {_OTHER}.")
  return found


def _make_tokenizer(text: str, extra_ids: int, what: str) -> Any:
  """Makes a tokenizers.Tokenizer from `text`, a tokenizer.json's content."""
  try:
    import tokenizers
  except ImportError as error:
    raise UserError(
      f"{what}: is read with Hugging Face's tokenizers, which cannot be "
      f"imported ({error}): pip install 'palm_mtf[tokenizers]', or give a "
      "SentencePiece model."
    ) from None
  with _library_errors(what, "copy the file again"), _quiet_stderr():
    made = tokenizers.Tokenizer.from_str(text)
    # Some regular expressions compile, but fail on a text.
    made.encode(_PROBE)
  made.no_truncation()
  made.no_padding()
  made.model.dropout = None  # no random merges
  made.encode_special_tokens = True  # as text, not as their ids
  # T5's sentinels: <extra_id_0> has the last id.
  sentinels = [f" <extra_id_{i}>" for i in reversed(range(extra_ids))]
  made.add_tokens(
    [tokenizers.AddedToken(x, normalized=False) for x in sentinels]
  )
  return made


@contextlib.contextmanager
def _library_errors(what: str, fix: str) -> Iterator[None]:
  try:
    yield
  except (TypeError, UnicodeEncodeError):  # no Unicode; the caller explains
    raise
  # Catch panics of the library's Rust code, too, which are BaseExceptions.
  except BaseException as error:
    is_panic = type(error).__name__ == "PanicException"
    if not is_panic and not isinstance(error, Exception):
      raise
    line = " ".join(str(error).split())
    raise UserError(f"{what}: {line[:_MOST_SHOWN]}; {fix}.") from None


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
  """Discards stderr of all threads, because Rust prints its panics there."""
  kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(null)


def _has_parts(part: object) -> bool:
  """Whether a normalizer, decoder or the like is null, or a tree of objects."""
  if not isinstance(part, dict):
    return part is None
  parts = [part.get(name, []) for name in _PARTS]
  return all(
    isinstance(x, list) and None not in x and all(map(_has_parts, x))
    for x in parts
  )


def list_parts(part: Json | None) -> Iterator[Json]:
  """Yields the steps of a decoder or the like; a "Sequence" has several."""
  if part and part.get("type") == "Sequence":
    for each in itertools.chain(*(part.get(name, ()) for name in _PARTS)):
      yield from list_parts(each)
  elif part:
    yield part


def _drop_prefix(part: Json | None) -> Json | None:
  """Copies a normalizer or pre-tokenizer, but puts no space before a text."""
  if part is None or part.get("type") == "Prepend":
    return None
  changes = {
    name: [x for x in map(_drop_prefix, part[name]) if x]
    for name in _PARTS
    if name in part
  }
  if part.get("type") == "Metaspace":
    changes["prepend_scheme"] = "never"
  elif "add_prefix_space" in part:
    changes["add_prefix_space"] = False
  return part | changes


def _find_ends(
  ends: Sequence[str | int], ids: Mapping[str, int], what: str
) -> tuple[int, ...]:
  """Returns the ids of the tokens that end a text, [eod] first."""
  if not ends:
    ends = [name for name in _END_NAMES if name in ids][:1]
  if not ends:
    raise UserError(
      f"{what}: no token is known as the end of a text; write "
      f'{{"eos_token": "..."}} with its name into a {CONFIG} in its folder.'
    )
  name = ends[0]
  if not find_ends([name], ids):
    token = f"token {shorten(name)}" if isinstance(name, str) else f"id {name}"
    raise UserError(
      f"{what}: has no {token}, the end of a text in the files of its folder; "
      f"copy all files again, or name a token as the eos_token in {CONFIG}."
    )
  return find_ends(ends, ids)


def start_processor(name: str, start_id: int) -> Json:
  """Returns a post-processor for tokenizer.json that adds a start token."""
  start = {"SpecialToken": {"id": name, "type_id": 0}}
  first, second = ({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
  return {
    "type": "TemplateProcessing",
    "single": [start, first],
    "pair": [start, first, second],
    "special_tokens": {name: {"id": name, "ids": [start_id], "tokens": [name]}},
  }


def _read_decoders(
  described: Json, what: str
) -> tuple[Callable[[str], bytes], bool]:
  """Reads how to decode single tokens; the library decodes only whole texts.

  Returns a function from a token's name to its bytes, and whether decoding
  drops a text's first space, because encoding may have added that space.
  """
  decoders = [*list_parts(described.get("decoder"))]
  kinds = {str(x.get("type")) for x in decoders}
  replaced = [  # (characters in a token's name, the text they stand for)
    (x["pattern"].get("String"), x["content"])
    if x["type"] == "Replace"
    else (x["replacement"], " ")
    for x in decoders
    if x.get("type") in ("Metaspace", "Replace")
  ]
  is_fallback = described["model"].get("byte_fallback") and (
    {"ByteFallback"} <= kinds <= _FALLBACK and all(old for old, _ in replaced)
  )
  if kinds != {"ByteLevel"} and not is_fallback:
    raise UserError(
      f"{what}: its encoding is neither of byte level nor with byte fallback "
      f"(decoders: {', '.join(sorted(kinds)) or 'none'}); {_OTHER}."
    )
  # As in GPT-2, the name of a byte-level token has one character per byte: the
  # byte in Latin-1 if it can be printed, else a character from U+0100 on.
  prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = itertools.count(0x100)
  bytes_of = {chr(i if i in prints else next(others)): i for i in range(256)}

  def read_byte_level(name: str) -> bytes:
    try:
      return bytes(map(bytes_of.__getitem__, name))
    except KeyError:  # other characters; the library decodes it to itself
      return name.encode()

  def read_fallback(name: str) -> bytes:
    if match := _BYTE.fullmatch(name):
      return bytes([int(match[1], 16)])
    for old, new in replaced:
      name = name.replace(old, new)
    return name.encode()

  drops_space = any(
    x["type"] == "Strip"
    or (x["type"] == "Metaspace" and x.get("prepend_scheme") != "never")
    for x in decoders
  )
  return read_fallback if is_fallback else read_byte_level, drops_space


def _is_whole(text: bytes) -> bool:
  try:
    text.decode()
  except UnicodeDecodeError:
    return False
  return True
