import functools
import math

import jax
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import perplexity, report, text
from memcomp.models import abstract

BYTES = tokenizer_lib.ByteTokenizer()


class TwoBytes(tokenizer_lib.ByteTokenizer):
  """Odd ids stand for two bytes."""

  def bytes_of(self, ids):
    return 1 + np.asarray(ids, np.int32) % 2


def direct(model, tokens):
  """Nats by one call of the model and float64 softmax."""
  rows, length = tokens.shape
  # Padded at the end, so that one compiled program does for all tests.
  padded = np.pad(tokens, ((0, 3 - rows), (0, 160 - length)))
  logits = _logits(*nnx.split(model), padded[:, :-1])
  logits = np.asarray(logits, np.float64)[:rows, : length - 1]
  log_z = np.log(np.exp(logits).sum(-1))
  chosen = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
  return log_z - chosen


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens):
  model = abstract.merge(graphdef, params)
  return model(tokens)


@pytest.fixture(scope="module")
def score(model):
  return perplexity.make_score(model)


@pytest.fixture(scope="module")
def rows(store):
  stream = text.Stream(store)
  return np.stack([stream.read(s, s + 151) for s in (0, 333, 700)])


# 150 positions: a window that divides them and cuts Trellis's chunks of 8 in
# two, one that does neither, and one that is longer.
@pytest.mark.parametrize("window", rotation.cases([50, 32, 200], [32]))
def test_windows_equal_one_long_call(model, score, rows, window):
  found = perplexity.stream(score, rows, window)
  assert found.shape == (3, 150)
  np.testing.assert_allclose(found, direct(model, rows), atol=2e-5)


@pytest.mark.slow
def test_without_carry_each_window_starts_anew(model, score, rows):
  found = perplexity.stream(score, rows, 50, carry=False)
  for start in (0, 50, 100):
    expected = direct(model, rows[:, start : start + 51])
    np.testing.assert_allclose(
      found[:, start : start + 50], expected, atol=2e-5
    )
  carried = perplexity.stream(score, rows, 50)
  assert np.abs(found - carried)[:, 50:].max() > 1e-2
  np.testing.assert_array_equal(found[:, :50], carried[:, :50])


@pytest.mark.slow
def test_logits_of_large_vocabularies_in_pieces(model, rows, monkeypatch):
  expected = direct(model, rows)
  monkeypatch.setattr(perplexity, "_LOGITS", 3 * 256 * 7)  # 7 of 32 positions
  found = perplexity.stream(perplexity.make_score(model), rows, 32)
  np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("calls", rotation.cases([64, 1 << 13], [64]))
def test_whole_text(model, score, store, monkeypatch, calls):
  monkeypatch.setattr(perplexity, "_CALL_TOKENS", calls)
  stream = text.Stream(store)
  window = 32
  found = perplexity.whole_text(score, stream, TwoBytes(), window)
  nats, num_bytes = 0.0, 0
  for start in range(0, store.num_tokens - 1, window):
    tokens = stream.read(start, min(start + window + 1, store.num_tokens))
    nats += direct(model, tokens[None]).sum()
    num_bytes += (1 + tokens[1:] % 2).sum()
  assert found["tokens"] == store.num_tokens - 1 == 899
  assert found["bytes"] == num_bytes
  assert found["nats"] == pytest.approx(nats, rel=1e-5)
  assert found["bits_per_byte"] == pytest.approx(
    nats / num_bytes / math.log(2), rel=1e-5
  )
  assert found["perplexity"] == pytest.approx(math.exp(nats / 899), rel=1e-5)


def test_buckets_add_up(score, store):
  found = perplexity.streamed(
    score, text.Stream(store), TwoBytes(), window=32, lengths=8, rows=3
  )
  buckets = found["buckets"]
  assert [(b["first"], b["last"]) for b in buckets] == [
    (0, 31),
    (32, 63),
    (64, 127),
    (128, 255),
  ]
  assert found["positions"] == 256
  assert found["starts"] == [0, 322, 643]
  for name in ("tokens", "bytes"):
    assert sum(b[name] for b in buckets) == found[name]
  assert sum(b["nats"] for b in buckets) == pytest.approx(found["nats"])
  assert found["tokens"] == 3 * 256
  assert buckets[0]["bits_per_byte"] == buckets[0]["fresh_bits_per_byte"]
  assert buckets[3]["bits_per_byte"] != buckets[3]["fresh_bits_per_byte"]
  assert all(b["std_over_rows"] > 0 for b in buckets)
  assert buckets[0]["gain_error"] == 0.0


def test_bucket_of_one_row_by_hand(model, score, store):
  stream = text.Stream(store)
  found = perplexity.streamed(
    score, stream, BYTES, window=32, lengths=4, rows=1
  )
  nats = direct(model, stream.read(0, 129)[None])[0]
  bits = nats[64:128].mean() / math.log(2)
  assert found["buckets"][2]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
  assert found["buckets"][2]["std_over_rows"] is None
  assert found["buckets"][2]["gain_error"] is None


def test_the_error_of_the_gain_is_of_pairs(model, score, store):
  stream = text.Stream(store)
  found = perplexity.streamed(
    score, stream, BYTES, window=32, lengths=4, rows=3
  )
  spans = np.stack([stream.read(s, s + 129) for s in found["starts"]])
  cuts = [direct(model, spans[:, i : i + 33]) for i in range(0, 128, 32)]
  saved = np.concatenate(cuts, axis=1) - direct(model, spans)
  bits = saved[:, 64:].mean(1) / math.log(2)
  bucket = found["buckets"][2]
  gain = bucket["fresh_bits_per_byte"] - bucket["bits_per_byte"]
  assert gain == pytest.approx(bits.mean(), rel=1e-4)
  error = bits.std(ddof=1) / math.sqrt(3)
  assert bucket["gain_error"] == pytest.approx(error, rel=1e-4)
  shown = report.positions(found).splitlines()[-2].split()
  assert shown[-3:] == [f"{gain:+.3f}", "+-", f"{error:.3f}"]


def test_short_text_is_used_as_far_as_it_goes(score):
  store = store_lib.ArrayStore(
    "short", np.arange(97, 117, dtype=np.uint8), np.array([20])
  )
  stream = text.Stream(store)
  found = perplexity.streamed(
    score, stream, BYTES, window=32, lengths=16, rows=2
  )
  assert found["positions"] == 19
  assert (found["starts"], found["rows"]) == ([0], 1)
  whole = perplexity.whole_text(score, stream, BYTES, 32)
  assert whole["tokens"] == 19
  assert whole["bits_per_byte"] == pytest.approx(found["bits_per_byte"])


def test_errors_are_over_spans_that_do_not_overlap(score, store):
  """899 tokens are predicted: three spans of 256, however many are asked for."""
  found = perplexity.streamed(
    score, text.Stream(store), BYTES, window=32, lengths=8, rows=16
  )
  assert (found["starts"], found["rows"]) == ([0, 322, 643], 3)
  assert report.positions(found).startswith(
    "bits per byte by position: 3 spans of 256 tokens; trained at 32\n"
  )


def test_a_single_span_of_a_single_token(score):
  store = store_lib.ArrayStore(
    "two", np.array([97, 98], np.uint8), np.array([2])
  )
  stream = text.Stream(store)
  found = perplexity.streamed(
    score, stream, BYTES, window=32, lengths=1, rows=1
  )
  assert report.positions(found).startswith(
    "bits per byte by position: 1 span of 1 token; trained at 32\n"
  )


def test_bucket_ranges():
  assert perplexity.bucket_ranges(256, 4096) == [
    (0, 256),
    (256, 512),
    (512, 1024),
    (1024, 2048),
    (2048, 4096),
  ]
  assert perplexity.bucket_ranges(1024, 3000)[-1] == (2048, 3000)
  assert perplexity.bucket_ranges(100, 300) == [
    (0, 64),
    (64, 128),
    (128, 256),
    (256, 300),
  ]
  assert perplexity.bucket_ranges(1, 1) == [(0, 1)]


def test_span_starts_reach_both_ends():
  assert perplexity.span_starts(100, 20, 5) == [0, 20, 40, 60, 80]
  assert perplexity.span_starts(100, 20, 1) == [0]


def test_sums_of_what_is_not_finite():
  sums = perplexity.Totals()
  sums.add(np.array([np.inf]), np.array([1]))
  found = sums.summary()
  assert found["bits_per_byte"] is None
  assert found["perplexity"] is None


def test_text_of_documents_end_to_end(store):
  stream = text.Stream(store)
  whole = stream.read(0, store.num_tokens)
  assert len(whole) == 900
  np.testing.assert_array_equal(stream.read(299, 310), whole[299:310])
  np.testing.assert_array_equal(text.as_bytes(store, BYTES), whole)
  assert text.num_bytes(store, BYTES) == 900


def test_nothing_is_no_figure():
  found = perplexity.Totals().summary()
  assert found["bits_per_byte"] is None and found["perplexity"] is None
  sums = perplexity.Totals()
  sums.add(np.array([2.0, 4.0]), np.zeros(2))  # special tokens
  found = sums.summary()
  assert found["bits_per_byte"] is None
  assert found["perplexity"] == pytest.approx(math.exp(3))
  streamed = {"window": 8, "rows": 1, "positions": 2, "buckets": []}
  text = {"name": "the text", "bytes": 0}
  whole = found | {"window": 8}
  assert report.whole_text({"trained_length": whole, "text": text}) == (
    "nothing was scored of the text: its tokens have no bytes"
  )
  bucket = {"first": 0, "last": 1, "gain_error": None} | found
  bucket["fresh_bits_per_byte"] = None
  assert "0-1" not in report.positions(streamed | {"buckets": [bucket]})
