# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A tokenizer.json gives the ids of `tokenizers`, and texts in whole bytes."""

import copy
import json
import os
import pickle
import unicodedata

import pytest
import tokenizers

from palm_mtf.data.sources.document import Document
from palm_mtf.data.tokens import encoder as encoder_module
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.text_reader import TextReader
from palm_mtf.errors import UserError
from tests import tokenizer_files
from tests.tokenizer_files import END, START, SYSTEM, USER, fuzzed_texts

LLAMA2 = "llama2"
FORMS = [*tokenizer_files.BYTE_LEVEL, LLAMA2]
SPECIAL = (END, START, SYSTEM, "</s>")


class Some:
  """A vocabulary, and the library's tokenizer of the same file."""

  def __init__(self, content, folder, end=END):
    self.content = content
    path = tokenizer_files.write(folder, content, eos_token=end)
    self.vocabulary = open_vocabulary(path)
    self.library = tokenizers.Tokenizer.from_file(path)


def make_form(form, folder) -> Some:
  if form != LLAMA2:
    return Some(tokenizer_files.make_byte_level(form), folder)
  content, processor = tokenizer_files.make_llama2(folder)
  found = Some(content, folder, "</s>")
  found.processor = processor
  return found


@pytest.fixture(scope="module", params=FORMS)
def some(request, tmp_path_factory):
  return make_form(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
  return make_form("gpt-2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
  return make_form(LLAMA2, tmp_path_factory.mktemp("llama2"))


def test_ids_are_the_librarys_without_a_start_token(some):
  texts = [x for x in fuzzed_texts(600) if not any(s in x for s in SPECIAL)]
  for text, ids in zip(texts, some.vocabulary.encode_batch(texts), strict=True):
    expected = some.library.encode(text, add_special_tokens=False)
    assert ids == expected.ids, repr(text)
    assert ids == some.vocabulary.encode(text)


def _normalize(some, text: str) -> str:
  is_nfc = some.content["normalizer"] == {"type": "NFC"}
  return unicodedata.normalize("NFC", text) if is_nfc else text


def test_any_text_is_decoded_to_itself_also_if_it_names_special_tokens(some):
  texts = [*fuzzed_texts(600), *SPECIAL, "", "\U00040000\U000f1234"]
  for text in texts:
    # A part between added tokens is normalized by itself.
    if _normalize(some, text) == text:
      assert some.vocabulary.decode(some.vocabulary.encode(text)) == text


def test_text_that_names_a_special_token_has_the_ids_of_its_letters(some):
  """Otherwise a document could end itself."""
  model = some.vocabulary
  special = {i for i in range(model.size) if model.is_control(i)}
  assert model.eod_id in special
  for name in SPECIAL:
    ids = model.encode(f"a{name} b")
    assert len(ids) > 3
    assert special.isdisjoint(ids)
  assert model.decode([*special]) == ""


def test_an_added_token_that_is_not_special_has_its_id_in_a_text(gpt2):
  (i,) = gpt2.vocabulary.encode(USER)
  assert i == gpt2.library.token_to_id(USER)
  assert gpt2.vocabulary.decode([i]) == USER
  assert gpt2.vocabulary.token_bytes(i) == USER.encode()


def test_llama2s_ids_are_those_of_the_sentencepiece_model_that_it_copies(
  llama2,
):
  for text in fuzzed_texts(600):
    ids = llama2.vocabulary.encode(text)
    assert ids == llama2.processor.Encode(text), repr(text)
    assert llama2.vocabulary.decode(ids) == llama2.processor.Decode(ids)


def test_a_text_that_continues_another_gets_no_space(llama2, gpt2):
  whole = "a red\nbird a\nred"
  parts = ["a red\n", "bird a\n", "red"]
  for some in (llama2, gpt2):
    model = some.vocabulary
    first, *others = model.encode_batch(parts, [False, True, True])
    assert [*first, *others[0], *others[1]] == model.encode(whole)
  bird = llama2.vocabulary.encode("bird")
  assert bird == llama2.vocabulary.encode_batch([" bird"], [True])[0]
  assert bird != llama2.vocabulary.encode_batch(["bird"], [True])[0]


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_mistrals_space_is_not_put_before_a_text_that_continues(
  llama2, scheme, tmp_path
):
  """A pre-tokenizer "Metaspace" puts the space there, no normalizer."""
  content = copy.deepcopy(llama2.content)
  content["normalizer"] = None
  content["pre_tokenizer"] = {
    "type": "Metaspace",
    "replacement": "\u2581",
    "prepend_scheme": scheme,
    "split": False,
  }
  model = Some(content, tmp_path, "</s>").vocabulary
  for text in ("bird", "a red\nbird"):
    assert model.encode(text) == llama2.processor.Encode(text)
    assert model.decode(model.encode(text)) == text
  (inside,) = model.encode_batch(["bird"], [True])
  assert (inside,) == (*llama2.vocabulary.encode_batch(["bird"], [True]),)


def test_bytes_of_a_character_are_held_back_and_named_as_openai_does(gpt2):
  model = gpt2.vocabulary
  ids = model.encode("x\u4e01\u4e01")
  assert len(ids) > 3  # the model has no token for this character
  reader = TextReader(model)
  texts, names, places = [], [], []
  for i in ids:
    names.append(reader.token_text(i))
    places.append(reader.add(i))
    texts.append(reader.text)
  assert set(texts) == {"x", "x\u4e01", "x\u4e01\u4e01"}
  assert sorted(set(places)) == [0, 1, 2]
  shown = "".join(names[1:]).replace("bytes:", "").replace("\\x", "")
  assert bytes.fromhex(shown) == "\u4e01\u4e01".encode()


def test_a_token_may_hold_the_end_of_one_character_and_more(gpt2, tmp_path):
  content = copy.deepcopy(gpt2.content)
  vocab = content["model"]["vocab"]
  # The last byte of U+00E9 and a space: bytes A9 20.
  content["model"]["merges"].append(["\u00a9", "\u0120"])
  vocab["\u00a9\u0120"] = i = len(vocab) + 2
  for added in content["added_tokens"]:
    vocab.setdefault(added["content"], added["id"])
  model = Some(content, tmp_path).vocabulary
  assert model.token_bytes(i) == b"\xa9 "
  assert model.is_byte[i]
  reader = TextReader(model)
  (begin,) = (i for i in range(model.size) if model.token_bytes(i) == b"\xc3")
  assert reader.add(begin) == 0
  assert (reader.text, reader.whole_text) == ("", "\ufffd")
  assert reader.token_text(i) == "bytes:\\xa9\\x20"
  assert reader.add(i) == 0
  assert reader.text == "\u00e9 "


def test_the_end_of_a_document_is_what_the_files_of_the_model_say(
  gpt2, tmp_path
):
  def end(**config):
    path = tokenizer_files.write(tmp_path, gpt2.content, **config)
    return open_vocabulary(path).eod_id

  assert end(eos_token=SYSTEM) == gpt2.library.token_to_id(SYSTEM)
  assert end(eos_token={"content": START}) == 1
  assert end(eos_token=None) == 0  # <|endoftext|>, by its name
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
  assert end() == 1
  (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
  assert end() == 5
  assert end(eos_token=START) == 1
  with pytest.raises(UserError, match="has no token '<none>', the end of"):
    end(eos_token="<none>")
  (tmp_path / "config.json").write_text('{"eos_token_id": 50256}')
  with pytest.raises(UserError, match="has no id 50256, the end of"):
    end()


def test_the_ends_of_a_text_are_those_of_all_files_of_the_model(gpt2, tmp_path):
  """As in transformers, of which generation_config.json is a file."""
  path = tokenizer_files.write(tmp_path, gpt2.content, eos_token=END)
  (tmp_path / "config.json").write_text('{"eos_token_id": [1, 0]}')
  (tmp_path / "generation_config.json").write_text(
    '{"eos_token_id": [5, 50256]}'
  )
  vocabulary = open_vocabulary(path)
  assert vocabulary.eod_id == 0
  assert vocabulary.end_ids == (0, 1, 5)  # no token has id 50256
  assert vocabulary.is_control(1) and not vocabulary.is_control(5)
  os.mkdir(tmp_path / "run")
  vocabulary.write(tmp_path / "run")
  again = open_vocabulary(str(tmp_path / "run" / "tokenizer.json"))
  assert again.end_ids == (0, 1, 5)
  assert pickle.loads(pickle.dumps(again)).end_ids == (0, 1, 5)
  assert again.sha256 == vocabulary.sha256
  for wrong in ('["5"]', "true", "{}", "[[1]]", "1.0"):
    text = f'{{"eos_token_id": {wrong}}}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="neither an id nor a list of ids"):
      open_vocabulary(path)


def test_a_text_that_spells_an_end_is_plain_though_no_special_token(
  gpt2, tmp_path
):
  content = json.loads(json.dumps(gpt2.content))
  for token in content["added_tokens"]:
    token["special"] = False
  path = tokenizer_files.write(tmp_path, content, eos_token=END)
  vocabulary = open_vocabulary(path)
  ids = vocabulary.encode(f"a{END}b")
  assert vocabulary.eod_id not in ids
  assert vocabulary.decode(ids) == f"a{END}b"


def test_without_any_end_of_a_document_an_error_says_where_to_name_it(
  gpt2, tmp_path
):
  text = json.dumps(gpt2.content).replace(END, "<|other|>")
  path = tokenizer_files.write(tmp_path, json.loads(text))
  with pytest.raises(UserError) as info:
    open_vocabulary(path)
  assert str(info.value) == (
    f"VOCABULARY = {path!r}: no token is known as the end of a text; write "
    '{"eos_token": "..."} with its name into a tokenizer_config.json in its '
    "folder."
  )


@pytest.mark.parametrize(
  ("model", "decoder", "message"),
  [
    ({"type": "Unigram"}, None, "its model is Unigram; give a byte-pair"),
    ({"type": "WordPiece"}, None, "its model is WordPiece; give a byte-pair"),
    (None, {"type": "BPEDecoder", "suffix": "</w>"}, r"\(decoders: BPEDecoder"),
    (None, None, "neither of byte level nor with byte fallback"),
    ({"type": "BPE"}, {"type": "ByteLevel"}, "copy the file again"),
  ],
)
def test_a_tokenizer_of_another_kind_is_refused_in_one_line(
  gpt2, tmp_path, model, decoder, message
):
  content = {**gpt2.content, "decoder": decoder}
  content["model"] = model or content["model"]
  with pytest.raises(UserError, match=message) as info:
    open_vocabulary(tokenizer_files.write(tmp_path, content))
  assert "\n" not in str(info.value)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": 3}', " {\xff"])
def test_json_that_is_no_tokenizer_is_refused_in_one_line(tmp_path, text):
  path = tmp_path / "words.json"
  path.write_bytes(text.encode("latin-1"))
  with pytest.raises(UserError, match=r"is JSON, but no tokenizer\.json"):
    open_vocabulary(str(path))


def split_by(pattern):
  kind = {"type": "Split", "behavior": "Isolated", "invert": False}
  return {**kind, "pattern": pattern}


def replace_empty(part):
  return {"type": "Replace", "pattern": {"String": part}, "content": "x"}


# {a change of a file: message}. The library panics at the first four.
ODD = [
  ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, ""),
  ({"normalizer": replace_empty("")}, "index out of bounds"),
  ({"pre_tokenizer": split_by({"Regex": "(a+)+$"})}, "retry-limit-in-match"),
  ({"continuing_subword_prefix": "\u00e9\u00e9"}, ""),
  ({"pre_tokenizer": split_by({"Regex": "("})}, "unmatched parenthesis"),
  ({"normalizer": []}, "its normalizer is [], but no JSON object"),
  ({"normalizer": [[]]}, "its normalizer is [[]], but no JSON object"),
  ({"normalizer": 3}, "its normalizer is 3, but no JSON object"),
  (
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [[]]}},
    "its pre_tokenizer is {'pretokenizers': [[]], 'type': 'Sequence'}, but no",
  ),
  ({"decoder": {"type": "Sequence", "decoders": {}}}, "its decoder is "),
  ({"decoder": ["ByteLevel"]}, "its decoder is ['ByteLevel'], but no JSON"),
]


@pytest.mark.parametrize(("change", "message"), ODD, ids=str)
def test_a_file_at_which_the_library_fails_is_refused_in_one_line(
  gpt2, tmp_path, change, message, capfd
):
  """Rust writes nothing to stderr either."""
  content = copy.deepcopy(gpt2.content)
  part = content["model"] if "continuing_subword_prefix" in change else content
  part |= change
  path = tokenizer_files.write(tmp_path, content, eos_token=END)
  with pytest.raises(UserError) as info:
    open_vocabulary(path)
  line = str(info.value)
  assert line.startswith(f"VOCABULARY = {path!r}: ") and message in line
  assert "\n" not in line and len(line) < 400 + len(path)
  assert capfd.readouterr().err == ""


def test_a_text_at_which_the_library_fails_is_refused_in_one_line(
  gpt2, tmp_path
):
  slow = split_by({"Regex": "(b+)+$"})
  content = {**gpt2.content, "pre_tokenizer": slow}
  path = tokenizer_files.write(tmp_path, content, eos_token=END)
  vocabulary = open_vocabulary(path)
  assert vocabulary.encode("a bb")
  for texts in (["b" * 40 + "!"], ["a", "b" * 40 + "!"]):
    with pytest.raises(UserError, match=r"retry-limit-in-match.*leave out the"):
      vocabulary.encode_batch(texts)


def test_half_a_surrogate_pair_is_refused(gpt2):
  with pytest.raises(UserError, match="holds half a surrogate pair"):
    gpt2.vocabulary.encode("\ud800")


def test_the_hash_depends_on_ids_and_not_on_the_form_of_the_file(
  gpt2, tmp_path
):
  def hash_of(content, end=END):
    path = tokenizer_files.write(tmp_path, content, eos_token=end)
    return open_vocabulary(path).sha256

  same = {**gpt2.content, "post_processor": None, "padding": None}
  assert hash_of(same) == gpt2.vocabulary.sha256
  assert hash_of(same, START) != gpt2.vocabulary.sha256
  other = copy.deepcopy(gpt2.content)
  other["model"]["merges"].pop()
  assert hash_of(other) != gpt2.vocabulary.sha256


def test_a_copy_and_a_worker_process_give_the_same_ids(gpt2, monkeypatch):
  """The library forgets in a pickle how special tokens are encoded."""
  monkeypatch.setattr(encoder_module.WorkerPool, "map", _map_in_processes)
  texts = fuzzed_texts(50)
  model = pickle.loads(pickle.dumps(gpt2.vocabulary))
  assert model.sha256 == gpt2.vocabulary.sha256
  expected = gpt2.vocabulary.encode_batch(texts)
  assert model.encode_batch(texts) == expected
  with Encoder(gpt2.vocabulary, 1) as encoder:
    documents = (("train", Document(text)) for text in texts)
    found = [each.text.tolist() for each in encoder.encode(documents)]
  assert found == expected


def _map_in_processes(pool, batches):
  pool._num_batches = 1000  # enough to start worker processes
  return [pool._submit(batch).result() for batch in batches]


def test_written_files_are_the_same_vocabulary(some, tmp_path):
  some.vocabulary.write(str(tmp_path))
  again = open_vocabulary(str(tmp_path / "tokenizer.json"))
  assert again.sha256 == some.vocabulary.sha256


def test_sentinels_have_the_last_ids_in_reverse_order(some, tmp_path):
  end = some.vocabulary.piece(some.vocabulary.eod_id)
  path = tokenizer_files.write(tmp_path, some.content, eos_token=end)
  model = open_vocabulary(path, extra_ids=10)
  assert model.size == some.vocabulary.size + 10
  ids = model.encode("a <extra_id_0> b <extra_id_9>")
  assert ids[-1] == model.size - 10
  assert model.size - 1 in ids
  # The library puts LLaMA 2's space also before the text after a sentinel.
  space = " " if "processor" in vars(some) else ""
  assert model.decode(ids) == f"a <extra_id_0>{space} b <extra_id_9>"
  assert model.encode("a b") == some.vocabulary.encode("a b")
  with pytest.raises(UserError, match="pieces with EXTRA_IDS = 10"):
    model.check_size(model.size - 1)


def test_losses_name_normalization_and_bytes_without_a_token(some, tmp_path):
  is_normalized = some.content["normalizer"] == {"type": "NFC"}
  # NFC composes a letter and its mark, and replaces U+212B.
  changed = ["the order of combining marks", "compatibility characters"]
  losses = changed if is_normalized else []
  if "processor" in vars(some):
    losses = ["U+2581"]
  assert some.vocabulary.losses() == losses
  if "processor" not in vars(some):
    content = copy.deepcopy(some.content)
    del content["model"]["vocab"]["\u00f1"]
    found = Some(content, tmp_path).vocabulary.losses()
    assert found == [*losses, "unassigned characters"]


@pytest.mark.peers
def test_transformers_gives_the_same_ids(some, tmp_path):
  from transformers import PreTrainedTokenizerFast

  path = tokenizer_files.write(tmp_path, some.content)
  peer = PreTrainedTokenizerFast(tokenizer_file=path, split_special_tokens=True)
  for text in fuzzed_texts(600):
    ids = peer.encode(text, add_special_tokens=False)
    assert some.vocabulary.encode(text) == ids, repr(text)
