# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the forms of published models, and what they write."""

import pathlib
from typing import Any, NamedTuple

from palm_mtf.data.vocabulary.chat import FILE_NAME
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.vocabulary import GENERATION_CONFIG, Vocabulary
from palm_mtf.json_text import json_text
from tests import tokenizer_files

MESSAGES = [
  {"role": "user", "content": "What is 1 + 1?"},
  {"role": "assistant", "content": "2, I'd say."},
  {"role": "user", "content": "  And 2 + 2?\n"},
  {"role": "assistant", "content": "It is 4.\n\nDon't ask\nmore"},
]


# A conversation whose first answer is two calls of a tool.
TOOLS = [
  {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": {}},
  }
]


def _call(a: int, b: str) -> dict[str, Any]:
  function = {"name": "add", "arguments": {"a": a, "b": b}}
  return {"type": "function", "function": function}


CALLING = [
  MESSAGES[0],
  {"role": "assistant", "content": "", "tool_calls": [_call(1, "caf\u00e9")]},
  {"role": "tool", "content": "2"},
  {**MESSAGES[3], "tool_calls": [_call(2, ""), _call(4, "'")]},
]


class Form(NamedTuple):
  """A template, and what it writes for messages, answers between [[ and ]]."""

  template: str
  text: str
  end: str  # the token that ends an answer
  start: str | None = None  # the token with which prompts start
  tokens: tuple[str, ...] = ()  # other control tokens
  messages: list[dict[str, Any]] = MESSAGES
  tools: list[dict[str, Any]] | None = None


_TURN = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
  "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
  "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TURNS = (
  "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
  "<|im_start|>assistant\n[[2, I'd say.<|im_end|>]]\n"
  "<|im_start|>user\n  And 2 + 2?\n<|im_end|>\n"
  "<|im_start|>assistant\n[[It is 4.\n\nDon't ask\nmore<|im_end|>]]"
)
_TOOL = (
  '{"type": "function", "function": {"name": "add", "description": "a + b", '
  '"parameters": {}}}'
)
_CALLS = [
  '{"name": "add", "arguments": {"a": 1, "b": "caf\u00e9"}}',
  '{"name": "add", "arguments": {"a": 2, "b": ""}}',
  '{"name": "add", "arguments": {"a": 4, "b": "\'"}}',
]
FORMS = {
  "ChatML": Form(_TURN, _TURNS, "<|im_end|>", tokens=("<|im_start|>",)),
  "ChatML with a system prompt": Form(
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nHelp."
    "<|im_end|>\n' }}{% endif %}" + _TURN,
    "<|im_start|>system\nHelp.<|im_end|>\n" + _TURNS,
    "<|im_end|>",
    tokens=("<|im_start|>",),
  ),
  "Llama 3": Form(
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}"
    "{{ bos_token + c if loop.first else c }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant"
    "<|end_header_id|>\n\n' }}{% endif %}",
    "<s><|start_header_id|>user<|end_header_id|>\n\nWhat is 1 + 1?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[2, I'd say.<|eot_id|>]]"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd 2 + 2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[It is 4.\n\nDon't ask\n"
    "more<|eot_id|>]]",
    "<|eot_id|>",
    "<s>",
    ("<|start_header_id|>", "<|end_header_id|>"),
  ),
  "Gemma": Form(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else "
    "m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "<s><start_of_turn>user\nWhat is 1 + 1?<end_of_turn>\n"
    "<start_of_turn>model\n[[2, I'd say.<end_of_turn>]]\n"
    "<start_of_turn>user\nAnd 2 + 2?<end_of_turn>\n"
    "<start_of_turn>model\n[[It is 4.\n\nDon't ask\nmore<end_of_turn>]]",
    "<end_of_turn>",
    "<s>",
    ("<start_of_turn>",),
  ),
  "Mistral": Form(
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'] + eos_token + ' ' }}{% endif %}{% endfor %}",
    "<s>[INST] What is 1 + 1? [/INST][[ 2, I'd say.<|endoftext|>]] "
    "[INST]   And 2 + 2?\n [/INST][[ It is 4.\n\nDon't ask\nmore"
    "<|endoftext|>]]",
    "<|endoftext|>",
    "<s>",
  ),
  "marked answers": Form(
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + "
    "'<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + "
    "'<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    _TURNS,
    "<|im_end|>",
    tokens=("<|im_start|>",),
  ),
  "tools of Qwen 2.5": Form(
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}"
    "{%- else %}{{- 'Help.' }}{%- endif %}{{- '\n\n# Tools\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'assistant' "
    "and not m.tool_calls) %}{{- '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>' + '\n' }}{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>' + m.role }}{%- if m.content %}{{- '\n' + m.content }}"
    "{%- endif %}{%- for tool_call in m.tool_calls %}"
    "{%- if tool_call.function is defined %}"
    "{%- set tool_call = tool_call.function %}{%- endif %}"
    '{{- \'\n<tool_call>\n{"name": "\' }}{{- tool_call.name }}'
    '{{- \'", "arguments": \' }}{{- tool_call.arguments | tojson }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{%- if (loop.index0 == 0) or "
    "(messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}"
    "{%- endif %}{{- '\n<tool_response>\n' }}{{- m.content }}"
    "{{- '\n</tool_response>' }}{%- if loop.last or "
    "(messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\n' }}"
    "{%- endif %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}{%- endif %}",
    f"<|im_start|>system\nHelp.\n\n# Tools\n<tools>\n{_TOOL}\n</tools>"
    "<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
    f"<|im_start|>assistant\n[[<tool_call>\n{_CALLS[0]}\n</tool_call>"
    "<|im_end|>]]\n<|im_start|>user\n<tool_response>\n2\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n[[It is 4.\n\nDon't ask\nmore\n"
    f"<tool_call>\n{_CALLS[1]}\n</tool_call>\n<tool_call>\n{_CALLS[2]}\n"
    "</tool_call><|im_end|>]]",
    "<|im_end|>",
    tokens=("<|im_start|>",),
    messages=CALLING,
    tools=TOOLS,
  ),
  "tools of SmolLM2": Form(
    "{% if tools %}{{ '<|im_start|>system\n<tools>' + tools | tojson + "
    "'</tools><|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if m.tool_calls %}"
    "{{ '<tool_call>[' }}{% for call in m.tool_calls %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' + '
    "call.function.arguments | tojson + '}' }}{% if not loop.last %}{{ ', ' }}"
    "{% endif %}{% endfor %}{{ ']</tool_call>' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    f"<|im_start|>system\n<tools>[{_TOOL}]</tools><|im_end|>\n"
    "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
    f"<|im_start|>assistant\n[[<tool_call>[{_CALLS[0]}]</tool_call>"
    "<|im_end|>]]\n<|im_start|>tool\n2<|im_end|>\n"
    "<|im_start|>assistant\n[[It is 4.\n\nDon't ask\nmore"
    f"<tool_call>[{_CALLS[1]}, {_CALLS[2]}]</tool_call><|im_end|>]]",
    "<|im_end|>",
    tokens=("<|im_start|>",),
    messages=CALLING,
    tools=TOOLS,
  ),
}


def make_vocabulary(folder: pathlib.Path, form: Form) -> Vocabulary:
  """Returns a byte-level vocabulary with the control tokens of a form."""
  content = tokenizer_files.make_byte_level("llama-bpe")
  names = {x["content"] for x in content["added_tokens"]}
  for name in (*form.tokens, form.end):
    if name not in names:
      number = max(x["id"] for x in content["added_tokens"]) + 1
      content["added_tokens"].append(
        {**content["added_tokens"][0], "id": number, "content": name}
      )
  content["post_processor"] = None
  more = {"bos_token": form.start} if form.start else {}
  eos = "<|endoftext|>" if form.end == "<end_of_turn>" else form.end
  path = tokenizer_files.write(folder, content, eos_token=eos, **more)
  (folder / FILE_NAME).write_text(form.template)
  ids = {x["content"]: x["id"] for x in content["added_tokens"]}
  # As in Gemma, the token that ends a turn need not be the one of a document.
  ends = json_text({"eos_token_id": [ids[eos], ids[form.end]]})
  (folder / GENERATION_CONFIG).write_text(ends)
  return open_vocabulary(path)


def start_of(form: Form, vocabulary: Vocabulary) -> int | None:
  """Returns the id with which prompts of a form start; None for none."""
  pieces = (vocabulary.piece(i) for i in range(vocabulary.size))
  return [*pieces].index(form.start) if form.start else None
