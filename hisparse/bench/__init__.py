"""Benchmarks that run on whatever GPU there is: ``hisparse bench``."""
