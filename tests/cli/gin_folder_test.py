# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Gin files are found from a checkout, a wheel and the current folder."""

import pytest

from palm_mtf.cli.gin_folder import (
  find_gin_file,
  find_include,
  gin_folder,
  read_header,
  shorten_path,
)
from tests.refusals import message_of

pytestmark = pytest.mark.usefixtures("here")

LOOKED = " Looked in the current folder and the package's gin folder."


def test_only_plain_gins_name_of_our_file_finds_it_before_one_that_is_here(
  here,
):
  shipped = gin_folder() / "layouts" / "single.gin"
  assert find_gin_file("layouts/single.gin") == shipped
  (here / "layouts").mkdir()
  (here / "layouts" / "single.gin").touch()
  assert find_gin_file("layouts/single.gin") == here / "layouts/single.gin"
  name = "palm_mtf/gin/layouts/single.gin"
  assert find_gin_file(name) == shipped
  assert find_include(name, here / "mine.gin", 1) == shipped
  said = message_of(find_gin_file, "palm_mtf/gin/layouts/singel.gin")
  assert 'mean "layouts/single.gin"' in said


def test_an_absolute_path_and_a_home_path_are_found(here, monkeypatch):
  (here / "mine.gin").touch()
  monkeypatch.setenv("HOME", str(here))
  assert find_gin_file(str(here / "mine.gin")) == here / "mine.gin"
  assert find_gin_file("~/mine.gin") == here / "mine.gin"


def test_an_include_is_searched_in_the_including_folder_first(here):
  theirs = here / "project"
  (theirs / "layouts").mkdir(parents=True)
  (here / "own").mkdir()
  (here / "own" / "late.gin").touch()
  including = theirs / "main.gin"
  name = "layouts/single.gin"
  assert find_include(name, including, 1) == gin_folder() / name
  (theirs / name).touch()
  assert find_include(name, including, 1) == theirs / name
  assert find_include("own/late.gin", including, 1) == here / "own/late.gin"


@pytest.mark.parametrize(
  ("name", "nearest"),
  [
    ("recipes/quickstrt.gin", ' (did you mean "recipes/quickstart.gin"?)'),
    ("recipes/quickstart", ' (did you mean "recipes/quickstart.gin"?)'),
    ("palm_540.gin", ' (did you mean "recipes/palm_540b.gin"?)'),
    ("sub/mine.gn", ' (did you mean "sub/mine.gin"?)'),
    ("zzz", ""),
  ],
)
def test_a_missing_file_names_the_nearest_one(here, name, nearest):
  (here / "sub").mkdir()
  (here / "sub" / "mine.gin").touch()
  assert message_of(find_gin_file, name) == (
    f"--gin_file={name}: no such file{nearest}.{LOOKED}"
  )


def test_a_folder_is_not_a_gin_file():
  said = "--gin_file=recipes: a folder; name a gin file in it."
  assert message_of(find_gin_file, "recipes") == said


def test_a_path_is_shown_as_short_as_it_can_be(here):
  assert (
    shorten_path(gin_folder() / "defaults" / "train.gin")
    == "defaults/train.gin"
  )
  assert shorten_path(here / "a" / "b.gin") == "a/b.gin"
  assert shorten_path(here.parent / "b.gin") == str(here.parent / "b.gin")


def test_the_header_is_the_comment_at_the_top(here):
  (here / "a.gin").write_text("# One.\n#\n#   two\nA = 1\n# not this\n")
  assert read_header(here / "a.gin") == ["One.", "", "  two"]
