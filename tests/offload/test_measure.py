"""Links are measured with both directions busy, and an error in one ends the other."""

from __future__ import annotations

import time

import pytest

from overspill.offload.measure import _links, raw_disk_links


def test_an_error_in_one_direction_ends_the_measurement() -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        _links(fail, lambda: time.sleep(0.001))


def test_both_directions_are_timed(tmp_path) -> None:
    links = raw_disk_links(str(tmp_path))
    assert set(links) == {"ram>disk", "disk>ram"}
    assert all(link.bandwidth_bytes_per_s > 0 for link in links.values())
    assert not list(tmp_path.iterdir())
