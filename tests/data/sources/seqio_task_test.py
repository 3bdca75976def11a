# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import functools
import json
import os

import numpy as np
import pytest

from palm_mtf.data.sources.seqio_task import describe_code
from tests import processes


def add(value, *, more=1):
  return value + more


def adder(more):
  def add_more(value):
    return value + more

  return add_more


class Adder:
  def __init__(self, more):
    self.more = more

  def __call__(self, value):
    return value + self.more


def wrap(function):
  @functools.wraps(function)
  def wrapped(*args):
    return function(*args)

  return wrapped


def test_what_is_bound_closed_over_or_kept_makes_the_difference():
  def describe():
    values = [
      *(add, functools.partial(add, more=2), functools.partial(add, more=3)),
      *(adder(1), adder(2), adder(adder(2)), Adder(1), Adder(2), [adder(1)]),
      *(wrap(add), wrap(os.path.join)),
      *({"a": 1}, {"a": "1"}, {1, 2}, (1, 2), None),
    ]
    return [describe_code(value) for value in values]

  assert describe() == describe()  # of other objects with the same code
  assert len(set(describe())) == len(describe())
  assert "value + more" in describe_code(wrap(add))


def test_another_body_and_another_default_make_a_difference(tmp_path):
  descriptions = set()
  for number, code in enumerate(
    ["y=1): return x", "y=2): return x", "y=1): 3"]
  ):
    path = tmp_path / f"{number}.py"
    path.write_text(f"def f(x, {code}")
    for file in (str(path), "<stdin>"):  # in a shell there is no file
      names = {"__name__": "module"}
      exec(compile(path.read_text(), file, "exec"), names)
      descriptions.add(describe_code(names["f"]))
  assert len(descriptions) == 6


def test_what_refers_to_itself_ends():
  def recursive(n):
    return recursive(n - 1) if n else 0

  assert "recursive(n - 1)" in describe_code(recursive)


def test_a_description_is_the_same_in_every_process():
  program = (
    "import functools, re\n"
    "from palm_mtf.data.sources.seqio_task import describe_code\n"
    "class Thing: pass\n"
    "def f(x=Thing()): return lambda: x\n"
    "g = functools.partial(f, {'a', 'b'}, y=Thing())\n"
    "print(describe_code([f, f(), g]))"
  )
  outputs = {
    processes.python("-c", program, variables={"PYTHONHASHSEED": seed}).stdout
    for seed in "12"
  }
  assert len(outputs) == 1
  assert " at 0x" not in outputs.pop()


seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")
tf = pytest.importorskip("tensorflow")

from palm_mtf.data.sources.seqio_task import (  # noqa: E402
  open_task,
  split_at_tokenize,
)
from palm_mtf.errors import UserError  # noqa: E402
from tests.log_lines import without_stamps  # noqa: E402
from tests.seqio_testing import (  # noqa: E402
  REKEY,
  TEXTS,
  add_examples,
  add_lines,
  open_one,
  texts_of,
)

pytestmark = pytest.mark.usefixtures("registries")


def error(name) -> str:
  with pytest.raises(UserError) as info:
    for source in open_task(name, 0.1):
      list(source.documents())
  assert "\n" not in str(info.value)
  return str(info.value)


def test_a_task_of_t5_gives_its_text_without_its_vocabulary(lines):
  add_lines("t5_like", lines)
  source = open_one("t5_like")
  assert (source.name, source.rate) == ("t5_like", 1.0)
  assert not source.has_inputs
  both = dict.fromkeys(("train", "validation"))
  for split in both:
    both[split] = texts_of(source, split)
    assert both[split] == [t for t in TEXTS if t in both[split]], "in order"
  assert sorted(both["train"] + both["validation"]) == sorted(TEXTS)
  assert 10 < len(both["validation"]) < 60
  source.check_vocabulary(None)


@pytest.mark.parametrize(
  ("inputs", "has_inputs"), [(["a", "b", ""], True), (["", "", ""], False)]
)
def test_examples_have_inputs_unless_all_are_empty(inputs, has_inputs):
  targets = ["1", "2", "3"]
  add_examples(
    "examples",
    {"train": {"inputs": inputs, "targets": targets}},
    [seqio.preprocessors.tokenize],
    features=("inputs", "targets"),
  )
  source = open_one("examples")
  assert source.has_inputs == has_inputs
  found = [(d.inputs, d.text) for _, d in source.documents()]
  given = inputs if has_inputs else [None] * 3
  assert found == [*zip(given, targets, strict=True)]


def test_own_splits_are_used_where_both_exist():
  splits = {
    split: {"text": [f"{split} {i}" for i in range(50)]}
    for split in ("train", "validation", "test")
  }
  add_examples("own", splits)
  source = open_one("own", share=0.5)
  for split in ("train", "validation"):
    assert texts_of(source, split) == splits[split]["text"]


def test_a_mixture_is_its_tasks_with_their_shares_of_the_rate(lines):
  for name in ("one", "two", "three", "none"):
    add_lines(name, lines)
  seqio.MixtureRegistry.add("inner", [("one", 1), ("two", lambda task: 3)])
  rates = [("inner", 3.0), ("three", 1.0), ("none", 0)]
  seqio.MixtureRegistry.add("outer", rates)
  for name, rates in (
    ("inner", {"one": 0.25, "two": 0.75}),
    ("outer", {"one": 3 / 16, "two": 9 / 16, "three": 1 / 4}),
  ):
    assert {s.name: s.rate for s in open_task(name, 0.1)} == rates


def test_an_unknown_task_is_named_with_the_nearest_and_the_way_to_register(
  lines,
):
  add_lines("my_lines", lines)
  assert error("my_line") == (
    "TASK = 'my_line': no such SeqIO task or mixture is registered (did you "
    'mean "my_lines"?); a line `import my_module` in a gin file registers the '
    "tasks of your module."
  )


def test_texts_that_are_none_are_left_out_and_counted(capsys):
  texts = [b"caf\xe9", b"good", b"nul\0", b""]
  add_examples("bad", {"train": {"text": texts}})
  source = open_one("bad")
  assert texts_of(source) + texts_of(source, "validation") == ["good"]
  source.report_skipped()
  assert without_stamps(capsys.readouterr().err) == (
    "palm_mtf: warning: 2 documents of task bad left out (not UTF-8, or with "
    "a NUL or half a surrogate pair).\n"
  )


TEXT = {"train": {"text": ["/no/such/file"]}}


def forgets_to_return(dataset):
  dataset.map(lambda example: example)


def uses_no_feature(dataset):
  return dataset.map(lambda example: example["no"])


FORGETS, USES = forgets_to_return.__name__, uses_no_feature.__name__


def calls_python(dataset):
  def look_up(text):
    raise ValueError("no such word")

  def to_word(example):
    word = tf.numpy_function(look_up, [example["text"]], tf.string)
    return {"targets": tf.reshape(word, [])}

  return dataset.map(to_word)


MIXED = {"inputs": [""] * 40 + ["a"], "targets": ["t"] * 41}
HERE = "(tests/data/sources/"


def mapped(make):
  """Returns a preprocessor that maps examples to {"targets": make(text)}."""
  return lambda dataset: dataset.map(lambda e: {"targets": make(e["text"])})


@pytest.mark.parametrize(
  ("examples", "steps", "message"),
  [
    (TEXT, [], " makes no feature 'targets', only 'text'; let a preprocessor"),
    (TEXT, [mapped(lambda x: [x])], " makes {'targets': 'string of rank 1'}; "),
    (TEXT, [lambda ds: ds.no()], ": preprocessor <lambda>: AttributeError: "),
    (TEXT, [uses_no_feature], f": preprocessor {USES}: KeyError: 'no' {HERE}"),
    (TEXT, [forgets_to_return], f": preprocessor {FORGETS} returns None; retu"),
    (TEXT, [calls_python], f", split 'train': ValueError: no such word {HERE}"),
    (TEXT, [mapped(tf.io.read_file)], ", split 'train': NotFoundError: "),
    (
      {split: {"targets": ["a"]} for split in ("test", "dev")},
      [],
      " has no split 'train', only 'test', 'dev'; give a task with one.",
    ),
    ({"train": {"targets": [""]}}, [], " has no document."),
    ({"train": MIXED}, [], ": example 40 of 'train' has inputs, but the first"),
  ],
)
def test_a_task_that_does_not_work_is_named(examples, steps, message):
  add_examples("bad", examples, steps)
  assert error("bad").startswith(f"TASK: bad{message}")


def test_rates_that_are_no_shares_are_an_error(lines):
  add_lines("one", lines)
  for rate in (float("nan"), float("inf"), -1.0, 0.0):
    seqio.MixtureRegistry.add("odd", [("one", rate)])
    assert error("odd") == (
      f"TASK = 'odd': its rates are [{rate}]; give finite rates of at least 0 "
      "that are not all 0."
    )
    seqio.MixtureRegistry.remove("odd")
  seqio.MixtureRegistry.add("fails", [("one", lambda task: 1 / 0)])
  assert error("fails").startswith(
    "TASK = 'fails': its rates: ZeroDivisionError: "
  )


def test_missing_files_are_named(tmp_path):
  add_lines("gone", tmp_path / "gone*.txt")
  assert f"{tmp_path}/gone*.txt" in error("gone")


def test_documents_that_change_with_every_reading_are_refused(lines):
  def random(dataset):
    return dataset.map(
      lambda _: {"targets": tf.strings.as_string(tf.random.uniform(()))}
    )

  add_lines("random", lines, [random])
  assert "gives other documents each time it is read" in error("random")


def test_random_steps_with_the_seeds_of_seqio_repeat(lines):
  @seqio.map_over_dataset(num_seeds=1)
  def random(example, seed):
    noise = tf.random.stateless_uniform((), seed)
    return {"targets": example["text"] + tf.strings.as_string(noise)}

  add_lines("seeded", lines, [random])
  assert texts_of(open_one("seeded")) == texts_of(open_one("seeded"))


# Fingerprints.


def test_fingerprint_depends_on_the_files_and_not_on_their_place(
  lines, tmp_path
):
  add_lines("first", lines)
  first = open_one("first").fingerprint()
  assert open_one("first").fingerprint() == first
  moved = tmp_path / "moved.txt"
  moved.write_bytes(lines.read_bytes())
  seqio.TaskRegistry.remove("first")
  add_lines("first", moved)
  assert open_one("first").fingerprint() == first
  # Beyond the documents that are read ahead.
  moved.write_text(moved.read_text().replace("line 299", "Line 299"))
  assert open_one("first").fingerprint() != first


def test_fingerprint_follows_code_arguments_share_and_first_documents(lines):
  outside = ["!"]

  def end(dataset, mark):
    return dataset.map(lambda e: {"targets": e["targets"] + mark + outside[0]})

  def fingerprint(*steps, share=0.1) -> str:
    seqio.TaskRegistry.remove("task")
    add_lines("task", lines, [REKEY, *steps])
    return open_one("task", share).fingerprint()

  seen = [
    fingerprint(),
    fingerprint(share=0.2),
    fingerprint(functools.partial(end, mark=".")),
    fingerprint(functools.partial(end, mark="")),
  ]
  outside[0] = "?"
  seen.append(fingerprint(functools.partial(end, mark="")))
  assert len(set(seen)) == 5


_TURNS = [
  {"role": "user", "content": "q"},
  {"role": "assistant", "content": ""},
]


def _chat(answer):
  return json.dumps([_TURNS[0], {**_TURNS[1], "content": answer}])


def test_a_task_of_messages_gives_conversations():
  texts = [_chat(f"a{i}") for i in range(40)]
  columns = {"messages": texts, "tools": ['[{"type": "x"}]'] * 20 + [""] * 20}
  add_examples("chats", {"train": columns}, [], features=())
  source = open_one("chats")
  assert source.form == "messages" and source.has_inputs
  source.check_vocabulary(None)
  found = [document for _, document in source.documents()]
  assert [d.text for d in found] == [f"q\na{i}" for i in range(40)]
  assert [json.dumps(d.conversation.messages) for d in found] == texts
  tools = [d.conversation.tools for d in found]
  assert tools == [[{"type": "x"}]] * 20 + [None] * 20
  where = "TASK: chats, split 'train', example 39"
  assert found[-1].conversation.where == where


def test_a_task_of_pairs_gives_texts_or_lists_of_messages():
  plain = {"prompt": "q", "chosen": "[1]", "rejected": "b"}
  lists = {
    "prompt": json.dumps(_TURNS[:1]),
    "chosen": "[1]",
    "rejected": json.dumps([{**_TURNS[1], "content": "b"}]),
  }
  for form, given in (("plain pairs", plain), ("pairs", lists)):
    columns = {name: [x] for name, x in given.items()}
    add_examples(form.replace(" ", "_"), {"train": columns}, [], features=())
    source = open_one(form.replace(" ", "_"))
    assert source.form == form and source.has_inputs
    ((_, document),) = source.documents()
    assert document.conversation.texts == ["q", "[1]", "b"]
    assert document.form == form
  both = {name: [x, lists[name]] for name, x in plain.items()}
  add_examples("both", {"train": both}, [], features=())
  assert error("both") == (
    "TASK: both: example 1 of 'train' has pairs, but the first has plain "
    "pairs; give all examples one form."
  )
  equal = {name: [x] for name, x in (plain | {"rejected": "[1]"}).items()}
  add_examples("equal", {"train": equal}, [], features=())
  assert error("equal") == (
    "TASK: equal, split 'train', example 0: 'chosen' and 'rejected' are equal; "
    "leave the pair out."
  )


def test_messages_that_are_no_unicode_text_are_left_out(caplog):
  """JSON can escape them, as in TEXT_FILES."""
  texts = [_chat("a"), _chat("b\ud800"), _chat("c\0")]
  add_examples("halves", {"train": {"messages": texts}}, [], features=())
  source = open_one("halves")
  assert [x.text for _, x in source.documents()] == ["q\na"]
  source.report_skipped()
  assert caplog.messages[-1].startswith("2 documents of task halves left out")


def test_wrong_messages_of_a_task_are_refused_with_the_example():
  columns = {"messages": [_chat("a"), _chat("")]}
  add_examples("empty", {"train": columns}, [], features=())
  assert error("empty") == (
    "TASK: empty, split 'train', example 1: messages[1] is an empty answer; "
    "give it a content, or leave out the conversation."
  )
  columns["messages"][1] = "no JSON"
  add_examples("no_json", {"train": columns}, [], features=())
  assert "example 1: 'messages' is \"no JSON\", not a list" in error("no_json")
  columns = {"messages": [_chat("a")], "targets": ["a"]}
  add_examples("both", {"train": columns}, [], features=("targets",))
  assert error("both").startswith(
    "TASK: both makes 'messages', 'targets'; let 'messages' be the JSON of a "
    "list of messages, without inputs and targets"
  )


kinds = seqio.preprocessors
PARTIAL = functools.partial(
  functools.partial(kinds.tokenize, with_eos=True), copy_pretokenized=False
)


@functools.wraps(kinds.tokenize)
def wrapped(*args, **kwargs):
  return kinds.tokenize(*args, **kwargs)


@pytest.mark.parametrize(
  "steps",
  [
    [REKEY],
    [REKEY, kinds.tokenize],
    [REKEY, kinds.tokenize_and_append_eos],
    [REKEY, PARTIAL, kinds.append_eos],
    [REKEY, wrapped],
    [seqio.CacheDatasetPlaceholder(required=True), REKEY, kinds.tokenize],
  ],
  ids=["none", "bare", "and_eos", "partial", "wrapped", "cached"],
)
def test_tokenize_is_found_in_whatever_it_is_wrapped(lines, steps):
  kept, _ = split_at_tokenize(add_lines("wrapped", lines, steps))
  assert kept[1:] == [REKEY]


@pytest.fixture
def t5_vocabulary(vocabulary):
  return seqio.SentencePieceVocabulary(vocabulary.path)


def split_tokens(dataset, sequence_length):
  """Like T5's, cuts pieces of the targets' length, so there is no text."""
  return (
    dataset.map(lambda example: {"targets": example["targets"]})
    .unbatch()
    .batch(sequence_length["targets"])
  )


def test_ids_of_later_steps_are_taken_as_they_are(
  lines, t5_vocabulary, vocabulary
):
  steps = [
    REKEY,
    seqio.preprocessors.tokenize,
    split_tokens,
    seqio.preprocessors.append_eos,
  ]
  lines.write_text("\n".join(TEXTS[:40]))
  add_lines("ids", lines, steps, vocabulary=t5_vocabulary)
  source = open_one("ids", sequence_length=16)
  documents = [d for _, d in source.documents()]
  assert all(d.text.dtype == np.int32 for d in documents)
  assert all(d.text.shape == (16,) for d in documents[:-1])
  ids = [i for text in TEXTS[:40] for i in t5_vocabulary.encode(text)]
  read = sorted(d.text.tolist() for d in documents)
  assert read == sorted(ids[i : i + 16] for i in range(0, len(ids), 16))
  source.check_vocabulary(vocabulary.sha256)
  for other in (None, "another"):
    with pytest.raises(UserError) as info:
      source.check_vocabulary(other)
    assert str(info.value) == (
      "TASK: the preprocessors of ids make token ids, so the run's vocabulary "
      f"must be the task's, which is {vocabulary.path}; set VOCABULARY = "
      f"{vocabulary.path!r}, or give a task that makes text."
    )


def test_ids_of_inputs_and_targets_share_the_row(lines, t5_vocabulary):
  lengths = []

  def note(dataset, sequence_length):
    lengths.append(sequence_length)
    return dataset.map(lambda e: {**e, "inputs": e["targets"][:1]})

  add_lines(
    "pairs",
    lines,
    [REKEY, seqio.preprocessors.tokenize, note],
    features=("inputs", "targets"),
    vocabulary=t5_vocabulary,
  )
  source = open_one("pairs", sequence_length=100)
  assert source.has_inputs
  assert lengths[0] == {"inputs": 50, "targets": 50}
  _, document = next(source.documents())
  assert document.inputs.shape == (1,)


def test_ids_of_a_vocabulary_without_a_file_cannot_be_checked():
  ids = [[3, 4, 1], [5, 6, 7]]
  vocabulary = seqio.PassThroughVocabulary(10, eos_id=1)
  add_examples("made", {"train": {"targets": ids}}, [], vocabulary=vocabulary)
  source = open_one("made")
  documents = [d.text.tolist() for _, d in source.documents()]
  assert sorted(documents) == [[3, 4], [5, 6, 7]]
  with pytest.raises(UserError, match="which is a PassThroughVocabulary"):
    source.check_vocabulary("any")
