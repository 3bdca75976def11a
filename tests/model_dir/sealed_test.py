# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A hash in a JSON file finds every change of it."""

import hashlib
import json

import pytest

from palm_mtf.model_dir.sealed import hash_file, read_sealed, sealed

CONTENT = {"b": [1, 2], "a": {"x": 0.5}, "tuple": (3, 4)}


def test_what_is_sealed_is_read_with_its_hash(tmp_path):
  path = tmp_path / "x.json"
  path.write_text(json.dumps(sealed(CONTENT, "seal")))
  content, digest = read_sealed(str(path), "seal")
  assert content == {**CONTENT, "tuple": [3, 4]}
  text = json.dumps(content, sort_keys=True).encode()
  assert digest == hashlib.blake2b(text, digest_size=16).hexdigest()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seal": null}'])
def test_what_was_never_sealed_is_refused(tmp_path, text):
  path = tmp_path / "x.json"
  path.write_text(text)
  with pytest.raises(ValueError):
    read_sealed(str(path), "seal")


def test_every_changed_character_of_a_value_is_found(tmp_path):
  path = tmp_path / "x.json"
  text = json.dumps(sealed({"numbers": [123, 456]}, "seal"))
  for place, old in enumerate(text):
    if old.isalnum():
      new = text[:place] + ("1" if old != "1" else "2") + text[place + 1 :]
      path.write_text(new)
      with pytest.raises(ValueError):
        read_sealed(str(path), "seal")


def test_a_file_is_hashed_by_its_bytes(tmp_path):
  path = tmp_path / "x"
  path.write_bytes(b"bytes" * 1000)
  expected = hashlib.blake2b(b"bytes" * 1000, digest_size=16).hexdigest()
  assert hash_file(str(path)) == expected
