"""The bytes of each token in a tokenizer.json."""

from typing import Any


def make(spec: dict[str, Any], vocab: dict[str, int], size: int) -> list[bytes]:
  """Returns the bytes of each id; special tokens have none.

  The library only decodes whole sequences. So the bytes of a token come from
  its spelling, which depends on the decoder.
  """
  kinds = _types(spec.get("decoder")) | _types(spec.get("pre_tokenizer"))
  table = [b""] * size
  for token, index in vocab.items():
    if "ByteLevel" in kinds and all(c in _BYTE_OF_CHARACTER for c in token):
      table[index] = bytes(_BYTE_OF_CHARACTER[c] for c in token)
    elif "ByteFallback" in kinds and _is_byte_token(token):
      table[index] = bytes.fromhex(token[3:5])
    elif "WordPiece" in kinds:
      word = token[2:] if token.startswith("##") else " " + token
      table[index] = word.encode()
    else:
      table[index] = token.replace("\u2581", " ").encode()
  for added in spec.get("added_tokens") or ():
    text = b"" if added["special"] else added["content"].encode()
    table[added["id"]] = text
  return table


def _types(part: Any) -> set[str]:
  """Returns every "type" in a part of a tokenizer.json."""
  if isinstance(part, dict):
    own = {part["type"]} if isinstance(part.get("type"), str) else set()
    return own.union(*map(_types, part.values()))
  if isinstance(part, list):
    return set().union(*map(_types, part))
  return set()


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
