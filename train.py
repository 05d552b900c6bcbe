"""`memcomp train` in a clone: python train.py --help says how."""

from memcomp.commands import train

if __name__ == "__main__":
  train.main()
