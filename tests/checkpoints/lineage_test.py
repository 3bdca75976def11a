# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chains of checkpoints without tensors: what is found, missing and changed."""

import dataclasses
import hashlib
import json
import shutil

import pytest

from palm_mtf.checkpoints import lineage
from palm_mtf.checkpoints.lineage import hash_source, trace
from palm_mtf.checkpoints.manifest import write_manifest
from palm_mtf.checkpoints.named_weights import find_weights
from tests.checkpoint_files import manifest
from tests.refusals import message_of


def save(model_dir, step=4, tokens="a", **fields):
  """Writes a checkpoint; returns its folder and the hash in its manifest."""
  folder = model_dir / "checkpoints" / f"step_{step:08d}"
  folder.mkdir(parents=True)
  (folder / "weights.data").write_text(f"{model_dir.name} {step}")
  data = {"SEED": 0, "the tokens": tokens}
  values = {"data": data, **fields}
  write_manifest(str(folder), dataclasses.replace(manifest(step), **values))
  content = json.loads((folder / "manifest.json").read_text())
  return folder, content["blake2b"]


def link(kind, saved):
  path, digest = saved
  return {"kind": kind, "checkpoint": str(path), "blake2b": digest}


def draw(path):
  """Returns (child, kind, name of the run, state) of each model."""
  found = [record for record, _ in trace(str(path))]
  return [
    (x["child"], x["kind"], x["path"].split("/checkpoints")[0], x["state"])
    for x in found
  ]


@pytest.fixture
def chain(tmp_path):
  """Runs: `chat` adapts `tuned`, which began as `base`."""
  base = save(tmp_path / "base", origin={"kind": "initialised"})
  settings = {"SEED": 1, "PROMPTS": ["a"]}
  tuned = save(
    tmp_path / "tuned",
    tokens="b",
    settings=settings,
    origin=link("finetuned", base),
  )
  save(tmp_path / "chat", base=link("adapted", tuned))
  return tmp_path


def test_a_chain_goes_from_run_to_run_with_what_differs(chain):
  places = [str(chain / name) for name in ("chat", "tuned", "base")]
  assert draw(chain / "chat") == [
    (None, None, places[0], "found"),
    (0, "adapted", places[1], "found"),
    (1, "finetuned", places[2], "found"),
  ]
  _, _, (record, weights) = trace(str(chain / "chat"))
  assert record["changed_settings"] == {
    "SEED": [0, 1],
    "the tokens": ["a", "b"],
  }
  assert record["step"] == 4
  assert weights.checkpoint.blake2b == record["blake2b"]


def test_two_parents_are_both_followed_and_their_own_parent_once(tmp_path):
  base = save(tmp_path / "base", origin={"kind": "initialised"})
  one = save(tmp_path / "one", origin=link("finetuned", base))
  two = save(tmp_path / "two", origin=link("continued", one))
  save(tmp_path / "last", origin=link("finetuned", two), base=link("a", one))
  assert [(child, kind) for child, kind, _, _ in draw(tmp_path / "last")] == [
    *((None, None), (0, "finetuned"), (1, "continued"), (2, "finetuned")),
    (0, "a"),
  ]


def test_a_missing_ancestor_and_a_changed_bit_are_named_and_exit_with_one(
  chain, capsys
):
  from palm_mtf.cli.main import main

  assert main(["lineage", str(chain / "chat")]) == 0
  capsys.readouterr()
  weights = chain / "base/checkpoints/step_00000004/weights.data"
  weights.write_text("Base 4")  # of the same size
  *_, (_, _, _, state) = draw(chain / "chat")
  assert state.startswith("changed: ")
  assert state.endswith(
    "weights.data does not hold the bytes that were written; give another."
  )
  assert main(["lineage", str(chain / "chat"), "--json"]) == 1
  found = json.loads(capsys.readouterr().out)
  assert not found["complete"]
  assert [x["state"] for x in found["models"]][:2] == ["found", "found"]
  shutil.rmtree(chain / "tuned")
  assert main(["lineage", str(chain / "chat")]) == 1
  *_, parent, advice = capsys.readouterr().out.splitlines()
  assert parent.endswith("  missing")
  assert advice.startswith("1 of 2 models are missing or changed; move a")


def test_an_ancestor_that_was_trained_again_has_changed(chain):
  shutil.rmtree(chain / "base")
  _, digest = save(chain / "base", tokens="c")
  *_, (_, _, _, state) = draw(chain / "chat")
  assert state == f"changed: has the hash {digest}"


def test_files_of_other_software_have_a_hash_of_what_decides_log_p(tmp_path):
  (tmp_path / "model.safetensors").write_bytes(b"weights")
  (tmp_path / "config.json").write_bytes(b"{}")
  parts = [
    name.encode()
    + b"\0"
    + hashlib.blake2b(content, digest_size=16).hexdigest().encode()
    + b"\0"
    for name, content in (
      ("config.json", b"{}"),
      ("model.safetensors", b"weights"),
    )
  ]
  expected = hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
  assert hash_source(str(tmp_path)) == expected
  (tmp_path / "README.md").write_text("a card")
  assert hash_source(str(tmp_path)) == expected
  run = tmp_path / "run"
  origin = link("imported", (tmp_path, expected))
  before = link("exported", save(tmp_path / "before"))
  save(run, step=0, origin={**origin, "origin": before})
  assert [state for *_, state in draw(run)] == ["found"] * 3
  (tmp_path / "config.json").write_bytes(b"[]")
  assert [kind for _, kind, _, _ in draw(run)] == [None, "imported", "exported"]
  assert draw(run)[1][3].startswith("changed: has the hash")


@pytest.mark.parametrize(
  "path", ["a\0b", "a" * 100_000, "\x1b]0;title\x07\nb", "\ud800", "/dev/zero"]
)
@pytest.mark.parametrize("kind", ["imported", "finetuned"])
def test_a_strange_path_is_missing_or_changed_in_one_line(
  path, kind, tmp_path, capsys
):
  from palm_mtf.cli.main import main

  save(tmp_path / "run", origin=link(kind, (path, "0")))
  assert main(["lineage", str(tmp_path / "run")]) == 1
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 5  # the run, its data, the kind, the path, the advice
  assert all(x.isprintable() for x in lines)
  assert max(map(len, lines)) < 5000


@pytest.mark.parametrize("target", ["nowhere", "parent"])
def test_a_link_to_nothing_or_to_itself_is_missing(target, tmp_path):
  (tmp_path / "parent").symlink_to(tmp_path / target)
  save(tmp_path / "run", origin=link("finetuned", (tmp_path / "parent", "0")))
  assert draw(tmp_path / "run")[1][3] == "missing"


def test_a_checkpoint_that_its_run_removes_meanwhile_is_missing(
  chain, monkeypatch
):
  def remove_then_find(setting, path):
    if setting != "MODEL_DIR":
      shutil.rmtree(path)
    return find_weights(setting, path)

  monkeypatch.setattr(lineage, "find_weights", remove_then_find)
  (_, _, _, first), (_, _, _, second) = draw(chain / "chat")
  assert first == "found"
  assert second.startswith("missing: ")


@pytest.mark.parametrize(
  ("settings", "said"),
  [({"VOCABULARY": 3}, "VOCABULARY = 3"), ({"EXTRA_IDS": "a"}, "EXTRA_IDS")],
)
def test_a_vocabulary_of_a_wrong_type_is_one_line(
  settings, said, tmp_path, capsys
):
  from palm_mtf.cli.main import main

  save(tmp_path / "run", settings=settings)
  assert main(["lineage", str(tmp_path / "run"), "--score", "a"]) == 2
  assert capsys.readouterr().err.startswith(f"palm_mtf: {said}")


@pytest.mark.parametrize(
  "fields",
  [
    {"origin": 3},
    {"origin": {"kind": "finetuned"}},
    {"base": {"kind": "adapted", "checkpoint": 3, "blake2b": "0"}},
    {"origin": {"kind": [], "checkpoint": "a", "blake2b": "0"}},
    {"settings": 3},
    {"data": ["a"]},
  ],
)
def test_values_of_wrong_types_are_one_line(fields, tmp_path):
  save(tmp_path / "run", **fields)
  said = message_of(lambda: [*trace(str(tmp_path / "run"))])
  assert said.startswith(f"'{tmp_path}/run")
  assert (
    ": its manifest, or that of a parent, has values of wrong types" in said
  )


def test_a_circle_of_manifests_ends(tmp_path):
  """Hashes exclude circles; a link with another hash is not followed."""
  path, digest = save(tmp_path / "run")
  shutil.rmtree(path)
  save(tmp_path / "run", origin=link("finetuned", (path, digest)))
  (_, _, _, first), (_, _, _, second) = draw(tmp_path / "run")
  assert first == "found"
  assert second.startswith("changed: has the hash")
