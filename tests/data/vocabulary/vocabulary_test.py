# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json
import os
import pathlib
import shutil
import string

import hypothesis
import pytest
import sentencepiece
from hypothesis import strategies as st

from palm_mtf.config import DataConfig
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.data.vocabulary import training
from palm_mtf.data.vocabulary.load import load_vocabulary, open_vocabulary
from palm_mtf.errors import UserError
from tests.data.small_sources import repeatable
from tests.prefixed_vocabulary import train_prefixed
from tests.refusals import message_of

# Every code point but surrogates; hard characters are more frequent.
_texts = st.text(
  st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("\u2581\u2585 \t\r\n\0\x1f[]eod<>09ab\u0301\u05d0\u200d"),
  )
)


@hypothesis.given(_texts)
@hypothesis.example("   [eod]<pad><unk><0x41><s></s>   ")
@hypothesis.example("\ufeff\ufffd\ufffe\uffff\U0010ffff\u2047 \ufb01\uff11")
@hypothesis.example("".join(map(chr, [*range(0x20), *range(0x7F, 0xA1)])))
@hypothesis.example(" " * 1000 + "\n" * 1000 + "\t" * 1000)
@repeatable(200)
def test_any_text_is_decoded_to_itself_and_has_no_control_ids(vocabulary, text):
  ids = vocabulary.encode(text)
  assert vocabulary.decode(ids) == text
  assert min(ids, default=3) > 2


@pytest.mark.parametrize(
  ("text", "what"),
  [
    ("\ud800", "half a surrogate pair"),
    ("\ude00\ud83d", "half a surrogate pair"),
    # Python's character for a byte of a command line or stdin that is not
    # UTF-8.
    (b"caf\xe9".decode("utf-8", "surrogateescape"), "byte 0xe9"),
  ],
)
def test_what_is_no_unicode_text_is_refused(vocabulary, text, what):
  with pytest.raises(UserError, match=f"holds {what}, which is not") as info:
    vocabulary.encode(text)
  assert str(info.value).isascii()


def test_whole_source_files_survive_and_are_encoded_alike_one_by_one(
  vocabulary, code
):
  batch = vocabulary.encode_batch(code)
  assert [vocabulary.decode(ids) for ids in batch] == code
  assert batch == [vocabulary.encode(text) for text in code]


@hypothesis.given(_texts)
@repeatable(80)
def test_any_text_survives_a_vocabulary_that_puts_a_space_before_it(
  prefixed, text
):
  ids = prefixed.encode(text)
  assert prefixed.decode(ids) == text
  if "\u2581" not in text:
    assert ids == prefixed.processor.Encode(text)


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory):
  found = train_prefixed("a red bird", tmp_path_factory.mktemp("prefixed"))
  found.processor = sentencepiece.SentencePieceProcessor(model_file=found.path)
  assert found.processor.Encode("bird") == found.processor.Encode("a bird")[1:]
  return found


def test_nothing_is_said_of_a_vocabulary_that_puts_a_space_before_texts(
  prefixed, capsys
):
  assert prefixed.losses() == []
  data = DataConfig(
    text_files="a", vocabulary=prefixed.path, validation_share=0.1
  )
  load_vocabulary("run", data, vocab_size=400)
  assert capsys.readouterr() == ("", "")


def test_a_part_of_a_text_has_the_ids_that_it_has_in_the_text(prefixed):
  whole = prefixed.encode("a red\nbird a\nred")
  first, *others = prefixed.encode_arrays(
    ["a red\n", "bird a\n", "red"], 1, [False, True, True]
  )
  assert [*first, *others[0], *others[1]] == whole


def test_ids_are_control_pieces_then_bytes_then_learnt_pieces(vocabulary):
  processor = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)
  pieces = [processor.IdToPiece(i) for i in range(300)]
  assert pieces[:3] == ["<pad>", "[eod]", "<unk>"]
  assert pieces[3:259] == [f"<0x{byte:02X}>" for byte in range(256)]
  assert not any(map(processor.IsByte, range(259, vocabulary.size)))
  assert vocabulary.eod_id == 1
  assert vocabulary.decode([0, 1]) == ""


def test_words_may_begin_with_the_space_before_them(vocabulary, foreign):
  assert vocabulary.joins_spaces()
  path = foreign(treat_whitespace_as_suffix=True)
  assert not open_vocabulary(path).joins_spaces()


def test_ids_above_the_vocabulary_are_unknown_and_not_an_error(vocabulary):
  text = vocabulary.decode([vocabulary.size, vocabulary.size + 5000])
  assert text == 2 * vocabulary.decode([2])


def text_config(folder, **settings):
  settings = {"vocabulary": None, "validation_share": 0.2} | settings
  return DataConfig(text_files=f"{folder}/*.txt", **settings)


def test_a_run_trains_its_vocabulary_once_and_keeps_it(
  folder, tmp_path, capsys
):
  data = text_config(folder)
  first = load_vocabulary(str(tmp_path / "run"), data, vocab_size=600)
  assert first.path == str(tmp_path / "run" / "vocabulary.model")
  assert "training a vocabulary of 600 pieces" in capsys.readouterr().err
  (folder / "000.txt").write_text("something else")
  again = load_vocabulary(str(tmp_path / "run"), data, vocab_size=700)
  assert (again.sha256, again.size) == (first.sha256, 600)
  assert capsys.readouterr() == ("", "")


def test_a_vocabulary_that_another_command_trained_meanwhile_is_used_by_both(
  folder, tmp_path, monkeypatch, vocabulary
):
  path = tmp_path / "run" / "vocabulary.model"
  real = training.learn_model

  def slowly(*given):
    path.parent.mkdir()
    path.write_bytes(pathlib.Path(vocabulary.path).read_bytes())
    return real(*given)

  monkeypatch.setattr(training, "learn_model", slowly)
  data = text_config(folder)
  found = load_vocabulary(str(path.parent), data, vocab_size=vocabulary.size)
  assert found.sha256 == vocabulary.sha256
  assert [x.name for x in path.parent.iterdir()] == ["vocabulary.model"]


def test_held_out_documents_never_reach_the_vocabulary(folder, tmp_path):
  data = text_config(folder)
  with_them = load_vocabulary(str(tmp_path / "a"), data, vocab_size=600)
  (source,) = open_sources(data)
  texts = [d.text for split, d in source.documents() if split == "train"]
  assert 0 < len(texts) < len(source.files)
  for path in folder.iterdir():
    path.unlink()
  for i, text in enumerate(texts):
    (folder / f"{i}.txt").write_text(text)
  without = load_vocabulary(str(tmp_path / "b"), data, vocab_size=600)
  assert with_them.sha256 == without.sha256


def test_a_vocabulary_larger_than_the_embedding_is_an_error(
  vocabulary, folder, tmp_path
):
  data = text_config(folder, vocabulary=vocabulary.path)
  assert message_of(load_vocabulary, str(tmp_path), data, vocab_size=999) == (
    f"{vocabulary.path} has 1000 pieces, VOCAB_SIZE = 999 rows: set VOCAB_SIZE "
    "to 1000 or more, or use a smaller vocabulary."
  )
  vocabulary.check_size(1000)


NO_MODEL = "neither a SentencePiece model nor"


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("word.model", b"", r'no such file \(did you mean "words.model"'),
    ("", b"", "Is a directory"),
    ("words.model", b"", NO_MODEL),
    ("words.model", bytes(range(256)), NO_MODEL),
    ("words.model", "bad piece", r"is damaged: piece \d+ is not UTF-8"),
  ],
)
def test_what_is_no_model_is_an_error(
  vocabulary, tmp_path, capfd, name, content, message
):
  if content == "bad piece":
    piece = vocabulary.piece(400).encode()
    model = pathlib.Path(vocabulary.path).read_bytes()
    content = model.replace(piece, b"\xff" * len(piece))
  (tmp_path / "words.model").write_bytes(content)
  with pytest.raises(UserError, match=message):
    open_vocabulary(str(tmp_path / name))
  assert capfd.readouterr() == ("", "")


def test_a_foreign_model_keeps_its_own_end_of_document_and_needs_one(foreign):
  assert open_vocabulary(foreign(eos_id=2)).eod_id == 2
  with pytest.raises(UserError, match="has no end-of-sentence piece"):
    open_vocabulary(foreign(eos_id=-1))


LOSSLESS = {
  "model_type": "bpe",
  "normalization_rule_name": "identity",
  "add_dummy_prefix": False,
  "remove_extra_whitespaces": False,
  "split_digits": True,
}


@pytest.mark.parametrize(
  ("settings", "lost"),
  [
    ({}, []),
    ({"remove_extra_whitespaces": True}, ["runs of spaces"]),
    ({"normalization_rule_name": "nfkc"}, ["compatibility characters"]),
    (
      {"normalization_rule_name": "nmt_nfkc"},
      ["tabs", "line ends", "control characters"],
    ),
  ],
  ids=str,
)
def test_what_a_foreign_model_changes_is_named(foreign, settings, lost):
  losses = set(open_vocabulary(foreign(**LOSSLESS | settings)).losses())
  assert losses >= set(lost)
  assert bool(losses) == bool(settings)


# Like T5's vocabulary: no byte pieces, and its order of ids.
OF_T5 = {
  "byte_fallback": False,
  "model_type": "unigram",
  "vocab_size": 200,
  "pad_id": 0,
  "eos_id": 1,
  "unk_id": 2,
  "bos_id": -1,
}


def test_a_model_beside_files_of_transformers_has_their_ends(foreign, tmp_path):
  """Words stay words; no text contains a user-defined piece that ends it."""
  path = tmp_path / "tokenizer.model"
  shutil.copy(foreign(user_defined_symbols=["<|im_end|>"]), path)
  before = open_vocabulary(str(path))
  piece = next(
    i
    for i in range(before.size)
    if len(before.piece(i)) > 2 and before.encode(before.decode([i])) == [i]
  )
  own = next(i for i in range(9) if before.piece(i) == "<|im_end|>")
  assert own in before.encode("a<|im_end|>b")
  ids = [before.eod_id, piece, own, 10**6]
  (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
  model = open_vocabulary(str(path))
  assert (model.eod_id, model.end_ids) == (ids[0], tuple(ids[:3]))
  assert model.is_control(own) and not model.token_bytes(own)
  assert own not in model.encode("a<|im_end|>b")
  text = before.decode([piece])
  assert model.encode(text) == [piece] and model.decode([piece]) == text
  assert model.sha256 == before.sha256
  os.mkdir(tmp_path / "run")
  model.write(str(tmp_path / "run"))
  again = open_vocabulary(str(tmp_path / "run" / "vocabulary.model"))
  assert again.end_ids == model.end_ids and again.sha256 == before.sha256


@pytest.mark.parametrize("extra_ids", [0, 1, 100])
def test_ids_of_a_model_like_t5s_are_those_of_seqio(foreign, extra_ids):
  seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")
  path = foreign(**OF_T5)
  ours = open_vocabulary(path, extra_ids=extra_ids)
  peer = seqio.SentencePieceVocabulary(path, extra_ids)
  assert (ours.eod_id, ours.unknown_id, ours.size) == (1, 2, peer.vocab_size)
  for text in (
    "import json",
    "a \u2581 b {} \u4e2d \n\n \t c",
    "Thank you <extra_id_0> me to <extra_id_1> party",
    "glued<extra_id_0>on",
    "<extra_id_99>",
    "",
  ):
    ids = ours.encode(text)
    assert ids == peer.encode(text)
    assert ours.decode(ids) == peer.decode(ids)
  if extra_ids:
    assert ours.encode("<extra_id_0>") == [ours.size - 1]


def test_a_vocabulary_that_a_run_trains_has_room_for_its_sentinels(
  folder, tmp_path
):
  data = text_config(folder, extra_ids=20)
  made = load_vocabulary(str(tmp_path / "run"), data, vocab_size=420)
  assert made.size == 420
  assert made.encode(" <extra_id_0> <extra_id_19>") == [419, 400]
  text = "if x:\n\treturn  \u2581 <extra_id_3>"
  assert made.decode(made.encode(text)) == text
  assert made.losses() == []


def test_one_warning_names_what_a_model_like_t5s_loses(foreign, capfd):
  path = foreign(**OF_T5)
  data = DataConfig(text_files="a", vocabulary=path, validation_share=0.1)
  load_vocabulary("run", data, vocab_size=300)
  said = capfd.readouterr().err.partition("palm_mtf: warning: ")[2]
  assert said.count("\n") == 1
  assert said.startswith(
    f"{path} has no byte pieces and does not keep every text as it is; it "
    "loses or changes: spaces at both ends, runs of spaces, tabs, line ends, "
  )
  vocabulary = open_vocabulary(path)
  lost = said.rpartition("the characters ")[2].split()
  known = {c for i in range(3, vocabulary.size) for c in vocabulary.piece(i)}
  assert set(lost) == set(string.printable.strip()) - known
  assert vocabulary.unknown_id in vocabulary.encode(lost[0])
