"""Benchmarks that run on whatever device there is: ``hisparse bench``."""
