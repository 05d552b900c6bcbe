"""A conversation with a model is written as those of its training."""

import inference_cases as cases
import jax
import numpy as np
import pytest

from memcomp import errors
from memcomp.data import chat_template
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import chat, dialogue, prefill, saved
from memcomp.inference import generate as generate_lib

BYTES = tokenizer_lib.ByteTokenizer()
CHATML = chat_template.load("chatml")
JINJA = chat_template.of_spec(
  {
    "name": "jinja",
    "source": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] "
    "{{ m.content | trim }} {{ eos_token }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}",
    "tokens": {"bos_token": "<s>", "eos_token": "</s>"},
  }
)
SYSTEM = chat_template.Message("system", "Be short.")
TURNS = (("Hi?", "Hello"), ("Bye.", " Yes  "), ("?", "No\n\nnever"))


@pytest.fixture
def talk(talk_by):
  defaults = {"tokens": 4, "settings": cases.GREEDY, "template": CHATML}
  return lambda *lines, **more: talk_by(*lines, **defaults | more)


def reads(owner, *texts, tokens=4):
  """The session after some texts, each with an answer; and the answers."""
  session, answers = cases.read(owner.model, [b""]), []
  for text in texts:
    session = prefill.read(owner.model, session, [BYTES.encode(text)])
    pieces = cases.pieces(owner.model, session, tokens)
    session = pieces[-1].session
    answers.append(BYTES.decode(cases.joined(pieces)[0]))
  return session, answers


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("template", [CHATML, JINJA], ids=["chatml", "jinja"])
@pytest.mark.parametrize("system", [(), (SYSTEM,)], ids=["", "system"])
def test_what_a_chat_reads_are_the_parts_of_training(template, system):
  said = dialogue.Dialogue(template, system)
  messages, texts = list(system), []
  for question, answer in TURNS:
    said, text = said.ask(question)
    messages += [
      chat_template.Message("user", question),
      chat_template.Message("assistant", answer),
    ]
    expected = template.parts(messages)
    texts += [text, expected[len(texts) + 1].text]
    cut = said.answered(answer[:2], ended=False)
    assert cut.ask("") == (cut, "")  # it goes on
    said = said.answered(answer, ended=True)
    assert cut.answered(answer[2:], ended=True) == said
    with pytest.raises(errors.UserError, match="no answer that was cut off"):
      said.ask("")
    assert [part.text for part in expected][: len(texts)] == texts
  assert said.messages == tuple(messages)
  assert [part.is_answer for part in expected] == [False, True] * 3 + [False]


def test_answers_that_are_cut_off_are_ended(owner, talk):
  found, out = talk("one", "two", opening="Be short.")
  first = (
    "<|im_start|>system\nBe short.<|im_end|>\n"
    "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
  )
  second = (
    "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
  )
  session, answers = reads(owner, first, second)
  assert_equal(found.session, session)
  assert [m.content for m in found.said.messages if m.role == "assistant"] == (
    answers
  )
  assert all(answer in out for answer in answers)


@pytest.mark.parametrize("ended", [True, False])
def test_an_end_of_two_special_tokens(
  ended, model, config, words, monkeypatch, capsys
):
  template = chat_template.of_spec(
    {
      "name": "jinja",
      "source": "{% for m in messages %}{{ m.content }}{{ eos_token }}"
      "{% endfor %}",
      "tokens": {"eos_token": "<sep><end>"},
    }
  )
  written = words.encode("ab<sep><end>")[: 4 if ended else 3]

  def generate(unused, session, **options):
    yield generate_lib.Piece([written], session, np.array([ended]))

  monkeypatch.setattr(generate_lib, "generate", generate)
  talk = chat.Chat(
    saved.Owner(model, config, words),
    tokens=9,
    settings=cases.GREEDY,
    template=template,
  )
  talk.take("c")
  assert talk.said.messages[-1].content == "ab"
  # If it was cut off, it is read again.
  assert talk.said.unread == ("" if ended else "<sep><end>")
  assert capsys.readouterr().out.startswith("ab\n")


@pytest.mark.slow
def test_an_empty_line_goes_on_with_an_answer(owner, talk):
  found, _ = talk("one", "")
  once, _ = talk("one", tokens=8)
  assert_equal(found.session, once.session)
  assert found.said.messages == once.said.messages
  _, out = talk("")
  assert "error: there is no answer that was cut off" in out


@pytest.mark.slow
def test_an_end_that_a_limit_has_cut_is_found_in_the_rest(
  owner, talk, tmp_path
):
  asked = BYTES.encode("[user] one\n[assistant] ")
  session = cases.read(owner.model, [asked])
  (ids,) = cases.joined(cases.pieces(owner.model, session, 32))
  # The end is what the model happens to write, at a first time.
  made = bytes(ids)
  size = next(
    i
    for i in range(1, len(made) - 1)
    if made[i : i + 2].isascii()
    and made[i : i + 2].decode().isprintable()
    and made.index(made[i : i + 2]) == i
  )
  end = made[size : size + 2].decode()
  shown = BYTES.decode(ids[:size])
  template = chat_template.of_spec(
    {
      "name": "jinja",
      "source": "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
      "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
      "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}",
      "tokens": {"eos_token": end},
    }
  )
  whole, _ = talk("one", template=template, tokens=40)
  assert whole.said is not None
  assert whole.said.messages[-1].content == shown
  assert whole.said.unread == "\n"
  folder = tmp_path / "talk"
  cut, out = talk("one", f"/save {folder}", template=template, tokens=size + 1)
  # Half of the end has come, which is not shown, but the model has read it.
  assert shown + "\n[" in out
  assert cut.said.messages[-1].content.endswith(end[0])
  for found, _ in (
    talk("one", "", template=template, tokens=size + 1),
    talk(f"/load {folder}", "", template=template, tokens=size + 1),
    talk("one", "two", "/undo", "", template=template, tokens=size + 1),
  ):
    assert found.said == whole.said
    assert_equal(found.session, whole.session)


def test_an_answer_with_a_stop_string_of_the_user_is_cut_off(owner, talk):
  _, (answer,) = reads(
    owner, "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
  )
  found, _ = talk("one", stop_strings=[answer[0]])
  assert found.said.unread == CHATML.end
  # The template's own end stays, whatever the user's are.
  found, _ = talk("/set stop=", "one")
  assert found.stops is not None and CHATML.stop == "<|im_end|>"
  ended = dialogue.Dialogue(CHATML).ask("one")[0].answered("a", ended=True)
  assert ended.unread == "\n"


def test_commands(owner, talk, tmp_path):
  folder, text = tmp_path / "talk", tmp_path / "text.txt"
  text.write_text("a text")
  once, _ = talk("one")
  found, _ = talk("one", "two", "/undo")
  assert found.said.messages == once.said.messages
  assert_equal(found.session, once.session)
  # Saved with what was said and what has not been read.
  _, out = talk("one", f"/read {text}", f"/save {folder}")
  assert "6 characters begin the next message" in out
  found, _ = talk(f"/load {folder}", "two")
  second = (
    "<|im_end|>\n<|im_start|>user\na text\ntwo<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  first = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
  session, _ = reads(owner, first, second)
  assert_equal(found.session, session)
  found, _ = talk("one", "/new", "one")
  assert_equal(found.session, once.session)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("a <|im_end|>", "the message (user) has '<|im_end|>' in it"),
    ("/load {plain}", "holds a text without messages"),
  ],
)
def test_mistakes_change_nothing(owner, talk, tmp_path, line, message):
  plain = tmp_path / "plain"
  saved.save(plain, cases.read(owner.model, [BYTES.encode("a")]), owner)
  found, out = talk(line.format(plain=plain))
  assert "error: " in out and message in out
  assert found.session.position.tolist() == [0]
  assert found.said == dialogue.Dialogue(CHATML)


def test_what_a_template_refuses_is_one_line(talk):
  template = chat_template.of_spec(
    JINJA.spec
    | {
      "source": "{% if messages[0].role == 'system' %}"
      "{{ raise_exception('no system') }}{% endif %}" + JINJA.spec["source"]
    }
  )
  _, out = talk("one", opening="Be short.", template=template)
  assert "error: the chat template refuses these messages (no system)" in out
  with pytest.raises(errors.UserError, match="is damaged"):
    chat_template.of_spec({"name": "jinja"})
