"""From the web, a package or a disk to arrays: sources, archives, checksums, the cache."""
