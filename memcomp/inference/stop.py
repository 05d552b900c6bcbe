"""Stop strings and end tokens: they end a text and are never shown.

The device detects them token by token. An automaton over bytes (Aho and
Corasick, 1975) tracks which beginnings of stop strings the text ends with. So
stop strings may span tokens and characters that span tokens. A special token in
one of them is a symbol of its own, and parts the text for all of them; other
special tokens are nothing. Combined with the symbols of every token the
automaton becomes one table [nodes, vocab], which costs one look-up per token in
the compiled loop.
"""

import codecs
import collections
import re
from collections.abc import Sequence

import numpy as np

from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib

_BYTES = 256
"""Symbols of bytes; special tokens in stop strings have those from here on."""


def make(
  strings: Sequence[str], tokenizer: tokenizer_lib.Tokenizer
) -> "Stops | None":
  """Returns a matcher for `strings` and the tokenizer's end tokens, or None.

  Raises:
    UserError: a string is empty.
  """
  return Stops(strings, tokenizer) if strings or tokenizer.ends else None


class Stops:
  """Stop strings and end tokens for one tokenizer.

  A stop string may be bytes, which need not be UTF-8.

  Attributes:
    table: int32 `[nodes, vocab]`, the node after a token.
    final: bool `[nodes]`, whether a stop string is complete at or before it.
    ids: the tokenizer's end tokens, and special tokens that are stop strings;
      they represent no bytes.
  """

  def __init__(
    self, strings: Sequence[str | bytes], tokenizer: tokenizer_lib.Tokenizer
  ):
    """Builds the automaton.

    Args:
      strings: stop strings.
      tokenizer: the model's tokenizer.

    Raises:
      UserError: a string is empty, or nothing ends a text.
    """
    if not all(strings) or not (strings or tokenizer.ends):
      raise errors.UserError(
        "a stop string is empty: give at least one character, or none at all"
      )
    self.ids, patterns = set(tokenizer.ends), []
    self._tokenizer, self._symbols = tokenizer, {}
    for string in strings:
      parts = (
        [string] if isinstance(string, bytes) else _parts(tokenizer, string)
      )
      if len(parts) == 1 and isinstance(parts[0], int):
        self.ids.add(parts[0])
        continue
      pattern: list[int] = []
      for part in parts:
        if isinstance(part, int):
          symbol = self._symbols.setdefault(part, _BYTES + len(self._symbols))
          pattern.append(symbol)
        else:
          pattern += part
      patterns.append(pattern)
    width = _BYTES + len(self._symbols)
    self._goto, self._depth, self._matched = _automaton(patterns, width)
    self.final = self._matched >= 0
    self.table = self._by_token(tokenizer.vocab_size)
    if self.ids:
      end = len(self.final)
      self.final = np.append(self.final, True)
      self.table = np.pad(self.table, ((0, 1), (0, 0)), constant_values=end)
      self.table[:, sorted(self.ids)] = end
    # A power of two limits the number of compiled programs.
    spare = (1 << (len(self.final) - 1).bit_length()) - len(self.final)
    self.final = np.pad(self.final, (0, spare))
    self.table = np.pad(self.table, ((0, spare), (0, 0)))

  def _by_token(self, vocab_size: int) -> np.ndarray:
    pieces = [self.spell(token) for token in range(vocab_size)]
    lengths = np.array([len(piece) for piece in pieces])
    width = int(lengths.max(initial=0))
    spelled = np.zeros((len(pieces), width), np.uint16)
    for row, piece in zip(spelled, pieces, strict=True):
      row[: len(piece)] = list(piece)
    nodes = np.arange(len(self._goto), dtype=np.int32)
    table = np.repeat(nodes[:, None], len(pieces), axis=1)
    for place in range(width):
      longer = np.flatnonzero(lengths > place)
      table[:, longer] = self._goto[table[:, longer], spelled[longer, place]]
    return table

  def spell(self, token: int) -> Sequence[int]:
    """Returns a token's bytes, or its symbol if a stop string has it."""
    if token in self._symbols:
      return [self._symbols[token]]
    return self._tokenizer.token_bytes(token)

  def advance(self, node: int, symbol: int) -> tuple[int, int, int]:
    """Reads one symbol of a text.

    Returns:
      The next node; the number of trailing bytes that may become a stop string;
      and the bytes of the longest complete stop string, or -1.
    """
    node = int(self._goto[node, symbol])
    return node, int(self._depth[node]), int(self._matched[node])


class Text:
  """Decodes tokens to text as they come, up to a stop string.

  It holds back bytes that may become a stop string, and the first bytes of a
  character until it is complete.

  Attributes:
    node: row of `Stops.table` after the bytes so far.
    stopped: whether a stop string or end token has come.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    stops: Stops | None = None,
    rest: bytes = b"",
  ):
    """Starts an empty text, or goes on with one that left this `rest`.

    Args:
      tokenizer: the model's tokenizer.
      stops: what ends the text.
      rest: `rest()` of the text so far. It decides what the next bytes may
        complete, so no other bytes are needed. A stop string of which a special
        token has come already is not found.
    """
    self._tokenizer = tokenizer
    self._stops = stops
    self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    self._held = bytearray(rest)
    self.node = 0
    self.stopped = False
    if stops is not None:
      for byte in rest:
        self.node, _, matched = stops.advance(self.node, byte)
        if matched >= 0:
          # The stop strings changed after this text was held back. The text
          # stays, and matching begins anew.
          self.node = 0

  def push(self, token: int) -> str:
    """Returns the text that is certain after `token`; may be empty."""
    if self.stopped:
      return ""
    if self._stops is None:
      self._held += self._tokenizer.token_bytes(token)
      return self._give(len(self._held))
    if token in self._stops.ids:
      self.stopped = True
      return self._give(len(self._held))
    depth = len(self._held)
    for symbol in self._stops.spell(token):
      if symbol < _BYTES:
        self._held.append(symbol)
      self.node, depth, matched = self._stops.advance(self.node, symbol)
      if matched >= 0:
        del self._held[len(self._held) - matched :]
        self.stopped, depth = True, 0
        break
    return self._give(len(self._held) - depth)

  def rest(self) -> bytes:
    """Returns the bytes that are held back."""
    return self._decoder.getstate()[0] + bytes(self._held)

  def finish(self) -> str:
    """Returns the remaining text; invalid UTF-8 becomes U+FFFD."""
    return self._give(len(self._held)) + self._decoder.decode(b"", final=True)

  def _give(self, count: int) -> str:
    piece = bytes(self._held[:count])
    del self._held[:count]
    return self._decoder.decode(piece)


def _parts(
  tokenizer: tokenizer_lib.Tokenizer, string: str
) -> list[bytes | int]:
  """Splits a string into special tokens and the bytes between them."""
  known: dict[str, int] = {}
  if isinstance(tokenizer, tokenizer_lib.JsonTokenizer):
    known = tokenizer.special
  ids = tokenizer.encode(string).tolist()  # raises if it is no UTF-8
  found = {name: known[name] for name in known if name in string}
  if not found:
    return [string.encode()]
  # A token may take the spaces beside it.
  if len(ids) == 1 and ids[0] in found.values():
    return ids
  # A name may begin with another.
  longest_first = sorted(found, key=len, reverse=True)
  either = "|".join(re.escape(name) for name in longest_first)
  parts = filter(None, re.split(f"({either})", string))
  return [found[part] if part in found else part.encode() for part in parts]


def _automaton(
  patterns: Sequence[Sequence[int]], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns next nodes [nodes, width], and each node's depth and match.

  A node is the longest beginning of a pattern that the text ends with; 0 is
  empty. Its depth is the number of bytes in it. Its match is the number of
  bytes of a complete pattern, or -1. A node with a match is never left.
  """
  children: list[dict[int, int]] = [{}]
  depth, matched = [0], [-1]
  for pattern in patterns:
    node = 0
    for symbol in pattern:
      if symbol not in children[node]:
        children[node][symbol] = len(children)
        children.append({})
        depth.append(depth[node] + (symbol < _BYTES))
        matched.append(-1)
      node = children[node][symbol]
    matched[node] = depth[node]
  goto = np.zeros((len(children), width), np.int32)
  fail = [0] * len(children)
  queue = collections.deque([0])
  while queue:  # breadth first, so that fail[node] is already complete
    node = queue.popleft()
    if matched[node] < 0:
      matched[node] = matched[fail[node]]
    goto[node] = goto[fail[node]]
    for symbol, child in children[node].items():
      fail[child] = int(goto[node, symbol]) if node else 0
      goto[node, symbol] = child
      queue.append(child)
  for node, length in enumerate(matched):
    if length >= 0:
      goto[node] = node
  return goto, np.array(depth), np.array(matched)
