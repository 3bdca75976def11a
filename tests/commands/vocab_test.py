# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import pathlib
import sysconfig

import pytest
import sentencepiece

from palm_mtf.cli.main import main
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import list_pieces
from tests import runs

pytestmark = pytest.mark.usefixtures("here")

STDLIB = pathlib.Path(sysconfig.get_path("stdlib"))
JSON, EMAIL = (f"{{stdlib}}/{name}/*.py" for name in ("json", "email"))


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> str:
  """The path of a vocabulary of 500 pieces."""
  prefix = str(tmp_path_factory.mktemp("words") / "words")
  train(prefix)
  return f"{prefix}.model"


def train(prefix: str, *flags: str, size: int = 500) -> int:
  size = f"--size={size}"
  return main(["vocab", "--input", JSON, size, f"--output={prefix}", *flags])


def test_a_vocabulary_is_written_with_the_list_of_its_pieces(here, capsys):
  assert train("a/words") == 0
  assert sorted(os.listdir(here / "a")) == ["words.model", "words.vocab"]
  vocabulary = open_vocabulary("a/words.model")
  assert vocabulary.size == 500
  listed = (here / "a" / "words.vocab").read_text(encoding="utf-8")
  assert listed == list_pieces((here / "a" / "words.model").read_bytes())
  assert listed.count("\n") == 500
  output = capsys.readouterr()
  assert output.out.startswith("vocabulary         a/words.model\n")
  assert output.err == ""


def test_json_says_what_was_made_and_how_well_it_fits(here, capsys):
  assert train("words", "--json") == 0
  (line,) = capsys.readouterr().out.splitlines()
  results = json.loads(line)
  vocabulary = open_vocabulary("words.model")
  assert (results["pieces"], results["sha256"]) == (500, vocabulary.sha256)
  text = [p.read_text(encoding="utf-8") for p in STDLIB.glob("json/*.py")]
  num_bytes = sum(len(x.encode()) for x in text)
  num_tokens = sum(map(len, vocabulary.encode_batch(text)))
  assert results["measured_bytes"] == num_bytes
  # Chunks end at line ends, but some pieces span a line end.
  assert results["measured_tokens"] == pytest.approx(num_tokens, rel=0.01)
  assert results["tokens_per_byte"] * results["bytes_per_token"] == (
    pytest.approx(1)
  )
  assert 0 <= results["byte_share"] < 0.2


def test_the_sample_has_the_size_that_is_asked_for(here, capsys):
  found = []
  for size in (40_000, 20_000):
    flags = [f"--sample_characters={size}", "--json"]
    assert train(f"words_{size}", *flags) == 0
    found.append(json.loads(capsys.readouterr().out))
    assert size - 4096 < found[-1]["sample_characters"] <= size
  assert found[0]["sha256"] != found[1]["sha256"]


def test_more_pieces_than_the_text_supports_says_how_many_work(here, fails):
  flags = ["--input", JSON, "--size=100000", "--output=words"]
  line = fails("vocab", *flags)
  assert line.startswith("--size = 100000: too high, the training text ")
  assert os.listdir(here) == []
  supported = int(line.partition("set --size = ")[2].partition(" ")[0])
  assert train("words", size=supported) == 0


def test_inspect_shows_fit_and_losses(words, capsys):
  flags = ["--vocabulary", words, "--input", JSON, EMAIL, "--json"]
  assert main(["vocab", "inspect", *flags]) == 0
  results = json.loads(capsys.readouterr().out)
  assert (results["pieces"], results["byte_pieces"]) == (500, 256)
  assert (results["lossless"], results["losses"]) == (True, [])
  num_files = sum(
    path.stat().st_size > 0
    for name in ("json", "email")
    for path in STDLIB.glob(f"{name}/*.py")
  )
  assert (results["documents"], results["documents_changed"]) == (num_files, 0)
  assert 1 < results["bytes_per_token"] < 5
  assert 0 < results["pieces_used"] <= 500


def test_inspect_says_what_a_foreign_model_loses(here, capsys):
  model = io.BytesIO()
  text = (STDLIB / "argparse.py").read_text(encoding="utf-8")
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter([*text.splitlines(), *map(str, range(3000))]),
    model_writer=model,
    vocab_size=600,
    model_type="bpe",
    byte_fallback=True,
    minloglevel=2,
  )
  (here / "foreign.model").write_bytes(model.getvalue())
  flags = ["--vocabulary=foreign.model", "--input", JSON]
  assert main(["vocab", "inspect", *flags]) == 0
  lines = capsys.readouterr().out.splitlines()
  shown = {line[:19].strip(): line[19:] for line in lines}
  assert shown["lossless"] == "no"
  assert "'tabs', 'line ends'" in shown["losses"]
  assert shown["documents changed"] == shown["documents"]
  assert " becomes " in shown["first change"]
  assert shown["end of document"] == "</s>"


JSON_TO = f"vocab --input={JSON} --size=500 --output="
INSPECT = "vocab inspect --input=words.txt --vocabulary="


@pytest.mark.parametrize(
  ("command", "line"),
  [
    (
      f"{JSON_TO}words",
      "--output = 'words': words.model exists, and checkpoints may "
      "depend on it; give another --output, or remove the file.",
    ),
    *(
      (
        f"{JSON_TO}{prefix}",
        f"--output = '{prefix}': a folder; name a file in it, such as "
        "'runs/words'.",
      )
      for prefix in ("runs", "runs/")
    ),
    (  # with a wrong --size, which training would report first
      f"vocab --input={JSON} --size={9**9} --output=words.txt/a/words",
      "--output = 'words.txt/a/words': {here}/words.txt is not a writable "
      "folder; give another --output.",
    ),
    *(
      (
        f"vocab --input={JSON} --size={size} --output=new",
        f"--size = {size}: give a whole number of at least 270.",
      )
      for size in (0, 269)
    ),
    (
      "vocab --input=empty.txt --size=300 --output=new",
      "--input = ['empty.txt']: all 1 files are empty, such as "
      "{here}/empty.txt; give files with text.",
    ),
    (  # line 1 has the field
      "vocab --input=a.jsonl --text_field=body --size=300 --output=new",
      "--input: {here}/a.jsonl, line 2: ",
    ),
    (
      f"{INSPECT}word.model",
      "--vocabulary = 'word.model': no such file (did you mean \"words.model\""
      "?); give a SentencePiece model, a tokenizer.json, or train one "
      "(palm_mtf vocab).",
    ),
    (
      f"{INSPECT}words.txt",
      "--vocabulary = 'words.txt': neither a SentencePiece model nor a "
      "tokenizer.json; give another, or "
      "train one (palm_mtf vocab).",
    ),
  ],
)
def test_what_cannot_work_is_one_line_and_writes_nothing(
  command, line, here, fails
):
  (here / "runs").mkdir()
  for name, text in (
    ("words.model", "precious"),
    ("words.txt", "some words"),
    ("empty.txt", ""),
    ("a.jsonl", '{"body": "x"}\n{"bdy": "x"}\n'),
  ):
    (here / name).write_text(text)
  before = runs.read_files(here)
  assert fails(*command.split()).startswith(line.format(here=here))
  assert runs.read_files(here) == before
