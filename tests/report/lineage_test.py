# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture of a lineage: a box for each model, an arrow for each link."""

import itertools
import re
from xml.etree import ElementTree

from palm_mtf.report import page
from palm_mtf.report.lineage import render_lineage
from tests.checkpoints.lineage_test import link, save
from tests.report.conftest import log_line, write_model_dir

EVIL = "<script>\x1b\"'&"


def model(child, kind, name, state="found", changed=()):
  return {
    "child": child,
    "kind": kind,
    "path": f"/runs/{name}/checkpoints/step_00000004",
    "blake2b": "5eed" * 8,
    "state": state,
    "changed_settings": {x: [1, EVIL] for x in changed},
  }


# `chat` has two parents; so has the second, `tuned`.
MODELS = [
  model(None, None, "chat"),
  model(0, "finetuned", "a"),
  model(1, "continued", "b", "missing: [Errno 2]"),
  model(0, "adapted", "tuned", changed=["SEED", EVIL]),
  model(3, "finetuned", "c"),
  model(3, "distilled", EVIL),
]


def numbers(text):
  return [int(x) for x in re.findall(r"-?\d+", text)]


def test_arrows_join_the_boxes_of_parents_and_children_and_no_boxes_overlap():
  root = ElementTree.fromstring("".join(render_lineage(MODELS)))
  boxes = [
    [int(x.get(key)) for key in ("x", "y", "width", "height")]
    for x in root.iter("rect")
  ]
  assert len(boxes) == len(MODELS)
  for (x, y, width, height), (x2, y2, *_) in itertools.combinations(boxes, 2):
    assert abs(x - x2) > width or abs(y - y2) > height
  arrows = [numbers(x.get("d")) for x in root.iter("path")]
  parents = [i for i, x in enumerate(MODELS) if x["child"] is not None]
  for i, arrow in zip(parents, arrows, strict=True):
    x, y, width, height = boxes[i]
    assert arrow[:2] == [x + width, y + height // 2]
    x, y, width, height = boxes[MODELS[i]["child"]]
    assert arrow[6:8] == [x - 1, y + height // 2]
  dashed = [x.get("stroke-dasharray") is not None for x in root.iter("rect")]
  assert dashed == [x["state"] != "found" for x in MODELS]
  texts = [(x.text or "").strip() for x in root.iter("text")]
  assert [x["kind"] for x in MODELS[1:]] == [
    x for x in texts if x in {y["kind"] for y in MODELS}
  ]
  (changed,) = [x.text for x in root.iter("title") if "SEED" in x.text]
  assert changed.startswith("adapted\nSEED = ")


def test_the_report_of_a_run_with_a_parent_has_its_picture(
  tmp_path, monkeypatch
):
  from palm_mtf.cli.main import main

  monkeypatch.setattr(page, "render_image", lambda *_: "")  # takes seconds
  base = save(tmp_path / "base", origin={"kind": "initialised"})
  save(tmp_path / "run", origin=link("finetuned", base))
  for name, boxes in (("run", 2), ("base", 0)):
    run = write_model_dir(tmp_path / name, [log_line(1)])
    assert main(["report", str(run)]) == 0
    shown = (run / "report.html").read_text()
    assert shown.count("<rect") == boxes
    assert shown.count("<h2>Lineage</h2>") == bool(boxes)
