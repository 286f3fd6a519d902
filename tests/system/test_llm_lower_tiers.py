"""Cached prefixes below the device with a real model on the CPU, in fp32: without a cache, with one
in the pool alone, in host memory, and found on disk after a restart, ids are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from test_llm_prefix_cache import workload
from tiny import TinyModel, assert_idle, greedy, random_prompts

from pico_vllm import LLM
from pico_vllm.cache.tiers.lower import LowerTiers
from pico_vllm.engine import loading
from pico_vllm.errors import ConfigError

SETTINGS: dict[str, Any] = tiny.FIXTURE_T | {"num_kv_blocks": 8, "max_model_len": 96}
SMALL_GB = 2e-5


def tiers_of(llm: LLM) -> LowerTiers:
    """With no load too small, as computing this model takes no time."""
    tiers = llm.engine._scheduler._prefixes.cache.tiers
    assert isinstance(tiers, LowerTiers)
    tiers._min_host_tokens = tiers._min_disk_tokens = 1
    return tiers


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_all_tiers_give_the_same_ids(tiny_model: TinyModel, tmp_path: Path, overlap: str) -> None:
    """Workloads with much in common, twice each, in a pool that holds a part of them."""
    prompts, params = workload(3)
    folder = str(tiny_model.folder)

    def answers(llm: LLM) -> list[list[int]]:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert_idle(llm)
        return found

    with LLM(folder, **SETTINGS, enable_prefix_caching=False) as llm:
        wanted = answers(llm)
    with LLM(folder, **SETTINGS, overlap=overlap, kv_host_gb=0.01) as llm:
        tiers = tiers_of(llm)
        assert [answers(llm) for _ in range(2)] == [wanted] * 2
        assert tiers.counters.num_loaded_blocks > 10
    on_disk = SETTINGS | {"kv_disk_path": tmp_path / "kv", "kv_host_gb": SMALL_GB}
    with LLM(folder, **on_disk, overlap=overlap, kv_disk_gb=0.01) as llm:
        tiers = tiers_of(llm)
        assert tiers.host.num_blocks < 8
        assert [answers(llm) for _ in range(2)] == [wanted] * 2
    assert tiers.counters.num_written_blocks > 10
    with LLM(folder, **on_disk, overlap=overlap, kv_disk_gb=0.01) as llm:
        tiers = tiers_of(llm)
        (last,) = llm.generate(prompts[-1], params[-1])
        assert last.outputs[0].token_ids == wanted[-1]
        # Also what the pool had when the first engine ended.
        assert last.num_cached_tokens == (len(prompts[-1]) - 1) // 16 * 16
        assert answers(llm) == wanted
        assert tiers.counters.num_read_blocks > 3 and tiers.counters.num_failed_reads == 0
    (path,) = (tmp_path / "kv").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    with LLM(folder, **(on_disk | {"block_size": 8}), kv_disk_gb=0.01) as llm:
        assert tiers_of(llm).disk is not None and len(tiers_of(llm).disk or ()) == 0


def test_a_disk_that_fails(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A full disk costs the tier and no answer, and is logged once."""

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    prompts = random_prompts([60] * 4, seed=8)
    with LLM(str(tiny_model.folder), **SETTINGS, enable_prefix_caching=False) as llm:
        wanted = llm.generate(prompts, greedy(8))
    settings = SETTINGS | {"kv_host_gb": SMALL_GB, "kv_disk_path": str(tmp_path)}
    with LLM(str(tiny_model.folder), **settings) as llm:
        tiers = tiers_of(llm)
        monkeypatch.setattr("pico_vllm.cache.tiers.disk.os.pwritev", full)
        for _ in range(3):
            outputs = llm.generate(prompts, greedy(8))
            assert [each.outputs for each in outputs] == [each.outputs for each in wanted]
    assert tiers.disk is not None and not tiers.disk.is_alive
    assert [each.message.split()[0] for each in caplog.records] == ["kv_disk_disabled"]


def test_settings_that_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Each error names the setting, its value and the way out."""
    folder = str(tiny_model.folder)
    file = tmp_path / "file"
    file.touch()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kv_host_gb": -1}, "kv_host_gb must be a number of GiB from 0"),
        ({"kv_host_gb": float("nan")}, "kv_host_gb must be"),
        ({"kv_host_gb": 1e-9}, "kv_host_gb 1e-09 is 1 bytes, and a block of 16 tokens takes"),
        ({"kv_host_gb": 1e6}, "of host memory are free; lower it"),
        ({"kv_disk_gb": 0}, "kv_disk_gb must be a number of GiB above 0"),
        ({"kv_disk_gb": 4}, "kv_disk_gb is 4, but no kv_disk_path says where; give it, or leave"),
        ({"kv_disk_path": ""}, "kv_disk_path must name a folder"),
        ({"kv_disk_path": str(tmp_path), "kv_host_gb": 0}, "leave kv_host_gb out for 1 GiB"),
        ({"kv_disk_path": str(tmp_path), "kv_disk_gb": 1e-9}, "kv_disk_gb gives 1 bytes"),
        ({"kv_disk_path": str(file)}, "kv_disk_path .* must name a folder, and it is a file"),
        ({"kv_host_gb": 1, "enable_prefix_caching": False}, "kv_host_gb keeps cached prefixes"),
        ({"kv_disk_path": "x", "kv": "contiguous", "num_kv_blocks": None}, "kv_disk_path keeps"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            LLM(folder, **(SETTINGS | settings))
    on_disk = SETTINGS | {"kv_disk_path": str(tmp_path), "kv_host_gb": SMALL_GB}
    with LLM(folder, **on_disk), pytest.raises(ConfigError, match="in use by another engine"):
        LLM(folder, **on_disk)


def test_a_folder_is_refused_before_the_weights_are_read(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models take minutes to read."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("weights were read"))
    settings = SETTINGS | {"kv_disk_path": str(tmp_path / "file" / "kv")}
    with pytest.raises(ConfigError, match=r"kv_disk_path .* must name a folder, and .* is a file"):
        LLM(str(tiny_model.folder), **settings)
