# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import importlib
import inspect
import re
from pathlib import Path

import pytest

import palm_mtf
from tests.doc_pages import Page

PAGE = Page("docs/api.md")
LISTED = re.findall(r"^::: ([\w.]+)$", PAGE.text, re.M)


def _public(module):
  """Returns what a module lists in __all__, or else defines itself."""
  names = getattr(module, "__all__", None) or [
    name
    for name, thing in vars(module).items()
    if getattr(thing, "__module__", None) == module.__name__
    and not name.startswith("_")
  ]
  return {name: getattr(module, name) for name in names}


@pytest.mark.parametrize("name", LISTED)
def test_every_name_on_the_page_imports_and_has_a_docstring(name):
  public = _public(importlib.import_module(name))
  assert public
  for thing in public.values():
    assert inspect.getdoc(thing), thing


def test_the_folder_of_gin_files_has_the_files_that_others_may_include():
  assert "`palm_mtf.gin_path()`" in PAGE.text
  assert (Path(palm_mtf.gin_path()) / "recipes" / "quickstart.gin").is_file()
