# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Small files tokenizer.json of the forms that pretrained models have."""

import json
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tests.prefixed_vocabulary import train_prefixed
from tests.source_files import PACKAGE, text_of

END, START, SYSTEM, USER = "<|endoftext|>", "<s>", "<|system|>", "<user>"
CORPUS = [
  *(text_of(path) for path in PACKAGE[:30]),
  *(
    "don't we'll THEY'LL 1234 567 caf\u00e9 na\u00efve e\u0301 \u4e2d\u6587 "
    * 9,
  ),
  *(
    "\u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f469\u200d\U0001f467 " * 9,
  ),
]
# The patterns of tokenizer.json of LLaMA 3 and of Qwen 2.
LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_NO_PATTERN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
  split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
  return pre_tokenizers.Sequence([split, _NO_PATTERN])


# {name of a form: (pre-tokenizer, normalizer)}
BYTE_LEVEL = {
  "gpt-2": (_LEVEL, None),
  "gpt-neox": (_LEVEL, normalizers.NFC()),
  "smollm": (
    pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _LEVEL]),
    None,
  ),
  "llama-bpe": (_split(LLAMA3), None),
  "qwen2": (_split(QWEN2), None),
}


def make_byte_level(
  form: str, texts: Sequence[str] = CORPUS, size: int = 900
) -> dict[str, Any]:
  """Returns a tokenizer.json with the special tokens END, START and SYSTEM.

  USER is an added token that is not special.

  Args:
    form: a key of BYTE_LEVEL.
    texts: texts to learn the merges from.
    size: number of tokens, without SYSTEM and USER.
  """
  made = tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer, normalizer = BYTE_LEVEL[form]
  if normalizer:
    made.normalizer = normalizer
  made.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size,
    show_progress=False,
    special_tokens=[END, START],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )
  made.train_from_iterator(texts, trainer)
  made.add_special_tokens([SYSTEM])
  made.add_tokens([tokenizers.AddedToken(USER, normalized=False)])
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single=f"{START} $A", special_tokens=[(START, 1)]
  )
  found = json.loads(made.to_str())
  found["model"]["ignore_merges"] = form == "llama-bpe"
  return found


def make_llama2(
  folder: pathlib.Path,
) -> tuple[dict[str, Any], sentencepiece.SentencePieceProcessor]:
  """Returns a tokenizer.json of LLaMA 2's form and the model that it copies."""
  # SentencePiece skips longer lines.
  text = f"{CORPUS[3][:3000]} {CORPUS[-2][:200]} a red bird"
  model = pathlib.Path(train_prefixed(text, folder, vocab_size=500).path)
  model = model.read_bytes()
  proto = sentencepiece_model_pb2.ModelProto.FromString(model)
  pieces = [x.piece for x in proto.pieces]
  scores = {x.piece: x.score for x in proto.pieces if x.type == 1}
  merged = sorted((x for x in scores if len(x) > 1), key=lambda x: -scores[x])
  added = {"single_word": False, "lstrip": False, "rstrip": False}
  found = {
    "version": "1.0",
    "added_tokens": [
      {"id": i, "content": x.piece, "special": True, "normalized": False}
      | added
      for i, x in enumerate(proto.pieces)
      if x.type in (2, 3)
    ],
    "normalizer": {
      "type": "Sequence",
      "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
      ],
    },
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {
      "type": "Sequence",
      "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
      ],
    },
    "model": {
      "type": "BPE",
      "unk_token": "<unk>",
      "fuse_unk": True,
      "byte_fallback": True,
      "vocab": {x: i for i, x in enumerate(pieces)},
      "merges": [
        [x[:cut], x[cut:]]
        for x in merged
        for cut in range(1, len(x))
        if x[:cut] in scores and x[cut:] in scores
      ],
    },
  }
  return found, sentencepiece.SentencePieceProcessor(model_proto=model)


def write(folder: pathlib.Path, content: object, **config: object) -> str:
  """Writes a tokenizer.json and its tokenizer_config.json; returns its path."""
  path = folder / "tokenizer.json"
  path.write_text(json.dumps(content))
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return str(path)


_CHUNKS = [
  *("a", "the", " word", " ", "  ", "   ", "\n", "\r\n", "\t", "\n\n", " \n"),
  *("1", "123", "12345", "9.5", "'s", "'S", "'ll", "'LL", "'Re", " 'd", "'t"),
  *("\u4e2d", "\u6587\u5b57", "\u65e5\u672c\u8a9e", "\uac00", "\U0001f600"),
  *("\U0001f469\u200d\U0001f467", "e\u0301", "\u0301", "\u0645\u0631\u062d"),
  *("\u05e9\u05dc", "\u202e", "\ue000", "\U0010fffd", "\x00", "\x01", "\x1c"),
  *("\x1f", "\x7f", "\x85", "\xa0", "\u3000", "\u2028", "\u200b", "\ufeff"),
  *("$", "=>", "!!", "...", "(", ")", "`", "~", "|", "_", "\u00b2", "\u00bd"),
  *("\u0663", "\u216b", "\u2460", "\uff11", "\U0001d7ce", "\u0e01", "A"),
  *("\u0915\u094d\u0937", "\ufb01", "\u00df", "\u0130", "Zed", "camelCase"),
  *(END, START, SYSTEM, USER, "<|im_start|>", "</s>", "<0x41>"),
]


def fuzzed_texts(count: int, seed: int = 0) -> list[str]:
  """Returns texts of words, spaces, digits and rare characters."""
  rng = random.Random(seed)
  return [
    "".join(rng.choices(_CHUNKS, k=rng.randrange(1, 14))) for _ in range(count)
  ]
