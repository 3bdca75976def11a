# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of every kind that palm_mtf reads, with readers, for fuzz_test.py."""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np

from palm_mtf.cli.main import main
from palm_mtf.commands.score import read_items
from palm_mtf.data.filters.filtered_source import (
  read_decisions,
  write_decisions,
)
from palm_mtf.data.sources import text_files
from palm_mtf.data.sources.document import TRAIN, VALIDATION, Document
from palm_mtf.data.sources.files import FileDigests, describe_file
from palm_mtf.data.tokens.encoder import EncodedDocument
from palm_mtf.data.tokens.shard import (
  DamagedShardError,
  write_sealed_json,
  write_shard,
)
from palm_mtf.data.tokens.store import read_store
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.evaluation.answers import AnswerJournal
from palm_mtf.evaluation.few_shot import read_exemplars
from palm_mtf.generation.inference.prompts import read_prompts
from palm_mtf.model_dir.foreign_files import seal
from palm_mtf.model_dir.metrics import MetricsWriter
from palm_mtf.report.page import read_runs
from palm_mtf.training.job import write_samples
from tests import checkpoint_files, runs, tokenizer_files, transformers_folder

STEPS = [{"step": n, "loss": 8 - n / 10, "tokens": 64 * n} for n in range(1, 6)]


class TextWouldBeReadError(Exception):
  """Training has finished the checks before it reads text."""


def _write_lines(path: Path, values: list) -> None:
  path.write_text("".join(json.dumps(value) + "\n" for value in values))


def command(*arguments: str) -> None:
  """Runs a command; raises UserError if it ends with 2 and one line."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = main(arguments)
  if code:
    lines = err.getvalue().splitlines()
    assert code == 2 and lines[-1].startswith("palm_mtf: "), lines
    raise UserError(lines[-1])


def make_gin(folder: Path) -> None:
  text = io.StringIO()
  with contextlib.redirect_stdout(text):
    flags = runs.arguments("train", folder / "corpus", folder / "run")
    assert main([*flags, "--print_config"]) == 0
  text = re.sub("  # .*", "", text.getvalue())
  (folder / "a.gin").write_text(f"include 'models/palm_tiny.gin'\n{text}")


def read_gin(folder: Path) -> None:
  """Reads the file, then trains until text would be read."""
  flags = [f"--gin_file={folder}/a.gin", f"--gin.MODEL_DIR='{folder}/run'"]
  command("train", *flags, "--print_config")
  with contextlib.suppress(TextWouldBeReadError):
    command("train", *flags)


def make_lines(folder: Path) -> None:
  rows = [
    {"text": f"one {n}", "weight": n / 2, "quality": n, "prompt": "two"}
    for n in range(4)
  ]
  _write_lines(folder / "texts.jsonl", rows)
  answers = [{"inputs": "a", "targets": "b"}, {"inputs": "a", "targets": "c"}]
  _write_lines(folder / "examples.jsonl", answers)
  options = [{"text": "a"}, *answers, {"inputs": "a", "options": ["b", "c"]}]
  _write_lines(folder / "items.jsonl", options)
  (folder / "items.tsv").write_text("a\tb\nc\td\te\n")
  (folder / "prompts.txt").write_text("one\ntwo\n")


def read_jsonl_texts(folder: Path) -> None:
  file = describe_file(str(folder / "texts.jsonl"))
  fields = text_files.Fields("text", "weight", "quality")
  lines = text_files.read_jsonl_texts(file, fields, text_files.MACROS)
  for _, line in lines:
    line.text.startswith("a")
    assert 0 <= line.weight < 2**53


def read_given_texts(folder: Path) -> None:
  read_jsonl_texts(folder)
  for name in ("texts.jsonl", "prompts.txt"):
    assert all(read_prompts(str(folder / name)))
  for name in ("items.jsonl", "items.tsv"):
    assert all(each.targets for each in read_items(str(folder / name)))
  exemplars = read_exemplars(str(folder / "examples.jsonl"), 1)
  exemplars.choose("key", "group")


def make_run(folder: Path) -> None:
  _write_lines(folder / "metrics.jsonl", STEPS)
  samples = [{"step": 2, "prompt": "one", "continuation": "two"}]
  _write_lines(folder / "samples.jsonl", samples)
  _write_lines(folder / "rewinds.jsonl", [{"step": 4, "to_step": 2}])
  _write_lines(folder / "answers.jsonl", [{"seed": 1}, ["options", 0, [1.5]]])
  (folder / "config.gin").write_text('TRAIN_STEPS = 5\nTEXT_FILES = "a"\n')
  result = folder / "eval" / "step_00000002" / "task.json"
  result.parent.mkdir(parents=True)
  content = {"step": 2, "task": "t", "split": "test", "examples": 3}
  result.write_text(json.dumps({**content, "metrics": {"accuracy": 50.0}}))


def read_report(folder: Path) -> None:
  (run,) = read_runs([str(folder)])
  assert all(np.isfinite(run.values("loss")))


def resume_metrics(folder: Path) -> None:
  MetricsWriter(str(folder), 3).close()
  kept = runs.read_metrics(folder)
  assert all(line["step"] <= 3 for line in kept)


def resume_samples(folder: Path) -> None:
  write_samples(str(folder), 3, ["one"], ["two"])


def resume_answers(folder: Path) -> None:
  with AnswerJournal(str(folder / "answers.jsonl"), {"seed": 1}) as journal:
    journal.known("options")


def make_checkpoints(folder: Path) -> None:
  for step in (1, 2):
    checkpoint_files.write(folder, step)
  _write_lines(folder / "metrics.jsonl", STEPS)


def read_checkpoints(folder: Path) -> None:
  command("checkpoints", "list", str(folder))
  command("checkpoints", "verify", str(folder))


def seal_again(path: Path) -> None:
  """Seals a changed manifest again, as if another version had written it."""
  with contextlib.suppress(ValueError, RecursionError):
    content = json.loads(path.read_bytes())
    if isinstance(content, dict):
      content.pop("blake2b", None)
      path.write_text(json.dumps(seal(content, "blake2b")))


def make_store(folder: Path) -> None:
  documents = [
    EncodedDocument(split, Document("a b"), *map(np.int32, ([], [5, 6, 7])))
    for split in (TRAIN, VALIDATION, TRAIN)
  ]
  for number in range(2):
    write_shard(
      str(folder), number, documents, dtype="<u2", eod_id=1, has_inputs=False
    )
  write_sealed_json(str(folder / "manifest.json"), {"num_shards": 2})


def read_tokens(folder: Path) -> None:
  for verify in (True, False):
    store = read_store(str(folder), verify=verify)
    for split in (store.train, store.validation):
      assert split.tokens.spans().shape[1] == 3
      tokens = split.tokens.read(0, split.counts.num_tokens)[0]
      assert len(tokens) == split.counts.num_tokens
      # Only `verify` finds a changed token, because sizes do not change.
      assert not verify or {*tokens} == {1, 5, 6, 7}


def make_kept(folder: Path) -> None:
  write_decisions(str(folder / "decisions"), [np.ones(9, np.uint8)])
  (folder / "a.txt").write_text("one")
  os.utime(folder / "a.txt", (1, 1))
  file = describe_file(str(folder / "a.txt"))
  with FileDigests(str(folder / "digests.json")) as digests:
    digests._known[file.path] = [file.num_bytes, 1, 1, 1, "f00d"]
    digests._has_new = True


def read_kept(folder: Path) -> None:
  decisions = read_decisions(str(folder / "decisions"))
  assert decisions is None or decisions[0].sum() == 9
  file = describe_file(str(folder / "a.txt"))
  digests = FileDigests(str(folder / "digests.json"))
  assert digests.read([file]) != ["f00d"]


def make_vocabulary(folder: Path) -> None:
  texts = [" ".join(runs.WORDS[n:]) for n in range(10)]
  train_vocabulary(texts, 300, path=str(folder / "a.model"))


def read_vocabulary(folder: Path) -> None:
  vocabulary = open_vocabulary(str(folder / "a.model"))
  ids = vocabulary.encode("one two \u2581 \u00e9")
  assert max(ids) < vocabulary.size
  assert isinstance(vocabulary.decode(range(vocabulary.size + 1)), str)


def make_tokenizer(folder: Path) -> None:
  for form in ("llama-bpe", "llama2"):
    path = folder / form
    path.mkdir()
    if form == "llama2":
      content, _ = tokenizer_files.make_llama2(path)
    else:
      content = tokenizer_files.make_byte_level(form, size=280)
    tokenizer_files.write(path, content, eos_token=tokenizer_files.START)
    text = json.dumps(content, indent=1)
    (path / "tokenizer.json").write_text(text)


def read_tokenizer(folder: Path) -> None:
  for form in ("llama-bpe", "llama2"):
    path = str(folder / form / "tokenizer.json")
    vocabulary = open_vocabulary(path)
    ids = vocabulary.encode("one two \u2581 \u00e9")
    assert max(ids, default=0) < vocabulary.size
    assert isinstance(vocabulary.decode(range(vocabulary.size + 1)), str)
    vocabulary.losses()


def make_index(folder: Path) -> None:
  ones = np.ones([2, 3], np.float32)
  checkpoint_files.save_tensors(folder / "weights", a__b=ones, c=ones)


def read_index(folder: Path) -> None:
  prefix = str(folder / "weights")
  command("checkpoints", "compare", prefix, prefix)


def make_transformers(folder: Path) -> None:
  transformers_folder.write(folder / "model", transformers_folder.MODEL)
  transformers_folder.split(folder / "model")
  path = folder / "model" / transformers_folder.SHARD
  header, content = transformers_folder.read_parts(path)
  # Changed bits of weights cannot be detected, so only the header is changed.
  (folder / "header.json").write_text(json.dumps(header))
  path.write_bytes(content)


def read_transformers(folder: Path) -> None:
  """Imports a model, and compares the result with the written parameters."""
  model, output = folder / "whole", folder / "run"
  shutil.copytree(folder / "model", model)
  path = model / transformers_folder.SHARD
  transformers_folder.write_parts(
    path, (folder / "header.json").read_bytes(), path.read_bytes()
  )
  try:
    command("import", str(model), "--output", str(output))
  except UserError:
    assert not output.exists()
    raise
  expected = transformers_folder.parameters(transformers_folder.MODEL)
  runs.assert_same(expected, runs.read_tensors(output, 0))
  command(
    "score", "--model_dir", str(output), "--text", "one", "--print_config"
  )


# {kind: (maker of files, names of the files to change, reader, and exceptions
# besides UserError that callers of the reader handle)}
KINDS: dict[str, tuple] = {
  "gin": (make_gin, "a.gin", read_gin),
  "text": (make_lines, "texts.jsonl", read_jsonl_texts),
  "input": (make_lines, "*", read_given_texts),
  "report": (make_run, "**/*", read_report),
  "metrics": (make_run, "metrics.jsonl", resume_metrics),
  "samples": (make_run, "samples.jsonl", resume_samples),
  "answers": (make_run, "answers.jsonl", resume_answers),
  "checkpoint": (make_checkpoints, "**/*", read_checkpoints),
  "sealed": (make_checkpoints, "checkpoints/*/manifest.json", read_checkpoints),
  "tokens": (make_store, "*", read_tokens, DamagedShardError),
  "kept": (make_kept, "d*", read_kept),
  "vocabulary": (make_vocabulary, "a.model", read_vocabulary),
  "tokenizer": (make_tokenizer, "**/*.json", read_tokenizer),
  "index": (make_index, "weights.*", read_index),
  "transformers": (make_transformers, "**/*.json", read_transformers),
}
# C++ libraries read these files, so a new seed might end the process.
IN_CHILD = {"vocabulary", "tokenizer", "index"}
