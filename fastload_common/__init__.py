"""The shared layer of fastload: engine-neutral, imports no engine."""

__version__ = "0.1.0.dev0"
