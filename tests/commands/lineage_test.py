# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf lineage` on runs that commands made, and the cards of exports.

openlineage/ has unchanged schemas of OpenLineage (spec/ at commit 8f02abfb,
Apache-2.0).
"""

import contextlib
import dataclasses
import datetime
import hashlib
import io
import json
import math
import os
import pathlib
import shutil
import uuid

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from palm_mtf.checkpoints.manifest import find_checkpoints, write_manifest
from palm_mtf.cli.main import main
from palm_mtf.export.trained_model import TrainedModel
from palm_mtf.model_dir.lock import training_lock
from tests import runs
from tests.checkpoints.lineage_test import link, save
from tests.export.read_gguf import read_gguf

TEXT = "one two three four five"
NAME = "my run \U0001f600\n---\nlicense: b"
FEW = {"TRAIN_STEPS": 4, "EVAL_STEPS": 4, "PROMPTS": []}
LORA = {"ADAPTER": "lora", "ADAPTER_RANK": 4, "ADAPTER_ALPHA": 8.0}


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
  """A folder with the run `finished` as `hf`, and `again`, its import."""
  folder = tmp_path_factory.mktemp("exported")
  run = shutil.copytree(finished, folder / NAME)
  results = run / "eval" / "step_00000012"
  results.mkdir(parents=True)
  content = {"step": 12, "task": "qa", "split": "test"}
  content["metrics"] = {"accuracy": 0.5, "sample": "text", "bleu": None}
  (results / "qa-test.json").write_text(json.dumps(content))
  (run / "eval" / "step_00000004").mkdir()
  (run / "eval" / "step_00000004" / "qa-test.json").write_text(
    json.dumps({**content, "step": 4})
  )
  hf = folder / "hf"
  assert main(["export", "--model_dir", str(run), "--output", str(hf)]) == 0
  assert main(["import", str(hf), "--output", str(folder / "again")]) == 0
  return folder


def find_newest(model_dir):
  return find_checkpoints(str(model_dir))[-1]


def rewrite(model_dir, **fields):
  """Writes the manifest of the newest checkpoint again, with other values."""
  checkpoint = find_newest(model_dir)
  manifest = dataclasses.replace(checkpoint.manifest, **fields)
  os.unlink(os.path.join(checkpoint.path, "manifest.json"))
  write_manifest(checkpoint.path, manifest)


def test_an_imported_export_leads_back_to_the_run(exported):
  (found,) = runs.printed("lineage", exported / "again", "--json")
  assert found["complete"]
  imported, source, run = found["models"]
  newest = find_newest(exported / NAME)
  assert (imported["kind"], imported["child"]) == (None, None)
  assert (source["kind"], source["child"]) == ("imported", 0)
  assert source["path"] == str(exported / "hf")
  assert (run["kind"], run["child"]) == ("exported", 1)
  assert (run["path"], run["blake2b"]) == (newest.path, newest.blake2b)
  assert run["initialised"]
  assert run["data"]["the tokens"] == newest.manifest.data["the tokens"]
  assert newest.manifest.origin == {"kind": "initialised"}


def read_front(folder):
  """Returns the front matter of a card, and the text below it."""
  before, front, text = (folder / "README.md").read_text().split("---\n")
  assert before == ""
  return yaml.safe_load(front), text


def test_the_card_has_the_hash_and_the_metrics_of_the_exported_step(exported):
  front, text = read_front(exported / "hf")
  newest = find_newest(exported / NAME)
  assert front["palm_mtf.blake2b"] == newest.blake2b
  assert front["palm_mtf.parents"] == [{"kind": "initialised"}]
  assert "base_model" not in front
  assert "base_model_relation" not in front
  (model,) = front["model-index"]
  assert model["name"] == NAME
  (result,) = model["results"]
  assert result["dataset"] == {"type": "qa", "name": "qa", "split": "test"}
  assert result["metrics"] == [{"type": "accuracy", "value": 0.5}]
  texts = newest.manifest.settings["TEXT_FILES"]
  texts = os.path.relpath(texts, exported)
  tokens = newest.manifest.data["the tokens"]
  assert text == (
    "# my run \U0001f600\\n---\\nlicense: b\n"
    f"palm_mtf trained 12 steps on `{texts}` "
    f"(hash of the tokens: `{tokens}`).\n"
  )


def test_no_file_of_an_export_has_a_path_of_this_machine(exported):
  files = [x for x in (exported / "hf").iterdir() if x.is_file()]
  assert len(files) >= 5
  assert not [x for x in files if bytes(exported.parent) in x.read_bytes()]


def test_a_format_that_names_no_base_takes_none(finished, palm_mtf, tmp_path):
  flags = ("--model_dir", finished, "--output", tmp_path / "a")
  code, _, error = palm_mtf("export", *flags, "--format=npz", "--base_model=a")
  assert code == 2
  assert "--base_model = 'a': --format=npz names no base" in error


@pytest.mark.parametrize(
  ("path", "published"),
  [
    (
      "/home/ann/runs/a/checkpoints/step_00000004",
      "a/checkpoints/step_00000004",
    ),
    ("/home/bob/b/checkpoints/step_00000004", "../b/checkpoints/step_00000004"),
    ("/home/bob/out/b.gguf", "b.gguf"),
    ("/home/ann/texts/*.txt", "*.txt"),
    ("/models/a", "a"),
    ("/root/.cache/huggingface/hub/models--o--a.b/snapshots/1", "o/a.b"),
    ("/c/models--gpt2/snapshots/1/model.gguf", "gpt2"),
  ],
)
def test_exports_name_no_home(path, published, monkeypatch):
  monkeypatch.setenv("HOME", "/home/bob")
  trained = TrainedModel(None, None, None, folder="/home/bob/out")
  assert trained.publish(path) == published


def test_the_score_is_that_of_score(exported, palm_mtf):
  run = exported / NAME
  flags = ("--score", TEXT, "--json")
  (found,) = runs.printed("lineage", run, *flags)
  (log_p,) = found["token_log_p"]
  (record,) = runs.printed(
    "score", "--model_dir", run, "--text", TEXT, "--json"
  )
  assert record["tokens"] == len(log_p) == len(found["tokens"])
  assert math.fsum(log_p) == pytest.approx(record["log_likelihood"], abs=1e-9)
  for text in ("", "\ud800"):
    code, _, error = palm_mtf("lineage", run, "--score", text)
    assert code == 2, error


def test_an_import_of_an_earlier_version_is_not_scored(exported, tmp_path):
  """Earlier versions did not record how texts begin in imported models."""
  run = shutil.copytree(exported / "again", tmp_path / "run")
  settings = dict(find_newest(run).manifest.settings)
  del settings["START_ID"]
  rewrite(run, settings=settings)
  (found,) = runs.printed("lineage", run, "--score", TEXT, "--json")
  assert found["token_log_p"][0] == "its manifest lacks settings of the model"


def test_a_gguf_file_names_the_checkpoint_and_the_base(finished, tmp_path):
  """The keys are those of llama.cpp's constants.py, general.base_model.*."""
  name = "models--an-org--a.model"
  source = tmp_path / name / "snapshots" / "1234"
  flags = ("--model_dir", str(finished), "--output")
  assert main(["export", *flags, str(source)]) == 0
  run = tmp_path / "run"
  assert main(["import", str(source), "--output", str(run)]) == 0
  path = tmp_path / "model.gguf"
  flags = ("--format=gguf", "--dtype=q8_0", "--output", str(path))
  assert main(["export", "--model_dir", str(run), *flags]) == 0
  metadata, newest = read_gguf(path).metadata, find_newest(run)
  assert metadata["general.base_model.count"] == 1
  assert metadata["general.base_model.0.name"] == "an-org/a.model"
  url = metadata["general.base_model.0.repo_url"]
  assert url == "https://huggingface.co/an-org/a.model"
  assert metadata["palm_mtf.kind"] == "quantized"
  assert metadata["palm_mtf.checkpoint"] == os.path.relpath(
    newest.path, tmp_path
  )
  assert metadata["palm_mtf.blake2b"] == newest.blake2b
  again = tmp_path / "again"
  assert main(["import", str(path), "--output", str(again)]) == 0
  (found,) = runs.printed("lineage", again, "--json")
  kinds = [x["kind"] for x in found["models"]]
  assert kinds == [None, "imported", "quantized", "imported", "exported"]
  front, _ = read_front(source)
  assert front["palm_mtf.kind"] == "exported"


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
  """Runs `base`, `tuned` and `adapted`; `hf`, merged; `again`, its import."""
  folder = tmp_path_factory.mktemp("chain")
  texts = runs.write_corpus(folder / "texts")
  other = runs.write_corpus(folder / "other")
  (other / "0.txt").write_text("ten nine eight seven " * 20)
  given = {**FEW, "VOCABULARY": str(folder / "base" / "vocabulary.model")}
  assert runs.run("train", texts, folder / "base", **FEW) == 0
  given["INIT_CHECKPOINT"] = str(folder / "base")
  assert runs.run("train", other, folder / "tuned", **given) == 0
  more = {**given, "TRAIN_STEPS": 6, "INIT_STATE": "all"}
  assert runs.run("train", other, folder / "continued", **more) == 0
  experts = {"MLP": "experts", "NUM_EXPERTS": 4, "EXPERTS_PER_TOKEN": 2}
  more = {**given, **experts, "D_EXPERT": 64, "INIT_EXPERTS": "copy"}
  assert runs.run("train", texts, folder / "upcycled", **more) == 0
  given["INIT_CHECKPOINT"] = str(folder / "tuned")
  assert runs.run("train", other, folder / "adapted", **given, **LORA) == 0
  more = {**given, **LORA, "INIT_CHECKPOINT": str(folder / "adapted")}
  # The checkpoint with the hash of the parent is removed, the hash stays.
  more |= {"KEEP_CHECKPOINTS": 1, "CHECKPOINT_STEPS": 2}
  assert runs.run("train", texts, folder / "adapted_twice", **more) == 0
  flags = ["--model_dir", str(folder / "adapted"), "--output"]
  assert main(["export", *flags, str(folder / "hf"), "--merge"]) == 0
  assert main(["export", *flags, str(folder / "peft")]) == 0
  hf, again = str(folder / "hf"), str(folder / "again")
  assert main(["import", hf, "--output", again]) == 0
  return folder


def trace(folder):
  """Returns (child, kind, name of the folder) of each model."""
  (found,) = runs.printed("lineage", folder, "--json")
  assert found["complete"]
  root = f"{folder.parent}/"
  return [
    (x["child"], x["kind"], x["path"].removeprefix(root).split("/")[0])
    for x in found["models"]
  ]


@pytest.mark.slow
def test_real_chains_have_every_step(chain):
  assert trace(chain / "again") == [
    (None, None, "again"),
    (0, "imported", "hf"),
    (1, "merged", "adapted"),
    (2, "adapted", "tuned"),
    (3, "finetuned", "base"),
  ]
  assert trace(chain / "continued")[1:] == [(0, "continued", "base")]
  assert trace(chain / "upcycled")[1:] == [(0, "upcycled", "base")]
  assert trace(chain / "adapted_twice")[1:] == [
    *((0, "finetuned", "adapted"), (1, "adapted", "tuned")),
    *((2, "finetuned", "base"), (0, "adapted", "tuned")),
  ]
  (found,) = runs.printed("lineage", chain / "adapted", "--json")
  changed = found["models"][1]["changed_settings"]
  assert changed["ADAPTER"] == ["none", "lora"]
  assert "the tokens" not in changed
  assert "the tokens" in found["models"][2]["changed_settings"]


@pytest.mark.slow
def test_scores_of_a_chain_are_those_of_score_and_errors_are_placed(
  chain, palm_mtf
):
  (found,) = runs.printed(
    "lineage", chain / "adapted", "--score", TEXT, "--json"
  )
  scores = found["token_log_p"]
  assert len(scores) == 3
  for name, log_p in zip(("adapted", "tuned", "base"), scores, strict=True):
    flags = ("--model_dir", chain / name, "--text", TEXT, "--json")
    (record,) = runs.printed("score", *flags)
    assert math.fsum(log_p) == pytest.approx(record["log_likelihood"], abs=1e-9)
  code, out, _ = palm_mtf("lineage", chain / "again", "--score", TEXT)
  assert code == 0
  table = out.partition("log likelihood")[2].splitlines()[1:]
  assert table[1].split(maxsplit=2)[2] == (
    f"{chain}/hf: no checkpoint of palm_mtf was found"
  )
  # A merged model is compared with its import, though files lie between them.
  places = [x for x in table if x.startswith("from ")]
  assert len(places) == 3
  assert places[0].startswith(f"from {chain}/adapted/")
  assert f" to {chain}/again/" in places[0]
  tokens, log_p = found["tokens"], scores[1]
  most = max(range(len(tokens)), key=lambda i: abs(scores[2][i] - log_p[i]))
  code, out, _ = palm_mtf("lineage", chain / "tuned", "--score", TEXT)
  last = out[out.index("\nfrom ") :].splitlines()[2]
  assert last == (
    f"  token {most} {tokens[most]!r}: {scores[2][most]:.4f} to "
    f"{log_p[most]:.4f}"
  )


@pytest.mark.slow
def test_a_model_of_another_vocabulary_is_not_scored(chain, tmp_path):
  run = shutil.copytree(chain / "tuned", tmp_path / "tuned")
  base = shutil.copytree(chain / "base", tmp_path / "base")
  rewrite(base, vocabulary_sha256="f00d")
  parent = find_newest(base)
  link = {"kind": "finetuned", "checkpoint": parent.path}
  rewrite(run, origin={**link, "blake2b": parent.blake2b})
  (found,) = runs.printed("lineage", run, "--score", TEXT, "--json")
  assert found["complete"]
  assert found["token_log_p"][1] == "has another vocabulary"


@pytest.mark.slow
def test_an_adapter_without_its_base_is_not_scored(chain, tmp_path, palm_mtf):
  run = shutil.copytree(chain / "adapted", tmp_path / "adapted")
  base = dict(find_newest(run).manifest.base)
  rewrite(run, base={**base, "checkpoint": "/nowhere"})
  code, out, _ = palm_mtf("lineage", run, "--score", TEXT, "--json")
  assert code == 1
  first, second = json.loads(out)["token_log_p"]
  assert "/nowhere" in first
  assert second == "no checkpoint of palm_mtf was found"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("folder", "relation"), [("hf", "finetune"), ("peft", "adapter")]
)
def test_cards_of_adapted_models_name_the_base(
  chain, folder, relation, tmp_path
):
  front, _ = read_front(chain / folder)
  base = find_newest(chain / "tuned")
  assert "base_model" not in front
  (parent,) = front["palm_mtf.parents"]
  assert parent["blake2b"] == base.blake2b
  assert parent["checkpoint"] == os.path.relpath(base.path, chain)
  is_adapter = relation == "adapter"
  output = tmp_path / "named"
  flags = ["--model_dir", str(chain / "adapted"), "--output", str(output)]
  flags += ["--base_model", "org/base"] + ["--merge"] * (not is_adapter)
  assert main(["export", *flags]) == 0
  front, _ = read_front(output)
  assert front["base_model"] == "org/base"
  assert front["base_model_relation"] == relation
  if is_adapter:
    config = json.loads((output / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
  assert front["library_name"] == ("peft" if is_adapter else "transformers")


@pytest.mark.peers
def test_the_hub_reads_the_card(exported):
  from huggingface_hub import ModelCard

  card = ModelCard.load(exported / "hf" / "README.md")
  assert card.data.model_name == NAME
  (result,) = card.data.eval_results
  assert (result.dataset_name, result.dataset_split) == ("qa", "test")
  assert (result.metric_type, result.metric_value) == ("accuracy", 0.5)
  assert card.data.library_name == "transformers"


SCHEMAS = [
  json.loads(x.read_text())
  for x in pathlib.Path(__file__).with_name("openlineage").iterdir()
]
REGISTRY = Registry().with_resources(
  (x["$id"], Resource.from_contents(x)) for x in SCHEMAS
)


def check(value, schema):
  """Raises an error unless `value` is of the schema with this URL."""
  jsonschema.Draft202012Validator(
    {"$ref": schema},
    registry=REGISTRY,
    format_checker=jsonschema.FormatChecker(),
  ).validate(value)


def events_of(run):
  found = runs.printed("lineage", run, "--format=openlineage")
  for event in found:
    check(event, event["schemaURL"])
    for facet in event["run"]["facets"].values():
      check(facet, facet["_schemaURL"])
    for dataset in event["inputs"] + event["outputs"]:
      ((name, facet),) = dataset["facets"].items()
      check({name: facet}, facet["_schemaURL"])
  return found


def versions(datasets):
  assert {x["namespace"] for x in datasets} == {"file"}
  return {x["name"]: x["facets"]["version"]["datasetVersion"] for x in datasets}


def sha256(path):
  return hashlib.sha256(path.read_bytes()).hexdigest()


def test_events_of_a_run_are_of_openlineages_schema(finished, corpus):
  start, end = events_of(finished)
  assert [x["eventType"] for x in (start, end)] == ["START", "COMPLETE"]
  times = [
    datetime.datetime.fromisoformat(x["eventTime"]) for x in (start, end)
  ]
  assert times[0] < times[1]
  assert start["run"] == end["run"]
  assert str(uuid.UUID(start["run"]["runId"])) == start["run"]["runId"]
  assert start["inputs"] == end["inputs"]
  texts = {str(x): f"sha256:{sha256(x)}" for x in corpus.glob("*.txt")}
  assert versions(end["inputs"]) == texts
  made = {
    str(x.parent): f"blake2b:{json.loads(x.read_text())['blake2b']}"
    for x in finished.glob("checkpoints/*/manifest.json")
  }
  assert versions(end["outputs"]) == made
  assert start["outputs"] == []
  with pytest.raises(jsonschema.ValidationError):
    check({**end, "run": {}}, end["schemaURL"])


def test_parents_are_inputs_and_a_run_that_stopped_is_aborted(tmp_path):
  base, teacher = save(tmp_path / "base"), save(tmp_path / "teacher")
  links = {"base": link("adapted", base), "teacher": link("distilled", teacher)}
  run = tmp_path / "run"
  save(run, settings={"TRAIN_STEPS": 5}, **links)
  for host in ("a.host", "b"):
    (run / f"events.out.tfevents.1796028402.943256.{host}").touch()
  start, end = events_of(run)
  assert versions(end["inputs"]) == {
    str(path): f"blake2b:{digest}" for path, digest in (base, teacher)
  }
  assert start["eventTime"] == "2026-11-30T08:46:42.943256+00:00"
  assert end["eventType"] == "ABORT"
  with training_lock(str(run)):
    assert events_of(run)[1]["eventType"] == "RUNNING"
  (run / "trainer.lock").touch()  # as a killed process leaves it
  assert events_of(run)[1]["eventType"] == "ABORT"
  assert (run / "trainer.lock").exists()  # reading a run changes nothing


def test_the_data_of_a_task_have_the_hash_of_the_tokens(tmp_path):
  save(tmp_path / "run", tokens="5eed", settings={"TASK": "a"}, origin=3)
  (dataset,) = events_of(tmp_path / "run")[1]["inputs"]
  assert (dataset["namespace"], dataset["name"]) == ("seqio", "a")
  assert dataset["facets"]["version"]["datasetVersion"] == "tokens:5eed"


def test_a_changed_file_is_refused(finished, corpus, tmp_path, capsys):
  run = shutil.copytree(finished, tmp_path / "run")
  path = corpus / "3.txt"
  known = {str(path): [0, 0, 0, 0, "another hash"]}
  (run / "tokens" / "digests.json").write_text(json.dumps(known))
  assert main(["lineage", str(run), "--format=croissant"]) == 2
  said = f"palm_mtf: {path}: changed after training; restore it.\n"
  assert capsys.readouterr().err == said


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--format=croissant"], "has no TEXT_FILES; give a run that has"),
    (["--format=openlineage", "--json"], "leave --score and --json out"),
    (["--format=croissant", "--score=a"], "leave --score and --json out"),
  ],
)
def test_what_has_no_such_format_is_one_line(flags, said, tmp_path, capsys):
  save(tmp_path / "run")
  assert main(["lineage", str(tmp_path / "run"), *flags]) == 2
  assert said in capsys.readouterr().err


def describe(run):
  """Returns Croissant's metadata of a run's data."""
  with contextlib.redirect_stdout(io.StringIO()) as stdout:
    assert main(["lineage", str(run), "--format=croissant"]) == 0
  return json.loads(stdout.getvalue())


def test_croissant_has_the_hash_of_each_file(finished, corpus, tmp_path):
  files = describe(finished)["distribution"]
  found = {x["contentUrl"]: x["sha256"] for x in files}
  assert found == {x.name: sha256(x) for x in corpus.glob("*.txt")}
  save(tmp_path / "run", settings={"TEXT_FILES": f"{corpus}/*.txt"})
  assert describe(tmp_path / "run")["distribution"] == files


@pytest.mark.peers
def test_mlcroissant_reads_the_documents(finished, corpus, tmp_path):
  mlcroissant = pytest.importorskip("mlcroissant")
  texts = shutil.copytree(corpus, tmp_path / "texts")
  described = texts / "croissant.json"
  described.write_text(json.dumps(describe(finished)))
  dataset = mlcroissant.Dataset(described)
  assert not dataset.metadata.ctx.issues.errors
  assert str(dataset.metadata.ctx.conforms_to).endswith("1_1")
  name = dataset.metadata.file_objects[3].content_url
  (record,) = dataset.records("documents-3")
  assert record == {"documents-3/content": (corpus / name).read_bytes()}
  # The same of JSON lines.
  rows = [{"text": "one two"}, {"text": "three \u00e9"}]
  (texts / "a.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in rows))
  settings = {"TEXT_FILES": f"{texts}/a.jsonl"}
  settings |= {"VOCABULARY": None, "VALIDATION_SHARE": 0.5}
  save(tmp_path / "run", settings=settings)
  described.write_text(json.dumps(describe(tmp_path / "run")))
  dataset = mlcroissant.Dataset(described)
  assert not dataset.metadata.ctx.issues.errors
  records = [x["documents-0/text"] for x in dataset.records("documents-0")]
  assert [x.decode() for x in records] == [x["text"] for x in rows]
  # The same of conversations.
  messages = [{"role": "user", "content": "a"}]
  messages.append({"role": "assistant", "content": "b"})
  (texts / "a.jsonl").write_text(json.dumps({"messages": messages}))
  described.write_text(json.dumps(describe(tmp_path / "run")))
  dataset = mlcroissant.Dataset(described)
  assert not dataset.metadata.ctx.issues.errors
  (record,) = dataset.records("documents-0")
  found = [[*x.values()] for x in record["documents-0/messages"]]
  assert found == [[b"user", b"a"], [b"assistant", b"b"]]


@pytest.mark.peers
def test_model_signing_notices_a_changed_byte(finished, tmp_path):
  pytest.importorskip("model_signing")
  import subprocess
  import sys

  from cryptography.hazmat.primitives import serialization
  from cryptography.hazmat.primitives.asymmetric import ec

  key = ec.generate_private_key(ec.SECP256R1())
  private, public = (tmp_path / x for x in ("key.pem", "public.pem"))
  private.write_bytes(
    key.private_bytes(
      serialization.Encoding.PEM,
      serialization.PrivateFormat.PKCS8,
      serialization.NoEncryption(),
    )
  )
  public.write_bytes(
    key.public_key().public_bytes(
      serialization.Encoding.PEM,
      serialization.PublicFormat.SubjectPublicKeyInfo,
    )
  )
  folder, signature = tmp_path / "folder", tmp_path / "folder.sig"
  flags = ["--model_dir", str(finished), "--output", str(folder)]
  assert main(["export", *flags]) == 0

  def call(*words):
    command = [sys.executable, "-m", "model_signing", *map(str, words)]
    return subprocess.run(command, capture_output=True).returncode

  signing = ("--private_key", private, "--signature", signature)
  assert call("sign", "key", folder, *signing) == 0
  verifying = ("--public_key", public, "--signature", signature)
  assert call("verify", "key", folder, *verifying) == 0
  weights = folder / "model.safetensors"
  content = bytearray(weights.read_bytes())
  content[-1] ^= 1
  weights.write_bytes(content)
  assert call("verify", "key", folder, *verifying) == 1
  content[-1] ^= 1
  weights.write_bytes(content)
  (folder / "more.txt").touch()
  assert call("verify", "key", folder, *verifying) == 1
