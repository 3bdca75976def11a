# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of a kept graph are those of the graph that was built.

docs/decoding.md: a second `generate` imports no Python package of TensorFlow.
"""

import dataclasses
import io
import shutil
import signal
from pathlib import Path

import pytest

import palm_mtf
from palm_mtf.cli.main import main
from palm_mtf.config import DecodeConfig
from palm_mtf.generation.decode.prompt_batch import PromptBatch
from palm_mtf.generation.inference import keep_programs, kept_decoder
from palm_mtf.machine.cache_folder import cache_path, write_cached
from palm_mtf.native.operations import operations
from tests import processes

pytestmark = pytest.mark.skipif(
  not operations(), reason="graphs are kept only with the C++ operations"
)
SHORT, LONG = "one two", "one two three four five six seven"
SETTINGS = {
  "samples": ["--gin.NUM_SAMPLES=3", "--gin.TEMPERATURE=1.5"],
  "int8": ['--gin.WEIGHT_DTYPE="int8"', "--gin.REPETITION_PENALTY=1.3"],
}


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
  """The folder of kept graphs, empty; the C++ operations are compiled."""
  compiled = Path(cache_path("native")).parent
  here = tmp_path / "cache" / "palm_mtf"
  here.mkdir(0o700, parents=True)
  shutil.copytree(compiled, here / "native")
  monkeypatch.setenv("XDG_CACHE_HOME", str(here.parent))
  return here / "texts"


@pytest.fixture
def generate(finished, capsys):
  """Runs the command in this process; returns what it prints."""

  def run(*arguments):
    code = main(["generate", f"--model_dir={finished}", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out

  return run


def without_package(finished, *arguments, **keywords):
  """Runs the command in a process that may not import the package."""
  code = (
    "import sys; sys.modules['tensorflow.python'] = None;"
    "from palm_mtf.cli.main import main; sys.exit(main(sys.argv[1:]))"
  )
  command = ["generate", f"--model_dir={finished}", *arguments]
  done = processes.python("-c", code, *command, **keywords)
  assert done.returncode == 0, done.stderr
  return done


@pytest.mark.parametrize(
  "name", ["samples", pytest.param("int8", marks=pytest.mark.slow)]
)
def test_a_second_process_prints_the_same_without_the_package(
  finished, generate, kept, name
):
  arguments = [f"--prompt={SHORT}", "--prompt=7", "--json", *SETTINGS[name]]
  first = generate(*arguments)
  assert len([*kept.iterdir()]) == 1
  done = without_package(finished, *arguments)
  assert done.stdout == first
  assert "oneDNN" not in done.stderr


def test_prompts_of_two_sizes_share_the_weights_of_one_session(
  finished, generate, kept
):
  apart = [generate(f"--prompt={x}") for x in (SHORT, LONG)]
  assert len([*kept.iterdir()]) == 2
  typed = f"{SHORT}\n{LONG}\n{SHORT}\n"
  done = without_package(finished, "--interactive", input=typed, stdin=None)
  assert done.stdout == "".join([*apart, apart[0]])


def test_a_size_that_is_not_kept_is_built_and_then_kept(
  generate, kept, monkeypatch
):
  first = generate(f"--prompt={SHORT}")
  typed = f"{SHORT}\n{LONG}\n{SHORT}\n".encode()
  stdin = io.TextIOWrapper(io.BytesIO(typed))
  monkeypatch.setattr("sys.stdin", stdin)
  found = generate("--interactive")
  assert len([*kept.iterdir()]) == 2
  assert found == "".join([first, generate(f"--prompt={LONG}"), first])


def test_a_damaged_graph_is_built_again(generate, kept):
  first = generate(f"--prompt={SHORT}")
  (path,) = kept.iterdir()
  content = path.read_bytes()
  middle = len(content) // 2
  flipped = bytes([content[middle] ^ 1])
  for damaged in (
    content[:-5],
    b"",
    content[:middle] + flipped + content[middle + 1 :],
  ):
    path.write_bytes(damaged)
    assert kept_decoder.read_kept(str(path)) is None
    assert not path.exists()
  path.write_bytes(damaged)
  assert generate(f"--prompt={SHORT}") == first
  assert kept_decoder.read_kept(str(path))


def test_a_graph_is_found_only_with_all_it_depends_on(tmp_path, monkeypatch):
  decode, sizes = DecodeConfig(), PromptBatch(1, 8, 4, 100, (0,))

  def find(*settings):
    code = kept_decoder.hash_code()
    return kept_decoder.kept_path("texts", code, *settings)

  paths = [
    find(decode, sizes),
    find(decode, dataclasses.replace(sizes, max_tokens=5)),
    find(DecodeConfig(temperature=0.5), sizes),
  ]
  assert paths[0] == find(DecodeConfig(), sizes)
  # executors/host/products.py: a choice that is measured again may differ, and
  # `serve` and `score` then multiply by the new one.
  for measured in (b"vectors", b"oneDNN"):
    write_cached(cache_path("products"), measured)
    paths.append(find(decode, sizes))
  monkeypatch.setattr(kept_decoder, "usable_cores", lambda: 77)
  paths.append(find(decode, sizes))
  code = tmp_path / "palm_mtf"
  code.mkdir()
  monkeypatch.setattr(palm_mtf, "__file__", str(code / "__init__.py"))
  for text in ("x = 1", "x = 2"):
    (code / "model.py").write_text(text)
    paths.append(find(decode, sizes))
  (code / "model.py").rename(code / "other.py")
  paths.append(find(decode, sizes))
  assert len({*paths}) == len(paths)
  (code / ".#model.py").symlink_to("user@host.1")  # an editor's lock
  assert kept_decoder.hash_code() is None


def test_old_code_does_not_keep_a_graph_as_that_of_a_new_version(
  generate, kept, monkeypatch
):
  first = generate(f"--prompt={SHORT}")
  shutil.rmtree(kept)
  codes = iter(["of the start", "of the end"])
  monkeypatch.setattr(kept_decoder, "hash_code", lambda: next(codes))
  assert generate(f"--prompt={SHORT}") == first
  assert not kept.exists()


def test_that_a_graph_needs_the_package_is_found_out_once(
  generate, kept, monkeypatch
):
  monkeypatch.setattr(keep_programs, "_NEEDS_PACKAGE", {"PalmTextSteps"})
  first = generate(f"--prompt={SHORT}")
  (path,) = kept.iterdir()
  assert kept_decoder.read_kept(str(path)) == ({}, b"")
  monkeypatch.setattr(keep_programs, "keep", None)
  assert generate(f"--prompt={SHORT}") == first


def test_without_its_weights_a_kept_text_is_built_and_kept_again(
  finished, generate, kept
):
  first = generate(f"--prompt={SHORT}")
  (path,) = (kept.parent / "weights").iterdir()
  path.write_bytes(path.read_bytes()[:-1])
  assert generate(f"--prompt={SHORT}") == first
  done = without_package(finished, f"--prompt={SHORT}")
  assert done.stdout == first


def test_beam_searches_are_not_kept(generate, kept):
  # XLA compiles steps of a beam search.
  generate(f"--prompt={SHORT}", "--gin.NUM_BEAMS=2", "--gin.SAMPLE_TOKENS=2")
  assert not kept.exists()


def test_ctrl_c_does_not_wait_for_the_compiler(
  finished, kept, tmp_path, monkeypatch
):
  shutil.rmtree(kept.parent / "native")
  compiler, begun = tmp_path / "compiler", tmp_path / "begun"
  compiler.write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep 600\n")
  compiler.chmod(0o755)
  monkeypatch.setenv("CXX", str(compiler))
  command = ["generate", f"--model_dir={finished}", f"--prompt={SHORT}"]
  process = processes.start("-m", "palm_mtf", *command)
  processes.wait_until(begun.exists, process)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 130
  assert err.endswith("palm_mtf: interrupted\n")
