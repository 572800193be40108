"""Benchmarks of all that moves KV, each beside what the hardware can do: ``kvxfer bench``."""
