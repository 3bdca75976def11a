# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Damage to a checkpoint is found, named and passed over; others' refused."""

import hashlib
import json
import os
import pathlib

import pytest

from palm_mtf.checkpoints.manifest import (
  DamagedCheckpointError,
  check_same_model,
  find_checkpoints,
  newest_checkpoint,
  newest_whole,
  read_whole,
  shape_differences,
)
from palm_mtf.errors import UserError
from tests.checkpoint_files import SHAPES, manifest, steps_of, write


def flip_bit(path: pathlib.Path, place: int) -> None:
  content = bytearray(path.read_bytes())
  content[place] ^= 4
  path.write_bytes(content)


def test_newest_is_the_last_by_number_not_by_name(tmp_path):
  steps = [5, 99_999_999, 100_000_000]
  for step in reversed(steps):
    write(tmp_path, step)
  assert steps_of(tmp_path) == steps
  newest = newest_checkpoint(str(tmp_path), SHAPES)
  assert newest.manifest.step == 100_000_000


@pytest.mark.parametrize(
  "damage, reason",
  [
    (lambda d: (d / "weights.data").write_text("wei"), "has 3 of 7 bytes"),
    (lambda d: flip_bit(d / "weights.data", 3), "does not hold the bytes"),
    (lambda d: (d / "weights.data").unlink(), "weights.data: No such file"),
    (lambda d: (d / "manifest.json").unlink(), "manifest.json: No such file"),
    *[
      (
        lambda d, text=text: (d / "manifest.json").write_text(text),
        "manifest.json does not say what was written",
      )
      for text in ("", "{", "{}", "[]", '{"blake2b": null}')
    ],
  ],
)
def test_damaged_checkpoint_is_named_and_the_older_one_used(
  damage, reason, tmp_path, capsys
):
  write(tmp_path, 1)
  damaged = write(tmp_path, 2)
  damage(pathlib.Path(damaged.path))
  newest = newest_checkpoint(str(tmp_path), SHAPES)
  assert newest.manifest.step == 1
  said = capsys.readouterr().err
  assert f"DAMAGED checkpoint {damaged.path}: " in said
  assert reason in said


def test_any_flipped_bit_of_any_file_is_found(tmp_path):
  written = pathlib.Path(write(tmp_path, 2).path)
  for path in written.iterdir():
    content = path.read_bytes()
    for place in range(len(content)):
      if content[place : place + 1].isspace():
        continue  # between the numbers of a manifest: says nothing
      flip_bit(path, place)
      with pytest.raises(DamagedCheckpointError):
        read_whole(str(written))
      path.write_bytes(content)
  read_whole(str(written))


def test_without_any_whole_checkpoint_nothing_starts_anew(tmp_path, capsys):
  assert newest_whole(str(tmp_path)) is None
  for step in (1, 2):
    os.unlink(f"{write(tmp_path, step).path}/weights.data")
  with pytest.raises(UserError, match="none of its 2 checkpoints is whole"):
    newest_whole(str(tmp_path))
  assert capsys.readouterr().err.count("DAMAGED") == 2


def test_a_manifest_is_read_as_it_was_written_with_the_hashes_of_the_files(
  tmp_path,
):
  written = write(tmp_path, 7)
  (found,) = find_checkpoints(str(tmp_path))
  assert found == written == read_whole(written.path)
  assert found.manifest == manifest(7)
  assert found.num_bytes == 7
  content = json.loads(open(f"{found.path}/manifest.json").read())
  seal = content.pop("blake2b")
  text = json.dumps(content, sort_keys=True).encode()
  assert seal == hashlib.blake2b(text, digest_size=16).hexdigest()
  assert seal == found.blake2b
  digest = hashlib.blake2b(b"weights", digest_size=16).hexdigest()
  assert content["files"] == {"weights.data": [7, digest]}


def test_other_models_and_vocabularies_are_refused(tmp_path):
  checkpoint = write(tmp_path, 1)
  check_same_model(checkpoint, SHAPES, "f00d")
  with pytest.raises(UserError) as error:
    check_same_model(checkpoint, {**SHAPES, "embedding": (4, 3)})
  assert str(error.value) == (
    f"{checkpoint.path} has embedding [4, 2], the model wants [4, 3]: it is of "
    "another model; use the models/*.gin it was trained with, or another "
    "MODEL_DIR."
  )
  with pytest.raises(UserError, match="was trained with another vocabulary"):
    check_same_model(checkpoint, SHAPES, "beef")


def test_differences_are_the_first_three_and_how_many_more():
  held = {"a": (1,), "b": (2,), "c": (3,), "d": (4,)}
  wanted = {"a": (2,), "b": (2,), "e": (5,), "f": ()}
  assert shape_differences(held, held) == ""
  assert shape_differences(held, wanted) == (
    "a [1], the model wants [2]; e nothing, the model wants [5]; "
    "f nothing, the model wants []; and 2 more"
  )
