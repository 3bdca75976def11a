# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that renders a chat template; chat.py starts it.

A template is a stranger's program, which may run forever, or exhaust the host's
memory. So this process limits its own memory and processor time.

  stdin   one JSON object per line: first {"template": TEXT}, then the variables
          of each rendering
  stdout  one JSON object per line: first {"fields": [names that the template
          may read in a message], "variables": [names that it reads]}, then
          {"text": TEXT, "origins": [[origin, number of characters], ...]}; or
          {"error": REASON}. The origin says who wrote the characters: only the
          template may write control tokens.
"""

import datetime
import itertools
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import (
  Environment,
  TemplateError,
  meta,
  nodes,
  pass_eval_context,
  sandbox,
)
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import sync_do_join
from jinja2.parser import Parser
from jinja2.utils import Namespace

from palm_mtf.data.sources.conversation import ROLES
from palm_mtf.machine.helper_process import answer_questions

_MOST_BYTES = 2**29  # of address space; beyond it, a template fails
_CPU_SECS = 3
_MOST_CHARACTERS = 2**21  # of a rendered text, which the caller searches
# Origins of a character in a rendered text: a message, the template, or a
# function that does not tell from which string a character of its result comes.
MESSAGE, TEMPLATE, UNKNOWN = range(3)


class _Text(str):
  """A string with the origin of each of its characters.

  Methods of strings keep the origins, so that the caller learns who wrote the
  name of a control token. All strings that a template reads are of this class.
  A plain str, which only functions of a library return, has unknown origins.
  """

  _origins: bytes  # [length]; the underscore hides the name from templates

  def __new__(cls, text: str, origins: bytes | None = None) -> "_Text":
    made = super().__new__(cls, text)
    made._origins = origins or bytes([UNKNOWN]) * len(made)
    return made

  def __str__(self) -> "_Text":
    return self

  def __add__(self, other: str) -> "_Text":
    return _join(_Text(""), [self, other]) if isinstance(other, str) else _NO

  def __radd__(self, other: str) -> "_Text":
    return _join(_Text(""), [other, self]) if isinstance(other, str) else _NO

  def __mul__(self, count: int) -> "_Text":
    return _Text(super().__mul__(count), self._origins * count)

  __rmul__ = __mul__

  def __getitem__(self, key: int | slice) -> "_Text":
    if not isinstance(key, slice):
      key = slice(key, key + 1 or None) if super().__getitem__(key) else key
    return _Text(super().__getitem__(key), self._origins[key])

  def __iter__(self) -> Iterator["_Text"]:
    return (self[i] for i in range(len(self)))

  def join(self, parts: Iterable[str]) -> "_Text":
    return _join(self, parts)

  def lstrip(self, chars: str | None = None) -> "_Text":
    return self[len(self) - len(super().lstrip(chars)) :]

  def rstrip(self, chars: str | None = None) -> "_Text":
    return self[: len(super().rstrip(chars))]

  def strip(self, chars: str | None = None) -> "_Text":
    return self.lstrip(chars).rstrip(chars)

  def split(self, sep: str | None = None, maxsplit: int = -1) -> list["_Text"]:
    found, place = [], 0
    for part in super().split(sep, maxsplit):
      if sep is None:
        place = self.find(part, place)
      found.append(self[place : place + len(part)])
      place += len(part) + len(sep or "")
    return found

  def replace(self, old: str, new: str, count: int = -1) -> "_Text":
    if not (old and isinstance(old, str) and isinstance(new, str)):
      return _Text(super().replace(old, new, count))
    return _join(new, self.split(old, count))


def _join(between: str, parts: Iterable[str]) -> _Text:
  parts = list(parts)
  text = str.join(between, parts)
  return _Text(text, _origins(between).join(map(_origins, parts)))


def _origins(text: str) -> bytes:
  return text._origins if isinstance(text, _Text) else _Text(text)._origins


def _list_runs(text: str) -> Iterator[tuple[int, str]]:
  """Yields (origin, characters); origin is MESSAGE, TEMPLATE or UNKNOWN."""
  place = 0
  for origin, run in itertools.groupby(_origins(text)):
    end = place + len([*run])
    yield origin, str(text[place:end])
    place = end


def _own(value: Any, origin: int = TEMPLATE) -> Any:
  """Copies a JSON value, and marks the characters in it as from `origin`."""
  if isinstance(value, str):
    return _Text(value, bytes([origin]) * len(value))
  if isinstance(value, dict):
    return {_own(x, origin): _own(y, origin) for x, y in value.items()}
  is_list = isinstance(value, (list, tuple))
  return type(value)(_own(x, origin) for x in value) if is_list else value


def _tracking(name: str) -> Any:
  def changed(self: _Text, *args: Any, **kwargs: Any) -> Any:
    found = getattr(str, name)(self, *args, **kwargs)
    if name in _CASES and len(found) == len(self):
      return _Text(found, self._origins)
    origins = {*self._origins} if name in _PARTS else ()
    return _own(found, min(origins) if len(origins) == 1 else UNKNOWN)

  return changed


_NO = NotImplemented
# Methods that change letters. Origins stay if the text keeps its length.
_CASES = "capitalize casefold lower swapcase title upper".split()
# Methods that return substrings. Their origin is known only if all characters
# of the string have the same origin.
_PARTS = (
  "partition removeprefix removesuffix rpartition rsplit splitlines".split()
)
# Make these methods of str return _Texts; plain strings would lose the origins
# of their characters. For str.format, the sandbox does so.
for _name in (
  *_CASES,
  *_PARTS,
  *"__format__ __mod__ center expandtabs ljust rjust translate zfill".split(),
):
  setattr(_Text, _name, _tracking(_name))


class _Generator(CodeGenerator):
  """Compiles a template so that its own strings have the origin TEMPLATE."""

  def visit_Const(self, node: nodes.Const, frame: Any) -> None:  # noqa: N802
    # `own` also takes lists, because jinja2 folds constant lists of strings.
    self.write(f"environment.own({node.as_const(frame.eval_ctx)!r})")

  def visit_TemplateData(  # noqa: N802
    self, node: nodes.TemplateData, frame: Any
  ) -> None:
    self.write(f"environment.own({node.data!r})")

  def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
    self.write("environment.concat((")
    for part in node.nodes:
      self.visit(part, frame)
      self.write(", ")
    self.write("))")

  def _output_const_repr(self, group: Iterable[Any]) -> str:
    return f"environment.own({''.join(group)!r})"


class _Generation(Extension):
  """Renders the body of {% generation %}, transformers' mark of an answer."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: Parser) -> nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
  """Refuses attributes such as __str__, which Python would call implicitly."""

  def __init__(*args: Any, **kwargs: Any):
    values = dict(*args[1:], **kwargs)
    Namespace.__init__(args[0])
    for name, value in values.items():
      args[0][name] = value

  def __setitem__(self, name: str, value: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
      raise SecurityError(f"a namespace has no attribute {name!r}")
    super().__setitem__(name, value)


def _make_environment() -> Environment:
  """Returns an environment with the settings and functions of transformers."""

  def raise_exception(message: str) -> None:
    raise TemplateError(message)

  def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
  ) -> _Text:
    # json.dumps loses origins. So put an unguessable mark and the origin before
    # each run of characters; JSON's own characters count as the template's.
    mark = secrets.token_hex(16)

    def add_marks(x: Any) -> Any:
      if isinstance(x, str):
        runs = [*_list_runs(x), (TEMPLATE, "")]
        return "".join(f"{mark}{origin}{part}" for origin, part in runs)
      if isinstance(x, dict):
        items = sorted(x.items()) if sort_keys else x.items()
        return {add_marks(name): add_marks(value) for name, value in items}
      return [*map(add_marks, x)] if isinstance(x, (list, tuple)) else x

    made = json.dumps(
      add_marks(x),
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
    )
    runs = f"{TEMPLATE}{made}".split(mark)
    return _join("", [_own(run[1:], int(run[0])) for run in runs])

  @pass_eval_context
  def join(
    context: Any, value: Iterable[Any], d: object = "", attribute: Any = None
  ) -> str:
    return sync_do_join(context, value, _join("", [str(d)]), attribute)

  class _Environment(sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _Generator

    own = staticmethod(_own)

    def concat(self, parts: Iterable[Any]) -> _Text:
      return _join("", map(str, parts))

  made = _Environment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols", _Generation],
  )
  made.filters |= {"tojson": to_json, "join": join}
  made.globals |= {
    "raise_exception": raise_exception,
    "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    "namespace": _Namespace,
  }
  return made


class _Process:
  """Compiles the template in the first request; later requests render it."""

  def __init__(self) -> None:
    self._environment = _make_environment()
    self._template: Any = None

  def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
    if self._template is None:
      parsed = self._environment.parse(asked["template"])
      self._template = self._environment.from_string(parsed)
      names = {x.attr for x in parsed.find_all(nodes.Getattr)}
      texts = [x.value for x in parsed.find_all(nodes.Const)]
      names |= {x for x in texts if isinstance(x, str) and x.isidentifier()}
      variables = meta.find_undeclared_variables(parsed)
      return {"fields": sorted(names), "variables": sorted(variables)}
    messages, tools = (
      _own(asked.get(x), MESSAGE) for x in ("messages", "tools")
    )
    for each in messages:
      # A known role counts as text of the template, because a template may
      # build the name of a control token from a message's role.
      if each.get("role") in ROLES:
        each["role"] = _own(str(each["role"]))
    others = _own({**asked, "messages": None, "tools": None})
    values = {**others, "messages": messages, "tools": tools}
    text = self._template.render(values)
    if len(text) > _MOST_CHARACTERS:
      raise TemplateError(f"its text has {len(text):,} characters")
    runs = [[origin, len(part)] for origin, part in _list_runs(text)]
    return {"text": text, "origins": runs}


def main() -> None:
  """Renders the template for each line of stdin, until stdin is closed."""
  answer_questions(
    _Process().answer, most_bytes=_MOST_BYTES, cpu_secs=_CPU_SECS
  )


if __name__ == "__main__":
  main()
