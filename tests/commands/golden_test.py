# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf evaluate --golden` records log p, and finds texts that moved."""

import json
import math
import stat

import pytest

from palm_mtf.commands import evaluate

TEXTS = ["one two three four", "seven eight nine"]


@pytest.fixture
def golden(tmp_path, finished, palm_mtf):
  """Runs the command on lines; returns exit code, output and lines after."""
  path = tmp_path / "golden.jsonl"

  def run(lines, *flags, model_dir=finished):
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = ("--model_dir", model_dir, "--golden", path, *flags)
    code, out, err = palm_mtf("evaluate", *found)
    after = [json.loads(x) for x in path.read_text().splitlines()]
    return code, out or err, after

  return run


def test_texts_are_recorded_with_the_log_p_of_score_and_then_compared(
  golden, palm_mtf, finished, tmp_path
):
  given = [{"text": TEXTS[0], "mine": 1}, {"text": TEXTS[1]}]
  code, out, recorded = golden(given)
  assert (code, out) == (0, "2 recorded\n")
  flags = [x for text in TEXTS for x in ("--text", text)]
  _, out, _ = palm_mtf("score", "--model_dir", finished, *flags, "--json")
  scores = [json.loads(x) for x in out.splitlines()][:2]
  assert [x["log_p"] for x in recorded] == [x["log_likelihood"] for x in scores]
  assert [x["tokens"] for x in recorded] == [x["tokens"] for x in scores]
  assert recorded[0]["mine"] == 1
  assert golden(recorded)[:2] == (0, "2 same\n")
  # What comes back from an export is the same model.
  for arguments in (
    ("export", "--model_dir", finished, "--output", tmp_path / "hf"),
    ("import", tmp_path / "hf", "--output", tmp_path / "back"),
  ):
    assert palm_mtf(*arguments)[0] == 0
  back = tmp_path / "back"
  float32 = "--gin.ACTIVATION_DTYPE='float32'"
  assert golden(recorded, float32, model_dir=back)[:2] == (0, "2 same\n")
  # Both dtypes round, so both tolerances count.
  bfloat16 = "--gin.ACTIVATION_DTYPE='bfloat16'"
  code, out, after = golden(recorded, bfloat16, "--json")
  assert code == 0
  assert after == recorded
  now = [json.loads(x)["now"]["log_p"] for x in out.splitlines()]
  moves = [abs(x - y["log_p"]) for x, y in zip(now, recorded, strict=True)]
  assert all(x["tolerance"] < y for x, y in zip(recorded, moves, strict=True))


def test_each_text_that_moved_is_a_line_and_the_exit_code_is_1(golden):
  _, _, recorded = golden([{"text": x} for x in [*TEXTS, "one"]])
  line = recorded[0] | {"log_p": recorded[0]["log_p"] + 0.001}
  cut = recorded[1] | {"tokens": 99, "vocabulary_sha256": "other"}
  code, out, after = golden([line, cut, recorded[2], {"text": "new"}])
  assert code == 1
  moved, other, counts = out.splitlines()
  assert moved.startswith(f"text 1 moved: log p {line['log_p']:.4f} became ")
  assert moved.endswith(f'differ by {line["tolerance"]:.4g}: "{TEXTS[0]}"')
  assert other.startswith("text 2 moved: 99 tokens became ")
  assert "with another vocabulary" in other
  assert counts == "2 moved, 1 same, 1 recorded"
  assert after[:3] == [line, cut, recorded[2]]
  assert math.isfinite(after[3]["log_p"])


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ({"text": ""}, "'text' is empty; write"),
    ({"txt": "a"}, "'text' is null, not a text; write"),
    ({"text": "a\0"}, "'text' has a NUL"),
    ({"text": "a", "log_p": None}, "'log_p' is null, not a number below 1e"),
    ({"text": "a", "log_p": -1}, "'tolerance' is null, not a number below"),
    *(
      ({"text": "a", "log_p": -1, "tolerance": x}, f"'tolerance' is {y}")
      for x, y in ((math.inf, "Infinity"), (math.nan, "NaN"), (10**400, "1000"))
    ),
  ],
)
def test_a_line_that_is_no_golden_text_is_one_error(golden, line, message):
  code, err, after = golden([line])
  assert (code, repr(after)) == (2, repr([line]))  # NaN differs from NaN
  assert f", line 1: {message}" in err.splitlines()[-1]


def test_a_file_that_is_edited_while_texts_are_scored_keeps_the_edits(
  finished, palm_mtf, tmp_path, monkeypatch
):
  """`~` is the home folder, for what is read and what is written."""
  monkeypatch.setenv("HOME", str(tmp_path))
  path = tmp_path / "golden.jsonl"
  path.write_text('{"text": "one"}\n')
  path.chmod(0o600)
  flags = ("--model_dir", finished, "--golden=~/golden.jsonl")
  assert palm_mtf("evaluate", *flags)[:2] == (0, "1 recorded\n")
  assert "log_p" in path.read_text()
  assert stat.S_IMODE(path.stat().st_mode) == 0o600

  def score(*unused):
    path.write_text('{"text": "edited"}\n')
    return [-1.0]

  path.write_text('{"text": "one"}\n')
  monkeypatch.setattr(evaluate, "compute_log_likelihoods", score)
  code, _, err = palm_mtf("evaluate", *flags)
  assert code == 2
  assert f"{path}: was changed while it was read" in err
  assert path.read_text() == '{"text": "edited"}\n'
