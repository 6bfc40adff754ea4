"""The parts of `benchmarks/grid.py`: packs, cells, variants of methods, what is measured, the work, the reports."""
