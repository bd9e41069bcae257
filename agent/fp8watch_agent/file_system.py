"""Kind of file system that a folder lies on: memory that is mapped from a server's makes who stores into it wait for the server.

Thread:     the one that attaches
"""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

LOCAL = frozenset(
    {
        "apfs", "bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "nilfs2", "overlay",
        "ramfs", "reiserfs", "rootfs", "tmpfs", "ubifs", "xfs", "zfs",
    }
)  # fmt: skip
"""Kinds whose pages are the kernel's own. All others may be a server's, or a process's: NFS, Lustre, GPFS, FUSE, 9p …"""


def kind_of(folder: Path) -> str:
    """The kind, as the kernel calls it; empty where it does not say."""
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        at = folder.resolve()
    except (OSError, RuntimeError):
        return ""
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        parts = before.split(" ")
        if len(parts) < 5 or not behind:
            continue
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), parts[4]))
        depth = len(mounted.parts)
        if depth >= best and at.is_relative_to(mounted):  # of two on one place the later one is seen
            best, kind = depth, behind.split(" ")[0]
    return kind


def maps_well(folder: Path) -> bool:
    """Whether to store into memory that is mapped from a file there waits for nobody; so it is taken where nothing is known."""
    return kind_of(folder) in LOCAL | {""}
