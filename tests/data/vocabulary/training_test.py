# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import ast
import contextlib
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import sentencepiece

from palm_mtf.data.sources.document import cut_text
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import (
  RefusedError,
  limit_words,
  list_pieces,
  sample_text,
  train_sentencepiece,
  train_vocabulary,
)
from palm_mtf.errors import UserError
from tests import processes


def train(documents, vocab_size, path) -> bytes:
  train_vocabulary(documents, vocab_size, path=str(path))
  return path.read_bytes()


def test_the_same_documents_give_the_same_model_in_any_order_on_any_cores(
  code, tmp_path
):
  first = train(code, 700, tmp_path / "a")
  assert train(code[:-1], 700, tmp_path / "b") != first
  cores = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {min(cores)})
  try:
    assert train(code[::-1], 700, tmp_path / "c") == first
  finally:
    os.sched_setaffinity(0, cores)


LITTLE = "no training document"


@pytest.mark.parametrize(
  ("documents", "size", "message"),
  [
    (
      ["abcdef " * 9],
      270,
      "VOCAB_SIZE = 270: too low, because the control, byte and digit pieces "
      "and the text's frequent characters are 276; set VOCAB_SIZE = 276 or "
      "more.",
    ),
    (["abc"], 269, "give a whole number of at least 270"),
    ([], 300, LITTLE),
    ([""], 300, LITTLE),
    (["\u2581\u2585"], 300, LITTLE),
  ],
)
def test_too_little_text_is_an_error(tmp_path, documents, size, message):
  with pytest.raises(UserError, match=re.escape(message)):
    train(documents, size, tmp_path / "a")


def test_digits_of_every_script_and_ours_without_being_in_the_text_are_alone(
  tmp_path,
):
  scripts = ["0123456789", "\uff10\uff11\uff12", "\u0660\u0661\u0662"]
  scripts += ["\u0966\u0967\u0968", "\U0001d7ce\U0001d7cf\U0001d7d0"]
  words = [f"{digits} words {digits}{digits}\n" for digits in scripts[1:]] * 50
  train(words, 297, tmp_path / "a")
  vocabulary = open_vocabulary(str(tmp_path / "a"))
  for text in scripts:
    ids = vocabulary.encode(text)
    assert [vocabulary.piece(i) for i in ids] == list(text)
    assert len(vocabulary.encode(f"words {text * 3}")) == len(
      vocabulary.encode("words ")
    ) + 3 * len(text)


SETTINGS = {"model_type": "bpe", "vocab_size": 1000, "byte_fallback": True}


def test_the_list_of_pieces_is_sentencepieces_own_with_line_breaks_escaped(
  code, tmp_path
):
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(code),
    model_prefix=str(tmp_path / "theirs"),
    normalization_rule_name="identity",
    allow_whitespace_only_pieces=True,
    max_sentence_length=1 << 20,
    minloglevel=2,
    **SETTINGS,
  )
  ours = list_pieces((tmp_path / "theirs.model").read_bytes())
  assert ours.count("\n") == ours.count("\t") == 1000
  assert "\\n" in ours
  unescaped = re.sub(
    r"\\(\\|n|t|r|x[0-9a-f]{2})",
    lambda match: ast.literal_eval(f"'\\{match[1]}'"),
    ours,
  )
  assert unescaped == (tmp_path / "theirs.vocab").read_text(encoding="utf-8")


def test_reserved_characters_cost_no_more_than_themselves(code, tmp_path):
  marked = [text.replace("\n\n", "\n\u2585\n", 1) for text in code]
  sizes = []
  for documents in (code, marked):
    train(documents, 700, tmp_path / "a")
    sizes.append(len(open_vocabulary(str(tmp_path / "a")).encode(code[0])))
  assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


def test_a_sample_is_the_same_in_any_order_and_fits(code):
  shuffled = random.Random(0).sample(code, len(code))
  for limit in (5_000, 50_000, 100_000):
    sample = sample_text(code, limit)
    assert sample == sample_text(shuffled, limit)
    assert limit - 4096 <= sum(map(len, sample)) <= limit


def test_a_sample_is_spread_over_the_documents_and_one_of_all_is_all(code):
  texts = ["".join(code[i:] + code[:i])[:60_000] for i in range(10)]
  total = sum(map(len, texts))
  sample, every = sample_text(texts, total // 2), sample_text(texts, total)
  chunks = [list(cut_text(text, 4096)) for text in texts]
  assert sorted(every) == sorted(itertools.chain(*chunks))
  for longest in sorted(chunks, key=len)[-10:]:
    assert 0 < len(set(longest) & set(sample)) < len(longest)


def test_words_that_come_again_do_not_count_against_the_limit_of_memory():
  spaced = ["one two three\n" * 200, "three two one\n" * 200, "four five"]
  assert limit_words(spaced, 60) == spaced
  # All words of this text differ, so a tenth of it has a tenth of the words.
  runs = [chr(0x4E00 + i) * 100 for i in range(100)]
  assert limit_words(runs, 1000) == runs[:10]
  assert limit_words(runs, 50) == runs[:1]
  assert limit_words([], 50) == []


# Words follow Zipf's law, as in a language. A vocabulary of PaLM's size needs
# more different words than it has pieces.
def synthetic_text(kind: str, num_characters: int) -> Iterator[str]:
  """Yields lines of words: "spaced", or "joined" of Chinese characters."""
  rng = np.random.default_rng(0)
  if kind == "spaced":
    syllables = [
      before + vowel + after
      for before in "b c d f g h j k l m n p r s t v w z st tr ch".split()
      for vowel in "a e i o u ai ea".split()
      for after in ("", "n", "r", "s")
    ]
    lengths = rng.integers(1, 5, 600_000)
  else:
    syllables = [chr(0x4E00 + i) for i in range(6000)]
    lengths = rng.integers(1, 4, 200_000)
  words = np.array(
    [
      "".join(syllables[i] for i in rng.integers(len(syllables), size=length))
      for length in lengths
    ],
    dtype=object,
  )
  shares = np.cumsum(1 / np.arange(1, len(words) + 1))
  made = 0
  while made < num_characters:
    drawn = words[np.searchsorted(shares / shares[-1], rng.random(600))]
    text = " ".join(drawn) if kind == "spaced" else "".join(drawn)
    made += len(text) + 1
    yield text + "\n"


VOCAB = """
import resource, sys
from palm_mtf.cli.main import main
code = main(["vocab", "--size=256000", "--json", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spaced", "joined"])
def test_256000_pieces_are_the_same_on_any_cores_in_less_than_4_gb(
  kind, tmp_path
):
  """PaLM's size. `-s` shows the time and the memory of docs/data.md."""
  text = tmp_path / "text.txt"
  with text.open("w", encoding="utf-8") as file:
    file.writelines(synthetic_text(kind, 80_000_000))
  hashes = []
  cores = os.sched_getaffinity(0)
  for number, some in enumerate([cores, {min(cores)}]):
    os.sched_setaffinity(0, some)
    start = time.monotonic()
    try:
      done = processes.python(
        *("-c", VOCAB, "--input", text, "--output", tmp_path / str(number)),
        timeout=3000,
      )
    finally:
      os.sched_setaffinity(0, cores)
    secs = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    line, memory = done.stdout.splitlines()
    gigabytes = int(memory) * 1024 / 1e9
    found = json.loads(line)
    assert found["pieces"] == 256_000
    hashes.append(found["sha256"])
    print(
      f"{kind}, {len(some)} cores: {found['sample_characters']:,} characters, "
      f"{secs:.0f} s, {gigabytes:.1f} GB"
    )
    assert gigabytes < 4
  assert hashes[0] == hashes[1]


def train_on(sentences, told=None) -> bytes:
  told = [] if told is None else told
  return train_sentencepiece(sentences, SETTINGS, on_progress=told.append)


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
  """Returns a list of the processes that this process starts."""
  found, popen = [], subprocess.Popen

  def start_noted(*arguments, **settings):
    found.append(popen(*arguments, **settings))
    return found[-1]

  monkeypatch.setattr(subprocess, "Popen", start_noted)
  return found


def test_the_model_is_that_of_this_process_and_progress_nearly_all_merges(code):
  lines = [line for text in code for line in text.splitlines()]
  here, told = io.BytesIO(), []
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(lines), model_writer=here, minloglevel=2, **SETTINGS
  )
  model = train_on(lines, told)
  assert model == here.getvalue()
  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  pieces = map(processor.IdToPiece, range(processor.GetPieceSize()))
  merged = [piece for piece in pieces if len(piece) > 1 and piece[0] != "<"]
  assert min(told) > 0
  assert 0 <= len(merged) - sum(told) <= 100  # reported every hundred


def test_a_refusal_has_sentencepieces_own_message(started):
  with pytest.raises(RefusedError, match=r"set it to a value <= \d+"):
    train_on(["a few words"])
  assert [process.returncode for process in started] == [0]


def test_a_crash_is_ours_and_shows_the_last_words():
  with pytest.raises(RuntimeError, match="'int' object is not iterable"):
    train_on(3)


# SIGABRT is what native code raises on itself.
@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT"])
def test_a_killed_process_is_explained(code, started, name):
  number = getattr(signal, name)

  def kill_it():
    while not started:
      time.sleep(0.01)
    os.kill(started[0].pid, number)

  killer = threading.Thread(target=kill_it)
  killer.start()
  with pytest.raises(
    UserError, match=rf"killed \(signal {number}\), as it is where me"
  ):
    train_on(code * 200)
  killer.join()


PROGRAM = """
from palm_mtf.data.vocabulary.training import train_sentencepiece
words = [str(i) + " some words " + str(i * i) for i in range(300_000)]
print("begins", flush=True)
train_sentencepiece(words, {"vocab_size": 90000}, on_progress=lambda n: None)
"""


@contextlib.contextmanager
def training():
  """Yields a process that trains, and the pid of its child process."""
  with processes.start("-c", PROGRAM, start_new_session=True) as process:
    try:
      assert process.stdout.readline() == "begins\n"
      listed = f"/proc/{process.pid}/task/{process.pid}/children"
      while not (child := open(listed).read().strip()):
        time.sleep(0.01)
      time.sleep(0.3)
      yield process, child
    finally:
      with contextlib.suppress(ProcessLookupError):  # both have ended
        os.killpg(process.pid, signal.SIGKILL)


def test_no_trainer_outlives_a_caller_that_is_killed():
  with training() as (process, child):
    process.kill()
    process.communicate(timeout=20)
    end = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < end:
      time.sleep(0.01)
    assert not is_alive(child)


def is_alive(pid):
  """Returns whether a process runs; a zombie does not."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def test_an_interrupt_ends_both_processes_at_once():
  with training() as (process, child):
    process.send_signal(signal.SIGINT)
    # The training would take minutes; on a busy machine an end takes seconds.
    _, errors = process.communicate(timeout=20)
  assert "KeyboardInterrupt" in errors
  assert not os.path.exists(f"/proc/{child}")
