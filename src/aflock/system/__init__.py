"""The operating system's side: files, memory, threads, compiled code, optional packages, rows on disk."""
