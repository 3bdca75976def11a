# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Encodes conversations, in which control tokens stand between strings.

A conversation gets the same ids as in another program:

  tokenizer.json       transformers, where flags of an added token, such as
                       `rstrip`, remove white space next to the token
  SentencePiece model  llama.cpp, which encodes the string after each control
                       token like the start of a text
"""

import collections
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palm_mtf.data.vocabulary import byte_pair
from palm_mtf.data.vocabulary.byte_pair import BytePairVocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.json_text import json_text

# A function from strings and ids of control tokens, in order, to token ids.
Encode = Callable[[Sequence[str | int]], list[int]]


def make_encoder(vocabulary: Vocabulary, controls: Mapping[str, int]) -> Encode:
  """Returns a function that encodes strings with control tokens between them.

  Args:
    controls: {name: id} of the control tokens. A name that occurs in a string
      is encoded like other characters.
  """
  if isinstance(vocabulary, BytePairVocabulary):
    return _make_byte_pair_encoder(vocabulary, controls)

  def encode(parts: Sequence[str | int]) -> list[int]:
    texts = [x for x in parts if isinstance(x, str)]
    encoded = iter(vocabulary.encode_batch(texts))
    return [
      i for x in parts for i in (next(encoded) if isinstance(x, str) else [x])
    ]

  return encode


def _make_byte_pair_encoder(
  vocabulary: BytePairVocabulary, controls: Mapping[str, int]
) -> Encode:
  import tokenizers

  # The library finds control tokens by their names, also in messages. So give
  # each control token a name that nobody can guess. Keep the name's first and
  # last characters, because the flag single_word depends on them.
  def rename(name: str) -> str:
    return name[0] + secrets.token_hex(16) + name[-1]

  names = {name: rename(name) for name in controls}
  described = json.loads(vocabulary.files()[byte_pair.FILE_NAME])
  model, added = described["model"], described["added_tokens"]
  model["vocab"] = {names.get(x, x): i for x, i in model["vocab"].items()}
  model["merges"] = [
    x for x in model["merges"] if not names.keys() & _merged(x)
  ]
  unknown = model.get("unk_token")
  model["unk_token"] = names.get(unknown, unknown)
  known = {x["content"] for x in added}
  added += [
    {"id": i, "content": name, **byte_pair.PLAIN_TOKEN}
    for name, i in controls.items()
    if name not in known
  ]
  described["added_tokens"] = [
    {**x, "content": names[x["content"]], "special": True}
    if x["content"] in names
    else x
    for x in added
  ]
  # These fields may refer to the old names, and are not needed here.
  described |= dict.fromkeys(("post_processor", "padding", "truncation"))
  made = tokenizers.Tokenizer.from_str(json_text(described))
  made.model.dropout = None  # no random merges
  name_of = {i: name for name, i in controls.items()}

  def encode(parts: Sequence[str | int]) -> list[int]:
    texts = [x if isinstance(x, str) else names[name_of[x]] for x in parts]
    found = made.encode("".join(texts), add_special_tokens=False)
    # The flag single_word may keep the library from finding a control token.
    # Then its real name is encoded as characters, as transformers does.
    pairs = zip(found.ids, found.offsets, strict=True)
    tokens = collections.deque(x for x in pairs if x[0] in name_of)
    changed, end = [*parts], 0
    for place, (part, text) in enumerate(zip(parts, texts, strict=True)):
      begin, end = end, end + len(text)
      while tokens and tokens[0][1][1] <= begin:
        tokens.popleft()
      is_found = tokens and tokens[0][0] == part and tokens[0][1][0] < end
      if not isinstance(part, str) and not is_found:
        changed[place] = name_of[part]
    return found.ids if changed == [*parts] else encode(changed)

  return encode


def _merged(merge: Any) -> set[str]:
  # Returns the three tokens of a merge, which is "a b" or ["a", "b"] in a file.
  parts = merge.split(" ") if isinstance(merge, str) else merge
  return {*parts, "".join(parts)}
