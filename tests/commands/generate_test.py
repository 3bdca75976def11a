# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf generate` on a trained run: prompts, output and errors."""

import functools
import io
import json
import os
import shutil

import pytest

from tests.log_lines import without_stamps


@pytest.fixture
def generate(finished, palm_mtf):
  return functools.partial(palm_mtf, "generate", "--model_dir", finished)


def records(out):
  return [json.loads(line) for line in out.splitlines()]


def test_prompts_come_from_flags_or_a_file_and_give_the_same(
  generate, tmp_path
):
  prompts = ["one two", "7"]
  flags = [f"--prompt={prompt}" for prompt in prompts]
  code, out, _ = generate(*flags, "--json", "--gin.NUM_SAMPLES=2")
  assert code == 0
  found = records(out)
  assert [(x["prompt"], x["sample"]) for x in found] == [
    (prompt, sample) for prompt in prompts for sample in (0, 1)
  ]
  assert all(x["ended"] in ("eod", "length") for x in found)
  assert all(x["num_tokens"] <= 8 for x in found)
  file = tmp_path / "prompts.jsonl"
  file.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in prompts))
  _, again, _ = generate("--input", str(file), "--json", "--gin.NUM_SAMPLES=2")
  assert records(again) == found


def test_one_prompt_is_streamed_and_says_what_json_says(generate):
  _, out, _ = generate("--prompt=one two", "--json")
  (record,) = records(out)
  code, out, _ = generate("--prompt=one two")
  assert code == 0
  assert out == f"--- 'one two'\none two{record['continuation']}\n\n"


def test_a_prompt_that_ends_in_the_space_of_the_next_word_warns(generate):
  prompts = ["one two ", "one two", "one ", "one two\n"]
  code, out, err = generate(*(f"--prompt={x}" for x in prompts), "--json")
  assert code == 0 and len(records(out)) == len(prompts)
  dtype, *warnings = without_stamps(err).splitlines()
  assert dtype.startswith("palm_mtf: computing in float32")
  assert warnings == [
    f"palm_mtf: warning: --prompt: {prompt!r} ends in a space, which this "
    "vocabulary keeps at the start of the next word: leave it out, because "
    "otherwise no word may follow"
    for prompt in ("one two ", "one ")
  ]


def test_interactive_answers_line_by_line_and_survives_what_it_cannot_read(
  generate, monkeypatch
):
  typed = f"\ufeffone two\n{'three ' * 60}\n".encode() + b"caf\xe9\n7\n"
  stdin = io.TextIOWrapper(io.BytesIO(typed), encoding="ascii", errors="strict")
  monkeypatch.setattr("sys.stdin", stdin)
  monkeypatch.setattr("sys.__stdin__", stdin)  # the process's original stdin
  code, out, err = generate("--interactive")
  assert code == 0
  assert "--- 'one two'\none two" in out
  assert out.count("--- ") == 2
  assert "--- '7'\n7" in out
  _, how_to, long, byte, _ = err.splitlines()
  assert how_to == (
    "palm_mtf: type a text to continue; an empty line or Ctrl-D ends"
  )
  assert long.startswith("> > palm_mtf: ")
  assert "together more than SEQUENCE_LENGTH = 32" in long
  assert byte.endswith("byte 0xe9, which is not Unicode text; leave it out.")


@pytest.fixture
def chats(finished, tmp_path):
  """A run with a chat template that joins the lines of a conversation."""
  shutil.copytree(finished, tmp_path / "run")
  (tmp_path / "run" / "chat_template.jinja").write_text(
    "{% for x in messages %}{{ x.content }}\n{% endfor %}"
  )
  return tmp_path / "run"


@pytest.mark.peers
def test_a_chat_continues_the_whole_conversation(chats, palm_mtf, monkeypatch):
  flags = ["--model_dir", chats, "--gin.TEMPERATURE=0.0"]
  monkeypatch.setattr("sys.stdin", io.StringIO("one two\nsix\n\nnever\n"))
  code, out, err = palm_mtf("generate", *flags, "--chat")
  assert code == 0 and "> " not in err  # stdin is no terminal
  text, answers = "", []
  for line in ("one two", "six"):
    text += f"{line}\n"
    _, found, _ = palm_mtf("generate", *flags, f"--prompt={text}", "--json")
    answers.append(records(found)[0]["continuation"])
    text += f"{answers[-1]}\n"
  assert out == "".join(f"{x}\n" for x in answers)


@pytest.mark.peers
def test_a_message_that_is_too_long_is_left_out(chats, palm_mtf, monkeypatch):
  flags = ["--model_dir", chats, "--gin.TEMPERATURE=0.0", "--chat"]
  monkeypatch.setattr("sys.stdin", io.StringIO("three " * 60 + "\nseven"))
  code, out, err = palm_mtf("generate", *flags)
  assert code == 0
  assert "SEQUENCE_LENGTH less SAMPLE_TOKENS is 24: begin again" in err
  monkeypatch.setattr("sys.stdin", io.StringIO("seven"))
  assert palm_mtf("generate", *flags)[1] == out


def test_a_dash_is_no_flag_and_a_pipe_may_be_a_gin_file(fails, finished):
  line = fails("generate", "--model_dir=none", "--input", "-")
  assert line.startswith("--model_dir = 'none': there is no config.gin in it;")
  reading, writing = os.pipe()
  os.write(writing, b"TOP_P = 2\n")
  os.close(writing)
  flags = [f"--gin_file=/dev/fd/{reading}", "--prompt=one"]
  line = fails("generate", "--model_dir", finished, *flags)
  assert line.startswith("TOP_P = 2: give a number from 0.0 to ")
  assert line.endswith(f"(TOP_P is set in /dev/fd/{reading}:1)")
  os.close(reading)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--prompt="], "--prompt = '': is empty; there has to be a text"),
    (["--prompt=" + "one two " * 40], "tokens and SAMPLE_TOKENS = 8, together"),
    (["--prompt=a", "--input=b"], "--prompt and --input: give one of them."),
    (["--input=none.txt"], "--input = 'none.txt': No such file or directory"),
    (["--prompt=a", "--interactive"], "leave out --prompt and --input."),
    (["--prompt=a", "--chat"], "--chat: asks for prompts; leave out --prompt"),
    (["--chat", "--json"], "--chat: prints one answer as text; leave out"),
    (["--chat", "--gin.NUM_SAMPLES=2"], "set NUM_SAMPLES and NUM_BEAMS to 1"),
    (["--chat"], "chat_template.jinja: is missing next to the vocabulary"),
    (["--prompt=a", "--gin.SAMPLE_TOKENS=32"], "leaves no room for a prompt"),
    ([], "PROMPTS = []: give at least one text to continue, such as --prompt"),
    (["--promt=a"], 'unknown flag --promt (did you mean "--prompt"?)'),
  ],
)
def test_bad_input_is_one_line(finished, fails, flags, message):
  assert message in fails("generate", "--model_dir", finished, *flags)
