"""What the prefix cache found in each tier, and what moved between them: flat, for any line. Host
only.

`down` is evicted and in the tier below, `away` is evicted and gone.
"""

from __future__ import annotations

from typing import Any

from pico_vllm.cache.prefix_cache import CacheStats


def tier_figures(stats: CacheStats) -> dict[str, Any]:
    """None is of a tier that is not there, or bytes that nobody knows."""
    below, moved = stats.below, stats.below.so_far
    figures: dict[str, Any] = {
        "device_hit_tokens": stats.num_device_hit_tokens,
        "device_hit_blocks": stats.num_device_hit_blocks,
        "device_hit_rate": stats.device_hit_rate,
        "device_blocks": stats.num_blocks,
        "device_cached_blocks": stats.num_cached_blocks,
        "device_down_blocks": moved.num_lowered_blocks,
        "device_away_blocks": stats.num_evicted_blocks - moved.num_lowered_blocks,
    }
    of_host: dict[str, Any] = {
        "host_hit_tokens": stats.num_host_hit_tokens,
        "host_hit_blocks": stats.num_host_hit_blocks,
        "host_hit_rate": stats.host_hit_rate,
        "host_down_blocks": moved.num_host_evicted_blocks - moved.num_host_lost_blocks,
        "host_away_blocks": moved.num_host_lost_blocks,
        "host_blocks": below.num_host_blocks,
        "host_cached_blocks": below.num_host_cached_blocks,
        "stored_blocks": moved.num_stored_blocks,
        "stored_bytes": moved.num_stored_blocks * below.block_bytes,
        "loaded_blocks": moved.num_loaded_blocks,
        "loaded_bytes": moved.num_loaded_blocks * below.block_bytes,
        "dropped_blocks": moved.num_dropped_blocks,
    }
    of_disk: dict[str, Any] = {
        "disk_hit_tokens": stats.num_disk_hit_tokens,
        "disk_hit_blocks": stats.num_disk_hit_blocks,
        "disk_hit_rate": stats.disk_hit_rate,
        "disk_away_blocks": moved.num_disk_evicted_blocks,
        "disk_blocks": below.num_disk_blocks,
        "disk_cached_blocks": below.num_disk_cached_blocks,
        "written_blocks": moved.num_written_blocks,
        "written_bytes": moved.num_written_blocks * below.block_bytes,
        "read_blocks": moved.num_read_blocks,
        "read_bytes": moved.num_read_blocks * below.block_bytes,
        "unwritten_blocks": moved.num_unwritten_blocks,
        "failed_reads": moved.num_failed_reads,
        "damaged_blocks": moved.num_damaged_blocks,
    }
    if not below.block_bytes:
        for figures_of in (of_host, of_disk):
            figures_of.update((key, None) for key in figures_of if key.endswith("_bytes"))
    if not below.num_host_blocks:
        of_host = dict.fromkeys(of_host)
    if not below.num_disk_blocks:
        of_disk = dict.fromkeys(of_disk)
    return figures | of_host | of_disk
