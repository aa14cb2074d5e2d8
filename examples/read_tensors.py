"""Read a few tensors of a model in S3 without downloading it.

    python examples/read_tensors.py s3://models/qwen3-8b '*norm.weight'

Reads the headers (two small requests a shard at most), then exactly the bytes of the tensors
whose names match. Needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
from fnmatch import fnmatchcase

import torch

from fastload_common.config import load_settings
from fastload_common.load.open_model import open_checkpoint
from fastload_common.source.registry import open_source
from fastload_common.trace.dtypes import torch_layout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("uri", help="s3://bucket/prefix, file:///directory, or a path")
    parser.add_argument("pattern", help="glob of tensor names, such as '*norm.weight'")
    arguments = parser.parse_args()

    settings = load_settings()
    with contextlib.closing(open_source(arguments.uri, settings)) as source:
        checkpoint = open_checkpoint(source, settings)
        for name, entry in checkpoint.entries.items():
            if not fnmatchcase(name, arguments.pattern) or not entry.byte_range.size_bytes:
                continue
            data = source.read(entry.object_id, entry.byte_range)
            dtype, shape = torch_layout(entry)
            tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
            values = tensor.float()
            print(
                f"{name}: {dtype} {list(shape)}, mean {values.mean():.4g}, std {values.std():.4g}"
            )


if __name__ == "__main__":
    main()
