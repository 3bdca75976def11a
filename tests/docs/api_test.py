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
NAMED = re.findall(r"`(palm_mtf\.\w+)`", PAGE.text)


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


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_every_package_that_the_page_names_imports(name):
  assert importlib.import_module(name)


def test_the_folder_of_gin_files_has_the_files_that_others_may_include():
  assert "`palm_mtf.gin_path()`" in PAGE.text
  assert (Path(palm_mtf.gin_path()) / "recipes" / "quickstart.gin").is_file()


def test_every_macro_but_model_dir_is_a_field_of_the_config_in_capitals():
  gin = Path(palm_mtf.gin_path())
  macros = {
    macro
    for path in gin.rglob("*.gin")
    if path.parent.name not in ("mesh_tensorflow",)
    for macro in re.findall(r"^([A-Z_]+) = ", path.read_text("utf-8"), re.M)
  }
  config = importlib.import_module("palm_mtf.config")
  fields = {
    field.upper()
    for settings in _public(config).values()
    for field in settings.__dataclass_fields__
  }
  assert macros - fields == {"MODEL_DIR"}
