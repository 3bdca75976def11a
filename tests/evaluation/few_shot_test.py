# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import functools
import json

import pytest
import seqio

from palm_mtf.config import FewShotConfig
from palm_mtf.errors import UserError
from palm_mtf.evaluation.few_shot import (
  SEPARATOR,
  few_shot_task,
  make_answer_finder,
  make_few_shot,
  read_exemplars,
)
from tests.refusals import message_of
from tests.seqio_testing import add_examples

pytestmark = pytest.mark.usefixtures("registries")

BYTES = seqio.ByteVocabulary()
STEPS = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]


def sums(numbers) -> dict[str, list[str]]:
  return {
    "inputs": [f"Q: {n} + {n}?\nA:" for n in numbers],
    "targets": [f" {2 * n}" for n in numbers],
  }


add = functools.partial(
  add_examples, steps=STEPS, features=("inputs", "targets"), vocabulary=BYTES
)


def add_sums(name="sums", train=range(40)):
  return add(name, {"train": sums(train), "validation": sums(range(100, 110))})


def examples(name, split="validation", lengths=None) -> list[dict]:
  dataset = seqio.get_mixture_or_task(name).get_dataset(
    lengths, split=split, shuffle=False
  )
  return list(dataset.as_numpy_iterator())


def inputs_of(name, **keywords) -> list[str]:
  return [
    each["inputs_pretokenized"].decode() for each in examples(name, **keywords)
  ]


def test_solved_training_examples_stand_before_each_input():
  add_sums()
  name = few_shot_task("sums", 3)
  assert name == few_shot_task("sums", 3) == "sums_3_shot", "registered once"
  solved = {f"Q: {n} + {n}?\nA: {2 * n}" for n in range(40)}
  seen = set()
  for n, example in zip(range(100, 110), examples(name), strict=True):
    text = example["inputs_pretokenized"].decode()
    *shots, query = text.split(SEPARATOR)
    assert query == f"Q: {n} + {n}?\nA:"
    assert len(set(shots)) == 3
    assert set(shots) <= solved
    seen |= set(shots)
    assert BYTES.decode(example["inputs"].tolist()[:-1]) == text, "and its ids"
    assert example["targets_pretokenized"].decode() == f" {2 * n}"
  assert len(seen) > 10, "each example has its own"


def test_exemplars_depend_on_seed_and_texts_not_on_order_or_process():
  add_sums()
  add_sums("reversed", train=range(39, -1, -1))
  found = inputs_of(few_shot_task("sums", 3))
  assert inputs_of(few_shot_task("reversed", 3)) == found
  assert inputs_of(few_shot_task("sums", 3, seed=1)) != found
  # These exemplars were computed once, with only blake2b.
  for text, query, numbers in zip(
    found, (100, 101), ((33, 27, 16), (35, 15, 22)), strict=False
  ):
    assert text == SEPARATOR.join(
      [*solve(*numbers), f"Q: {query} + {query}?\nA:"]
    )


def make_form(name, **settings) -> tuple[str, list[str]]:
  """Returns the name of a few-shot form, and its inputs."""
  form = make_few_shot(seqio.TaskRegistry.get(name), FewShotConfig(**settings))
  seqio.TaskRegistry.add_provider(f"form of {name}", form)
  texts = inputs_of(f"form of {name}")
  seqio.TaskRegistry.remove(f"form of {name}")
  return form.name, texts


def solve(*numbers) -> list[str]:
  return [f"Q: {n} + {n}?\nA: {2 * n}" for n in numbers]


def halves(low="low", high="high"):
  """Returns the groups of add_choices: the first half, and the second."""
  return [low if i < 4 else high for i in range(8) for _ in "ab"]


def is_second():
  return [j == 1 for _ in range(8) for j in range(2)]


def test_the_first_ones_are_of_the_group_and_never_the_example_itself():
  add_choices(exemplar_group=halves())
  _, texts = make_form("choices", num_shots=2, exemplars="first")
  numbers = [[int(x.split()[1]) for x in t.split(SEPARATOR)] for t in texts]
  assert numbers[::2] == numbers[1::2] == [
    [1, 2, 0], [0, 2, 1], [0, 1, 2], [0, 1, 3],
    [5, 6, 4], [4, 6, 5], [4, 5, 6], [4, 5, 7],
  ]  # fmt: skip


def test_a_header_stands_once_before_the_exemplars_of_each_group():
  add_choices(exemplar_group=halves("low_numbers"), unconditional=is_second())
  header = "Even, or not? These are {group}: {}\n"
  name, texts = make_form(
    "choices", num_shots=1, prompt_headers={"choices": header}
  )
  assert name == "choices_1_shot_custom"
  for number, text in enumerate(texts[::2]):
    words = "low numbers" if number < 4 else "high"
    assert text.startswith(
      f"Even, or not? These are {words}: {{}}{SEPARATOR}Is "
    )
    assert text.count("Even, or not?") == 1
    assert text.count(SEPARATOR) == 2
  assert not any("These are" in text for text in texts[1::2]), "unconditional"
  name, texts = make_form("choices", prompt_headers={"choices": "Even?"})
  assert name == "choices_0_shot_custom"
  assert texts[0] == f"Even?{SEPARATOR}Is 0 even?\nA:"


def test_a_file_replaces_the_training_split(tmp_path):
  add("sums", {"validation": sums(range(100, 110))})
  lines = tmp_path / "mine.JSONL"
  lines.write_text(
    '{"inputs": "Q: 2 + 2?\\nA:", "targets": " 4"}\n'
    '{"inputs": "Q: 1 + 1?\\nA:", "targets": " 2"}\n'
  )
  (tmp_path / "mine.txt").write_text("Sums.\n\nQ: 6 + 6?\nA: 12\n###\n\n")
  queries = [f"Q: {n} + {n}?\nA:" for n in range(100, 110)]
  both = SEPARATOR.join([*solve(2, 1), ""])
  for path, settings, expected, before in (
    (lines, {}, "sums_custom", both),
    (lines, {"num_shots": 2, "seed": 1}, "sums_2_shot_custom", both),
    (
      tmp_path / "mine.txt",
      {"num_shots": 8, "prompt_headers": {"sums": "Here:"}},
      "sums_custom",
      "Here:\n\nSums.\n\nQ: 6 + 6?\nA: 12\n###\n\n",
    ),
  ):
    files = {"sums": str(path)}
    name, texts = make_form("sums", exemplar_files=files, **settings)
    assert name == expected
    assert texts == [before + query for query in queries]


def test_no_shots_is_the_task_as_registered_but_for_its_output():
  add_sums()
  assert inputs_of(few_shot_task("sums", 0)) == inputs_of("sums")


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_example_never_sees_itself_where_its_split_lends_exemplars(split):
  add("sums", {split: sums(range(6))})
  for text in inputs_of(few_shot_task("sums", 5), split=split):
    *shots, query = text.split(SEPARATOR)
    assert not [shot for shot in shots if shot.startswith(query)]
    assert len(set(shots)) == 5


def test_as_many_exemplars_as_fit_are_used_and_it_is_said(capsys):
  add_sums()
  name = few_shot_task("sums", 5)
  whole = inputs_of(name)
  capsys.readouterr()
  lengths = {"inputs": 60, "targets": 16}
  short = inputs_of(name, lengths=lengths)
  for text, of_all in zip(short, whole, strict=True):
    *shots, query = text.split(SEPARATOR)
    *all_shots, all_query = of_all.split(SEPARATOR)
    assert query == all_query
    assert shots == all_shots[: len(shots)], "the first ones"
    longer = SEPARATOR.join([*all_shots[: len(shots) + 1], query])
    targets = " 200"
    assert len(text + targets) <= 60 < len(longer + targets), "no more fits"
  message = capsys.readouterr().err
  counts = [text.count(SEPARATOR) for text in short]
  assert (
    f"sums: 10 of 10 questions have fewer than 5 exemplars, at least "
    f"{min(counts)}: no more fit into 60 tokens." in message
  )


def add_choices(**more):
  """Adds a task of questions with two options; the second is much longer."""
  n, options = 8, [" yes", " certainly not at all"]
  rows = [(i, j) for i in range(n) for j in range(2)]
  features = {
    "record": [f"{i}" for i, _ in rows],
    "inputs": [f"Is {i} even?{' ' * 30 * j}\nA:" for i, j in rows],
    "targets": [options[j] for _, j in rows],
    "is_correct": [i % 2 == j for i, j in rows],
    "unconditional": [False for _ in rows],
    **more,
  }
  add("choices", {"train": features, "validation": features})


def test_options_of_a_question_have_the_same_correct_exemplars():
  add_choices()
  for lengths, expected in (
    (None, {3}),
    ({"inputs": 150, "targets": 64}, {1, 2, 3}),
  ):
    counts = set()
    texts = inputs_of(few_shot_task("choices", 3), lengths=lengths)
    for first, second in zip(texts[::2], texts[1::2], strict=True):
      *shots, _ = first.split(SEPARATOR)
      assert shots == second.split(SEPARATOR)[:-1]
      assert shots
      counts.add(len(shots))
      for shot in shots:
        number = int(shot.split()[1])
        assert shot.endswith((" yes", " certainly not at all")[number % 2])
    assert counts <= expected
    assert lengths is None or min(counts) < 3


def test_unconditional_examples_get_none():
  add_choices(unconditional=is_second())
  texts = inputs_of(few_shot_task("choices", 3))
  assert all(SEPARATOR in text for text in texts[::2])
  assert not any(SEPARATOR in text for text in texts[1::2])
  # Unconditional examples, which contain "certainly", are not exemplars either.
  assert not any("certainly" in text for text in texts)


def test_exemplars_are_of_the_group_of_the_example():
  add_choices(exemplar_group=halves())
  for i, text in enumerate(inputs_of(few_shot_task("choices", 2))):
    numbers = {int(shot.split()[1]) for shot in text.split(SEPARATOR)}
    assert numbers < (set(range(4)) if i < 8 else set(range(4, 8)))


def test_the_output_is_cut_at_the_double_line_break_before_the_task_sees_it():
  seen = []

  def postprocess(output, example=None, is_target=False):
    seen.append((output, is_target))
    return output.strip()

  add_sums()
  task = seqio.TaskRegistry.get("sums").replace(
    name="strict", postprocess_fn=postprocess
  )
  seqio.TaskRegistry.add_provider("strict", task)
  task = seqio.get_mixture_or_task(few_shot_task("strict", 1))
  written = " 8\n\nQ: 9 + 9?\nA: 18"
  assert task.postprocess_fn(written, example={}, is_target=False) == "8"
  assert task.postprocess_fn(" a\n\nb", example={}, is_target=True) == "a\n\nb"
  assert seen == [(" 8", False), (" a\n\nb", True)]
  samples = [" 1\n\n2", " 3"]
  task = seqio.get_mixture_or_task(few_shot_task("sums", 1))
  assert task.postprocess_fn(samples, example={}) == [" 1", " 3"]


def test_where_no_white_space_is_a_line_break_parts_inputs_and_targets(
  tmp_path,
):
  features = {"inputs": ["a", "b", "c"], "targets": ["x", "y", "z"]}
  add("bare", {"train": features})
  texts = inputs_of(few_shot_task("bare", 2), split="train")
  assert sorted(texts[0].split(SEPARATOR)) == ["a\n", "b\ny", "c\nz"]
  path = write_lines(tmp_path, one("a", "x"))
  assert read_exemplars(path, None).choose("", "") == ["a\nx"]


def test_a_mixture_has_a_few_shot_form_with_its_rates():
  add_sums()
  add_sums("more")
  seqio.MixtureRegistry.add("both", [("sums", 3), ("more", 1)])
  mixture = seqio.MixtureRegistry.get(few_shot_task("both", 2, seed=5))
  assert mixture.name == "both_2_shot_seed_5"
  assert {t.name: mixture.get_rate(t) for t in mixture.tasks} == {
    "sums_2_shot_seed_5": 3,
    "more_2_shot_seed_5": 1,
  }


def test_what_cannot_work_is_one_line():
  add_sums(train=range(3))
  add("ids", {"train": sums(range(3))}, steps=[lambda dataset: dataset])
  for arguments, message in (
    (("sum", 2), "'sum': no such SeqIO task or mixture is registered (did you"),
    (("sums", -1), "NUM_SHOTS = -1: give a whole number of at least 0."),
    (("ids", 1), "task 'ids' has no few-shot form: its preprocessors make no"),
  ):
    assert message in message_of(few_shot_task, *arguments)
  with pytest.raises(UserError, match="'sums_1_shot' has exemplars already"):
    few_shot_task(few_shot_task("sums", 1), 1)


ANSWER = r"[Tt]he answer is (.*?)\."


@pytest.mark.parametrize(
  ("pattern", "output", "answer"),
  [
    (ANSWER, " 5 + 6 = 11. The answer is 11.", "11"),
    (ANSWER, " So the answer is (b). The answer is (c).", "(b)"),
    (ANSWER, " 11", ""),
    (ANSWER, " The answer is \n11.", ""),
    (f"(?s){ANSWER}", " The answer is \n11.", "\n11"),
    (r"####\s*(-?\d+)|no number", " no number", ""),
    (r"####\s*(-?\d+)|no number", " 3 + 4\n#### 7", "7"),
  ],
)
def test_the_answer_is_the_group_of_the_first_match_or_nothing(
  pattern, output, answer
):
  assert make_answer_finder(pattern)(output) == answer


def write_lines(folder, *lines):
  path = folder / "exemplars.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


def one(inputs, targets, **more):
  return {"inputs": inputs, "targets": targets, **more}


def test_a_text_that_runs_into_the_question_warns(tmp_path, caplog):
  for number, text in enumerate(("Q: 1?\nA: 1.\n\nQ: 2?\nA: 2.\n", "Answer")):
    path = tmp_path / f"{number}.txt"
    path.write_text(text)
    assert read_exemplars(str(path), None).text == text
    assert "the question follows its last character" in caplog.text
    caplog.clear()


def test_a_group_has_its_own_lines_and_those_of_no_group(tmp_path):
  path = write_lines(
    tmp_path,
    one("a", " 1", group="law"),
    one("b", " 2"),
    one("c", " 3", group="art"),
    one("d", " 4", group="law"),
  )
  exemplars = read_exemplars(path, 2)
  assert exemplars.choose("", "law") == ["a 1", "b 2"]
  assert exemplars.choose("", "art") == ["b 2", "c 3"]
  assert message_of(exemplars.choose, "", "chess") == (
    f"EXEMPLAR_FILES: NUM_SHOTS = 2, but {path} has only 1 exemplars of group "
    "'chess'; give a smaller number."
  )
  path = write_lines(tmp_path, one("a", " 1", group="law"))
  with pytest.raises(UserError, match="has no exemplar of group 'art'; write"):
    read_exemplars(path, None).choose("", "art")


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "is empty; write the exemplars."),
    (b"\n \n", "is empty; write the exemplars."),
    (b'{"inputs": "a"}\n', ", line 1 has the fields ['inputs']; give"),
    (
      b'{"inputs": "a", "targets": " b"}\n'
      b'{"inputs": "a", "targets": " b", "subject": "law"}\n',
      ", line 2 has the fields ['inputs', 'subject', 'targets']; give",
    ),
    (
      b'{"inputs": "a", "targets": 3}\n',
      ", line 1: 'targets' is 3, not a text; give {",
    ),
    (
      b'{"inputs": "a", "targets": ""}\n',
      ", line 1: 'targets' is empty; give {",
    ),
  ],
)
def test_a_wrong_file_is_one_line(tmp_path, content, message):
  path = tmp_path / "exemplars.jsonl"
  path.write_bytes(content)
  said = message_of(read_exemplars, str(path), None)
  assert said.startswith(f"EXEMPLAR_FILES = {str(path)!r}")
  assert message in said
