"""Stop strings and end tokens: they end a text and are never shown.

The device detects them token by token. An automaton over bytes (Aho and
Corasick, 1975) tracks which beginnings of stop strings the text ends with. So
stop strings may span tokens and characters that span tokens. Combined with the
bytes of every token it becomes one table [nodes, vocab], which costs one
look-up per token in the compiled loop.
"""

import codecs
import collections
from collections.abc import Sequence

import numpy as np

from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib


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
    for string in strings:
      if isinstance(string, bytes):
        patterns.append(string)
        continue
      special = _special(tokenizer, string)
      if special is None:
        patterns.append(string.encode())
      else:
        self.ids.add(special)
    self._goto, self._depth, self._matched = _automaton(patterns)
    self.final = self._matched > 0
    self.table = self._by_token(tokenizer)
    if self.ids:
      end = len(self.final)
      self.final = np.append(self.final, True)
      self.table = np.pad(self.table, ((0, 1), (0, 0)), constant_values=end)
      self.table[:, sorted(self.ids)] = end
    # A power of two limits the number of compiled programs.
    spare = (1 << (len(self.final) - 1).bit_length()) - len(self.final)
    self.final = np.pad(self.final, (0, spare))
    self.table = np.pad(self.table, ((0, spare), (0, 0)))

  def _by_token(self, tokenizer) -> np.ndarray:
    pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    lengths = np.array([len(piece) for piece in pieces])
    width = int(lengths.max(initial=0))
    spelled = np.zeros((len(pieces), width), np.uint8)
    for row, piece in zip(spelled, pieces, strict=True):
      row[: len(piece)] = list(piece)
    nodes = np.arange(len(self._goto), dtype=np.int32)
    table = np.repeat(nodes[:, None], len(pieces), axis=1)
    for place in range(width):
      longer = np.flatnonzero(lengths > place)
      table[:, longer] = self._goto[table[:, longer], spelled[longer, place]]
    return table

  def advance(self, node: int, byte: int) -> tuple[int, int, int]:
    """Reads one byte of a text.

    Returns:
      The next node; the number of trailing bytes that may become a stop string;
      and the bytes of the longest complete stop string, or 0.
    """
    node = int(self._goto[node, byte])
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
        complete, so no other bytes are needed.
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
        if matched:
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
    self.stopped = token in self._stops.ids
    depth = 0 if self.stopped else len(self._held)
    for byte in self._tokenizer.token_bytes(token):
      self._held.append(byte)
      self.node, depth, matched = self._stops.advance(self.node, byte)
      if matched:
        del self._held[-matched:]
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


def _special(tokenizer: tokenizer_lib.Tokenizer, string: str) -> int | None:
  """Returns the special token that this string names, or None."""
  ids = tokenizer.encode(string)
  if len(ids) != 1 or not isinstance(tokenizer, tokenizer_lib.JsonTokenizer):
    return None
  # One without bytes may also stand for all that the tokenizer does not know.
  spelled = tokenizer.token_bytes(int(ids[0]))
  named = tokenizer.decode(ids, special=True) == string
  return int(ids[0]) if named and not spelled else None


def _automaton(
  patterns: Sequence[bytes],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns next nodes [nodes, 256], and each node's depth and matched bytes.

  A node is the longest beginning of a pattern that the text ends with; 0 is
  empty. A node with a complete pattern is never left.
  """
  children: list[dict[int, int]] = [{}]
  depth, matched = [0], [0]
  for pattern in patterns:
    node = 0
    for byte in pattern:
      if byte not in children[node]:
        children[node][byte] = len(children)
        children.append({})
        depth.append(depth[node] + 1)
        matched.append(0)
      node = children[node][byte]
    matched[node] = len(pattern)
  goto = np.zeros((len(children), 256), np.int32)
  fail = [0] * len(children)
  queue = collections.deque([0])
  while queue:  # breadth first, so that fail[node] is already complete
    node = queue.popleft()
    matched[node] = matched[node] or matched[fail[node]]
    goto[node] = goto[fail[node]]
    for byte, child in children[node].items():
      fail[child] = int(goto[node, byte]) if node else 0
      goto[node, byte] = child
      queue.append(child)
  for node, length in enumerate(matched):
    if length:
      goto[node] = node
  return goto, np.array(depth), np.array(matched)
