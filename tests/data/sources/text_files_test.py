# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import bz2
import functools
import gzip
import json
import lzma
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.sources.document import Document
from palm_mtf.data.sources.files import FileDigests, find_files
from palm_mtf.data.sources.text_files import (
  MACROS,
  Fields,
  Settings,
  TextFiles,
  read_jsonl_texts,
)
from palm_mtf.errors import UserError
from tests.data.processes import peak_memory
from tests.data.small_sources import repeatable
from tests.log_lines import without_stamps
from tests.refusals import message_of

TEXT = Fields("text")


def source_of(folder, share=0.5, fields=TEXT, **settings) -> TextFiles:
  return TextFiles(f"{folder}/**/*", fields, validation_share=share, **settings)


def documents_of(source) -> list[Document]:
  return [document for _, document in source.documents()]


def held_out(source) -> set[str]:
  return {d.text for split, d in source.documents() if split == "validation"}


def write_lines(path, *lines: dict) -> None:
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_is_no_text_is_left_out_counted_and_named(tmp_path, capsys):
  for name, content in enumerate((b"caf\xe9", b"nul\0", b"text", b"")):
    (tmp_path / f"{name}").write_bytes(content)
  texts = ["one", "", "nul\0", "half \ud83d"]
  write_lines(tmp_path / "e.jsonl", *({"text": text} for text in texts))
  source = source_of(tmp_path)
  assert [d.text for d in documents_of(source)] == ["text", "one"]
  source.report_skipped()
  assert without_stamps(capsys.readouterr().err) == (
    "palm_mtf: warning: 2 of 5 files left out (not UTF-8, or with NUL bytes, "
    f"such as {tmp_path}/0).\n"
    "palm_mtf: warning: 2 JSON lines left out (text with a NUL or half a "
    f"surrogate pair, such as {tmp_path}/e.jsonl, line 3).\n"
  )


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("z", b'{"text": "one"}\n', r"z: begins with a line of JSON"),
    ("z.jsonl", b"plain text\n", r"z\.jsonl, line 1: not JSON"),
    ("z.jsonl", b'{"body": "one"}\n', r"line 1: no field 'text'"),
    ("z.gz", b"plain text\n", r"z\.gz: damaged or cut short"),
  ],
)
def test_a_file_that_does_not_fit_its_name_is_refused_before_any_is_read(
  tmp_path, name, content, message
):
  (tmp_path / "a").write_bytes(b"text")
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=message):
    next(source_of(tmp_path).documents())


def test_a_glob_of_texts_makes_its_files_texts_whatever_others_say(tmp_path):
  (tmp_path / "a.json").write_text('{"one":\n1}')
  (tmp_path / "b").write_text('{"two": 2}')
  (tmp_path / "c.jsonl").write_text('{"text": "three"}')
  globs = f"{tmp_path}/c*", f"text:{tmp_path}/[ab]*", f"{tmp_path}/b"
  for each in (globs, globs[::-1]):
    source = TextFiles(each, TEXT, validation_share=0.5)
    texts = [d.text for d in documents_of(source)]
    assert texts == ['{"one":\n1}', '{"two": 2}', "three"]
  with pytest.raises(UserError, match=r"^TEXT_FILES = 'text:.*matches no file"):
    TextFiles(f"text:{tmp_path}/d", TEXT, validation_share=0.5)


def test_a_corpus_without_any_text_is_an_error(tmp_path):
  (tmp_path / "a").write_bytes(b"caf\xe9")
  said = message_of(documents_of, source_of(tmp_path))
  assert "none of 1 files is text " in said and f"such as {tmp_path}/a" in said


def test_the_split_depends_on_texts_alone_and_equal_ones_are_on_one_side(
  tmp_path,
):
  texts = [f"document {i}" for i in range(50)]
  found = []
  for folder, order in (("one", texts), ("two", [*texts[::-1], *texts])):
    (tmp_path / folder).mkdir()
    for i, text in enumerate(order):
      (tmp_path / folder / f"{i:02d}").write_text(text)
    source = source_of(tmp_path / folder)
    training = {d.text for split, d in source.documents() if split == "train"}
    assert training | held_out(source) == set(texts)
    assert not training & held_out(source)
    found.append(held_out(source))
  assert found[0] == found[1]


def test_a_larger_share_only_adds_documents(tmp_path):
  lines = [{"text": f"document {i}"} for i in range(400)]
  write_lines(tmp_path / "a.jsonl", *lines)
  shares = (0.05, 0.2, 0.5)
  splits = [held_out(source_of(tmp_path, share)) for share in shares]
  assert set() < splits[0] < splits[1] < splits[2]


def test_one_document_is_in_memory_at_a_time(tmp_path):
  for i in range(20):
    (tmp_path / f"{i}").write_bytes(b"x" * 1_000_000)
  source = source_of(tmp_path)

  def read():
    assert sum(d.num_bytes for _, d in source.documents()) == 20_000_000

  assert peak_memory(read) < 6_000_000


def test_a_json_line_is_a_document_with_its_weight(tmp_path):
  write_lines(
    tmp_path / "a.jsonl",
    {"body": "one", "times": 2, "text": "not this"},
    {"body": "two\n", "times": 0.5},
  )
  source = source_of(tmp_path, fields=Fields("body", "times"))
  assert documents_of(source) == [
    Document("one", weight=2.0),
    Document("two\n", weight=0.5),
  ]
  weightless = source_of(tmp_path, fields=Fields("body"))
  assert [d.weight for d in documents_of(weightless)] == [1.0, 1.0]


def test_a_quality_is_not_asked_of_a_file_without_lines(tmp_path):
  write_lines(tmp_path / "a.jsonl", {"text": "one", "q": 0.5})
  (tmp_path / "b.txt").write_text("two")
  fields = Fields("text", quality="q")
  assert message_of(source_of, tmp_path, fields=fields) == (
    f"QUALITY_FIELD = 'q': {tmp_path}/b.txt has no fields; give only .jsonl "
    "files, or set it to None."
  )


@pytest.mark.parametrize("packed", [False, True])
def test_text_and_json_lines_mix_and_are_read_compressed_as_plain(
  tmp_path, packed
):
  (tmp_path / "a.txt").write_text("text")
  write_lines(tmp_path / "b.jsonl", {"text": "one"}, {"text": "two"})
  (tmp_path / "c.py").write_text("print()")
  compressions = (".gz", gzip), (".bz2", bz2), (".xz", lzma)
  for path, (suffix, module) in zip(
    sorted(tmp_path.iterdir()) if packed else [], compressions, strict=False
  ):
    content = module.compress(path.read_bytes())
    path.with_name(path.name + suffix).write_bytes(content)
    path.unlink()
  source = source_of(tmp_path)
  texts = [d.text for d in documents_of(source)]
  assert texts == ["text", "one", "two", "print()"]
  assert source.num_bytes == (None if packed else 4 + 2 * 16 + 7)


def test_messages_call_the_settings_as_the_user_does(tmp_path):
  write_lines(tmp_path / "a.jsonl", {"txt": 1})
  settings = Settings("books.files", "books.text_field", "books.weight_field")
  said = message_of(documents_of, source_of(tmp_path, settings=settings))
  assert said.startswith(f"books.files: {tmp_path}/a.jsonl, line 1:")
  assert "set books.text_field," in said
  said = message_of(source_of, tmp_path / "none", settings=settings)
  assert said.startswith(f"books.files = '{tmp_path}/none/")


@pytest.fixture
def corpus(tmp_path):
  folder = tmp_path / "corpus"
  folder.mkdir()
  (folder / "a.txt").write_text("text")
  write_lines(folder / "b.jsonl", {"text": "one", "weight": 2})
  return folder


def test_fingerprint_is_that_of_the_contents_wherever_they_lie(
  corpus, tmp_path
):
  first = source_of(corpus).fingerprint()
  os.utime(corpus / "a.txt", ns=(0, 0))
  assert source_of(corpus).fingerprint() == first
  corpus.rename(tmp_path / "moved")
  corpus = tmp_path / "moved"
  (corpus / "a.txt").rename(corpus / "aa.txt")
  assert source_of(corpus).fingerprint() == first
  with FileDigests(str(tmp_path / "digests")) as digests:
    assert source_of(corpus).fingerprint(digests) == first


def test_fingerprint_is_that_of_versions_without_filters(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
  (tmp_path / "b.txt").write_text("three")
  found = source_of(tmp_path, 0.25).fingerprint()
  # Computed before sources knew of a quality: token stores keep their names.
  assert found == "1b0f349c9a2ea5b1f3b2f9c1df91c097"


def test_fingerprint_changes_with_texts_their_order_and_settings_that_matter(
  corpus,
):
  def changes():
    yield
    yield (corpus / "a.txt").write_text("Text")
    yield (corpus / "c.txt").write_text("new")
    yield (corpus / "a.txt").rename(corpus / "z.txt")
    yield (corpus / "b.jsonl").rename(corpus / "b.txt")

  fields = Fields("x"), Fields("text", "weight")
  every = ({}, {"share": 0.4}, *({"fields": each} for each in fields))
  assert len({source_of(corpus, **each).fingerprint() for each in every}) == 4
  assert len({source_of(corpus).fingerprint() for _ in changes()}) == 5
  # No field is read where there are no JSON lines.
  assert len({source_of(corpus, **each).fingerprint() for each in every}) == 2


COMPRESS = {
  "": bytes,
  ".gz": gzip.compress,
  ".bz2": functools.partial(bz2.compress, compresslevel=1),
  ".xz": functools.partial(lzma.compress, preset=0),
}
# All examples share the folder tmp_path; each writes its own file.
on_disk = repeatable(15)
each_compression = pytest.mark.parametrize("suffix", COMPRESS)


def write(folder, content: bytes, suffix: str = "", name: str = "a.jsonl"):
  path = folder / f"{name}{suffix}"
  path.write_bytes(COMPRESS[suffix](content))
  (file,) = find_files(str(path))
  return file


def lines_of(file, fields=TEXT) -> list[tuple[int, str, float, float | None]]:
  lines = read_jsonl_texts(file, fields, MACROS)
  return [(number, x.text, x.weight, x.quality) for number, x in lines]


def error(file, fields=TEXT) -> str:
  message = message_of(lines_of, file, fields)
  return message.removeprefix(f"TEXT_FILES: {file.path}")


@each_compression
@on_disk
@given(texts=st.lists(st.text(), min_size=1))
def test_any_text_is_read_from_json_lines(tmp_path, suffix, texts):
  for ascii in (True, False):
    content = "\n".join(
      json.dumps({"id": 1, "text": text}, ensure_ascii=ascii) for text in texts
    )
    found = lines_of(write(tmp_path, content.encode(), suffix))
    assert found == [(i, text, 1.0, None) for i, text in enumerate(texts, 1)]


EVERY = Fields("text", "w", "q")


@pytest.mark.parametrize(
  ("weight", "quality"),
  [("0", "-1.5"), ("2.5", "1e3"), ("1e3", "1" + "0" * 400)],
)
def test_a_weight_is_at_least_zero_and_a_quality_any_number(
  tmp_path, weight, quality
):
  line = f'{{"text": "a", "w": {weight}, "q": {quality}}}'.encode()
  expected = (1, "a", float(weight), json.loads(quality))
  assert lines_of(write(tmp_path, line), EVERY) == [expected]


OBJECT = (
  "write one JSON object on each line, or, to read the file as one text, put "
  "'text:' before its name."
)
NO_WEIGHT = (
  "not a number of at least 0; set WEIGHT_FIELD to the field that holds the "
  "weight, or to None, or mend the line."
)
NO_QUALITY = "not a number; set QUALITY_FIELD to the field that holds the "
BAD = {
  '{"text": "caf\xe9"}': "not UTF-8, byte 0xe9 at column 14; convert the file "
  "to UTF-8, or mend the line.",
  '{"text":': f"not JSON: Expecting value at column 9; {OBJECT}",
  "[1]": f"[1] is no JSON object; {OBJECT}",
  f'"{"x" * 99}"': f'"{"x" * 35} ... is no JSON object; {OBJECT}',
  "[" * 100_000: "not readable JSON: ",
  "1" * 10_000: "not readable JSON: ",
  '{"txet": "a", "id": 1}': "no field 'text' (did you mean \"txet\"?); it has "
  "'txet', 'id'; set TEXT_FIELD, or mend the line.",
  "{}": "no field 'text'; it is empty; set TEXT_FIELD, or mend the line.",
  '{"text": {"a": 1}}': "'text' is {\"a\": 1}, not a text; set TEXT_FIELD to "
  "the field that holds the text, or mend the line.",
  **{
    f'{{"text": "a", "w": {value}}}': f"'w' is {value}, {NO_WEIGHT}"
    for value in ("-1", "true", '"2"', "null", "NaN", "Infinity")
  },
  '{"text": "a", "w": 1' + "0" * 400 + "}": f"'w' is 1{'0' * 35} ..., ",
  **{
    f'{{"text": "a", "w": 1, "q": {value}}}': f"'q' is {value}, {NO_QUALITY}"
    for value in ('"0.5"', "true", "NaN")
  },
  '{"text": "a", "w": 1}': "no field 'q'; it has 'text', 'w'; set "
  "QUALITY_FIELD, or mend the line.",
}


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_line_is_named_with_its_number(tmp_path, number):
  line, message = [*BAD.items()][number]
  content = b'{"text": "one", "w": 1, "q": 1}\n\n' + line.encode("latin-1")
  for suffix in COMPRESS if number == 0 else [""]:
    file = write(tmp_path, content + b"\n", suffix)
    assert error(file, EVERY).startswith(f", line 3: {message}")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_file_that_is_cut_short_is_named_with_the_last_line(tmp_path, suffix):
  lines = [json.dumps({"text": os.urandom(50).hex()}) for _ in range(4000)]
  file = write(tmp_path, "\n".join(lines).encode(), suffix)
  os.truncate(file.path, file.num_bytes // 2)
  read = []
  with pytest.raises(UserError) as info:
    for number, line in read_jsonl_texts(file, Fields("text"), MACROS):
      assert json.loads(lines[number - 1])["text"] == line.text
      read.append(number)
  assert read
  assert f": damaged or cut short after line {len(read):,}: " in str(info.value)
  assert str(info.value).endswith(
    f"; copy or compress the {suffix} file again."
  )


@each_compression
def test_one_line_is_in_memory_at_a_time(tmp_path, suffix):
  line = json.dumps({"text": "x" * 100_000}).encode()
  file = write(tmp_path, b"\n".join([line] * 80), suffix)

  def read():
    lines = read_jsonl_texts(file, Fields("text", None), MACROS)
    assert sum(len(line.text) for _, line in lines) == 8_000_000

  assert peak_memory(read) < 4_000_000
