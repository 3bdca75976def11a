# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the dialogues of the package chatterbot-corpus as JSON lines.

Usage: python make_dialogues.py FOLDER

  FOLDER/train.jsonl     conversations: {"messages": [...]}
  FOLDER/held_out.jsonl  a tenth of the questions, without long ones:
                         {"inputs": the text that the chat template makes of a
                         question, "targets": the answer}; no question here is
                         in train.jsonl
  FOLDER/pairs.jsonl     questions of train.jsonl, their answers, and answers of
                         other questions: {"prompt", "chosen", "rejected"}
"""

import hashlib
import json
import pathlib
import random
import sys
from importlib import metadata

import yaml

_MOST = 200  # characters of a held-out question and its answer, to fit a row


def read_dialogues() -> list[list[str]]:
  """Returns the English dialogues of the package, each a list of texts."""
  found = []
  for file in metadata.files("chatterbot-corpus") or ():
    if file.match("data/english/*.yml"):
      content = yaml.safe_load(file.locate().read_text(encoding="utf-8"))
      for turns in content["conversations"]:
        found.append([str(turn).strip() for turn in turns])
  return found


def is_held_out(question: str) -> bool:
  """Whether a question is in the held-out part, by a hash of its words."""
  words = "".join(x for x in question.lower() if x.isalnum() or x == " ")
  digest = hashlib.sha256(" ".join(words.split()).encode()).digest()
  return digest[0] < 256 // 10


def draw(answers: list[str], count: int, seed: int) -> list[str]:
  """Returns answers in a random order that depends only on `seed`."""
  return random.Random(seed).sample(answers, count)


def main(folder: pathlib.Path) -> None:
  """Writes the files into `folder`."""
  train, held_out = [], []
  for turns in read_dialogues():
    # Users and the assistant take turns; a last question has no answer.
    turns = turns[: len(turns) // 2 * 2]
    if not all(turns) or not turns:
      continue
    questions = turns[::2]
    if not any(map(is_held_out, questions)):
      roles = ("user", "assistant") * len(questions)
      messages = [
        {"role": role, "content": text}
        for role, text in zip(roles, turns, strict=True)
      ]
      train.append({"messages": messages})
    elif is_held_out(questions[0]) and len("".join(turns[:2])) < _MOST:
      inputs = f"Q: {questions[0]}\nA:"
      held_out.append({"inputs": inputs, "targets": f" {turns[1]}"})
  asked = [
    (f"Q: {x['content']}\nA:", f" {y['content']}")
    for chat in (each["messages"] for each in train)
    for x, y in zip(chat[::2], chat[1::2], strict=True)
    if len(x["content"] + y["content"]) < _MOST
  ]
  answers = [answer for _, answer in asked]
  pairs = [
    {"prompt": question, "chosen": answer, "rejected": other}
    for number, (question, answer) in enumerate(asked)
    for other in draw(answers, 3, number)
    if other not in {y for x, y in asked if x == question}
  ]
  folder.mkdir(parents=True, exist_ok=True)
  files = {"train": train, "held_out": held_out, "pairs": pairs}
  for name, lines in files.items():
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{len(lines):,} lines in {folder / name}.jsonl")


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
