"""The list of tests that are left out by default."""


def test_names_tests(unknown_slow_tests):
  assert not unknown_slow_tests
