# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands export adapters, and decode a base with an adapter."""

import concurrent.futures
import contextlib
import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from palm_mtf.lm_eval.run import Run
from tests import runs, serve_testing

FILE = "adapter_model.safetensors"
SHORT = {"TRAIN_STEPS": 2, "EVAL_STEPS": 2, "CHECKPOINT_STEPS": 2}
ADAPTER = {
  "ADAPTER": "lora",
  "ADAPTER_RANK": 3,
  "ADAPTER_ALPHA": 8.0,
  "ADAPTER_SCALE": "sqrt_rank",
  "ADAPTER_TARGETS": ["attention/*", "mlp/wo"],
  "PARAMETER_SCALE_FLOOR": 0.5,  # updates are in proportion, and B begins as 0
}


@pytest.fixture(scope="module")
def folders(corpus, finished, tmp_path_factory):
  """Trains an adapter; returns a folder of its base, it and a PEFT's."""
  folder = tmp_path_factory.mktemp("adapters")
  shutil.copytree(finished, folder / "base")
  settings = {
    **SHORT,
    "PROMPTS": [],
    "INIT_CHECKPOINT": str(folder / "base"),
    "VOCABULARY": str(folder / "base" / "vocabulary.model"),
  }
  assert runs.run("train", corpus, folder / "run", **settings, **ADAPTER) == 0
  assert export(folder / "run", folder / "peft") == 0
  return folder


def export(model_dir, output, *flags):
  """Exports a run; returns the exit code."""
  given = ("export", "--model_dir", model_dir, "--output", output, *flags)
  return runs.main([str(x) for x in given])


def score(model_dir, *flags):
  """Returns the log-likelihood of a text."""
  text = "--text", "one two three four five six seven", "--json"
  (found,) = runs.printed("score", "--model_dir", model_dir, *text, *flags)
  return found["log_likelihood"]


def test_a_base_with_an_adapter_is_the_adapted_run(folders):
  """The adapter of the run, and what the run exports for PEFT."""
  base, run = folders / "base", folders / "run"
  adapted = score(run)
  assert abs(adapted - score(base)) > 1e-3
  assert score(base, "--adapter", folders / "peft") == adapted
  assert score(base, "--adapter", run) == adapted
  # lm-evaluation-harness
  text = "", "one two three four five six seven"
  ((_, found),) = Run(str(base), {}, False, str(run)).scores([text])
  assert found.log_likelihood == adapted


@pytest.mark.slow
def test_other_commands_add_an_adapter(folders):
  given = "--model_dir", folders / "base", "--adapter", folders / "peft"
  flags = "--prompt", "one two three", "--json"
  texts, losses = (
    [
      runs.printed(command, *model, *more)
      for model in (given, ("--model_dir", folders / "run"))
    ]
    for command, more in (("generate", flags), ("evaluate", ["--json"]))
  )
  assert texts[0] == texts[1]
  loss = losses[1][0]["validation_loss"]
  assert losses[0][0]["validation_loss"] == pytest.approx(loss, 1e-6)


def test_merge_writes_the_whole_model(folders, tmp_path, capsys):
  assert export(folders / "run", tmp_path / "whole", "--merge") == 0
  config = json.loads((tmp_path / "whole" / "config.json").read_text())
  assert config["architectures"] == ["CohereForCausalLM"]
  assert export(folders / "run", tmp_path / "a.gguf", "--format=gguf") == 0
  assert "an adapter of a command-r in float32" in capsys.readouterr().out
  assert export(folders / "base", tmp_path / "base", "--merge") == 2
  assert "nothing to merge; leave --merge out" in capsys.readouterr().err


def refused(capsys, model_dir, adapter):
  """Returns the line with which a command refuses an adapter."""
  given = ("--model_dir", model_dir, "--adapter", adapter, "--text", "one")
  assert runs.main(["score", *map(str, given)]) == 2
  *_, line = capsys.readouterr().err.splitlines()
  return line


def test_an_adapter_of_another_model_is_refused(folders, tmp_path, capsys):
  base, run = folders / "base", folders / "run"
  assert "has no adapter" in refused(capsys, base, base)
  assert "has an adapter already" in refused(capsys, run, folders / "peft")
  (tmp_path / "adapter_config.json").write_bytes(
    (folders / "peft" / "adapter_config.json").read_bytes()
  )
  with safe_open(folders / "peft" / FILE, "np") as file:
    metadata = file.metadata()
  manifest = base / "checkpoints" / "step_00000012" / "manifest.json"
  digest = json.loads(manifest.read_text())["blake2b"]
  assert metadata["palm_mtf_base"] == digest
  tensors = load_file(folders / "peft" / FILE)
  save_file(tensors, tmp_path / FILE, {"palm_mtf_base": "5eed"})
  message = refused(capsys, base, tmp_path)
  assert "adapts a checkpoint with the hash 5eed, and" in message
  assert digest in message


@pytest.fixture
def served(folders, palm_mtf):
  """Returns the line with which `serve` refuses adapters."""
  pytest.importorskip("aiohttp", reason="aiohttp, which serve needs, is absent")

  def run(*adapters, flags=(), model_dir=folders / "base"):
    given = ("serve", "--model_dir", model_dir, "--listen=127.0.0.1:0", *flags)
    code, out, err = palm_mtf(*given, *(f"--adapter={x}" for x in adapters))
    assert (code, out) == (2, "")
    return err.splitlines()[-1]

  return run


def test_serve_refuses_wrong_adapters_in_one_line(folders, tmp_path, served):
  """Before it answers; a server without one of its adapters never starts."""
  peft, run = folders / "peft", folders / "run"
  good = f"good={peft}"
  assert "give NAME=PATH." in served(str(peft))
  assert "another --adapter has the name 'good'" in served(good, good)
  assert "name 'base': is that of the base; give" in served(f"base={peft}")
  assert "give at most 100 letters" in served(f"a/b={peft}")
  assert "has an adapter already" in served(good, model_dir=run)
  assert "or serve without them" in served(good, flags=["--follow"])
  assert "has no adapter" in served(good, f"other={folders / 'base'}")
  gone = served(good, f"gone={tmp_path / 'gone'}")
  assert f"--adapter = '{tmp_path / 'gone'}'" in gone
  config = json.loads((peft / "adapter_config.json").read_text())
  (tmp_path / FILE).write_bytes((peft / FILE).read_bytes())
  for changes, message in (
    ({"use_dora": True}, "lora_magnitude_vector is missing"),
    ({"r": 4}, "with this base and its rank it is [4, "),
    ({"lora_alpha": None}, "lora_alpha is missing"),
  ):
    changed = json.dumps({**config, **changes})
    (tmp_path / "adapter_config.json").write_text(changed)
    assert message in served(good, f"broken={tmp_path}")
  devices = ["--gin.MESH_SHAPE='model:2'", "--gin.LAYOUT='d_ff:model'"]
  assert "only decoding steps in C++, on one CPU" in served(good, flags=devices)


@pytest.mark.slow
def test_served_texts_are_those_of_each_adapter_under_load(folders, tmp_path):
  """While an adapter is loaded, replaced and unloaded again and again."""
  base, run, other = folders / "base", folders / "run", tmp_path / "other"
  peft = tmp_path / "peft"
  for seed, path in enumerate((peft, other)):
    shutil.copytree(folders / "peft", path)
    rng, tensors = np.random.default_rng(seed), load_file(path / FILE)
    for name, x in tensors.items():
      tensors[name] = rng.normal(0, 0.3, x.shape).astype(np.float32)
    save_file(tensors, path / FILE)
  paths = {"base": None, "peft": peft, "run": run, "other": other}
  prompts = ["one two", "7", "three four five", "ten"]
  given = "--json", "--gin.TEMPERATURE=0.0", *(f"--prompt={x}" for x in prompts)
  expected = {}
  for name, path in paths.items():
    more = ["--adapter", path] if path else []
    lines = runs.printed("generate", "--model_dir", base, *given, *more)
    for line in lines:
      expected[name, line["prompt"]] = line["continuation"]
  flags = [f"--adapter=peft={paths['peft']}", f"--adapter=run={paths['run']}"]
  with (
    serve_testing.start(
      base, *flags, "--allow_adapter_loading", "--slots=16"
    ) as process,
    contextlib.ExitStack() as ends,
  ):
    ends.callback(process.kill)
    server = serve_testing.make_url(process)

    def complete(key):
      name, prompt = key
      found = serve_testing.complete(server, model=name, prompt=prompt)
      return found["choices"][0]["text"]

    def change(path):
      body = {"lora_name": "other", "lora_path": str(path)}
      body["load_inplace"] = True
      return serve_testing.ask(server, "/v1/load_lora_adapter", body)[0]

    assert change(paths["other"]) == 200
    alone = {key: complete(key) for key in expected}
    assert alone == expected
    assert len({alone[name, prompts[0]] for name in paths}) > 2
    keys = [*expected] * 8
    with concurrent.futures.ThreadPoolExecutor(17) as pool:
      texts = pool.map(complete, keys)
      statuses = [change(paths["other"]) for _ in range(10)]
      assert change(tmp_path / "gone") == 400
      assert [*texts] == [alone[key] for key in keys]
    assert set(statuses) == {200}
    (choice,) = serve_testing.complete(
      *(server,),
      model="other",
      prompt="one two",
      echo=True,
      logprobs=1,
      max_tokens=0,
    )["choices"]
    scored = runs.printed(
      *("score", "--model_dir", base, "--adapter", other, "--json"),
      *("--text", "one two"),
    )
    assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(
      scored[0]["log_likelihood"], abs=1e-4
    )
