"""The dtype table against the installed reference reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from fastload_common.checkpoint.dtypes import DTYPE_BITS
from fastload_common.testing.checkpoints import TensorSpec, encode_file


def test_f09_table_has_exactly_the_dtypes_of_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(encode_file({"a": TensorSpec("F7", (1,), b"\0")}))
    with pytest.raises(SafetensorError) as caught:
        safe_open(path, "np")
    # "unknown variant `F7`, expected one of `BOOL`, `F4`, ..."
    known = re.findall(r"`(\w+)`", str(caught.value).split("expected one of")[1])
    assert set(known) == set(DTYPE_BITS)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_f09_width_is_the_one_of_the_reference(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    # 24 elements end at a byte in every width.
    path.write_bytes(encode_file({"a": TensorSpec(dtype, (24,), bytes(3 * DTYPE_BITS[dtype]))}))
    with safe_open(path, "np") as file:
        assert file.get_slice("a").get_dtype() == dtype
