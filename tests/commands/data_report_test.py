# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf data report` says what a run reads; it can be rebuilt from that."""

import hashlib
import json
import shutil

import pytest

from tests import runs

WORDS = "a b c d e f g h i j k l m n o p"


@pytest.fixture
def texts(tmp_path, corpus):
  """A copy of the corpus, to which 4 documents are added."""
  folder = tmp_path / "texts"
  shutil.copytree(corpus, folder)
  twice = f"{WORDS} one two three"
  for name, text in (
    ("x1", twice),
    ("x2", twice),
    ("x3", f"so {WORDS}"),
    ("x4", "q r s t u v w x y z one two three four"),
  ):
    (folder / f"{name}.txt").write_text(text)
  return folder


@pytest.fixture
def report(palm_mtf, tmp_path):
  def run(*flags, **macros):
    model_dir = macros.pop("MODEL_DIR", str(tmp_path / "run"))
    folder = macros.pop("folder", tmp_path / "texts")
    arguments = runs.arguments("data report", folder, model_dir, **macros)
    return palm_mtf(*arguments, *flags)

  return run


def test_files_licences_duplicates_and_contamination_are_reported(
  report, texts, tmp_path
):
  evaluation = tmp_path / "set.txt"
  evaluation.write_text("q r s t u v w x y z")
  (tmp_path / "set2.txt").write_text("one two")  # too short to be looked for
  code, out, _ = report(
    "--json",
    DECONTAMINATE_FILES=f"{tmp_path}/set*.txt",
    LICENSES={f"{texts}/x*": "CC0-1.0", f"{texts}/*": "MIT"},
  )
  assert code == 0
  found = json.loads(out)
  assert len(found["files"]) == 46
  for path, file in found["files"].items():
    with open(path, "rb") as content:
      digest = hashlib.blake2b(content.read(), digest_size=16).hexdigest()
    assert file["blake2b"] == digest
  last = found["files"][str(texts / "x1.txt")]
  assert (last["license"], last["source"]) == ("CC0-1.0", "text_files")
  assert found["files"][str(texts / "1.txt")]["license"] == "MIT"
  listed = found["files"][str(evaluation)]
  assert (listed["license"], listed["bytes"]) == (None, 19)
  (source,) = found["sources"]
  assert source["documents_read"] == 44
  assert source["removed_contaminated"] == 1  # as the run does
  assert source["removed_exact_duplicates"] == 0
  assert source["share_contaminated"] == 1 / 44
  assert source["share_exact_duplicates"] == 1 / 44  # the run keeps it
  assert found["evaluation_examples"] == 2
  assert found["short_evaluation_examples"] == 1


def test_a_run_is_rebuilt_from_its_report_and_a_changed_file_is_named(
  report, texts, palm_mtf, tmp_path
):
  """The other MODEL_DIR has other tokens on disk, of the same bits."""
  filters = {"REMOVE_DUPLICATES": "exact", "SEED": 3}
  code, out, _ = report("--json", **filters)
  assert code == 0
  (tmp_path / "before.json").write_text(out)
  before = json.loads(out)
  (tmp_path / "again.gin").write_text(before["gin"])
  shutil.rmtree(tmp_path / "run")
  again = [
    *("data report", f"--gin_file={tmp_path}/again.gin"),
    *(f"--gin.MODEL_DIR='{tmp_path}/again'", "--against"),
    *(tmp_path / "before.json", "--json"),
  ]
  again[0:1] = again[0].split()
  code, out, err = palm_mtf(*again)
  assert code == 0, err
  after = json.loads(out)
  assert after["batches"] == before["batches"]
  assert [*after["batches"]] == ["0", "11"]
  assert after["tokens"] == before["tokens"]
  # The hashes are of the batches that `data inspect` shows.
  inspect = runs.arguments("data inspect", texts, tmp_path / "run", **filters)
  _, out, _ = palm_mtf(*inspect, "--json", "--gin.INSPECT_STEPS=[11]")
  assert json.loads(out)["hash"] == before["batches"]["11"]
  # A file may move, but not change; x1 and x2 are equal.
  (texts / "3.txt").rename(texts / "3a.txt")
  with open(texts / "5.txt", "a") as file:
    file.write("more")
  (texts / "x2.txt").unlink()
  (texts / "7.txt").rename(texts / "7a.txt")
  (texts / "7.txt").write_text("other")
  (texts / "9a.txt").write_text((texts / "9.txt").read_text())
  (texts / "x4.txt").unlink()
  (texts / "x5.txt").write_text("new")
  code, out, _ = palm_mtf(*again)
  assert code == 1
  assert json.loads(out)["changed"] == [
    f"{texts}/5.txt was changed",
    f"{texts}/x2.txt is missing",
    f"{texts}/x4.txt is missing",
    f"{texts}/7.txt was changed",
    f"{texts}/9a.txt is new",
    f"{texts}/x5.txt is new",
  ]
  assert palm_mtf(*again[:-1])[1].endswith(f"{texts}/x5.txt is new\n")


def test_other_settings_read_other_batches(report, texts, tmp_path):
  _, out, _ = report("--json")
  path = tmp_path / "before.json"
  path.write_text(out)
  code, out, _ = report("--against", path, DATA_SEED=4)
  assert code == 1
  assert out.endswith("batches differ\n")


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("", "is empty; give what `palm_mtf data report --json` printed."),
    ('{"files": [1]}', "is not one report with 'files'; give what"),
    ('{"files": {}}\n' * 2, "is not one report with 'files'; give what"),
    ('{"files": {"a": {}}}', "has no hash of a; give what"),
    ('{"files": {"a": {"blake2b": []}}}', "has no hash of a; give what"),
    ("text", "line 1: not JSON: Expecting value"),
  ],
)
def test_what_is_no_report_is_one_line(
  report, texts, tmp_path, content, message
):
  path = tmp_path / "before.json"
  path.write_text(content)
  code, out, err = report("--against", path)
  assert (code, out) == (2, "")
  assert message in err
