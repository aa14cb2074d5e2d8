"""The ranks of one host tell each other what they need, and fetch each byte of it once."""
