# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import hashlib
import math
import re

import pytest

from palm_mtf.data.sources.text_files import Fields, TextFiles
from palm_mtf.tasks import corpus
from tests.seqio_testing import bind, examples_of, text_of

MAKERS = {
  "corpus_continuation": corpus.continuations,
  "corpus_recall": corpus.recalls,
  "corpus_brackets": corpus.brackets,
}
SHARE = 0.4
each_task = pytest.mark.parametrize("name", MAKERS)


def configure(vocabulary, files, num_questions=20) -> None:
  bind(
    documents__vocabulary__path=vocabulary.path,
    documents__text_files__files=str(files),
    documents__text_files__validation_share=SHARE,
    corpus__questions__num_questions=num_questions,
  )


def asked(name, texts, num_questions=120) -> list[tuple[str, list[str], int]]:
  """Returns inputs, options and the right one of each question."""
  questions = MAKERS[name](texts, corpus.Size(num_questions, 300))
  return [(q.inputs, q.options, q.correct[0]) for q in questions]


def accuracy(questions, likelihood) -> float:
  """Returns how often the most likely option is right, in percent."""
  hits = [
    max(range(len(options)), key=lambda i: likelihood(inputs, options[i]))
    == right
    for inputs, options, right in questions
  ]
  return 100 * sum(hits) / len(hits)


@each_task
def test_a_task_asks_of_held_out_text_alone(name, folder, vocabulary):
  configure(vocabulary, folder / "*.txt")
  files = TextFiles(
    str(folder / "*.txt"), Fields("text"), validation_share=SHARE
  )
  held_out = [d.text for split, d in files.documents() if split == "validation"]
  made = examples_of(name)
  right = [e for e in made if e["is_correct"] and not e["unconditional"]]
  assert 15 <= len(right) <= 20
  for example in right:
    followed = text_of(example, "inputs") + text_of(example, "targets")
    assert any(followed in text for text in held_out)


@each_task
def test_the_right_option_is_what_really_follows(name, code):
  questions = asked(name, code)
  assert 100 < len(questions) <= 120
  assert len({inputs for inputs, _, _ in questions}) > 0.9 * len(questions)
  for inputs, options, right in questions:
    assert any(inputs + options[right] in text for text in code)
    assert len(set(options)) == len(options)


@each_task
def test_the_right_option_stands_anywhere(name, code):
  places = [right for _, _, right in asked(name, code)]
  number = 3 if name == "corpus_brackets" else 4
  for i in range(number):
    assert places.count(i) > len(places) / number / 2


@each_task
def test_questions_depend_on_the_text_and_not_on_its_order(name, code):
  assert asked(name, code[::-1]) == asked(name, code)


def closes(inputs: str, option: str) -> bool:
  opened = []
  for character in inputs:
    if character in "([{":
      opened.append(character)
    elif character in ")]}" and opened:
      opened.pop()
  return bool(opened) and opened[-1] + option in ("()", "[]", "{}")


def test_who_reads_knows_names_and_most_brackets(code):
  recall = accuracy(
    asked("corpus_recall", code),
    lambda text, name: name.strip() in re.findall(r"\w+", text),
  )
  assert recall == 100
  # Some brackets stand in strings.
  assert accuracy(asked("corpus_brackets", code), closes) > 85


@each_task
def test_who_does_not_read_does_what_chance_does(name, code):
  questions = asked(name, code, num_questions=600)
  chance = 1 / (3 if name == "corpus_brackets" else 4)
  error = 100 * math.sqrt(chance * (1 - chance) / len(questions))
  guessers = {
    "any": lambda inputs, option: hashlib.md5(option.encode()).digest(),
    "short": lambda inputs, option: -len(option),
    "long": lambda inputs, option: len(option),
    "first": lambda inputs, option: 0,
  }
  for guesser, likelihood in guessers.items():
    margin = accuracy(questions, likelihood) - 100 * chance
    assert abs(margin) < 5 * error, guesser
  if name == "corpus_brackets":
    always = accuracy(questions, lambda inputs, option: option == ")")
    assert always == pytest.approx(100 / 3)


def test_prose_without_brackets_is_told_so(tmp_path, vocabulary):
  for i in range(40):
    words = " ".join(f"the {i} time is {j} now" for j in range(60))
    (tmp_path / f"{i}.txt").write_text(words.replace(" 7 ", "\n"))
  configure(vocabulary, tmp_path / "*.txt")
  with pytest.raises(Exception, match=r"corpus_brackets: the .* documents are"):
    examples_of("corpus_brackets")


def test_a_size_that_is_none_is_refused(folder, vocabulary):
  configure(vocabulary, folder / "*.txt", num_questions=0)
  with pytest.raises(Exception, match=r"corpus\.questions\.num_questions = 0"):
    examples_of("corpus_recall")
