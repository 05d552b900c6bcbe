"""Conversations and templates that several tests share."""

import json

from memcomp import config as config_lib
from memcomp.data import tokenizer as tokenizer_lib

BYTES = tokenizer_lib.ByteTokenizer()
TALK = [
  {"role": "system", "content": "Be short."},
  {"role": "user", "content": "Hi?"},
  {"role": "assistant", "content": "Hello é"},
  {"role": "user", "content": "Bye."},
  {"role": "assistant", "content": "Yes"},
]
BY_TOKENS = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# As Phi 3's: what has ended looks otherwise than what goes on.
AT_THE_END = BY_TOKENS + "{% if not add_generation_prompt %}.{% endif %}"


def message(role, content):
  return {"role": role, "content": content}


def write(path, *talks):
  lines = [json.dumps({"messages": talk}) for talk in talks]
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return str(path)


def data(source, **fields):
  usual = {"format": "messages", "packing": "first_fit", "validation": source}
  return config_lib.DataConfig(source=source, **usual | fields)


def save_template(folder, source, **more):
  config = {"chat_template": source, "bos_token": "<s>"} | more
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return str(folder)
