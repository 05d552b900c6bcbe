"""RWKV-7: the delta rule with a decay and a rate of every channel."""
