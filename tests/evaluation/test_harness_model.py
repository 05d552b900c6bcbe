"""What lm-evaluation-harness asks of a model, against each request alone."""

import numpy as np
import odd_tokenizers
import pytest
from harness_cases import log_likelihood, needs_harness

from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import likelihood, load
from memcomp.inference import complete, generate, sample

pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.slow
def test_completions_of_a_batch_are_those_of_each_alone(trained):
  opened = load.open_checkpoint(trained)
  prompts = ["a", "On and on and on, as long as there are lines. ", "The end"]
  texts = [opened.tokenizer.encode(prompt) for prompt in prompts]
  drawn = [sample.Settings(temperature=0.7, seed=i) for i in range(3)]
  for settings, stops in ((complete.GREEDY, []), (drawn, ["e", "\n", "a!"])):
    found, size = complete.complete(
      opened.model,
      opened.tokenizer,
      texts,
      tokens=24,
      rows=4,
      settings=settings,
      stop_strings=stops,
    )
    assert size > 0 and len(found) == 3
    for row, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
      one = settings if isinstance(settings, sample.Settings) else settings[row]
      alone = generate.text(
        opened.model,
        opened.tokenizer,
        prompt,
        tokens=24,
        settings=one,
        stop_strings=stops,
      )
      assert answer == "".join(alone)


class Hook:
  """Keeps what a model puts into the harness's cache."""

  def __init__(self):
    self.kept = []

  def add_partial(self, kind, arguments, answer):
    self.kept.append((kind, tuple(arguments), answer))


@pytest.fixture
def adapter(trained):
  from memcomp.evaluation import harness_model

  model = harness_model.Model(load.open_checkpoint(trained), rows=4)
  model.set_cache_hook(Hook())
  return model


def instances(kind, *arguments):
  from lm_eval.api import instance

  return [
    instance.Instance(request_type=kind, doc={}, arguments=one, idx=i)
    for i, one in enumerate(arguments)
  ]


@pytest.mark.harness
@needs_harness
def test_log_likelihoods_of_requests(adapter, trained):
  asked = [
    ("A line", " of text"),
    ("", "no context"),
    ("A line ", "of text"),  # the space goes over
    ("A line", " of words"),
    ("B" * 70, "C"),
    ("A line", ""),
    ("  ", "spaces"),
    ("", "\nline"),  # begins with what stands for no context
    ("", ""),
  ]
  found = adapter.loglikelihood(instances("loglikelihood", *asked))
  wanted = [
    log_likelihood(trained, context, continuation)
    for context, continuation in [
      asked[0],
      ("\n", "no context"),
      asked[0],
      asked[3],
      asked[4],
    ]
  ]
  for (total, greedy), (total_, greedy_) in zip(found[:5], wanted, strict=True):
    assert total == pytest.approx(total_, rel=1e-4) and greedy == greedy_
  assert found[5] == (0.0, True)
  total, greedy = log_likelihood(trained, "\n", "  spaces")
  assert found[6] == (pytest.approx(total, rel=1e-4), greedy)
  total, greedy = log_likelihood(trained, "\n", "\nline")
  assert found[7] == (pytest.approx(total, rel=1e-4), greedy)
  assert found[8] == (0.0, True)
  kept = {arguments: answer for _, arguments, answer in adapter.cache_hook.kept}
  assert [kept[one] for one in asked] == found
  assert adapter.longest == 70 and adapter.beyond == 1


@pytest.mark.harness
@needs_harness
def test_documents_in_windows(adapter, trained):
  from memcomp.evaluation import harness_model

  opened = load.open_checkpoint(trained)
  model = harness_model.Model(opened, rows=4, rolling="window")
  model.set_cache_hook(Hook())
  texts = [("abcdefgh" * 9,), ("short",), ("",)]
  found = model.loglikelihood_rolling(
    instances("loglikelihood_rolling", *texts)
  )
  text = texts[0][0]
  # Windows of 32; the last is whole, but only what is new counts.
  wanted = (
    log_likelihood(trained, "\n", text[:32])[0]
    + log_likelihood(trained, text[31], text[32:64])[0]
    + log_likelihood(trained, text[39:64], text[64:])[0]
  )
  assert found[0] == pytest.approx(wanted, rel=1e-4)
  assert found[1] == pytest.approx(
    log_likelihood(trained, "\n", "short")[0], rel=1e-4
  )
  assert found[2] == 0
  assert model.longest == 32 and model.beyond == 0
  whole = adapter.loglikelihood_rolling(
    instances("loglikelihood_rolling", *texts)
  )
  assert whole[0] == pytest.approx(
    log_likelihood(trained, "\n", text)[0], rel=1e-4
  )
  kept = {arguments: answer for _, arguments, answer in adapter.cache_hook.kept}
  assert [kept[one] for one in texts[:2]] == whole[:2]


@pytest.mark.harness
@needs_harness
def test_generation_of_requests(adapter, trained):
  opened = load.open_checkpoint(trained)
  contexts = ["a", "On and on, as long as there are lines. " * 3, "The end", ""]
  endless = {"until": [], "max_gen_toks": 20, "do_sample": False}
  asked = [(context, endless) for context in contexts]
  whole = adapter.generate_until(instances("generate_until", *asked))

  def alone(context):
    pieces = generate.text(
      opened.model,
      opened.tokenizer,
      context or "\n",
      tokens=20,
      settings=complete.GREEDY,
    )
    return "".join(pieces)

  assert whole == [alone(context) for context in contexts]
  kept = [
    (arguments[0], answer) for _, arguments, answer in adapter.cache_hook.kept
  ]
  assert sorted(kept) == sorted(zip(contexts, whole, strict=True))


@pytest.mark.harness
@needs_harness
def test_answers_end_at_stop_strings(adapter):
  def answer(**given):
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 40}
    asked = "A line", settings | given
    return adapter.generate_until(instances("generate_until", asked))[0]

  text = answer()
  # A byte that is no text is no stop string.
  place = next(i for i in range(5, 40) if text[i] not in text[:i] + "\ufffd")
  for until in (text[place], ["not there", text[place], ""]):
    assert answer(until=until) == text[:place]
  assert answer(max_gen_toks=3) in (text[:1], text[:2], text[:3])


@pytest.mark.harness
@needs_harness
def test_settings_of_a_task_count_or_are_named(adapter, capsys):
  def answer(**given):
    asked = "A line", {"until": [], "max_gen_toks": 20} | given
    return adapter.generate_until(instances("generate_until", asked))[0]

  greedy = answer()
  assert answer(top_k=None, top_p=None) == greedy
  # Only the most likely token is as likely as the most likely one.
  drawn = {"do_sample": True, "temperature": 1.0}
  assert answer(**drawn) != greedy
  assert answer(**drawn, min_p=1.0) == greedy
  assert answer(**drawn, top_k=1) == greedy
  once = answer(repetition_penalty=1e6)
  assert once != greedy and len(set(once)) > len(set(greedy))
  assert answer(num_beams=1, top_k=-1) == greedy  # which takes no draw
  assert "note" not in capsys.readouterr().out
  assert answer(num_beams=2) == answer(num_beams=3) == greedy
  assert (
    capsys.readouterr().out.count("setting num_beams of a task has no") == 1
  )
  with pytest.raises(errors.UserError, match="generation of a task: top_k=-1"):
    answer(**drawn, top_k=-1)


@pytest.mark.harness
@needs_harness
def test_samples_differ_between_repeats(adapter):
  settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 20}
  asked = [("a", settings), ("a", settings)]
  first, second = adapter.generate_until(instances("generate_until", *asked))
  assert first != second
  again = adapter.generate_until(instances("generate_until", *asked))
  assert again == [first, second]


@pytest.mark.harness
@needs_harness
def test_requests_with_a_common_context_share_its_reading(adapter, monkeypatch):
  asked, score = [], likelihood.score

  def counted(model, requests, **given):
    asked.extend(requests)
    return score(model, requests, **given)

  monkeypatch.setattr(likelihood, "score", counted)
  adapter.loglikelihood(
    instances("loglikelihood", *[("Which?", f" {i}") for i in range(4)])
  )
  assert len({one.context.tobytes() for one in asked}) == 1


@pytest.mark.harness
@needs_harness
@pytest.mark.parametrize("name", odd_tokenizers.CASES)
def test_any_tokenizer_has_a_token_before_a_text(name, trained, tmp_path):
  from memcomp.evaluation import harness_model

  make, text = odd_tokenizers.CASES[name]
  tokenizer = tokenizer_lib.load(odd_tokenizers.save(make(), tmp_path))
  opened = load.open_checkpoint(trained)._replace(tokenizer=tokenizer)
  model = harness_model.Model(opened, rows=2)
  expected = {
    "special": tokenizer.vocab_size - 1,
    # A line's end; a space; nothing of the kind.
    **dict.fromkeys(["normalised", "prefixed"], tokenizer.encode("\n")[-1:]),
    "metaspace": 0,
    **dict.fromkeys(["stripped", "words", "word_piece"], 0),
  }[name]
  assert model.prefix_token_id == expected
  if tokenizer.vocab_size <= 256:
    asked = instances("loglikelihood", ("", text), (text, text))
    assert all(np.isfinite(x) for x, _ in model.loglikelihood(asked))
