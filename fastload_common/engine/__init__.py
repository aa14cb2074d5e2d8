"""What adapters of engines have in common: how they hold on to an engine, and what they say.

Knows no engine: each adapter says which one it is. Nothing here imports torch or an SDK when it
is imported; an engine loads these modules in each of its processes.
"""
