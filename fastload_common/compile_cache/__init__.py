"""Keeps what an engine compiled, so that the next start with the same key need not compile.

Knows keys, bundles, digests, signatures and stores. Knows no engine, imports no torch, and never
unpickles: what lies in a bundle is bytes.
"""
