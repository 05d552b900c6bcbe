"""Templates of tokenizers: where they stand, what they may use."""

import builtins
import json

import odd_tokenizers
import pytest
from message_cases import (
  AT_THE_END,
  BY_TOKENS,
  TALK,
  data,
  message,
  save_template,
  write,
)

from memcomp import errors
from memcomp.data import chat_template, sources
from memcomp.data import tokenizer as tokenizer_lib


def test_a_template_of_a_tokenizer(tmp_path):
  """Its tokens for ends are ids of their own, as `<s>` and `</s>` here."""
  made = odd_tokenizers.byte_level()
  made.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
  path = odd_tokenizers.save(made, tmp_path)
  name = save_template(tmp_path, BY_TOKENS, eos_token={"content": "</s>"})
  talk = [message("user", "a"), message("assistant", " b ")]
  source = write(tmp_path / "a.jsonl", [*talk, *talk])
  store = sources.open_split(
    data(source, tokenizer=path, chat_template=name), "train"
  )
  start, end, user, assistant = range(256, 260)
  a, b = tokenizer_lib.load(path).encode("ab").tolist()
  turn = [user, a, end, assistant, b, end]
  assert store.read(0, 0, 13).tolist() == [start, *turn, *turn]
  marks = [False] * 4 + [True] * 2
  assert store.scored.mask(0, 0, 13).tolist() == [False, *marks, *marks]
  template = chat_template.load(name)
  assert (template.stop, template.rest) == ("</s>", "")
  # A run keeps all of it.
  again = chat_template.of_spec(json.loads(json.dumps(template.spec)))
  assert again.fingerprint == template.fingerprint
  assert again.end == template.end


def test_where_a_tokenizer_keeps_its_template(tmp_path):
  chatml = chat_template.load("chatml")
  talk = [chat_template.Message(**m) for m in TALK]
  source = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
  )
  named = [
    {"name": "x", "template": "y"},
    {"name": "default", "template": source},
  ]
  own = tmp_path / "chat_template.jinja"
  # The file of its own is the newer one.
  for value, beside in (source, ""), (named, ""), (None, source), ("y", source):
    name = save_template(tmp_path, value)
    if beside:
      own.write_text(beside)
    for path in (name, f"{name}/tokenizer_config.json"):
      assert chat_template.load(path).parts(talk) == chatml.parts(talk)
  own.write_text("{% for")
  with pytest.raises(
    errors.UserError, match=r"chat_template\.jinja: .* no Jinja"
  ):
    chat_template.load(name)


# Pieces of templates, and what they write.
FEATURES = {
  "no_tools": ("{% if tools is not none %}T{% endif %}", ""),
  "no_documents": ("{{ documents }}", "None"),
  "generation": (
    "{% for m in messages %}{% generation %}{{ m.content }}!"
    "{% endgeneration %}{% endfor %}",
    "a!",
  ),
  "generation_scope": (
    "{% set a = 1 %}{% generation %}{% set a = 2 %}{% endgeneration %}{{ a }}",
    "1",
  ),
  "letters": ("{{ 'é' | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
  # Not today's, which transformers gives: texts stay as they are.
  "date": (
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}"
    "{% else %}2024{% endif %}",
    "2024",
  ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_templates_of_transformers_may_use(tmp_path, feature):
  source, expected = FEATURES[feature]
  turns = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
  name = save_template(tmp_path, f"x{source}{turns}")
  assert chat_template.load(name).ask([], "a") == f"x{expected}a\n"


BAD_TEMPLATES = {
  "at_the_end": (
    AT_THE_END,
    r"a\.jsonl:1: the chat template writes what stands",
  ),
  "roles": (
    BY_TOKENS + "{% if messages | length > 2 %}"
    "{{ raise_exception('only two') }}{% endif %}",
    r"a\.jsonl:1: the chat template refuses these messages \(only two\)",
  ),
  "today": (
    BY_TOKENS + "{{ strftime_now('%Y') }}",
    r"_config\.json: the chat template writes today's date \(strftime_now\)",
  ),
  "syntax": ("{% for", r"tokenizer_config\.json: .*is no Jinja template"),
  "no_end": (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "writes nothing behind an answer",
  ),
  "no_answers": ("a", "writes nothing behind an answer"),
  "escape": (
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "refuses these messages .*unsafe",
  ),
  "none": (None, "no chat_template in it"),
}


@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_templates_that_are_refused(tmp_path, case):
  source, error = BAD_TEMPLATES[case]
  name = save_template(tmp_path, source, eos_token="</s>")
  path = write(tmp_path / "a.jsonl", TALK)
  with pytest.raises(errors.UserError, match=error):
    sources.open_split(data(path, chat_template=name), "train")


def test_without_jinja(tmp_path, monkeypatch):
  name = save_template(tmp_path, BY_TOKENS, eos_token="</s>")
  load = builtins.__import__

  def without(module, *arguments):
    if module.startswith("jinja2"):
      raise ImportError
    return load(module, *arguments)

  monkeypatch.setattr(builtins, "__import__", without)
  with pytest.raises(errors.UserError, match=r"pip install 'memcomp\[text\]'"):
    chat_template.load(name)
  assert chat_template.load("chatml").stop == "<|im_end|>"
