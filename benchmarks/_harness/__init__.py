"""Parts that several benchmarks share: timing, memory, images, networks, rival libraries."""
