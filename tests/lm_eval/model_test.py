# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The harness's command has the likelihoods of `palm_mtf score`."""

import json

import pytest

from palm_mtf.cli.main import main
from tests import processes

DOCUMENTS = [
  {
    "question": "1: four five",
    "options": ["six", "nine"],
    "answer": 0,
    "text": "one two three four",
  },
  {
    "question": "one two",
    "options": ["one", "three"],
    "answer": 1,
    "text": "seven eight nine " * 20,
  },
]
# Tasks of the harness, as JSON, which is YAML too. A question is followed by a
# space and an option.
TASKS = {
  "choice": {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
  },
  "rolling": {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
  },
  "greedy": {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{options[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
  },
}


def _harness(*flags, **keywords):
  return processes.python("-m", "palm_mtf.lm_eval", *flags, **keywords)


@pytest.fixture(scope="module")
def measured(finished, tmp_path_factory):
  """Results of the harness, and the samples of each task."""
  folder = tmp_path_factory.mktemp("tasks")
  data = folder / "documents.jsonl"
  data.write_text("".join(f"{json.dumps(x)}\n" for x in DOCUMENTS))
  for name, task in TASKS.items():
    whole = {
      "task": name,
      "dataset_path": "json",
      "dataset_kwargs": {"data_files": {"test": str(data)}},
      "test_split": "test",
      **task,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(whole))
  done = _harness(
    *("--model", "palm_mtf", "--tasks", ",".join(TASKS)),
    *("--model_args", f"model_dir={finished}"),
    *("--include_path", folder, "--output_path", folder, "--log_samples"),
    variables={"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    cwd=folder,
  )
  assert done.returncode == 0, done.stderr
  (results,) = folder.rglob("results_*.json")
  samples = {}
  for name in TASKS:
    (file,) = folder.rglob(f"samples_{name}_*.jsonl")
    lines = [json.loads(x) for x in file.read_text().splitlines()]
    samples[name] = sorted(lines, key=lambda line: line["doc_id"])
  return json.loads(results.read_text()), samples


def _run_command(command, finished, capsys, *flags) -> list[dict]:
  capsys.readouterr()
  given = ["--model_dir", str(finished), "--json", *flags]
  assert main([command, *given]) == 0
  return [json.loads(x) for x in capsys.readouterr().out.splitlines()]


@pytest.mark.peers
def test_options_have_the_likelihoods_of_score(
  measured, finished, tmp_path, capsys
):
  _, samples = measured
  file = tmp_path / "options.jsonl"
  file.write_text(
    "".join(
      json.dumps(
        {"inputs": x["question"], "options": [f" {y}" for y in x["options"]]}
      )
      + "\n"
      for x in DOCUMENTS
    )
  )
  lines = _run_command("score", finished, capsys, "--input", str(file))
  for sample, line in zip(samples["choice"], lines, strict=True):
    # [[[log p, is greedy]], ...] as text
    found = [float(response[0][0]) for response in sample["resps"]]
    expected = [option["log_likelihood"] for option in line["options"]]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.peers
def test_bits_per_byte_of_documents_are_those_of_score(
  measured, finished, capsys
):
  results, _ = measured
  flags = [flag for x in DOCUMENTS for flag in ("--text", x["text"])]
  *_, total = _run_command("score", finished, capsys, *flags)
  assert results["config"]["model_dtype"] == "float32"
  found = results["results"]["rolling"]["bits_per_byte,none"]
  assert found == pytest.approx(total["bits_per_byte"], rel=1e-6)


@pytest.mark.peers
def test_greedy_texts_are_those_of_generate(measured, finished, capsys):
  _, samples = measured
  flags = [flag for x in DOCUMENTS for flag in ("--prompt", x["question"])]
  flags += ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=8"]
  lines = _run_command("generate", finished, capsys, *flags)
  found = [sample["resps"][0][0] for sample in samples["greedy"]]
  expected = [line["continuation"].split("\n")[0] for line in lines]
  assert found == expected


@pytest.mark.peers
def test_a_wrong_setting_is_one_line(finished, tmp_path):
  done = _harness(
    *("--model", "palm_mtf", "--tasks", "arc_easy"),
    *("--model_args", f"model_dir={finished},STRIDES=3"),
    cwd=tmp_path,
  )
  assert done.returncode == 2
  assert "Traceback" not in done.stderr
  last = done.stderr.splitlines()[-1]
  assert last.startswith("palm_mtf: unknown macro STRIDES (did you mean")
