import numpy as np
import pytest

from memcomp.evaluation import byte_models


def as_bytes(text: bytes) -> np.ndarray:
  return np.frombuffer(text, np.uint8)


def slow_witten_bell(train: bytes, context: bytes, byte: int) -> float:
  """The definition, by counting; the order is the length of the context."""
  length = len(context)
  lower = slow_witten_bell(train, context[1:], byte) if length else 1 / 256
  followers = [
    train[i + length]
    for i in range(len(train) - length)
    if train[i : i + length] == context
  ]
  if not followers:
    return lower
  kinds = len(set(followers))
  return (followers.count(byte) + kinds * lower) / (len(followers) + kinds)


def all_orders(train: bytes, text: bytes, max_order: int) -> list[np.ndarray]:
  return list(
    byte_models.witten_bell(as_bytes(train), as_bytes(text), max_order)
  )


def test_order_0_is_counts():
  # "aab": n(a) = 2, n(b) = 1, two kinds.
  (p,) = all_orders(b"aab", b"abc", 0)
  lower = 2 / 256
  np.testing.assert_allclose(
    p, [(2 + lower) / 5, (1 + lower) / 5, lower / 5], rtol=1e-15
  )


def test_order_1_by_hand():
  # After a: a once, b once (2 kinds). After b: never anything.
  p0, p1 = all_orders(b"aab", b"abac", 1)
  assert p1[0] == p0[0]  # no context
  np.testing.assert_allclose(p1[1], (1 + 2 * p0[1]) / 4, rtol=1e-15)
  assert p1[2] == p0[2]  # b was never followed
  np.testing.assert_allclose(p1[3], 2 * p0[3] / 4, rtol=1e-15)


def test_equals_the_definition():
  rng = np.random.default_rng(0)
  train = bytes(rng.integers(0, 3, 200, dtype=np.uint8) + 97)
  text = bytes(rng.integers(0, 4, 60, dtype=np.uint8) + 97)
  for order, p in enumerate(all_orders(train, text, 7)):
    expected = [
      slow_witten_bell(train, text[max(0, i - order) : i], text[i])
      for i in range(len(text))
    ]
    np.testing.assert_allclose(p, expected, rtol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 3, 7])
def test_next_bytes_sum_to_one(order):
  train = b"abracadabra, said the magician, and abracadabra again" * 3
  for context in (
    b"abracad",
    b"zzzzzzz",
    b"cadabra",
    b"\x00\xff\x00\xff\x80\x7f\xff",
  ):
    total = 0.0
    for byte in range(256):
      text = context + bytes([byte])
      total += all_orders(train, text, order)[order][-1]
    assert total == pytest.approx(1, abs=1e-12)


def test_high_bytes_at_the_highest_order():
  # The code of 8 bytes uses the top bit of 64.
  train = bytes(range(200, 256)) * 2
  p = all_orders(train, bytes(range(247, 256)), 7)[7]
  assert p[-1] > 0.5


def test_tiny_and_empty_texts():
  for train, text in ((b"", b"abc"), (b"a", b"abc"), (b"abc", b"a")):
    for p in all_orders(train, text, 7):
      assert len(p) == len(text)
      assert np.all((p > 0) & (p <= 1))


def test_first_byte_is_not_scored():
  train = as_bytes(b"ab" * 50)
  calls = []
  bits = byte_models.bits_per_byte(
    train, as_bytes(b"zab"), 1, progress=lambda: calls.append(1)
  )
  assert len(calls) == 2  # one for each order
  p = all_orders(b"ab" * 50, b"zab", 1)
  assert bits[1] == pytest.approx(-np.log2(p[1][1:]).mean())


def test_compressors():
  sizes = byte_models.compressed_bits_per_byte(b"abcd" * 10_000)
  assert set(sizes) == {"gzip -9", "xz -9"}
  assert all(0 < bits < 0.1 for bits in sizes.values())


def test_order_out_of_range():
  with pytest.raises(ValueError, match="max_order=8"):
    list(byte_models.witten_bell(as_bytes(b"a"), as_bytes(b"a"), 8))
