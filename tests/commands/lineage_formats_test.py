# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Events of OpenLineage and metadata of Croissant, by the standards' own rules.

openlineage/ has unchanged schemas of OpenLineage (spec/ at commit 8f02abfb,
Apache-2.0).
"""

import contextlib
import datetime
import hashlib
import io
import json
import pathlib
import shutil
import uuid

import jsonschema
import pytest
from referencing import Registry, Resource

from palm_mtf.cli.main import main
from palm_mtf.model_dir.lock import training_lock
from tests import runs
from tests.checkpoints.lineage_test import link, save

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
