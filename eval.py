"""`memcomp eval` in a clone: python eval.py --help says how."""

from memcomp.commands import evaluate

if __name__ == "__main__":
  evaluate.main()
