# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts: functions that make questions from a record in TFDS's form."""

# PaLM prints no templates for its 29 English tasks (6.1) and evaluates as Brown
# et al. (2020) and Du et al. (2021, GLaM). These templates have the parts of
# Brown et al. (appendix G) in the same order, in our own words. In all of them:
#   - no text has empty lines (`paragraph`), because empty lines separate
#     exemplars;
#   - options and answers begin with the space before them, because in a
#     vocabulary a piece begins with the space before a word;
#   - a record without a label, from a hidden test set, makes no question.

import re
from collections.abc import Iterator, Sequence

from palm_mtf.tasks.fields import check_fields, reads
from palm_mtf.tasks.questions import Choice, Question

NO_ANSWER = "unanswerable"


@reads(question=str)
def open_question(record: dict) -> Iterator[Question]:
  """Asks TriviaQA, Natural Questions or WebQuestions, without a passage."""
  # WebQuestions has "answers", Natural Questions "answer", each a list.
  name = "answers" if "answers" in record else "answer"
  answers = record.get(name)
  if isinstance(answers, dict):  # TriviaQA
    check_fields(record, {name: {"value": str, "aliases": [str]}})
    first, answers = answers["value"], answers["aliases"]
  else:
    check_fields(record, {name: [str]})
    first = answers[0]
  question = record["question"].strip().rstrip("?")
  yield asked(f"Q: {question}?\nA:", [first, *answers])


@reads(passage=str)
def lambada(record: dict) -> Iterator[Question]:
  """Asks for the last word of a passage, as a gap to fill."""
  start, word = paragraph(record["passage"]).rsplit(None, 1)
  yield asked(f"{start} ____. ->", [word])


@reads(activity_label=str, context=str, endings=[str], label=int)
def hellaswag(record: dict) -> Iterator[Choice]:
  """Asks for the end of a description of an activity."""
  title = record["activity_label"]
  yield from _labelled(
    f"{title}: {paragraph(record['context'])}",
    [f" {end.strip()}" for end in record["endings"]],
    record["label"],
    context=f"{title}:",
  )


@reads(context=str, endings=[str], label=int)
def story_cloze(record: dict) -> Iterator[Choice]:
  """Asks for the end of a story."""
  yield from _labelled(
    paragraph(record["context"]),
    [f" {end.strip()}" for end in record["endings"]],
    record["label"],
  )


@reads(
  text=str,
  pronoun_start=int,
  pronoun_end=int,
  option1_normalized=str,
  option2_normalized=str,
  label=int,
)
def winograd(record: dict) -> Iterator[Choice]:
  """Asks whom a pronoun refers to."""
  # Partial scoring (Trinh and Le 2018): each name replaces the pronoun, and the
  # score is the likelihood of the rest of the sentence.
  text = record["text"]
  start, end = record["pronoun_start"], record["pronoun_end"]
  names = [record["option1_normalized"], record["option2_normalized"]]
  yield from _labelled(
    [f"{text[:start]}{name}" for name in names],
    [f" {text[end:].strip()}"] * 2,
    record["label"],
  )


@reads(sentence=str, option1=str, option2=str, label=object)
def winogrande(record: dict) -> Iterator[Choice]:
  """Asks which name fills a gap, by partial scoring as in `winograd`."""
  start, end = record["sentence"].split("_", 1)
  names = [record["option1"], record["option2"]]
  yield from _labelled(
    [f"{start}{name}" for name in names],
    [f" {end.strip()}"] * 2,
    int(record["label"]),
  )


@reads(passage=str, question=str, answer=str, validated_answers=[str])
def drop(record: dict) -> Iterator[Question]:
  """Asks for numbers, spans and dates in a paragraph."""
  yield asked(
    f"Passage: {paragraph(record['passage'])}\n"
    f"Question: {record['question'].strip()}\nAnswer:",
    [record["answer"], *record["validated_answers"]],
  )


@reads(story=str, questions=[str], answers={"input_text": [str]})
def coqa(record: dict) -> Iterator[Question]:
  """Asks each question of a conversation about a story."""
  # Earlier questions, with right answers, come before a later question.
  text = paragraph(record["story"])
  answers = record["answers"]["input_text"]
  for question, answer in zip(record["questions"], answers, strict=True):
    text = f"{text}\nQ: {question.strip()}\nA:"
    yield asked(text, [answer])
    text = f"{text} {answer.strip()}"


@reads(title=str, context=str, question=str, answers={"text": [str]})
def squad(record: dict) -> Iterator[Question]:
  """Asks a question about a paragraph, which may not answer it."""
  text = paragraph(record["context"])
  yield asked(
    f"Title: {record['title']}\n{text}\nQ: {record['question'].strip()}\nA:",
    record["answers"]["text"] or [NO_ANSWER],
  )


@reads(article=str, questions=[str], answers=[str], options=[[str]])
def race(record: dict) -> Iterator[Choice]:
  """Asks each question of an English exam about an article."""
  article = paragraph(record["article"])
  for question, answer, options in zip(
    record["questions"], record["answers"], record["options"], strict=True
  ):
    yield from _labelled(
      f"{article}\nQuestion: {question.strip()}\nAnswer:",
      [f" {option.strip()}" for option in options],
      "ABCD".index(answer),
    )


@reads(goal=str, sol1=str, sol2=str, label=int)
def piqa(record: dict) -> Iterator[Choice]:
  """Asks how to reach a goal."""
  yield from _labelled(
    f"Goal: {paragraph(record['goal'])}\nAnswer:",
    [f" {paragraph(record[name])}" for name in ("sol1", "sol2")],
    record["label"],
  )


@reads(
  question=str, choices={"text": [str], "label": [object]}, answerKey=object
)
def arc(record: dict) -> Iterator[Choice]:
  """Asks a science question of a school exam."""
  # Options are labelled A to D in most records, 1 to 4 in some.
  choices = record["choices"]
  yield from _labelled(
    f"Question: {paragraph(record['question'])}\nAnswer:",
    [f" {option.strip()}" for option in choices["text"]],
    choices["label"].index(record["answerKey"]),
  )


@reads(
  question={"stem": str, **{f"choice_{x}": str for x in "ABCD"}}, answerKey=int
)
def openbookqa(record: dict) -> Iterator[Choice]:
  """Asks a question of an open book exam, without the book."""
  question = record["question"]
  yield from _labelled(
    f"Question: {paragraph(question['stem'])}\nAnswer:",
    [f" {question[f'choice_{letter}'].strip()}" for letter in "ABCD"],
    record["answerKey"],
  )


@reads(question=str, passage=str, label=int)
def boolq(record: dict) -> Iterator[Choice]:
  """Asks a yes-no question about a passage."""
  question = record["question"].strip().rstrip("?")
  yield from _labelled(
    f"{paragraph(record['passage'])}\nQuestion: {question}?\nAnswer:",
    [" no", " yes"],
    record["label"],
  )


@reads(premise=str, choice1=str, choice2=str, question=str, label=int)
def copa(record: dict) -> Iterator[Choice]:
  """Asks for a cause or an effect, as the end of a sentence."""
  # "The man was wet because it rained": the option begins in lower case.
  word = {"cause": "because", "effect": "so"}[record["question"]]
  options = [record["choice1"].strip(), record["choice2"].strip()]
  yield from _labelled(
    f"{record['premise'].strip().rstrip('.')} {word}",
    [f" {option[:1].lower()}{option[1:]}" for option in options],
    record["label"],
    context=word,
  )


@reads(premise=str, hypothesis=str, label=int)
def rte(record: dict) -> Iterator[Choice]:
  """Asks whether one sentence follows from another."""
  yield from _entailment(record["premise"], record, [" true", " false"])


@reads(premise=str, hypothesis=str, label=int)
def cb(record: dict) -> Iterator[Choice]:
  """Asks if a sentence follows from another, contradicts it, or neither."""
  yield from _entailment(
    record["premise"], record, [" true", " false", " neither"]
  )


@reads(context=str, hypothesis=str, label=int)
def anli(record: dict) -> Iterator[Choice]:
  """Asks ANLI's entailment, whose labels have a different order from CB's."""
  yield from _entailment(
    record["context"], record, [" true", " neither", " false"]
  )


@reads(word=str, sentence1=str, sentence2=str, label=int)
def wic(record: dict) -> Iterator[Choice]:
  """Asks whether a word has the same meaning in two sentences."""
  yield from _labelled(
    f"{record['sentence1'].strip()}\n{record['sentence2'].strip()}\n"
    f"Question: does '{record['word']}' mean the same in both sentences?\n"
    "Answer:",
    [" no", " yes"],
    record["label"],
  )


@reads(paragraph=str, question=str, answer=str, label=int)
def multirc(record: dict) -> Iterator[Choice]:
  """Asks whether an answer to a question about a paragraph is right."""
  # Remove the numbers of sentences, which are in bold.
  text = re.sub(r"<b>Sent \d+: </b>|<br>", " ", record["paragraph"])
  yield from _labelled(
    f"{' '.join(text.split())}\nQuestion: {record['question'].strip()}\n"
    f"Suggested answer: {record['answer'].strip()}\nIs it right?",
    [" no", " yes"],
    record["label"],
  )


@reads(text=str, span1_text=str, span2_text=str, label=int)
def wsc(record: dict) -> Iterator[Choice]:
  """Asks whether a pronoun refers to a name."""
  yield from _labelled(
    f"{paragraph(record['text'])}\nQuestion: does the pronoun "
    f"'{record['span2_text']}' mean {record['span1_text']}?\nAnswer:",
    [" no", " yes"],
    record["label"],
  )


@reads(passage=str, query=str, entities=[str], answers=[str])
def news_cloze(record: dict) -> Iterator[Choice]:
  """Asks which name in a news article completes a sentence about it."""
  # An option is the whole sentence with one of the names. Several may be right.
  names = list(dict.fromkeys(record["entities"]))
  text = paragraph(record["passage"].replace("@highlight", "\n-"))
  correct = [i for i, name in enumerate(names) if name in record["answers"]]
  if correct:
    sentences = [
      record["query"].replace("@placeholder", name).strip() for name in names
    ]
    yield Choice(f"{text}\n-", [f" {each}" for each in sentences], correct)


@reads(question=str, subject=str, choices=[str], answer=int)
def mmlu(record: dict) -> Iterator[Choice]:
  """Asks a question of one of MMLU's 57 subjects."""
  # As in Hendrycks et al. (2021), options stand in the prompt, their letters
  # are scored, and exemplars come from the same subject.
  options = "".join(
    f"\n{letter}. {choice.strip()}"
    for letter, choice in zip("ABCD", record["choices"], strict=True)
  )
  yield from _labelled(
    f"{paragraph(record['question'])}{options}\nAnswer:",
    [f" {letter}" for letter in "ABCD"],
    record["answer"],
    group=record["subject"],
  )


@reads(question=str, answer=str)
def gsm8k(record: dict) -> Iterator[Question]:
  """Asks an arithmetic problem in words; exemplars show chains of thought."""
  # "<<48/2=24>>" is an annotation for calculators; the number after "####" is
  # the answer.
  chain, answer = record["answer"].rsplit("####", 1)
  chain = " ".join(re.sub(r"<<.*?>>", "", chain).split())
  answer = answer.strip().replace(",", "")
  yield Question(
    f"Q: {paragraph(record['question'])}\nA:",
    f" {chain} The answer is {answer}.",
    [answer],
  )


def read_number(output: str) -> str:
  """Returns the number after "The answer is"; if none, the last number."""
  _, _, after = output.partition("The answer is")
  pattern = r"-?\d[\d,]*(?:\.\d+)?"
  numbers = re.findall(pattern, after)[:1] or re.findall(pattern, output)[-1:]
  if not numbers:
    return ""
  number = numbers[0].replace(",", "")
  # Answers are whole numbers: "20.00" is 20.
  return number.rstrip("0").rstrip(".") if "." in number else number


def read_line(output: str) -> str:
  """Returns the first line of the model's output."""
  return output.strip().partition("\n")[0].strip()


def read_word(output: str) -> str:
  """Returns the first word of the model's output, without punctuation."""
  words = output.split()
  return words[0].strip(".,;:!?\"'") if words else ""


def paragraph(text: str) -> str:
  """Returns the text without empty lines."""
  return re.sub(r"\n\s*\n", "\n", text.strip())


def asked(inputs: str, answers: Sequence[str]) -> Question:
  """Returns a question whose exemplar shows the first answer."""
  answers = list(dict.fromkeys(answer.strip() for answer in answers))
  return Question(inputs, f" {answers[0]}", answers)


def _labelled(
  inputs: str | Sequence[str],
  options: Sequence[str],
  label: int,
  **keywords: str,
) -> Iterator[Choice]:
  if label >= 0:
    yield Choice(inputs, options, [int(label)], **keywords)


def _entailment(
  premise: str, record: dict, options: Sequence[str]
) -> Iterator[Choice]:
  *words, last = [option.strip() for option in options]
  yield from _labelled(
    f"{paragraph(premise)}\nQuestion: {record['hypothesis'].strip()} "
    f"{', '.join(words).capitalize()} or {last}?\nAnswer:",
    options,
    record["label"],
  )
