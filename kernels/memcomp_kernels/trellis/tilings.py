"""Sizes that change the speed of Trellis, never its result."""


def tiles_for_packing(whole: int) -> int:
  """Tiles reserved for packed rows that would fill `whole` tiles unpacked.

  A row may be cut into about a quarter as many segments as it has tiles before
  it is scanned by token instead: documents of four chunks on average.
  """
  return whole + whole // 4 + 4
