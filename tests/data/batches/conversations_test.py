# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in stores, rows and batches; only their answers have a loss.

Expected rows are computed token by token in plain Python. These tests encode
conversations by characters; tests/data/vocabulary/answers_test.py has the
encoding by chat templates.
"""

import json
import re
import types

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.batches.conversations import (
  check_prompts,
  open_conversations,
)
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.data.batches.packing import PrefixLM, WholeRows
from palm_mtf.data.sources.conversation import read_conversation
from palm_mtf.data.sources.document import conversation_document
from palm_mtf.data.sources.text_files import Fields, TextFiles
from palm_mtf.data.tokens.shard import Shard, TokenArray
from palm_mtf.data.tokens.store import read_store, write_store
from tests.data.batches.packing_test import number, written_example
from tests.data.small_sources import EOD, repeatable
from tests.refusals import message_of

START = 5


class ByCharacter:
  """Encodes "user: a", "assistant: b" as START 'a' 'b' EOD START ..."""

  def __init__(self, writes_date=False):
    self.writes_date, self.prefix = writes_date, [START]

  def fingerprint(self, form):
    return form

  def prompt(self, conversation, answer):
    tokens, spans = self.encode(conversation)
    return tokens[: spans[conversation.answers.index(answer), 0]].tolist()

  def encode(self, conversation):
    tokens, spans = [], []
    for message in conversation.messages:
      asks = message["role"] != "assistant"
      tokens += self.prefix if asks else []
      begin = len(tokens)
      tokens += map(ord, message["content"])
      if not asks:
        tokens.append(EOD)
        spans.append((begin, len(tokens)))
    return np.int32(tokens), np.int64(spans)


def turns(*texts):
  roles = ["user", "assistant"] * len(texts)
  return [
    {"role": role, "content": x} for role, x in zip(roles, texts, strict=False)
  ]


def read(*texts):
  return read_conversation(turns(*texts), "here")


def write_lines(path, *conversations):
  lines = [json.dumps({"messages": x}) for x in conversations]
  path.write_text("\n".join(lines))
  return str(path)


def open_files(path, **settings):
  fields = Fields("text", **settings)
  return TextFiles(str(path), fields, validation_share=0.2)


@pytest.fixture
def source(tmp_path):
  """Forty conversations of one to four turns."""
  conversations = [
    turns(*(f"{word * n} {i}" for n in range(1, 3) for word in ("q", "a")))[
      : 2 + 2 * (i % 2)
    ]
    for i in range(40)
  ]
  write_lines(tmp_path / "a.jsonl", *conversations)
  return open_files(tmp_path / "a.jsonl")


def store_of(source, vocabulary, path, **settings):
  write_store(
    str(path),
    source,
    vocabulary,
    conversations=ByCharacter(),
    num_processes=0,
    **settings,
  )
  return read_store(str(path))


def test_a_store_has_the_spans_of_every_answer_in_all_shards(
  source, vocabulary, tmp_path
):
  store = store_of(source, vocabulary, tmp_path / "store", shard_bytes=60)
  assert len(list((tmp_path / "store").glob("shard-*.json"))) > 5
  for split in ("train", "validation"):
    found = getattr(store, split)
    expected, learned, spans, num_bytes = [], [], [], 0
    for given, document in source.documents():
      if given == split:
        ids, answers = ByCharacter().encode(document.conversation)
        spans += (len(expected) + answers).tolist()
        mine = np.zeros(len(ids) + 1, bool)
        for begin, end in answers:
          mine[begin:end] = True
        expected += [*ids.tolist(), vocabulary.eod_id]
        learned += mine.tolist()
        texts = [x["content"] for x in document.conversation.messages[1::2]]
        num_bytes += sum(map(len, texts))
    tokens = found.tokens
    ids, is_target = tokens.read(0, len(tokens))
    assert ids.tolist() == expected and is_target.tolist() == learned
    assert tokens.answers().tolist() == spans
    counts = found.counts
    assert counts.num_target_tokens == sum(learned)
    assert counts.num_answers == len(spans)
    assert counts.num_target_bytes == num_bytes
    assert found.bytes_per_token == num_bytes / sum(learned)


def test_a_damaged_file_of_answers_is_written_again(
  source, vocabulary, tmp_path
):
  path = tmp_path / "store"
  before = store_of(source, vocabulary, path).train.tokens.answers().tolist()
  (file,) = path.glob("train-*.answers.npy")
  for content in (b"short", file.read_bytes()[:-8] + b"12345678"):
    file.write_bytes(content)
    after = store_of(source, vocabulary, path).train.tokens.answers().tolist()
    assert after == before


def array_of(*conversations):
  """Returns a TokenArray of (tokens without [eod], spans of answers)."""
  tokens, documents, answers = [], [], []
  for ids, spans in conversations:
    answers += [[a + len(tokens), b + len(tokens)] for a, b in spans]
    first = len(tokens) + spans[0][0]
    tokens += [*ids, EOD]
    documents.append([first, len(tokens)])
  documents, answers = np.array(documents).T, np.array(answers).T
  return TokenArray([Shard(np.array(tokens, "<u2"), documents, True, answers)])


def test_the_conversation_of_the_docstring_is_what_rows_hold():
  ids = [number(x) for x in "0 q a . r b".split()]
  tokens = array_of((ids, [(2, 4), (5, 7)]))
  expected = written_example()["conversation"]
  for i, length in enumerate((4, 6)):
    rows = WholeRows(tokens, length, packed=False, seed=0)
    row = rows.read(0)
    for name, cells in expected.items():
      assert row[name].tolist() == [number(x) for x in cells[i]], name
    assert (rows.num_cut, rows.num_dropped) == (1 - i, 0)


@st.composite
def conversations(draw):
  """Tokens of a conversation, and the spans of its answers."""
  ids, spans = [START], []
  for _ in range(draw(st.integers(1, 3))):
    ids += draw(st.lists(st.integers(10, 99), max_size=3))
    begin = len(ids)
    ids += [*draw(st.lists(st.integers(100, 199), max_size=3)), EOD]
    spans.append((begin, len(ids)))
  if draw(st.booleans()):
    ids.pop()  # then [eod], which ends the document, ends its last answer
  return ids, spans


def expected_examples(ids, spans, length, each):
  """Yields (inputs, targets, weights, prefix) of a conversation's examples."""
  full = [*ids, EOD]
  fit = [(a, b) for a, b in spans if b <= length + 1]
  for last in range(len(fit)) if each else range(len(fit))[-1:]:
    ends_there = each or len(full) > length + 1
    whole = full[: fit[last][1]] if ends_there else full
    mine = fit[last : last + 1] if each else fit
    learned = {i for begin, end in mine for i in range(begin, end)}
    weights = [float(i in learned) for i in range(1, len(whole))]
    prefix = [int(i < fit[last][0]) for i in range(len(whole) - 1)]
    yield whole[:-1], whole[1:], weights, prefix


@hypothesis.given(
  st.lists(conversations(), min_size=1, max_size=6),
  st.integers(2, 14),
  st.booleans(),
  st.booleans(),
)
@repeatable(60)
def test_rows_hold_whole_turns_that_attend_to_themselves_alone(
  given, length, packed, each
):
  rows = WholeRows(
    array_of(*given),
    length,
    packed=packed,
    seed=3,
    first=77,  # never an input: a conversation brings its own first token
    **({"objective": PrefixLM()} if each else {}),
  )
  expected = [
    example
    for ids, spans in given
    for example in expected_examples(ids, spans, length, each)
  ]
  found, places = [], []
  for i in range(rows.num_rows):
    row = rows.read(i)
    segments = row.get("segments", (np.cumsum(row["inputs"] > 0) > 0) * 1)
    end = 0
    for piece, segment in zip(rows.pieces(i), range(1, 99), strict=False):
      document, begin, count = piece
      assert begin == 0
      assert not packed or (segments[end : end + count] == segment).all()
      mine = slice(end, end + count)
      prefix = row["prefix"][mine].tolist() if each else None
      names = ("inputs", "targets", "loss_weights")
      found.append((*(row[x][mine].tolist() for x in names), prefix))
      places.append(document)
      end += count
    assert not row["loss_weights"][end:].any()
  if not each:
    expected = [(*x[:3], None) for x in expected]
  assert sorted(found) == sorted(expected)
  assert all(sum(weights) for _, _, weights, _ in found)
  dropped = sum(spans[0][1] > length + 1 for _, spans in given)
  assert rows.num_dropped == dropped
  assert set(places) <= set(range(len(given)))
  assert len(set(places)) == len(given) - dropped
  cut = [sum(b <= length + 1 for _, b in spans) for _, spans in given]
  assert rows.num_cut == sum(
    0 < n < len(spans) for n, (_, spans) in zip(cut, given, strict=True)
  )


def corpus_of(source, store, length):
  return Corpus(
    sources=[source],
    stores=[store],
    packing="packed",
    sequence_length=length,
    eod_id=1,
    seed=0,
  )


def test_batches_say_how_many_conversations_do_not_fit(
  source, vocabulary, tmp_path, capsys
):
  store = store_of(source, vocabulary, tmp_path / "store")
  rows = corpus_of(source, store, 14)._training_rows
  assert rows.features == ("inputs", "targets", "segments", "loss_weights")
  warning = capsys.readouterr().err
  found = re.search(
    r"(\d+) conversations of text_files \(train\) are longer than "
    r"SEQUENCE_LENGTH = 14: only turns that fit are used; (\d+) are left out, "
    r"because their first answer does not fit",
    warning,
  )
  assert found, warning
  two_turns = [x for s, x in source.documents() if s == "train"]
  several = [x for x in two_turns if len(x.conversation.answers) > 1]
  assert int(found[1]) == len(several) and found[2] == "0"


def test_training_starts_only_if_a_chat_reads_the_stored_prompts(
  source, vocabulary, tmp_path, capsys
):
  store = store_of(source, vocabulary, tmp_path / "store")
  check_prompts(source, store, ByCharacter())
  other = ByCharacter()
  other.prefix = [START, START]  # a double start token
  message = message_of(check_prompts, source, store, other)
  assert re.match(
    rf"TEXT_FILES: {tmp_path}/a.jsonl, line \d+: messages\[1\]: a chat's "
    "prompt has other tokens",
    message,
  )
  assert store.folder in message
  dated = ByCharacter(writes_date=True)
  dated.prefix = other.prefix
  check_prompts(source, store, dated)
  assert "writes the date" in capsys.readouterr().err


def test_repeated_conversations_are_compared_with_their_own_prompts(
  vocabulary, tmp_path
):
  lines = [
    json.dumps({"messages": turns(f"q{i}", "a"), "w": i % 4}) for i in range(30)
  ]
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  source = open_files(tmp_path / "a.jsonl", weight="w")
  check_prompts(
    source, store_of(source, vocabulary, tmp_path / "store"), ByCharacter()
  )


# {fault: (messages, where, why)}
WRONG = {
  "no list": ({"role": "user"}, "", 'is {"role": "user"}, not a list'),
  "no messages": ([], "", "is [], not a list"),
  "a text": ([*turns("q", "a"), "b"], "[2]", 'is "b"; give [{"role"'),
  "a number as content": (
    [{"role": "user", "content": 3}],
    "[0]",
    'is {"role": "user", "content": 3}; give',
  ),
  "an unknown role": (
    [{"role": "bot", "content": "a"}],
    "[0]",
    'has the role "bot"; give one of assistant, developer',
  ),
  "no answer": (turns("q"), "", "the conversation has no answer; add"),
  "an empty answer": (turns("q", " \n"), "[1]", "is an empty answer; give"),
  "an answer first": (turns("", "a")[1:], "[0]", "answer without a question"),
  "only a system prompt": (
    [{"role": "system", "content": "s"}, *turns("q", "a")[1:]],
    "[1]",
    "is an answer without a question",
  ),
}


@pytest.mark.parametrize("messages, place, why", WRONG.values(), ids=WRONG)
def test_wrong_conversations_are_refused_with_file_line_and_message(
  messages, place, why, tmp_path
):
  path = write_lines(tmp_path / "a.jsonl", turns("q", "a"), messages)
  if "list" in why:  # then the line has no text either
    path = write_lines(tmp_path / "a.jsonl", messages)
  source = open_files(path)
  message = message_of(lambda: list(source.documents()))
  number = 1 if "list" in why else 2
  assert message.startswith(f"TEXT_FILES: {path}, line {number}: ")
  assert f"messages{place}" in message or not place
  assert why in message


def test_conversations_beside_texts_are_refused(tmp_path):
  path = tmp_path / "a.jsonl"
  chat = {"messages": turns("q", "a")}
  for name in ("text", "inputs", "targets"):
    path.write_text(json.dumps({**chat, name: "b"}))
    message = message_of(lambda: list(open_files(path).documents()))
    assert message == (
      f"TEXT_FILES: {path}, line 1: has 'messages' and '{name}'; leave out one "
      "of them."
    )
  path.write_text(json.dumps(chat) + '\n{"text": "b"}')
  message = message_of(lambda: list(open_files(path).documents()))
  wrong = f"{path}, line 2: has texts, and the first JSON line has messages"
  assert wrong in message
  path.write_text('{"text": "b"}\n' + json.dumps(chat))
  message = message_of(lambda: list(open_files(path).documents()))
  wrong = f"{path}, line 2: has messages, and the first JSON line has texts"
  assert wrong in message
  # A field of that name that is no list is ignored, like other fields.
  path.write_text('{"text": "b", "messages": 3}')
  ((_, document),) = open_files(path).documents()
  assert document.text == "b" and document.conversation is None


def test_tools_are_of_the_conversation_and_functions_are_refused(tmp_path):
  """A chat's prompt has tools; their older form, functions, it lacks."""
  path, chat = tmp_path / "a.jsonl", {"messages": turns("q", "a")}
  path.write_text(json.dumps({**chat, "functions": [{"name": "f"}]}))
  message = message_of(lambda: list(open_files(path).documents()))
  assert message.startswith(f"TEXT_FILES: {path}, line 1: has 'functions', wh")
  given = [3, [], None]
  lines = [json.dumps({**chat, "tools": x, "functions": []}) for x in given]
  path.write_text("\n".join(lines))
  found = [x for _, x in open_files(path).documents()]
  assert [x.conversation.tools for x in found] == [3, None, None]
  assert found[0].rank != found[1].rank == found[2].rank


def test_calls_of_tools_are_bytes_that_are_learned():
  """Else bits per byte would divide by 0, where all answers are calls."""
  call = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
  asked = [*turns("q"), call]
  document = conversation_document(read_conversation(asked, "here"))
  assert document.num_target_bytes == len('[{"id": "x"}]')


def test_turns_after_the_last_answer_are_left_out():
  conversation = read("q", "a", "never answered")
  assert [x["content"] for x in conversation.messages] == ["q", "a"]
  parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
  asked = [{"role": "user", "content": parts}, *turns("", "a")[1:]]
  document = conversation_document(read_conversation(asked, "here"))
  assert document.text == "x\ny\na" and document.num_target_bytes == 1


def test_equal_texts_of_other_roles_are_other_documents():
  asked = read_conversation(turns("q", "a"), "here")
  told = [{"role": "tool", "content": "q"}, *turns("q", "a")[1:]]
  other = conversation_document(read_conversation(told, "here"))
  one, same = (conversation_document(asked) for _ in range(2))
  elsewhere = conversation_document(asked._replace(where="there"))
  assert one.rank == same.rank == elsewhere.rank != other.rank


@pytest.mark.parametrize("packing", ["joined", "joined_masked"])
def test_packings_that_cut_are_refused(packing, source, vocabulary):
  data = types.SimpleNamespace(packing=packing)
  message = message_of(open_conversations, data, [source], vocabulary)
  assert message == (
    f"PACKING = '{packing}': cuts the conversations of text_files anywhere; "
    "set 'packed' or 'single'."
  )


def test_a_vocabulary_without_template_is_refused(source, vocabulary):
  data = types.SimpleNamespace(packing="packed")
  message = message_of(open_conversations, data, [source], vocabulary)
  assert message.startswith("text_files: has conversations, which a chat ")
  assert "write one to" in message and "/chat_template.jinja" in message
