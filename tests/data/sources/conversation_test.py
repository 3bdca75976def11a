# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers are read in the forms of TRL, and fill rows whole.

Expected rows are computed token by token in plain Python.
"""

import json

import numpy as np
import pytest
import sentencepiece

from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.data.sources.conversation import parse_fields, read_fields
from palm_mtf.data.sources.text_files import Fields, TextFiles
from palm_mtf.data.tokens.store import read_store, write_store
from palm_mtf.data.vocabulary.answers import ConversationEncoder
from tests.prefixed_vocabulary import train_prefixed
from tests.refusals import message_of

Q, A, B = (
  {"role": role, "content": x}
  for role, x in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
PLAIN = {"prompt": "q", "chosen": "a", "rejected": "b"}
CHAT = {"prompt": [Q], "chosen": [A], "rejected": [B]}
MORE = [Q, A, Q]
# {form: (fields, messages before the answers)}
FORMS = {
  "texts": (PLAIN, [Q]),
  "messages": (CHAT, [Q]),
  "messages with an implicit prompt": (
    {"chosen": [*MORE, A], "rejected": [*MORE, B]},
    MORE,
  ),
  "messages and texts": (
    {"messages": MORE, "chosen": "a", "rejected": "b"},
    MORE,
  ),
}


@pytest.mark.parametrize(("given", "before"), FORMS.values(), ids=FORMS)
def test_pairs_are_read_in_the_forms_of_trl(given, before):
  """A SeqIO task gives lists as JSON."""
  examples = {
    name: x if isinstance(x, str) else json.dumps(x)
    for name, x in given.items()
  }
  for found in (read_fields(given, "here"), parse_fields(examples, "here")):
    assert found.messages == [*before, A] and found.rejected == B
    assert found.answers == [len(before)]
    assert found.texts == [*(x["content"] for x in before), "a", "b"]
    assert found.form == ("plain pairs" if given is PLAIN else "pairs")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rejected": None}, "here: has no 'rejected'; a pair has"),
    ({"messages": [Q]}, "here: has 'prompt' and 'messages'; leave one out"),
    ({"chosen": ""}, "here: has no 'chosen'; a pair has"),
    ({"prompt": ""}, "here: has no 'prompt', which both texts answer."),
    ({"rejected": "a"}, "here: 'chosen' and 'rejected' are equal; leave"),
    ({"chosen": [A]}, "here: 'chosen' is [{"),
    ({"chosen": 3}, "here: 'chosen' is 3; give prompt and answers as"),
    ({"tools": [1]}, "here: has 'tools', which only a chat template writes"),
    ({"rejected": " "}, "here: rejected: messages[1] is an empty answer"),
    (CHAT | {"rejected": [Q, B]}, "here: 'rejected' repeats the messages of"),
    (CHAT | {"rejected": [B, Q, B]}, "here: 'chosen' and 'rejected' answer"),
    (CHAT | {"prompt": [Q, A]}, "here: the messages before 'chosen' and"),
    (CHAT | {"chosen": [A, Q]}, "here: 'chosen' does not end with an answer"),
    (CHAT | {"prompt": 3}, "here: chosen: 'messages' is 3, not a list"),
  ],
)
def test_wrong_pairs_are_refused_in_one_line(changes, message):
  found = message_of(read_fields, {**PLAIN, **changes}, "here")
  assert found.startswith(message)


@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_an_answer_continues_the_text_of_its_prompt(kind, removes, tmp_path):
  """As SentencePiece encodes both as one text, with one space before it."""
  vocabulary = train_prefixed(
    "a red bird sings. the red birds sing to a bird? ",
    tmp_path,
    model_type=kind,
    remove_extra_whitespaces=removes,
  )
  encoder = ConversationEncoder(vocabulary, 1, is_plain=True)
  peer = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)
  given = {"chosen": " bird sings", "rejected": " birds sing."}
  conversation = read_fields({"prompt": "the red", **given}, "here")
  tokens, spans = encoder.encode(conversation)
  asked = [1, *peer.encode("the red")]
  assert encoder.prompt(conversation, 1) == asked
  begin, parts = 0, []
  for (first, end), answer in zip(spans.tolist(), given.values(), strict=True):
    whole = [1, *peer.encode(f"the red{answer}"), vocabulary.eod_id]
    assert whole[: len(asked)] == asked and first == begin + len(asked)
    parts += whole
    begin += len(whole)
    assert end == begin
  assert [*tokens.tolist(), vocabulary.eod_id] == parts


def test_a_token_across_the_end_of_a_prompt_is_divided(tmp_path):
  """Then `generate` reads the prompt of training, and the text stays whole."""
  vocabulary = train_prefixed("a red bird sings", tmp_path)
  encoder = ConversationEncoder(vocabulary, None, is_plain=True)
  given = {"prompt": "a red ", "chosen": "bird", "rejected": "red"}
  peer = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)
  prompt, whole = map(peer.encode, ("a red ", "a red bird"))
  assert whole[: len(prompt)] != prompt  # " bird" has tokens
  conversation = read_fields(given, "here")
  assert encoder.prompt(conversation, 1) == prompt
  tokens, ((begin, end), _) = encoder.encode(conversation)
  assert tokens[:begin].tolist() == prompt
  assert peer.decode(tokens[: end - 1].tolist()) == "a red bird"
  assert peer.id_to_piece(tokens[begin:end].tolist())[0][0] == "b"


def test_stored_pairs_with_and_without_a_start_token_are_kept_apart(tmp_path):
  vocabulary = train_prefixed("a b c " * 9, tmp_path)
  with_start, without = (
    ConversationEncoder(vocabulary, start, is_plain=True).fingerprint(
      "plain pairs"
    )
    for start in (1, None)
  )
  assert with_start != without


@pytest.mark.parametrize("name", ["tools", "messages"])
def test_deeply_nested_fields_are_refused_in_one_line(name):
  """Not with RecursionError, when the document is hashed."""
  deep = json.loads('[{"a":' * 200 + "1" + "}]" * 200)
  given = {"messages": [Q, A], "tools": []}
  given[name] = [{**Q, "name": deep}, A] if name == "messages" else deep
  message = message_of(read_fields, given, "WHERE")
  assert message == (
    "WHERE: has more than 100 lists and objects inside each other; simplify "
    "it, or leave it out."
  )


def test_all_documents_have_one_form(tmp_path):
  lines = [json.dumps(x) for x in (PLAIN, {"text": "a"})]
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  source = open_files(tmp_path / "a.jsonl")
  message = message_of(lambda: [*source.documents()])
  assert "line 2: has texts, and the first JSON line has plain pairs" in message


def test_the_split_depends_on_the_rejected_answer(tmp_path):
  lines = [json.dumps(PLAIN | {"rejected": f"{i}"}) for i in range(64)]
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  splits = [x for x, _ in open_files(tmp_path / "a.jsonl").documents()]
  assert {*splits} == {"train", "validation"}


def open_files(path):
  return TextFiles(str(path), Fields("text"), validation_share=0.2)


def write_pairs(path):
  """Writes pairs of which each is longer than the one before."""
  pairs = [
    {"prompt": f"q {i}", "chosen": " a" * i, "rejected": f" b{i}"}
    for i in range(1, 40)
  ]
  path.write_text("\n".join(map(json.dumps, pairs)))
  return pairs


@pytest.mark.parametrize("length", [48, 200])
def test_a_row_holds_both_answers_after_the_prompt(
  vocabulary, tmp_path, capsys, length
):
  pairs = write_pairs(tmp_path / "a.jsonl")
  source = open_files(tmp_path / "a.jsonl")
  encoder = ConversationEncoder(vocabulary, 0, is_plain=True)
  folder = str(tmp_path / "store")
  write_store(
    folder, source, vocabulary, conversations=encoder, num_processes=0
  )
  corpus = Corpus(
    sources=[source],
    stores=[read_store(folder)],
    packing="single",
    sequence_length=length,
    eod_id=vocabulary.eod_id,
    seed=0,
  )
  expected, num_long = [], 0
  for pair in pairs:
    prompt, *wholes = (
      vocabulary.encode(pair["prompt"] + pair.get(x, ""))
      for x in ("", "chosen", "rejected")
    )
    answers = [x[len(prompt) :] for x in wholes]
    parts = [[*prompt, *x, vocabulary.eod_id] for x in answers]
    weights = [
      [0] * len(prompt) + [sign] * (len(x) + 1)
      for sign, x in zip((1, -1), answers, strict=True)
    ]
    inputs = [[0, *x[:-1]] for x in parts]
    segments = [[n] * len(x) for n, x in enumerate(parts, 1)]
    row = [x[0] + x[1] for x in (parts, inputs, weights, segments)]
    if len(row[0]) > length:
      num_long += 1
      continue
    expected.append(tuple(tuple(x + [0] * (length - len(x))) for x in row))
  assert (num_long > 0) == (length == 48)
  training, validation = rows = corpus.list_rows()
  assert training.num_rows and validation.num_rows
  found = []
  for each in rows:
    each.reference[:] = np.arange(each.num_rows)
    for i in range(each.num_rows):
      row = each.read(i)
      assert row["reference"] == i
      names = ("targets", "inputs", "loss_weights", "segments")
      found.append(tuple(tuple(row[x].tolist()) for x in names))
  assert sorted(found) == sorted(expected)
  counts = capsys.readouterr().err
  assert ("pairs of text_files (train) are left out" in counts) == bool(
    num_long
  )
  assert training.num_dropped + validation.num_dropped == num_long
