"""Entries of kept weights by themselves: a flipped bit is noticed, and a full disk leaves nothing."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from espalier.engine.models import load_cache
from espalier.engine.models.load_cache import LoadCache
from espalier.kernels.linear import Kept

NAME = "0" * 32


@pytest.fixture
def kept() -> Kept:
    random = torch.Generator().manual_seed(0)
    return Kept(
        {
            "values": torch.randint(-128, 128, (300, 4099), dtype=torch.int8, generator=random),
            "scales": torch.randn(301, generator=random),
            "nothing": torch.empty(0, 3),
        },
        {"weight bytes": 12, "taken": ["a", "b"], "warnings": []},
    )


@pytest.fixture
def cache(tmp_path: Path) -> LoadCache:
    return LoadCache(tmp_path / "kept", least_bytes=0)


def is_same(found: Kept, kept: Kept) -> bool:
    same = found.facts == kept.facts and list(found.tensors) == list(kept.tensors)
    return same and all(torch.equal(found.tensors[name], kept.tensors[name]) for name in kept.tensors)


def test_no_flipped_bit_gives_another_model(cache: LoadCache, kept: Kept):
    cache.write(NAME, kept)
    ((file, _),) = cache.entries()
    whole, draw = file.read_bytes(), np.random.default_rng(0)
    found = cache.read(NAME)
    assert found is not None
    assert is_same(found, kept)
    everywhere = draw.integers(0, len(whole), 150).tolist()
    missed = 0
    for at in [*range(0, 330, 2), *everywhere, len(whole) - 1]:
        changed = bytearray(whole)
        changed[at] ^= 1 << int(draw.integers(8))
        file.write_bytes(changed)
        found = cache.read(NAME)
        missed += found is not None
        assert found is None or is_same(found, kept), at  # between tensors lies nothing
    assert missed < 40
    values = whole.index(kept.tensors["values"].numpy().tobytes())
    for start, length in ((values + 5000, 4096), (values + 300 * 4099 - 512, 512)):  # a sector of zeros
        file.write_bytes(whole[:start] + bytes(length) + whole[start + length :])
        assert cache.read(NAME) is None
    cache.write(NAME, kept)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("where", ["os.fsync", "os.replace", "tempfile.mkstemp", "_write"])
def test_a_full_disk_keeps_nothing_and_is_told(
    where: str, cache: LoadCache, kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(load_cache, where, full) if where == "_write" else monkeypatch.setattr(where, full)
    with caplog.at_level(logging.INFO, "espalier.engine"):
        cache.write(NAME, kept)
    assert f"weights are not kept in {cache.folder}: [Errno 28] No space left on device" in caplog.text
    assert cache.read(NAME) is None
    assert not list(cache.folder.iterdir())
