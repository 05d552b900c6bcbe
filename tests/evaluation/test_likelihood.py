import collections

import evaluation_cases as cases
import jax
import numpy as np
import pytest

from memcomp.evaluation import likelihood
from memcomp.inference import generate, prefill, sample
from memcomp.inference import session as session_lib
from memcomp.layers import softmax_attention
from memcomp.models import abstract


def attention_model():
  """Whose memory grows, with positions."""
  config = cases.tiny_config()
  sizes = {"heads": 2, "key_dim": 8, "value_dim": 8, "rotary_dim": 8}
  config.model.mixers["memory"] = softmax_attention.SoftmaxAttentionConfig(
    **sizes
  )
  graphdef = abstract.model_of(config.model).graphdef
  return abstract.merge(graphdef, cases.tiny_params(config))


@pytest.fixture(
  scope="module",
  params=["trellis", pytest.param("attention", marks=pytest.mark.slow)],
)
def either(request, model):
  return model if request.param == "trellis" else attention_model()


def brute_force(model, requests):
  """Sums of log-probabilities, and greedy, of all texts token by token."""
  texts = [np.concatenate(request) for request in requests]
  ids = np.zeros((len(texts), max(map(len, texts))), np.int32)
  for row, text in zip(ids, texts, strict=True):
    row[: len(text)] = text  # what stands behind a text cannot reach it

  @jax.jit
  def run(ids):
    def step(state, token):
      logits, state = model.step(token, state)
      return state, logits

    return jax.lax.scan(step, model.init_state(*ids.shape), ids.T)[1]

  logits = np.asarray(run(ids), np.float64).swapaxes(0, 1)
  found = []
  for row, (context, continuation) in zip(logits, requests, strict=True):
    places = np.arange(len(continuation)) + len(context) - 1
    chosen = row[places, continuation]
    total = (chosen - np.logaddexp.reduce(row[places], axis=-1)).sum()
    greedy = bool((row[places].argmax(-1) == continuation).all())
    found.append((total, greedy))
  return found


def some_requests(rng):
  """Lengths around the edges of pieces; choices behind shared contexts."""

  def draw(n):
    return rng.integers(0, 256, n).astype(np.uint8)

  requests = [
    likelihood.Request(draw(n), draw(m))
    for n, m in [(1, 1), (31, 2), (32, 33), (33, 0), (129, 34), (5, 260)]
  ]
  for n in (40, 3):
    context = draw(n)
    requests += [likelihood.Request(context, draw(m)) for m in (1, 7, 7, 40)]
  rng.shuffle(requests)
  return [likelihood.Request(*r) for r in requests]


def answers(model, requests, **kwargs):
  found = list(likelihood.score(model, requests, **kwargs))
  assert sorted(one.index for one in found) == list(range(len(requests)))
  return {one.index: one for one in found}


@pytest.mark.slow
def test_as_token_by_token(either):
  requests = some_requests(np.random.default_rng(0))
  found = answers(either, requests, rows=4, widths=(32, 128))
  for index, (total, greedy) in enumerate(brute_force(either, requests)):
    assert found[index].log_likelihood == pytest.approx(total, rel=1e-4)
    assert found[index].greedy == greedy


@pytest.mark.slow
def test_greedy_continuations_are_known(model):
  context = np.arange(9)
  session = session_lib.start(model)
  session = prefill.read(model, session, [context])
  (piece,) = generate.generate(
    model, session, tokens=12, settings=sample.Settings(temperature=0.0)
  )
  wanted = piece.ids[0]
  texts = [wanted, wanted[:1], wanted[:1] ^ 1]
  for place in (0, 5, 11):
    texts.append(wanted.copy())
    texts[-1][place] ^= 1
  found = answers(
    model,
    [likelihood.Request(context, text) for text in texts],
    rows=4,
    widths=(32, 128),
  )
  greedy = [found[i].greedy for i in range(6)]
  assert greedy == [True, True, False, False, False, False]


def counted(monkeypatch):
  """Tokens that each call of the two compiled functions is given."""
  calls = collections.defaultdict(list)
  for module, name, place in (
    (prefill, "_read", 3),
    (likelihood, "_score_piece", 3),
  ):
    function = getattr(module, name)

    def call(*args, name=name, function=function, place=place):
      calls[name].append((args[place].shape, int((args[-1] != 0).sum())))
      return function(*args)

    monkeypatch.setattr(module, name, call)
  return calls


def test_shared_contexts_are_read_once(model, monkeypatch):
  rng = np.random.default_rng(1)
  calls = counted(monkeypatch)
  contexts = [rng.integers(0, 256, n) for n in (50, 40, 30)]
  choices = [rng.integers(0, 256, 5) for _ in range(4)]
  requests = [likelihood.Request(c, x) for x in choices for c in contexts]
  answers(model, requests, rows=4, widths=(32, 128))
  assert sum(tokens for _, tokens in calls["_read"]) == 50 + 40 + 30
  # The first token of a choice is known from its context, the last not read.
  assert sum(tokens for _, tokens in calls["_score_piece"]) == 12 * 4


@pytest.fixture
def compiled():
  """Names of functions that XLA has compiled, as they come."""
  names = []

  def listen(event, seconds, fun_name="", **unused):
    if event.endswith("backend_compile_duration"):
      names.append(fun_name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_few_programs_whatever_the_lengths(model, compiled):
  rng = np.random.default_rng(2)

  def draw(most):
    return rng.integers(0, 256, rng.integers(1, most))

  requests = [likelihood.Request(draw(300), draw(200)) for _ in range(60)]
  answers(model, requests, rows=4, widths=(32, 128))
  # A width each; rooms of 256 and 512 tokens are only filled with zeros.
  most = {"_read": 2, "_score_piece": 2, "_first": 1, "_pick": 1, "_start": 2}
  most["all_finite"] = 1
  found = collections.Counter(compiled)
  assert found <= collections.Counter(
    {f"jit({name})": count for name, count in most.items()}
  )


def test_nothing_is_cut_off(model, monkeypatch):
  rng = np.random.default_rng(3)
  calls = counted(monkeypatch)
  text = rng.integers(0, 256, 1500)
  answers(
    model,
    [likelihood.Request(t, text[:1]) for t in (text, text[1:], text[:700])],
    rows=4,
    widths=(32, 128),
  )
  assert sum(tokens for _, tokens in calls["_read"]) == 1500 + 1499 + 700

  lengths = 1500, 1499, 700
  rolling = [likelihood.Request(text[:1], text[1:n]) for n in lengths]
  found = answers(model, rolling, rows=4, widths=(32, 128))
  for index, (total, greedy) in enumerate(brute_force(model, rolling)):
    assert found[index].log_likelihood == pytest.approx(total, rel=1e-4)
    assert found[index].greedy == greedy
