"""The bytes of each token in a tokenizer.json."""

from collections.abc import Callable, Sequence
from typing import Any

_MARK = "\U0010ffff"
"""A token of no vocabulary, and of no meaning to a decoder."""


def make(
  spec: dict[str, Any],
  vocab: dict[str, int],
  size: int,
  decode: Callable[[list[str]], str],
) -> list[bytes]:
  """Returns the bytes of each id; special tokens have none.

  The library only decodes whole sequences, without bytes that are no whole
  character. So the bytes of such tokens come from their spelling. Those of all
  others are the text that the library's decoder makes of them between tokens.

  Args:
    spec: content of the tokenizer.json.
    vocab: ids of all tokens.
    size: number of ids.
    decode: makes the text of a sequence of tokens, as the library does.

  Raises:
    ValueError: the text of a token depends on the tokens beside it.
  """
  parts = _parts(spec.get("pre_tokenizer")) | _parts(spec.get("decoder"))
  table = [b""] * size
  others = []
  for token, index in vocab.items():
    if "ByteLevel" in parts and all(c in _BYTE_OF_CHARACTER for c in token):
      table[index] = bytes(_BYTE_OF_CHARACTER[c] for c in token)
    elif "ByteFallback" in parts and _is_byte_token(token):
      table[index] = bytes.fromhex(token[3:5])
    elif "Metaspace" in parts and not spec.get("decoder"):
      # The tokens have their spaces, so the library's own are too many.
      space = parts["Metaspace"]["replacement"]
      table[index] = token.replace(space, " ").encode()
    else:
      others.append(token)
  for token, text in zip(others, _texts(others, decode), strict=True):
    table[vocab[token]] = text.encode()
  for added in spec.get("added_tokens") or ():
    if added["special"]:
      table[added["id"]] = b""
    elif "ByteLevel" in parts:  # it is not spelled as bytes
      table[added["id"]] = added["content"].encode()
  return table


def _texts(
  tokens: Sequence[str], decode: Callable[[list[str]], str]
) -> list[str]:
  """Returns the text that each token adds between two others."""
  between = [_MARK, _MARK]
  for token in tokens:
    between += [token, _MARK]
  texts = decode(between).split(_MARK)
  if len(texts) != len(tokens) + 3:
    raise ValueError("it joins or drops tokens")
  _, space, *texts, _ = texts
  # What stands before a mark may be the mark's, as the space of a word.
  return [text.removesuffix(space) for text in texts]


def _parts(part: Any) -> dict[str, dict[str, Any]]:
  """Returns every object with a "type" in a part of a tokenizer.json, by it."""
  found = {}
  if isinstance(part, dict):
    if isinstance(part.get("type"), str):
      found[part["type"]] = part
    part = list(part.values())
  if isinstance(part, list):
    for one in part:
      found |= _parts(one)
  return found


def _is_byte_token(token: str) -> bool:
  return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _byte_of_character() -> dict[str, int]:
  """Returns the inverse of GPT-2's printable spelling of bytes.

  Printable bytes stand for themselves, the others for U+0100 and on.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in printable]
  table = {chr(b): b for b in printable}
  table.update({chr(256 + i): b for i, b in enumerate(others)})
  return table


_BYTE_OF_CHARACTER = _byte_of_character()
